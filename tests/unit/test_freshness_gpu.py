"""Packed copies of weights on a GPU follow what torch counts, and what ``refresh`` is told of."""

from __future__ import annotations

import pytest
import torch
from test_freshness import PACKS, WAYS

import gemmtune

pytestmark = pytest.mark.gpu
COUNTED = (
    "in place", "an element in place", "a foreach function", "fused AdamW", "fused SGD", "foreach AdamW", ".data = …", "set_",
    "swap_tensors", "memory freed and filled again",
)  # fmt: skip
"""The ways that need no sample of elements."""


@pytest.mark.parametrize("way", COUNTED)
def test_packed_copies_follow(way: str):
    w = torch.randn(256, 128, device="cuda")
    packed = gemmtune.prepack(w)
    copy = packed.for_choice(PACKS).clone()
    assert packed.for_choice(PACKS) is packed.for_choice(PACKS)
    if way == "memory freed and filled again":
        w.data = w.data.clone()  # the memory of before may come back at its address
    WAYS[way](w)
    assert not torch.equal(w, copy)
    assert torch.equal(packed.for_choice(PACKS), w)


@pytest.mark.parametrize("way", ["through .data", "a captured graph"])
def test_refresh_after_what_nothing_counts_keeps_the_address_of_the_copy(way: str):
    w, source = torch.randn(256, 128, device="cuda"), torch.randn(256, 128, device="cuda")
    packed = gemmtune.prepack(w)
    copy = packed.for_choice(PACKS)
    if way == "through .data":
        w.data.copy_(source)
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            w.copy_(source)
        packed.for_choice(PACKS)
        graph.replay()
    packed.refresh()
    assert packed.for_choice(PACKS) is copy
    assert torch.equal(copy, source)


def test_an_inference_tensor_is_packed_for_each_call():
    with torch.inference_mode():
        w = torch.randn(64, 64, device="cuda")
        packed = gemmtune.prepack(w)
        packed.for_choice(PACKS)
        w.mul_(2)
        assert torch.equal(packed.for_choice(PACKS), w)
