"""Packed copies and other things made of a tensor's numbers follow every way in which torch can change these."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.freshness import SAMPLE, Stamp
from gemmtune.sparse import batches, gradients, operators
from gemmtune.sparse.weights import sparsity_of

Tensor = torch.Tensor
PACKS: Any = SimpleNamespace(packed_format="copied", pack=torch.clone)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")


def optimized(optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[Tensor], None]:
    def step(w: Tensor) -> None:
        leaf = w.detach().requires_grad_()
        leaf.grad = torch.ones_like(leaf)
        optimizer([leaf]).step()

    return step


def in_inference_mode(w: Tensor) -> None:
    with torch.inference_mode():
        w.mul_(2)


def assigned(w: Tensor) -> None:
    w.data = torch.randn_like(w)


def assigned_twice(w: Tensor) -> None:
    for _ in range(2):  # the second may get the memory of before
        w.data = torch.randn_like(w)


def moved_to_shared_memory(w: Tensor) -> None:
    w.share_memory_()
    w.data.mul_(2)


def memory_freed_and_filled_again(w: Tensor) -> None:
    storage, size = w.untyped_storage(), w.untyped_storage().nbytes()
    storage.resize_(0)
    storage.resize_(size)
    w.data.fill_(3)


def swapped(w: Tensor) -> None:
    torch.utils.swap_tensors(w, torch.randn_like(w))


def compiled_step(w: Tensor) -> None:
    leaf = w.detach().requires_grad_()
    leaf.grad = torch.ones_like(leaf)
    torch.compile(torch.optim.SGD([leaf], lr=0.1).step, backend="eager")()


def a_row(w: Tensor) -> None:
    w.data[len(w) // 3] = 0


def a_column(w: Tensor) -> None:
    w.data[:, w.shape[1] // 3] = 0


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda w: w.mul_(2),
    "an element in place": lambda w: w[1, 2].zero_(),
    "a foreach function": lambda w: torch._foreach_mul_([w], 2.0),
    "fused AdamW": optimized(lambda ws: torch.optim.AdamW(ws, fused=True)),
    "fused SGD": optimized(lambda ws: torch.optim.SGD(ws, lr=0.1, fused=True)),
    "foreach AdamW": optimized(lambda ws: torch.optim.AdamW(ws, foreach=True)),
    "a compiled optimizer": compiled_step,
    "through .data": lambda w: w.data.mul_(2),
    "a row through .data": a_row,
    "a column through .data": a_column,
    "inference mode": in_inference_mode,
    ".data = …": assigned,
    ".data = … twice": assigned_twice,
    "set_": lambda w: w.set_(torch.randn_like(w)),
    "numpy": lambda w: np.multiply(w.numpy(), 2, out=w.numpy()),
    "DLPack": lambda w: torch.from_dlpack(w).mul_(2),
    "another storage of the same memory": lambda w: torch.frombuffer(w.numpy(), dtype=w.dtype).mul_(2),
    "shared memory": moved_to_shared_memory,
    "memory freed and filled again": memory_freed_and_filled_again,
    "swap_tensors": swapped,
}
WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(768, 512),
    "few rows": lambda: torch.randn(3, 700),
    "a column": lambda: torch.randn(1000, 1),
    "small": lambda: torch.randn(4, 5),
}


@pytest.mark.parametrize(
    ("way", "weight"),
    # One compiled step: its way to the weight does not depend on a size.
    [(way, weight) for way in WAYS for weight in (WEIGHTS if way != "a compiled optimizer" else ["rows"])],
)
def test_packed_copies_follow(way: str, weight: str):
    w = WEIGHTS[weight]()
    if way == "an element in place" and w.shape[1] < 3:
        w = w.reshape(2, -1)
    packed = gemmtune.prepack(w)
    copy = packed.for_choice(PACKS)
    assert packed.for_choice(PACKS) is copy
    WAYS[way](w)
    assert not torch.equal(w, copy)
    assert torch.equal(packed.for_choice(PACKS), w)
    assert packed.for_choice(PACKS) is packed.for_choice(PACKS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("transposed", [False, True])
def test_padded_and_transposed_weights_of_any_dtype_follow(dtype: torch.dtype, transposed: bool):
    w = torch.ones(300, 290).to(dtype)[:, :280]
    w = w.t() if transposed else w
    packed = gemmtune.prepack(w)
    packed.for_choice(PACKS)
    w.data.copy_(torch.zeros(w.shape).to(dtype))
    assert not packed.for_choice(PACKS).float().any()


def test_numbers_that_are_not_numbers_stay_packed():
    packed = gemmtune.prepack(torch.full((40, 40), torch.nan))
    assert packed.for_choice(PACKS) is packed.for_choice(PACKS)


def test_a_small_write_that_nothing_counts_needs_refresh():
    w = torch.randn(256, 512)
    packed = gemmtune.prepack(w)
    copy = packed.for_choice(PACKS)
    w.data[0, 1] = 100  # one of 131072 elements, SAMPLE of which are compared
    assert w.numel() > 100 * SAMPLE
    assert packed.for_choice(PACKS) is copy
    packed.refresh()
    assert torch.equal(packed.for_choice(PACKS), w)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_a_step_of_any_optimizer_renews_floats_alone(dtype: torch.dtype):
    packed = gemmtune.prepack(torch.ones(8, 8, dtype=dtype))
    copy = packed.for_choice(PACKS)
    WAYS["fused AdamW"](torch.randn(3, 3))  # whose tensor may be an alias of the weight that shares no version with it
    assert (packed.for_choice(PACKS) is copy) == (dtype == torch.int8)


def test_inference_tensors_follow():
    with torch.inference_mode():
        w = torch.randn(64, 64)
        packed = gemmtune.prepack(w)
        packed.for_choice(PACKS)
        w.mul_(2)
        assert torch.equal(packed.for_choice(PACKS), w)


def test_a_stamp_of_other_tensors_does_not_hold():
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    assert Stamp.of((x, y)).holds((x, y))
    assert not Stamp.of((x, y)).holds((y, x))
    assert not Stamp.of((x,)).holds((x, y))


def blocks(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(5)
    kept = torch.rand(4, 1, 6, 1).expand(4, 8, 6, 8).reshape(32, 48) < 0.5
    return (torch.randn(32, 48, dtype=dtype) * kept).to_sparse_bsr((8, 8))


@pytest.mark.rotates(8)
@pytest.mark.parametrize("way", ["fused AdamW", "through .data", "inference mode", "numpy", "DLPack", "in place"])
def test_block_sparse_weights_follow(way: str, own_store: object):
    bsr, x = blocks(), torch.randn(48, 5)
    parts = bsr.crow_indices(), bsr.col_indices(), bsr.values()
    batch = torch.stack([bsr.to_dense()] * 2).to_sparse_bsr((8, 8))
    with settings.patch(backends=("aten",), search="quick"):
        packed = gemmtune.prepack(bsr)

        def products() -> list[Tensor]:
            return [
                gemmtune.bsr_mm(packed, x),
                gemmtune.bsr_mm(bsr, x),
                torch.ops.gemmtune.bsr_mm(*parts, x),
                torch.ops.gemmtune.bsr_linear(x.t().contiguous(), *parts).t(),
            ]

        products()
        gemmtune.bsr_mm(batch, x)
        WAYS[way](bsr.values())
        WAYS[way](batch.values())
        for got in products():
            torch.testing.assert_close(got, bsr.to_dense() @ x)
        torch.testing.assert_close(gemmtune.bsr_mm(batch, x), batch.to_dense() @ x)


def test_values_with_other_memory_are_another_weight():
    crow, col, values = (lambda b: (b.crow_indices(), b.col_indices(), b.values().clone()))(blocks())
    first = operators.weight_of(crow, col, values, 48).tensor
    assigned(values)
    second = operators.weight_of(crow, col, values, 48).tensor
    assert torch.equal(second.values(), values)
    assert not torch.equal(first.values(), values)


def test_indices_that_nothing_counts_are_read_again():
    bsr = torch.eye(32).to_sparse_bsr((8, 8))
    sparsity_of("bsr_mm", bsr)
    before = gradients.transposed(bsr).to_dense()
    torch.from_dlpack(bsr.col_indices()).copy_(torch.tensor([3, 2, 1, 0]))
    assert torch.equal(gradients.transposed(bsr).to_dense(), bsr.to_dense().t())
    assert not torch.equal(before, bsr.to_dense().t())
    torch.from_dlpack(bsr.col_indices()).fill_(7)
    with pytest.raises(gemmtune.InvalidProblemError, match=r"col_indices\[0\] of bsr is 7, expected 0 to 3"):
        sparsity_of("bsr_mm", bsr)


def test_batches_follow_their_indices():
    batch = torch.eye(32).expand(2, 32, 32).contiguous().to_sparse_bsr((8, 8))
    kept: Any = batches._stacked
    batches._joined(batch, kept, diagonal=False)
    torch.from_dlpack(batch.col_indices()).copy_(batch.col_indices().flip(-1))
    assert torch.equal(batches._joined(batch, kept, diagonal=False).to_dense(), batch.to_dense().reshape(64, 32))


@pytest.mark.parametrize("fused", [False, True])
def test_a_sparse_layer_trains_as_a_dense_one(fused: bool, own_store: object):
    torch.manual_seed(0)
    pattern, x = blocks(), torch.linspace(-1, 1, 480).view(10, 48)
    crow, col, start = pattern.crow_indices(), pattern.col_indices(), pattern.values()
    mask = pattern.to_dense() != 0

    def trained(of: Callable[[Tensor], Tensor], weight: Tensor) -> list[float]:
        leaf = torch.nn.Parameter(weight.clone())
        optimizer = torch.optim.AdamW([leaf], lr=0.1, weight_decay=0.0, fused=fused)
        losses = []
        for _ in range(4):
            loss = (of(leaf) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    # The choice multiplies by a packed copy: the weight made dense.
    with settings.patch(backends=("aten",), search="quick", choice_allowlist_regex="dense"):
        found = trained(lambda values: torch.ops.gemmtune.bsr_linear(x, crow, col, values), start)
    expected = trained(lambda weight: x @ (weight * mask).t(), pattern.to_dense())
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0]


def test_an_inference_tensor_on_a_gpu_is_said_to_be_packed_for_each_call(caplog, monkeypatch):
    monkeypatch.setattr("gemmtune.dispatch.prepack.is_uncounted", lambda tensor: True)
    with caplog.at_level(logging.WARNING, "gemmtune"):
        gemmtune.prepack(torch.randn(4, 4))
    assert "packed again for each call; clone() it outside of torch.inference_mode() first" in caplog.text
