"""Memory of operands and results: that of the caller, and a GPU's caches."""

from __future__ import annotations

import builtins
import ctypes
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

FLUSH_CACHES = 2
"""Multiple of a GPU's L2 that is read before a timed call, so that no operand is in it."""

OTHER_WAYS = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Variables under which torch's products on a CPU have other bits, and take longer."""


def shared(opening: Mapping[str, Any], memory: int) -> Any:
    """Return the caller's memory: a mapped file, or memory of the GPU."""
    if opening["device"] == "cpu":
        return mmap.mmap(memory, opening["bytes"])
    cuda: Any = torch.cuda
    cuda.set_device(torch.device(opening["device"]))
    cuda.init()
    handle = [bytes.fromhex(x["hex"]) if isinstance(x, dict) else x for x in opening["handle"]]
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    return torch.empty(0, dtype=torch.uint8, device=opening["device"]).set_(storage)


def load_products(device: str) -> None:
    """Load torch's products on a GPU: a capture of a graph cannot, and the memory that they take is not the GEMM's."""
    for x in [] if device == "cpu" else [torch.ones(16, 16, dtype=x, device=device) for x in (torch.float32, torch.bfloat16)]:
        torch.mm(x, x)


def change_torch() -> None:
    """Let MKL and oneDNN multiply in other ways, and write each product to the output, for as long as this process lives.

    They read the environment once. Forks of this process write too, for which no threads may run yet. Other programs that it
    starts find the variables, which Python does not show here.
    """
    before = {name: os.environ.get(name) for name in OTHER_WAYS}
    threads = torch.get_num_threads()
    os.environ.update(OTHER_WAYS)
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.mm(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype))
    for name, value in before.items():
        del os.environ[name]
        if value is not None:
            os.environ[name] = value
    for name, value in OTHER_WAYS.items():
        ctypes.CDLL(None).setenv(name.encode(), value.encode(), 1)  # for programs that this process starts
    torch.set_num_threads(threads)
    verbose: Any = torch._C._verbose
    verbose.mkl_set_verbose(1)
    verbose.mkldnn_set_verbose(1)


def flusher(device: str) -> Callable[[], object]:
    """Return a function that fills the L2 of a GPU with other numbers, by reading, as ``timing`` does."""
    if device == "cpu":
        return lambda: None
    l2_bytes = torch.cuda.get_device_properties(torch.device(device)).L2_cache_size
    return torch.zeros(FLUSH_CACHES * l2_bytes // 4, device=device).sum


def addresses(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first element of a tensor, and after its last one. (0, 0) if it has none."""
    if x.layout != torch.strided or not x.numel():
        return 0, 0
    begin = x.data_ptr()
    return begin, begin + (1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def is_plain(result: torch.Tensor) -> bool:
    """Return True if the numbers of a tensor lie in memory, not in the parts of a sparse, nested or wrapped one."""
    try:
        return bool(result.data_ptr() or not result.numel()) and result.layout == torch.strided and not result.is_nested
    except RuntimeError:
        return False
