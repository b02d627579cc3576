"""A C++ compiler for the tests: that of the machine, told not to optimize and to read the large headers once.

Optimization is most of what a kernel's compilation costs, and which element is multiplied by which does not depend on it. What is
compiled carries the name of this compiler in its digest. A test with the fixture ``shipped_compiler`` compiles as users do.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gemmtune.backends.cpp.compiler import COMPILERS, find_compiler

__all__ = ["put_on_path", "shipped_path"]

_HEADERS = """\
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
"""
_WRAPPER = """\
#!/bin/sh
case "$*" in
*--version*) echo "{version}, not optimizing"; exit;;
*-shared*) ;;
*) exec {compiler} "$@";;
esac
flags=
for argument; do case $argument in -[fmps]*) flags="$flags $argument";; esac; done
headers={folder}/headers.h.gch/$(echo $flags | cksum | tr ' ' -)
if [ ! -e "$headers" ]; then
  {compiler} $flags -O0 -w -x c++-header {folder}/headers.h -o {folder}/$$.gch && mv {folder}/$$.gch "$headers"
fi
exec {compiler} "$@" -O0 -w -include {folder}/headers.h
"""
"""A compiler tries each file in ``headers.h.gch``, and reads the header itself where none was made with its flags."""


def put_on_path(folder: Path) -> None:
    """Make the compiler in ``folder`` and put it first on PATH; nothing where the machine has none."""
    found = find_compiler()
    if found is None:
        return
    (folder / "headers.h.gch").mkdir(parents=True)
    (folder / "headers.h").write_text(_HEADERS)
    wrapper = folder / COMPILERS[0]
    wrapper.write_text(_WRAPPER.format(compiler=found.path, version=found.version, folder=folder))
    wrapper.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def shipped_path() -> str:
    """PATH without that compiler."""
    folders = os.environ["PATH"].split(os.pathsep)
    made = shutil.which(COMPILERS[0])
    own = str(Path(made).parent) if made and (Path(made).parent / "headers.h").exists() else None
    return os.pathsep.join(folder for folder in folders if folder != own)
