"""Verifier on a GPU: torch's own operations pass, broken results are found, inputs in device memory are watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from broken_kernels import choice_of, claims_of
from quantized_kernels import on_sums, on_terms

import gemmtune
from gemmtune import settings
from gemmtune.backends.aten import BACKEND
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.problem import Problem, precision_of
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("size", [(1, 4096, 4096), (500, 501, 499), (128, 128, 65536)], ids=str)
def test_torch_passes(cuda: torch.device, size: tuple[int, int, int], layout: str, dtype: torch.dtype) -> None:
    problem = Problem.mm(*size, dtype=dtype, layout=layout, device_type="cuda", precision=precision_of(dtype, "cuda"))
    verifier = Verifier(problem, cuda)
    for choice in BACKEND.enumerate(problem, detect(cuda), Settings()).choices:
        result = verifier.check(choice, choice.build())
        assert result.status == Status.OK, result.reason


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", ["n", "m1", "mn"])
def test_torch_addmm_passes(cuda: torch.device, bias: str, dtype: torch.dtype) -> None:
    problem = Problem.addmm(
        300, 200, 1000, dtype=dtype, bias=bias, alpha=2, beta=0.5, device_type="cuda", precision=precision_of(dtype, "cuda")
    )  # type: ignore[arg-type]
    verifier = Verifier(problem, cuda)
    for choice in BACKEND.enumerate(problem, detect(cuda), Settings()).choices:
        result = verifier.check(choice, choice.build())
        assert result.status == Status.OK, result.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_choices_pass_on_views_with_large_gaps(cuda: torch.device, op: str, dtype: torch.dtype, own_store: object) -> None:
    """All operands of a view share one buffer while kernels still run: no call may see those of another."""
    h, w = torch.randn(4, 4096, 512, device=cuda, dtype=dtype), torch.randn(512, 64, device=cuda, dtype=dtype)
    operands = (h[:, -1], w) if op == "mm" else (h[:, -16:, :256], w[:256].expand(4, 256, 64))
    with settings.patch(tune="force", tune_in_subprocess=False):
        [found] = gemmtune.tune(op, *operands, progress=False)
    wrong = [(outcome.name, outcome.reason) for outcome in found.outcomes if outcome.status == Status.WRONG_RESULT]
    assert not wrong
    assert any(outcome.status == Status.OK for outcome in found.outcomes)


F8 = torch.float8_e4m3fn
QUANTIZED = {
    "int_mm": Problem.int_mm(300, 200, 1000, device_type="cuda"),
    "int8": Problem.mixed_mm(300, 200, 1000, scales="column", zeros=True, device_type="cuda"),
    "int4 groups": Problem.mixed_mm(300, 200, 1000, encoding="int4", scales="group_64", device_type="cuda"),
    "uint4 groups": Problem.mixed_mm(
        1, 4096, 4096, dtype=torch.bfloat16, encoding="uint4", scales="group_128", zeros=True, device_type="cuda"
    ),
    "e4m3 weights": Problem.mixed_mm(33, 200, 1000, dtype_b=F8, scales="tensor", device_type="cuda"),
    "rows": Problem.scaled_mm(304, 208, 1008, scales="row", device_type="cuda"),
    "blocks": Problem.scaled_mm(304, 208, 1008, scales="block_1x128", device_type="cuda"),
    "square blocks": Problem.scaled_mm(512, 256, 2048, scales="block_128x128", out_dtype=torch.float32, device_type="cuda"),
}


@pytest.mark.parametrize("problem", QUANTIZED.values(), ids=QUANTIZED)
def test_torch_passes_on_quantized_operations(cuda: torch.device, problem: Problem) -> None:
    verifier = Verifier(problem, cuda)
    offers = BACKEND.enumerate(problem, detect(cuda), Settings())
    assert offers.choices
    for choice in offers.choices:
        result = verifier.check(choice, choice.build())
        assert result.status == Status.OK, result.reason


@pytest.mark.parametrize("problem", QUANTIZED.values(), ids=QUANTIZED)
def test_right_and_wrong_kernels_of_quantized_operations_are_told_apart(cuda: torch.device, problem: Problem) -> None:
    verifier = Verifier(problem, cuda)
    claims = claims_of(problem.dtype)
    if problem.op == "int_mm":
        claims = claims_of(problem.dtype, accumulate=torch.int32, partials=torch.int32)
    right = on_terms(problem, in_float64)
    steps = {"mixed_mm": 32, "scaled_mm": 128}.get(problem.op)
    wrong = [on_terms(problem, lambda a, b: in_float64(a[:, :-1], b[:-1]))]
    if steps:
        result = verifier.check(choice := choice_of(problem, on_sums(problem, in_float64, steps=steps), claims), choice.build())
        assert result.status == Status.OK, result.reason
        wrong.append(on_terms(problem, in_float64, change=lambda a, b, z: (a, b.square(), z)))
    if any(problem.scale_block(name)[0] < problem.k for name in ("scale_b",) if problem.scale_b):  # type: ignore[arg-type]
        wrong.append(on_terms(problem, in_float64, change=lambda a, b, z: (a, b.roll(128, 0), z)))
    for run, status in ((right, Status.OK), *((run, Status.WRONG_RESULT) for run in wrong)):
        choice = choice_of(problem, run, claims)
        result = verifier.check(choice, choice.build())
        assert result.status == status, result.reason


def in_float64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def test_broken_results_are_found(cuda: torch.device) -> None:
    problem = Problem.mm(300, 200, 1000, dtype=torch.bfloat16, device_type="cuda")

    def wrong(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        torch.mm(a, b, out=out)
        out[123, 45] += 1

    def partial(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        torch.mm(a[:-1], b, out=out[:-1])

    def modifying(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        torch.mm(a, b, out=out)
        b[3, 4] += 1

    verifier = Verifier(problem, cuda)
    reasons = []
    for run in (wrong, partial, modifying, torch.mm):
        choice = choice_of(problem, run if run is not torch.mm else lambda out, a, b, *_: torch.mm(a, b, out=out))
        reasons.append(verifier.check(choice, choice.build()).reason)
    assert "out[123, 45]" in reasons[0]
    assert "out[299, " in reasons[1]
    assert "was not written" in reasons[1]
    assert reasons[2].startswith("the call changed its input: b of ")
    assert reasons[3] == ""


@pytest.mark.parametrize(
    "problem",
    [
        Problem.mm(256, 256, 512, dtype=torch.bfloat16, device_type="cuda"),
        Problem.mixed_mm(256, 256, 512, encoding="uint4", scales="group_32", zeros=True, device_type="cuda"),
    ],
    ids=lambda problem: problem.op,
)
def test_the_host_waits_once(cuda: torch.device, problem: Problem) -> None:
    """With waiting forbidden, everything up to the final reading of the findings must go through."""
    verifier = Verifier(problem, cuda)

    def run(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
        if problem.op == "mm":
            torch.mm(a, b, out=out)
        else:
            scale, zero = (x.repeat_interleave(32, dim=0, output_size=512) for x in rest[-1])
            numbers = torch.stack([b & 15, b >> 4], dim=1).flatten(0, 1)
            torch.mm(a, (numbers.to(a.dtype) - zero) * scale, out=out)

    choice = choice_of(problem, run, claims_of(problem.dtype, weights=problem.dtype))
    kernel = choice.build()
    verifier.check(choice, kernel)  # makes the probe for these claims
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz") as caught:
            verifier.check(choice, kernel)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert caught.traceback[-1].name == "_verification"
