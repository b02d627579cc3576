"""Numbers that describe a choice on a problem, from which its time is predicted. Pure: no GPU, no compiler."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.cuda.hopper import IDLE_CLUSTERS, clusters_at_a_time
from ..device import DeviceInfo
from ..problem import Problem
from ..problem.dtypes import dtype_name

Matrix = NDArray[np.float32]

FAMILIES = (
    "aten", "triton:mm", "triton:mm swapped", "triton:persistent", "triton:vec", "triton:mixed_mm",
    "triton:mixed_words", "triton:mixed_vec", "cuda:cluster", "cuda:gemv", "cuda:skinny", "cuda:wgmma", "cuda:wgmma_stream",
)  # fmt: skip
"""Families of choices whose times can be predicted. Files hold their indices, so append only."""
MEMORY_GBPS: Mapping[str, float] = {
    "NVIDIA H100 80GB HBM3": 3350.0, "NVIDIA H100 PCIe": 2000.0, "NVIDIA H100 NVL": 3900.0, "NVIDIA H200": 4800.0,
}  # fmt: skip
"""Bandwidth of the memory by the name of the GPU, from NVIDIA's data sheets. Times are predicted for these GPUs only."""
SM_TFLOPS = 7.4
"""Dense 16-bit tensor-core operations of one multiprocessor of sm90, in TFLOP/s, from the H100's data sheet."""
LAUNCH_US = 2.0
FEWEST_ROWS = 4
"""Rows up to which nothing is predicted for weights of 4 or 8 bits. The model of ``cuda:gemv`` orders its kernels as well: over 38
weights and one, two and four rows its first takes 3.5% longer than the fastest in the median, 12% at the 95th percentile."""

NAMES = (
    "family", "block_m", "block_n", "block_k", "stages", "warps", "splits", "cluster", "parts", "per_sm", "pdl", "group_m",
    "unrolled", "swap", "m", "n", "k", "bits", "scale_block", "zero", "memory_us", "multiply_us", "cache",
    "waves", "tail", "filled_m", "filled_n", "steps", "traffic", "partials", "in_flight",
    "multiply_path", "read_path", "path",
)  # fmt: skip
"""Features in the order of the columns. A model is valid for these only."""


OWN = NAMES.index("m")
"""Number of the first features, which belong to the choice alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Parameters of one choice that features need, from its name and ``info``, as the store keeps them."""

    family: str
    tile: tuple[int, int, int]
    info: Mapping[str, Any]
    per_sm: int = 1
    """Blocks that one multiprocessor runs concurrently."""

    @classmethod
    def of(cls, name: str, info: Mapping[str, Any]) -> "Described | None":
        """Return the description, or None if the family is not among ``FAMILIES``."""
        backend, _, rest = name.partition(":")
        family = backend if backend in FAMILIES else f"{backend}:{_family(rest, info)}"
        if family not in FAMILIES or "_pad" in rest:
            return None
        tile = info.get("tile")
        block_m, block_n, block_k = tile if isinstance(tile, (list, tuple)) and len(tile) == 3 else (1, 1, 1)
        if info.get("swap_ab") and family in ("triton:mm swapped", "cuda:cluster"):
            block_m, block_n = block_n, block_m
        per_sm = 2 if backend == "cuda" and "_r2" in rest else 1
        return cls(family=family, tile=(int(block_m), int(block_n), int(block_k)), info=info, per_sm=per_sm)

    @property
    def parts(self) -> float:
        """Blocks that divide the K of one tile. The warps of a block may divide theirs too, and count in ``splits`` alone."""
        return self.number("cluster_k") or (1.0 if self.family == "cuda:gemv" else self.number("splits", 1))

    @property
    def balances(self) -> bool:
        """True if persistent blocks divide the last tiles, so that none waits for the others."""
        return self.family == "cuda:wgmma_stream" and not self.info.get("whole")

    def number(self, name: str, otherwise: float = 0.0) -> float:
        value = self.info.get(name)
        return float(value) if isinstance(value, (int, float)) else otherwise


def _family(rest: str, info: Mapping[str, Any]) -> str:
    """Return the family in a name without its backend, such as ``mixed_words`` or ``cluster``."""
    family, *more = rest.split("_")
    if family == "mixed" or more[:1] == ["stream"]:
        family = f"{family}_{more[0]}"
    return "mm swapped" if family == "mm" and info.get("swap_ab") else family


def why_unknown(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why no time can be predicted for a problem on a device, or None."""
    if device.name not in MEMORY_GBPS:
        return f"{device.name} was never measured"
    if problem.op not in ("mm", "addmm", "mixed_mm") or problem.batched or problem.groups or problem.epilogue is not None:
        return f"{problem.op} with other operands than a layer's was never measured"
    if dtype_name(problem.dtype) not in ("bfloat16", "float16") or problem.out.dtype != problem.dtype:
        return f"{dtype_name(problem.dtype)} was never measured"
    if problem.prepacked or problem.sparsity is not None or problem.b.stride[-2] != 1:
        return "only weights stored as N×K were measured"
    return None


def is_ruled(problem: Problem) -> bool:
    """Return True if the rule serves the problem, though others of its kind are predicted."""
    return problem.widens_b and problem.m <= FEWEST_ROWS


def kernel_of(name: str) -> str:
    """Return the part of a choice's name that states its compiled kernel, without the parameters of its launch."""
    name = re.sub(r"_g\d+|_pdl\d*|_interleaved|_whole", "", name)
    if name.startswith("cuda:cluster"):
        return name
    return re.sub(r"_k\d+", "" if name.startswith("cuda:") else "_k", name)


def bits_of(problem: Problem) -> int:
    """Return the bits of one weight."""
    return 4 if problem.encoding else 8 * problem.b.dtype.itemsize


def kind_of(problem: Problem) -> str:
    """Return the kind of weight, whose choices differ from those of other kinds: ``dense``, ``int8`` or ``int4``."""
    return {4: "int4", 8: "int8"}.get(bits_of(problem), "dense")


def placed(sm_count: int, cluster: int) -> int:
    """Return how many blocks run at once in clusters of ``cluster`` blocks, with one block per multiprocessor."""
    return cluster * clusters_at_a_time(sm_count, cluster if cluster in IDLE_CLUSTERS else 1)


def group_of(kind: str) -> str:
    """Return the group of kinds of weights whose times one forest predicts: ``dense``, or ``widened`` for 4 and 8 bits."""
    return kind if kind == "dense" else "widened"


def floor_us(problem: Problem, device: DeviceInfo) -> float:
    """Return the time that memory and tensor cores need at the rates of the data sheet, and a launch."""
    memory_us, multiply_us = _floors(problem, device)
    return max(memory_us, multiply_us) + LAUNCH_US


def _floors(problem: Problem, device: DeviceInfo) -> tuple[float, float]:
    m, n, k, size = problem.m, problem.n, problem.k, problem.dtype.itemsize
    weight_bytes = n * k * bits_of(problem) / 8
    memory_us = (weight_bytes + (m * k + m * n) * size) / MEMORY_GBPS[device.name] * 1e-3
    return memory_us, 2.0 * m * n * k / (SM_TFLOPS * device.sm_count) * 1e-6


def features(problem: Problem, device: DeviceInfo, choices: Sequence[Described]) -> Matrix:
    """Return one row of ``NAMES`` for each choice: [len(choices), len(NAMES)] float32. Sizes are logarithms of base 2."""
    m, n, k = problem.m, problem.n, problem.k
    own = np.array([_own(x) for x in choices], dtype=np.float64).reshape(len(choices), OWN)
    memory_us, multiply_us = _floors(problem, device)
    scale_block = problem.scale_block("scale_b")[0] if problem.scale_b is not None else k
    bits = bits_of(problem)
    same = [
        math.log2(m), math.log2(n), math.log2(k), bits, math.log2(max(scale_block, 1)), problem.zero_b is not None,
        math.log2(memory_us + LAUNCH_US), math.log2(multiply_us + LAUNCH_US),
        math.log2(n * k * bits / 8 / device.l2_bytes),
    ]  # fmt: skip
    block_m, block_n, block_k, stages = (own[:, i] for i in range(1, 5))
    splits, parts, per_sm = (np.maximum(own[:, i], 1) for i in (6, 8, 9))
    tiles_m, tiles_n = np.ceil(m / block_m), np.ceil(n / block_n)
    blocks = np.maximum(own[:, 7], 1)
    waves = tiles_m * tiles_n * parts / np.array([placed(device.sm_count, int(x)) for x in blocks]) / per_sm
    line_bytes = block_m * problem.dtype.itemsize + block_n * bits / 8
    traffic = tiles_m * tiles_n * k * line_bytes * 1e-3 / MEMORY_GBPS[device.name]
    partials = np.where(splits > 1, tiles_m * tiles_n * splits * block_m * block_n * 8e-3 / MEMORY_GBPS[device.name], 0.0)
    steps = np.ceil(k / (block_k * parts))
    rounds = np.where([x.balances for x in choices], waves, np.ceil(waves))
    summed = rounds * per_sm * steps * block_k  # along K, by one multiprocessor
    multiply_path = summed * block_m * block_n * 2e-6 / SM_TFLOPS
    read_path = summed * line_bytes * device.sm_count * 1e-3 / MEMORY_GBPS[device.name]
    paths = (multiply_path, read_path, np.maximum(multiply_path, read_path))
    derived = [
        np.log2(np.maximum(waves, 1e-3)),
        waves / np.ceil(np.maximum(waves, 1e-3)),
        m / (tiles_m * block_m),
        n / (tiles_n * block_n),
        np.log2(steps),
        np.log2(traffic + 0.1),
        np.log2(partials + 0.1),
        np.log2(line_bytes * block_k * np.maximum(stages - 1, 1)),
        *(np.log2(path / floor_us(problem, device) + 0.01) for path in paths),
    ]
    own[:, 1:10] = np.log2(np.maximum(own[:, 1:10], 1))
    return np.column_stack([own, np.tile(same, (len(choices), 1)), *derived]).astype(np.float32)


def _own(x: Described) -> list[float]:
    """Return the features of a choice that do not depend on the problem."""
    numbers = (x.number(name, least) for name, least in (("stages", 1), ("warps", 1), ("splits", 1), ("cluster", 1)))
    pdl = 2 if x.number("prefetch_stages") else x.number("pdl")
    more = pdl, x.number("group_m", 8), x.number("steps", 1), x.number("swap_ab")
    return [FAMILIES.index(x.family), *x.tile, *numbers, x.parts, x.per_sm, *more]
