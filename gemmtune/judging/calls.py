"""Shapes of the calls that a verdict rests on: small ones, which are called often, then larger ones, next to torch."""

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..conformance.cases.case import Case
from ..conformance.cases.statement import problem_of
from ..declaration.subject import Subject
from ..untrusted import clock
from ..untrusted.candidate import Candidate
from ..untrusted.kinds import KINDS
from ..untrusted.shape import Shape
from ..untrusted.trial import Trial
from ..untrusted.twin import Elsewhere
from . import sizes
from .levels import Level

GRACE_S = 5.0
"""Seconds that a shape may take when the time is over."""
TIMED_OPS = ("mm", "bmm", "addmm", "baddbmm", "int_mm")
"""Operations for which torch has a function of the same name."""
SMALL_SIDE, SMALL_MACS = 64, 2**19
DEEP, DECODING = (range(8, 41), range(8, 41), range(4096, 12289)), (range(1, 5), range(200, 1001), range(1024, 4097, 64))
"""Ranges of M, N and K of large operands with a small result, which a GEMM may keep without a look at all of them.

The second ones are those of a model that decodes.
"""
LARGE_MACS, LARGE_CALLS = 2**26, 3
"""Size and number of the calls with each operation, and each dtype, of which no shape is timed."""
LAYOUTS = (("row", "row"), ("row", "col"), ("col", "row"), ("col", "col"))
"""Layouts of a and b. The small shapes have the first ones, the others have all in turn."""
LINE = 65, 400
"""Sizes beside a single row or column, which lies in a wider matrix."""
EACH_KIND = 1 + len(KINDS)
"""Number of calls that have each kind of operands."""
ALONE = 4
"""Factor of the calls of a model with its own inputs, if it refuses all other sizes."""
GPU_MACS = 2**36
TIMED_S = 0.5
"""Seconds that a timed call on a CPU should take at most, at the least time that a multiplication has taken."""
COMPILES_S = 2.0
"""Seconds of a call in which a GEMM may compile, or tune, for its shape."""
NAMED_MACS, NAMED_CALLS = 2**31, 2
"""Size and number of the calls of usual sizes, and of those that the source names."""
NARROWEST, WIDEST = 0.5, 1.6
"""Range of a side, in multiples of that of a cube."""
COMPOSED_MACS, COMPOSED_SIDE = 2**15, (48, 96)
"""Multiplications of calls with composed operands, of which few allow many calls, and sides of a square operand."""
SQUARE, ROUND = 3, ("any",) + ("a power of two",) * 5
"""Number of drawn shapes of which one is square, and sides of small ones. Transforms take powers of two."""
PER_M = 10**6
BATCHES = ((2, 3, 12), (33, 70, 130))
"""Few and many matrices of a batch, which the shapes have in turn."""


def timed_ops(subject: Subject) -> list[str]:
    """Return the operations that torch has too. Times are those of the first one."""
    return [op for op in TIMED_OPS if op in (subject.traits.ops or ("mm",))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Calls of one shape. They are in pairs with torch's if they are ``timed``."""

    case: Case
    calls: int
    timed: bool = False
    profiled: int = 0
    named: bool = False
    """True for usual sizes and those that the source names, whose calls have a time of their own."""
    sure: bool = False
    """True for calls that are made even if the time is over."""

    quick: bool = False
    """True for calls that are left to those GEMMs which compile nothing for a shape."""

    @property
    def untimed(self) -> "Planned":
        """Few of these calls, without a time."""
        return dataclasses.replace(self, calls=min(self.calls, LARGE_CALLS), timed=False)

    @property
    def key(self) -> str:
        """Kind of the calls. Some of each kind are made even if the time is over."""
        large = self.case.m * self.case.n * self.case.k > SMALL_MACS
        return "timed" if self.timed else f"{self.case.op} {self.case.dtype} {self.case.a} {self.case.b} {large}"


def timed_calls(
    subject: Subject, candidate: Candidate, rival: tuple[Subject, Candidate], level: Level, taken: Sequence[Case],
    source: str, elsewhere: Elsewhere | None, refused: Sequence[Case] = (),
) -> Iterator[Shape]:  # fmt: skip
    """Yield the calls of each shape.

    Args:
        taken: cases of the suite that the GEMM took.
        refused: those that it refused.
        source: its text.
    """
    trial, kind = Trial(subject, candidate, rival, elsewhere, source=source), candidate.device.type
    if not (of_op := _dtypes(timed_ops(subject), taken, candidate.inputs)):
        return
    own = sizes.of_inputs(candidate.inputs, kind)
    if own is not None and own.op in of_op:
        until, alone = clock.now_s() + level.calls_s / 2, 1 if taken else ALONE
        yield trial.calls(
            problem_of(own, kind), alone * level.timed_calls, timed=True, deadline=until, profiled=alone * level.profiled
        )
    deadline, of_named, seen = clock.now_s() + level.calls_s, math.inf, set[str]()
    for asked in _plan(trial, subject, level, of_op, (taken, refused), sizes.named_in(source), on_gpu=kind != "cpu"):
        planned, now = asked, clock.now_s()
        if planned.named:
            of_named = min(of_named, now + level.named_s)
            if (now > of_named and not planned.sure) or (planned.quick and candidate.slowest_s > COMPILES_S):
                continue
        else:
            if now > deadline and asked.key in seen and not planned.sure:
                planned = asked.untimed
                if planned.key in seen:
                    continue
            seen |= {planned.key, planned.untimed.key}
        problem, until = problem_of(planned.case, kind), of_named if planned.named else deadline + GRACE_S
        until = math.inf if planned.sure else until
        yield trial.calls(problem, planned.calls, timed=planned.timed, deadline=until, profiled=planned.profiled)
    for case in _composed(trial, subject, of_op, own):
        until = clock.now_s() + level.composed_s
        yield trial.calls(problem_of(case, kind), level.composed_calls, timed=False, deadline=until, composed=True)


def _dtypes(ops: Sequence[str], taken: Sequence[Case], inputs: object) -> dict[str, tuple[str, ...]]:
    """Return the dtypes of each operation in the cases that were taken, or of one operation with a model's own inputs."""
    of_op = {op: tuple(dict.fromkeys(case.dtype for case in taken if case.op == op)) for op in ops}
    floats = [case.dtype for case in taken if case.op != "int_mm"]
    unseen = {op: tuple(floats[:1]) for op, dtypes in of_op.items() if not dtypes and op != "int_mm" and floats}
    return {op: dtypes for op, dtypes in of_op.items() if dtypes} | unseen or dict.fromkeys(ops[:1], sizes.dtype_of(inputs))


def _composed(trial: Trial, subject: Subject, of_op: Mapping[str, Sequence[str]], own: Case | None) -> Iterator[Case]:
    """Yield small cases, those of squares among them, which allow more structure, and the case of a model's own inputs."""
    wide = trial.rng.randint(*COMPOSED_SIDE)
    few = COMPOSED_MACS // wide**2
    for number, sides in enumerate(((), (few, wide, wide), (), (wide, few, wide))):
        op = list(of_op)[number // 2 % len(of_op)]
        case = _case(subject, op, trial.rng.choice(of_op[op] or ["float32"]))
        drawn = _drawn(trial, subject, case, COMPOSED_MACS, square=number == 0)
        yield legal(case.changed(**dict(zip("mnk", sides, strict=True))), subject) if sides else drawn
    if own is not None and own.op in of_op:
        yield own


def _plan(
    trial: Trial, subject: Subject, level: Level, of_op: Mapping[str, Sequence[str]],
    suite: tuple[Sequence[Case], Sequence[Case]], named: Sequence[int], *, on_gpu: bool,
) -> Iterator[Planned]:  # fmt: skip
    """Yield small shapes of all operations, timed ones of the first, others of sizes that its source names, and large ones."""
    op, *others = of_op
    layouts = {x: _layouts(subject, x, suite, trial.rng) for x in of_op}
    dtypes = sorted(of_op[op], key=lambda dtype: dtype != "float32")  # on a busy machine one shape alone is timed
    turns = Counter[str]()

    def drawn(op: str, dtype: str, macs: int) -> Case:
        number, turns[op] = turns[op], turns[op] + 1
        a, b = layouts[op][number % len(layouts[op])]
        case = _case(subject, op, dtype).changed(a=a, b=b)
        batch = trial.rng.choice(BATCHES[(number + number // 2) % 2]) if case.batched else 1
        return _drawn(trial, subject, case.changed(batch=batch), max(macs // batch, 1), square=number % SQUARE == 0)

    in_turn = [dtypes[number % len(dtypes)] if dtypes else "float32" for number in range(max(2, level.shapes))]
    small, timed = [(op, dtype, level.small_calls) for dtype in in_turn[:2]], in_turn[: level.shapes]
    fewer = max(level.small_calls // 4, EACH_KIND)
    small += [(x, dtype, fewer) for _ in BATCHES for x in others for dtype in of_op[x][:1]]
    flat = [dict(zip("mnk", map(trial.rng.choice, ranges), strict=True)) for ranges in (DEEP, DECODING)]
    deep, decoding = (legal(_case(subject, op, in_turn[0]).changed(**sides), subject) for sides in flat)
    yield Planned(case=deep, calls=fewer, profiled=level.profiled)
    for op_, dtype, calls in small:
        yield Planned(case=_scaled(subject, drawn(op_, dtype, SMALL_MACS)), calls=calls, profiled=level.profiled)
    for op_, of_it in of_op.items():
        case = _scaled(subject, _case(subject, op_, "float32" if "float32" in of_it else (*of_it, "float32")[0]))
        for m, n, k in sizes.thin_or_square(trial.rng):
            yield Planned(case=legal(case.changed(m=m, n=n, k=k), subject), calls=LARGE_CALLS, sure=True)
    takes_s = EACH_KIND * decoding.m * decoding.n * decoding.k * trial.pace_s
    yield Planned(case=decoding, calls=EACH_KIND, profiled=level.profiled, sure=takes_s < level.named_s)
    largest = GPU_MACS if on_gpu else level.largest * PER_M
    for number, dtype in enumerate(timed):
        quick = largest if on_gpu else min(largest, max(round(TIMED_S / trial.pace_s), LARGE_MACS))
        yield Planned(case=drawn(op, dtype, quick), calls=level.timed_calls, timed=True, profiled=level.profiled)
        if number == 0:
            cases = [_case(subject, op, dtype) for dtype in dtypes or ["float32"]]
            yield from _named(trial, subject, level, cases, named)
    for case in _untimed(subject, of_op, timed, lambda op, dtype: drawn(op, dtype, min(largest, LARGE_MACS))):
        yield Planned(case=case, calls=LARGE_CALLS, profiled=level.profiled)
    for case in _extreme(subject, of_op, trial.rng):
        sure = case.batch * case.m * case.n * case.k * trial.pace_s * NAMED_CALLS < level.named_s
        yield Planned(case=case, calls=NAMED_CALLS, named=True, sure=sure, quick=True)


def _named(trial: Trial, subject: Subject, level: Level, cases: Sequence[Case], numbers: Sequence[int]) -> Iterator[Planned]:
    """Yield calls of usual sizes, and of those that the source names. The first of these are made even if the time is over."""
    for place, (m, n, k) in enumerate(itertools.islice(sizes.in_turns(numbers, NAMED_MACS, trial.rng), level.named_shapes)):
        case = legal(trial.rng.choice(cases).changed(m=m, n=n, k=k), subject)
        sure = place < sizes.FIRST and m * n * k * trial.pace_s < level.named_s
        yield Planned(case=case, calls=NAMED_CALLS, named=True, sure=sure)


def _extreme(subject: Subject, of_op: Mapping[str, Sequence[str]], rng: random.Random) -> Iterator[Case]:
    """Yield cases of extreme sizes: batches for operations on these, and the others for the first one without."""
    flat = next((op for op in of_op if not _case(subject, op, "float32").batched), "")
    batched = next((op for op in of_op if _case(subject, op, "float32").batched), "")
    for batch, m, n, k in sizes.extreme(LARGE_MACS, rng):
        if op := batched if batch > 1 else flat or batched:
            case = _case(subject, op, rng.choice(of_op[op] or ["float32"]))
            yield legal(case.changed(m=m, n=n, k=k, batch=batch if case.batched else 1), subject)
    if flat:
        m, n, k = sizes.past_32_bits(rng)
        yield legal(_case(subject, flat, rng.choice(of_op[flat] or ["float32"])).changed(m=m, n=n, k=k), subject)
    if flat and "padded" in (subject.traits.layouts or ("padded",)):  # it may refuse it
        case = _case(subject, flat, (*of_op[flat], "float32")[0]).changed(a="row+8", b="row+8")
        long = rng.randint(*LINE)
        yield from (legal(case.changed(m=m, n=n, k=rng.randint(*LINE)), subject) for m, n in ((long, 1), (1, long)))


def _untimed(
    subject: Subject, of_op: Mapping[str, Sequence[str]], timed: Sequence[str], drawn: Callable[[str, str], Case]
) -> Iterator[Case]:
    """Yield large cases of the operations and dtypes that have no time, then those with a column-major operand."""
    op, *others = of_op
    yield from (drawn(op, dtype) for dtype in of_op[op] if dtype not in timed)
    yield from (drawn(x, of_op[x][0]) for x in others if of_op[x])
    if "col" in (subject.traits.layouts or ("col",)):  # it may refuse it
        for dtype in dict.fromkeys(timed):
            case = drawn(op, dtype)
            yield from (case.changed(a=a, b=b) for a, b in LAYOUTS[1:3])


def _layouts(subject: Subject, op: str, suite: tuple[Sequence[Case], Sequence[Case]], rng: random.Random) -> list[tuple[str, str]]:
    """Return the layouts of both operands in the order of the shapes: those that the GEMM took, and first one that is unknown."""
    taken, refused = ([case for case in cases if case.op == op] for cases in suite)
    found = [(a, b) for a, b in LAYOUTS if a in {"row", *(x.a for x in taken)} and b in {"row", *(x.b for x in taken)}]
    unknown = "col" in (subject.traits.layouts or ("col",)) and not any(x.b == "col" for x in (*taken, *refused))
    return (list(LAYOUTS[:2]) if unknown else found[:2]) + rng.sample(found, len(found))


def _case(subject: Subject, op: str, dtype: str) -> Case:
    """Return a case of one element."""
    return Case(property_name="bound", op=op, dtype=dtype, m=1, n=1, k=1, bias=(*subject.traits.bias, "n")[0])


def _scaled(subject: Subject, case: Case) -> Case:
    """Return the case with any alpha and beta that the GEMM declares to take."""
    added = case.op in ("addmm", "baddbmm")
    return case.changed(**{name: "general" for name in ("alpha", "beta") if added and getattr(subject.traits, name)})


def _drawn(trial: Trial, subject: Subject, case: Case, macs: int, *, square: bool = False) -> Case:
    """Return the case with sizes of at most about ``macs`` multiplications. ``square`` ones may be special in more ways."""
    traits, rng = subject.traits, trial.rng
    side = min(SMALL_SIDE, macs ** (1 / 3)) if macs <= SMALL_MACS else macs ** (1 / 3)
    widest = macs ** (1 / 3) if square else WIDEST * side
    sides = [max(least, int(rng.uniform(NARROWEST * side, widest)), 1) for least in traits.least]
    sides = sides[:1] * 3 if square else sides
    while math.prod(sides) > macs:
        sides[rng.randrange(3)] //= 2
    sides = sizes.with_tails(sides, trial.turns)
    if square and macs <= SMALL_MACS and trial.turns.next(ROUND) != "any":
        sides[0] = 2 ** int(math.log2(sides[0]))
    bias = "m1" if square and "m1" in traits.bias else case.bias  # a bias of a row would fit there, too
    return legal(case.changed(m=sides[0], n=sides[0 if square else 1], k=sides[0 if square else 2], bias=bias), subject)


def legal(case: Case, subject: Subject) -> Case:
    """Return the case with the next larger sizes that the GEMM declares, and two matrices or more if it is for batches."""
    traits = subject.traits
    sides = zip((case.m, case.n, case.k), traits.least, traits.multiples, strict=True)
    m, n, k = (max(-(-max(size, least) // by) * by, by) for size, least, by in sides)
    return case.changed(m=m, n=n, k=k, batch=max(case.batch, 2) if case.batched else 1)
