"""Facts of each architecture as data: operand staging, multiply instructions, and rough rates for ranking."""

from dataclasses import dataclass

from ...device import DeviceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """Facts of one architecture.

    ``async_copy``: copies to shared memory need no registers, so several stages stay there. ``warp_group``: four warps together
    multiply 64 rows from shared memory (wgmma, tcgen05). Rates are per multiprocessor, from the vendors' datasheets: 16-bit
    multiply-adds and float32 FMAs in TFLOP/s, memory and L2 in GB/s. They only order configs.
    """

    async_copy: bool
    tensor_core: bool
    warp_group: bool
    fp64_tensor_core: bool
    bf16: bool
    tensor_tflops: float
    fma_tflops: float
    dram_gbps: float
    l2_gbps: float
    registers_per_thread: int = 255
    threads_per_sm: int = 2048
    barrier_bytes: int = 0
    """Shared memory for the instruction's barriers."""
    tf32: bool = True
    """Tensor cores round float32 operands to tf32."""
    flushes_subnormals: bool = False
    """16-bit matrix instructions flush subnormal operands and results to zero (PyTorch notes, "Numerical accuracy", on MI200)."""
    fnuz: bool = False
    """Matrix instructions use the 8-bit float types without infinities (AMD CDNA 3 ISA, v_mfma_f32_16x16x32_fp8_fp8)."""
    register_transpose: bool = False
    """Triton for HIP exchanges numbers between threads so that they are contiguous along K in LDS (in-thread transpose)."""
    sync_buffers: int = 1
    """Buffers of an operand that passes through registers before a warp group multiplies it."""


_AMPERE = {"async_copy": True, "tensor_core": True, "bf16": True}

ARCHS: dict[str, Arch] = {
    # Triton 3.6 to 3.9 have no tensor-core instruction for sm75: 16-bit products are float32 FMAs there.
    "sm75": Arch(
        async_copy=False, tensor_core=False, warp_group=False, fp64_tensor_core=False, bf16=True, tensor_tflops=0.2,
        fma_tflops=0.2, dram_gbps=8, l2_gbps=30, threads_per_sm=1024,
    ),
    "sm80": Arch(
        **_AMPERE, warp_group=False, fp64_tensor_core=True, tensor_tflops=2.9, fma_tflops=0.18, dram_gbps=17, l2_gbps=45,
    ),
    "sm86": Arch(
        **_AMPERE, warp_group=False, fp64_tensor_core=False, tensor_tflops=1.7, fma_tflops=0.43, dram_gbps=8, l2_gbps=35,
        threads_per_sm=1536,
    ),
    "sm89": Arch(
        **_AMPERE, warp_group=False, fp64_tensor_core=False, tensor_tflops=2.1, fma_tflops=0.5, dram_gbps=5, l2_gbps=45,
        threads_per_sm=1536,
    ),
    "sm90": Arch(
        **_AMPERE, warp_group=True, fp64_tensor_core=True, tensor_tflops=7.4, fma_tflops=0.5, dram_gbps=31, l2_gbps=75,
    ),
    "sm100": Arch(
        **_AMPERE, warp_group=True, fp64_tensor_core=False, tensor_tflops=15.0, fma_tflops=0.5, dram_gbps=53, l2_gbps=130,
        barrier_bytes=64, sync_buffers=2,
    ),
    "sm120": Arch(
        **_AMPERE, warp_group=False, fp64_tensor_core=False, tensor_tflops=2.4, fma_tflops=0.6, dram_gbps=10, l2_gbps=45,
        threads_per_sm=1536,
    ),
    "gfx90a": Arch(
        **_AMPERE, warp_group=False, fp64_tensor_core=True, tensor_tflops=1.7, fma_tflops=0.2, dram_gbps=15, l2_gbps=35,
        registers_per_thread=512, tf32=False, flushes_subnormals=True,
    ),
    "gfx942": Arch(
        **_AMPERE, warp_group=False, fp64_tensor_core=True, tensor_tflops=4.3, fma_tflops=0.5, dram_gbps=17, l2_gbps=40,
        registers_per_thread=512, fnuz=True, register_transpose=True,
    ),
}  # fmt: skip
"""Facts by architecture name."""


def arch_of(device: DeviceInfo) -> Arch:
    """Return the facts for a device. An unknown CUDA architecture uses the newest known one that is not newer."""
    if device.arch in ARCHS:
        return ARCHS[device.arch]
    if device.type == "hip":
        return ARCHS["gfx942"]
    known = sorted((int(name[2:]), name) for name in ARCHS if name.startswith("sm"))
    older = [name for capability, name in known if capability <= device.capability]
    return ARCHS[older[-1] if older else "sm75"]


def can_overlap(capability: int) -> bool:
    """Return True if a kernel may start before the previous one ends and wait inside (programmatic dependent launch)."""
    return capability >= 90
