"""The oracle on data whose exact result is known by rational arithmetic."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch
from rational import rational

from gemmtune.numerics import reference as module
from gemmtune.numerics.compare import MOST, grade
from gemmtune.numerics.expectation import referenced
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.numerics.reference import Region, extended_reference, products, reference, regions
from gemmtune.problem import Problem

CPU = torch.device("cpu")
UNIT = Fraction(1, 2**53)


def operands(a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None = None, alpha: float = 1, beta: float = 0) -> Operands:
    return Operands(a=a, b=b, out=torch.empty(0), inp=inp, extra=(), alpha=alpha, beta=beta)


def hilbert(n: int, dtype: torch.dtype) -> torch.Tensor:
    i = torch.arange(n, dtype=torch.float64)
    return (1 / (i[:, None] + i + 1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_products_of_hilbert_matrices(dtype: torch.dtype) -> None:
    a, b = hilbert(12, dtype), hilbert(12, dtype).flip(0) * torch.tensor([1, -1] * 6, dtype=dtype)[:, None]
    value, magnitude = products(a[None], b[None])
    exact, above = rational(a.double(), b.double()), rational(a.double().abs(), b.double().abs())
    for i in range(12):
        for j in range(12):
            assert abs(Fraction(value[0, i, j].item()) - exact[i][j]) <= 12 * UNIT * above[i][j]
            assert abs(Fraction(magnitude[0, i, j].item()) - above[i][j]) <= 12 * UNIT * above[i][j]


def test_products_of_integers_are_exact_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.arange(-60, 60.0).view(2, 6, 10), torch.arange(-35, 105.0).view(2, 10, 7) % 11
    expected = a.long() @ b.long()
    for budget in (2**29, 8 * 10 * 30, 8 * 10 * 14, 8 * 10 * 4, 1):
        monkeypatch.setattr(module, "TEMPORARY_BYTES", budget)
        value, magnitude = products(a, b)
        assert torch.equal(value.long(), expected)
        assert torch.equal(magnitude.long(), a.abs().long() @ b.abs().long())


def test_extended_reference_survives_cancellation() -> None:
    generator = torch.Generator().manual_seed(3)
    half = torch.randn(4, 21, dtype=torch.float64, generator=generator) * 2.0**40
    a = torch.cat([half, -half, torch.randn(4, 3, dtype=torch.float64, generator=generator)], dim=1)
    b = torch.randn(45, 5, dtype=torch.float64, generator=generator)
    b[21:42] = b[:21]
    b[30] *= 1 + 2.0**-50
    result = extended_reference(operands(a, b), 1, 4, 5, 45)
    assert result.extended
    exact, above = rational(a, b), rational(a.abs(), b.abs())
    for i in range(4):
        for j in range(5):
            error = abs(Fraction(result.value[0, i, j].item()) - exact[i][j])
            assert error <= 2 * UNIT * abs(exact[i][j]) + 45 * 4 * UNIT**2 * above[i][j]


def test_scalars_and_broadcast_inp() -> None:
    a, b, inp = torch.full((2, 3), 2.0), torch.full((3, 4), -3.0), torch.tensor([[10.0], [20.0]])
    result = reference(operands(a, b, inp, alpha=-2, beta=0.5), Region())
    assert torch.equal(result.value, torch.tensor([[[41.0] * 4, [46.0] * 4]], dtype=torch.float64))
    assert torch.equal(result.magnitude, torch.tensor([[[41.0] * 4, [46.0] * 4]], dtype=torch.float64))


def test_beta_0_does_not_read_inp() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    result = reference(operands(a, b, torch.full((4,), torch.nan)), Region())
    assert torch.equal(result.value, torch.full((1, 2, 4), 3.0, dtype=torch.float64))


def test_small_problems_are_checked_whole_and_large_ones_at_their_edges() -> None:
    assert regions(1, 1000, 1000, 1000, CPU) == (Region(),)
    rows, cols = regions(1, 4096, 8192, 16384, CPU)
    assert rows.rows is not None
    assert cols.cols is not None
    assert rows.cols is None
    assert cols.rows is None
    assert (rows.rows[0], rows.rows[-1], cols.cols[0], cols.cols[-1]) == (0, 4095, 0, 8191)
    assert 2 <= len(rows.rows) * 8192 * 16384 <= 2**31


def test_region_takes_its_part() -> None:
    matrix = torch.arange(24).view(2, 3, 4)
    region = Region(rows=torch.tensor([0, 2]), cols=torch.tensor([3]))
    assert region.of(matrix).flatten().tolist() == [3, 11, 15, 23]
    a, b = torch.randn(2, 3, 5), torch.randn(2, 5, 4)
    whole, part = (reference(operands(a, b), r) for r in (Region(), region))
    assert torch.allclose(part.value, region.of(whole.value), rtol=1e-12)


def test_grade_tells_partials_and_accumulators_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 2048, generator=generator).half() for _ in range(2))
    parts = [x.float() @ y.float().T for x, y in zip(a.split(256, 1), b.split(256, 1), strict=True)]
    value = a.double() @ b.double().T
    narrow = torch.zeros(64, 64, dtype=torch.float16)
    for k in range(2048):
        narrow = (narrow + a[:, k : k + 1] * b.T[k : k + 1]).half()
    assert grade(sum(parts).half(), value) == pytest.approx(1, abs=0.02)  # type: ignore[union-attr]
    assert 1 < MOST < grade(sum(p.half().float() for p in parts).half(), value) < 3  # type: ignore[union-attr]
    assert grade(narrow, value) > 5


def test_grade_of_exact_data() -> None:
    ones = torch.ones(3, 3, dtype=torch.float64)
    assert grade(ones.half(), ones) == 1
    assert grade(ones.half() * 2, ones) == torch.inf


def test_reference_is_a_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        reference(operands(torch.ones(2, 3), torch.ones(3, 4)), Region()).extended = True  # type: ignore[misc]


@pytest.mark.parametrize("size", [(0, 3, 0), (2, 0, 3), (0, 0, 0), (1, 1, 0)])
def test_products_of_nothing(size: tuple[int, int, int]) -> None:
    m, k, n = size
    value, magnitude = products(torch.ones(2, m, k), torch.ones(2, k, n))
    assert value.shape == magnitude.shape == (2, m, n)
    assert not value.any()


@pytest.mark.parametrize(
    ("size", "whole"),
    [
        ((1, 10, 10, 20), True), ((1, 10, 10, 21), False), ((4, 5, 10, 10), True), ((4, 5, 10, 11), False), ((1, 30, 10, 1), True),
        ((1, 31, 10, 1), False), ((3, 10, 10, 0), True), ((31, 2, 5, 0), False),
    ],
)  # fmt: skip
def test_all_of_a_result_is_referenced_while_it_is_affordable(
    size: tuple[int, int, int, int], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_MACS", {"cpu": 1000, "cuda": 0})
    monkeypatch.setattr(module, "MOST_ELEMENTS", {"cpu": 300, "cuda": 0})
    parts = regions(*size, CPU)
    assert (parts == (Region(),)) == whole
    if not whole:
        rows, cols = parts[0].rows, parts[1].cols
        assert rows is not None
        assert cols is not None
        for sample, extent in ((rows, size[1]), (cols, size[2])):
            assert {0, extent - 1} <= set(sample.tolist())
            assert len(sample) >= min(extent, 8)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (10, ["0:2,:,:", "2:4,:,:", "4:6,:,:"]),
        (9, [f"{i}:{i + 1},:,:" for i in range(5)]),
        (5, [f"{i}:{i + 1},:,:" for i in range(5)]),
        (4, [f"{i}:{i + 1},0:2,{col}" for i in range(5) for col in ("0:2", "2:4")]),
        (1, [f"{i}:{i + 1},{row},{col}" for i in range(5) for col in ("0:1", "1:2", "2:3") for row in ("0:1", "1:2")]),
    ],
)
def test_products_are_made_in_tiles_that_fit(words: int, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def text(part: slice) -> str:
        return ":" if part == slice(None) else f"{part.start}:{part.stop}"

    monkeypatch.setattr(module, "TEMPORARY_BYTES", 8 * 10 * words)
    assert [",".join(map(text, tile)) for tile in module._tiles(5, 2, 3, 10)] == expected


def test_samples_have_both_ends_and_the_requested_count() -> None:
    for size, count, length in ((100, 20, 20), (100, 3, 8), (5, 20, 5), (9, 8, 8), (1, 9, 1), (2, 0, 2)):
        sample = module._sample(size, count, CPU).tolist()
        assert len(sample) == len(set(sample)) == length
        assert sample == sorted(sample)
        assert (sample[0], sample[-1]) == (0, size - 1)


@pytest.mark.parametrize("kind", ["cpu", "meta"])
@pytest.mark.parametrize(("macs", "elements"), [(10**6, 10**9), (10**9, 10**5)])
def test_large_results_are_sampled_by_rows_and_columns(
    macs: int, elements: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("cpu", "cuda") if kind == "cpu" else ("cuda", "cpu")
    monkeypatch.setattr(module, "MOST_MACS", dict(zip(names, (macs, 0), strict=True)))
    monkeypatch.setattr(module, "MOST_ELEMENTS", dict(zip(names, (elements, 0), strict=True)))
    rows, cols = regions(2, 1000, 500, 10, torch.device(kind))
    assert rows.rows is not None
    assert cols.cols is not None
    assert (len(rows.rows), len(cols.cols)) == (50, 25)


def test_an_extended_reference_is_of_a_square_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(2, 50, 8, dtype=torch.float64), torch.ones(2, 8, 30, dtype=torch.float64)
    for macs, side in ((2 * 8 * 20**2, 20), (2 * 8 * 21**2 - 1, 20), (1, 8)):
        monkeypatch.setattr(module, "EXTENDED_MACS", macs)
        got = extended_reference(operands(a, b, alpha=3), 2, 50, 30, 8)
        assert got.value.shape == got.magnitude.shape == (2, side, side)
        assert (got.value == 24).all()
        assert (got.magnitude == 24).all()
    nothing = extended_reference(operands(a[..., :0], b[:, :0]), 2, 50, 30, 0)
    assert not nothing.value.any()


def test_float64_alone_has_an_extended_reference() -> None:
    for dtype, integers in ((torch.float64, False), (torch.float64, True), (torch.float32, False)):
        problem = Problem.mm(3, 4, 5, dtype=dtype, device_type="cpu")
        found = referenced(problem, random_operands(problem, CPU, seed=0), name="random", integers=integers)
        assert [known.extended for known in found.references] == [
            False,
            *([True] if dtype is torch.float64 and not integers else []),
        ]
