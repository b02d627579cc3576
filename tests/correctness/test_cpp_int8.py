"""int8 products by the cpp backend: exact for every way of multiplying bytes on this machine."""

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
    INT8_HERE,
    SIZES,
    as_shipped,
    call,
    choice_for,
    device_for,
    drawing,
    legal,
    needs_compiler,
    on_each_int8_isa,
    random_config,
    random_layout,
)
from rotation import rotated

from gemmtune import settings
from gemmtune.backends.cpp import BACKEND
from gemmtune.backends.cpp.build import CppChoice
from gemmtune.choice import Status
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier

pytestmark = [needs_compiler, pytest.mark.rotates(9)]
WAYS = [
    *({"mode": mode, "prepacked": False} for mode in ("steps", "columns", "dots")),
    *({"mode": mode, "prepacked": True, "direct": True} for mode in ("steps", "columns")),
]
on_each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way["mode"] + "-prepacked" * way["prepacked"])


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gemmtune.backends.cpp.plan._US_PER_THREAD", 1e-6)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bytes_like(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-128, 128, size, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.long() @ b.long()


def int_mm(arch: str, way: dict, a: torch.Tensor, b: torch.Tensor, **changes: object) -> torch.Tensor:
    way = dict(way)
    out = Layout.contiguous((a.shape[0], b.shape[1]), torch.int32)
    problem = Problem(op="int_mm", a=Layout.of(a), b=Layout.of(b), out=out, device_type="cpu", prepacked=way.pop("prepacked"))
    return call(problem, arch, a, b, **way | changes)


def random_case(rng: random.Random, arch: str) -> CppChoice | None:
    m, n, k = (rng.choice(SIZES) for _ in range(3))
    problem = Problem(
        op="int_mm",
        a=random_layout(rng, (m, k), torch.int8, DENSE + EXPANDED, shared=True),
        b=random_layout(rng, (k, n), torch.int8, DENSE + EXPANDED, shared=True),
        out=random_layout(rng, (m, n), torch.int32, DENSE, shared=False),
        device_type="cpu",
        prepacked=rng.random() < 0.3,
    )
    config = random_config(rng, arch, torch.int8)
    return next(iter(BACKEND.choices_of((config,), problem, device_for(arch)).choices), None)


@on_each_int8_isa
def test_any_layout_and_size(arch: str) -> None:
    rng = drawing(f"int8 {arch}")
    checked = 0
    while checked < 8:
        choice = random_case(rng, arch)
        if choice is None:
            continue
        torch.set_num_threads(rng.choice((1, 2, 3)))
        verdict = Verifier(choice.problem, CPU).check(choice, choice.build())
        assert verdict.status == Status.OK, f"{choice.problem} {choice}: {verdict.reason}"
        checked += not choice.problem.empty


@on_each_int8_isa
@on_each_way
def test_every_remainder_is_exact(arch: str, way: dict) -> None:
    for m, n, k in itertools.product((1, 2, 15), (1, 33), (1, 2, 3, 4, 5, 62, 63, 64, 65, 66, 67, 127, 129)):
        if k == 1 and way["mode"] == "dots":
            continue  # these kernels read columns of b, and a single row of b is row-major
        a, b = bytes_like(m, k, seed=k), bytes_like(n, k, seed=k + 1).t()
        assert torch.equal(int_mm(arch, way, a, b, kc=16).long(), exact(a, b)), (m, n, k)


@on_each_int8_isa
@on_each_way
@pytest.mark.parametrize("values", [(-128, -128), (-128, 127), (127, 127), (-1, -128), (0, -128), (-128, 0)], ids=str)
def test_the_largest_sums_are_exact(arch: str, way: dict, values: tuple[int, int]) -> None:
    k = (1 << 17) - 1
    a, b = (torch.full(size, value, dtype=torch.int8) for size, value in zip(((2, k), (3, k)), values, strict=True))
    got = int_mm(arch, way, a, b.t(), kc=1000)
    assert got.unique().tolist() == [values[0] * values[1] * k]


@on_each_int8_isa
@on_each_way
def test_partial_sums_may_overflow_int32(arch: str, way: dict) -> None:
    """Sums are right modulo 2^32. Neither half of these sums fits, nor half of a sum of bytes shifted to unsigned."""
    half = 1 << 18
    a = torch.cat([torch.full((2, half), -128), torch.full((2, half), 127), torch.full((2, half), 1)], 1).to(torch.int8)
    b = torch.full((3 * half, 3), -128, dtype=torch.int8)
    assert exact(a, b).unique().tolist() == [0]
    b[-1] = 127
    for kc in (5000, 1 << 20):
        assert torch.equal(int_mm(arch, way, a, b.t().contiguous().t(), kc=kc).long(), exact(a, b))


@pytest.mark.turn(4, 8)
@as_shipped
@on_each_int8_isa
@pytest.mark.parametrize("layout", rotated(["nn", "nt"], 2, "offered"))
def test_every_offered_configuration(arch: str, layout: str) -> None:
    for problem in (
        Problem.int_mm(75, 131, 300, layout=layout, device_type="cpu"),
        Problem.int_mm(3, 131, 300, layout=layout, device_type="cpu"),
    ):
        for prepacked in rotated((False, True), 2, f"{arch} {problem.m}"):
            offered = dataclasses.replace(problem, prepacked=prepacked)
            verifier = Verifier(offered, CPU)
            choices = BACKEND.enumerate(offered, device_for(arch), settings.current()).choices
            assert choices
            for choice in choices:
                verdict = verifier.check(choice, choice.build())
                assert verdict.status == Status.OK, f"{choice}: {verdict.reason}"


@on_each_int8_isa
@pytest.mark.parametrize("dtype", rotated([torch.float32, torch.bfloat16, torch.float16], 3, "int8 epilogue"), ids=str)
def test_an_epilogue_gets_the_sum_as_float32(arch: str, dtype: torch.dtype) -> None:
    m, n, k = 21, 45, 5000
    a, b = bytes_like(m, k, seed=5), bytes_like(k, n, seed=6)
    a[:, : k // 2], b[: k // 2] = 127, 127  # beyond 2^24, where the conversion rounds
    scale, column = torch.rand(1, n) + 0.5, torch.randn(m, 1)
    graph = trace(lambda acc, s, c: (acc * s * 2.0**-14 + c).to(dtype), torch.float32, (scale, column))
    problem = Problem.int_mm(m, n, k, layout="nn", device_type="cpu")
    problem = dataclasses.replace(problem, epilogue=graph, out=Layout.contiguous((m, n), dtype))
    sums = exact(a, b)
    assert sums.abs().max() > 1 << 24
    expected = (sums.float() * scale * 2.0**-14 + column).to(dtype)
    assert torch.equal(call(problem, arch, a, b, extra=(scale, column)), expected)
    identity = dataclasses.replace(problem, epilogue=trace(lambda acc: acc * 1.0, torch.float32, ()))
    identity = dataclasses.replace(identity, out=Layout.contiguous((m, n), torch.float32))
    assert torch.equal(call(identity, arch, a, b), sums.float())


@on_each_int8_isa
def test_results_by_columns_and_in_every_second_place(arch: str) -> None:
    a, b = bytes_like(37, 70), bytes_like(70, 41)
    base = Problem.int_mm(37, 41, 70, layout="nn", device_type="cpu")
    for stride in ((1, 37), (1, 40), (82, 2), (2, 80)):
        problem = dataclasses.replace(base, out=Layout(size=(37, 41), stride=stride, dtype=torch.int32))
        for mode in ("steps", "columns", "dots"):
            if legal(problem, arch, mode=mode):
                assert torch.equal(call(problem, arch, a, b, mode=mode).long(), exact(a, b)), (stride, mode)


@on_each_int8_isa
def test_pack_makes_panels_of_neighbours_along_k(arch: str) -> None:
    problem = dataclasses.replace(Problem.int_mm(5, 101, 39, device_type="cpu"), prepacked=True)
    choice = choice_for(problem, arch, direct=True, mode="columns")
    numbers = 1 if arch == "portable" else 4 if arch.endswith("vnni") else 2
    steps, panels = -(-39 // numbers), -(-101 // choice.nr)
    b = bytes_like(101, 39).t()
    packed = choice.pack(b)
    assert choice.packed_format == f"cpp_i8{f'x{numbers}' if numbers > 1 else ''}_nr{choice.nr}"
    assert packed.is_contiguous()
    assert packed.dtype == torch.int8
    rows = packed.reshape(panels, steps, choice.nr, numbers).permute(1, 3, 0, 2).reshape(steps * numbers, panels * choice.nr)
    assert torch.equal(rows[:39, :101], b)
    assert not rows[39:].any()
    assert not rows[:, 101:].any()


def test_without_products_the_result_is_zero() -> None:
    a, b = bytes_like(5, 0), bytes_like(0, 7)
    assert not int_mm(INT8_HERE[-1], WAYS[0], a, b).any()


@on_each_int8_isa
def test_threads_do_not_change_the_result(arch: str) -> None:
    a, b = bytes_like(150, 130), bytes_like(130, 170)
    for threads, mode in itertools.product((1, 2, 3, 5), ("steps", "columns")):
        torch.set_num_threads(threads)
        got = int_mm(arch, {"mode": mode, "prepacked": False}, a, b, kc=16)
        assert torch.equal(got.long(), exact(a, b)), (threads, mode)
