"""jax.numpy.matmul at the highest precision, with 64-bit types enabled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from gemmtune.declaration.traits import Traits

__all__ = ["bmm", "gemm_traits", "int_mm", "mm"]

jax.config.update("jax_enable_x64", True)

gemm_traits = Traits(
    ops=("mm", "bmm", "int_mm"), dtypes=("float32", "float16", "bfloat16", "float64", "int8"), empty=True, threads=True
)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b. jax arrays have no strides, so operands that have are copied first."""
    return _to_torch(jnp.matmul(_to_jax(a), _to_jax(b), precision="highest"))


bmm = mm


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in int32."""
    return _to_torch(jnp.matmul(_to_jax(a), _to_jax(b), preferred_element_type=jnp.int32))


def _to_jax(x: torch.Tensor) -> Any:
    return jax.dlpack.from_dlpack(x.contiguous())


def _to_torch(x: Any) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(x.block_until_ready())
