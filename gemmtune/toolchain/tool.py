"""Programs that this package runs: compilers and their tools, which may be broken or hang."""

import contextlib
import functools
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence

from ..errors import UnavailableError

VERSION_TIMEOUT_S = 30.0
"""Time limit of ``--version``."""


def run_tool(command: Sequence[str], *, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program without input and return its exit status and output. After ``timeout_s`` it is killed, with its children.

    Output goes to files: a child that holds a pipe would make ``subprocess.run`` wait for it. Without a limit the program stays in
    this process group. Raises OSError if it cannot be started, and TimeoutError, an OSError, if it does not end in time.
    """
    group = None if timeout_s is None else 0
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=group) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{command[0]} did not end within {timeout_s:g} s") from None
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL) if group == 0 else process.kill()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def version_text(path: str) -> str:
    """Return what a program prints for ``--version``, asked once per version. Raises UnavailableError if it fails."""
    return _version_text(path, os.stat(path).st_mtime_ns)


@functools.cache
def _version_text(path: str, modified_ns: int) -> str:  # noqa: ARG001 - cache key: a replaced program is queried again
    try:
        done = run_tool([path, "--version"], timeout_s=VERSION_TIMEOUT_S)
    except OSError as error:
        raise UnavailableError(f"{path} does not run: {error}") from error
    if done.returncode != 0:
        raise UnavailableError(f"{path} does not run: --version ended with {done.returncode}")
    return done.stdout
