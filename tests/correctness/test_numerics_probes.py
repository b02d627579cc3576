"""The probes: what they say is exactly known is, for every kind of problem, and their operands are what they claim to be."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from broken_kernels import CPU
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problem_strategies import mixed_problems, narrow_problems, problems
from quantized_kernels import terms, unpacked

from gemmtune.numerics.buffers import storage_bits
from gemmtune.numerics.one_hot import OneHotProbe
from gemmtune.numerics.operands import ALPHA, BETA, Operands
from gemmtune.numerics.probes import Probes
from gemmtune.numerics.width import width_rows
from gemmtune.problem import Layout, Precision, Problem

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


def picks(problem: Problem, limit: int = 2**23) -> list[OneHotProbe]:
    probes = Probes(problem, CPU)
    random = probes.random()
    made = []
    if probes.free_a:
        made.append(probes.rows_of_b(probes.every_weight(random.b)))
    if probes.free_b:
        made.append(probes.cols_of_a(random.a))
    if probes.can_pick_both:
        made.append(probes.both(random))
    if probes.free_a and probes.free_b:
        made.append(probes.cancel(limit))
    if probes.can_measure_width:
        made.append(probes.width(limit))
    return [*made, *probes.special_in_few_lines(random)]


def known(problem: Problem, pick: OneHotProbe) -> torch.Tensor:
    result = pick.exact(slice(None), slice(0, problem.m), torch.float64)
    return result if problem.batched else result[0]


def product(problem: Problem, operands: Operands) -> torch.Tensor:
    """alpha · a @ b + beta · inp in float64, by plain multiplications and sums: NaN and infinities go where IEEE sends them."""
    a, b = operands.a.double().contiguous(), unpacked(operands.b, problem.encoding).double().contiguous()
    if problem.scales:
        scale_a, scale_b, zero_b = terms(problem, operands.scales)
        a, b = a * scale_a, (b - zero_b) * scale_b
    result = (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(dim=-2) * operands.alpha
    if operands.inp is not None and problem.beta != "zero":
        result = result + operands.inp.double() * operands.beta
    return result


@settings(max_examples=200)
@given(problem=st.one_of(problems(), narrow_problems(), mixed_problems()), limit=st.sampled_from([2**23, 2**13, 2**10, 2**7, 4]))
@example(problem=Problem.mixed_mm(1, 1, 1, dtype=F32, scales="tensor", zeros=True, device_type="cpu"), limit=4)
def test_exact_is_exact(problem: Problem, limit: int) -> None:
    for pick in picks(problem, limit):
        expected, got = known(problem, pick), product(problem, pick.operands)
        assert expected.shape == problem.out.size
        assert torch.equal(expected.nan_to_num(nan=12345.0), got.nan_to_num(nan=12345.0)), pick.name
        assert Layout.of(pick.operands.a) == problem.a
        assert Layout.of(pick.operands.b) == problem.b


@given(problem=st.one_of(problems(), narrow_problems(), mixed_problems()))
def test_results_fit_the_output_type(problem: Problem) -> None:
    for pick in picks(problem):
        expected = known(problem, pick)
        stored = expected.to(problem.out.dtype).double()
        assert torch.equal(expected.nan_to_num(nan=12345.0), stored.nan_to_num(nan=12345.0)), pick.name


@pytest.mark.parametrize(("dtype", "k"), [(F16, 64), (F16, 4096), (BF16, 4096), (F32, 2**16), (F64, 4096), (F16, 2**18)])
def test_cancelling_sums_are_large_but_below_the_limit(dtype: torch.dtype, k: int) -> None:
    limit = 2**52 if dtype == F64 else 2**23
    operands = Probes(Problem.mm(4, 4, k, dtype=dtype, device_type="cpu"), CPU).cancel(limit).operands
    a, b = operands.a.double(), operands.b.double()
    half = (a[:, : k // 2] @ b[: k // 2]).abs()
    assert half.max() <= limit
    assert half.min() > (2**25 if dtype == F64 else 2048)
    assert (a.abs() @ b.abs()).max() <= 2.1 * limit


@pytest.mark.parametrize("k", [1, 3, 33, 65539])
@pytest.mark.parametrize("m", [1, 5])
def test_the_last_of_an_odd_number_of_terms_counts_in_every_row(m: int, k: int) -> None:
    probe = Probes(Problem.mm(m, 7, k, dtype=F32, device_type="cpu"), CPU).cancel(2**24)
    a, b = probe.operands.a.double(), probe.operands.b.double()
    assert bool((a[:, -1:] * b[-1] != 0).all())
    assert probe.row_index is not None
    assert torch.equal(a @ b, probe.row_factor[0, :, None].double() * b[probe.row_index[0]])


def test_cancelling_sums_stay_below_a_narrow_limit() -> None:
    problem = Problem.mm(64, 64, 8192, dtype=BF16, device_type="cpu")
    operands = Probes(problem, CPU).cancel(128).operands
    a, b = operands.a.double(), operands.b.double()
    assert (a.abs() @ b.abs()).max() <= 128
    assert (a != 0).sum(dim=1).min() > 16


def test_one_hot_picks_the_first_and_the_last_of_k() -> None:
    probes = Probes(Problem.mm(9, 11, 500, dtype=F32, device_type="cpu"), CPU)
    random = probes.random()
    rows, cols = probes.rows_of_b(random.b).row_index, probes.cols_of_a(random.a).col_index
    for index in (rows, cols):
        assert index is not None
        assert (int(index[0, 0]), int(index[0, -1])) == (0, 499)


@pytest.mark.parametrize("shape", [(3, 1, 11, 40), (3, 5, 1, 40), (3, 5, 7, 1), (1, 4, 6, 40)])
def test_a_part_of_what_one_hot_rows_pick_is_that_part_of_all(shape: tuple[int, int, int, int]) -> None:
    """Large results are compared by parts, each of some batches and rows."""
    batch, m, *_ = shape
    for pick in picks(Problem.bmm(*shape, dtype=F32, device_type="cpu")):
        whole = pick.exact(slice(0, batch), slice(0, m), torch.float64)
        for part in itertools.product((slice(0, 1), slice(batch - 1, batch)), (slice(0, m), slice(m - 1, m))):
            assert torch.equal(pick.exact(*part, torch.float64).nan_to_num(7), whole[part].nan_to_num(7)), part


def test_padding_and_guards_of_inputs_are_nan() -> None:
    layout = Layout(size=(5, 8), stride=(12, 1), dtype=F32, offset=1)
    problem = Problem(op="mm", a=layout, b=Layout.contiguous((8, 3), F32), out=Layout.contiguous((5, 3), F32), device_type="cpu")
    for operands in (Probes(problem, CPU).random(), *(pick.operands for pick in picks(problem))):
        everything = storage_bits(operands.a, F32)
        expected = 40 if not operands.a.isnan().any() else int(operands.a.isfinite().sum()) + int(operands.a.isinf().sum())
        assert int((~everything.isnan()).sum()) == expected


def test_inp_is_nan_where_it_must_not_be_read() -> None:
    problem = Problem.addmm(5, 6, 7, dtype=F32, beta=0, device_type="cpu")
    for operands in (Probes(problem, CPU).random(), *(pick.operands for pick in picks(problem))):
        assert operands.inp is not None
        assert operands.inp.isnan().all()


def test_random_numbers_are_normal_and_general_scalars_are_general() -> None:
    problem = Problem.addmm(200, 200, 200, dtype=F16, alpha=3, beta=3, device_type="cpu")
    operands = Probes(problem, CPU).random()
    assert (operands.alpha, operands.beta) == (ALPHA, BETA)
    assert operands.a.abs().min() >= 2.0**-12
    assert abs(operands.a.float().std().item() - 1) < 0.05
    assert abs(operands.a.float().mean().item()) < 0.05


def test_random_numbers_of_a_tf32_problem_are_tf32() -> None:
    problem = Problem.mm(20, 20, 20, dtype=F32, device_type="cpu", precision=Precision(input_mode="tf32"))
    a = Probes(problem, CPU).random().a.contiguous()
    assert not (a.view(torch.int32) & (2**13 - 1)).any()
    assert (a.view(torch.int32) & 2**13).any()


def test_special_rows_hold_nan_and_infinity_only_where_they_tell_something() -> None:
    problem = Problem.addmm(9, 9, 9, dtype=F32, alpha=2, device_type="cpu")
    probes = Probes(problem, CPU)
    factor = probes.rows_of_b(probes.random().b).row_factor
    assert factor is not None
    assert [math.isnan(x) for x in factor[0].tolist()] == [True] + [False] * 8
    assert factor.isinf().sum() == 1
    nothing = Probes(dataclasses.replace(problem, alpha="zero"), CPU)
    plain = nothing.rows_of_b(nothing.random().b).row_factor
    assert plain is not None
    assert plain.isfinite().all()


def test_int8_probes_have_both_signs_and_large_numbers() -> None:
    probes = Probes(Problem.int_mm(200, 200, 200, device_type="cpu"), CPU)
    random = probes.random()
    assert (random.a.min(), random.a.max()) == (-128, 127)
    factor = probes.rows_of_b(random.b).row_factor
    assert factor is not None
    assert (factor < -100).any()
    assert (factor > 100).any()
    assert (factor != 0).all()


@pytest.mark.parametrize(("dtype", "infinities"), [(torch.float8_e4m3fn, 0), (torch.float8_e5m2, 1)], ids=str)
def test_only_dtypes_with_infinity_get_one(dtype: torch.dtype, infinities: int) -> None:
    probes = Probes(Problem.scaled_mm(9, 9, 9, dtype=dtype, device_type="cpu"), CPU)
    pick = probes.rows_of_b(probes.random().b)
    assert pick.row_factor is not None
    assert pick.row_factor.isnan().sum() == 1
    assert pick.row_factor.isinf().sum() == infinities
    assert pick.operands.a.float().isnan().any(dim=1).tolist() == [True] + [False] * 8


def test_scales_are_powers_of_two_in_exact_probes_and_any_numbers_else() -> None:
    probes = Probes(Problem.scaled_mm(40, 50, 16, scales="row", device_type="cpu"), CPU)
    random = probes.random()
    for operands, exact in (
        (random, False),
        (probes.cancel(2**13).operands, True),
        (probes.filled("ones", "ones", general=False), True),
    ):
        for scale, shape in ((operands.scale_a, (40, 1)), (operands.scale_b, (1, 50))):
            assert scale is not None
            assert scale.shape == shape
            assert ((torch.frexp(scale).mantissa == 0.5).all() == exact).item()
            assert scale.min() >= 0.5
            assert scale.max() <= 4
            assert len(scale.unique()) >= 3
            assert storage_bits(scale, F32).isnan().any()


@pytest.mark.parametrize(
    ("problem", "limit", "reached"),
    [
        (Problem.mm(70, 4, 1000, dtype=BF16, device_type="cpu"), 2**23, 2**22),
        (Problem.mm(70, 4, 1000, dtype=F16, device_type="cpu"), 2**23, 2**22),
        (Problem.mm(70, 4, 1000, dtype=F32, device_type="cpu"), 2**23, 2**22),
        (Problem.mm(70, 4, 1000, dtype=F64, device_type="cpu"), 2**52, 2**51),
        (Problem.scaled_mm(70, 4, 1000, device_type="cpu"), 2**13, 2**12),
        (Problem.scaled_mm(70, 4, 1000, device_type="cpu"), 2**23, 2**22),
        (Problem.scaled_mm(70, 4, 1000, dtype=torch.float8_e5m2, device_type="cpu"), 2**23, 2**22),
        (Problem.int_mm(70, 4, 8000, device_type="cpu"), 2**30, 2**24),
    ],
    ids=lambda x: str(x),
)
def test_width_reaches_the_limit_and_no_sum_exceeds_it(problem: Problem, limit: int, reached: int) -> None:
    pick = Probes(problem, CPU).width(limit)
    a, b = pick.operands.a.double(), pick.operands.b.double()
    unit = a[a != 0].abs().min() * b.abs().min()
    of_one_sign = (a.abs() @ b.abs() + (a @ b).abs()) / 2
    assert of_one_sign.max() <= limit * unit
    assert of_one_sign[0].min() > reached * unit
    assert (known(problem, pick) != 0).all()


def test_width_needs_three_elements_of_k() -> None:
    assert [Probes(Problem.mm(4, 4, k, device_type="cpu"), CPU).can_measure_width for k in (0, 1, 2, 3)] == [False] * 3 + [True]
    expanded = Layout(size=(4, 8), stride=(1, 0), dtype=F32)
    problem = Problem(op="mm", a=expanded, b=Layout.contiguous((8, 4), F32), out=Layout.contiguous((4, 4), F32), device_type="cpu")
    assert not Probes(problem, CPU).can_measure_width


def test_windows_of_width_begin_at_many_places() -> None:
    rows = width_rows(70, 1000, 2**23, Problem.mm(70, 4, 1000, dtype=F32, device_type="cpu"))
    assert len(rows.index.unique()) > 32


def test_both_operands_are_picked_from_where_there_are_two_rows_and_two_terms() -> None:
    sizes = ((1, 2), (2, 1), (2, 2))
    assert [Probes(Problem.mm(m, 3, k, device_type="cpu"), CPU).can_pick_both for m, k in sizes] == [False, False, True]


def test_an_element_is_traced_to_the_operand_and_the_place_that_it_was_picked_from() -> None:
    probes = Probes(Problem.mm_plus_mm(8, 9, 5, 7, dtype=F32, device_type="cpu"), CPU)
    random = probes.random()
    rows, cols = probes.rows_of_b(random.right, special=False), probes.cols_of_a(random.left, special=False)
    assert rows.row_index is not None
    assert cols.col_index is not None
    for i, place in enumerate(rows.row_index[0].tolist()):
        name = f"b[{place}, 3]" if place < 5 else f"d[{place - 5}, 3]"
        assert rows.origin((i, 3), batched=False) == f" (from {name})"
    for j, place in enumerate(cols.col_index[0].tolist()):
        name = f"a[2, {place}]" if place < 5 else f"c[2, {place - 5}]"
        assert cols.origin((2, j), batched=False) == f" (from {name})"


def test_the_second_product_begins_where_the_first_ends() -> None:
    probes = Probes(Problem.mm_plus_mm(4, 4, 5, 7, dtype=F32, device_type="cpu"), CPU)
    random, places = probes.random(), torch.tensor([[0, 4, 5, 11]])
    rows = dataclasses.replace(probes.rows_of_b(random.right), row_index=places)
    cols = dataclasses.replace(probes.cols_of_a(random.left), col_index=places)
    assert [rows.origin((i, 3), batched=False) for i in range(4)] == [f" (from {x}, 3])" for x in ("b[0", "b[4", "d[0", "d[6")]
    assert [cols.origin((2, j), batched=False) for j in range(4)] == [
        f" (from {x}])" for x in ("a[2, 0", "a[2, 4", "c[2, 0", "c[2, 6")
    ]


def test_one_element_along_k_can_be_chosen_and_none_cannot() -> None:
    for k in (0, 1):
        probes = Probes(Problem.mm(4, 5, k, dtype=F32, device_type="cpu"), CPU)
        assert (probes.free_a, probes.free_b) == (k == 1, k == 1)


def test_an_element_of_a_batch_is_traced_to_its_matrix() -> None:
    probes = Probes(Problem.bmm(3, 4, 5, 6, dtype=F32, device_type="cpu"), CPU)
    pick = probes.rows_of_b(probes.random().b, special=False)
    assert pick.row_index is not None
    place = int(pick.row_index[2, 1])
    assert pick.origin((2, 1, 4), batched=True) == f" (from b[2, {place}, 4])"
    pick = probes.cols_of_a(probes.random().a, special=False)
    assert pick.col_index is not None
    for col, place in enumerate(pick.col_index[2].tolist()):
        assert pick.origin((2, 1, col), batched=True) == f" (from a[2, 1, {place}])"
    shared = dataclasses.replace(pick, col_index=pick.col_index[:1])
    assert shared.origin((2, 1, 3), batched=True) == f" (from a[2, 1, {int(pick.col_index[0, 3])}])", "one row for all matrices"


def test_elements_along_k_are_free_unless_they_share_memory() -> None:
    problem = Problem.mm(6, 8, 10, dtype=F32, device_type="cpu")

    def free(stride: tuple[int, int]) -> bool:
        return Probes(dataclasses.replace(problem, a=Layout(size=(6, 10), stride=stride, dtype=F32)), CPU).free_a

    assert free((10, 1))
    assert free((0, 1))
    assert free((2, 12))
    assert not free((1, 0))
    assert not free((1, 1))
    two = Problem.mm_plus_mm(6, 8, 10, dtype=F32, device_type="cpu")
    assert Probes(two, CPU).free_a
    assert not Probes(dataclasses.replace(two, c=Layout(size=(6, 10), stride=(0, 1), dtype=F32)), CPU).free_a
    assert not Probes(Problem.mm(6, 8, 0, dtype=F32, device_type="cpu"), CPU).free_a


@pytest.mark.parametrize(("k", "free"), [(1, True), (2, False)])
def test_an_element_that_is_read_once_can_be_chosen_whatever_its_stride(k: int, free: bool) -> None:
    a = Layout(size=(4, k), stride=(1, 0), dtype=torch.float32)
    problem = dataclasses.replace(Problem.mm(4, 3, k, dtype=torch.float32, device_type="cpu"), a=a)
    assert Probes(problem, CPU, seed=1).free_a is free


def width_of(problem: Problem, k: int, limit: int, rows: int = 1) -> tuple[list[list[float]], list[float], list[float], list[int]]:
    made = width_rows(rows, k, limit, problem)
    return made.rows.tolist(), made.col.tolist(), made.factor.tolist(), made.index.tolist()


def test_a_window_of_width_has_small_numbers_between_a_large_one_and_its_opposite() -> None:
    plain, whole = Problem.mm(4, 4, 9, dtype=F32, device_type="cpu"), Problem.int_mm(4, 4, 9, device_type="cpu")
    assert width_of(plain, 9, 8) == ([[2, 1, 0, 0, 0, 1, 0, 0, -2]], [2, 1, 2, 1, 2, 1, 2, 1, 2], [2], [1])
    assert width_of(plain, 3, 8) == ([[2, 1, -2]], [2, 1, 2], [1], [1])
    assert width_of(whole, 9, 1000) == ([[30, 1, 0, 1, 0, 1, 0, 1, -30]], [30, 1] * 4 + [30], [4], [1])
    assert width_of(whole, 9, 50_000)[0] == [[127, 1, 127, 1, 0, 1, -127, 1, -127]], "large ones as many as fit"


def test_windows_are_whole_halved_and_so_on_and_spread_evenly() -> None:
    rows, _, factor, index = width_of(Problem.mm(4, 4, 40, dtype=F32, device_type="cpu"), 40, 2**23, rows=5)
    assert index == [1, 13, 1, 19, 1]
    assert factor == [20, 10, 20, 10, 20]
    ends = [[i for i, x in enumerate(row) if x and i % 2 == 0] for row in rows]
    assert ends == [[0, 38], [12, 30], [0, 38], [18, 36], [0, 38]]
    assert [len(width_of(Problem.mm(4, 4, k, device_type="cpu"), k, 2**10, rows=99)[0]) for k in (3, 500)] == [64, 64]
    lengths = [len(set(width_of(Problem.mm(4, 4, k, device_type="cpu"), k, 2**20, rows=8)[2])) for k in (31, 32, 64, 100)]
    assert lengths == [1, 2, 3, 3], "the shortest has 16"


MIXED = {"dtype": F16, "device_type": "cpu"}


@pytest.mark.parametrize(
    ("problem", "limit", "a", "b"),
    [
        # the large and the small number of a and of b; the products of the former are 2^22 or 2^12 times those of the latter
        (Problem.mm(4, 4, 512, dtype=F16, device_type="cpu"), 2**23, (2**11, 1), (2**11, 1)),
        (Problem.mm(4, 4, 512, dtype=F64, device_type="cpu"), 2**52, (2**26, 1), (2**25, 1)),
        (Problem.scaled_mm(4, 4, 512, device_type="cpu"), 2**13, (2**6, 1), (2**6, 1)),
        (Problem.scaled_mm(4, 4, 512, device_type="cpu"), 2**23, (2**8, 2**-3), (2**8, 2**-3)),
        (Problem.scaled_mm(4, 4, 512, scales="block_1x128", device_type="cpu"), 2**23, (2**4, 2**-5), (2**8, 2**-5)),
        (Problem.mixed_mm(4, 4, 512, scales="column", **MIXED), 2**23, (2**15, 2**-1), (2**6, 1)),
        (Problem.mixed_mm(4, 4, 512, scales="group_32", **MIXED), 2**23, (2**13, 2**-3), (2**6, 1)),
        (Problem.mixed_mm(4, 4, 512, scales="column", encoding="int4", **MIXED), 2**23, (2**15, 2**-5), (2**2, 1)),
    ],
)
def test_large_numbers_are_as_large_as_the_dtypes_hold(
    problem: Problem, limit: int, a: tuple[float, float], b: tuple[float, float]
) -> None:
    made = width_rows(1, 512, limit, problem)
    assert tuple(made.rows[0, :2].tolist()) == a
    assert tuple(made.col[:2].tolist()) == b
    assert made.factor[0] == a[1] * len(made.rows[0, 1::2].nonzero())
    assert 80 < len(made.rows[0, 1::2].nonzero()) <= 100


@pytest.mark.parametrize(
    ("lines", "places", "few"),
    [
        (1, [], [(0, 6)]), (2, [], [(1, 6)]), (3, [], [(2, 6)]), (4, [(2, 6)], [(2, 6)]), (7, [(3, 6)], [(3, 6)]),
        (8, [(4, 6), (7, 0)], [(4, 6), (7, 0)]), (9, [(4, 6), (8, 0)], [(4, 6), (8, 0)]),
    ],
)  # fmt: skip
def test_numbers_that_are_not_finite_lie_at_the_end_and_the_start_of_k(
    lines: int, places: list[tuple[int, int]], few: list[tuple[int, int]]
) -> None:
    probes = Probes(Problem.mm(lines, lines, 7, dtype=F32, device_type="cpu"), CPU)
    assert probes._places(-2) == probes._places(-1) == places
    assert probes._places(-2, few_lines=True) == few
    assert probes._places(-1, few_lines=True) == [(line, 0 if lines < 4 else place) for line, place in few]
    scaled_by_0 = Problem.addmm(lines, lines, 7, dtype=F32, alpha=0, device_type="cpu")
    for none in (Problem.int_mm(lines, lines, 7, device_type="cpu"), scaled_by_0):
        assert Probes(none, CPU)._places(-2, few_lines=True) == []
    picked = probes.rows_of_b(probes.random().b)
    assert picked.row_factor is not None
    assert picked.row_factor[0].isnan().tolist() == [i == 0 and lines >= 2 for i in range(lines)]
    assert picked.row_factor[0].isinf().tolist() == [i == 2 and lines >= 4 for i in range(lines)]
    assert picked.planted_cols == tuple(places)
    assert [len(probe.planted_rows) + len(probe.planted_cols) for probe in probes.special_in_few_lines(probes.random())] == (
        [1, 1] if lines < 4 else []
    )


def test_factors_that_are_integers_are_never_0() -> None:
    probes = Probes(Problem.int_mm(400, 400, 8, device_type="cpu"), CPU)
    found = set(probes._factors((4, 4000), torch.int8).flatten().tolist())
    assert found == {*range(-127, 128)} - {0}
