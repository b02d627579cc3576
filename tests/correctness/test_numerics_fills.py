"""The named fills: each has the numbers that its name promises, in any layout, from the generator alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from broken_kernels import CPU

from gemmtune.errors import GemmtuneError
from gemmtune.numerics.buffers import held_size, storage_bits
from gemmtune.numerics.fills import _Source, fills_of
from gemmtune.numerics.fills import filled as drawn
from gemmtune.numerics.operands import Operands
from gemmtune.numerics.probes import Probes
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.problem.dtypes import dtype_info

F64, F32, F16, BF16, INT8 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (F64, F32, F16, BF16, E4M3, E5M2, INT8)
PAIRS = [(fill, dtype) for dtype in DTYPES for fill in fills_of(dtype)]
LAYOUTS = {
    "row": ((6, 8), (8, 1)), "padded": ((6, 8), (11, 1)), "column": ((6, 8), (1, 6)), "expanded": ((6, 8), (0, 1)),
    "one column": ((6, 8), (1, 0)), "sliding": ((6, 8), (3, 1)), "batch": ((2, 6, 8), (48, 8, 1)), "one": ((1, 1), (1, 1)),
    "empty": ((0, 8), (8, 1)),
}  # fmt: skip


def problem_of(dtype: torch.dtype, m: int = 40, n: int = 50, k: int = 64) -> Problem:
    if dtype == INT8:
        return Problem.int_mm(m, n, k, device_type="cpu")
    if dtype in (E4M3, E5M2):
        return Problem.scaled_mm(m, n, k, dtype=dtype, out_dtype=F16, scales="row", device_type="cpu")
    return Problem.mm(m, n, k, dtype=dtype, device_type="cpu")


def filled(fill: str, dtype: torch.dtype, other: str | None = None, **sizes: int) -> Operands:
    return Probes(problem_of(dtype, **sizes), CPU).filled(fill, other or fill)


@pytest.mark.parametrize(("fill", "dtype"), PAIRS, ids=str)
def test_every_layout_can_be_filled(fill: str, dtype: torch.dtype) -> None:
    for name, (size, stride) in LAYOUTS.items():
        layout = Layout(size=size, stride=stride, dtype=dtype)
        for k_dim in (-1, -2):
            values, again = (drawn(fill, layout, torch.Generator().manual_seed(3), CPU, k_dim) for _ in range(2))
            assert tuple(values.shape) == held_size(layout), name
            assert torch.equal(values, again), name
            assert values.to(dtype).double().isfinite().all(), name
            if dtype == INT8:
                assert torch.equal(values.to(INT8).double(), values.double()), f"{name}: a number does not fit"


@pytest.mark.parametrize("k_dim", [-1, -2])
def test_the_second_half_of_cancelling_integers_is_the_first_but_for_a_unit(k_dim: int) -> None:
    layout = Layout.contiguous((200, 201), INT8)
    if k_dim == -2:
        layout = Layout.contiguous((201, 200), INT8)
    values = drawn("cancelling", layout, torch.Generator().manual_seed(3), CPU, k_dim)
    assert (values.min(), values.max()) == (-128, 127)
    first, second, rest = (x.double() for x in values.split([100, 100, 1], k_dim))
    off = first + second if k_dim == -1 else first - second
    assert set(off.unique().tolist()) == {-1, 0, 1}
    assert second.abs().max() == 127
    assert not rest.any()


def test_two_terms_cancel_and_a_single_one_is_any_number() -> None:
    for k, zero in ((2, True), (1, False)):
        a, b = (drawn("cancelling", Layout.contiguous(size, F32), torch.Generator().manual_seed(3), CPU, k_dim).double()
                for size, k_dim in (((40, k), -1), ((k, 30), -2)))  # fmt: skip
        assert bool(((a @ b).abs() < 0.01 * (a.abs() @ b.abs())).all()) == zero


@pytest.mark.parametrize(("fill", "dtype"), PAIRS, ids=str)
def test_results_stay_finite(fill: str, dtype: torch.dtype) -> None:
    operands = filled(fill, dtype, k=4096)
    result = operands.a.double() @ operands.b.double() * 4  # the largest product of two scales
    assert result.abs().max() < dtype_info(problem_of(dtype).out.dtype).largest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_fill_has_its_documented_range(dtype: torch.dtype) -> None:
    least = dtype_info(dtype).smallest_normal
    a = {fill: filled(fill, dtype).a.double() for fill in fills_of(dtype)}
    assert (a["ones"] == 1).all()
    assert a["uniform"].min() >= least
    assert sorted(a["integers"].unique().tolist()) == list(range(-8, 9))
    magnitudes = a["wide"].abs()
    assert magnitudes.max() / magnitudes[magnitudes > 0].min() >= (64 if dtype == INT8 else 2**8)
    if dtype == INT8:
        assert set(a["wide"].abs().unique().tolist()) <= set(range(1, 128))
        assert a["wide"].min() < -90
        assert a["wide"].max() > 90
        assert (a["normal"].min(), a["normal"].max(), a["uniform"].max()) == (-128, 127, 127)
        return
    assert a["uniform"].max() <= 1
    assert abs(a["uniform"].mean() - 0.5) < 0.05
    assert abs(a["normal"].std() - 1) < 0.05
    assert min(a["normal"].abs().min(), magnitudes.min()) >= least
    assert (a["subnormal"].abs() < least).double().mean() > 0.5
    assert (a["subnormal"] != 0).double().mean() > 0.8


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(F64, -40, 20), (F32, -20, 10), (BF16, -20, 10), (F16, -12, 0), (E4M3, -5, 3), (E5M2, -12, 3)],
    ids=str,
)
def test_wide_numbers_have_all_binades_and_keep_away_from_0(
    dtype: torch.dtype, low: int, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Source, "_standard", lambda self: torch.ones(held_size(self._layout), dtype=self._wide))
    values = drawn("wide", Layout.contiguous((40, 50), dtype), torch.Generator().manual_seed(1), CPU, -1)
    least = max(2.0**-12, dtype_info(dtype).smallest_normal)
    away = {2.0**e if 2.0**e >= least else 2.0**e + least for e in range(low, high + 1)}
    assert set(values.flatten().tolist()) == away
    monkeypatch.setattr(_Source, "_standard", lambda self: torch.zeros(held_size(self._layout), dtype=self._wide))
    assert set(drawn("normal", Layout.contiguous((4, 5), dtype), torch.Generator(), CPU, -1).flatten().tolist()) == {least}


@pytest.mark.parametrize("k", [64, 65])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cancelling_sums_nearly_vanish(dtype: torch.dtype, k: int) -> None:
    for other in ("cancelling", "ones"):
        operands = filled("cancelling", dtype, other, k=k)
        a, b = operands.a.double(), operands.b.double()
        left, all_of_it = (a @ b).abs(), a.abs() @ b.abs()
        most = 0.02 if dtype == INT8 else 2 * dtype_info(dtype).unit_roundoff
        assert 0 < left.max() <= most * all_of_it.max()


def test_cancelling_has_one_sign_where_k_cannot_be_chosen() -> None:
    layout = Layout(size=(6, 8), stride=(1, 0), dtype=F32)
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    normal, cancelling = (drawn(name, layout, g, CPU, -1) for name, g in zip(("normal", "cancelling"), generators, strict=True))
    assert torch.equal(normal, cancelling)


@pytest.mark.parametrize("fill", fills_of(INT8))
@pytest.mark.parametrize("k", [2**17 - 1, 2**17, 2**19])
def test_sums_of_int8_products_fit_int32(fill: str, k: int) -> None:
    operands = filled(fill, INT8, m=2, n=2, k=k)
    a, b = operands.a.double(), operands.b.double()
    assert a.abs().max() ** 2 * k < 2**31 + (2**14 if k < 2**17 else 0)
    assert (a.abs() @ b.abs()).max() < 2**31
    assert a.any()


def test_random_numbers_of_a_tf32_problem_use_all_bits_if_filled() -> None:
    problem = dataclasses.replace(problem_of(F32), precision=Precision(input_mode="tf32"))
    assert (Probes(problem, CPU).filled("normal", "ones").a.contiguous().view(torch.int32) & (2**13 - 1)).any()


def test_filled_operands_lie_between_nans_with_general_scalars() -> None:
    problem = Problem.addmm(5, 6, 8, dtype=F16, alpha=2, beta=3, device_type="cpu")
    for general, scalars in ((True, (1.25, -0.75)), (False, (2.0, -3.0))):
        operands = Probes(problem, CPU).filled("ones", "integers", general=general)
        assert (operands.alpha, operands.beta) == scalars
        assert operands.inp is not None
        assert (operands.inp == operands.inp.round()).all().item() != general
        assert int((~storage_bits(operands.a, F16).isnan()).sum()) == 40


def test_an_unknown_fill_is_refused() -> None:
    with pytest.raises(GemmtuneError) as caught:
        filled("gaussian", F16)
    names = "normal, uniform, integers, wide, ones, subnormal, cancelling"
    assert str(caught.value) == f"fill: got 'gaussian', expected for float16 one of {names}"
    with pytest.raises(GemmtuneError, match="fill: got 'subnormal', expected for int8 one of normal, uniform, integers, wide"):
        filled("subnormal", INT8)
