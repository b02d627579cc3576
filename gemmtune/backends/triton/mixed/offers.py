"""Candidate configs of the words template, likely best first, and the recommended choice."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from ....choice import Choice
from ....device import DeviceInfo
from ....filters import HEURISTIC
from ....problem import Problem
from ..arch import arch_of, can_overlap
from ..configs import SPLITS, splits_for, tiles_of
from ..legality import TENSOR_MEMORY
from .words import OrderedChoice, WordsChoice, WordsConfig, ordered_problem, why_not_config, why_not_words, word_format

MOST_ROWS_OF_SINGLE_WARPS = 64
LEAST_ROWS_OF_A_GROUP = 17
SINGLE = ((64, 128, 2), (128, 128, 4), (128, 128, 2), (64, 128, 4), (64, 256, 2), (128, 256, 4), (32, 128, 1), (64, 64, 2))
"""(block_n, block_k, warps) for single warps."""
GROUPS = ((64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (32, 128, 4), (64, 64, 4))
"""(block_m, block_n, warps) for a warp group."""
GROUP_BLOCKS_K = (128, 64)
STAGES = (3, 4, 6)
LEAST_KNOWN_SIDE = 4096


def words_choices(problem: Problem, device: DeviceInfo, count: int | None) -> Sequence[Choice]:
    """Return up to ``count`` choices of the words template (None: all); none if it does not serve the problem."""
    return [
        (OrderedChoice if config.fragments else WordsChoice).of(problem, device, config)
        for config in words_configs(problem, device, count)
    ]


def with_recommendation(problem: Problem, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the choices, best first, with the first one marked as recommended in ``info`` for well-known shapes.

    Those are mixed_mm in float16 with at most 64 rows and N, K of at least 4096, multiples of 16 for one row.
    """
    known = problem.widens_b and problem.dtype == torch.float16 and problem.m <= MOST_ROWS_OF_SINGLE_WARPS
    sizes = (problem.n, problem.k)
    if not choices or not known or min(sizes) < LEAST_KNOWN_SIDE or (problem.m == 1 and any(size % 16 for size in sizes)):
        return tuple(choices)
    return (replace(choices[0], info={**choices[0].info, HEURISTIC: True}), *choices[1:])


@functools.lru_cache(maxsize=1024)
def words_configs(problem: Problem, device: DeviceInfo, count: int | None = None) -> tuple[WordsConfig, ...]:
    """Return up to ``count`` legal configs (None: all), likely best first."""
    if why_not_words(problem, device) is not None:
        return ()
    copied = ordered_problem(problem)
    pool = dict.fromkeys(_pool(problem, device))
    legal = (c for c in pool if why_not_config(copied if c.fragments else problem, device, c) is None)
    return tuple(itertools.islice(legal, count))


def _pool(problem: Problem, device: DeviceInfo) -> Iterator[WordsConfig]:
    """Yield every config that may suit this problem on this device, without checking legality. Some repeat."""
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    groups = arch_of(device).warp_group and device.capability < TENSOR_MEMORY
    for config in preferred_configs(problem, device, groups=groups):
        yield replace(config, pdl=overlaps)
    for config in (*_single(problem), *(_groups(problem) if groups else ())):
        for split_k in splits_for(tiles_of(problem, config), device.sm_count):
            yield replace(config, split_k=split_k, pdl=overlaps)


def _single(problem: Problem) -> Iterator[WordsConfig]:
    if problem.m > MOST_ROWS_OF_SINGLE_WARPS:
        return
    rows = max(16, 1 << (problem.m - 1).bit_length())
    for stages, (block_n, block_k, warps), steps, swap in itertools.product(STAGES, SINGLE, (1, 2), (True, False)):
        yield WordsConfig(block_m=rows, block_n=block_n, block_k=block_k, stages=stages, warps=warps, steps=steps, swap=swap)


def _groups(problem: Problem) -> Iterator[WordsConfig]:
    if problem.m < LEAST_ROWS_OF_A_GROUP:
        return
    for (block_m, block_n, warps), block_k, stages in itertools.product(GROUPS, GROUP_BLOCKS_K, STAGES):
        yield WordsConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=warps, fragments=True)


@dataclass(frozen=True, slots=True)
class Row:
    """Config that was among the fastest of its kind, so that a short search contains it.

    ``programs`` is the number per multiprocessor to reach by splitting K. Measured on an H200 with N = K = 8192: float16 with int8
    and one scale per column, and with int4 and groups of 128. Some rows come from bfloat16 or zero points.
    """

    block_m: int | None
    """None: the number of rows."""
    block_n: int
    block_k: int
    stages: int
    warps: int
    programs: float
    swap: bool = True
    steps: int = 1


Few = functools.partial(Row, None)
SMALL_M, MEDIUM_M = 16, 64
"""Largest M for the first and the second table of a family; the third serves larger M."""
BYTES_SMALL_M = (
    Few(64, 128, 3, 2, 4, swap=False), Few(64, 128, 3, 2, 4), Few(128, 128, 6, 4, 1, swap=False),
    Few(64, 128, 3, 4, 2, swap=False, steps=2), Few(64, 128, 3, 2, 2, steps=2), Few(64, 256, 3, 2, 2),
    Few(128, 256, 3, 4, 2, swap=False), Few(32, 128, 2, 1, 16),
)  # fmt: skip
NIBBLES_SMALL_M = (
    Few(64, 128, 3, 2, 4), Few(128, 128, 4, 4, 2, swap=False), Few(64, 128, 3, 2, 4, swap=False, steps=2),
    Few(64, 128, 2, 2, 8), Few(128, 128, 4, 4, 4, swap=False), Few(32, 128, 2, 1, 8, steps=2),
    Few(64, 64, 4, 2, 4, steps=2),
)  # fmt: skip
BFLOAT16_BYTES_SMALL_M = (
    Few(128, 256, 4, 4, 1, swap=False), Few(64, 256, 3, 4, 2, swap=False, steps=2), Few(64, 256, 3, 2, 2, steps=2),
)  # fmt: skip
DEEP_NIBBLES_SMALL_M = (
    Few(64, 128, 6, 2, 2, swap=False), Few(128, 128, 6, 4, 1, swap=False, steps=2), Few(64, 128, 6, 2, 4, swap=False),
    Few(128, 128, 8, 2, 2),
)  # fmt: skip
"""Configs for bfloat16 and for zero points, which need more registers and time for each word."""
SINGLE_MEDIUM_M = (
    Few(64, 128, 3, 2, 4), Few(128, 128, 4, 2, 2),
)  # fmt: skip
"""Configs without warp groups."""
BYTES_MEDIUM_M = (
    Row(64, 64, 128, 3, 4, 3), Row(64, 64, 128, 3, 4, 2), Row(64, 128, 64, 4, 4, 1.5), Row(32, 128, 128, 6, 4, 2),
    Row(64, 64, 128, 3, 4, 4), Row(64, 128, 64, 4, 4, 2),
)  # fmt: skip
NIBBLES_MEDIUM_M = (
    Row(64, 128, 128, 4, 4, 2), Row(32, 128, 128, 4, 4, 2), Row(64, 128, 64, 4, 4, 2), Row(64, 128, 128, 4, 4, 1.5),
    Row(64, 64, 64, 6, 4, 3), Row(32, 128, 64, 4, 4, 3),
)  # fmt: skip
BYTES_LARGE_M = (
    Row(64, 128, 128, 4, 4, 2), Row(128, 128, 64, 4, 8, 1), Row(128, 128, 64, 3, 4, 2), Row(128, 128, 64, 4, 4, 1),
    Row(128, 128, 128, 3, 4, 1), Row(128, 256, 128, 3, 8, 1), Row(64, 128, 64, 4, 4, 2), Row(128, 128, 32, 6, 4, 2),
)  # fmt: skip
NIBBLES_LARGE_M = (
    Row(64, 128, 128, 3, 4, 2), Row(64, 128, 128, 4, 4, 2), Row(128, 128, 128, 4, 8, 1), Row(128, 128, 128, 3, 8, 1),
    Row(128, 128, 64, 6, 8, 1), Row(64, 64, 128, 3, 4, 2), Row(128, 128, 128, 3, 8, 2),
)  # fmt: skip
ROUNDING = 1.05
"""Factor by which programs may exceed whole rounds: one more on a few multiprocessors costs less than a split fewer for all."""


def preferred_configs(problem: Problem, device: DeviceInfo, *, groups: bool) -> Iterator[WordsConfig]:
    """Yield the configs for the problem, best first, without checking legality; warp-group configs only with ``groups``."""
    if problem.m <= SMALL_M:
        yield from (_config(problem, device, row, rows=SMALL_M) for row in _small_m(problem))
        return
    bytes_ = word_format(problem).bits == 8
    if groups:
        medium, large = (BYTES_MEDIUM_M, BYTES_LARGE_M) if bytes_ else (NIBBLES_MEDIUM_M, NIBBLES_LARGE_M)
        yield from (_config(problem, device, row, fragments=True) for row in (medium if problem.m <= MEDIUM_M else large))
    if problem.m <= MEDIUM_M:
        rows = 1 << (problem.m - 1).bit_length()
        yield from (_config(problem, device, row, rows=rows) for row in (*SINGLE_MEDIUM_M, *_small_m(problem)))


def _small_m(problem: Problem) -> tuple[Row, ...]:
    half = problem.dtype == torch.float16
    if word_format(problem).bits == 8:
        return BYTES_SMALL_M if half else BFLOAT16_BYTES_SMALL_M + BYTES_SMALL_M
    return NIBBLES_SMALL_M + DEEP_NIBBLES_SMALL_M if half and problem.zero_b is None else DEEP_NIBBLES_SMALL_M + NIBBLES_SMALL_M


def _config(problem: Problem, device: DeviceInfo, row: Row, *, rows: int = 0, fragments: bool = False) -> WordsConfig:
    """Return the row's config for a number of ``rows``, which a row with a ``block_m`` ignores."""
    fields = asdict(row) | {"block_m": row.block_m or rows}
    programs = fields.pop("programs")
    config = WordsConfig(**fields, fragments=fragments)
    most = ROUNDING * programs * max(device.sm_count, 1) / tiles_of(problem, config)
    blocks = problem.k // row.block_k
    # Every split needs work.
    fitting = (s for s in SPLITS if s <= min(most, blocks) and -(-blocks // -(-blocks // s)) == s)
    return replace(config, split_k=max(fitting, default=1))
