"""Bubblewrap around the first process."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..errors import UnavailableError

PROGRAM = "bwrap"
OF_GPU = ("--unshare-user-try", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
"""Namespaces next to a GPU, whose memory cannot be shared between namespaces of inter-process communication."""


def sandboxed(command: Sequence[str], folder: Path, *, gpu: bool) -> list[str]:
    """Return the command in a sandbox. It may write to ``folder`` alone, sees no other process and no network.

    Raises:
        UnavailableError: bubblewrap is not installed.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise UnavailableError(
            f"sandbox: got no {PROGRAM} on PATH, expected bubblewrap: install it (apt install bubblewrap), or judge without "
            "--sandbox on a machine that the GEMM may harm"
        )
    devices = ["--dev-bind", "/dev", "/dev"] if gpu else ["--dev", "/dev"]
    words = [program, "--ro-bind", "/", "/", *devices, "--proc", "/proc", "--bind", str(folder), str(folder)]
    return [*words, *(OF_GPU if gpu else ("--unshare-all",)), "--die-with-parent", "--new-session", "--", *command]


def why_not_started(said: str, *, sandbox: bool) -> str:
    """Return the reason for which a process with this output has not started."""
    reason = said.splitlines()[-1] if said else "it ended before it had imported torch"
    if not sandbox:
        return f"no process for untrusted code can be started: {reason}"
    return (
        f"sandbox: bubblewrap could not start a process for untrusted code: {reason.rstrip('.')}. It needs namespaces of its own: "
        "let users make them (sysctl user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns), or judge without "
        "--sandbox on a machine that the GEMM may harm"
    )


def names_of(pid: int) -> list[int]:
    """Return the process ids that a process has, in this namespace and those below it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return [int(word) for word in line.split()[1:]]
    return []
