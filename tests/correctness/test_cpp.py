"""Values of the cpp backend's kernels for every instruction set of this machine."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

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
    needs_compiler,
    on_each_isa,
    random_config,
    random_layout,
)
from rotation import rotated

from gemmtune import settings
from gemmtune.backends.cpp import BACKEND
from gemmtune.backends.cpp.build import CppChoice
from gemmtune.choice import Kernel, Status
from gemmtune.device import DeviceInfo, detect
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Layout, Problem
from gemmtune.selector.verify import Verifier

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

pytestmark = [needs_compiler, pytest.mark.rotates(9)]


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_case(rng: random.Random, dtype: torch.dtype, arch: str) -> CppChoice | None:
    op = rng.choice(("mm", "addmm", "bmm", "baddbmm"))
    m, n, k = (rng.choice(SIZES) for _ in range(3))
    batch = (rng.choice((1, 2, 5)),) if op in ("bmm", "baddbmm") else ()
    added = op in ("addmm", "baddbmm")
    shapes = [(n,), (m, n), (m, 1), (1, n), ()] + ([(*batch, m, n), (*batch, 1, n), (*batch, m, 1)] if batch else [])
    problem = Problem(
        op=op,
        a=random_layout(rng, (*batch, m, k), dtype, DENSE + EXPANDED, shared=True),
        b=random_layout(rng, (*batch, k, n), dtype, DENSE + EXPANDED, shared=True),
        out=random_layout(rng, (*batch, m, n), dtype, DENSE, shared=False),
        inp=Layout.contiguous(rng.choice(shapes), dtype) if added else None,
        alpha=rng.choice(("one", "general", "zero")) if added else "one",
        beta=rng.choice(("one", "general", "zero")) if added else "zero",
        device_type="cpu",
        prepacked=not batch and rng.random() < 0.3,
    )
    config = random_config(rng, arch, dtype)
    return next(iter(BACKEND.choices_of((config,), problem, device_for(arch)).choices), None)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        *((HERE[-1], dtype) for dtype in DTYPES),
        *rotated([(arch, dtype) for arch in HERE[:-1] for dtype in DTYPES if dtype != torch.float64], 3, "any layout"),
    ],
    ids=str,
)
def test_any_layout_and_size(arch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.backends.cpp.plan._US_PER_THREAD", 1e-6)
    rng = drawing(f"{arch} {dtype}")
    checked = 0
    while checked < 6:
        choice = random_case(rng, dtype, arch)
        if choice is None:
            continue
        torch.set_num_threads(rng.choice((1, 2, 3)))
        verdict = Verifier(choice.problem, CPU).check(choice, choice.build())
        assert verdict.status == Status.OK, f"{choice.problem} {choice}: {verdict.reason}"
        checked += not choice.problem.empty


@pytest.mark.turn(1, 8)
@as_shipped
@on_each_isa
@pytest.mark.parametrize("prepacked", rotated([False, True], 2, "offered"), ids=lambda x: "prepacked" if x else "plain")
def test_every_offered_configuration(arch: str, prepacked: bool) -> None:
    problem = Problem.addmm(75, 131, 300, dtype=torch.float32, device_type="cpu", alpha=2.0, prepacked=prepacked)
    verifier = Verifier(problem, CPU)
    choices = BACKEND.enumerate(problem, device_for(arch), settings.current()).choices
    assert choices
    for choice in choices:
        verdict = verifier.check(choice, choice.build())
        assert verdict.status == Status.OK, f"{choice}: {verdict.reason}"


@on_each_isa
@pytest.mark.parametrize("mode", ["steps", "columns"])
def test_nan_and_infinity_stay_in_their_row_and_column(arch: str, mode: str) -> None:
    a, b = torch.randn(37, 90), torch.rand(90, 70) + 0.5
    a[5, 89] = float("nan")
    a[9, 0] = float("inf")
    b[3, 69] = -float("inf")
    a[:, 3] = 1.0
    problem = Problem.mm(37, 70, 90, dtype=torch.float32, layout="nn", device_type="cpu")
    got = call(problem, arch, a, b, mode=mode)
    expected = a.double() @ b.double()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got == float("inf"), expected == float("inf"))
    assert torch.equal(got == -float("inf"), expected == -float("inf"))


@on_each_isa
def test_with_alpha_zero_the_product_is_not_computed(arch: str) -> None:
    a, b, inp = torch.full((20, 30), float("nan")), torch.ones(30, 40), torch.full((20, 40), 3.0)
    problem = Problem.addmm(20, 40, 30, dtype=torch.float32, layout="nn", bias="mn", alpha=0, beta=2, device_type="cpu")
    assert torch.equal(call(problem, arch, a, b, inp=inp, alpha=0.0, beta=2.0), torch.full((20, 40), 6.0))


@on_each_isa
def test_with_beta_zero_inp_is_not_read(arch: str) -> None:
    a, b, inp = torch.ones(20, 30), torch.ones(30, 40), torch.full((20, 40), float("nan"))
    problem = Problem.addmm(20, 40, 30, dtype=torch.float32, layout="nn", bias="mn", alpha=2, beta=0, device_type="cpu")
    assert torch.equal(call(problem, arch, a, b, inp=inp, alpha=2.0, beta=0.0), torch.full((20, 40), 60.0))


@pytest.mark.turn(7, 8)
@as_shipped
@on_each_isa
def test_half_is_as_accurate_as_float_sums(arch: str) -> None:
    problem = Problem.mm(64, 64, 4096, dtype=torch.float16, device_type="cpu")
    x = random_operands(problem, CPU, seed=5)
    exact = x.a.double() @ x.b.double()
    error = (call(problem, arch, x.a, x.b, kc=512).double() - exact).square().mean()
    rounding = (exact.half().double() - exact).square().mean()
    assert error <= rounding * 1.02


@pytest.mark.parametrize("mode", ["steps", "columns"])
@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_threads_do_not_change_the_result(op: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.backends.cpp.plan._US_PER_THREAD", 1e-6)
    make = (lambda *s, **k: Problem.bmm(3, *s, **k)) if op == "bmm" else Problem.mm
    problem = make(150, 170, 130, dtype=torch.float32, device_type="cpu")
    x = random_operands(problem, CPU, seed=7)
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        results.append(call(problem, HERE[-1], x.a, x.b, mode=mode))
    assert all(torch.equal(results[0], r) for r in results)
    torch.testing.assert_close(results[0], x.a @ x.b, atol=1e-4, rtol=1e-5)


def test_a_forked_child_computes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The OpenMP runtime's threads do not survive a fork, so plain threads replace them."""
    monkeypatch.setattr("gemmtune.backends.cpp.plan._US_PER_THREAD", 1e-6)
    torch.set_num_threads(2)
    problem = Problem.mm(200, 200, 200, dtype=torch.float32, device_type="cpu")
    x = random_operands(problem, CPU, seed=8)
    kernel = choice_for(problem, HERE[-1]).build()
    expected, got = torch.empty(200, 200), torch.empty(200, 200)
    kernel.run(expected, (x.a, x.b), ())
    child = os.fork()
    if child == 0:
        kernel.run(got, (x.a, x.b), ())
        os._exit(0 if (got.numpy() == expected.numpy()).all() else 3)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hung")
    assert os.waitstatus_to_exitcode(ended[1]) == 0


@on_each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_pack_makes_panels(arch: str, dtype: torch.dtype) -> None:
    problem = Problem.mm(5, 101, 40, dtype=dtype, device_type="cpu", prepacked=True)
    choice = choice_for(problem, arch, direct=True)
    b = torch.randn(101, 40).to(dtype).t()
    packed = choice.pack(b)
    nr = choice.nr
    assert choice.packed_format == f"cpp_{'f32' if dtype == torch.float32 else 'f16'}_nr{nr}"
    assert packed.is_contiguous()
    assert packed.shape == (-(-101 // nr), 40, nr)
    assert torch.equal(packed.transpose(0, 1).reshape(40, -1)[:, :101], b)
    assert not packed.transpose(0, 1).reshape(40, -1)[:, 101:].any()
    assert choice_for(Problem.mm(5, 101, 40, dtype=dtype, device_type="cpu"), arch).packed_format is None


def test_several_threads_may_call_the_kernels_of_a_problem_concurrently() -> None:
    problem = Problem.mm(64, 96, 80, dtype=torch.float32, device_type="cpu")
    kernel: Kernel = choice_for(problem, HERE[-1]).build()
    inputs = [random_operands(problem, CPU, seed=i) for i in range(4)]
    outs = [torch.empty(64, 96) for _ in inputs]

    def work(i: int) -> None:
        for _ in range(50):
            kernel.run(outs[i], (inputs[i].a, inputs[i].b), ())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for out, x in zip(outs, inputs, strict=True):
        torch.testing.assert_close(out, x.a @ x.b, atol=1e-4, rtol=1e-5)


def test_device_is_detected_with_an_architecture_that_has_kernels() -> None:
    device: DeviceInfo = detect("cpu")
    assert device.arch in HERE
    assert BACKEND.enumerate(Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cpu"), device, settings.current()).choices
