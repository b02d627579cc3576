"""Reduction classes on a GPU: the likely choices of a class give each row the same bits, in a batch of any size."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch

from gemmtune.choice import Choice
from gemmtune.device import detect
from gemmtune.numerics.reduction import Reduction, even_parts
from gemmtune.problem import Problem
from gemmtune.problem.rows import row_classes
from gemmtune.selector.precompile import precompile
from gemmtune.selector.progress import Progress
from gemmtune.selector.range_work import Work
from gemmtune.selector.reduction_classes import likeliest_in, offered_at
from gemmtune.selector.some_rows import RowBits
from gemmtune.settings import current

pytestmark = pytest.mark.gpu

N, K, TOP = 1536, 2048, 700
ROWS = (1, 13, 64, 100, 257, TOP)


BF16, FP16 = torch.bfloat16, torch.float16
WEIGHTS: tuple[tuple[Literal["", "int4"], Literal["column", "group_64", "group_128"]], ...] = (
    ("int4", "group_128"),
    ("int4", "column"),
    ("", "group_64"),
    ("", "column"),
)
CASES: dict[str, tuple[Problem, Reduction, set[str]]] = {
    **{
        f"mm-{dtype}-{parts}": (
            Problem.mm(2, N, K, dtype=dtype, layout="nt", device_type="cuda"),
            Reduction(unit="matrix", parts=even_parts(K, 256, parts)),
            {"triton:mm", "triton:persistent"},
        )
        for dtype in (BF16, FP16)
        for parts in (1, 2, 4)
    },
    **{
        f"{encoding or 'int8'}-{scales}-{parts}": (
            Problem.mixed_mm(2, N, K, dtype=BF16, encoding=encoding, scales=scales, device_type="cuda"),
            Reduction(
                unit="matrix", parts=even_parts(K, 256, parts), own="weights scaled and rounded" if "group" in scales else ""
            ),
            {"triton:mixed", "cuda:wgmma"},
        )
        for encoding, scales in WEIGHTS
        for parts in (1, 2)
    },
    "int4-by-warps": (
        Problem.mixed_mm(2, N, K, dtype=BF16, encoding="int4", scales="group_128", device_type="cuda"),
        Reduction(unit="matrix", own="triton words of a thread"),
        {"triton:mixed"},
    ),
    "int8-by-warps": (
        Problem.mixed_mm(2, N, K, dtype=BF16, scales="column", device_type="cuda"),
        Reduction(unit="matrix", own="triton words of a thread"),
        {"triton:mixed"},
    ),
    "float8-row": (
        Problem.scaled_mm(2, N, K, scales="row", device_type="cuda"),
        Reduction(unit="matrix", promoted_every=128, own="triton"),
        {"triton:scaled"},
    ),
    "float8-row-widened": (
        Problem.scaled_mm(2, N, K, scales="row", device_type="cuda"),
        Reduction(unit="matrix", own="triton"),
        {"triton:scaled"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_likely_choices_of_a_class_have_equal_bits(case: str) -> None:
    problem, reduction, families = CASES[case]
    (rows_class,) = row_classes(problem)
    work = Work(rows_class, range(1, TOP + 1), detect("cuda"), dataclasses.replace(current(), search="quick"), 0.0, Progress())
    found = {choice.name: choice for m in ROWS for choice in likeliest_in(work, m, offered_at(work, m), [reduction])}
    everywhere = [at for c in found.values() for m in ROWS if isinstance(at := c.at(rows_class.at(m), work.device), Choice)]
    assert {choice.name.split("_")[0] for choice in everywhere} >= families
    assert {choice.problem.m for choice in everywhere} == set(ROWS)
    assert not precompile(everywhere, current())
    reference = next(choice for choice in everywhere if choice.problem.m == TOP)
    bits = RowBits(reference, torch.device("cuda"), lambda choice: choice.build())
    wrong = {choice.name: text for choice in everywhere if (text := bits.difference([choice])) is not None}
    assert not wrong, f"{len(wrong)} of {len(everywhere)} have other bits than {reference.name}: {wrong}"
