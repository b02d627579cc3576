"""The tests of the native look-up with everything compiled in C++ instrumented: ASan with UBSan, then TSan.

    python tests/sanitize.py [arguments of pytest]

Python and torch themselves are not instrumented: TSan sees races within what is compiled here, with the GIL as a lock it knows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gemmtune.backends.cpp.compiler import COMPILERS, find_compiler

__all__ = ["SANITIZERS", "run"]

TESTS = [f"tests/unit/test_native{name}.py" for name in ("", "_rows", "_driver", "_cublaslt", "_layer")]
SANITIZERS = {
    "address,undefined": ("libasan.so", {"ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}),
    "thread": (
        "libtsan.so",
        {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0:suppressions={folder}/suppressions"},
    ),
}
"""By what the compiler is told: the runtime that has to be loaded first, and variables."""
_SUPPRESSIONS = "race:dl_deallocate_tls\n"
"""The C library frees what a thread that has ended had as thread_local in another thread, under locks that TSan does not know."""
_WRAPPER = """\
#!/bin/sh
case "$*" in
*--version*) echo "{version}, -fsanitize={sanitizer}"; exit;;
*-shared*) exec {compiler} "$@" -g -fno-omit-frame-pointer -fsanitize={sanitizer};;
*) exec {compiler} "$@";;
esac
"""


def run(sanitizer: str, arguments: list[str]) -> int:
    """The exit status of pytest with a compiler that instruments."""
    found = find_compiler()
    if found is None:
        print("needs g++", file=sys.stderr)
        return 2
    runtime, variables = SANITIZERS[sanitizer]
    # The runtime of C++ is no library of Python's own program, in which ASan looks for what throws when it begins.
    names = (runtime, "libstdc++.so.6")
    paths = [
        subprocess.run([found.path, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in names
    ]
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder) / COMPILERS[0]
        wrapper.write_text(_WRAPPER.format(version=found.version, sanitizer=sanitizer, compiler=found.path))
        wrapper.chmod(0o755)
        (Path(folder) / "suppressions").write_text(_SUPPRESSIONS)
        variables = {name: options.format(folder=folder) for name, options in variables.items()}
        environment = os.environ | variables | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "LD_PRELOAD": " ".join(paths)}
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--capture=sys", *TESTS, *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(max(run(sanitizer, sys.argv[1:]) for sanitizer in SANITIZERS))
