"""Values of the cpp backend's kernels, for every instruction set that this machine has."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gemmtune import settings
from gemmtune.choice import Kernel, Status
from gemmtune.device import DeviceInfo, detect, preset
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Layout, Problem
from gemmtune.problem.epilogue import evaluate
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier
from gemmtune.templates.cpp import BACKEND
from gemmtune.templates.cpp.build import CppChoice
from gemmtune.templates.cpp.configs import Config, refusal

CPU = torch.device("cpu")
SIZES = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129)
ORDER = ("portable", "avx2", "avx512")
HERE = ORDER[: ORDER.index(detect("cpu").arch) + 1]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
pytestmark = pytest.mark.skipif(not BACKEND.available(detect("cpu")).ok, reason="needs a C++ compiler")
on_each_isa = pytest.mark.parametrize("arch", HERE)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def mr_for(arch: str, dtype: torch.dtype) -> int:
    """Rows of the micro-tile: all that register allocation may get wrong on the widest, few to compile for the others."""
    return 14 if arch == "avx512" and dtype == torch.float32 else 3


def choice_for(problem: Problem, arch: str, **changes: object) -> CppChoice:
    """A choice with small blocks, so that small problems have many of them."""
    values = {
        "mr": mr_for(arch, problem.dtype),
        "nv": 2,
        "mode": "steps",
        "kc": 40,
        "task_m": 2,
        "task_n": 2,
        "direct": False,
    } | changes
    config = Config(**values)
    assert refusal(config, problem, preset(arch)) is None
    (found,) = BACKEND.choices_of((config,), problem, preset(arch)).choices
    return found


def call(problem: Problem, arch: str, *operands: torch.Tensor, inp=None, alpha=1.0, beta=0.0, extra=(), **changes) -> torch.Tensor:
    out = torch.full(problem.out.size, float("nan"), dtype=problem.out.dtype)
    choice_for(problem, arch, **changes).build().run(out, *operands, inp, alpha, beta, extra)
    return out


def strides_of(rng: random.Random, rows: int, columns: int, kind: str) -> tuple[int, int]:
    pad = rng.choice((1, 4, 8, 17))
    return {
        "row": (columns, 1), "column": (1, rows), "row-padded": (columns + pad, 1), "column-padded": (1, rows + pad),
        "every-second": (2 * columns + 2, 2), "same-row": (0, 1), "same-column": (1, 0), "one-element": (0, 0),
    }[kind]  # fmt: skip


DENSE = ("row", "column", "row-padded", "column-padded", "every-second")
EXPANDED = ("same-row", "same-column", "one-element")


def random_layout(rng: random.Random, size: tuple[int, ...], dtype: torch.dtype, kinds: tuple[str, ...], *, shared: bool) -> Layout:
    rows, columns = size[-2:]
    stride = strides_of(rng, rows, columns, rng.choice(kinds))
    span = 1 + max(rows - 1, 0) * stride[0] + max(columns - 1, 0) * stride[1]
    lead = (rng.choice((0, span, span + 3)) if shared else span + 3,) if len(size) == 3 else ()
    return Layout(size=size, stride=lead + stride, dtype=dtype, offset=rng.randrange(16 // dtype.itemsize))


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
    config = Config(
        mr=mr_for(arch, dtype), nv=2, mode=rng.choice(("steps", "columns", "dots")), kc=rng.choice((1, 5, 16, 40, 1000)),
        task_m=rng.choice((1, 2, 8)), task_n=rng.choice((1, 2, 8)), direct=rng.random() < 0.5,
    )  # fmt: skip
    return next(iter(BACKEND.choices_of((config,), problem, preset(arch)).choices), None)


@pytest.mark.parametrize(
    ("arch", "dtype"), [(arch, dtype) for arch in HERE for dtype in DTYPES if dtype != torch.float64 or arch == HERE[-1]], ids=str
)
def test_any_layout_and_size(arch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.templates.cpp.plan._US_PER_THREAD", 1e-6)
    rng = random.Random(f"{arch} {dtype}")
    checked = 0
    while checked < 16:
        choice = random_case(rng, dtype, arch)
        if choice is None:
            continue
        torch.set_num_threads(rng.choice((1, 2, 3)))
        verdict = Verifier(choice.problem, CPU).check(choice, choice.build())
        assert verdict.status == Status.OK, f"{choice.problem} {choice}: {verdict.reason}"
        checked += not choice.problem.empty


@on_each_isa
@pytest.mark.parametrize("prepacked", [False, True], ids=["plain", "prepacked"])
def test_every_offered_configuration(arch: str, prepacked: bool) -> None:
    problem = Problem.addmm(75, 131, 300, dtype=torch.float32, device_type="cpu", alpha=2.0, prepacked=prepacked)
    verifier = Verifier(problem, CPU)
    choices = BACKEND.enumerate(problem, preset(arch), settings.current()).choices
    assert choices
    for choice in choices:
        verdict = verifier.check(choice, choice.build())
        assert verdict.status == Status.OK, f"{choice}: {verdict.reason}"


NAN, INFINITY = float("nan"), float("inf")
NAN, INFINITY = float("nan"), float("inf")
SPECIAL = (0.0, -0.0, 1.0, -1.0, NAN, INFINITY, -INFINITY, 1e-40, -1e-40, 65504.0, 65520.0, -7e4, 1e38, 6e-8, -3e-8)
GRID = (
    *(x / 64 for x in range(-640, 640, 7)),
    *(x / 8 for x in range(-960, 960, 31)),
    *(2.0**-i for i in range(1, 30)),
)
UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "erf": torch.erf, "relu": torch.relu, "relu6": torch.nn.functional.relu6,
    "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "clamp": lambda x: torch.clamp(x, -1.5, 2.0), "clamp_min": lambda x: torch.clamp(x, min=0.25),
    "minimum": lambda x: torch.minimum(x, x * 0.5), "maximum": lambda x: torch.maximum(x * x, x),
    "arithmetic": lambda x: (x + 1.5) * 0.75 - x / 3.0,
    "compare": lambda x: torch.where(x > 0.5, x, torch.where(x <= -3.0, x * 2, -x)),
    "equal": lambda x: torch.where(x == 1.0, 5.0 * x, torch.where(x != 2.0, x, x - 1)),
    "ge_lt": lambda x: torch.where(x >= 1.0, x, torch.where(x < -1.0, x + x, x * 3)),
}  # fmt: skip


def by_column(functions: list[Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """One epilogue for all functions: column j gets the one whose number is in ``which[j]``."""

    def epilogue(acc: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        result = acc
        for i, function in enumerate(functions):
            result = torch.where(which == float(i), function(acc), result)
        return result

    return epilogue


def apply_by_column(
    arch: str, functions: list[Callable[[torch.Tensor], torch.Tensor]], values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's results [len(values), len(functions)] and torch's, the graph run eagerly on the same accumulators."""
    n, acc = len(functions), values.float().reshape(-1, 1)
    which = torch.arange(n, dtype=torch.float32)
    graph = trace(by_column(functions), torch.float32, (which,))
    a, b = acc.contiguous(), torch.ones(1, n)
    problem = Problem(
        op="mm",
        a=Layout.of(a),
        b=Layout.of(b),
        out=Layout.contiguous((len(acc), n), torch.float32),
        epilogue=graph,
        device_type="cpu",
    )
    got = call(problem, arch, a, b, extra=(which,))
    return got, evaluate(graph, acc.expand(-1, n).contiguous(), (which,)).float()


@on_each_isa
def test_functions_of_an_epilogue(arch: str) -> None:
    values = torch.tensor(SPECIAL + GRID, dtype=torch.float32)
    got, torchs = apply_by_column(arch, list(UNARY.values()), values)
    for j, (name, function) in enumerate(UNARY.items()):
        exact = function(values.double())
        # Not torch's own in float32, where gelu(inf) is NaN.
        assert torch.equal(got[:, j].isnan(), exact.isnan()), name
        assert torch.equal(got[:, j].isinf(), exact.float().isinf()), name
        finite = exact.float().isfinite()
        error = (got[:, j].double() - exact)[finite].abs()
        # gelu and arithmetic cancel: what torch loses there, the kernel may lose too.
        allowed = (
            4 * 2.0**-24 * exact[finite].abs() + 2 * (torchs[:, j].double() - exact)[finite].abs() + 2e-7 * (name[:4] == "gelu")
        )
        worst = int((error - allowed).argmax())
        assert (error <= allowed + 1e-44).all(), (name, values[finite][worst], got[finite, j][worst], exact[finite][worst])


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cast": lambda x: x, "add": lambda x: x + 0.1, "sub": lambda x: 3.0 - x, "mul": lambda x: x * 1.7, "div": lambda x: x / 3.0,
    "square": lambda x: x * x, "chain": lambda x: (x * 1.7 + 0.1) * x - x / 7.0, "relu": torch.relu,
    "clamp": lambda x: torch.clamp(x, -1.1, 1.1), "compare": lambda x: torch.where(x < 0.1, x, x + 1.0),
}  # fmt: skip


@on_each_isa
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_nodes_round_as_torch_does(arch: str, dtype: torch.dtype) -> None:
    values = torch.cat(
        [torch.tensor(SPECIAL + GRID), torch.randn(200, generator=torch.Generator().manual_seed(1)) * 100, torch.tensor([0.1])]
    )
    functions = [lambda x, f=f: f(x.to(dtype)).to(torch.float32) for f in ROUNDED.values()]
    got, torchs = apply_by_column(arch, functions, values)
    for j, name in enumerate(ROUNDED):
        differ = ~((got[:, j] == torchs[:, j]) | (got[:, j].isnan() & torchs[:, j].isnan()))
        assert not differ.any(), (name, values[differ][:3], got[differ, j][:3], torchs[differ, j][:3])


@on_each_isa
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_result_is_rounded_once_to_its_dtype(arch: str, dtype: torch.dtype) -> None:
    values = torch.cat([torch.tensor(SPECIAL + GRID), torch.randn(500, generator=torch.Generator().manual_seed(2)) * 3]).reshape(
        -1, 1
    )
    graph = trace(lambda x: x.to(dtype), torch.float32, ())
    problem = Problem(
        op="mm", a=Layout.of(values), b=Layout.contiguous((1, 37), torch.float32), out=Layout.contiguous((len(values), 37), dtype),
        epilogue=graph, device_type="cpu",
    )  # fmt: skip
    got = call(problem, arch, values, torch.ones(1, 37))
    assert torch.equal(got.nan_to_num(nan=123.0), values.to(dtype).expand(-1, 37).nan_to_num(nan=123.0))


def epilogue_of_operands(acc: torch.Tensor, *x: torch.Tensor) -> torch.Tensor:
    row, column, full, scalar, half, double, mask = x
    return torch.where(mask, torch.relu(acc * column + row) + full * scalar - half, 0.5) + double


@on_each_isa
@pytest.mark.parametrize("op", ["mm", "baddbmm"])
def test_operands_of_an_epilogue_broadcast(arch: str, op: str) -> None:
    batch = (3,) if op == "baddbmm" else ()
    m, n, k = 29, 45, 50
    extra = (
        torch.randn(n), torch.randn(*batch, m, 1), torch.randn(n, m).t(), torch.tensor(1.5), torch.randn(1, n).half(),
        torch.randn(*batch, 1, n).double(), torch.rand(m, n) > 0.3,
    )  # fmt: skip
    graph = trace(epilogue_of_operands, torch.float32, extra)
    problem = Problem(
        op=op, a=Layout.contiguous((*batch, m, k), torch.float32), b=Layout.contiguous((*batch, k, n), torch.float32),
        out=Layout.contiguous((*batch, m, n), torch.float32), inp=Layout.contiguous((m, 1), torch.float32) if batch else None,
        alpha="general" if batch else "one", beta="general" if batch else "zero", epilogue=graph, device_type="cpu",
    )  # fmt: skip
    verdict = Verifier(problem, CPU)
    choice = choice_for(problem, arch)
    assert (found := verdict.check(choice, choice.build())).status == Status.OK, found.reason
    x = random_operands(dataclasses.replace(problem, epilogue=None), CPU, seed=3)
    got = call(problem, arch, x.a, x.b, inp=x.inp, alpha=x.alpha, beta=x.beta, extra=extra)
    exact = x.alpha * (x.a.double() @ x.b.double()) + (x.beta * x.inp.double() if x.inp is not None else 0)
    expected = epilogue_of_operands(exact, *(e if e.dtype == torch.bool else e.double() for e in extra))
    torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=1e-5)


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
    a, b, inp = torch.full((20, 30), NAN), torch.ones(30, 40), torch.full((20, 40), 3.0)
    problem = Problem.addmm(20, 40, 30, dtype=torch.float32, layout="nn", bias="mn", alpha=0, beta=2, device_type="cpu")
    assert torch.equal(call(problem, arch, a, b, inp=inp, alpha=0.0, beta=2.0), torch.full((20, 40), 6.0))


@on_each_isa
def test_with_beta_zero_inp_is_not_read(arch: str) -> None:
    a, b, inp = torch.ones(20, 30), torch.ones(30, 40), torch.full((20, 40), NAN)
    problem = Problem.addmm(20, 40, 30, dtype=torch.float32, layout="nn", bias="mn", alpha=2, beta=0, device_type="cpu")
    assert torch.equal(call(problem, arch, a, b, inp=inp, alpha=2.0, beta=0.0), torch.full((20, 40), 60.0))


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
    monkeypatch.setattr("gemmtune.templates.cpp.plan._US_PER_THREAD", 1e-6)
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
    """The OpenMP runtime's threads do not survive a fork; plain threads take their place."""
    monkeypatch.setattr("gemmtune.templates.cpp.plan._US_PER_THREAD", 1e-6)
    torch.set_num_threads(2)
    problem = Problem.mm(200, 200, 200, dtype=torch.float32, device_type="cpu")
    x = random_operands(problem, CPU, seed=8)
    kernel = choice_for(problem, HERE[-1]).build()
    expected, got = torch.empty(200, 200), torch.empty(200, 200)
    kernel.run(expected, x.a, x.b, None, 1.0, 0.0, ())
    child = os.fork()
    if child == 0:
        kernel.run(got, x.a, x.b, None, 1.0, 0.0, ())
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


def test_kernels_of_a_problem_may_be_called_from_several_threads_at_once() -> None:
    problem = Problem.mm(64, 96, 80, dtype=torch.float32, device_type="cpu")
    kernel: Kernel = choice_for(problem, HERE[-1]).build()
    inputs = [random_operands(problem, CPU, seed=i) for i in range(4)]
    outs = [torch.empty(64, 96) for _ in inputs]

    def work(i: int) -> None:
        for _ in range(50):
            kernel.run(outs[i], inputs[i].a, inputs[i].b, None, 1.0, 0.0, ())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for out, x in zip(outs, inputs, strict=True):
        torch.testing.assert_close(out, x.a @ x.b, atol=1e-4, rtol=1e-5)


def test_device_is_detected_with_an_architecture_that_has_kernels() -> None:
    device: DeviceInfo = detect("cpu")
    assert device.arch in HERE
    assert BACKEND.enumerate(Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cpu"), device, settings.current()).choices
