"""A matrix product written in Helion, with a config of its own, so that nothing is tuned."""

from __future__ import annotations

import helion
import helion.language as hl
import torch

from gemmtune.declaration.traits import Traits

__all__ = ["gemm_traits", "mm"]

gemm_traits = Traits(ops=("mm",), dtypes=("float32", "float16", "bfloat16"), layouts=("row", "col", "padded"), devices=("cuda",))


@helion.kernel(config=helion.Config(block_sizes=[64, 64, 32]), static_shapes=False)  # type: ignore[untyped-decorator]
def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] @ b[K, N], summed in float32."""
    m, k = a.size()
    _, n = b.size()
    out = torch.empty([m, n], dtype=a.dtype, device=a.device)
    for tile_m, tile_n in hl.tile([m, n]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            acc = torch.addmm(acc, a[tile_m, tile_k], b[tile_k, tile_n])
        out[tile_m, tile_n] = acc.to(a.dtype)
    return out
