"""Calls of an untrusted GEMM, each with operands that it has not seen, and each with a checked result."""

import dataclasses
import math
import random
import secrets
import statistics
from collections.abc import Callable

from ..choice import Claims
from ..declaration.subject import Impossible, Subject
from ..errors import UnavailableError
from ..numerics.expectation import Expectation
from ..numerics.operands import Operands
from ..problem import Problem
from ..timing.timer import median_margin
from . import clock
from .candidate import OTHERS, Candidate, CandidateEnded, RemoteError
from .checks import Checker, is_constant
from .clock import Reading
from .compositions import Compositions
from .conduct import Conduct
from .kinds import CHANGING, FIRST, KINDS, operands_of, order
from .mean_errors import Trouble
from .repeats import SUSPICIOUS, cancelled, check_rows, digest, follows, is_from_memory, rounds_products, second_look
from .run import Run
from .shape import Shape
from .turns import Turns
from .twin import Elsewhere

PAGES = (3, 3, 3, 40, 81, 122)
"""Pages at which operands begin: mostly the same one."""
MOST_TWINS = 6
"""Timed calls of a shape that the twin repeats."""
LEAST_CALLS, QUICK_S = 1 + len(KINDS), 0.1
"""Calls that are made if they are timed, or the latest one is so quick, even if the time is over: each kind of operands."""
SLOW_START_S = 10.0
"""Seconds of a call, compilation included, of a GEMM that gets no twin."""
MOST_WRONG = 3
"""Wrong results after which a shape ends."""
MOST_USES, USES_S = 4, 0.25
"""Most calls in a row as programs make them, and seconds until the last of them begins."""
LEAST_EMPTY, MOST_EMPTY, MOST_EMPTY_S = 3, 15, 1.0
"""Numbers, and seconds, of the calls of torch that show what a call adds on a GPU."""
LEAST_GPU_S, LEAST_REPEAT_S = 1e-7, 0.001
HIDDEN, HIDDEN_S = 1.0, 2e-4
"""Ratio, and seconds, by which the time around a GPU's events may exceed the time between them, and that around torch's."""


class Trial:
    """Calls of a GEMM with one problem after another, next to calls of torch in another process.

    Args:
        rival: torch, with its process.
        elsewhere: the GEMM in other processes.
        least: number of calls that are made even if time is over. A few show nothing.
        source: text of the GEMM.
    """

    def __init__(
        self, subject: Subject, candidate: Candidate, rival: tuple[Subject, Candidate], elsewhere: Elsewhere | None = None,
        *, least: int = 1, source: str = "",
    ) -> None:  # fmt: skip
        self._elsewhere, self._least = elsewhere, least
        self._subject, self._candidate = subject, candidate
        self._rival, self._torch = rival
        self._added_s, self._hand_over_s = (0.0, 0.0), 0.0
        self._is_sure = False  # that its results move like torch's
        self.rng = random.Random(secrets.randbits(64))
        self.turns, self._compositions = Turns(self.rng), Compositions(self.rng, source)
        self.pace_s = math.inf
        """Least seconds for a multiplication until now."""

    def calls(
        self, problem: Problem, count: int, *, timed: bool, deadline: float, claims: Claims | None = None, profiled: int = 0,
        composed: bool = False,
    ) -> Shape:  # fmt: skip
        """Make ``count`` calls, at most until ``deadline`` on the judge's clock. If they are ``timed``, torch makes some too.

        ``profiled`` more calls, at places that nobody knows, show what runs in them. ``composed`` operands have structure.
        """
        claims, device = claims or self._subject.claims(problem), self._candidate.device
        checker = Checker(problem, claims, device, secrets.randbits(60), self.turns, self._compositions)
        places = frozenset({1, *self.rng.sample(range(1, count + 1), min(profiled, count))} if profiled else ())
        run = Run(checker=checker, call=self._subject.caller(problem), rng=self.rng, profiled=places, composed=composed)
        refused, number, first_s, kept = "", 0, 0.0, None
        try:
            self._reserve(problem)
            if timed and self._candidate.device.type != "cpu":
                self._added_s, self._hand_over_s = self._of_a_call(run)
            with self._subject.conditions(problem):
                for number, kind in enumerate(["composed"] * count if composed else order(count, self.rng), 1):
                    kept = self._step(run, kind, kept, number, timed=timed)
                    first_s = first_s or self._candidate.last.wall_s
                    least = max(self._least, min(LEAST_CALLS, count) if timed or self._candidate.last.wall_s < QUICK_S else 0)
                    if len(run.wrong) >= MOST_WRONG or (number >= least and clock.now_s() > deadline):
                        break
                if is_from_memory(run.repeats, SUSPICIOUS):
                    run.repeats = second_look(run.checker.fresh, lambda x: self._work_of(run, x, number))
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
            added_s=self._added_s, repeats=tuple(run.repeats), equal=tuple(run.equal), hidden=tuple(run.hidden),
            wrong=tuple(run.wrong), refused=refused, ran=tuple(run.ran), bits=tuple(run.bits),
            bits_profiled=tuple(run.bits_profiled), follows=tuple(run.follows), departs=bool(run.departs),
        )  # fmt: skip

    def _reserve(self, problem: Problem) -> None:
        """Make room for the operands and the result in the memories of both processes."""
        layouts = [layout for _, layout in problem.operands] + list(problem.epilogue.operands if problem.epilogue else ())
        operand_bytes, result_bytes = (sum(x.span * x.dtype.itemsize for x in them) for them in (layouts, [problem.out]))
        for process in (self._candidate, self._torch):
            process.reserve(operand_bytes, result_bytes)

    def _step(self, run: Run, kind: str, kept: Operands | None, number: int, *, timed: bool) -> Operands:
        """Make one call, check its result and return its operands."""
        operands, expectation = operands_of(kind, kept, run.checker, run.rng)
        run.numbers += (new := kept is not operands or kind in CHANGING)
        run.current = run.numbers if new else run.of_kept
        if expectation is None:
            run.of_kept = run.current
        candidate = self._candidate
        if kind in ("fresh", "moved"):
            candidate.place = run.rng.choice(PAGES[: len(PAGES) if number > len(FIRST) else 1])
        paired = timed and kind == "fresh"
        before = self._by_torch(run, operands) if paired and number % 2 else 0.0
        own_s = self._called(run, operands, expectation, number, paired=paired)
        work_s, last, first = self._work_s(), candidate.last, run.last
        if paired:
            torch_s = before or self._by_torch(run, operands)
            run.pairs.append((own_s, torch_s))
            run.bits += [run.last == run.of_torch] * (not self._subject.traits.calls_torch)
            if last.device_us:
                around_s = max(self._torch.last.wall_s - torch_s, self._hand_over_s)
                run.hidden.append(last.wall_s - own_s - around_s > HIDDEN * own_s + HIDDEN_S)
            if run.twins < MOST_TWINS and rounds_products(operands):
                self._repeat(run, operands, number)
        if kind == "fresh" and (number == 1 or (timed and len(run.pairs) % 2 == 0)):
            candidate.place = run.rng.choice(PAGES)
            self._called(run, operands, expectation, number, paired=timed or number > 1)
            run.equal.append(run.last == first)
            if run.last != first and self._subject.traits.deterministic:
                run.wrong.append((number, Trouble(text="equal operands give other bits, which it declares not to do"), False))
            if work_s > LEAST_REPEAT_S and number > 1:
                run.repeats.append((work_s, self._work_s()))
        if number in run.profiled:
            self._profiled(run, number, timed=timed)
            self._used(run, number)
            self._alone(run, number)
        return operands if expectation is None else kept or operands

    def _work_of(self, run: Run, operands: Operands, number: int) -> float:
        """Return the work of one more call with new operands, or with those of the call before at other addresses."""
        run.numbers += 1
        run.current, self._candidate.place = run.numbers, run.rng.choice(PAGES)
        self._called(run, operands, None, number)
        return self._work_s()

    def _called(self, run: Run, operands: Operands, expectation: Expectation | None, number: int, *, paired: bool = True) -> float:
        takes_out = self._subject.traits.out and not paired
        out = run.out(self._candidate.device, is_first=number == 1) if takes_out else None
        run.result = result = run.call(operands.tensors, operands.scalars, out)
        run.calls += 1
        own_s, problem = self._time_s(self._candidate), run.checker.problem
        self.pace_s = min(self.pace_s, own_s / max(problem.batch * problem.m * problem.n * problem.k, 1))
        trouble = run.checker.trouble(result, operands, expectation, composed=run.composed)
        bits = digest(result)
        if trouble is not None:
            run.wrong.append((number, trouble, run.right.get(bits, run.current) < run.current and not is_constant(result)))
        if trouble is None or trouble.rough:
            run.right.setdefault(bits, run.current)
        run.last = bits
        return own_s

    def _profiled(self, run: Run, number: int, *, timed: bool) -> None:
        """Make a call with new operands of which the operations of torch are known."""
        self._candidate.profiling = True
        run.current = run.numbers = run.numbers + 1
        try:
            self._called(run, operands := run.checker.fresh(), None, number)
        finally:
            self._candidate.profiling = False
        run.ran.append(frozenset(self._candidate.ran))
        check_rows(self._subject, run, operands, number)
        if timed and number > 1:
            self._by_torch(run, operands)
            run.bits_profiled.append(run.last == run.of_torch)

    def _used(self, run: Run, number: int) -> None:
        """Let another process of the GEMM be called as programs do, in some manners, which must not make its result wrong."""
        until = clock.now_s() + USES_S
        for use in range(MOST_USES):
            if (elsewhere := self._others()) is None or (use and clock.now_s() > until):
                return
            operands = run.checker.fresh(in_turn=use == 0)
            found = elsewhere.in_use(run.checker.problem, operands, self.turns, self._subject.traits)
            if found is not None and (trouble := run.checker.trouble(found[0], operands)) is not None:
                run.wrong.append((number, dataclasses.replace(trouble, text=f"{found[1]}, {trouble.text}"), False))
                return

    def _alone(self, run: Run, number: int) -> None:
        """Make a call whose result shows each rounding of its sums, and repeat it in the twin."""
        if (elsewhere := self._others()) is not None and elsewhere.has_twin:
            operands = cancelled(run)[0]
            self._by_torch(run, operands)
            self._repeat(run, operands, number, checked=False)

    def _moves(self, run: Run, elsewhere: Elsewhere) -> tuple[Operands, Callable[[object], bool]]:
        """Call as ``cancelled`` does. Alike are results that do not differ from this as torch's there differs from torch's here."""
        operands = cancelled(run)[0]
        self._by_torch(run, operands)
        here, there = (run.result, run.by_torch), elsewhere.torch_there(run.checker.problem, operands, self._candidate.place)
        return operands, lambda result: not follows(here, (result, there))

    def _repeat(self, run: Run, operands: Operands, number: int, *, checked: bool = True) -> None:
        """Repeat a call in the twin, whose result must be right too. Count it if torch's result has other bits there."""
        elsewhere, problem, place = self._others(), run.checker.problem, self._candidate.place
        if elsewhere is None or (found := elsewhere.in_twin(problem, operands, place)) is None:
            return
        run.twins += 1
        if checked and (trouble := run.checker.trouble(found[0], operands)) is not None:
            run.wrong.append((number, dataclasses.replace(trouble, text=f"in a new process, {trouble.text}"), False))
        own, by_torch = map(digest, found[:2])
        run.ran += [found[2]] * (run.twins > 1)  # in its first call a GEMM may compare itself with torch
        differs, moved = own != run.last, by_torch != run.of_torch
        alike = moved and follows((run.result, run.by_torch), found[:2])
        if alike and run.moves is None and not run.wrong:  # it may take another way in each process
            self._is_sure = self._is_sure or elsewhere.departs(problem, place, lambda: self._moves(run, elsewhere))
            run.moves = self._is_sure
        run.follows += [alike and (own == by_torch if run.moves is None else run.moves)] * moved
        if differs and run.departs is None and not (found[2] or run.wrong):
            run.departs = elsewhere.departs(problem, place, lambda: cancelled(run))

    def _others(self) -> Elsewhere | None:
        """Return the other processes of the GEMM, or None if it compiles for too long in each."""
        if self._elsewhere is not None and (slowest_s := self._candidate.slowest_s) > SLOW_START_S:
            self._elsewhere.give_up(f"a call took {slowest_s:.0f} s")
        return self._elsewhere

    def _by_torch(self, run: Run, operands: Operands) -> float:
        self._torch.place = self._candidate.place
        run.by_torch = self._result_of_torch(run, operands)
        run.of_torch = digest(run.by_torch)
        for change in self._torch.changes():
            self._candidate.note(Conduct.REACHES, f"{OTHERS} torch's process or its parent, {change}")
        return self._time_s(self._torch)

    def _result_of_torch(self, run: Run, operands: Operands) -> object:
        try:
            return self._rival.caller(run.checker.problem)(operands.tensors, operands.scalars, None)
        except CandidateEnded as error:
            raise UnavailableError(f"nothing to compare with: {error}") from error

    def _work_s(self) -> float:
        """Return the work of the latest call: CPU time, which other processes do not add to, or time of the GPU."""
        return self._candidate.last.device_us / 1e6 or self._candidate.last.cpu_s

    def _time_s(self, candidate: Candidate) -> float:
        """Return the time of the latest call. On a GPU it is that between two events, without what the judge adds."""
        last = candidate.last
        return max(last.device_us / 1e6 - self._added_s[0], LEAST_GPU_S) if last.device_us else last.wall_s

    def _of_a_call(self, run: Run) -> tuple[tuple[float, float], float]:
        """Return the seconds, with their margin, that the judge adds to a call on the GPU, and those around it by its own clock.

        torch's GEMM has a known time in a CUDA graph. Here it takes longer, by the events, by a launch without a graph, and by the
        delivery of the result.
        """
        operands = run.checker.fresh()
        self._torch.in_graph = True
        try:
            self._result_of_torch(run, operands)
        finally:
            self._torch.in_graph = False
        known_us, readings = self._torch.last.device_us, list[Reading]()
        while len(readings) < LEAST_EMPTY or (len(readings) < MOST_EMPTY and sum(x.wall_s for x in readings) < MOST_EMPTY_S):
            self._result_of_torch(run, operands)
            readings.append(self._torch.last)
        added_us, margin_us = median_margin([x.device_us - known_us for x in readings])
        around_s = statistics.median(x.wall_s - known_us / 1e6 for x in readings)
        return (max(added_us, 0.0) / 1e6, margin_us / 1e6), around_s
