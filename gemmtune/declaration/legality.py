"""The legality predicate of declared GEMMs: tests if a declaration covers a problem, so that the GEMM can be offered for it."""

import dataclasses
from collections.abc import Iterator

import torch

from ..device import DeviceInfo
from ..problem import Problem
from ..problem.contiguous import bias_shapes
from ..problem.dtypes import dtype_info, dtype_name
from ..problem.fused import factor_epilogue, factor_shapes
from ..problem.layout import ALIGNED_BYTES, Layout
from ..problem.scales import scale_layouts, weight_scale_layout
from .labels import FLOAT8, SCALES_OF, WEIGHTS
from .layouts import PLAIN, kinds_of
from .traits import Traits


def why_not(traits: Traits, problem: Problem, device: DeviceInfo) -> str | None:
    """Return the reason why a GEMM of these traits cannot be offered for a problem, or None. Pure: any preset device will do.

    Undeclared dtypes and layouts are offered. The GEMM may raise an error for them, which becomes its result.
    """
    return next(_reasons(traits, problem, device), None)


def operation_of(problem: Problem) -> str | None:
    """Return the name in ``labels.OPS`` of the operation of a problem, or None if its epilogue belongs to none."""
    if problem.epilogue is None:
        return problem.op
    if problem.op != "int_mm" or len(problem.epilogue.operands) != 1:
        return None
    factor = problem.epilogue.operands[0]
    expected = dataclasses.replace(factor_epilogue(factor.size, factor.dtype), operands=(factor,))
    return "int_mm_mul" if problem.epilogue == expected and problem.out.dtype == factor.dtype else None


def _reasons(traits: Traits, problem: Problem, device: DeviceInfo) -> Iterator[str]:
    op = operation_of(problem)
    if op is None:
        yield f"epilogue: got {problem.epilogue}, expected none: a declared GEMM computes the product only"
        return
    ops = traits.ops or ("mm",)
    if op not in ops:
        yield f"op: got {op}, but ops declares {', '.join(ops)}"
        return
    kind = device.torch_device.type
    if kind not in traits.devices:
        yield f"device: got {kind}, but devices declares {', '.join(traits.devices)}"
    if traits.sms is not None and device.type == "cuda" and device.capability not in traits.sms:
        yield f"device: got {device.arch}, but sms declares {', '.join(map(str, traits.sms))}"
    if kind == "cuda" and not (traits.streams and traits.capturable):
        missing = " and ".join(name for name in ("streams", "capturable") if not getattr(traits, name))
        yield f"{missing}: not declared, expected true: on a GPU a pick runs on any stream and in CUDA graphs"
    for reasons in (_of_sizes, _of_dtypes, _of_precision, _of_the_added, _of_scales, _of_routes, _of_layouts):
        yield from reasons(traits, problem)


def _of_sizes(traits: Traits, problem: Problem) -> Iterator[str]:
    if 0 in (problem.m, problem.n, problem.batch, *problem.summed) and not traits.empty:
        yield "size: got 0, but empty is not declared"
    sizes = (("M", problem.m, 0), ("N", problem.n, 1), *(("K", k, 2) for k in problem.summed))
    for name, size, which in sizes:
        by, least = traits.multiples[which], traits.least[which]
        if size % by:
            yield f"{name}: got {size}, but multiples declares multiples of {by}"
        if size < least:
            yield f"{name}: got {size}, but least declares at least {least}"


def _of_dtypes(traits: Traits, problem: Problem) -> Iterator[str]:
    offered = traits.dtypes
    if offered is not None and problem.float8:
        offered = tuple(name for name in offered if name in FLOAT8) or FLOAT8[:1]
    # Exactly multiplied float32 is good enough for a tf32 problem.
    names = {problem.dtype_label, dtype_name(problem.dtype)}
    if offered is not None and (not problem.integers or problem.sparsity is not None) and not names & set(offered):
        yield f"dtype: got {problem.dtype_label}, but dtypes declares {', '.join(offered)}"
    result, row = problem.out.dtype, problem.operation
    if problem.float8:
        if dtype_name(result) not in traits.results:
            yield f"result: got {dtype_name(result)}, but results declares {', '.join(traits.results)}"
        if problem.a.dtype != problem.b.dtype and not traits.float8_pairs:
            yield "b: got another 8-bit float than a, but float8_pairs is not declared"
    elif problem.epilogue is None and result != row.result_dtype(problem.dtype, epilogue=False):
        yield f"result: got {dtype_name(result)}, expected {dtype_name(row.result_dtype(problem.dtype, epilogue=False))}"
    if problem.widens_b and (problem.b.dtype, problem.encoding) not in [WEIGHTS[name] for name in traits.weights]:
        yield f"b: got {problem.encoding or dtype_name(problem.b.dtype)}, but weights declares {', '.join(traits.weights)}"


def _of_precision(traits: Traits, problem: Problem) -> Iterator[str]:
    """Yield reasons against arithmetic weaker than torch's under its current flags. The suite tests it, the selector rejects it."""
    claims = traits.claims(problem)
    if claims.input_mode == "tf32" and problem.precision.input_mode != "tf32":
        yield "input_mode: declares tf32, which torch's float32 precision does not allow here"
    wanted = dtype_info(problem.accumulator)
    if dtype_info(claims.accumulate).unit_roundoff > wanted.unit_roundoff:
        yield f"accumulate: declares {dtype_name(claims.accumulate)}, expected {dtype_name(problem.accumulator)} or wider"
    reduced = problem.precision.reduced_partials or problem.c is not None or problem.weights is not None
    if dtype_info(claims.partials).unit_roundoff > wanted.unit_roundoff and not reduced:
        yield f"partials: declares {dtype_name(claims.partials)}, which torch's flags for reduced precision do not allow here"
    if traits.fast_accum and problem.float8 and not problem.fast_accum:
        yield "fast_accum: declared, expected full sums, since use_fast_accum was not asked for"
    if claims.skips_zeros:
        yield "skips_zeros: declared, expected 0 · NaN and 0 · ∞ to count, as in torch"


def _of_the_added(traits: Traits, problem: Problem) -> Iterator[str]:
    if problem.inp is None:
        return
    for name in ("alpha", "beta"):
        if getattr(problem, name) != "one" and not getattr(traits, name):
            yield f"{name}: got another value than 1, but {name} is not declared"
    size = problem.inp.size
    if not any(size == shape for name, shape in bias_shapes(problem.out.size).items() if name in traits.bias):
        yield f"bias: got the shape {list(size)}, but bias declares {', '.join(traits.bias)}"


def _of_scales(traits: Traits, problem: Problem) -> Iterator[str]:
    op = operation_of(problem) or problem.op
    factors = problem.epilogue.operands if problem.epilogue else ()
    kinds = [kind for kind in traits.scales_of(op) if _has_scales(problem, kind)]
    if op in SCALES_OF and not kinds:
        got = ", ".join(str(list(layout.size)) for layout in factors or problem.scales) or "none"
        yield f"scales: got {got}, but scales declares {', '.join(traits.scales)}"
    if problem.zero_b is not None and not traits.zeros:
        yield "zero_b: given, but zeros is not declared"
    usual = torch.float32 if factors else problem.dtype
    like_a = (getattr(problem, x.role) for x in problem.operation.operands if x.scales and x.like_a)
    for layout in factors or like_a:
        if layout is not None and layout.dtype != usual and dtype_name(layout.dtype) not in traits.scale_dtypes:
            yield f"scales: got {dtype_name(layout.dtype)}, but scale_dtypes declares {', '.join(traits.scale_dtypes) or 'none'}"


def _of_routes(traits: Traits, problem: Problem) -> Iterator[str]:
    if problem.gated and problem.gated not in traits.gates:
        yield f"gated: got {problem.gated}, but gates declares {', '.join(traits.gates) or 'none'}"
    for operand in problem.operation.operands:
        layout = getattr(problem, operand.role)
        if operand.indexes and layout is not None and dtype_name(layout.dtype) not in traits.index_dtypes:
            yield f"{operand.role}: got {dtype_name(layout.dtype)}, but index_dtypes declares {', '.join(traits.index_dtypes)}"


def _has_scales(problem: Problem, kind: str) -> bool:
    """Return True if the scales are of that kind. A single number may have any shape of one element."""
    given = [x for x in (problem.scale_a, problem.scale_b, problem.zero_b) if x is not None]
    if problem.epilogue is not None:
        given = [problem.epilogue.operands[0]]
    if kind == "tensor":
        return bool(given) and all(x.numel == 1 for x in given)
    return bool(given) == (kind != "none") and [x.size for x in given] == _scale_sizes(problem, kind, len(given))


def _scale_sizes(problem: Problem, kind: str, count: int) -> list[tuple[int, ...]]:
    """Return the expected sizes of ``count`` scales of a kind other than ``tensor``."""
    m, n, k = problem.m, problem.n, problem.k
    lead = (problem.groups,) if problem.groups else ()
    if problem.epilogue is not None:
        return [factor_shapes(m, n)[kind]]
    if problem.widens_b:
        expected = weight_scale_layout(n, k, kind, problem.dtype)  # type: ignore[arg-type]
        return [(*lead, *expected.size)] * count if expected is not None else []
    scale_a, scale_b = scale_layouts(m, n, k, kind)  # type: ignore[arg-type]
    return [scale_a.size, (*lead, *scale_b.size)]


def _of_layouts(traits: Traits, problem: Problem) -> Iterator[str]:
    sides = problem.sparsity.sides if problem.sparsity is not None else ""
    if sides and traits.blocks is not None and sides not in traits.blocks:
        yield f"blocks: got {sides}, but blocks declares {', '.join(traits.blocks)}"
    given = [(role, x) for role, x in problem.operands if role != "b" or problem.sparsity is None]
    multiplied = [(role, x) for role, x in given if role in ("a", "b", "c", "d")]
    dense = (*("offs", "rows", "slots", "weights"), *(("scale_b",) if problem.groups else ()))
    strided = [(role, x) for role, x in given if len(x.size) > 0 and role not in dense]
    if traits.layouts is not None:
        allowed = {PLAIN, *traits.layouts}
        for role, layout in strided:
            if not any(kinds <= allowed for kinds in kinds_of(layout)):
                yield f"{role}: got {layout}, but layouts declares {', '.join(sorted(allowed))}"
    least = min(traits.min_alignment, ALIGNED_BYTES)
    for role, layout in multiplied:
        if _alignment_bytes(layout) < least:
            yield f"{role}: got {layout}, aligned to {_alignment_bytes(layout)} bytes, but min_alignment declares {least}"


def _alignment_bytes(layout: Layout) -> int:
    return layout.alignment * layout.dtype.itemsize
