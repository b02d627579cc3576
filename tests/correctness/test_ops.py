"""The public operations on the CPU: values, out=, zero sizes, scalars, what goes to torch."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.dispatch import checks
from gemmtune.dispatch.ready import forget_plans

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
OPS = ["mm", "addmm", "bmm", "baddbmm"]


@pytest.fixture(autouse=True)
def quick(own_store):
    """Small searches: these tests are about the operations, not about the kernels."""
    forget_plans()
    with settings.patch(search="quick", backends=("aten", "cpp")):
        yield


def operands(op: str, dtype: torch.dtype = torch.float32, m: int = 17, n: int = 33, k: int = 20) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    lead = (3,) if op in ("bmm", "baddbmm") else ()
    tensors = [torch.randn(*lead, m, k, generator=g).to(dtype), torch.randn(*lead, k, n, generator=g).to(dtype)]
    return [torch.randn(*lead, m, n, generator=g).to(dtype), *tensors] if op in ("addmm", "baddbmm") else tensors


def exact(op: str, tensors: list[torch.Tensor], **scalars: float) -> torch.Tensor:
    return getattr(torch, op)(*(t.double() for t in tensors), **scalars)


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    eps = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= eps * want.abs().max()


@pytest.mark.rotates(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_values(op: str, dtype: torch.dtype):
    tensors = operands(op, dtype)
    for _ in range(2):  # the second call runs the plan of the first
        got = getattr(gemmtune, op)(*tensors)
        assert got.is_contiguous()
        assert_close(got, exact(op, tensors), dtype)


@pytest.mark.parametrize("op", OPS)
def test_out_is_filled_and_returned(op: str):
    tensors = operands(op)
    want = exact(op, tensors)
    for out in (
        torch.full(want.shape, torch.nan),
        torch.full((*want.shape[:-1], 40), torch.nan)[..., 3:36],
        torch.full(want.mT.shape, torch.nan).mT,
    ):
        assert getattr(gemmtune, op)(*tensors, out=out) is out
        assert_close(out, want, torch.float32)


@pytest.mark.rotates(8)
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2.5, 1), (1, 0), (0, 1), (-0.5, 0.75), (0, 0)])
@pytest.mark.parametrize("op", ["addmm", "baddbmm"])
def test_scalars(op: str, alpha: float, beta: float):
    tensors = operands(op)
    want = exact(op, tensors, alpha=alpha, beta=beta)
    got = getattr(gemmtune, op)(*tensors, alpha=alpha, beta=beta)
    assert (got - want).abs().max() <= 1e-4


def test_scalars_of_one_class_share_a_plan_but_not_a_value():
    tensors = operands("addmm")
    for alpha in (2.0, 3.0):
        assert_close(gemmtune.addmm(*tensors, alpha=alpha), exact("addmm", tensors, alpha=alpha), torch.float32)


@pytest.mark.parametrize("op", ["addmm", "baddbmm"])
def test_beta_zero_ignores_what_is_in_the_added_operand(op: str):
    inp, a, b = operands(op)
    got = getattr(gemmtune, op)(torch.full_like(inp, torch.nan), a, b, beta=0)
    assert not got.isnan().any()


def test_out_may_be_the_added_operand():
    inp, a, b = operands("addmm")
    want = exact("addmm", [inp, a, b], beta=0.5)
    assert gemmtune.addmm(inp, a, b, beta=0.5, out=inp) is inp
    assert_close(inp, want, torch.float32)


@pytest.mark.parametrize(
    ("begin", "shape", "stride"), [(0, (5, 8), (40, 1)), (3, (5, 8), (40, 1)), (1, (5, 8), (0, 1)), (2, (5, 8), (1, 7))]
)
def test_the_added_operand_may_be_any_view_of_the_memory_of_out(begin: int, shape: tuple[int, int], stride: tuple[int, int]):
    """It is read from a copy, which kernels find at the strides that they were made for."""
    a, b = torch.randn(5, 30), torch.randn(30, 8)
    with settings.patch(backends=("cpp",)):
        for _ in range(4):
            buffer = torch.randn(5, 40)
            inp, out = buffer.as_strided((5, 8), stride, begin), buffer[:, :8]
            want = inp.double() + a.double() @ b.double()
            assert_close(gemmtune.addmm(inp, a, b, out=out), want, torch.float32)


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (0, 0, 0)])
@pytest.mark.parametrize("op", OPS)
def test_empty_results(op: str, shape: tuple[int, int, int]):
    m, n, k = shape
    tensors = operands(op, m=m, n=n, k=k)
    assert getattr(gemmtune, op)(*tensors).shape == (*tensors[-2].shape[:-1], n)


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_sum_leaves_the_added_operand(op: str):
    tensors = operands(op, k=0)
    got = getattr(gemmtune, op)(*tensors)
    assert torch.equal(got, tensors[0] if op in ("addmm", "baddbmm") else torch.zeros_like(got))


def test_operands_of_one_layout_and_other_memory_get_their_own_result():
    a, b = operands("mm")
    c, d = torch.randn_like(a), torch.randn_like(b)
    gemmtune.mm(a, b)
    assert_close(gemmtune.mm(c, d), exact("mm", [c, d]), torch.float32)


def test_a_misaligned_view_gets_a_plan_of_its_own():
    a, b = operands("mm")
    gemmtune.mm(a, b)
    buffer = torch.empty(a.numel() + 3)
    shifted = buffer[3:].view_as(a).copy_(a)
    assert_close(gemmtune.mm(shifted, b), exact("mm", [a, b]), torch.float32)


def test_prepacked_operand():
    a, b = operands("mm")
    packed = gemmtune.prepack(b)
    for _ in range(2):
        assert_close(gemmtune.mm(a, packed), exact("mm", [a, b]), torch.float32)
    bias = torch.randn(b.shape[1])
    assert_close(gemmtune.addmm(bias, a, packed), exact("addmm", [bias, a, b]), torch.float32)


def test_a_prepacked_operand_follows_changes_in_place():
    a, b = operands("mm")
    with settings.patch(backends=("cpp",)):
        packed = gemmtune.prepack(b)
        gemmtune.mm(a, packed)
        b.mul_(2)
        assert_close(gemmtune.mm(a, packed), exact("mm", [a, b]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64], ids=str)
def test_other_dtypes_run_by_torch(dtype: torch.dtype):
    a, b = (t.mul(4).to(dtype) for t in operands("mm"))
    assert torch.equal(gemmtune.mm(a, b), torch.mm(a, b))


def test_lazily_negated_views_run_by_torch():
    a, b = operands("mm")
    negated = torch._neg_view(a)
    gemmtune.mm(a, b)
    assert_close(gemmtune.mm(negated, b), exact("mm", [-a, b]), torch.float32)


def test_autocast_casts_as_torch_does():
    a, b = operands("mm")
    gemmtune.mm(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gemmtune.mm(a, b)
        assert got.dtype == torch.mm(a, b).dtype == torch.bfloat16
        out = torch.empty(got.shape)
        for mm in (gemmtune.mm, torch.compile(gemmtune.mm, backend="eager", fullgraph=True)):
            assert_close(mm(a, b, out=out.zero_()), exact("mm", [a, b]), torch.float32)
            assert out.dtype == torch.float32, "with out= torch casts nothing"
    assert gemmtune.mm(a, b).dtype == torch.float32


def test_calls_from_several_threads():
    tensors = operands("mm", m=64, n=64, k=64)
    want = exact("mm", tensors)
    results: list[torch.Tensor] = []
    current = settings.current()

    def work() -> None:
        with settings.use(current):
            results.extend(gemmtune.mm(*tensors) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for got in results:
        assert_close(got, want, torch.float32)


def test_a_cold_call_checks_its_operands_once() -> None:
    """Count the calls of every function of the module of checks."""
    a, b = operands("mm", m=19)
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == checks.__file__:
            counts[frame.f_code.co_name] += 1

    with settings.patch(tune="never"):
        sys.setprofile(count)
        try:
            gemmtune.mm(a, b)
        finally:
            sys.setprofile(None)
    assert counts["check_call"] == counts["check_operands"] == counts["why_composed"] == 1
    assert counts["why_not_ours"] <= 1
