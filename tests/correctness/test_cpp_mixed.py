"""Products with weights of 8 and 4 bits by the cpp backend for every instruction set of this machine."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from cpp_kernels import (
    CPU,
    DENSE,
    EXPANDED,
    HERE,
    SIZES,
    as_shipped,
    call,
    choice_for,
    device_for,
    drawing,
    legal,
    needs_compiler,
    on_each_isa,
    random_config,
    random_layout,
)
from quantized_operands import every_byte, exact_operands, unpacked
from rotation import rotated

from gemmtune import settings
from gemmtune.backends.cpp import BACKEND
from gemmtune.backends.cpp.build import CppChoice
from gemmtune.choice import Status
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier

pytestmark = [needs_compiler, pytest.mark.rotates(9)]
WEIGHTS = {
    "int8": (torch.int8, ""), "uint8": (torch.uint8, ""), "e4m3": (torch.float8_e4m3fn, ""), "e5m2": (torch.float8_e5m2, ""),
    "int4": (torch.uint8, "int4"), "uint4": (torch.uint8, "uint4"),
}  # fmt: skip
WAYS = [{"mr": 3, "mode": mode, "direct": direct} for mode in ("steps", "columns", "dots") for direct in (False, True)]
on_each_weight = pytest.mark.parametrize("weight", WEIGHTS)


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gemmtune.backends.cpp.plan._US_PER_THREAD", 1e-6)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def mixed(m: int, n: int, k: int, weight: str, **changes: object) -> Problem:
    dtype_b, encoding = WEIGHTS[weight]
    values = {"dtype": torch.float32, "dtype_b": dtype_b, "encoding": encoding, "layout": "nn", "device_type": "cpu"} | changes
    return Problem.mixed_mm(m, n, k, **values)


def activations(arch: str) -> torch.dtype:
    """Return bfloat16 for the instruction set with pairs of it, which packed weights of 64 columns or more become."""
    return torch.bfloat16 if arch.endswith("bf16") else torch.float32


def every_way(problem: Problem, arch: str):
    """Yield the problem and a configuration for each layout of b: row-major, column-major, prepacked."""
    for letter, prepacked in itertools.product("nt", (False, True)):
        k = problem.b.size[-2]
        stride = (problem.n, 1) if letter == "n" else (1, k)
        b = dataclasses.replace(problem.b, stride=stride)
        laid_out = dataclasses.replace(problem, b=b, prepacked=prepacked)
        yield from ((laid_out, way) for way in WAYS if legal(laid_out, arch, **way))


def assert_exact(problem: Problem, arch: str, *, seed: int = 0, **way: object) -> None:
    a, b, scales, expected = exact_operands(problem, seed)
    got = call(problem, arch, a, b, extra=scales, **way)
    off = (got.double() - expected).abs().max()
    assert torch.equal(got, expected.to(got.dtype)), f"{problem} {way}: {off} off"


@pytest.mark.parametrize(
    ("arch", "weight"),
    [
        *((HERE[-1], weight) for weight in WEIGHTS),
        *((arch, weight) for arch in HERE[:-1] for weight in rotated([*WEIGHTS], 6, arch)),
    ],
)
def test_every_bit_pattern_is_read_as_its_number(arch: str, weight: str) -> None:
    """The widest instructions read each weight; the others read one of the six, another one for each commit."""
    k, patterns = 70, every_byte(WEIGHTS[weight][0])
    problem = mixed(2, 256, k, weight, dtype=activations(arch))
    b = patterns.view(torch.uint8).expand(problem.b.size).contiguous().view(patterns.dtype)
    expected = unpacked(b, problem.encoding).sum(0).expand(2, -1).to(problem.dtype).double()
    count = 0
    for laid_out, way in every_way(problem, arch):
        stored = b if laid_out.b.stride[-1] == 1 else b.view(torch.uint8).t().contiguous().t().view(b.dtype)
        got = call(laid_out, arch, torch.ones(2, k, dtype=problem.dtype), stored, kc=32, **way).double()
        assert torch.equal(got.nan_to_num(nan=0.123), expected.nan_to_num(nan=0.123)), f"{laid_out} {way}"
        assert torch.equal(got.isnan(), expected.isnan())
        count += 1
    assert count >= 8


@pytest.mark.parametrize(
    ("arch", "weight"),
    [*((HERE[-1], weight) for weight in rotated(list(WEIGHTS), 2, "groups")), *((arch, "int4") for arch in HERE[:-1])],
)
def test_groups_scales_and_zero_points(arch: str, weight: str) -> None:
    """K ends within a group, a block of K ends within another one, and the columns end within a panel."""
    for scales in ("tensor", "column", "group_32", "group_64", "group_128"):
        for laid_out, way in every_way(mixed(5, 70, 166, weight, dtype=activations(arch), scales=scales, zeros=True), arch):
            assert_exact(laid_out, arch, kc=36, **way)


@on_each_isa
def test_full_panels_of_every_height(arch: str) -> None:
    """Use all rows of the micro-tile, and fewer, with all its registers."""
    rows = {"avx2": 6, "portable": 6}.get(arch, 14)
    for m in range(1, rows + 2):
        for laid_out, way in every_way(mixed(m, 70, 70, "int4", scales="group_32", zeros=True), arch):
            assert_exact(laid_out, arch, **way | {"mr": rows})


@on_each_isa
@pytest.mark.parametrize("dtype", rotated([torch.float16, torch.bfloat16], 2, "activations"), ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, None], ids=["float32-scales", "own-scales"])
def test_activations_of_16_bits(arch: str, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> None:
    for m, weight in ((1, "int4"), (20, "int4")):
        problem = mixed(m, 70, 96, weight, dtype=dtype, scales="group_32", zeros=True, scale_dtype=scale_dtype)
        for laid_out, way in every_way(problem, arch):
            a, b, scales, expected = exact_operands(laid_out, 3)
            got = call(laid_out, arch, a, b, extra=scales, **way)
            assert torch.equal(got, expected.to(dtype)), f"{laid_out} {way}"


@on_each_isa
@pytest.mark.parametrize("k", rotated([2, 4, 30, 32, 34, 62, 64, 66, 126, 130, 258], 2, "remainders"))
def test_every_remainder_of_k(arch: str, k: int) -> None:
    for m in (1, 17):
        for laid_out, way in every_way(mixed(m, 97, k, "int4", dtype=activations(arch), scales="group_32", zeros=True), arch):
            assert_exact(laid_out, arch, kc=1000, **way)


@on_each_isa
def test_scales_of_any_stride(arch: str) -> None:
    base = mixed(3, 70, 166, "int4", scales="group_64", zeros=True)
    for stride in ((1, 3), (0, 1), (1, 0), (0, 0), (200, 2), (70, 1)):
        scale = dataclasses.replace(base.scale_b, stride=stride, offset=1)
        column = dataclasses.replace(base.zero_b, size=(1, 70), stride=(70, 1))
        for laid_out, way in every_way(dataclasses.replace(base, scale_b=scale, zero_b=column), arch):
            assert_exact(laid_out, arch, **way)


@on_each_isa
@pytest.mark.parametrize("weight", ["int8", "int4"])
def test_a_column_major_or_narrow_result(arch: str, weight: str) -> None:
    """The product is computed transposed, with the weights on the left."""
    wide = mixed(40, 37, 166, weight, scales="group_32", zeros=True)
    by_columns = dataclasses.replace(wide, out=Layout(size=(40, 37), stride=(1, 40), dtype=torch.float32))
    for problem in (by_columns, mixed(40, 3, 166, weight, scales="group_32", zeros=True)):
        ways = list(every_way(problem, arch))
        assert any(way["mode"] == "dots" for _, way in ways) == (weight == "int8")
        for laid_out, way in ways:
            assert_exact(laid_out, arch, **way)


@on_each_isa
def test_zero_points_end_with_k(arch: str) -> None:
    """An infinite scale turns a padding zero into NaN, which must not reach a result."""
    problem = mixed(2, 68, 51, "int8", dtype=activations(arch), scales="group_32", zeros=True)
    scale, zero = torch.full((2, 68), 1.0, dtype=problem.dtype), torch.full((2, 68), 0.0, dtype=problem.dtype)
    scale[1, 5], scale[1, 7] = float("inf"), -float("inf")
    b = torch.ones(51, 68, dtype=torch.int8)
    for laid_out, way in every_way(problem, arch):
        stored = b if laid_out.b.stride[-1] == 1 else b.t().contiguous().t()
        got = call(laid_out, arch, torch.ones(2, 51, dtype=problem.dtype), stored, extra=(scale, zero), **way)
        expected = torch.full((2, 68), 51.0, dtype=problem.dtype)
        expected[:, 5], expected[:, 7] = float("inf"), -float("inf")
        assert torch.equal(got, expected), f"{laid_out} {way}"


@on_each_isa
def test_an_epilogue_with_operands_after_the_scales(arch: str) -> None:
    base = mixed(9, 50, 64, "int4", scales="group_32", zeros=True)
    a, b, scales, expected = exact_operands(base, 8)
    bias = torch.arange(50.0)
    problem = dataclasses.replace(base, epilogue=trace(lambda acc, x: torch.relu(acc + x), torch.float32, (bias,)))
    got = call(problem, arch, a, b, extra=(*scales, bias))
    assert torch.equal(got.double(), torch.relu(expected + bias))


def random_case(rng: random.Random, arch: str) -> CppChoice | None:
    kinds = (("int8", torch.bfloat16, "column"), ("e4m3", torch.float16, "none"), ("int4", torch.bfloat16, "group_32"))
    weight, dtype, scales = rng.choice(kinds)
    dtype_b, encoding = WEIGHTS[weight]
    m, n, k = (rng.choice(SIZES) for _ in range(3))
    k += k % 2 if encoding else 0
    made = mixed(m, n, k, weight, dtype=dtype, scales=scales, zeros=scales != "none")
    problem = dataclasses.replace(
        made,
        a=random_layout(rng, (m, k), dtype, DENSE + EXPANDED, shared=True),
        b=random_layout(rng, made.b.size, dtype_b, DENSE + EXPANDED, shared=True),
        out=random_layout(rng, (m, n), dtype, DENSE, shared=False),
        prepacked=rng.random() < 0.3,
    )
    config = random_config(rng, arch, dtype)
    return next(iter(BACKEND.choices_of((config,), problem, device_for(arch)).choices), None)


@pytest.mark.turn(2, 8)
@on_each_isa
def test_any_layout_and_size(arch: str) -> None:
    rng = drawing(f"mixed {arch}")
    checked = 0
    while checked < 8:
        choice = random_case(rng, arch)
        if choice is None:
            continue
        torch.set_num_threads(rng.choice((1, 2, 3)))
        verdict = Verifier(choice.problem, CPU).check(choice, choice.build())
        assert verdict.status == Status.OK, f"{choice.problem} {choice}: {verdict.reason}"
        checked += not choice.problem.empty


@pytest.mark.turn(3, 8)
@as_shipped
@pytest.mark.parametrize("shape", rotated([(1, 300, 512), (40, 131, 300)], 2, "offered shape"), ids=str)
@pytest.mark.parametrize("prepacked", rotated([False, True], 2, "offered"), ids=lambda x: "prepacked" if x else "plain")
def test_every_offered_configuration(shape: tuple[int, int, int], prepacked: bool) -> None:
    for letters in rotated(("nn", "nt"), 2, str(shape)):
        problem = mixed(*shape, "int4", dtype=torch.bfloat16, scales="group_128", zeros=True, layout=letters)
        problem = dataclasses.replace(problem, prepacked=prepacked)
        verifier = Verifier(problem, CPU)
        choices = BACKEND.enumerate(problem, device_for(HERE[-1]), settings.current()).choices
        assert choices
        for choice in choices:
            verdict = verifier.check(choice, choice.build())
            assert verdict.status == Status.OK, f"{choice}: {verdict.reason}"


@on_each_isa
@on_each_weight
def test_pack_keeps_the_bytes(arch: str, weight: str) -> None:
    problem = dataclasses.replace(mixed(5, 101, 40, weight), prepacked=True)
    choice = choice_for(problem, arch, direct=True)
    rows = problem.b.size[0]
    b = torch.randint(0, 256, (101, rows), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)).t()
    packed = choice.pack(b.view(problem.b.dtype))
    short = {"e4m3": "e4m3", "e5m2": "e5m2", "int8": "i8"}.get(weight, "u8")
    assert choice.packed_format == f"cpp_{short}_nr{choice.nr}"
    assert packed.dtype == problem.b.dtype
    assert packed.shape == (-(-101 // choice.nr), rows, choice.nr)
    columns = packed.view(torch.uint8).transpose(0, 1).reshape(rows, -1)
    assert torch.equal(columns[:, :101], b)
    assert not columns[:, 101:].any()
