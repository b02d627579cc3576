"""Products of one or two rows with weights of 8 bits, without tensor cores: nothing is rearranged for those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....device import DeviceInfo
from ....problem import Problem
from ..arch import can_overlap
from ..artifact import Expected, vector_instruction
from ..configs import Config
from ..legality import Resources
from .words import WordsKernelChoice, why_not_words

__all__ = ["WordsVectorChoice", "why_not_words_vector", "words_vector_choices"]

MOST_ROWS = 2
"""Each row more is another multiply-add for each weight."""
STAGES = 4
CONFIGS = ((8, 256, 1), (16, 512, 4), (8, 512, 2), (4, 512, 1), (4, 1024, 2), (8, 1024, 4), (4, 256, 1))
"""(block_n, block_k, warps for each row), the best first: measured with one row on an H200."""
BASE_REGISTERS = 40


@dataclass(frozen=True, kw_only=True)
class WordsVectorChoice(WordsKernelChoice):
    """The vec template for words with one config, whose ``block_m`` is the number of rows it takes at most."""

    family = "mixed_vec"
    template = "mixed/vec.py.jinja"

    def expected(self, device: DeviceInfo) -> Expected:
        """FMAs, and the upper bound of the shared memory."""
        need = _resources(self.problem, device, self.config)
        return Expected(instruction=vector_instruction(self.problem, device), smem_bytes=need.smem_bytes)


def words_vector_choices(problem: Problem, device: DeviceInfo, count: int | None) -> Sequence[WordsVectorChoice]:
    """Up to ``count`` choices of this template, all for None; none where it has nothing."""
    if why_not_words_vector(problem, device) is not None:
        return ()
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    configs = [
        Config(block_m=problem.m, block_n=n, block_k=k, stages=STAGES, warps=warps * problem.m, pdl=overlaps)
        for n, k, warps in CONFIGS
        if problem.k % k == 0 and n < 2 * problem.n
    ]
    legal = [config for config in configs if _resources(problem, device, config).smem_bytes <= device.smem_per_block_bytes]
    return [WordsVectorChoice.of(problem, device, config) for config in legal[:count]]


def why_not_words_vector(problem: Problem, device: DeviceInfo) -> str | None:
    """Why the template has nothing for the problem on this device, or None. Assumes that ``check_problem`` found nothing."""
    reason = why_not_words(problem, device)
    if reason is not None:
        return reason
    if problem.m > MOST_ROWS:
        return f"m = {problem.m}: at most {MOST_ROWS} rows go without tensor cores"
    if problem.encoding:
        return f"{problem.encoding}: weights of 8 bits are served"
    if problem.zero_b is not None or (problem.scale_b is not None and problem.scale_block("scale_b")[0] != problem.k):
        return "zero points, and scales that change along K, would have to be applied to each weight"
    return None


def _resources(problem: Problem, device: DeviceInfo, config: Config) -> Resources:
    """An upper bound of the shared memory: the stages of b and a, or the sums of the warps; and an estimate of the registers."""
    stages = (config.block_n + config.block_m * problem.dtype.itemsize) * config.block_k * (config.stages - 1)
    sums = 2 * config.block_m * config.block_n * config.warps * 4
    elements = config.block_n * config.block_k // (config.warps * max(device.warp_size, 1))
    # A row of a goes through shared memory to the layout of the weights.
    rows = config.block_m * config.block_k * 4
    return Resources(smem_bytes=max(stages + rows, sums), registers=BASE_REGISTERS + (config.block_m + 1) * elements)
