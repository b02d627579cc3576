"""Reduction classes on a GPU: the likely choices of a class give each row the same bits, in a batch of any size."""

from __future__ import annotations

import dataclasses

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
from gemmtune.selector.reduction_classes import offered_in
from gemmtune.selector.some_rows import RowBits
from gemmtune.settings import current

pytestmark = pytest.mark.gpu

N, K, TOP = 1536, 2048, 700
ROWS = (1, 13, 64, 100, 257, TOP)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_likely_choices_of_a_class_have_equal_bits(parts: int, dtype: torch.dtype) -> None:
    (rows_class,) = row_classes(Problem.mm(2, N, K, dtype=dtype, layout="nt", device_type="cuda"))
    work = Work(rows_class, range(1, TOP + 1), detect("cuda"), dataclasses.replace(current(), search="quick"), 0.0, Progress())
    reduction = Reduction(unit="matrix", parts=even_parts(K, 256, parts))
    found = {choice.name: choice for m in ROWS for choice in offered_in(work, m, [reduction])}
    everywhere = [at for c in found.values() for m in ROWS if isinstance(at := c.at(rows_class.at(m), work.device), Choice)]
    assert {choice.name.split("_")[0] for choice in everywhere} >= {"triton:mm", "triton:persistent"}
    assert not precompile(everywhere, current())
    reference = next(choice for choice in everywhere if choice.problem.m == TOP)
    bits = RowBits(reference, torch.device("cuda"), lambda choice: choice.build())
    wrong = {choice.name: text for choice in everywhere if (text := bits.difference([choice])) is not None}
    assert not wrong, f"{len(wrong)} of {len(everywhere)} have other bits than {reference.name}: {wrong}"
