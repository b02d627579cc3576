"""A C++ compiler for the tests: the machine's compiler, without optimization and with precompiled headers.

Optimization takes most of a kernel's compile time, and does not change which elements a kernel multiplies. Its kernels lie in
folders of their own. A test with the fixture ``shipped_compiler`` compiles as users do, into the folder ``shipped``.
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
*-O*-shared*) ;;
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
"""Wrapper script. A compiler tries each file in ``headers.h.gch``, and reads the header itself if none has its flags."""


def put_on_path(folder: Path) -> None:
    """Create the compiler in ``folder`` and put it first on PATH. Do nothing if the machine has no compiler."""
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
    """Return PATH without the tests' compiler."""
    folders = os.environ["PATH"].split(os.pathsep)
    made = shutil.which(COMPILERS[0])
    own = str(Path(made).parent) if made and (Path(made).parent / "headers.h").exists() else None
    return os.pathsep.join(folder for folder in folders if folder != own)
