"""Properties that relate two results of a GEMM to each other, without a reference.

Operands are small integers, whose sums are exact in any order, so that the relations hold bit by bit. If K is too large for that
under the GEMM's claims, the error bound judges a result on random data instead.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch

from ...declaration.labels import DTYPES, ONE_PRODUCT
from ...numerics.operands import Operands
from ...numerics.quantized import numbers
from ...problem import Layout
from ...problem.dtypes import dtype_info
from ..bench.bench import Bench
from ..cases.sampling import Sample, Size
from .property import Property, exact_integers, keeps_significands, made, made_b, tested
from .special import expect_exactly

SIZES: tuple[Size, ...] = ((64, 64, 64), (33, 47, 31), (96, 40, 65), (17, 130, 16), (1, 40, 64), (65, 1, 33))
TRANSPOSABLE = ("mm", "bmm", "int_mm", "scaled_mm")
"""Operations whose two operands have the same kind, with nothing else but scales."""
A_SCALE, B_SCALE = 8.0, 4.0
"""Powers of two, so that scaling the operands changes only the exponents of the result."""
Called = tuple[Bench, Operands]


def _expect_alike(plain: Called, other: Called, relate: Callable[..., torch.Tensor], *, name: str, exact: bool = True) -> None:
    """Check that the result of ``other`` is ``relate(result of plain, result of other)``. Explain the wrong one if it is not."""
    result, changed = (bench.call(operands) for bench, operands in (plain, other))
    expected = relate(result, changed)
    if torch.equal(changed.nan_to_num(), expected.nan_to_num()):
        return
    for (bench, operands), got, words in ((other, changed, name), (plain, result, f"{name}, before")):
        bench.forget_results()
        if not bench.expect(got, operands, name=words, exact=exact):
            return
    other[0].expect_equal(changed, expected, other[1], name=name, known=False)


def check_permutation(bench: Bench) -> None:
    """Check that permuting the rows of a and the columns of b permutes the elements of the result."""
    operands = exact_integers(bench)
    if operands is None:
        return _bounded(bench)
    generator = torch.Generator().manual_seed(bench.case.seed)
    m, n = bench.problem.m, bench.problem.n
    rows, cols = (torch.randperm(size, generator=generator).to(bench.device) for size in (m, n))

    def moved(layout: Layout | None, tensor: torch.Tensor | None, sides: str = "mn") -> torch.Tensor | None:
        """Return the tensor permuted along the dimensions in ``sides`` that have the length of the result's."""
        if layout is None or tensor is None:
            return None
        values = tensor.double()
        if "m" in sides and tensor.dim() >= 2 and tensor.shape[-2] == m:
            values = values.index_select(-2, rows)
        return made(layout, values.index_select(-1, cols) if "n" in sides and tensor.shape[-1:] == (n,) else values)

    problem = bench.problem
    factors = zip(problem.epilogue.operands if problem.epilogue else (), operands.extra, strict=True)
    permuted = dataclasses.replace(
        operands,
        a=made(problem.a, operands.a.double().index_select(-2, rows)),
        b=made(problem.b, operands.b.double().index_select(-1, cols)),
        inp=moved(problem.inp, operands.inp),
        scale_a=moved(problem.scale_a, operands.scale_a, "m"),
        scale_b=moved(problem.scale_b, operands.scale_b, "n"),
        zero_b=moved(problem.zero_b, operands.zero_b, "n"),
        extra=tuple(factor for layout, x in factors if (factor := moved(layout, x)) is not None),
    )
    return _expect_alike(
        (bench, operands),
        (bench, permuted),
        lambda result, _: result.index_select(-2, rows).index_select(-1, cols),
        name="rows of a and columns of b in another order",
    )


def check_transpose(bench: Bench) -> None:
    """Check that bᵀ @ aᵀ is the transposed a @ b."""
    operands = exact_integers(bench)
    if operands is None:
        return _bounded(bench)
    case = bench.case
    other = bench.sibling(m=case.n, n=case.m, a=case.b, b=case.a)
    mirrored = dataclasses.replace(
        operands,
        a=made(other.problem.a, operands.b.double().mT),
        b=made(other.problem.b, operands.a.double().mT),
        scale_a=_transposed(operands.scale_b),
        scale_b=_transposed(operands.scale_a),
    )
    name = "bᵀ @ aᵀ compared with the transposed a @ b"
    return _expect_alike((bench, operands), (other, mirrored), lambda result, _: result.mT, name=name)


def check_scaling(bench: Bench) -> None:
    """Check that a or b (the variant) and the added operand times a power of two scale the result by it.

    Operands are random if equal inputs give equal bits. They are integers if the order of a sum may differ between calls.
    """
    operands = bench.probes.random() if bench.claims.deterministic else exact_integers(bench)
    if operands is None:
        return _bounded(bench)
    problem, inp, which = bench.problem, operands.inp, bench.case.variant or "a"
    factor = A_SCALE if which == "a" else B_SCALE
    scaled = dataclasses.replace(
        operands,
        a=made(problem.a, operands.a.double() * factor) if which == "a" else operands.a,
        b=made(problem.b, operands.b.double() * factor) if which == "b" else operands.b,
        inp=None if inp is None or problem.inp is None else made(problem.inp, inp.double() * factor),
    )

    def times(result: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the scaled result, but ``other`` where scaling is not exact."""
        return torch.where(_rounded_apart(result, factor), other, (result.double() * factor).to(result.dtype))

    name, exact = f"{which} times {factor:g}", not bench.claims.deterministic
    return _expect_alike((bench, operands), (bench, scaled), times, name=name, exact=exact)


def _rounded_apart(result: torch.Tensor, factor: float) -> torch.Tensor:
    """Return True where a sum and its multiple may round differently: up to the smallest normal number, and on overflow.

    A sum just below the smallest normal number may round to it, and its multiple to less than the multiple of it.
    """
    size, info = result.double().abs(), dtype_info(result.dtype)
    return (size <= info.smallest_normal) | (size * factor > info.largest)


def check_k_padding(bench: Bench) -> None:
    """Check that zeros appended along K to a (or b, the variant) change nothing, against any numbers of the other operand."""
    operands = exact_integers(bench)
    which, _, count = (bench.case.variant or "a.1").partition(".")
    other = bench.sibling(k=bench.case.k + int(count) * bench.subject.traits.multiples[2] * (2 if bench.case.packed else 1))
    padding = exact_integers(other)
    if operands is None or padding is None:
        return _bounded(bench)
    k = bench.case.k
    encoding = bench.problem.encoding
    a, b = padding.a.double(), numbers(padding.b, encoding).double()
    a[..., :k], b[..., :k, :] = operands.a.double(), numbers(operands.b, encoding).double()
    if which == "a":
        a[..., k:] = 0
    else:
        b[..., k:, :] = 0
    padded = dataclasses.replace(
        operands,
        a=made(other.problem.a, a),
        b=made_b(other.problem, b),
        scale_a=_lengthened(operands.scale_a, padding.scale_a),
        scale_b=_lengthened(operands.scale_b, padding.scale_b),
        zero_b=_lengthened(operands.zero_b, padding.zero_b),
    )
    name = f"K padded from {k} to {other.case.k} with zeros"
    return _expect_alike((bench, operands), (other, padded), lambda result, _: result, name=name)


def check_identity(bench: Bench) -> None:
    """Check a times the identity, or the identity times b (the variant), bit by bit if the claims keep one input's bits."""
    probes, problem = bench.probes, bench.problem
    kind = "normal" if keeps_significands(bench) else "integers"
    plain = problem.precision.input_mode == "ieee"
    operands = probes.filled(kind, kind, general=False) if plain or kind == "integers" else probes.random()
    if bench.case.variant == "b":
        operands = dataclasses.replace(operands, a=made(problem.a, _identity(operands.a)))
    else:
        operands = dataclasses.replace(operands, b=made_b(problem, _identity(numbers(operands.b, problem.encoding))))
    expect_exactly(bench, operands, name="times the identity")


def _bounded(bench: Bench) -> None:
    operands = bench.probes.random()
    bench.expect(bench.call(operands), operands)


def _lengthened(scale: torch.Tensor | None, longer: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``longer`` starting with the numbers of ``scale``. Return ``scale`` if both have one shape."""
    if scale is None or longer is None or scale.shape == longer.shape:
        return scale
    result = longer.clone()
    result[: scale.shape[0], : scale.shape[1]] = scale
    return result


def _transposed(scale: torch.Tensor | None) -> torch.Tensor | None:
    return scale.mT.contiguous() if scale is not None and scale.dim() == 2 else scale


def _identity(like: torch.Tensor) -> torch.Tensor:
    return torch.eye(like.shape[-1], dtype=torch.float64, device=like.device).expand(like.shape)


_has_products = tested((*TRANSPOSABLE, "mixed_mm"), "every tested operation adds something to the product")

_sample = functools.partial(Sample, budget=(36, 100, 500), shapes=SIZES)
PROPERTIES = (
    Property(
        "permutation", "rows of a and columns of b in another order give the same numbers in that order", check_permutation,
        # Columns that share a scale would have to stay together.
        _sample(ops=ONE_PRODUCT, admits=lambda case: case.scales != "block_128x128"),
    ),
    Property(
        "transpose", "bᵀ @ aᵀ is the transposed a @ b", check_transpose,
        _sample(
            admits=lambda case: case.op in TRANSPOSABLE and case.scales == "tensor" and not case.weights,
            further=lambda case: [case.changed(m=case.n, n=case.m, a=case.b, b=case.a)],
        ),
        needs=_has_products,
    ),
    Property(
        "scaling", "operands times a power of two give the result times that", check_scaling,
        _sample(
            variants=("a", "b"),
            ops=ONE_PRODUCT,
            # 8-bit floats have too few exponents for scaling, and 8-bit integers too few bits.
            admits=lambda case: (case.b_dtype if case.variant == "b" else DTYPES[case.dtype]).itemsize > 1,
        ),
    ),
    Property(
        "k-padding", "zeros appended along K change nothing", check_k_padding,
        _sample(variants=("a.1", "b.7", "a.64", "b.31"), ops=ONE_PRODUCT),
    ),
    Property(
        "identity", "a times the identity is a, bit by bit", check_identity,
        _sample(
            variants=("a", "b"), ops=ONE_PRODUCT, admits=lambda case: not case.added and case.op == case.row.name,
            finish=lambda case: case.changed(m=case.k) if case.variant == "b" else case.changed(n=case.k),
        ),
        needs=_has_products,
    ),
)  # fmt: skip
