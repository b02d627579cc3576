"""CUTLASS backend: operations that serve a problem, ranked before anything is compiled, which takes half a minute each.

A model's time is that of the slowest resource (products in whole waves, L2, memory), in the terms of DeepGEMM's and CUTLASS's
heuristics. The constants are fitted to times of 72 operations on 18 bfloat16 products on an H200. Other GPUs and types scale them
by rates. The model only orders: for each of those products, its first eight operations contained the fastest.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ...choice import Availability, Offers, Refusal
from ...device import DeviceInfo
from ...effort import EFFORT
from ...errors import ONLY_COMPILED, UnavailableError
from ...filters import why_not_named
from ...problem import Problem
from ...problem.operations import QUANTIZED_OPS
from ...settings import Settings, current
from ...toolchain.nvcc import find_compiler
from ...toolchain.orientation import Oriented
from .build import NAME, CutlassChoice, name_of
from .configs import Config, Legality, check_problem, elements_of
from .operation import Operation, bytes_of
from .quantized import quantized_operations
from .tiles import is_shared
from .toolkit import distinct_operations, find_toolkit, without_twins
from .variants import Grid, Variant, legal_variants

SM_TFLOPS: dict[int, float] = {75: 1.6, 80: 2.9, 90: 6.2}
"""Tensor core rate of a multiprocessor with 16-bit operands at sustained clocks, by the operation's target architecture."""
SIMT_SHARE = {"f32": 0.07, "f64": 0.035}
OPERAND_SHARE = {"f16": 1.0, "bf16": 1.0, "tf32": 0.5, "f64": 0.067, "s8": 2.0, "e4m3": 2.0, "e5m2": 2.0, "f32": 0.5}
L2_GBPS_PER_SM = {75: 30.0, 80: 40.0, 90: 120.0}
"""Read bandwidth of a multiprocessor, multicast included."""
DRAM_GBPS: dict[int, float] = {75: 300.0, 80: 1900.0, 90: 3900.0}
DRAM_GBPS_PER_SM = 80.0
"""Memory bandwidth that one multiprocessor can use."""
LAUNCH_US = 1.9
STEP_US = 0.0135
"""Overhead of one main loop step in addition to its products."""
LATENCY_US = 1.2
"""Latency of loading a stage. With few stages, each step waits for a part of it."""
EPILOGUE_US = 0.6
"""Time to store 128×128 elements if no other tile hides it."""
HIDDEN = 0.15
"""Share of the store time that stays visible in the ``pingpong`` schedule, where another tile hides the rest."""
EPILOGUE_BYTES = 16 * 1024
"""Approximate shared memory of the epilogue. The stages have the rest."""
STREAM_K_US = 7.3
"""Overhead of a division along K."""
PART_US = 1.4
"""Time of each part of a 128×128 tile, for at most MOST_PARTS parts. Further parts arrive concurrently."""
MOST_PARTS = 8
LEAST_PART_STEPS = 8
SLACK = 1.6
CP_ASYNC = 1.5
"""Slowdown of copies below 16 bytes. Threads address each of them, and tensor cores wait."""
OWN_SHARE = 6
"""Fraction of operations specific to the problem: one in OWN_SHARE. The others come from ``tiles.SHARED``."""
CONVERTED_PS = 28.0
"""Time per element that a warp group converts in registers. It multiplies nothing at that time."""
PROMOTED = 0.8
"""Rate that remains if sums of 8-bit floats are added to others."""
AS_IT_IS = 1.02
"""Handicap of unswapped operands, because more problems share swapped operations."""


def estimate_us(operation: Operation, oriented: Oriented, problem: Problem, device: DeviceInfo) -> float:
    grid = Grid.of(operation, oriented, problem.batch, device.sm_count)
    compute, busy = _compute_us(operation, grid, device)
    (tile_m, tile_n), (cluster_m, cluster_n) = grid.tile, grid.cluster
    a_bytes, b_bytes = (bytes_of(x) for x in (operation.a, operation.b))
    traffic = grid.tiles * oriented.sizes[2] * (a_bytes * tile_m / cluster_n + b_bytes * tile_n / cluster_m)
    l2_us = traffic / (_of(L2_GBPS_PER_SM, device.capability) * device.sm_count * 1e3)
    gbps = min(_of(DRAM_GBPS, device.capability), DRAM_GBPS_PER_SM * busy)
    dram_us = problem.bytes / (gbps * 1e3)
    time_us = LAUNCH_US + math.pow(compute**4 + l2_us**4 + dram_us**4, 0.25)
    return time_us if oriented.swap_ab else time_us * AS_IT_IS


def _compute_us(operation: Operation, grid: Grid, device: DeviceInfo) -> tuple[float, int]:
    """Return the time on the multiprocessors, without launch and memory, and the number of busy multiprocessors."""
    tile_m, tile_n, tile_k = operation.tile
    area = tile_m * tile_n / 128**2
    share = SIMT_SHARE[operation.a] if operation.opcode == "Simt" else OPERAND_SHARE[operation.multiplied]
    tflops = _of(SM_TFLOPS, operation.introduced) * (share * PROMOTED if operation.promotes else share)
    products_us = 2.0 * tile_m * tile_n * tile_k / (tflops * 1e6)
    # As many stages as fit next to an epilogue, unless the operation has a fixed number.
    stage_bytes = bytes_of(operation.a, tile_m * tile_k) + bytes_of(operation.b, tile_n * tile_k)
    stages = (device.smem_per_block_bytes - EPILOGUE_BYTES) // stage_bytes if operation.modern else operation.stages
    waits_us = LATENCY_US / max(stages - 1, 1)
    # Warp groups divide the conversion of a step's first operand. Those of ``pingpong`` alternate.
    converts_us = tile_m * tile_k / (2 if operation.cooperative else 1) * CONVERTED_PS / 1e6 if operation.converts else 0.0
    step_us = math.pow((products_us + converts_us) ** 4 + waits_us**4, 0.25) + STEP_US
    if "CpAsync" in operation.kernel_schedule:
        step_us *= CP_ASYNC
    waves = math.ceil(grid.tiles / grid.at_once)
    stored_us = EPILOGUE_US * area
    hidden = HIDDEN if "Pingpong" in operation.kernel_schedule else 1.0
    whole = waves * grid.steps * step_us + stored_us * (1 + hidden * (waves - 1))
    tail = grid.tiles % grid.at_once
    if operation.stream_k and tail:
        parts = min(grid.at_once / tail, MOST_PARTS)
        divided = grid.tiles / grid.at_once * grid.steps * step_us + stored_us * waves + STREAM_K_US + PART_US * area * parts
        divided = max(divided, STREAM_K_US + PART_US * area + LEAST_PART_STEPS * step_us)
        if divided < whole:
            return divided, grid.at_once
    return whole, min(grid.tiles, grid.at_once)


def _of(table: dict[int, float], capability: int) -> float:
    """Return the entry of the newest architecture up to ``capability``."""
    return table[max(cc for cc in table if cc <= max(capability, 75))]


def select(timed: Sequence[tuple[float, Operation]], count: int | None) -> list[Operation]:
    """Return the ``count`` operations to try, or all of them, best first, if ``count`` is None.

    The shared operations with the least times come first and leave one place in OWN_SHARE. The best of all remaining ones follow,
    spread over different tiles and schedules. Operations more than SLACK times slower than the best are dropped.
    """
    ordered = sorted(
        timed, key=lambda item: (item[0], not item[1].tma_store, -item[1].alignment_a - item[1].alignment_b, item[1].name)
    )
    if count is None:
        return [op for _, op in ordered]
    near = [op for time_us, op in ordered if time_us <= SLACK * ordered[0][0]]
    shared = [op for op in near if is_shared(op)][: count - count // OWN_SHARE]
    # No tile or schedule repeats before the others had a turn.
    tiles, kinds = Counter(op.tile for op in shared), Counter(_kind(op) for op in shared)
    for most, op in itertools.product(range(1, len(near) + 1), near):
        if len(shared) == count:
            break
        if op not in shared and tiles[op.tile] < 2 * most and kinds[_kind(op)] < most:
            shared.append(op)
            tiles[op.tile] += 1
            kinds[_kind(op)] += 1
    return shared


def _kind(operation: Operation) -> tuple[object, ...]:
    return operation.tile, operation.kernel_schedule, operation.scheduler


MOST_CONVERTING = 6
"""Maximum number of operations to compile if the operands differ in width. Fewer tiles suit these."""


class CutlassBackend:
    """Choices for problems on NVIDIA GPUs."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:
        """Return ok on a CUDA device with CUTLASS. Without nvcc, only kernels compiled before can run."""
        try:
            toolkit = f"CUTLASS {find_toolkit(current().cutlass_dir).version}"
        except UnavailableError as error:
            ok, detail = False, str(error)
        else:
            try:
                ok, detail = True, f"{toolkit}, nvcc {find_compiler().cuda}"
            except UnavailableError as error:
                ok, detail = True, f"{toolkit}, {ONLY_COMPILED}: {error}"
        if device.type != "cuda":
            return Availability(ok=False, detail=f"works on CUDA devices, not on {device.type}; here: {detail}")
        return Availability(ok=ok, detail=detail)

    def serves_by_default(self, device: DeviceInfo) -> bool:  # noqa: ARG002 - no device
        """Return False. Settings must name this backend, because each of its kernels takes half a minute to compile."""
        return False

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Return the best operations within the search's limit. Needs CUTLASS, but neither nvcc nor a GPU."""
        reason = check_problem(problem, device)
        if reason is not None:
            return Offers(refusals=(Refusal(name=NAME, reason=reason),))
        try:
            toolkit = find_toolkit(settings.cutlass_dir)
            if problem.op in QUANTIZED_OPS:
                found = without_twins(quantized_operations(problem, toolkit, device.capability))
            else:
                elements = elements_of(problem)
                found = [op for element in elements for op in distinct_operations(toolkit, device.capability, element)]
        except UnavailableError as error:
            return Offers(refusals=(Refusal(name=NAME, reason=str(error)),))
        legality = Legality(problem, device)
        found_how = {op: legality.orientation(op) for op in found}
        legal = {op: how for op, how in found_how.items() if not isinstance(how, str)}
        refusals = Refusal.counted(NAME, "operations", Counter(how for how in found_how.values() if isinstance(how, str)))
        allowed, left_out = _allowed(legal, problem, device, settings)
        most = EFFORT[settings.search].configs[NAME]
        if most is not None and problem.widens_b:
            most = min(most, MOST_CONVERTING)
        timed = [(estimate_us(op, legal[op], problem, device), op) for op in allowed]
        choices = [
            CutlassChoice.of(Config(operation=op, variant=allowed[op]), problem, device, toolkit, swap_ab=legal[op].swap_ab)
            for op in select(timed, most)
        ]
        return Offers(choices=tuple(choices), refusals=(*refusals, *left_out))


def _allowed(
    legal: Mapping[Operation, Oriented], problem: Problem, device: DeviceInfo, settings: Settings
) -> tuple[dict[Operation, Variant], list[Refusal]]:
    """Return each operation's first launch variant whose name the settings' regexes allow, and a refusal for each reason.

    The regexes apply before the ranking. If no operation is allowed, all return: the selector refuses them, and warns.
    """
    passed: dict[Operation, Variant] = {}
    first: dict[Operation, Variant] = {}
    refused: Counter[str] = Counter()
    for op, oriented in legal.items():
        every = legal_variants(op, Grid.of(op, oriented, problem.batch, device.sm_count))
        first[op] = every[0]
        reason = None
        for variant in every:
            reason = why_not_named(name_of(Config(operation=op, variant=variant)), NAME, settings)
            if reason is None:
                passed[op] = variant
                break
        else:
            refused[str(reason)] += 1
    return (passed, Refusal.counted(NAME, "operations", refused)) if passed else (first, [])
