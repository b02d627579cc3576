"""Memory of operands and results: that of the caller, and a GPU's caches."""

from __future__ import annotations

import builtins
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

FLUSH_CACHES = 2
"""Multiple of a GPU's L2 that is read before a timed call, so that no operand is in it."""

LOOKS = 16
"""Bytes of a result that the system reads."""
FILLED = "memory that is filled when it is read"
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


class _Range(ctypes.Structure):
    """Begin and length of memory, as the system reads it."""

    _fields_ = (("begin", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def reader_of_memory(device: str) -> Callable[[int, int], bool]:
    """Return a function that is true if the system can read some bytes between two addresses, for which it runs no handler.

    Memory that a handler of faults fills when it is read cannot be read so.
    """
    if device != "cpu":
        return lambda _begin, _end: True
    read: Any = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    own, copied, places, errno_of, fault = os.getpid(), (ctypes.c_char * LOOKS)(), range(LOOKS), ctypes.get_errno, errno.EFAULT
    ranges, target, addressof = (_Range * LOOKS)(), _Range(ctypes.addressof(copied), LOOKS), ctypes.addressof
    pointer, there = ctypes.byref(target), addressof(ranges)

    def is_there(begin: int, end: int) -> bool:
        if begin >= end:
            return True
        for place in places:
            ranges[place].begin, ranges[place].nbytes = begin + (end - 1 - begin) * place // (LOOKS - 1), 1
        count = read(own, pointer, 1, there, LOOKS, 0)
        return bool(count == LOOKS or (count < 0 and errno_of() != fault))

    return is_there
