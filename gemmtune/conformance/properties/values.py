"""Properties of values: exact probes, the error bound, the grade."""

from ...declaration.labels import SINGLE
from ...declaration.layouts import OperandLayout
from ...numerics.bounds import exact_limit
from ...numerics.compare import MOST, grade
from ...numerics.one_hot import OneHotProbe
from ...numerics.propagate import Approximate
from ...numerics.reference import Region, reference
from ...problem.dtypes import dtype_info
from ...problem.operations import DENSE_OPS
from ..bench.bench import Bench
from ..bench.outcome import Expected
from ..cases.case import Case
from ..cases.sampling import Sample, Size, all_pairs, long_shapes
from ..cases.scope import Scope
from .property import Check, Property

FILLS = ("normal", "uniform", "wide", "cancelling", "ones")
GRADED: tuple[Size, ...] = ((64, 96, 256), (128, 96, 1000), (72, 80, 40), (100, 101, 515), (64, 64, 4096))
"""Sizes of at least 4096 elements each, so that their root mean square is certain to a few percent."""
UNGRADED = "float16 and bfloat16 are not tested, or are declared to be summed in a narrow dtype"


def check_integers(bench: Bench) -> None:
    """Check operands of −1, 0 and 1, and a small integer added operand. The result is exact."""
    operands = bench.probes.integers()
    bench.expect(bench.call(operands), operands, name="integers", exact=True)


def _expect_one_hot(bench: Bench, probe: OneHotProbe | None) -> None:
    """Check the single right result of a probe. Fall back to integers if K or the strides allow no such probe."""
    if probe is None:
        check_integers(bench)
    else:
        bench.expect_one_hot(bench.call(probe.operands), probe)


def check_one_hot_a(bench: Bench) -> None:
    """Check rows of a that have a single 1."""
    probes = bench.probes
    _expect_one_hot(bench, probes.rows_of_b(probes.random().right, special=False) if probes.free_a else None)


def check_one_hot_b(bench: Bench) -> None:
    """Check columns of b that have a single 1."""
    probes = bench.probes
    _expect_one_hot(bench, probes.cols_of_a(probes.random().left, special=False) if probes.free_b else None)


def check_width(bench: Bench) -> None:
    """Check that small products survive next to a large one."""
    limit = exact_limit(bench.problem, bench.claims)
    _expect_one_hot(bench, bench.probes.width(limit) if bench.probes.can_measure_width else None)


def check_cancellation(bench: Bench) -> None:
    """Check integers whose sums over K grow large and cancel. Every element counts, and the last along K weighs most."""
    limit = exact_limit(bench.problem, bench.claims)
    _expect_one_hot(bench, bench.probes.cancel(limit) if bench.probes.free_a and bench.probes.free_b else None)


def check_bound(bench: Bench) -> None:
    """Check random data within the claimed error bound. The variant is a fill of ``numerics.fills``, normal by default."""
    fill = bench.case.variant or "normal"
    operands = bench.probes.random() if fill == "normal" else bench.probes.filled(fill, fill)
    bench.expect(bench.call(operands), operands, name=f"{fill} random data")


def check_grade(bench: Bench) -> None:
    """Check the error bound, and that the error is not noticeably above that of rounding the exact result once.

    The second check does not apply to claims of a narrow accumulator, partial sums or epilogue.
    """
    operands = bench.probes.random()
    result = bench.call(operands)
    claims, least = bench.claims, dtype_info(bench.problem.accumulator).unit_roundoff
    narrow = any(dtype_info(x).unit_roundoff > least for x in (claims.accumulate, claims.partials, claims.epilogue_input))
    if not bench.expect(result, operands, name="normal random data") or narrow:
        return
    exact = reference(operands, Region()).value
    bench.grade = grade(result.reshape(exact.shape), exact)
    if bench.grade > MOST:
        info = dtype_info(bench.problem.out.dtype)
        once = Expected(
            name=f"grade {bench.grade:.3g}, the error over that of rounding the exact result once, expected at most {MOST}",
            operands=operands,
            right=Approximate(value=exact, error=info.unit_roundoff * exact.abs() + info.smallest_subnormal),
        )
        bench.explain(result, once)


def _graded(scope: Scope) -> tuple[str, ...]:
    """Return the dtypes narrower than their accumulator, except those with a declared narrow accumulator or partial sums."""
    narrow = scope.traits.accumulate.keys() | scope.traits.partials.keys()
    return tuple(name for name in ("float16", "bfloat16") if name not in narrow)


def _probe(name: str, meaning: str, check: Check, smoke: int, free: str = "") -> Property:
    """Return a property whose cases have no repeated terms in the ``free`` operands."""

    def admits(case: Case) -> bool:
        return all(OperandLayout.parse(getattr(case, x)).kind not in ({"a": "cols0", "b": "rows0"}[x], "window") for x in free)

    sample = Sample(budget=(smoke, 320, 1900), shapes=long_shapes, pairs=all_pairs, every_pair=True, admits=admits, ops=SINGLE)
    return Property(name, meaning, check, sample, drawn=True)


PROPERTIES = (
    _probe("integers", "products of −1, 0 and 1 are exact, with alpha, beta and an added operand", check_integers, 64),
    _probe("one-hot-a", "rows of a with a single 1 give rows of b, every bit of them", check_one_hot_a, 32, "a"),
    _probe("one-hot-b", "columns of b with a single 1 give columns of a, every bit of them", check_one_hot_b, 32, "b"),
    _probe("width", "small products are not lost next to large ones", check_width, 32, "ab"),
    _probe("cancellation", "integers whose sums grow large and cancel give the exact difference", check_cancellation, 64, "ab"),
    Property(
        "bound", "random data of several kinds within the error bound of the claimed arithmetic", check_bound,
        Sample(budget=(90, 640, 4000), shapes=long_shapes, pairs=all_pairs, variants=FILLS, every_pair=True, ops=SINGLE),
        drawn=True,
    ),
    Property(
        "grade", "the error of 16-bit results is hardly larger than that of rounding them once", check_grade,
        lambda name, scope: Sample(budget=(16, 48, 200), shapes=GRADED, dtypes=_graded(scope), ops=DENSE_OPS)(name, scope),
        needs=lambda scope: None if any({*_graded(scope)} & {*scope.tested_dtypes(op)} for op in scope.tested_ops) else UNGRADED,
    ),
)  # fmt: skip
