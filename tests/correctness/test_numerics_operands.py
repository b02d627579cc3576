"""Buffers of exact layouts, their guard bands and checksums."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gemmtune.errors import GemmtuneError
from gemmtune.numerics import guards as guards_module
from gemmtune.numerics.aliasing import can_share, in_one_buffer, is_product_with_itself
from gemmtune.numerics.buffers import POISONS, allocate, distinct, fill_nan, flat, is_poison, overlapping, poison, storage_bits
from gemmtune.numerics.guards import Checksum, Guards, Watch, guarded_out, poison_free_memory
from gemmtune.numerics.operands import (
    ALPHA,
    BETA,
    Operands,
    drawn_routes,
    fill_random,
    random_operands,
    random_scale,
    random_zero,
    scale_factor,
)
from gemmtune.numerics.probes import Probes
from gemmtune.problem import Layout, Problem
from gemmtune.problem.dtypes import DTYPES, dtype_info

CPU = torch.device("cpu")
LAYOUTS = {
    "row-major": Layout(size=(5, 7), stride=(7, 1), dtype=torch.float32),
    "padded at an offset": Layout(size=(5, 7), stride=(11, 1), dtype=torch.float16, offset=3),
    "column-major": Layout(size=(5, 7), stride=(1, 5), dtype=torch.bfloat16, offset=1),
    "every second": Layout(size=(5, 7), stride=(30, 2), dtype=torch.float64, offset=1),
    "expanded": Layout(size=(5, 7), stride=(0, 1), dtype=torch.float32),
    "one element for all": Layout(size=(3, 5, 7), stride=(0, 0, 0), dtype=torch.float32),
    "sliding": Layout(size=(5, 7), stride=(1, 1), dtype=torch.float32, offset=2),
    "empty": Layout(size=(0, 7), stride=(7, 1), dtype=torch.float32),
    "scalar": Layout(size=(), stride=(), dtype=torch.float16),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_allocate_gives_exactly_the_layout_between_guards(layout: Layout) -> None:
    tensor = allocate(layout, CPU, guard_bytes=500)
    assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (layout.size, layout.stride, layout.dtype)
    if layout.numel:
        assert tensor.data_ptr() % 16 == layout.offset * layout.dtype.itemsize % 16
    guard = 500 // layout.dtype.itemsize
    assert tensor.storage_offset() >= guard
    assert storage_bits(tensor).numel() >= tensor.storage_offset() + layout.span + guard


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", [0, 1])
def test_poison_is_nan_and_differs_from_ordinary_nan(dtype: torch.dtype, which: int) -> None:
    tensor = allocate(Layout.contiguous((4, 4), dtype), CPU)
    fill_nan(tensor)
    ordinary = storage_bits(tensor)[0].item()
    poison(tensor, POISONS[dtype][which])
    assert storage_bits(tensor, dtype).isnan().all()
    assert len({ordinary, *POISONS[dtype]}) == 3
    assert is_poison(tensor).all()
    tensor[0, 1:] = 1
    assert is_poison(tensor).flatten().tolist() == [True, *[False] * 3, *[True] * 12]


def test_integer_poison_is_no_possible_result() -> None:
    tensor = allocate(Layout.contiguous((4, 4), torch.int32), CPU)
    fill_nan(tensor)
    ordinary = storage_bits(tensor)[0].item()
    assert ordinary == -(2**31)
    assert len({ordinary, *POISONS[torch.int32]}) == 3
    for payload in POISONS[torch.int32]:
        poison(tensor, payload)
        assert (tensor == payload).all()
        assert 2**16 * 2**14 < payload < 2**31
        assert payload % 2 == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_8_bit_buffers_have_nan_or_the_least_integer_around(dtype: torch.dtype) -> None:
    tensor = allocate(Layout(size=(3, 5), stride=(7, 1), dtype=dtype, offset=3), CPU)
    fill_nan(tensor)
    everything = storage_bits(tensor, dtype)
    assert tensor.data_ptr() % 16 == 3
    assert everything.numel() >= 512
    assert (everything == -128).all() if dtype == torch.int8 else everything.float().isnan().all()


def test_overlapping() -> None:
    assert overlapping(LAYOUTS["sliding"])
    assert not any(overlapping(layout) for name, layout in LAYOUTS.items() if name != "sliding")
    assert overlapping(Layout(size=(4, 4), stride=(3, 1), dtype=torch.float32))
    assert not overlapping(Layout(size=(4, 4), stride=(4, 1), dtype=torch.float32))


def test_distinct_has_one_element_along_repeated_dimensions() -> None:
    tensor = allocate(Layout(size=(3, 5, 7), stride=(0, 7, 1), dtype=torch.float32), CPU)
    distinct(tensor).copy_(torch.arange(35.0).view(1, 5, 7))
    assert torch.equal(tensor[0], tensor[2])
    assert tensor[1, 4, 6] == 34


def test_random_operands_have_the_problems_layouts_and_a_generator_of_their_own() -> None:
    problem = Problem.addmm(40, 50, 60, dtype=torch.float16, alpha=2, beta=3, device_type="cpu")
    state = torch.get_rng_state()
    first, again, other = (random_operands(problem, CPU, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert (Layout.of(first.a), Layout.of(first.b), Layout.of(first.out)) == (problem.a, problem.b, problem.out)
    assert first.inp is not None
    assert Layout.of(first.inp) == problem.inp
    assert torch.equal(first.a, again.a)
    assert not torch.equal(first.a, other.a)
    assert (first.alpha, first.beta) == (ALPHA, BETA)
    assert abs(first.a.float().std().item() - 1) < 0.05


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_random_8_bit_floats_are_normal_numbers_with_scales(dtype: torch.dtype) -> None:
    problem = Problem.scaled_mm(40, 50, 60, dtype=dtype, scales="row", device_type="cpu")
    operands = random_operands(problem, CPU, seed=1)
    assert abs(operands.a.float().std().item() - 1) < 0.05
    assert operands.out.dtype == torch.bfloat16
    assert operands.scale_a is not None
    assert operands.scale_b is not None
    assert (Layout.of(operands.scale_a), Layout.of(operands.scale_b)) == (problem.scale_a, problem.scale_b)
    for scale in (operands.scale_a, operands.scale_b):
        assert 0.5 <= scale.min() < scale.max() <= 2
    rows, cols = torch.tensor([3, 7]), torch.tensor([1])
    factor = scale_factor(operands, rows, cols)
    assert factor is not None
    assert torch.equal(factor, operands.scale_a.double()[rows] * operands.scale_b.double()[:, cols])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_beside_subnormal_counts_only_factors_of_subnormal_numbers(dtype: torch.dtype) -> None:
    least = dtype_info(dtype).smallest_normal
    a, b = torch.tensor([[1, -128.0]]).to(dtype), torch.tensor([[2.0], [-3]]).to(dtype)
    small = torch.tensor([[least / 2], [-3]], dtype=torch.float64).to(dtype)
    assert Operands(a=a, b=b, out=b, inp=None, extra=(), alpha=1, beta=0).beside_subnormal() == 0
    assert Operands(a=a, b=small, out=b, inp=None, extra=(), alpha=1, beta=0).beside_subnormal() == 128
    assert Operands(a=small.mT, b=small, out=b, inp=None, extra=(), alpha=1, beta=0).beside_subnormal() == 6
    assert Operands(a=a[:, :0], b=small[:0], out=b, inp=None, extra=(), alpha=1, beta=0).beside_subnormal() == 0


def test_random_int8_has_the_whole_range_and_no_scales() -> None:
    operands = random_operands(Problem.int_mm(40, 50, 60, device_type="cpu"), CPU, seed=1)
    assert (operands.a.min(), operands.a.max()) == (-128, 127)
    assert scale_factor(operands) is None


def test_random_int8_has_the_largest_sums_in_the_corners() -> None:
    x = Probes(Problem.int_mm(8, 9, 64, device_type="cpu"), CPU).random()
    for line in (x.a[0], x.b[:, 0], x.b[:, -1]):
        assert set(line.tolist()) <= {-128, 127}
    assert len(set(x.b[0].tolist())) > 2


@pytest.mark.parametrize("layout", [LAYOUTS["expanded"], LAYOUTS["sliding"]], ids=["expanded", "sliding"])
def test_random_operands_fill_every_element_of_a_layout(layout: Layout) -> None:
    problem = Problem(op="mm", a=layout, b=Layout.contiguous((7, 3), torch.float32), out=Layout.contiguous((5, 3), torch.float32))
    a = random_operands(problem, CPU, seed=0).a
    assert Layout.of(a) == layout
    assert a.isfinite().all()
    assert flat(a).unique().numel() == layout.span


@pytest.mark.parametrize("name", ["row-major", "padded at an offset", "every second", "column-major"])
def test_guards_watch_every_element_outside_of_out(name: str) -> None:
    out = allocate(LAYOUTS[name], CPU)
    guards, payload = Guards(out), POISONS[out.dtype][0]
    own = torch.zeros_like(storage_bits(out), dtype=torch.bool)
    own.as_strided(out.size(), out.stride(), out.storage_offset()).fill_(True)
    for position in range(len(own)):
        poison(out, payload)
        out.fill_(1)
        storage_bits(out)[position] = 7
        broken, where = guards.broken(payload).tolist()
        assert bool(broken) == (not own[position])
        assert own[position] or where == position


def test_guards_say_where() -> None:
    out = allocate(LAYOUTS["padded at an offset"], CPU)
    first, guards = out.storage_offset(), Guards(out)
    assert guards.describe(first - 2) == "wrote outside of out, 2 elements before its first"
    assert guards.describe(first + 51) == "wrote outside of out, 1 elements after its last"
    assert guards.describe(first + 8) == "wrote into the padding of out, 8 elements after its first"


def test_checksum_sees_changes_and_exchanges_in_the_whole_buffer() -> None:
    tensor = allocate(Layout.contiguous((40, 30), torch.float32), CPU)
    tensor.copy_(torch.randn(40, 30, generator=torch.Generator().manual_seed(0)))
    checksum = Checksum(tensor)
    assert checksum.watches(tensor)
    assert not checksum.changed()
    tensor[[3, 4]] = tensor[[4, 3]]
    assert checksum.changed()
    tensor[[3, 4]] = tensor[[4, 3]]
    assert not checksum.changed()
    storage_bits(tensor)[0] += 1
    assert checksum.changed()


@pytest.mark.parametrize("how", ["same start", "overlapping"])
@pytest.mark.parametrize(
    "problem",
    [
        Problem.mm(33, 33, 33, dtype=torch.bfloat16, layout="nn", device_type="cpu"),
        Problem.mm(40, 40, 17, dtype=torch.float64, layout="nt", device_type="cpu"),
        Problem.addmm(9, 9, 9, dtype=torch.float32, bias="mn", alpha=2, beta=3, device_type="cpu"),
        Problem.mm_plus_mm(8, 6, 40, 5, dtype=torch.float16, device_type="cpu"),
        Problem.int_mm(24, 24, 24, device_type="cpu"),
    ],
    ids=lambda problem: problem.op,
)
def test_operands_in_one_buffer_share_elements_and_keep_their_layouts(problem: Problem, how: Any) -> None:
    given = Probes(problem, CPU).integers()
    shared = in_one_buffer(problem, given, how)
    first = shared.a.data_ptr()
    for role, tensor in shared.named.items():
        assert Layout.of(tensor) == getattr(problem, role)
        assert tensor.untyped_storage().data_ptr() == shared.a.untyped_storage().data_ptr()
        assert (tensor.data_ptr() == first) == (how == "same start" or role == "a")
        assert set(tensor.unique().tolist()) == {-1, 0, 1}
    assert shared.b.data_ptr() < first + shared.a.numel() * shared.a.element_size()
    if problem.b in (problem.a, problem.a.transposed) and how == "same start":
        assert torch.equal(shared.b, shared.a if problem.b == problem.a else shared.a.mT)


def test_operands_that_cannot_share_memory() -> None:
    assert can_share(Problem.mm(3, 4, 5, dtype=torch.float16, device_type="cpu"))
    assert not can_share(Problem.mm(3, 4, 0, dtype=torch.float16, device_type="cpu"))
    assert not can_share(Problem.mixed_mm(16, 16, 32, dtype=torch.float16, device_type="cpu"))
    problem = Problem.addmm(9, 9, 9, dtype=torch.float32, alpha=1, beta=0, device_type="cpu")
    given = Probes(problem, CPU).integers()
    assert in_one_buffer(problem, given).inp is given.inp


def test_scale_factor_selects_rows_and_columns() -> None:
    scale_a, scale_b = torch.tensor([[2.0], [3.0], [5.0]]), torch.tensor([[7.0, 11.0]])
    a, b = torch.ones(3, 4), torch.ones(4, 2)
    given = Operands(a=a, b=b, out=a, inp=None, extra=(), alpha=1, beta=0, scale_a=scale_a, scale_b=scale_b)
    whole = scale_factor(given)
    assert whole is not None
    assert whole.tolist() == [[14, 22], [21, 33], [35, 55]]
    part = scale_factor(given, torch.tensor([2]), slice(1, 2))
    assert part is not None
    assert part.tolist() == [[55]]
    one = dataclasses.replace(given, scale_a=torch.tensor(2.0), scale_b=torch.tensor([[3.0]]))
    single = scale_factor(one, torch.tensor([2]), torch.tensor([1]))
    assert single is not None
    assert single.tolist() == [[6]]
    assert scale_factor(dataclasses.replace(given, scale_a=None)) is None
    for along_k in ({"scale_a": torch.ones(3, 2)}, {"scale_b": torch.ones(2, 2)}):
        with pytest.raises(GemmtuneError, match="expected none that changes along K"):
            scale_factor(dataclasses.replace(given, **along_k))


def test_random_scales_and_zero_points_are_of_their_whole_range() -> None:
    generator = torch.Generator().manual_seed(1)
    layout = Layout.contiguous((40, 50), torch.float32)
    for unit in (1.0, 0.25):
        scale = random_scale(layout, generator, CPU, unit=unit) / unit
        assert 0.5 <= scale.min() < 0.51
        assert 1.99 < scale.max() <= 2
    assert random_zero(layout, generator, CPU, 0, 7).unique().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert random_zero(layout, generator, CPU, -1, 1, step=0.5).unique().tolist() == [-1, -0.5, 0, 0.5, 1]
    problem = Problem.mixed_mm(4, 4000, 32, dtype=torch.float16, scales="column", zeros=True, device_type="cpu")
    zero = random_operands(problem, CPU, seed=1).zero_b
    assert zero is not None
    assert zero.unique().tolist() == list(range(8))


def test_random_integers_and_masks() -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype, low, high in ((torch.int8, -128, 127), (torch.uint8, 0, 255)):
        numbers = torch.zeros(8000, dtype=dtype)
        fill_random(numbers, generator)
        assert len(numbers.unique()) == 256
        assert (numbers.min(), numbers.max()) == (low, high)
    mask = torch.zeros(4000, dtype=torch.bool)
    fill_random(mask, generator)
    assert 0.45 < float(mask.float().mean()) < 0.55


def test_below_raises_the_limit_of_subnormal_numbers() -> None:
    least = torch.finfo(torch.float32).smallest_normal
    a, b = torch.tensor([[-4.0]]), torch.tensor([[least]])
    given = Operands(a=a, b=b, out=a, inp=None, extra=(), alpha=1, beta=0)
    assert [given.beside_subnormal(below=below) for below in (1.0, 1.5, 2.0)] == [0, 4, 4]
    assert Operands(a=b, b=a, out=a, inp=None, extra=(), alpha=1, beta=0).beside_subnormal(below=2.0) == 4
    zero = dataclasses.replace(given, a=b, b=a, zero_b=torch.tensor([[3.0]]))
    assert zero.beside_subnormal(below=2.0) == 7


def test_drawn_rows_have_the_ends_and_others_and_exact_weights_are_powers_of_two() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = drawn_routes(Problem.routed_grouped_mm(12, 4, 8, groups=2, tokens=5, device_type="cpu"), generator)["rows"]
    assert (rows[0], rows[-1]) == (4, 0)
    assert set(rows.tolist()) <= set(range(5))
    assert len(rows[1:-1].unique()) > 2
    problem = Problem.combined_grouped_mm(12, 4, 8, groups=2, tokens=1, device_type="cpu")
    found = drawn_routes(problem, generator, exact=True)
    assert found["weights"].unique().tolist() == [1, 2]
    assert sorted(found["slots"].tolist()) == list(range(12))


def test_guards_round_up_and_leave_room() -> None:
    for guard_bytes, expected in ((0, 0), (1, 256), (256, 256), (257, 512)):
        tensor = allocate(LAYOUTS["row-major"], CPU, guard_bytes=guard_bytes)
        assert tensor.storage_offset() == expected // 4
        assert storage_bits(tensor).numel() == -(-(2 * expected + 4 * 35) // 8) * 2
    out, guards = guarded_out(Layout.contiguous((3, 5), torch.float32), CPU, POISONS[torch.float32][0])
    assert out.storage_offset() == -(-256 * 6 * 4 // 256) * 64
    assert guards.broken(POISONS[torch.float32][0])[0] == 0
    tall, _ = guarded_out(Layout(size=(3, 5), stride=(70_000, 1), dtype=torch.float32), CPU, POISONS[torch.float32][0])
    assert tall.storage_offset() == 2**24 // 4


def test_a_checksum_tells_places_apart_and_has_the_rest() -> None:
    for numel in (251 * 2, 251 * 2 + 3, 5):
        tensor = torch.arange(numel, dtype=torch.int64)
        checksum = Checksum(tensor)
        for position in (0, numel - 1):
            tensor[position] += 1
            assert checksum.changed()
            tensor[position] -= 1
        assert not checksum.changed()
    odd = torch.zeros(7, dtype=torch.uint8)
    checksum = Checksum(odd)
    odd[6] = 1
    assert checksum.changed()


def test_inputs_are_watched_by_name_and_once() -> None:
    a, b = torch.ones(4), torch.ones(4)
    watch = Watch({"a": a, "a again": a[1:]})
    watch.add("b", b)
    watch.add("nothing", torch.empty(0))
    sparse = torch.eye(4).to_sparse_bsr((2, 2))
    watch.add("w", sparse)
    assert watch.names == ("a", "b", "w (values)", "w (row starts)", "w (column indices)")
    sparse.col_indices()[0] += 1
    b[3] = 0
    assert [bool(changed) for changed in watch.changed()] == [False, True, False, False, True]
    watch.forget("w (")
    assert watch.names == ("a", "b")
    assert Watch().names == ()


def test_free_memory_is_poisoned_while_results_come_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards_module, "ALWAYS_FRESH_BYTES", {"cpu": 2000, "cuda": 0})
    monkeypatch.setattr(guards_module, "SMALL_BYTES", 1000)
    payload = POISONS[torch.float32][0]
    for numel, poisoned in ((0, False), (1, True), (250, True), (251, True), (500, True), (501, False)):
        kept = poison_free_memory(Layout.contiguous((numel,), torch.float32), CPU, payload)
        assert (kept is not None) == poisoned
        assert kept is None or (kept.view(torch.int32) == payload).all()


@pytest.mark.parametrize(
    ("problem", "step_bytes"),
    [
        (Problem.mm(40, 40, 40, dtype=torch.float64, device_type="cpu"), 6400),
        (Problem.mm(33, 33, 33, dtype=torch.bfloat16, device_type="cpu"), 1024),
        (Problem.addmm(9, 9, 9, dtype=torch.float32, bias="mn", alpha=2, beta=3, device_type="cpu"), 256),
    ],
    ids=lambda x: str(x),
)
def test_overlapping_operands_begin_in_the_middle_of_the_one_before(problem: Problem, step_bytes: int) -> None:
    shared = in_one_buffer(problem, Probes(problem, CPU).integers(), "overlapping")
    places = [x.data_ptr() - shared.a.data_ptr() for x in shared.named.values()]
    assert places == [i * step_bytes for i in range(len(places))]
    again, other = (in_one_buffer(problem, Probes(problem, CPU).integers(), "overlapping", seed=seed) for seed in (0, 1))
    assert torch.equal(shared.a, again.a)
    assert not torch.equal(shared.a, other.a)


def test_layouts_of_a_product_with_itself() -> None:
    assert [is_product_with_itself(Problem.mm(*size, layout=layout, device_type="cpu")) for size, layout in (  # type: ignore[arg-type]
        ((8, 8, 8), "nn"), ((8, 8, 5), "nt"), ((8, 8, 5), "nn"), ((8, 5, 8), "nn"), ((8, 8, 0), "nt"), ((0, 0, 8), "nt"),
    )] == [True, True, False, False, False, False]  # fmt: skip
    assert not is_product_with_itself(Problem.bsr_mm(32, 32, 32, block=16, device_type="cpu"))
