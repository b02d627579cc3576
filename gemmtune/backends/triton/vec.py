"""Products of a few rows without tensor cores. Nothing is rearranged, so b is read at memory bandwidth."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...choice import Claims
from ...device import DeviceInfo
from ...numerics.reduction import Reduction
from ...problem import Problem
from ...problem.rules import why_not_dense
from .arch import arch_of, can_overlap
from .artifact import Expected, vector_instruction
from .build import KernelChoice
from .classes import INT32_LIMIT
from .configs import Config, Geometry, Resources, tiles_of
from .legality import Predicate, why_overhanging
from .mixed.words import WordsKernelChoice, why_not_words
from .reductions import summed_by_lanes

MOST_ROWS = 4
"""Largest M: each additional row costs one multiply-add per element of b, and above this tensor cores are as fast."""
ALONG_K = (
    (8, 256, 2), (16, 256, 4), (16, 512, 8), (8, 256, 4), (4, 256, 2), (8, 1024, 8), (4, 1024, 4), (16, 128, 2), (32, 256, 8),
)  # fmt: skip
"""(block_n, block_k, warps) for b contiguous along K."""
DIRECT_ALONG_K = ((4, 2048, 4), (2, 4096, 4), (1, 2048, 4), (2, 2048, 2), (4, 1024, 4))
"""(block_n, block_k, warps) for aligned b along K that goes straight to registers, best first, measured with one row on an H100.

Its loads leave the cache first. Copies to shared memory ignore that hint, and took 2% to 6% longer.
"""
ALONG_N = ((64, 32, 4), (128, 32, 4), (64, 64, 4), (128, 64, 8), (32, 64, 4), (256, 16, 4), (64, 16, 2), (32, 128, 4))
"""(block_n, block_k, warps) for b contiguous along N."""
STAGES = (4, 2, 1)
USUAL_ELEMENTS, MOST_ELEMENTS = 64, 160
"""Accumulators of a thread: the usual number, which leaves room for other programs, and the most that its registers hold."""
BASE_REGISTERS = 40
MOST_ROWS_OF_WORDS = 2
WORDS_STAGES = 4
WORDS_CONFIGS = ((8, 256, 1), (16, 512, 4), (8, 512, 2), (4, 512, 1), (4, 1024, 2), (8, 1024, 4), (4, 256, 1))
"""(block_n, block_k, warps for each row) for 8-bit weights read as words, best first, measured with one row on an H200."""


@dataclass(frozen=True, kw_only=True)
class VectorChoice(KernelChoice):
    """Choice of the vec template with one config. ``block_m`` is the most rows that it serves."""

    family = "vec"
    template = "vec.py.jinja"

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        return why_not_dense(problem) or why_too_many_rows(problem, config) or why_not_config(problem, device, config)

    @classmethod
    def claimed(cls, problem: Problem, where: Geometry) -> Claims:
        """Return the claims of FMAs, which round no operand."""
        return dataclasses.replace(super().claimed(problem, where), input_mode="ieee")

    @classmethod
    def reduced(cls, problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:  # noqa: ARG003
        """Return a running sum for each lane of block_k. The layout of the tile decides how lanes are added up."""
        return summed_by_lanes(problem, config)

    def expected(self: KernelChoice, device: DeviceInfo) -> Expected:
        """Return the FMA instruction and the upper bound of the shared memory."""
        need = vector_resources(self.problem, device, self.config)
        return Expected(instruction=vector_instruction(self.problem, device), smem_bytes=need.smem_bytes)


def vector_choices(problem: Problem, device: DeviceInfo, count: int | None) -> list[VectorChoice]:
    """Return up to ``count`` choices without tensor cores (None: all); none if they cannot win."""
    return [VectorChoice.of(problem, device, config) for config in _configs(problem, device)[:count]]


@functools.lru_cache(maxsize=1024)
def _configs(problem: Problem, device: DeviceInfo) -> tuple[Config, ...]:
    """Return the legal configs: first, in the order of the tables, those that occupy every multiprocessor and share it."""
    if why_not_dense(problem) is not None or problem.m > MOST_ROWS:
        return ()
    legal = [config for config in _pool(problem, device) if why_not_config(problem, device, config) is None]

    def key(config: Config) -> tuple[int, bool, int, int]:
        programs, elements = tiles_of(problem, config), _elements(config, device) * config.block_m
        idle = programs < device.sm_count
        return (int(idle) + int(elements > USUAL_ELEMENTS), config.stages > 1, -config.stages, -programs if idle else 0)

    return tuple(sorted(legal, key=key))


def _pool(problem: Problem, device: DeviceInfo) -> Iterator[Config]:
    rows = 1 << (problem.m - 1).bit_length()
    along_k = problem.b.stride[-2] == 1
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    predicate = Predicate(problem, device)
    # Stages help only asynchronous copies, and narrow elements cannot be copied asynchronously.
    tables = [(stages, stages > 1, shape) for stages in STAGES for shape in (ALONG_K if along_k else ALONG_N)]
    tables += [(1, True, shape) for shape in DIRECT_ALONG_K if along_k and device.type == "cuda"]
    for stages, asynchronous, (block_n, block_k, warps) in tables:
        config = Config(block_m=rows, block_n=block_n, block_k=block_k, stages=stages, warps=warps, pdl=overlaps)
        if predicate.staging(config)[1].asynchronous == asynchronous:
            yield config


def why_too_many_rows(problem: Problem, config: Config) -> str | None:
    """Return why ``config`` does not take all rows of a, or None."""
    return f"m = {problem.m}: at most {config.block_m} rows" if problem.m > config.block_m else None


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    if (reason := why_overhanging(problem, config, "nk")) is not None:
        return reason
    if tiles_of(problem, config) >= INT32_LIMIT:
        return "the grid has fewer than 2^31 programs"
    need = vector_resources(problem, device, config)
    if _elements(config, device) * config.block_m * problem.accumulator.itemsize // 4 > MOST_ELEMENTS:
        return f"registers: needs about {need.registers} for each thread"
    return device.why_no_smem(need.smem_bytes) if device.type != "cpu" else None


def vector_resources(problem: Problem, device: DeviceInfo, config: Config) -> Resources:
    """Return estimated registers, and a bound of shared memory: stages of b and a, sums of warps, or a row of a in b's layout."""
    line_bytes = config.block_n * problem.b.dtype.itemsize + config.block_m * problem.dtype.itemsize
    stages, acc_bytes = line_bytes * config.block_k * (config.stages - 1), problem.accumulator.itemsize
    if problem.widens_b:  # a row of a goes through shared memory to the layout of the weights
        stages += config.block_m * config.block_k * acc_bytes
    sums = max(2 * config.block_m * config.block_n * config.warps * acc_bytes, config.block_k * problem.dtype.itemsize)
    registers = BASE_REGISTERS + (config.block_m + 1) * _elements(config, device) * acc_bytes // 4
    return Resources(smem_bytes=max(stages, sums) if arch_of(device).async_copy else sums, registers=registers)


def _elements(config: Config, device: DeviceInfo) -> int:
    """Return the products of one row that a thread computes in each step."""
    return config.block_n * config.block_k // (config.warps * max(device.warp_size, 1))


@dataclass(frozen=True, kw_only=True)
class WordsVectorChoice(WordsKernelChoice):
    """Choice of the vec template for words with one config. ``block_m`` is the most rows that it serves."""

    family = "mixed_vec"
    template = "mixed/vec.py.jinja"

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        reason = why_not_words_vector(problem, device) or why_too_many_rows(problem, config)
        return reason or why_not_words_row(problem, device, config)

    @classmethod
    def reduced(cls, problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:  # noqa: ARG003
        return summed_by_lanes(problem, config, own="triton words")

    expected = VectorChoice.expected


def words_vector_choices(problem: Problem, device: DeviceInfo, count: int | None) -> Sequence[WordsVectorChoice]:
    """Return up to ``count`` choices of this template (None: all); none if it does not serve the problem."""
    if why_not_words_vector(problem, device) is not None:
        return ()
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    configs = [
        Config(block_m=problem.m, block_n=n, block_k=k, stages=WORDS_STAGES, warps=warps * problem.m, pdl=overlaps)
        for n, k, warps in WORDS_CONFIGS
    ]
    legal = [config for config in configs if why_not_words_row(problem, device, config) is None]
    return [WordsVectorChoice.of(problem, device, config) for config in legal[:count]]


def why_not_words_vector(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why the template does not serve a problem that ``check_problem`` accepts on this device, or None."""
    if (reason := why_not_words(problem, device)) is not None:
        return reason
    if problem.m > MOST_ROWS_OF_WORDS:
        return f"m = {problem.m}: at most {MOST_ROWS_OF_WORDS} rows are served without tensor cores"
    if problem.encoding:
        return f"{problem.encoding}: only 8-bit weights are served"
    if problem.zero_b is not None or (problem.scale_b is not None and problem.scale_block("scale_b")[0] != problem.k):
        return "zero points, and scales that change along K, are not served: each weight would need them"
    return None


def why_not_words_row(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Return why ``config`` may not be offered for a problem that the template serves, or None."""
    if problem.k % config.block_k:
        return f"block_k {config.block_k}: must divide k = {problem.k}"
    return why_overhanging(problem, config, "n") or device.why_no_smem(vector_resources(problem, device, config).smem_bytes)
