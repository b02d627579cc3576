"""Facts about a device, detected or from a preset such as ``sm80``, so that pure code runs without the device."""

import contextlib
import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .errors import UnavailableError

KIB = 1024
MIB = 1024 * KIB
MALL_MIB = {"gfx942": 256}
"""Size of the memory-side cache (AMD Infinity Cache), which torch does not report, by architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Facts that legality and ranking need.

    ``arch`` is ``sm75`` … for CUDA and ``gfx90a`` … for HIP. For a CPU it is the widest instruction set that our templates
    use: ``avx512``, ``avx2`` or ``portable``. GPU fields are 0 on a CPU and vice versa. On HIP a multiprocessor is a compute
    unit, shared memory is LDS, a warp is a wavefront, and the L3 is the memory-side cache.
    """

    type: Literal["cpu", "cuda", "hip"]
    name: str
    arch: str
    index: int = 0
    sm_count: int = 0
    smem_per_block_bytes: int = 0
    """Shared memory that one block can have after opting in."""
    smem_per_sm_bytes: int = 0
    registers_per_sm: int = 0
    warp_size: int = 0
    l2_bytes: int = 0
    threads: int = 0
    """Threads that torch uses for one operation (CPU)."""
    isa: tuple[str, ...] = ()
    """CPU instruction-set flags as Linux names them, such as ``avx512f`` and ``avx512_bf16``."""
    l3_bytes: int = 0

    @property
    def capability(self) -> int:
        """CUDA compute capability times ten (``90`` for sm90), 0 for other devices."""
        return int(self.arch.removeprefix("sm")) if self.arch.startswith("sm") else 0

    @property
    def torch_device(self) -> torch.device:
        """torch device of tensors on this device."""
        return torch.device("cpu") if self.type == "cpu" else torch.device("cuda", self.index)

    @property
    def gpu(self) -> int:
        """Index of the GPU, -1 for a CPU."""
        return -1 if self.type == "cpu" else self.index

    def why_no_smem(self, needed: int) -> str | None:
        """Return why a block cannot have ``needed`` bytes of shared memory, or None."""
        most = self.smem_per_block_bytes
        return f"takes {needed} bytes of shared memory, a block has {most}" if needed > most else None


def _cuda(arch: str, name: str, sm_count: int, smem_kib: int, smem_sm_kib: int, l2_mib: int) -> DeviceInfo:
    return DeviceInfo(
        type="cuda",
        name=name,
        arch=arch,
        sm_count=sm_count,
        smem_per_block_bytes=smem_kib * KIB,
        smem_per_sm_bytes=smem_sm_kib * KIB,
        registers_per_sm=65536,
        warp_size=32,
        l2_bytes=l2_mib * MIB,
    )


def _hip(arch: str, name: str, compute_units: int, l2_mib: int, mall_mib: int) -> DeviceInfo:
    """Return a CDNA GPU: four SIMDs with 512 registers for each of 64 threads, 64 KiB of LDS in a compute unit."""
    return DeviceInfo(
        type="hip",
        name=name,
        arch=arch,
        sm_count=compute_units,
        smem_per_block_bytes=64 * KIB,
        smem_per_sm_bytes=64 * KIB,
        registers_per_sm=4 * 512 * 64,
        warp_size=64,
        l2_bytes=l2_mib * MIB,
        l3_bytes=mall_mib * MIB,
    )


def _cpu(arch: str, isa: tuple[str, ...]) -> DeviceInfo:
    return DeviceInfo(type="cpu", name=f"{arch} preset", arch=arch, threads=1, isa=isa, l2_bytes=MIB, l3_bytes=32 * MIB)


PRESETS: dict[str, DeviceInfo] = {
    info.arch: info
    for info in (
        # Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". The rest: datasheets.
        _cuda("sm75", "Tesla T4", 40, 64, 64, 4),
        _cuda("sm80", "NVIDIA A100", 108, 163, 164, 40),
        _cuda("sm86", "NVIDIA A10", 72, 99, 100, 6),
        _cuda("sm89", "NVIDIA L4", 58, 99, 100, 48),
        _cuda("sm90", "NVIDIA H100", 132, 227, 228, 50),
        _cuda("sm100", "NVIDIA B200", 148, 227, 228, 126),
        _cuda("sm120", "NVIDIA RTX 5090", 170, 99, 100, 96),
        # AMD's data sheets: one of the two dies of an MI250X, and an MI300X, whose dies have an L2 of 4 MiB each.
        _hip("gfx90a", "AMD Instinct MI250X", 110, 8, 0),
        _hip("gfx942", "AMD Instinct MI300X", 304, 4, MALL_MIB["gfx942"]),
        _cpu("avx512", ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16")),
        _cpu("avx2", ("avx2", "fma", "f16c")),
        _cpu("portable", ()),
    )
}  # fmt: skip
"""Devices by architecture, for enumeration and cross compilation on a machine that lacks them."""


def preset(arch: str) -> DeviceInfo:
    """Return the preset of an architecture. Raises UnavailableError with the known ones."""
    try:
        return PRESETS[arch.lower().replace("_", "")]
    except KeyError:
        raise UnavailableError(f"arch: got {arch!r}, expected one of {', '.join(PRESETS)}") from None


def made_current(gpu: int) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a GPU is the current device, on which kernels are loaded and launched. -1 is the CPU."""
    return torch.cuda.device(gpu) if gpu >= 0 and gpu != torch.cuda.current_device() else contextlib.nullcontext()


def detect(device: torch.device | str | None = None) -> DeviceInfo:
    """Return the facts about a device of this machine, by default the current GPU if there is one, else the CPU.

    Raises:
        UnavailableError: this machine does not have the device.
    """
    device = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        return _detect_cpu(torch.get_num_threads())
    if device.type != "cuda":
        raise UnavailableError(f"device: got {device.type!r}, expected cpu or cuda")
    if not torch.cuda.is_available():
        raise UnavailableError(
            "device: got 'cuda', but torch sees no GPU of NVIDIA or AMD here; use cpu. Without a GPU, gemmtune choices and "
            "build take --arch, and gemmtune conformance takes --sm"
        )
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise UnavailableError(f"device: got cuda:{index}, but this machine has {torch.cuda.device_count()} GPU(s)")
    return _detect_gpu(index)


@functools.cache
def _detect_gpu(index: int) -> DeviceInfo:
    properties: Any = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    arch = properties.gcnArchName.split(":")[0] if hip else f"sm{properties.major}{properties.minor}"
    return DeviceInfo(
        type="hip" if hip else "cuda",
        name=properties.name,
        arch=arch,
        index=index,
        sm_count=properties.multi_processor_count,
        # HIP has no opt-in: its builds of torch report the LDS of a block under the plain name.
        smem_per_block_bytes=properties.shared_memory_per_block if hip else properties.shared_memory_per_block_optin,
        smem_per_sm_bytes=properties.shared_memory_per_multiprocessor,
        registers_per_sm=properties.regs_per_multiprocessor,
        warp_size=properties.warp_size,
        l2_bytes=properties.L2_cache_size,
        l3_bytes=MALL_MIB.get(arch, 0) * MIB,
    )


@functools.cache
def _detect_cpu(threads: int) -> DeviceInfo:
    path = Path("/proc/cpuinfo")
    flags: frozenset[str] = frozenset()  # empty except on Linux on x86: only portable kernels remain
    name = platform.processor() or platform.machine()
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        field, _, value = line.partition(":")
        if field.strip() == "flags":
            flags = frozenset(value.split())
        elif field.strip() == "model name":
            name = value.strip()
        if flags and not line.strip():
            break
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        arch = "avx512"
    elif {"avx2", "fma", "f16c"} <= flags:
        arch = "avx2"
    else:
        arch = "portable"
    return DeviceInfo(
        type="cpu",
        name=name,
        arch=arch,
        threads=threads,
        isa=tuple(sorted(f for f in flags if f.startswith(("avx", "amx", "fma", "f16c")))),
        l2_bytes=_cache_bytes("SC_LEVEL2_CACHE_SIZE", MIB),
        l3_bytes=_cache_bytes("SC_LEVEL3_CACHE_SIZE", 32 * MIB),
    )


def _cache_bytes(name: str, default: int) -> int:
    value = os.sysconf(name) if name in os.sysconf_names else 0
    return value if value > 0 else default
