"""The aten backend's choices are right in every layout, and claim no more than torch keeps."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from gemmtune.backends.aten import BACKEND, AtenChoice
from gemmtune.choice import Choice, Scalars, Tensors
from gemmtune.device import detect, preset
from gemmtune.problem import Layout, Problem
from gemmtune.problem.dtypes import DTYPES
from gemmtune.problem.epilogue import Epilogue
from gemmtune.problem.problem import scalar_class
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings

CPU = detect("cpu")
NAN = float("nan")
SHAPES = [(5, 7, 6), (33, 65, 1), (1, 64, 128), (64, 48, 96)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def offered(problem: Problem, device: str | None = None) -> list[AtenChoice]:
    return [
        c for c in BACKEND.enumerate(problem, preset(device) if device else CPU, Settings()).choices if isinstance(c, AtenChoice)
    ]


def problem_of(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    inp: torch.Tensor | None = None,
    alpha: float = 1,
    beta: float = 0,
    epilogue: Epilogue | None = None,
) -> Problem:
    return Problem(
        op=op,  # type: ignore[arg-type]
        a=Layout.of(a),
        b=Layout.of(b),
        out=Layout.of(out),
        inp=None if inp is None else Layout.of(inp),
        alpha=scalar_class(alpha),
        beta=scalar_class(beta),
        epilogue=epilogue,
    )


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layouts_of(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The values of x in different memory layouts."""
    yield "row", x.contiguous()
    yield "column", x.mT.contiguous().mT
    for name, view in outputs(x.shape, x.dtype):
        yield name, view.copy_(x)


def outputs(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """NaN-filled tensors of a shape in different memory layouts."""
    *lead, m, n = shape
    yield "row", torch.full(shape, NAN, dtype=dtype)
    yield "column", torch.full((*lead, n, m), NAN, dtype=dtype).mT
    yield "padded", torch.full((*lead, m, n + 3), NAN, dtype=dtype)[..., :n]
    yield "every second", torch.full((*lead, m, 2 * n), NAN, dtype=dtype)[..., ::2]
    flat = torch.full((math.prod(shape) + 1,), NAN, dtype=dtype)
    yield "offset", flat[1:].view(shape)


def bound(problem: Problem, choice: Choice, exact: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Rounding to the output's dtype, and K + 2 additions in the claimed accumulator; twice over."""
    info, accumulate = DTYPES[problem.out.dtype], DTYPES[choice.claims.accumulate]
    return 2 * (info.unit_roundoff * exact.abs() + (problem.k + 2) * accumulate.unit_roundoff * magnitude) + info.smallest_normal


def given(a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None, alpha: float, beta: float) -> tuple[Tensors, Scalars]:
    """The arguments of a kernel."""
    return ((a, b), ()) if inp is None else ((a, b, inp), (alpha, beta))


def check(
    choice: Choice, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, inp: torch.Tensor | None, alpha: float, beta: float
) -> None:
    """Run both ways and compare with float64 (with float64 inputs: with the sum in another order)."""
    kernel = choice.build()
    exact = (
        alpha * (a.double()[..., None] * b.double()[..., None, :, :]).sum(-2)
        if a.numel() < 10**5
        else alpha * (a.double() @ b.double())
    )
    magnitude = abs(alpha) * (a.double().abs() @ b.double().abs())
    if inp is not None and beta != 0:
        exact, magnitude = exact + beta * inp.double(), magnitude + abs(beta) * inp.double().abs()
    place = (out.data_ptr(), out.stride())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it resizes out
        kernel.run(out, *given(a, b, inp, alpha, beta))
    assert (out.data_ptr(), out.stride()) == place
    results = [out]
    if kernel.run_new is not None:
        fresh = kernel.run_new(*given(a, b, inp, alpha, beta))
        assert Layout.of(fresh) == choice.problem.out
        results.append(fresh)
    limit = bound(choice.problem, choice, exact, magnitude)
    for result in results:
        excess = ((result.double() - exact).abs() - limit).max().item() if result.numel() else 0
        assert excess <= 0, f"{choice.name}: error exceeds the bound by {excess}, for {choice.problem}"


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_products_in_every_layout(op: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    lead = (3,) if op == "bmm" else ()
    for (_, a), (_, b), (_, out) in zip(
        layouts_of(random((*lead, m, k), dtype, 1)),
        reversed(list(layouts_of(random((*lead, k, n), dtype, 2)))),
        outputs((*lead, m, n), dtype),
        strict=False,
    ):
        (choice,) = offered(problem_of(op, a, b, out))
        check(choice, a, b, out, None, 1, 0)


@dtypes
@pytest.mark.parametrize("bias", ["n", "mn", "m1", "1n", "scalar", "row repeated"])
@pytest.mark.parametrize("op", ["addmm", "baddbmm"])
def test_added_operands(op: str, bias: str, dtype: torch.dtype) -> None:
    m, n, k = 17, 12, 33
    lead = (3,) if op == "baddbmm" else ()
    shape = {"n": (n,), "mn": (*lead, m, n), "m1": (m, 1), "1n": (1, n), "scalar": (), "row repeated": (n,)}[bias]
    a, b = random((*lead, m, k), dtype, 1), random((*lead, k, n), dtype, 2)
    for alpha, beta in itertools.product((1, 1.25), (1, 0, -0.75)):
        inp = random(shape, dtype, 3) if beta else torch.full(shape, NAN, dtype=dtype)
        if bias == "row repeated":
            inp = inp.expand(m, n)
        for _, out in outputs((*lead, m, n), dtype):
            (choice,) = offered(problem_of(op, a, b, out, inp, alpha, beta))
            check(choice, a, b, out, inp, alpha, beta)


@dtypes
@pytest.mark.parametrize("bias", ["vector", "matrix"])
@pytest.mark.parametrize("shape", [(20,), (1, 20)], ids=str)
def test_both_ways_to_pass_a_bias(shape: tuple[int, ...], bias: str, dtype: torch.dtype) -> None:
    """Check the GPU's two forms on a CPU, where the views of inp are the same."""
    a, b, inp = random((33, 65), dtype, 1), random((65, 20), dtype, 2), random(shape, dtype, 3)
    out = torch.full((33, 20), NAN, dtype=dtype)
    problem = problem_of("addmm", a, b, out, inp, 1.25, -0.75)
    offers = BACKEND.enumerate(problem, preset("sm80"), Settings())
    choice = next(c for c in offers.choices if isinstance(c, AtenChoice) and c.kwargs["bias"] == bias)
    check(choice, a, b, out, inp, 1.25, -0.75)


@dtypes
@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "baddbmm"])
def test_k_zero_gives_beta_inp_or_zeros(op: str, dtype: torch.dtype) -> None:
    lead = (2,) if op in ("bmm", "baddbmm") else ()
    a, b = torch.empty((*lead, 3, 0), dtype=dtype), torch.empty((*lead, 0, 4), dtype=dtype)
    for beta in (0.5, 0):
        inp = random((4,), dtype, 1) if "add" in op else None
        if inp is not None and beta == 0:
            inp.fill_(NAN)
        for _, out in outputs((*lead, 3, 4), dtype):
            (choice,) = offered(problem_of(op, a, b, out, inp, 1, beta if inp is not None else 0))
            check(choice, a, b, out, inp, 1, beta)


@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_stride_0_and_overlapping_inputs(op: str) -> None:
    lead = (3,) if op == "bmm" else ()
    buffer = random((200,), torch.float32, 1)
    for a in (
        buffer[:20].expand(*lead, 7, 20),
        buffer.as_strided((*lead, 7, 20), (5,) * len(lead) + (3, 1)),
        buffer[:7, None].expand(*lead, 7, 20),
    ):
        b = random((20, 9), torch.float32, 2).expand(*lead, 20, 9)
        out = torch.full((*lead, 7, 9), NAN)
        (choice,) = offered(problem_of(op, a, b, out))
        check(choice, a, b, out, None, 1, 0)


EPILOGUES: dict[str, Callable[..., torch.Tensor]] = {
    "relu": lambda acc, s: torch.relu(acc * s - 1.234),
    "identity": lambda acc, s: acc,
    "gelu": lambda acc, s: F.gelu(acc + s),
    "uses acc twice": lambda acc, s: acc * torch.sigmoid(acc) + s,
    "where": lambda acc, s: torch.where(acc > s, acc, s),
}


@dtypes
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogue_matches_eager_torch(name: str, dtype: torch.dtype) -> None:
    function = EPILOGUES[name]
    a, b, s = random((33, 65), dtype, 1), random((65, 20), dtype, 2), random((20,), dtype, 3)
    epilogue = trace(function, torch.float64 if dtype == torch.float64 else torch.float32, [s])
    expected = function(a @ b, s)
    for _, out in outputs((33, 20), dtype):
        (choice,) = offered(problem_of("mm", a, b, out, epilogue=epilogue))
        assert (choice.name, choice.baseline, choice.claims.epilogue_input) == ("aten:mm+eager", True, dtype)
        kernel = choice.build()
        kernel.run(out, (a, b, s), ())
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
        if kernel.run_new is not None:
            torch.testing.assert_close(kernel.run_new((a, b, s), ()), out, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "op"),
    [
        (torch.bfloat16, torch.float32, "mm"),
        (torch.float16, torch.float32, "addmm"),
        (torch.float32, torch.float64, "bmm"),
        (torch.float16, torch.float32, "baddbmm"),
    ],
    ids=str,
)
def test_a_wider_result_is_computed_in_the_wider_dtype(dtype: torch.dtype, out_dtype: torch.dtype, op: str) -> None:
    lead = (2,) if op in ("bmm", "baddbmm") else ()
    a, b = random((*lead, 9, 65), dtype, 1), random((*lead, 65, 7), dtype, 2)
    inp = random((7,), dtype, 3) if "add" in op else None
    alpha, beta = (1.25, -0.75) if inp is not None else (1, 0)
    epilogue = trace(lambda acc: (acc * 2).to(out_dtype), torch.float32, [])
    out = torch.full((*lead, 9, 7), NAN, dtype=out_dtype)
    (choice,) = offered(problem_of(op, a, b, out, inp, alpha, beta, epilogue))
    assert choice.claims.epilogue_input == out_dtype
    choice.build().run(out, *given(a, b, inp, alpha, beta))
    exact = 2 * (alpha * (a.double() @ b.double()) + (0 if inp is None else beta * inp.double()))
    assert ((out.double() - exact).abs().max() / exact.abs().max()).item() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_narrower_result_is_rounded_at_the_end(dtype: torch.dtype) -> None:
    a, b = random((9, 65), torch.float32, 1), random((65, 7), torch.float32, 2)
    epilogue = trace(lambda acc: (acc * 2).to(torch.float16), torch.float32, [])
    out = torch.full((9, 7), NAN, dtype=torch.float16)
    (choice,) = offered(problem_of("mm", a, b, out, epilogue=epilogue))
    choice.build().run(out, (a, b), ())
    assert choice.claims.epilogue_input == torch.float32
    assert torch.equal(out, (2 * (a @ b)).half())


@dtypes
@pytest.mark.parametrize("shape", [(5, 7, 6), (64, 64, 64), (1, 512, 512), (256, 256, 2048)], ids=str)
def test_cpu_results_obey_the_claims(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    (choice,) = offered(Problem.mm(m, n, k, dtype=dtype, layout="nn", device_type="cpu"))
    run_new = choice.build().run_new
    assert run_new is not None
    info = DTYPES[dtype]
    one_hot, row = torch.zeros(m, k, dtype=dtype), torch.zeros(k, n, dtype=dtype)
    if not choice.claims.flush_subnormals:
        one_hot[:, 0], row[0] = 3 * info.smallest_subnormal, 1
        assert (run_new((one_hot, row), ()) == 3 * info.smallest_subnormal).all()
        one_hot[:, 0], row[0] = info.smallest_normal, 0.5
        assert (run_new((one_hot, row), ()) == 0.5 * info.smallest_normal).all()
    wide = torch.ones(m, k, dtype=dtype)
    wide[:, 0] = info.exact_integer if dtype.itemsize == 2 else 1
    exact = torch.tensor(wide[0].double().sum().item(), dtype=torch.float64).to(dtype)
    assert (run_new((wide, torch.ones(k, n, dtype=dtype)), ()) == exact).all()


def test_repeated_runs_give_the_same_bits() -> None:
    problem = Problem.mm(257, 129, 1000, dtype=torch.float32, layout="nn", device_type="cpu")
    (choice,) = offered(problem)
    assert choice.claims.deterministic
    a, b, out = random((257, 1000), torch.float32, 1), random((1000, 129), torch.float32, 2), torch.empty(257, 129)
    kernel = choice.build()
    kernel.run(out, (a, b), ())
    first = out.clone()
    for _ in range(20):
        out.fill_(NAN)
        kernel.run(out, (a, b), ())
        assert torch.equal(out, first)
