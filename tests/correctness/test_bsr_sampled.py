"""Sampled products: the values of every way, and which way is taken."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.numerics.block_sparse import mask_of, spread
from gemmtune.problem.sparsity import Sparsity
from gemmtune.sparse import create_blocked_tensor, sampled

pytestmark = [
    pytest.mark.usefixtures("own_store"),
    pytest.mark.filterwarnings("ignore:Sparse BSR tensor support"),
]
BLOCK = (16, 8)


def wanted(inp: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    exists = spread(mask_of(inp), Sparsity(block_n=BLOCK[0], block_k=BLOCK[1], density=0.5))
    return beta * inp.to_dense().double() + alpha * (a.double() @ b.double()) * exists


def drawn(dtype: torch.dtype, density: float = 0.4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inp = create_blocked_tensor(64, 48, block=BLOCK, density=density, imbalance="skewed", dtype=dtype)
    return inp, *(torch.randn(size, generator=generator).to(dtype) for size in ((64, 40), (40, 48)))


@pytest.mark.rotates(8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["torch", "dense", "batched", "grouped"])
def test_every_way_has_the_blocks_that_exist(way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inp, a, b = drawn(dtype)
    if way == "grouped" and dtype == torch.float64:
        listed = sampled._listed(4, len(inp.values()), a, b.t(), BLOCK)
        assert listed.keys() == {"dense", "batched"}
        return
    if way != "torch":
        monkeypatch.setattr(sampled, "SMALL_FLOPS", 0)
        monkeypatch.setattr(sampled, "_way_for", lambda *_: way)
    monkeypatch.setattr(sampled, "MOST_GATHERED", 5000)
    with settings.patch(tune="never"):
        got = gemmtune.sampled_addmm_bsr(inp, a, b, beta=2, alpha=0.5)
    assert torch.equal(got.col_indices(), inp.col_indices())
    want = wanted(inp, a, b, 2, 0.5)
    torch.testing.assert_close(got.to_dense().double(), want, rtol=2e-2, atol=1e-1 if dtype == torch.bfloat16 else 1e-5)
    inp.values().fill_(torch.nan)
    assert not gemmtune.sampled_addmm_bsr(inp, a, b, beta=0).values().isnan().any()


def test_the_way_is_that_of_the_least_time_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "SMALL_FLOPS", 0)
    inp, a, b = drawn(torch.float32)
    count = len(inp.values())
    ways = sampled._listed(4, count, a, b.t(), BLOCK)
    assert ways["grouped"].problem.flops == ways["batched"].times * ways["batched"].problem.flops < ways["dense"].problem.flops
    cpu = torch.device("cpu")
    monkeypatch.setattr(sampled, "FAR", 1e9)
    for fastest in ways:
        times = {name: 1.0 if name == fastest else 2.0 for name in ways}
        monkeypatch.setattr(sampled, "_time_us", lambda way, *_, t=times, **__: t[next(n for n in ways if ways[n] is way)])
        assert sampled._fastest(ways, cpu, tunes=True) == fastest
    monkeypatch.setattr(sampled, "_time_us", lambda *_, **__: None)
    monkeypatch.setattr(sampled, "FAR", 4.0)
    far = ways | {"dense": dataclasses.replace(ways["dense"], copied_bytes=10**9)}
    assert sampled._fastest(far, cpu, tunes=True) != "dense"


def test_what_is_measured_is_stored_and_gradients_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "SMALL_FLOPS", 0)
    inp, a, b = drawn(torch.float32)
    weight = inp.detach().clone()
    asked: list[str] = []
    original = sampled._way_for
    monkeypatch.setattr(sampled, "_way_for", lambda *given: asked.append(original(*given)) or asked[-1])
    with settings.patch(backends=("aten",), tune="on_miss", search="quick"):
        gemmtune.sampled_addmm_bsr(inp, a, b)
        with settings.patch(tune="never"):
            gemmtune.sampled_addmm_bsr(inp, a, b)
        values = weight.values().clone().requires_grad_()
        made = torch.sparse_bsr_tensor(weight.crow_indices(), weight.col_indices(), values, size=weight.shape)
        gemmtune.bsr_mm(made, b.t()[:, :3].contiguous()).sum().backward()
    assert len(asked) == 3
    assert asked[0] in ("dense", "batched", "grouped")
    assert values.grad is not None
    through = wanted(weight, torch.ones(64, 3), b.t()[:, :3].t(), 0, 1)
    got = torch.sparse_bsr_tensor(weight.crow_indices(), weight.col_indices(), values.grad, size=weight.shape)
    torch.testing.assert_close(got.to_dense().double(), through, rtol=1e-4, atol=1e-4)
    a.requires_grad_()
    gemmtune.sampled_addmm_bsr(inp, a, b).values().sum().backward()
    assert a.grad is not None
    assert a.grad.shape == a.shape


def test_of_no_terms_what_is_added_is_left() -> None:
    inp, a, b = drawn(torch.float32)
    got = gemmtune.sampled_addmm_bsr(inp, a[:, :0], b[:0], beta=2)
    assert torch.equal(got.values(), 2 * inp.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inp, a, b: (inp, a.t(), b), r"got inp \[64, 48\], a \[40, 64\] and b \[40, 48\]; expected \[M, N\]"),
        (lambda inp, a, b: (inp, a.double(), b), "expected one float dtype of 16 bits or more"),
        (lambda inp, a, b: (inp.to_dense(), a, b), "bsr must be a sparse_bsr tensor"),
    ],
)
def test_wrong_calls_are_told(change, message: str) -> None:
    with pytest.raises(gemmtune.InvalidProblemError, match=message):
        gemmtune.sampled_addmm_bsr(*change(*drawn(torch.float32)))


@pytest.mark.parametrize(
    ("block", "tokens", "share", "products"), [((16, 8), 40, 0.125, 1), ((128, 256), 40, 1.0, 1), ((64, 256), 2**18, 1.0, 12)]
)
def test_small_blocks_keep_a_part_of_the_device_busy(block: tuple[int, int], tokens: int, share: float, products: int) -> None:
    """The batch is divided so that copied operands stay within a limit. Copies are read and written."""
    (rows, columns), count = block, 12
    g, x = (torch.empty(4 * side, tokens, dtype=torch.bfloat16) for side in block)
    ways = sampled._listed(4, count, g, x, block)
    operands = 2 * 2 * count * tokens
    assert {name: (way.times, way.copied_bytes, way.share) for name, way in ways.items()} == {
        "dense": (1, 2 * 2 * count * rows * columns, 1.0),
        "batched": (products, operands * (rows + columns), share),
        **({"grouped": (1, operands * columns, share)} if products == 1 else {}),
    }
    assert ways["batched"].problem.batch == -(-count // products)
