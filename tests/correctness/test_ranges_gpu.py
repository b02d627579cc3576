"""Tables of every M on a GPU: real kernels of every backend, with planted times, so that many of them get a segment."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranges import untimed

import gemmtune
from gemmtune import settings
from gemmtune.dispatch import ready as plans
from gemmtune.dispatch import strategies
from gemmtune.dispatch.ready import forget_plans
from gemmtune.integration.compile import install, uninstall
from gemmtune.problem import Problem
from gemmtune.selector import precompile
from gemmtune.selector.range_result import RangeResult
from gemmtune.workers.pool import WORKERS

pytestmark = pytest.mark.gpu
N, K, HI = 160, 128, 300
BACKENDS = ("aten", "cublaslt", "triton", "cuda")
BF16 = torch.bfloat16


def signs(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """−1, 0 and 1: any order of summation, and any rounding in between, gives the exact sum."""
    return torch.randint(-1, 2, size, device="cuda").to(dtype)


@dataclass(frozen=True, kw_only=True)
class Op:
    """A weight: ``operands(m)`` are a call's, ``call`` does it, and ``exact`` is its result."""

    problem: Problem
    operands: Callable[[int], tuple[torch.Tensor, ...]]
    call: Callable[..., torch.Tensor]
    exact: Callable[..., torch.Tensor]


def mm() -> Op:
    w = signs(N, K).t()
    return Op(
        problem=Problem.mm(2, N, K, device_type="cuda"),
        operands=lambda m: (signs(m, K), w),
        call=gemmtune.mm,
        exact=lambda a, w: (a.double() @ w.double()).to(BF16),
    )


def addmm() -> Op:
    w, bias = signs(N, K).t(), signs(N)
    return Op(
        problem=Problem.addmm(2, N, K, bias="n", device_type="cuda"),
        operands=lambda m: (bias, signs(m, K), w),
        call=gemmtune.addmm,
        exact=lambda bias, a, w: (bias.double() + a.double() @ w.double()).to(BF16),
    )


def mixed_mm() -> Op:
    numbers = torch.randint(-1, 2, (K, N), device="cuda", dtype=torch.int8)
    packed = gemmtune.pack_int4(numbers).t().contiguous().t()
    scale = (signs(K // 32, N).abs() + 1).contiguous()
    weight = numbers.double() * scale.double().repeat_interleave(32, 0)
    return Op(
        problem=Problem.mixed_mm(2, N, K, dtype=BF16, encoding="int4", scales="group_32", device_type="cuda"),
        operands=lambda m: (signs(m, K), packed, scale),
        call=lambda a, b, s: gemmtune.mixed_mm(a, b, scale_b=s, encoding="int4"),
        exact=lambda a, b, s: (a.double() @ weight).to(BF16),
    )


def scaled_mm() -> Op:
    w, one = signs(N, K, dtype=torch.float8_e4m3fn).t(), torch.ones((), device="cuda")
    return Op(
        problem=Problem.scaled_mm(2, N, K, out_dtype=BF16, device_type="cuda"),
        operands=lambda m: (signs(m, K, dtype=torch.float8_e4m3fn), w, one, one + one),
        call=lambda a, b, s, t: gemmtune.scaled_mm(a, b, s, t, out_dtype=BF16),
        exact=lambda a, b, s, t: (a.double() @ b.double() * (s * t).double()).to(BF16),
    )


def bmm() -> Op:
    w = signs(3, N, K).transpose(1, 2)
    return Op(
        problem=Problem.bmm(3, 2, N, K, device_type="cuda"),
        operands=lambda m: (signs(3, m, K), w),
        call=gemmtune.bmm,
        exact=lambda a, w: (a.double() @ w.double()).to(BF16),
    )


OPS = {"mm": mm, "addmm": addmm, "mixed_mm": mixed_mm, "scaled_mm": scaled_mm, "bmm": bmm}


def planted(name: str, m: int) -> float:
    """A time by which another choice wins for about every power of two of M."""
    return 1.0 + zlib.crc32(f"{name} {m.bit_length()}".encode()) % 97


@pytest.fixture(autouse=True)
def _planted(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    forget_plans()
    untimed(monkeypatch, planted)
    changes = {"rows": "shared", "search": "quick", "max_profiling_configs": 2, "backends": BACKENDS}
    with settings.patch(**changes):
        yield
    forget_plans()


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call of it on, nothing may be tuned or compiled."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a call was about to tune or compile")

    def freeze() -> None:
        for owner, name in (
            (strategies, "select"),
            (strategies, "tune_rows"),
            (precompile.Compilation, "__init__"),
            (WORKERS, "take"),
        ):
            monkeypatch.setattr(owner, name, refuse)

    return freeze


def tuned(op: Op, hi: int = HI, **options: Any) -> RangeResult:
    (result,) = gemmtune.tune(op.problem, m=(1, hi), progress=False, **options)
    return result


def rows_to_try(result: RangeResult) -> list[int]:
    """Ms around every crossover, at both ends, beyond the table, and others that were not sampled."""
    edges = {m for x in result.table.segments for m in (x.lo - 1, x.lo, x.lo + 1, x.hi)}
    others = {random.Random(7).randint(1, HI) for _ in range(8)}
    return sorted(m for m in edges | others | {1, HI, HI + 1, 2 * HI} if m >= 1)


@pytest.mark.parametrize("name", OPS)
def test_results_are_exact_at_every_m(name: str, frozen: Callable[[], None]):
    op = OPS[name]()
    result = tuned(op)
    assert not result.wrong
    assert len(result.table.segments) > 2, "the planted times ask for several choices"
    frozen()
    for m in rows_to_try(result):
        operands = op.operands(m)
        want = op.exact(*operands)
        for _ in range(2):
            assert torch.equal(op.call(*operands), want), (name, m)
    planned = [entry.plan for entry in plans.ready.values() if entry.plan.origin == "range"]
    assert {plan.choice.name for plan in planned} >= {x.name for x in result.table.segments if x.name.partition(":")[0] != "aten"}


def test_a_new_m_is_captured_into_a_graph(frozen: Callable[[], None]):
    """The M has not been called before: what it needs is loaded with the first call of the weight."""
    op = mm()
    result = tuned(op)
    frozen()
    op.call(*op.operands(1))
    graphs = []
    for x in result.table.segments:
        operands = op.operands((x.lo + x.hi) // 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = op.call(*operands)
        graphs.append((graph, got, operands))
    for graph, got, (a, w) in graphs:
        a.copy_(signs(*a.shape))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, op.exact(a, w)), a.shape


def test_a_dynamic_graph_of_inductor_takes_the_table():
    linear = torch.nn.Linear(K, N, bias=False, device="cuda", dtype=BF16)
    with torch.no_grad():
        linear.weight.copy_(signs(N, K))
        result = tuned(mm())
        install()
        try:
            compiled = torch.compile(linear, fullgraph=True, dynamic=True)
            for m in (7, *rows_to_try(result)):
                a = signs(m, K)
                assert torch.equal(compiled(a), (a.double() @ linear.weight.t().double()).to(BF16)), m
        finally:
            uninstall()
    assert {decision.taken for decision in gemmtune.explain(compiled).decisions} == {"alone"}
    assert {plan.origin for plan in plans._plans.values()} >= {"range"}


@pytest.mark.parametrize("name", ["mm", "mixed_mm"])
def test_bits_of_a_row_do_not_depend_on_its_batch(name: str, frozen: Callable[[], None]):
    op = OPS[name]()
    assert tuned(op, batch_invariant=True).table.reduction
    _, *rest = op.operands(1)
    a = torch.randn(HI, K, device="cuda", dtype=BF16)
    frozen()
    with settings.patch(batch_invariant=True):
        whole = op.call(a, *rest)
        for m in (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 255):
            assert torch.equal(op.call(a[:m], *rest), whole[:m]), m
            assert torch.equal(op.call(a[-m:].clone(), *rest), whole[-m:]), m


class Experts(torch.nn.Module):
    """Experts as transformers has them. ``optimize`` gives them a forward."""

    num_experts, is_transposed, has_gate, has_bias = 4, False, True, False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 256, 128, device="cuda", dtype=BF16) / 8, requires_grad=False)
        self.down_proj = torch.nn.Parameter(torch.randn(4, 128, 128, device="cuda", dtype=BF16) / 8, requires_grad=False)

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gates, others = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gates) * others


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4", "float8"])
def test_bits_of_a_token_do_not_depend_on_those_beside_it_in_experts(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gemmtune.integration.invariant.LEAST_ROWS", 16)
    experts = Experts()
    if kind != "bfloat16":
        gemmtune.quantize_(experts, kind)
    x = torch.randn(150, 128, device="cuda", dtype=BF16)
    weights, index = torch.randn(150, 4, device="cuda").softmax(-1).topk(2)
    gemmtune.optimize(experts, tune=(x, index, weights), batch_invariant=True, progress=False)
    whole = experts(x, index, weights)
    for begin, end in ((0, 1), (149, 150), (3, 10), (0, 64), (20, 149)):
        rows = slice(begin, end)
        assert torch.equal(experts(x[rows], index[rows], weights[rows]), whole[rows]), (begin, end)


ELSEWHERE = """
import torch, gemmtune
from gemmtune.dispatch import ready as plans
from gemmtune.dispatch import strategies
w = torch.ones(160, 128, device="cuda", dtype=torch.bfloat16).t()
for m in (1, 9, 33, 150, 300, 301):
    a = torch.randint(-1, 2, (m, 128), device="cuda").bfloat16()
    assert torch.equal(gemmtune.mm(a, w), (a.double() @ w.double()).bfloat16()), m
for plan in (entry.plan for entry in plans.ready.values()):
    print(f"{plan.problem.m}={plan.choice.name}/{plan.origin}")
"""


@pytest.mark.slow
def test_another_process_reads_the_table(own_store: Path):
    result = tuned(mm())
    names = {m: result.table.segments[place].name for m in (1, 9, 33, 150, 300) if (place := result.table.index(m)) is not None}
    changes = {"STORE_PATH": str(own_store), "TUNE": "never", "ROWS": "shared"}
    with settings.environment({f"GEMMTUNE_{name}": value for name, value in changes.items()}):
        told = subprocess.run([sys.executable, "-c", ELSEWHERE], check=True, capture_output=True, text=True, timeout=120).stdout
    for m, name in {**names, 301: names[300]}.items():
        assert f"{m}={name}/range" in told.split(), told
