"""Problems of the architecture matrix: every operation with every dtype and layout, and corner cases of kernels."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import get_args

import torch

from ..operand_kinds import BiasShape, Scales, WeightScales
from ..problem import Layout, Precision, Problem
from ..problem.dtypes import FLOAT8_FNUZ
from ..problem.fused import factor_epilogue
from ..problem.operations import BATCHED_OPS, DENSE_OPS, OPERATIONS, Encoding
from ..problem.trace import trace

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "tf32": torch.float32, "f64": torch.float64,
}  # fmt: skip
LAYOUTS = ("nn", "nt", "tn", "tt")
SHAPES = ((512, 6144, 4096), (16, 6144, 4096), (1000, 1001, 999), (128, 128, 65536), (500, 504, 1000))
"""M, N, K: large, few rows, nothing aligned, a long sum, sizes that no tile divides."""
BIASES: tuple[BiasShape, ...] = get_args(BiasShape)
SCALARS = ((2.0, 0.5), (1.0, 1.0), (2.0, 1.0), (1.0, 0.0))
"""Values of alpha and beta."""
BATCH = 3


@functools.cache
def matrix_problems() -> MappingProxyType[str, Problem]:
    """Return the problems of the matrix by name: ``mm-bf16-nt``, ``mm-bf16-nt-offset``. Shapes, biases and scalars alternate."""
    return MappingProxyType({**dict(_crossed()), **dict(_quantized()), **dict(_corners())})


def _crossed() -> Iterator[tuple[str, Problem]]:
    for (i, op), (j, dtype), (k, layout) in itertools.product(enumerate(DENSE_OPS), enumerate(DTYPES), enumerate(LAYOUTS)):
        turn = i + j + k
        sizes = SHAPES[turn % len(SHAPES)]
        alpha, beta = SCALARS[turn // 3 % len(SCALARS)]
        added = {"bias": BIASES[turn // 2 % len(BIASES)], "alpha": alpha, "beta": beta} if OPERATIONS[op].scalars else {}
        precision = Precision(input_mode="tf32" if dtype == "tf32" else "ieee")
        yield f"{op}-{dtype}-{layout}", getattr(Problem, op)(
            *((BATCH, *sizes) if op in BATCHED_OPS else sizes), dtype=DTYPES[dtype], layout=layout, device_type="cuda",
            precision=precision, **added,
        )  # fmt: skip


def _quantized() -> Iterator[tuple[str, Problem]]:
    """Yield problems with operands of 8 bits or fewer: every kind of scale, dtype and encoding at least once."""
    for (i, layout), (m, n, k) in zip(enumerate(LAYOUTS), SHAPES, strict=False):
        yield f"int_mm-{layout}", Problem.int_mm(m, n, k, layout=layout, device_type="cuda")
        scales = get_args(Scales)[i]
        pair = (torch.float8_e4m3fn, torch.float8_e5m2)
        yield f"scaled_mm-{scales}", Problem.scaled_mm(
            m, n, k, dtype=pair[i % 2], dtype_b=pair[i // 2], scales=scales, fast_accum=i % 2 == 1, device_type="cuda"
        )  # fmt: skip
    for i, (dtype, dtype_b) in enumerate(itertools.product(FLOAT8_FNUZ, repeat=2)):  # only gfx942 has choices for them
        yield f"scaled_mm-fnuz-{get_args(Scales)[i]}", Problem.scaled_mm(
            *SHAPES[i], dtype=dtype, dtype_b=dtype_b, scales=get_args(Scales)[i], device_type="cuda"
        )  # fmt: skip
    product = Problem.int_mm(512, 768, 1024, device_type="cuda")
    out = Layout.contiguous(product.out.size, torch.bfloat16)
    yield "int_mm-mul", replace(product, out=out, epilogue=factor_epilogue((768,), torch.float32))
    weights: tuple[tuple[str, torch.dtype, Encoding], ...] = (
        ("s8", torch.int8, ""), ("u8", torch.uint8, ""), ("e4m3", torch.float8_e4m3fn, ""), ("int4", torch.uint8, "int4"),
        ("uint4", torch.uint8, "uint4"),
    )  # fmt: skip
    for (i, (name, dtype_b, encoding)), (j, m) in itertools.product(enumerate(weights), enumerate((1, 16, 200))):
        scales = get_args(WeightScales)[(i + 2 * j) % len(get_args(WeightScales))]
        dtype = (torch.float16, torch.bfloat16)[(i + j) % 2]
        yield f"mixed_mm-{name}-{m}", Problem.mixed_mm(
            m, 4096, 4096, dtype=dtype, dtype_b=dtype_b, encoding=encoding, scales=scales, zeros=scales != "none" and j == 1,
            device_type="cuda",
        )  # fmt: skip


def _corners() -> Iterator[tuple[str, Problem]]:
    """Yield problems whose memory layouts, sizes and epilogues need special kernels."""
    base = Problem.mm(384, 640, 768, device_type="cuda")
    a, b, out = (replace(layout, offset=offset) for layout, offset in ((base.a, 1), (base.b, 2), (base.out, 4)))
    yield "mm-bf16-nt-offset", replace(base, a=a, b=b, out=out)
    yield "mm-bf16-nt-out-t", replace(base, out=replace(base.out, stride=(1, base.m)))
    rows = Problem.mm(384, 640, 768, dtype=torch.float16, layout="nn", device_type="cuda")
    yield "mm-f16-nn-padded", replace(rows, a=_padded(rows.a, 8), b=_padded(rows.b, 4), out=_padded(rows.out, 1))
    shared = Problem.bmm(BATCH, 256, 256, 512, dtype=torch.float16, device_type="cuda")
    yield "bmm-f16-nt-broadcast", replace(shared, a=replace(shared.a, stride=(0, *shared.a.stride[1:])))
    yield "mm_plus_mm-bf16-nt", Problem.mm_plus_mm(384, 640, 768, device_type="cuda")
    yield "mm_plus_mm-f16-tn", Problem.mm_plus_mm(500, 504, 1000, 333, dtype=torch.float16, layout="tn", device_type="cuda")
    yield "mm-bf16-nt-1x1x1", Problem.mm(1, 1, 1, device_type="cuda")
    yield "mm-f32-nt-1x4096x4096", Problem.mm(1, 4096, 4096, dtype=torch.float32, device_type="cuda")
    gelu = trace(torch.nn.functional.gelu, base.accumulator, ())
    yield "mm-bf16-nt-gelu", replace(base, epilogue=gelu)
    gate = torch.empty(base.m, base.n, dtype=base.dtype, device="meta")
    gated = trace(lambda acc, x: torch.nn.functional.silu(acc) * x, base.accumulator, (gate,))
    yield "mm-bf16-nt-silu-mul", replace(base, epilogue=gated)


def _padded(layout: Layout, columns: int) -> Layout:
    """Return a row-major layout with ``columns`` elements of padding after each row."""
    return replace(layout, stride=(layout.size[1] + columns, 1))
