"""Walls around GEMMs of others. One that is about to be picked is called in a process of its own, where it has no reach.

The worker that measures choices is their process too, so a GEMM can deceive it. Here its operands are new in each call, each result
is checked in this process, and the time is that of this process's clock.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ..backends.own.choice import OwnChoice
from ..choice import Choice
from ..errors import GemmtuneError
from ..problem import Problem
from ..timing.rounds import tie
from ..untrusted.candidate import Candidate, CandidateEnded, RemoteError
from ..untrusted.conduct import Conduct
from ..untrusted.kinds import KINDS
from ..untrusted.shape import note_calls
from ..untrusted.subject import rival, subject_of
from ..untrusted.target import NOTHING, Target
from ..untrusted.trial import Trial
from ..warning import warn

CALLS, CALLS_S = 60, 4.0
"""Calls of a GEMM, and seconds after which no more are made."""
LEAST_CALLS = 1 + 2 * len(KINDS)
"""Calls of a GEMM on a machine that is too busy for more: two of each kind."""
LEAST_TIMED = 5
SLOWER = 2.0
"""Ratio of a time in a process of its own to that among other choices, next to torch's, which shows that a clock was deceived."""
ALLOWED = frozenset({Conduct.TORCH, Conduct.AGAIN})
"""Conduct that keeps no GEMM from being picked: its results are copied, and it is no slower for calling torch."""
GPU_EXTRA_S = 5e-6
"""Time that two events of a GPU add to a call, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """Calls of a GEMM in a process of its own."""

    reasons: tuple[str, ...] = ()
    own_s: float | None = None
    """Shortest time of a call, as those below."""
    torch_s: float = 0.0
    call_s: float = 0.0
    """Time of a call that does nothing, with a result of the same size."""


_known: dict[tuple[str, str], _Tried] = {}
"""Results by the hash of a choice and its problem."""


def refusals(choices: Mapping[str, Choice], times_us: Mapping[str, float], judged: Collection[str] = ()) -> dict[str, str]:
    """Return the reasons, by name, why fastest GEMMs of others, except those already ``judged``, must not be picked."""
    own = {name: choice for name, choice in choices.items() if isinstance(choice, OwnChoice) and name in times_us}
    others = [times_us[name] for name in choices.keys() - own.keys() if name in times_us]
    torch_us = next((times_us[name] for name, choice in choices.items() if choice.baseline and name in times_us), None)
    found: dict[str, str] = {}
    for name, choice in own.items():
        beaten = times_us[name] > (1 + tie()) * min(others, default=times_us[name])
        if beaten or name in judged:
            continue
        key = choice.content_hash, choice.problem.key
        tried = _known[key] if key in _known else _known.setdefault(key, _tried(choice))
        if reasons := [*tried.reasons, *_slower(tried, times_us[name], torch_us)]:
            found[name] = f"in a process of its own it {'; '.join(reasons)}"
    return found


def _tried(choice: OwnChoice) -> _Tried:
    """Call a GEMM with its problem."""
    module, _, name = choice.target.partition(":")
    problem = choice.problem
    if problem.groups or problem.sparsity is not None:
        return _Tried()
    device = "cpu" if problem.device_type == "cpu" else f"{problem.device_type}:{torch.cuda.current_device()}"
    target = Target(kind="module", path=module, name=name, roots=(choice.folder,), words=choice.target)
    try:
        by_torch, candidate = rival(device), Candidate(target, device)
    except GemmtuneError as error:
        warn(f"{choice.name} is trusted: no process of its own works here: {error}")
        return _Tried()
    try:
        subject = subject_of(candidate, {})
        candidate.settle()
        before = {finding.kind for finding in candidate.findings}  # what an import changes, it changes wherever it is imported
        timed = problem.op in (by_torch[0].traits.ops or ()) and problem.epilogue is None
        trial = Trial(subject, candidate, by_torch, least=LEAST_CALLS)
        shape = trial.calls(problem, CALLS, timed=timed, deadline=time.monotonic() + CALLS_S, claims=choice.claims)
        note_calls(candidate, [shape])
        candidate.settle()
    except (CandidateEnded, RemoteError, GemmtuneError) as error:
        return _Tried(reasons=(f"fails: {error}",))
    finally:
        candidate.close()
    reasons = [str(x) for x in candidate.findings if x.dishonest and x.kind not in ALLOWED | before]
    if shape.refused and not reasons:
        reasons = [f"raised {shape.refused}" if shape.calls else shape.refused]
    if len(shape.pairs) < LEAST_TIMED:
        return _Tried(reasons=tuple(reasons))
    own_s, torch_s = (min(times) for times in zip(*shape.pairs, strict=True))  # other work on the machine only adds to them
    return _Tried(reasons=tuple(reasons), own_s=own_s, torch_s=torch_s, call_s=_call_s(problem, by_torch[1]))


def _call_s(problem: Problem, torch_process: Candidate) -> float:
    """Return the time of a call that does nothing, as far as it is part of the times of others."""
    if torch_process.device.type != "cpu":
        return GPU_EXTRA_S
    out, times = torch.zeros(problem.out.size, dtype=problem.out.dtype), []
    for _ in range(LEAST_TIMED):
        torch_process.call(NOTHING, (out,), {})
        times.append(torch_process.last.wall_s)
    return min(times)


def _slower(tried: _Tried, own_us: float, torch_us: float | None) -> list[str]:
    """Return a reason if a GEMM takes far longer than it seemed to, and torch does not."""
    if tried.own_s is None or not torch_us:
        return []
    own, by_torch = tried.own_s / (own_us / 1e6 + tried.call_s), tried.torch_s / (torch_us / 1e6 + tried.call_s)
    if own < SLOWER * max(1.0, by_torch):
        return []
    text = f"takes at least {tried.own_s * 1e6:.0f} µs by a clock out of its reach, with {tried.call_s * 1e6:.0f} µs for the call"
    return [f"{text}, where it seemed to take {own_us:.4g} µs"]
