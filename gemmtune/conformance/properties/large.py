"""Properties of offsets and sizes that exceed 32-bit integers."""

import dataclasses
from collections.abc import Iterator

import torch

from ...declaration.labels import DTYPES, ONE_PRODUCT
from ...declaration.layouts import OperandLayout
from ...declaration.subject import Impossible
from ...numerics.buffers import allocate
from ...problem import Layout
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.sampling import Sample
from ..cases.scope import Level, Scope
from .property import Property, check_once, exact_probe, fill_bits

FAR = 2**31
"""First offset in elements that a signed 32-bit integer cannot hold."""
LEAD_MULTIPLE = 64
OPERANDS = ("a.row", "b.row", "a.col", "b.col", "out.row", "out.col")


def check_large_offsets(bench: Bench) -> None:
    """Check an operand whose last row begins beyond 2^31 elements. Gaps are never written, so a CPU has no memory for them."""
    a, b = (OperandLayout.parse(text).kind for text in (bench.case.a, bench.case.b))  # the same order of elements without gaps
    near = bench.sibling(a=a, b=b, out="")
    probe = exact_probe(near)
    problem, operands = bench.problem, probe.operands
    far = dataclasses.replace(operands, a=_placed(problem.a, operands.a), b=_placed(problem.b, operands.b))
    if problem.c is not None and problem.d is not None and operands.c is not None and operands.d is not None:
        far = dataclasses.replace(far, c=_placed(problem.c, operands.c), d=_placed(problem.d, operands.d))
    out: torch.Tensor | None = None
    if bench.case.out:
        out = _room(problem.out, bench.device)
        fill_bits(out, bench.next_payload())
    result = bench.call(far, out=out, watch=False)
    probe.judge(bench, result.clone(memory_format=torch.contiguous_format))


def check_large_sizes(bench: Bench) -> None:
    """Check an operand or result of more than 2^31 elements."""
    needed = 8 * sum(layout.span * layout.dtype.itemsize for layout in (bench.problem.a, bench.problem.b, bench.problem.out))
    _expect_memory(needed, bench.device)
    check_once(bench)


def far_layout(kind: str, rows: int, cols: int) -> str:
    """Return the text of a layout ``row`` or ``col`` whose last row or column begins beyond 2^31 elements."""
    lines, length = (rows, cols) if kind == "row" else (cols, rows)
    lead = -(-FAR // (lines - 1))
    lead += -lead % LEAD_MULTIPLE
    return f"{kind}+{lead - length}"


def _placed(layout: Layout, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` with the strides of ``layout``, or unchanged if they have them already."""
    if layout.stride == values.stride():
        return values
    tensor = _room(layout, values.device)
    tensor.copy_(values)
    return tensor


def _room(layout: Layout, device: torch.device) -> torch.Tensor:
    needed = layout.span * layout.dtype.itemsize
    _expect_memory(needed, device)
    try:
        return allocate(layout, device)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise Impossible(f"{needed / 2**30:.1f} GiB of memory were refused") from error


def _expect_memory(needed: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(device)[0]
    if free < needed:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
    if free < needed:
        raise Impossible(f"the case needs {needed / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} GiB are free")


def _far(case: Case) -> Case:
    name, _, kind = case.variant.partition(".")
    held = case.k // 2 if case.packed else case.k
    rows, cols = {"a": (case.m, case.k), "b": (held, case.n), "out": (case.m, case.n)}[name]
    return case.changed(variant="", k2="", **{name: far_layout(kind, rows, cols)})


def _far_cases(name: str, scope: Scope) -> Iterator[Case]:
    """Yield cases in the one or two dtypes of each operation that have the smallest elements. Others need more memory.

    Each case has at least two rows and columns, and one matrix. Elements have at most 4 bytes: 8 GiB of addresses.
    """
    for op in scope.tested_ops:
        kept = sorted(scope.tested_dtypes(op), key=lambda dtype: DTYPES[dtype].itemsize)[: 1 if scope.level is Level.SMOKE else 2]
        count = len(OPERANDS) * len(kept)
        yield from Sample(
            budget=(count,) * 3,
            shapes=((5, 64, 48), (64, 64, 64)),
            variants=OPERANDS,
            admits=lambda case: not case.batched and min(case.m, case.n, case.k) > 1 and DTYPES[case.dtype].itemsize <= 4,
            finish=_far,
        )(name, dataclasses.replace(scope, ops=(op,), dtypes=tuple(kept)))


PROPERTIES = (
    Property("large-offsets", "rows of a, b or out that begin beyond 2^31 elements", check_large_offsets, _far_cases),
    Property(
        "large-sizes", "more than 2^31 elements in a, b or the result", check_large_sizes,
        Sample(
            budget=(0, 0, 8),
            shapes=((46400, 46400, 64), (2**21 + 16, 16, 1040), (16, 2**21 + 16, 1040)),  # M·N, M·K and N·K beyond 2^31
            ops=ONE_PRODUCT,
            admits=lambda case: not case.batched and DTYPES[case.dtype].itemsize <= 2,
        ),
        needs=lambda scope: (
            "needs a GPU" if scope.device_type != "cuda"
            else None if scope.level >= Level.EXHAUSTIVE else "tested at level exhaustive"
        ),
    ),
)  # fmt: skip
