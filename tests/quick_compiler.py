"""C++ compilers for the tests: the machine's compiler, without optimization, and for our kernels with precompiled headers.

Optimization takes most of a kernel's compile time, and does not change which elements a kernel multiplies. Its kernels lie in
folders of their own. A test with the fixture ``shipped_compiler`` compiles as users do, into the folder ``shipped``. Inductor's
code is torch's, so it is not optimized either. Its graphs are cached for one run only, since it does not see this compiler.
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
exec {compiler} "$@" -O0 -w --param ggc-min-heapsize=4000000 -include {folder}/headers.h
"""
"""Wrapper script. A compiler tries each file in ``headers.h.gch``, and reads the header itself if none has its flags."""


_INDUCTORS = """\
#!/bin/sh
case "$*" in
*-O[1-3]*) exec {compiler} "$@" -O0 -w;;
*) exec {compiler} "$@";;
esac
"""
"""Wrapper script under the name that Inductor looks for, which optimizes nothing, precompiled headers included."""
INDUCTOR = "g++"


def put_on_path(folder: Path) -> None:
    """Create the compiler in ``folder`` and put it first on PATH. Do nothing if the machine has no compiler."""
    found = find_compiler()
    if found is None:
        return
    (folder / "headers.h.gch").mkdir(parents=True)
    (folder / "headers.h").write_text(_HEADERS)
    for name, text in ((COMPILERS[0], _WRAPPER), (INDUCTOR, _INDUCTORS)):
        compiler = shutil.which(name)
        if compiler is not None:
            wrapper = folder / name
            wrapper.write_text(text.format(compiler=compiler, version=found.version, folder=folder))
            wrapper.chmod(0o755)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # it compiles programs that try instructions, seconds each
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def shipped_path() -> str:
    """Return PATH without the tests' compiler."""
    folders = os.environ["PATH"].split(os.pathsep)
    made = shutil.which(COMPILERS[0])
    own = str(Path(made).parent) if made and (Path(made).parent / "headers.h").exists() else None
    return os.pathsep.join(folder for folder in folders if folder != own)
