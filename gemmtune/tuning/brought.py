"""Modules of user-supplied GEMMs, imported in another process first. One that ends it or deceives others in it is left out."""

import contextlib
import dataclasses
import functools
import sys

from ..errors import UnavailableError
from ..settings import Settings
from ..untrusted.candidate import IMPORT_S, Candidate, CandidateEnded, RemoteError
from ..untrusted.conduct import Conduct
from ..untrusted.target import IMPORT_ONLY, Target, roots_of
from ..warning import warn_once

REFUSED = (Conduct.REPLACED, Conduct.LOOKS, Conduct.REACHES, Conduct.FORGED)
"""Conduct of an import that keeps a module out of this process."""


def surviving(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets of ``extra_choices`` whose modules this process survives importing. Warn about the others.

    A module that calls ``os._exit``, crashes or hangs would end the program without a word, and one that replaces functions could
    have any GEMM picked. Exceptions are left to the import in this process, which names them.
    """
    kept: list[str] = []
    for target in targets:
        module = target.partition(":")[0]
        reason = "" if module in sys.modules else _why_not(module)
        if reason:
            warn_once(f"own:{target} is left out: the import of {module} {reason}")
        else:
            kept.append(target)
    return tuple(kept)


def with_surviving(settings: Settings) -> Settings:
    """Return the settings with the surviving targets."""
    if not settings.extra_choices or not settings.tune_in_subprocess:
        return settings
    return dataclasses.replace(settings, extra_choices=surviving(settings.extra_choices) or None)


@functools.cache
def _why_not(module: str) -> str:
    """Return how the import of a module ends its process or deceives others in it, or ""."""
    candidate = Candidate(Target(kind="module", path=module, name=IMPORT_ONLY, roots=roots_of(module)), timeout_s=IMPORT_S)
    try:
        with contextlib.suppress(RemoteError):  # any exception of a module; the import in this process reports it
            candidate.opened()
        candidate.settle()
    except CandidateEnded as error:
        return f"ended its process: {error.reason}"
    except UnavailableError:
        return ""
    finally:
        candidate.close()
    return "; ".join(str(finding) for finding in candidate.findings if finding.kind in REFUSED)
