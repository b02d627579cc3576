"""The log file: one JSON line for each choice and problem, for later analysis of what was tried and how it fared."""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..choice import Status
from ..problem import Problem
from ..problem.dtypes import dtype_name
from ..store.key import now
from ..store.row import plain
from .result import ProblemResult

__all__ = ["append_log", "lines"]

_warned: set[Path] = set()


def append_log(path: Path | str, result: ProblemResult) -> None:
    """Append the lines of a result, in one write under a lock: lines of several processes never mix.

    A file that cannot be written costs one warning for each path and process, and the lines.
    """
    path = Path(path)
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        _append(path, "".join(json.dumps(plain(line), allow_nan=False) + "\n" for line in lines(result)).encode())
    except OSError as error:
        if path not in _warned:
            _warned.add(path)
            warnings.warn(
                f"log_file: got {error}, expected a file that can be written. Give this user permission, free some space, or set "
                "log_file (GEMMTUNE_LOG_FILE) to another file. Results are not logged until then.",
                RuntimeWarning,
                stacklevel=3,
            )


def lines(result: ProblemResult) -> list[dict[str, Any]]:
    """What is logged of a result: a mapping for each choice, the refused ones too, each complete in itself.

    ``M``, ``N``, ``K`` and ``batch`` are the problem's. ``tile``, ``stages`` and ``warps`` are null for a choice that has none;
    ``info`` is everything that its backend tells of its configuration.
    """
    head = _head(result.problem)
    tried = [
        head
        | {
            "name": outcome.name,
            "backend": outcome.backend,
            "status": str(outcome.status),
            "reason": outcome.reason,
            "time_us": outcome.time_us,
            "error_over_bound": outcome.error_over_bound,
            "pick": outcome.name == result.pick,
            "finalist": outcome.finalist,
            "baseline": outcome.baseline,
            "from_store": outcome.from_store,
            "content_hash": outcome.content_hash,
        }
        | _configuration(outcome.info)
        for outcome in result.outcomes
    ]
    refused = [
        head
        | {
            "name": refusal.name,
            "backend": refusal.name.split(":")[0],
            "status": str(Status.REFUSED),
            "reason": refusal.reason,
            "time_us": None,
            "error_over_bound": None,
            "pick": False,
            "finalist": False,
            "baseline": False,
            "from_store": False,
            "content_hash": None,
        }
        | _configuration({})
        for refusal in result.refusals
    ]
    return tried + refused


def _head(problem: Problem) -> dict[str, Any]:
    return {
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


def _configuration(info: Mapping[str, Any]) -> dict[str, Any]:
    return {"tile": info.get("tile"), "stages": info.get("stages"), "warps": info.get("warps"), "info": dict(info)}


def _append(path: Path, data: bytes) -> None:
    """One write at the end of the file. A write that falls short (a full disk) is taken back: half a line helps nobody.

    Raises:
        OSError: the file cannot be opened, locked or written.
    """
    if not data:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        written = os.write(descriptor, data)
        if written < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(f"only {written} of {len(data)} bytes fit into {path}")
    finally:
        os.close(descriptor)
