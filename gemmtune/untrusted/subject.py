"""An untrusted GEMM as a subject of the conformance suite: its functions here are calls of its process."""

import functools
import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ..declaration.named import why_no_module
from ..declaration.subject import Subject, SubjectSpec, wrapped
from ..declaration.traits import ATTRIBUTE
from ..errors import SubjectError
from .candidate import Candidate, CandidateEnded, RemoteError
from .target import TORCH

OF_TORCH = {"alpha": True, "beta": True, "out": True}
KINDS_OF_PARAMETERS = (
    inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD,
)  # fmt: skip
"""Kinds of parameters by their number."""


class Unsuitable(SubjectError):
    """Error of a GEMM that only gemmtune itself can call."""


class RemoteFunction:
    """Function of an untrusted GEMM, with its name, declarations and signature."""

    def __init__(self, candidate: Candidate, name: str, called: str, declared: object, parameters: object) -> None:
        self._candidate = candidate
        self._name = name
        self.__name__ = called
        self.__signature__ = _signature(parameters)
        self.gemm_traits = declared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the GEMM in its process."""
        return self._candidate.call(self._name, args, kwargs)


def _signature(parameters: Any) -> inspect.Signature | None:
    """Return the signature with these names and kinds of parameters, or None if they are none."""
    try:
        return inspect.Signature([inspect.Parameter(str(name), KINDS_OF_PARAMETERS[kind]) for name, kind in parameters])
    except (TypeError, ValueError, IndexError):
        return None


def subject_of(candidate: Candidate, declared: Mapping[str, Any]) -> Subject:
    """Return the GEMM of a candidate. ``declared`` overrides its own declarations.

    Raises:
        SubjectError: it cannot be imported. Unsuitable: only gemmtune can call it.
        TraitsError: its declarations are illegal.
    """
    try:
        answer = candidate.opened()
    except (RemoteError, CandidateEnded) as error:
        target = candidate.target
        reason = f"{target} cannot be imported: {error}"
        if target.kind == "module" and not target.roots:
            reason = why_no_module(str(target), target.path.partition(".")[0])
        raise SubjectError(reason) from error
    if answer.get("ours"):
        raise Unsuitable(f"{candidate.target} is a Subject of gemmtune, which cannot be called in another process")
    names, traits = answer.get("functions"), answer.get("traits")
    own, taken = (x if isinstance(x := answer.get(word), dict) else {} for word in ("declared", "parameters"))
    if not isinstance(names, list) or not names:
        found: object = RemoteFunction(candidate, "", str(answer.get("name", "")), own.get("", traits), taken.get(""))
    else:
        made = (RemoteFunction(candidate, str(name), str(name), own.get(name), taken.get(name)) for name in names)
        found = SimpleNamespace(**{function.__name__: function for function in made})
        if traits is not None:
            setattr(found, ATTRIBUTE, traits)
    return wrapped(SubjectSpec(target=str(candidate.target), declared=declared), found)


@functools.cache
def rival(device: str, *, is_twin: bool = False) -> tuple[Subject, Candidate]:
    """Return torch's operations in a process of their own, which all judgements of this process share."""
    candidate = Candidate(TORCH, device, is_twin=is_twin)
    return subject_of(candidate, OF_TORCH), candidate
