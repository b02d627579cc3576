"""Calls of an untrusted GEMM, each with operands that it has not seen, and each with a checked result."""

import dataclasses
import hashlib
import math
import random
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..choice import Claims
from ..declaration.calling import Caller
from ..declaration.subject import Impossible, Subject
from ..errors import UnavailableError
from ..numerics.expectation import Expectation
from ..numerics.operands import Operands
from ..problem import Problem
from ..timing.timer import median_margin
from .candidate import OTHERS, Candidate, CandidateEnded, RemoteError
from .checks import Checker, Trouble, alike
from .conduct import Conduct
from .target import NOTHING

KINDS = ("fresh", "fresh", "exact", "fresh", "alike", "fresh", "moved", "left", "fresh", "right")
"""Kinds of calls. They come in another order each time.

fresh: new numbers. exact: new numbers whose result is known bit by bit. alike: the numbers of the call before in another order,
at the same addresses. moved: the same numbers at other addresses. left, right: a new a, or a new b, with the other one as before.
"""
PAGES = (3, 3, 3, 40, 81, 122)
"""Pages at which operands begin: mostly the same one."""
MOST_WRONG = 3
"""Wrong results after which a shape ends."""
SELDOM = 0.02
"""Share of wrong results below which a GEMM is right sometimes."""
AT_ONCE = 0.7
"""Work for repeated operands, as a share of that for new ones, below which they were not computed again."""
EMPTY_CALLS, LEAST_GPU_S = 7, 1e-7
HIDDEN, HIDDEN_S = 1.0, 2e-4
"""Ratio, and seconds, by which the time around a GPU's events may exceed the time between them, and that around torch's."""
LEAST_REPEATS, LEAST_REPEAT_S = 5, 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Calls of one problem: times in pairs of the GEMM and torch, and what was wrong."""

    problem: Problem
    calls: int = 0
    pairs: tuple[tuple[float, float], ...] = ()
    """Seconds of the GEMM and of torch for the same operands."""
    first_s: float = 0.0
    """Seconds of the first call, in which a GEMM may compile or tune."""
    repeats: tuple[tuple[float, float], ...] = ()
    """Work for new operands and for the same ones again."""
    equal: tuple[bool, ...] = ()
    """True for each repetition that gave the same bits."""
    hidden: tuple[bool, ...] = ()
    """True for each call that took far longer by the clock outside of its process than by events of a GPU inside of it."""
    wrong: tuple[tuple[int, Trouble, bool], ...] = ()
    """Number of each wrong call, its error, and True if it gave the bits of an earlier call."""
    refused: str = ""
    ran: tuple[frozenset[str], ...] = ()
    """Names of torch's operations and of a GPU's kernels in each profiled call."""

    @property
    def ratio(self) -> tuple[float, float] | None:
        """Median of the logarithm of torch's time over the GEMM's, with half its 95% interval."""
        logs = [math.log(torch_s / own_s) for own_s, torch_s in self.pairs if own_s > 0 and torch_s > 0]
        return median_margin(logs) if len(logs) >= 3 else None

    @property
    def time_s(self) -> float | None:
        """Median time of the GEMM."""
        return statistics.median(own_s for own_s, _ in self.pairs) if self.pairs else None


@dataclass(slots=True, kw_only=True)
class _Run:
    """State of the calls of one shape."""

    checker: Checker
    call: Caller
    rng: random.Random
    pairs: list[tuple[float, float]] = field(default_factory=list)
    repeats: list[tuple[float, float]] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)
    last: bytes = b""
    wrong: list[tuple[int, Trouble, bool]] = field(default_factory=list)
    seen: dict[bytes, int] = field(default_factory=dict)
    profiled: frozenset[int] = frozenset()
    """Numbers of the calls after which another one is profiled."""
    ran: list[frozenset[str]] = field(default_factory=list)
    calls: int = 0
    numbers: int = 0
    """Number of different operands until now."""


class Trial:
    """Calls of a GEMM with one problem after another, next to calls of torch in another process.

    Args:
        rival: torch, with its process.
    """

    def __init__(self, subject: Subject, candidate: Candidate, rival: tuple[Subject, Candidate]) -> None:
        self._subject, self._candidate = subject, candidate
        self._rival, self._torch = rival
        self._delivery_s = self._hand_over_s = 0.0
        self.rng = random.Random(secrets.randbits(64))

    def calls(
        self, problem: Problem, count: int, *, timed: bool, deadline: float, claims: Claims | None = None, profiled: int = 0
    ) -> Shape:
        """Make ``count`` calls, at most until ``deadline`` on the monotonic clock. If they are ``timed``, torch makes some too.

        ``profiled`` more calls, at places that nobody knows, show what runs in them.
        """
        checker = Checker(problem, claims or self._subject.claims(problem), self._candidate.device, secrets.randbits(60))
        places = frozenset({1, *self.rng.sample(range(1, count + 1), min(profiled, count))} if profiled else ())
        run = _Run(checker=checker, call=self._subject.caller(problem), rng=self.rng, profiled=places)
        refused, number, first_s = "", 0, 0.0
        kept: Operands | None = None
        try:
            self._reserve(problem)
            if timed and self._candidate.device.type != "cpu":
                self._delivery_s, self._hand_over_s = self._nothing(problem)
            with self._subject.conditions(problem):
                for number, kind in enumerate(self._order(count), 1):
                    kept = self._step(run, kind, kept, number, timed=timed)
                    first_s = first_s or self._candidate.last.wall_s
                    if len(run.wrong) >= MOST_WRONG or time.monotonic() > deadline:
                        break
        except RemoteError as error:
            refused = str(error)
            if run.calls:
                run.wrong.append((number, Trouble(text=f"it raised {error}"), False))
        except CandidateEnded as error:
            run.wrong.append((number, Trouble(text=str(error)), False))
        except Impossible as obstacle:
            refused = f"no call was possible: {obstacle}"
        finally:
            self._candidate.place = None
        return Shape(
            problem=problem, calls=max(run.calls, len(run.wrong)), pairs=tuple(run.pairs[1:] or run.pairs), first_s=first_s,
            repeats=tuple(run.repeats), equal=tuple(run.equal), hidden=tuple(run.hidden), wrong=tuple(run.wrong), refused=refused,
            ran=tuple(run.ran),
        )  # fmt: skip

    def _reserve(self, problem: Problem) -> None:
        """Make room for the operands and the result in the memories of both processes."""
        layouts = [layout for _, layout in problem.operands] + list(problem.epilogue.operands if problem.epilogue else ())
        operand_bytes, result_bytes = (sum(x.span * x.dtype.itemsize for x in them) for them in (layouts, [problem.out]))
        for process in (self._candidate, self._torch):
            process.reserve(operand_bytes, result_bytes)

    def _order(self, count: int) -> list[str]:
        kinds: list[str] = ["fresh"]
        while len(kinds) < count:
            kinds += self.rng.sample(KINDS, len(KINDS))
        return kinds[:count]

    def _step(self, run: _Run, kind: str, kept: Operands | None, number: int, *, timed: bool) -> Operands:
        """Make one call, check its result and return its operands."""
        operands, expectation = self._operands(run, kind, kept)
        run.numbers += kept is not operands or kind == "alike"
        candidate = self._candidate
        candidate.place = run.rng.choice(PAGES) if kind in ("fresh", "moved") else candidate.place
        paired = timed and kind == "fresh"
        before = self._by_torch(run, operands) if paired and number % 2 else 0.0
        own_s = self._called(run, operands, expectation, number)
        work_s = self._work_s()
        last = candidate.last
        if paired:
            torch_s = before or self._by_torch(run, operands)
            run.pairs.append((own_s, torch_s))
            if last.device_us:
                around_s = max(self._torch.last.wall_s - torch_s, self._hand_over_s)
                run.hidden.append(last.wall_s - own_s - around_s > HIDDEN * own_s + HIDDEN_S)
        if kind == "fresh" and (timed or number == 1) and run.rng.random() < 0.5:
            candidate.place, first = run.rng.choice(PAGES), run.last
            self._called(run, operands, expectation, number)
            run.equal.append(run.last == first)
            if work_s > LEAST_REPEAT_S and number > 1:
                run.repeats.append((work_s, self._work_s()))
        if number in run.profiled:
            self._profiled(run, number)
        return operands if expectation is None else kept or operands

    def _called(self, run: _Run, operands: Operands, expectation: Expectation | None, number: int) -> float:
        result = run.call(operands.tensors, operands.scalars, None)
        run.calls += 1
        own_s = self._time_s(self._candidate)
        trouble = run.checker.trouble(result, operands, expectation)
        digest = hashlib.blake2b(_raw(result), digest_size=16).digest()
        if trouble is not None:
            stale = run.seen.get(digest, run.numbers) < run.numbers and not _is_constant(result)
            run.wrong.append((number, trouble, stale))
        run.seen.setdefault(digest, run.numbers)
        run.last = digest
        return own_s

    def _profiled(self, run: _Run, number: int) -> None:
        """Make a call with new operands of which the operations of torch are known."""
        self._candidate.profiling = True
        run.numbers += 1
        try:
            self._called(run, run.checker.fresh(), None, number)
        finally:
            self._candidate.profiling = False
        run.ran.append(frozenset(self._candidate.ran))

    def _by_torch(self, run: _Run, operands: Operands) -> float:
        self._torch.place = self._candidate.place
        try:
            with self._candidate.left_alone():
                self._rival.caller(run.checker.problem)(operands.tensors, operands.scalars, None)
        except CandidateEnded as error:
            raise UnavailableError(f"nothing to compare with: {error}") from error
        for change in self._torch.changes():
            self._candidate.note(Conduct.REACHES, f"{OTHERS} torch's process or its parent, {change}")
        return self._time_s(self._torch)

    def _work_s(self) -> float:
        """Return the work of the latest call: CPU time, which other processes do not add to, or time of the GPU."""
        return self._candidate.last.device_us / 1e6 or self._candidate.last.cpu_s

    def _time_s(self, candidate: Candidate) -> float:
        """Return the time of the latest call. On a GPU it is that between two events, without the delivery of the result."""
        last = candidate.last
        if not last.device_us:
            return last.wall_s
        return max(last.device_us / 1e6 - self._delivery_s, LEAST_GPU_S)

    def _nothing(self, problem: Problem) -> tuple[float, float]:
        """Return the seconds of a call that only delivers a result of that size: on the GPU, and by the clock of this process."""
        out = torch.zeros(problem.out.size, dtype=problem.out.dtype, device=self._torch.device)
        readings = []
        for _ in range(EMPTY_CALLS):
            self._torch.call(NOTHING[0], (out,), {})
            readings.append(self._torch.last)
        return statistics.median(x.device_us for x in readings) / 1e6, statistics.median(x.wall_s for x in readings)

    def _operands(self, run: _Run, kind: str, kept: Operands | None) -> tuple[Operands, Expectation | None]:
        """Return the operands of a call of this kind, and what is known of its result."""
        checker = run.checker
        if kind == "exact" and (known := checker.exact()) is not None:
            return checker.given(known.operands), known
        # the numbers of exact probes are of no use to other calls
        if kept is None or kind in ("fresh", "exact") or checker.problem.sparsity is not None:
            return checker.fresh(), None
        if kind == "alike":
            return alike(kept, run.rng.getrandbits(60)) or checker.fresh(), None
        if kind == "left":
            return dataclasses.replace(kept, a=checker.fresh().a), None
        return (dataclasses.replace(kept, b=checker.fresh().b) if kind == "right" else kept), None


def _of_least(repeats: Sequence[tuple[float, float]]) -> float:
    """Return the least work for repeated operands as a share of that for new ones. Other programs make each larger, not smaller."""
    return min(again_s for _, again_s in repeats) / min(new_s for new_s, _ in repeats)


def _is_constant(result: object) -> bool:
    return not isinstance(result, torch.Tensor) or bool((result == result.flatten()[:1]).all())


def _raw(result: object) -> bytes:
    if not isinstance(result, torch.Tensor):
        return b""
    return result.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if result.numel() else b""


def note_calls(candidate: Candidate, shapes: Sequence[Shape]) -> None:
    """Note the conduct that the calls of all shapes show."""
    calls, wrong = sum(shape.calls for shape in shapes), [(shape, *found) for shape in shapes for found in shape.wrong]
    exact = [found for found in wrong if not found[2].rough]
    stale = [found for found in exact if found[3]]
    for kind, found in ((Conduct.STALE, stale), (Conduct.ROUGH, [x for x in wrong if x[2].rough])):
        if found:
            shape, number, trouble, _ = found[0]
            candidate.note(kind, f"call {number} of {shape.problem}: {trouble.text}")
    if exact:
        shape, number, trouble, _ = exact[0]
        seldom = len(exact) < SELDOM * calls or all(shape.refused for shape, *_ in exact)
        kind = Conduct.SOMETIMES if seldom else Conduct.WRONG
        candidate.note(kind, f"{len(exact)} of {calls} calls, the first is call {number} of {shape.problem}: {trouble.text}")
    for shape in shapes:
        if len(shape.hidden) >= LEAST_REPEATS and sum(shape.hidden) > len(shape.hidden) / 2:
            candidate.note(Conduct.CLOCK, f"{shape.problem}: {sum(shape.hidden)} of {len(shape.hidden)} calls")
        if len(shape.repeats) >= LEAST_REPEATS and (share := _of_least(shape.repeats)) < AT_ONCE:
            detail = f"{shape.problem}: equal operands at other addresses take {share:.0%} of the work of new ones"
            candidate.note(Conduct.REUSED, detail)
