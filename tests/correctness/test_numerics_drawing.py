"""What operands are drawn from: ranges, signs, grids, and that everything in a range comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from broken_kernels import CPU

from gemmtune.numerics.drawing import Drawing
from gemmtune.numerics.probes import Probes
from gemmtune.numerics.quantized import MOST_INTEGER, cancelling_range, most_factor, numbers
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.problem.operations import Encoding

F32, F16, BF16, INT8, UINT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def drawing(problem: Problem) -> Drawing:
    return Drawing(problem, CPU, seed=3)


def mixed(dtype_b: torch.dtype = INT8, encoding: Encoding = "") -> Problem:
    return Problem.mixed_mm(64, 128, 128, dtype=F16, dtype_b=dtype_b, encoding=encoding, device_type="cpu")


def values_of(tensor: torch.Tensor) -> set[float]:
    return set(tensor.double().flatten().tolist())


WEIGHTS: list[tuple[torch.dtype, Encoding]] = [(INT8, ""), (UINT8, ""), (UINT8, "int4"), (UINT8, "uint4"), (E4M3, "")]


@pytest.mark.parametrize(("dtype_b", "encoding"), WEIGHTS)
def test_small_weights_are_minus_one_zero_and_one(dtype_b: torch.dtype, encoding: Encoding) -> None:
    signed = encoding == "int4" or (dtype_b != UINT8)
    given = Probes(mixed(dtype_b, encoding), CPU).integers()
    assert values_of(given.a) == {-1, 0, 1}
    assert values_of(numbers(given.b, encoding)) == ({-1, 0, 1} if signed else {0, 1})
    zeros = Problem.mixed_mm(
        64, 128, 128, dtype=F16, dtype_b=dtype_b, encoding=encoding, scales="group_32", zeros=True, device_type="cpu"
    )
    zero = Probes(zeros, CPU).integers().zero_b
    assert zero is not None
    assert values_of(zero) == ({-1, 0, 1} if signed else {0, 1})


@pytest.mark.parametrize(("dtype_b", "least"), [(INT8, -3), (UINT8, 0)])
def test_zero_points_have_both_signs_where_weights_have(dtype_b: torch.dtype, least: int) -> None:
    problem = Problem.mixed_mm(64, 128, 128, dtype=F16, dtype_b=dtype_b, scales="column", zeros=True, device_type="cpu")
    zero = drawing(problem).scaling(most_zero=3).zero_b
    assert zero is not None
    assert (zero.min(), zero.max()) == (least, 3)


def test_weights_of_the_cancelling_probe_are_small_enough_for_a_16_bit_result() -> None:
    problem = Problem.mixed_mm(64, 128, 128, dtype=BF16, scales="column", device_type="cpu")
    most_a, most_b, density = cancelling_range(2**23, 4, problem)
    assert most_a == most_b == MOST_INTEGER
    assert density == 1


@pytest.mark.parametrize(("dtype_b", "encoding"), WEIGHTS)
def test_powers_cover_every_power_of_two_of_a_weight(dtype_b: torch.dtype, encoding: Encoding) -> None:
    draw = drawing(mixed(dtype_b, encoding))
    found = values_of(draw.powers((4000,)))
    expected = {
        (INT8, ""): {s * 2.0**e for s in (-1, 1) for e in range(7)} | {-128.0},
        (UINT8, ""): {2.0**e for e in range(8)},
        (UINT8, "int4"): {s * 2.0**e for s in (-1, 1) for e in range(3)} | {-8.0},
        (UINT8, "uint4"): {2.0**e for e in range(4)},
    }
    if (dtype_b, encoding) in expected:
        assert found == expected[dtype_b, encoding]
    else:
        assert max(map(abs, found)) <= 16


@pytest.mark.parametrize(("dtype", "low", "high"), [(E4M3, 0, 0x7E), (E5M2, 0x08, 0x6F)])
def test_weights_of_8_bit_floats_are_of_all_magnitudes(dtype: torch.dtype, low: int, high: int) -> None:
    bits = drawing(mixed(dtype)).every_weight().contiguous().view(UINT8).flatten().tolist()
    assert {x & 0x7F for x in bits} == set(range(low, high + 1))
    assert {x >> 7 for x in bits} == {0, 1}


@pytest.mark.parametrize("mode", ["ieee", "tf32"])
def test_numbers_are_on_tf32_grid_only_for_tf32_problems(mode: str) -> None:
    problem = Problem.mm(33, 40, 65, dtype=F32, device_type="cuda", precision=Precision(input_mode=mode))  # type: ignore[arg-type]
    random = Probes(problem, CPU).random()
    for tensor in (random.a, random.b):
        off_grid = (tensor.contiguous().view(torch.int32) & (2**13 - 1)) != 0
        assert bool(off_grid.any()) == (mode == "ieee")


@pytest.mark.parametrize("fill", ["normal", "uniform", "wide", "integers", "ones", "cancelling"])
@pytest.mark.parametrize(("encoding", "least", "most"), [("int4", -8, 7), ("uint4", 0, 15)])
def test_four_bits_are_in_range_and_reach_its_ends(fill: str, encoding: Encoding, least: int, most: int) -> None:
    problem = mixed(UINT8, encoding)
    b = drawing(problem).values(fill, problem.b, -2)
    found = values_of(numbers(b.reshape(problem.b.size), encoding))
    assert least <= min(found)
    assert max(found) <= most
    if fill == "normal":
        assert found == set(range(least, most + 1))
    if fill == "ones":
        assert found == {1}


def test_indices_begin_with_the_first_place_and_end_with_the_last() -> None:
    index = drawing(mixed()).indices((3, 50), 5, 9)
    assert index[:, 0].tolist() == [5] * 3
    assert index[:, -1].tolist() == [8] * 3
    assert values_of(index) == {5, 6, 7, 8}


def test_signs_are_both_and_1_where_a_weight_has_none() -> None:
    assert values_of(drawing(mixed()).signs((100,))) == {-1, 1}
    assert values_of(drawing(mixed()).signs_b((100,))) == {-1, 1}
    assert values_of(drawing(mixed(UINT8)).signs_b((100,))) == {1}


def test_integer_products_have_extremes_in_outer_lines() -> None:
    problem = Problem.int_mm(64, 64, 64, device_type="cpu")
    draw = drawing(problem)
    a, b = draw.normal(problem.a), draw.normal(problem.b, -2)
    assert values_of(a[0]) == {-128}
    assert values_of(b[:, 0]) == {127}
    assert values_of(b[:, -1]) == {-128}
    inner = a[1:]
    for extreme in (-128, 127):
        assert 0.08 < float((inner == extreme).float().mean()) < 0.18
    assert len(values_of(inner)) > 200


def test_an_added_operand_has_integers_up_to_the_given_one() -> None:
    problem = Problem.addmm(64, 64, 32, dtype=BF16, bias="mn", device_type="cpu")
    inp = drawing(problem).small_inp(3)
    assert inp is not None
    assert values_of(inp) == set(range(-3, 4))
    assert drawing(mixed()).small_inp(3) is None


def test_an_epilogue_reads_normal_numbers_or_masks() -> None:
    draw = drawing(mixed())
    mask = draw.read_by_epilogue(Layout.contiguous((64, 64), torch.bool))
    assert 0.4 < float(mask.float().mean()) < 0.6
    normal = draw.read_by_epilogue(Layout.contiguous((64, 64), F32))
    assert abs(float(normal.mean())) < 0.1
    assert 0.9 < float(normal.std()) < 1.1


def test_a_probe_leaves_the_operands_from_which_it_takes_numbers() -> None:
    probes = Probes(Problem.bmm(3, 4, 5, 6, dtype=F32, device_type="cpu"), CPU)
    random = probes.random()
    before = random.a.clone(), random.b.clone()
    probes.both(random)
    assert torch.equal(random.a, before[0])
    assert torch.equal(random.b, before[1])


def test_random_weights_with_zero_points_are_integers_that_leave_room_for_them() -> None:
    problem = Problem.mixed_mm(16, 64, 64, dtype=F16, dtype_b=E4M3, scales="column", zeros=True, device_type="cpu")
    b = Drawing(problem, CPU, seed=1).random_b().float()
    assert values_of(b) == set(range(-13, 14))


def of(dtype: torch.dtype) -> Problem:
    return Problem.mm(8, 8, 8, dtype=dtype, device_type="cpu")


ZEROS_OF_8 = Problem.mixed_mm(8, 8, 32, dtype=F16, scales="column", zeros=True, device_type="cpu")
ZEROS_OF_4 = Problem.mixed_mm(8, 8, 32, dtype=F16, scales="column", zeros=True, encoding="uint4", device_type="cpu")


@pytest.mark.parametrize(
    ("problem", "limit", "half", "expected"),
    [
        (of(F32), 2**10, 4, (16, 16, 1)),
        (of(F32), 2**10, 1, (31, 31, 1)),
        (of(F32), 2**10, 0, (31, 31, 1)),
        (of(F32), 2**10, 100, (3, 3, 1)),
        (of(F32), 2**10, 1024, (1, 1, 1)),
        (of(F32), 2**10, 2000, (1, 1, 0.128)),
        (of(torch.float64), 2**52, 2**20, (2**15, 2**15, 1)),  # 2^50 of them
        (of(torch.float64), 2**52, 4, (2**20, 2**20, 1)),
        (Problem.int_mm(8, 8, 8, device_type="cpu"), 2**30, 100, (126, 126, 1)),
        (Problem.scaled_mm(8, 8, 8, device_type="cpu"), 2**13, 4, (15, 15, 1)),
        (Problem.scaled_mm(8, 8, 8, dtype=E5M2, device_type="cpu"), 2**13, 4, (7, 7, 1)),
        (ZEROS_OF_8, 2**10, 4, (13, 13, 1)),  # 13 · (13 + 6) · 4 = 988
        (ZEROS_OF_8, 10, 100, (1, 1, 1 / 280)),
        (ZEROS_OF_4, 2**13, 4, (31, 12, 1)),
        (ZEROS_OF_4, 2**13, 20, (22, 12, 1)),  # 22 · (12 + 6) · 20 = 7920
        (ZEROS_OF_4, 2**13, 40, (11, 11, 1)),
    ],
)
def test_integers_of_sums_that_cancel(problem: Problem, limit: int, half: int, expected: tuple[int, int, float]) -> None:
    assert cancelling_range(limit, half, problem) == pytest.approx(expected)


def test_integers_whose_products_int32_can_add_up() -> None:
    assert [most_factor(k, INT8) for k in (0, 1, 2**17 - 1, 2**17, 2**19)] == [127, 127, 127, 126, 62]
    for k in (2**17 - 1, 2**17, 2**19):
        most = most_factor(k, INT8)
        assert (most + 1) ** 2 * k < 2**31 + 2**14
        problem = Problem.int_mm(4, 4, k, device_type="cpu")
        assert [int(x) for x in drawing(problem).values("normal", problem.a, -1).aminmax()] == [-most - 1, most]


@pytest.mark.parametrize(
    ("dtype", "dtype_b", "encoding", "most", "step"),
    [
        (F16, INT8, "", 127, 0.25), (F16, UINT8, "", 255, 0.25), (BF16, INT8, "", 127, 1), (BF16, UINT8, "uint4", 15, 0.25),
        (BF16, UINT8, "int4", 7, 0.25), (F16, E4M3, "", 3, 1),
    ],
)  # fmt: skip
def test_zero_points_of_picked_numbers_have_a_fraction_where_differences_are_exact(
    dtype: torch.dtype, dtype_b: torch.dtype, encoding: Encoding, most: int, step: float
) -> None:
    words: dict[str, Any] = {"dtype": dtype, "dtype_b": dtype_b, "encoding": encoding, "scales": "group_32", "zeros": True}
    zero = drawing(Problem.mixed_mm(8, 2000, 512, device_type="cpu", **words)).gathered_scaling().zero_b
    assert zero is not None
    found = zero.double()
    assert bool((found % 1 != 0).any()) == (step < 1)
    assert not (found % step).any()
    assert found.max() == most
    assert found.min() == (0 if dtype_b == UINT8 and encoding != "int4" else -most)
