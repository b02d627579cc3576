"""Kernel that rounds rows to 8-bit floats with one scale per block.

The module needs Triton and is imported only to launch the kernel. It needs CUDA from sm89, whose instruction rounds to
float8_e4m3fn.
"""

from typing import Any

import torch
import triton
import triton.language as tl

LEAST_CAPABILITY = (8, 9)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_STEP = 4096
_jit: Any = triton.jit


@_jit
def _larger(x, y):  # type: ignore[no-untyped-def]
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@_jit  # type: ignore[untyped-decorator]
def _round_rows(a, numbers, scales, k, row_stride, blocks, largest, least, block: tl.constexpr, step: tl.constexpr):  # type: ignore[no-untyped-def]
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = which * block
    end = tl.minimum(begin + block, k)
    a += row * row_stride
    numbers += row * k
    columns = tl.arange(0, step)
    top = tl.zeros((step,), tl.float32)
    for at in range(begin, end, step):
        x = tl.load(a + at + columns, mask=at + columns < end, other=0.0).to(tl.float32)
        top = _larger(top, tl.abs(x))
    scale = _larger(tl.div_rn(tl.reduce(top, 0, _larger), largest), least)
    tl.store(scales + row * blocks + which, scale)
    for at in range(begin, end, step):
        inside = at + columns < end
        x = tl.load(a + at + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(numbers + at + columns, tl.div_rn(x, scale).to(tl.float8e4nv), mask=inside)


def serves(a: torch.Tensor) -> bool:
    """Return True if ``round_rows`` accepts this tensor."""
    plain = a.__class__ is torch.Tensor and a.is_cuda and a.dtype in DTYPES and a.numel() > 0 and a.stride(1) == 1
    return plain and torch.version.hip is None and torch.cuda.get_device_capability(a.device) >= LEAST_CAPABILITY


def round_rows(a: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a [M, K] as float8_e4m3fn, and float32 scales [M, ⌈K/block⌉], one for each ``block`` elements of a row.

    A scale is the block's largest magnitude divided by 448. Each element is divided by its scale in float32 and rounded to nearest
    even. NaN and infinity turn their block into NaN.
    """
    m, k = a.shape
    blocks = -(-k // block)
    numbers = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=a.device)
    scales = torch.empty((m, blocks), dtype=torch.float32, device=a.device)
    step = min(triton.next_power_of_2(block), _MOST_STEP)
    largest, least = torch.finfo(torch.float8_e4m3fn).max, torch.finfo(torch.float32).tiny
    with torch.cuda.device(a.device):
        _round_rows[(m, blocks)](
            a, numbers, scales, k, a.stride(0), blocks, largest, least, block, step, num_warps=4 if step < _MOST_STEP else 8
        )
    return numbers, scales
