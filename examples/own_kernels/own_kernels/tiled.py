"""A Triton GEMM: one tile of the result for each program, float32 sums. TRITON_INTERPRET=1 runs it on a CPU."""

import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _tile(
    a, b, out, m, n, k, am, ak, bk, bn, om, on,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, k, BLOCK_K):
        depth = (k0 + tl.arange(0, BLOCK_K)).to(tl.int64)
        left = tl.load(a + rows[:, None] * am + depth[None, :] * ak, mask=(rows[:, None] < m) & (depth[None, :] < k), other=0.0)
        right = tl.load(b + depth[:, None] * bk + cols[None, :] * bn, mask=(depth[:, None] < k) & (cols[None, :] < n), other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    tl.store(
        out + rows[:, None] * om + cols[None, :] * on,
        sums.to(out.dtype.element_ty),
        mask=(rows[:, None] < m) & (cols[None, :] < n),
    )


def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """a [M, K] @ b [K, N], of any strides, into ``out`` if it is given."""
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty(m, n) if out is None else out
    block_m, block_n, block_k = (16, 16, 16) if m <= 16 or INTERPRETED else (64, 64, 32)
    grid = (triton.cdiv(m, block_m), triton.cdiv(n, block_n))
    _tile[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), *out.stride(), block_m, block_n, block_k)
    return out


matmul.gemm_traits = {
    "ops": ["mm"],
    "dtypes": ["float16"] if INTERPRETED else ["float16", "bfloat16"],
    "devices": ["cpu"] if INTERPRETED else ["cuda"],
    "out": True,
    "deterministic": True,
    "streams": True,
    "capturable": True,
}
