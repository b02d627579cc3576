"""The ck backend: instances of Composable Kernel for a problem, ranked before anything is compiled, which takes up to a minute.

The estimate is the time of the slowest of matrix units with their LDS, loads from L2, and memory. Its rates are the peaks of AMD's
data sheets and were never measured. It only orders.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...choice import Availability, Offers, Refusal
from ...device import DeviceInfo
from ...effort import EFFORT
from ...errors import ONLY_COMPILED, UnavailableError
from ...filters import why_not_named
from ...problem import Problem
from ...settings import Settings, current
from ...toolchain.codeobject import find_hip_compiler
from .choice import NAME, CkChoice, name_of
from .configs import Config, prefetched
from .instances import WAVE, Version
from .legality import REGISTERS, Predicate, check_problem, registers
from .products import MFMA_K, Element
from .toolkit import find_toolkit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Peak rates: of a compute unit 16-bit products in TFLOP/s, LDS and L2 in GB/s; of the device memory in GB/s."""

    cu_tflops: float
    lds_gbps: float
    l2_gbps: float
    dram_gbps: float


RATES = {
    "gfx90a": Rates(cu_tflops=1.74, lds_gbps=218.0, l2_gbps=63.0, dram_gbps=1638.0),
    "gfx942": Rates(cu_tflops=4.3, lds_gbps=269.0, l2_gbps=113.0, dram_gbps=5300.0),
}
SHARES: dict[Element, float] = {"f16": 1.0, "bf16": 1.0, "f32": 0.125, "f8": 2.0, "bf8": 2.0}
"""Rate of each element relative to 16-bit elements."""
LAUNCH_US = 4.0
LATENCY_US = 1.0
"""Microseconds from issuing a load to its arrival, with memory under load."""
STEP_US = 0.02
"""Barriers and address arithmetic of one step."""
LDS_SHARE = 0.5
"""Share of the LDS time that no product hides."""
PARTS_US = 2.0
"""Time that the last block of a tile waits for the others' sums."""
NARROW = 1.15
"""Factor on the time for each halving of the load width."""
WIDEST_BYTES = 16
VERSIONS: tuple[Version, ...] = ("v3", "v4", "v5", "v1", "v2")
SIMDS = 4


def estimate_us(config: Config, problem: Problem, element: Element, device: DeviceInfo) -> float:
    instance, rates = config.instance, RATES[device.arch]
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    tiles = -(-m // instance.block_m) * -(-n // instance.block_n) * problem.batch * config.split_k
    blocks = -(-tiles // device.sm_count)
    depth = instance.block_k(config.itemsize)
    products_us = 2.0 * instance.block_m * instance.block_n * depth / (rates.cu_tflops * SHARES[element] * 1e6)
    halvings = sum((WIDEST_BYTES // config.itemsize // x.vector).bit_length() - 1 for x in (config.a, config.b))
    loads_us = (instance.block_m + instance.block_n) * instance.bytes_k / (rates.l2_gbps * 1e3) * NARROW**halvings
    lines = instance.block_m * (1 + instance.waves[1]) + instance.block_n * (1 + instance.waves[0])  # written once, read by waves
    lds_us = LDS_SHARE * lines * instance.bytes_k / (rates.lds_gbps * 1e3)
    # Blocks resident on a compute unit share it, and wait together.
    rounds = -(-blocks // _resident(config, device))
    step_us = max(blocks * (products_us + lds_us + STEP_US), blocks * loads_us, rounds * LATENCY_US / prefetched(instance))
    busy = min(tiles, device.sm_count) / device.sm_count
    dram_us = problem.bytes / (rates.dram_gbps * min(1.0, 2 * busy) * 1e3)
    parts_us = 0.0
    if config.split_k > 1:
        parts_us = PARTS_US + 8.0 * config.split_k * problem.batch * m * n / (rates.dram_gbps * 1e3)  # written and read
    return float(LAUNCH_US + parts_us + max(-(-problem.k // depth) // config.split_k * step_us, dram_us))


def _resident(config: Config, device: DeviceInfo) -> int:
    """Return the blocks that fit on a compute unit at a time, by LDS and registers."""
    waves = config.instance.threads // WAVE
    by_registers = REGISTERS // registers(config) * SIMDS // waves
    return max(min(device.smem_per_sm_bytes // config.lds_bytes, by_registers), 1)


def select(timed: Sequence[tuple[float, Config]], count: int | None) -> list[Config]:
    """Return the ``count`` likeliest configs (None: all). Each tile gets another config only after the other tiles had theirs."""
    ordered = [config for _, config in sorted(timed, key=lambda item: (item[0], *_preference(item[1])))]
    if count is None:
        return ordered
    taken: list[Config] = []
    tiles = Counter[tuple[int, int]]()
    for most, config in itertools.product(range(1, len(ordered) + 1), ordered):
        tile = config.instance.block_m, config.instance.block_n
        if len(taken) < count and config not in taken and tiles[tile] < most:
            taken.append(config)
            tiles[tile] += 1
    return taken


def _preference(config: Config) -> tuple[int, int, str]:
    """Return the tie-breaker for equal times: large instructions, then the pipelines that CK prefers for compute-bound products."""
    return -config.instance.mfma, VERSIONS.index(config.instance.version), config.label


NOT_RUN = "its kernels were compiled and inspected, and never run on an AMD GPU"
"""Notice shown wherever the backend appears."""


class CkBackend:
    """Backend for AMD GPUs of CDNA 2 and 3."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:
        """Return if the backend can run on an AMD GPU. Without headers or a compiler, only kernels compiled before are used."""
        try:
            detail = f"Composable Kernel {find_toolkit(current().ck_dir).version}, {find_hip_compiler()}"
        except UnavailableError as error:
            detail = f"{ONLY_COMPILED}: {error}"
        if device.type != "hip" or device.arch not in MFMA_K:
            text = f"works on AMD GPUs of {' and '.join(MFMA_K)}, not on {device.arch}; here: {detail}"
            return Availability(ok=False, detail=f"{text}; {NOT_RUN}")
        return Availability(ok=True, detail=f"{detail}; {NOT_RUN}")

    def serves_by_default(self, device: DeviceInfo) -> bool:  # noqa: ARG002 - no device
        """Return False: it serves only if named. Nobody has run its kernels yet, and each takes up to a minute to compile."""
        return False

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Return the likeliest legal instances, and counts of the others by reason. Needs neither CK nor a compiler nor a GPU."""
        if (reason := check_problem(problem, device)) is not None:
            return Offers(refusals=(Refusal(name=NAME, reason=reason),))
        predicate = Predicate(problem, device)
        legal, refusals = Refusal.apart((predicate.config(*x) for x in predicate.candidates()), NAME, "instances")
        allowed, left_out = _allowed(legal, predicate, settings)
        timed = [(estimate_us(config, problem, predicate.product.element, device), config) for config in allowed]
        chosen = select(timed, EFFORT[settings.search].configs[NAME])
        choices = tuple(CkChoice.of(config, predicate, settings.ck_dir) for config in chosen)
        return Offers(choices=choices, refusals=(*refusals, *left_out))


def _allowed(legal: list[Config], predicate: Predicate, settings: Settings) -> tuple[list[Config], list[Refusal]]:
    """Return the configs whose names pass the settings' regexes, and one refusal per reason for the others.

    The regexes apply before the ranking. If no config remains, all are returned: the selector refuses them, and warns.
    """
    named = (why_not_named(name_of(predicate, config), NAME, settings) or config for config in legal)
    allowed, refusals = Refusal.apart(named, NAME, "instances")
    return (allowed, refusals) if allowed else (legal, [])
