"""GEMMs for the tests of the conformance command and plugin."""

from __future__ import annotations

import ctypes
import os
import time
import warnings

import torch


def right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def drops_last(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a product without the last element of K, except for a short K."""
    return a[:, :-1] @ b[:-1] if a.shape[-1] > 16 else a @ b


def writes_to_its_input(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = a @ b
    a.mul_(2)
    return result


def warns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    warnings.warn("a library is in beta state", stacklevel=2)
    return a @ b


def refuses(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("not today\n  but tomorrow")


def returns_none(a: torch.Tensor, b: torch.Tensor) -> None:
    a @ b


async def returns_coroutine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def returns_list(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [a @ b]


def returns_numpy(a: torch.Tensor, b: torch.Tensor) -> object:
    return (a @ b).numpy()


def returns_sparse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).to_sparse()


def returns_device(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).to("meta")


def returns_dtype(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).double()


def returns_shape(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).flatten()


def aborts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[0] == 17:
        os.abort()
    return a @ b


def hangs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[0] == 17:
        time.sleep(3600)
    return a @ b


def returns_its_input(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a if torch.equal(b, torch.eye(*b.shape)) else a @ b


def writes_behind(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[0] == 3:
        ctypes.memset(b.untyped_storage().data_ptr() + b.untyped_storage().nbytes(), 0, 4)
    return a @ b


def in_torchs_order(inp: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float) -> torch.Tensor:
    if a.shape[0] == 3:
        raise NotImplementedError("three rows")
    return torch.addmm(inp, a, b, alpha=alpha)


def by_keyword(a: torch.Tensor, b: torch.Tensor, *, alpha: float, c: torch.Tensor) -> torch.Tensor:
    return in_torchs_order(c, a, b, alpha=alpha)


in_torchs_order.gemm_traits = {"ops": ["addmm"], "dtypes": [torch.float32], "alpha": True}  # type: ignore[attr-defined]
by_keyword.gemm_traits = in_torchs_order.gemm_traits | {"bias_name": "c"}  # type: ignore[attr-defined]
