"""The parts of float32 numbers, and how many sums of theirs may follow one another."""

from __future__ import annotations

import math

import pytest
import torch

from gemmtune.backends.by_parts import parts_of, why_not_one_by_one
from gemmtune.device import preset
from gemmtune.problem import Problem

F32 = torch.float32
SM90 = preset("sm90")


def test_parts_are_bfloat16_and_add_up_to_the_number() -> None:
    most = torch.finfo(F32).max
    x = torch.cat([torch.randn(500), torch.randn(500) * 2.0**100, torch.tensor([most, -most, 0.0, -0.0, 1 + 2.0**-23, 2.0**-100])])
    made = parts_of(x)
    assert all(torch.equal(part.bfloat16().float(), part) for part in made)
    assert torch.equal(sum(part.double() for part in made), x.double())
    assert all(bool((part * x.sign() >= 0).all()) for part in made)
    signalling = torch.tensor([0x7F800001], dtype=torch.int32).view(F32)
    special = torch.cat([torch.tensor([math.inf, -math.inf, math.nan]), signalling])
    high, middle, low = parts_of(special)
    assert torch.equal(low[:2], special[:2])
    assert torch.equal(high[:2], torch.tensor([1.0, -1.0]))
    assert bool(low[2:].isnan().all())
    assert bool((high[2:].isfinite() & (high[2:] != 0)).all())
    assert not middle.any()


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ((256, 256, 16384), 1024),
        ((1152, 4096, 4096), 1024),
        ((6304, 1024, 8192), 4096),
        ((2048, 4096, 16384), 4096),
        ((4224, 2048, 16384), 10**6),
        ((4096, 4096, 16384), 10**6),
    ],
    ids=str,
)
def test_more_tiles_allow_longer_sums_one_by_one(sizes: tuple[int, int, int], most: int) -> None:
    problem = Problem.mm(*sizes, dtype=F32, device_type="cuda")
    assert why_not_one_by_one(problem, SM90, most) is None
    if most < 10**6:
        reason = why_not_one_by_one(problem, SM90, most + 1)
        assert reason is not None
        assert f"{most + 1} elements of K are added to one sum step by step, expected at most {most} where" in reason
    assert why_not_one_by_one(problem, preset("portable"), 10**6) is None


def test_the_products_of_a_batch_have_their_tiles_together() -> None:
    one, many = (Problem.bmm(batch, 512, 512, 8192, dtype=F32, device_type="cuda") for batch in (1, 64))
    assert "16 tiles of 128x128" in str(why_not_one_by_one(one, SM90, 8192))
    assert why_not_one_by_one(many, SM90, 8192) is None
