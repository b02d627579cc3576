"""Fused epilogues of the cpp backend for every instruction set of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from cpp_kernels import CPU, HERE, as_shipped, call, choice_for, needs_compiler, on_each_isa
from rotation import rotated

from gemmtune.choice import Status
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Layout, Problem
from gemmtune.problem.epilogue import evaluate
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier

pytestmark = [needs_compiler, pytest.mark.rotates(8)]
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
    """Return one epilogue for all functions: column j uses the function number ``which[j]``."""

    def epilogue(acc: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        result = acc
        for i, function in enumerate(functions):
            result = torch.where(which == float(i), function(acc), result)
        return result

    return epilogue


def apply_by_column(
    arch: str, functions: list[Callable[[torch.Tensor], torch.Tensor]], values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's results [len(values), len(functions)], and torch's on the same accumulators in eager mode."""
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


@pytest.mark.turn(2, 8)
@as_shipped
@on_each_isa
def test_functions_of_an_epilogue(arch: str) -> None:
    values = torch.tensor(SPECIAL + GRID, dtype=torch.float32)
    got, torchs = apply_by_column(arch, list(UNARY.values()), values)
    for j, (name, function) in enumerate(UNARY.items()):
        exact = function(values.double())
        # Torch itself is not the reference in float32, because its gelu(inf) is NaN.
        assert torch.equal(got[:, j].isnan(), exact.isnan()), name
        assert torch.equal(got[:, j].isinf(), exact.float().isinf()), name
        finite = exact.float().isfinite()
        error = (got[:, j].double() - exact)[finite].abs()
        # gelu and arithmetic cancel: the kernel may lose the digits that torch loses.
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


@pytest.mark.turn(5, 8)
@as_shipped
@on_each_isa
def test_16_bit_nodes_round_as_torch_does(arch: str) -> None:
    values = torch.cat([torch.tensor(SPECIAL + GRID), torch.randn(200, generator=torch.Generator().manual_seed(1)) * 100])
    cases = {(name, dtype): (f, dtype) for name, f in ROUNDED.items() for dtype in (torch.float16, torch.bfloat16)}
    functions = [lambda x, f=f, dtype=dtype: f(x.to(dtype)).to(torch.float32) for f, dtype in cases.values()]
    got, torchs = apply_by_column(arch, functions, values)
    for j, case in enumerate(cases):
        differ = ~((got[:, j] == torchs[:, j]) | (got[:, j].isnan() & torchs[:, j].isnan()))
        assert not differ.any(), (case, values[differ][:3], got[differ, j][:3], torchs[differ, j][:3])


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        *((HERE[-1], dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
        *rotated([(arch, dtype) for arch in HERE[:-1] for dtype in (torch.float16, torch.bfloat16)], 3, "rounded once"),
    ],
    ids=str,
)
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
