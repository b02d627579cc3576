"""Reports of a tuning: the warning of a busy machine, and the log file with a JSON line for each choice and problem."""

import dataclasses
import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any

from ..problem.dtypes import dtype_name
from ..store.key import now
from ..store.row import plain
from ..timing.rounds import BUSY_MARK
from ..warning import warn
from .result import AGAIN, Outcome, ProblemResult

log = logging.getLogger("gemmtune")
_warned: set[Path] = set()


def warn_if_busy(result: ProblemResult) -> None:
    """Log a warning if what this tuning measured was disturbed by other work on the machine."""
    if result.disturbed_now:
        log.warning("%s was measured %s (%s): %s", result.problem, BUSY_MARK, result.disturbed_now, AGAIN)


def append_log(path: Path | str, result: ProblemResult) -> None:
    """Append the lines of a result in one write under a lock. If that fails, they are lost, with a warning per path and process."""
    path = Path(path)
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        _append(path, "".join(json.dumps(plain(line), allow_nan=False) + "\n" for line in lines(result)).encode())
    except OSError as error:
        if path not in _warned:
            _warned.add(path)
            warn(
                f"log_file: got {error}, expected a writable file. Give this user permission, free some space, or set "
                "log_file (GEMMTUNE_LOG_FILE) to another file. Results are not logged until then."
            )


def lines(result: ProblemResult) -> list[dict[str, Any]]:
    """Return the log entries of a result: a self-contained mapping for each choice, refused ones included."""
    problem = result.problem
    head = {
        "logged_at": now(),
        "problem": str(problem),
        "op": problem.op,
        "batch": problem.batch,
        "M": problem.m,
        "N": problem.n,
        "K": problem.k,
        "dtype": problem.dtype_label,
        "out_dtype": dtype_name(problem.out.dtype),
        "layout": problem.layout_letters,
        "device_type": problem.device_type,
    }
    considered = [*result.outcomes, *map(Outcome.of_refusal, result.refusals)]
    return [
        head
        | dataclasses.asdict(outcome)
        | {"pick": outcome.name == result.pick}
        | {key: outcome.info.get(key) for key in ("tile", "stages", "warps")}
        for outcome in considered
    ]


def _append(path: Path, data: bytes) -> None:
    """Write once at the end of the file, or undo half a line on a full disk. Raises OSError if it cannot be opened or written."""
    if not data:
        return
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = os.fstat(file.fileno()).st_size
        written = file.write(data)
        if written < len(data):
            file.truncate(size)
            raise OSError(f"only {written} of {len(data)} bytes fit into {path}")
