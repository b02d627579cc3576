"""Modules of user-supplied GEMMs: one whose import ends the process is found out in another process, and left out."""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings

from ..declaration.found import found_at
from ..selector.precompile import COMPILING
from ..settings import Settings
from ..workers.pool import WORKERS
from ..workers.worker import NoWorkerError, WorkerCrashed, WorkerTimedOut

IMPORT_S = 120.0
"""Time limit for the import of a module."""


def surviving(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets of ``extra_choices`` whose modules this process survives importing. Warn about the others.

    A module that calls ``os._exit``, crashes or hangs would end the program without a word. Exceptions are left to the import
    in this process, which names them.
    """
    kept: list[str] = []
    for target in targets:
        module = target.partition(":")[0]
        reason = "" if module in sys.modules else _why_fatal(module)
        if reason:
            warnings.warn(
                f"own:{target} is left out: the import of {module} ended its process: {reason}", RuntimeWarning, stacklevel=3
            )
        else:
            kept.append(target)
    return tuple(kept)


def with_surviving(settings: Settings) -> Settings:
    """Return the settings with the surviving targets."""
    if not settings.extra_choices or not settings.tune_in_subprocess:
        return settings
    return dataclasses.replace(settings, extra_choices=surviving(settings.extra_choices) or None)


@functools.cache
def _why_fatal(module: str) -> str:
    """Return how the import of a module ends a worker process, or "" if it does not."""
    try:
        worker = WORKERS.take(COMPILING)
        try:
            worker.call(_imported, module, timeout_s=IMPORT_S)
        finally:
            WORKERS.give(COMPILING, worker)
    except NoWorkerError:
        return ""
    except (WorkerCrashed, WorkerTimedOut) as error:
        return error.reason
    except Exception:  # noqa: BLE001 - any exception of a module; the import in this process reports it
        return ""
    return ""


def _imported(module: str) -> None:
    found_at(module)
