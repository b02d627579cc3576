"""Values of the Triton template, computed by Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gemmtune.backends.triton.configs import Config
from gemmtune.choice import Status
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace

pytest.importorskip("triton", reason="the interpreter is Triton's")

import triton_jobs
from interpreter import Run

pytestmark = pytest.mark.rotates(9)

PLAIN = Config(block_m=16, block_n=32, block_k=16, stages=1, warps=1)
SPLIT = Config(block_m=16, block_n=16, block_k=16, stages=1, warps=1, split_k=3)
GROUPED = Config(block_m=16, block_n=16, block_k=32, stages=1, warps=1, group_m=2)
CONFIGS = [PLAIN, SPLIT]


def _name(value: object) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=_name)
def test_mm(interpreted: Run, dtype: torch.dtype, layout: str) -> None:
    problem = Problem.mm(33, 37, 75, dtype=dtype, layout=layout, device_type="cpu")
    assert max(interpreted(triton_jobs.errors, problem, CONFIGS)) <= 1


@pytest.mark.parametrize("splits", [2, 7, 9])
def test_splits_in_one_and_two_levels(interpreted: Run, splits: int) -> None:
    config = replace(SPLIT, split_k=splits)
    problem = Problem.bmm(2, 20, 17, 16 * splits - 3, dtype=torch.float32, device_type="cpu")
    assert max(interpreted(triton_jobs.errors, problem, [config])) <= 1


VERIFIED = {
    "fp16": Problem.mm(17, 18, 33, dtype=torch.float16, device_type="cpu"),
    "bf16-bias": Problem.addmm(17, 18, 33, dtype=torch.bfloat16, bias="m1", alpha=2, beta=0.5, device_type="cpu"),
    "fp64-tanh": replace(
        Problem.mm(17, 18, 33, dtype=torch.float64, device_type="cpu"), epilogue=trace(torch.tanh, torch.float64, [])
    ),
}


@pytest.mark.parametrize("name", VERIFIED)
def test_verification_accepts_the_kernels_with_their_own_claims(interpreted: Run, name: str) -> None:
    found = interpreted(triton_jobs.verdicts, VERIFIED[name], CONFIGS)
    assert [verdict.status for verdict in found] == [Status.OK, Status.OK], [verdict.reason for verdict in found]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 33, 16), (16, 32, 16), (17, 1, 33), (64, 64, 48), (100, 3, 2)], ids=str)
def test_mm_at_the_edges_of_tiles(interpreted: Run, shape: tuple[int, int, int]) -> None:
    problem = Problem.mm(*shape, dtype=torch.float32, layout="nn", device_type="cpu")
    assert max(interpreted(triton_jobs.errors, problem, [PLAIN, GROUPED])) <= 1


def test_an_empty_sum_is_zero_and_adds_the_bias(interpreted: Run) -> None:
    for problem in (
        Problem.mm(5, 7, 0, dtype=torch.float32, device_type="cpu"),
        Problem.addmm(5, 7, 0, dtype=torch.float32, bias="n", beta=0.5, device_type="cpu"),
    ):
        assert max(interpreted(triton_jobs.errors, problem, [PLAIN])) <= 1


@pytest.mark.parametrize("bias", ["n", "mn", "m1", "1n", "scalar"])
@pytest.mark.parametrize("op", ["addmm", "baddbmm"])
def test_bias_shapes(interpreted: Run, op: str, bias: str) -> None:
    shape = (2, 17, 20, 33) if op == "baddbmm" else (17, 20, 33)
    problem = getattr(Problem, op)(*shape, dtype=torch.float16, bias=bias, alpha=2, beta=0.5, device_type="cpu")
    assert max(interpreted(triton_jobs.errors, problem, CONFIGS)) <= 1


@pytest.mark.parametrize("alpha", [0, 1, 2.5])
@pytest.mark.parametrize("beta", [0, 1, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=_name)
def test_alpha_and_beta(interpreted: Run, alpha: float, beta: float, dtype: torch.dtype) -> None:
    problem = Problem.addmm(17, 18, 19, dtype=dtype, alpha=alpha, beta=beta, device_type="cpu")
    assert max(interpreted(triton_jobs.errors, problem, [PLAIN])) <= 1


def test_beta_zero_ignores_nan(interpreted: Run) -> None:
    problem = Problem.addmm(17, 18, 19, dtype=torch.float32, beta=0, device_type="cpu")
    assert max(interpreted(triton_jobs.errors, problem, CONFIGS, nan_inp=True)) <= 1


def _layout(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Layout:
    return Layout(size=size, stride=stride, dtype=torch.float32, offset=offset)


LAYOUTS = {
    "padded": (_layout((17, 20), (24, 1)), _layout((20, 18), (19, 1), 3)),
    "every-second": (_layout((17, 20), (80, 2)), _layout((20, 18), (2, 41))),
    "expanded-rows": (_layout((17, 20), (0, 1)), _layout((20, 18), (18, 1))),
    "expanded-columns": (_layout((17, 20), (20, 1)), _layout((20, 18), (1, 0))),
    "all-equal": (_layout((17, 20), (0, 0)), _layout((20, 18), (18, 1))),
    "overlapping": (_layout((17, 20), (3, 1)), _layout((20, 18), (1, 5))),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_operands(interpreted: Run, name: str) -> None:
    a, b = LAYOUTS[name]
    problem = Problem(op="mm", a=a, b=b, out=Layout.contiguous((17, 18), torch.float32))
    assert max(interpreted(triton_jobs.errors, problem, CONFIGS)) <= 1


@pytest.mark.parametrize("stride", [(1, 17), (23, 1), (50, 2)], ids=str)
def test_strided_out(interpreted: Run, stride: tuple[int, int]) -> None:
    problem = replace(Problem.mm(17, 18, 20, dtype=torch.float32, device_type="cpu"), out=_layout((17, 18), stride))
    assert max(interpreted(triton_jobs.errors, problem, CONFIGS)) <= 1


@pytest.mark.parametrize("strides", [(0, 400), (360, 0), (0, 0), (400, 500)], ids=str)
def test_batch_strides(interpreted: Run, strides: tuple[int, int]) -> None:
    problem = Problem(
        op="bmm",
        a=_layout((3, 17, 20), (strides[0], 20, 1)),
        b=_layout((3, 20, 18), (strides[1], 1, 20)),
        out=Layout.contiguous((3, 17, 18), torch.float32),
    )
    assert max(interpreted(triton_jobs.errors, problem, CONFIGS)) <= 1


EPILOGUES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "scale": (lambda acc: acc * 3.3 - 1.234, ()),
    "relu-of-scale": (lambda acc: torch.relu(acc * 3.3 - 1.234), ()),
    "relu6": (torch.nn.functional.relu6, ()),
    "silu": (torch.nn.functional.silu, ()),
    "gelu": (torch.nn.functional.gelu, ()),
    "gelu-tanh": (lambda acc: torch.nn.functional.gelu(acc, approximate="tanh"), ()),
    "sigmoid-tanh": (lambda acc: torch.sigmoid(acc) + torch.tanh(acc), ()),
    "exp-erf": (lambda acc: torch.exp(-torch.abs(acc)) * torch.erf(acc), ()),
    "roots": (lambda acc: torch.sqrt(torch.abs(acc) + 1) + torch.rsqrt(torch.abs(acc) + 1), ()),
    "clamp": (lambda acc: torch.clamp(acc, -0.5, 1.5), ()),
    "min-max": (lambda acc, x: torch.minimum(torch.maximum(acc, x), x + 1), ((18,),)),
    "where": (lambda acc, x: torch.where(acc > x, acc, x / 3), ((17, 1),)),
    "column": (lambda acc, x: acc * x, ((17, 1),)),
    "row-and-block": (lambda acc, x, y: acc / (torch.abs(x) + 2) + y, ((18,), (17, 18))),
    "scalar": (lambda acc, x: acc + x, ((),)),
}


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=_name)
def test_epilogues(interpreted: Run, name: str, dtype: torch.dtype) -> None:
    function, sizes = EPILOGUES[name]
    extra = [torch.zeros(size, dtype=dtype) for size in sizes]
    problem = replace(Problem.mm(17, 18, 20, dtype=dtype, device_type="cpu"), epilogue=trace(function, torch.float32, extra))
    assert max(interpreted(triton_jobs.errors, problem, [PLAIN])) <= 1


def _keep(acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x, acc, acc * 2)


def _scale(acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (acc * x).to(torch.float32)


@pytest.mark.parametrize(
    ("function", "dtype"), [(_keep, torch.bool), (_scale, torch.float64), (_scale, torch.float16)], ids=["bool", "fp64", "fp16"]
)
def test_epilogue_operands_of_other_dtypes(interpreted: Run, function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x = (torch.arange(18) % 3).to(dtype)
    problem = replace(
        Problem.mm(16, 18, 16, dtype=torch.float32, layout="nn", device_type="cpu"), epilogue=trace(function, torch.float32, [x])
    )
    b = torch.randn(16, 18, generator=torch.Generator().manual_seed(0))
    assert torch.equal(interpreted(triton_jobs.result, problem, PLAIN, torch.eye(16), b, (x,)), function(b, x))


def test_the_epilogue_comes_after_the_last_partial_sum(interpreted: Run) -> None:
    problem = replace(Problem.mm(17, 18, 64, dtype=torch.float32, device_type="cpu"), epilogue=trace(torch.relu, torch.float32, []))
    assert max(interpreted(triton_jobs.errors, problem, [SPLIT])) <= 1


def test_casts_round_to_nearest_even(interpreted: Run) -> None:
    def cast(acc: torch.Tensor) -> torch.Tensor:
        return (acc.to(torch.bfloat16) * 1.1).to(torch.float32)

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, 16, generator=generator)
    problem = replace(
        Problem.mm(16, 16, 16, dtype=torch.float32, layout="nn", device_type="cpu"), epilogue=trace(cast, torch.float32, [])
    )
    got = interpreted(triton_jobs.result, problem, PLAIN, a, torch.eye(16), ())
    assert torch.equal(got, cast(a))


@pytest.mark.parametrize(
    "function",
    [
        torch.relu,
        torch.nn.functional.relu6,
        lambda acc: torch.clamp(acc, -1, 1),
        lambda acc: torch.maximum(acc, acc * 0),
        torch.tanh,
    ],
    ids=["relu", "relu6", "clamp", "maximum", "tanh"],
)
def test_nan_and_infinities_propagate_as_in_torch(interpreted: Run, function: Callable[..., torch.Tensor]) -> None:
    a = torch.zeros(16, 16)
    a[0, 0], a[1, 0], a[2, 0] = torch.nan, torch.inf, -torch.inf
    b = torch.zeros(16, 16)
    b[0] = 1
    problem = replace(
        Problem.mm(16, 16, 16, dtype=torch.float32, layout="nn", device_type="cpu"), epilogue=trace(function, torch.float32, [])
    )
    got = interpreted(triton_jobs.result, problem, PLAIN, a, b, ())
    torch.testing.assert_close(got, function(a @ b), equal_nan=True, rtol=0, atol=0)
