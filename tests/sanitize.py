"""The tests of the native look-up with instrumented C++ code: first ASan with UBSan, then TSan.

    python tests/sanitize.py [arguments of pytest]

Python and torch are not instrumented. TSan sees races within the code compiled here, and knows the GIL as a lock.
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
"""Sanitizers, by the compiler's option, with the runtime to preload and environment variables."""
_SUPPRESSIONS = "race:dl_deallocate_tls\n"
"""The C library frees thread_local data of an ended thread in another thread, under locks unknown to TSan."""
_WRAPPER = """\
#!/bin/sh
case "$*" in
*--version*) echo "{version}, -fsanitize={sanitizer}"; exit;;
*-shared*) exec {compiler} "$@" -g -fno-omit-frame-pointer -fsanitize={sanitizer};;
*) exec {compiler} "$@";;
esac
"""


def run(sanitizer: str, arguments: list[str]) -> int:
    """Run pytest with an instrumenting compiler and return its exit status."""
    found = find_compiler()
    if found is None:
        print("needs g++", file=sys.stderr)
        return 2
    runtime, variables = SANITIZERS[sanitizer]
    # Preload the C++ runtime too: ASan looks it up at start, and Python's own program does not link it.
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
