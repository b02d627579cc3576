"""Block-sparse products on a GPU: choices verified, calls, gradients, operators, models, conformance, capture."""

from __future__ import annotations

import pytest
import torch
from rotation import rotated
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.backends.table import load
from gemmtune.choice import Choice, Status
from gemmtune.conformance.bench.outcome import CaseStatus
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Scope
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.conformance.runs.isolation import judge
from gemmtune.declaration.subject import FunctionSubject
from gemmtune.declaration.traits import Traits
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans
from gemmtune.numerics.block_sparse import mask_of, parts, random_mask, spread
from gemmtune.problem import Problem
from gemmtune.problem.sparsity import Sparsity
from gemmtune.selector.offers import offers_for
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings
from gemmtune.sparse import bsr_scatter_mm, create_blocked_tensor, sampled, scatter_mm
from gemmtune.sparse.gradients import sampled_product

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Sparse BSR tensor support", "ignore:Sparse invariant checks")]
CUDA = "cuda"
OPS = torch.ops.gemmtune
PROBLEMS = {
    "bf16-tokens-16": Problem.bsr_mm(16, 512, 768, block=64, device_type=CUDA, prepacked=True),
    "bf16-blocks-of-256": Problem.bsr_mm(64, 512, 768, block=256, device_type=CUDA, prepacked=True),
    "fp16-blocks-of-16": Problem.bsr_mm(
        100, 256, 512, block=16, dtype=torch.float16, density=0.1, device_type=CUDA, prepacked=True
    ),
    "bf16-blocks-of-8x48": Problem.bsr_mm(1, 256, 480, block=(8, 48), density=0.2, layout="tt", device_type=CUDA, prepacked=True),
    "bf16-plain-skewed": Problem.bsr_addmm(
        48, 256, 512, block=(32, 64), imbalance="skewed", wide_index=True, density=0.3, device_type=CUDA
    ),
    "fp32": Problem.bsr_mm(33, 256, 256, block=32, dtype=torch.float32, device_type=CUDA, prepacked=True),
    "fp64": Problem.bsr_mm(16, 128, 128, block=32, dtype=torch.float64, device_type=CUDA, prepacked=True),
    "int8": Problem.bsr_mm(64, 256, 256, block=64, dtype=torch.int8, device_type=CUDA, prepacked=True),
    "e4m3": Problem.bsr_mm(64, 256, 512, block=64, dtype=torch.float8_e4m3fn, density=0.3, device_type=CUDA, prepacked=True),
    "e5m2-plain": Problem.bsr_mm(16, 256, 256, block=32, dtype=torch.float8_e5m2, layout="tt", device_type=CUDA),
    "bf16-none": Problem.bsr_mm(32, 256, 256, block=64, density=0, device_type=CUDA, prepacked=True),
}
MOST_OF_TORCH, MOST_OF_OURS = 2, 2
"""Choices of a backend that are verified for a problem, others for each commit: each takes a second to compile."""


@pytest.fixture(autouse=True)
def fresh(own_store):
    forget_plans()


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Up to a few roundings of a result of 16 bits; integers are the same."""
    tolerance = 0.0 if not got.dtype.is_floating_point else 1e-2 if got.dtype.itemsize == 2 else 3e-3
    return bool(((got.double() - want.double()).abs() <= tolerance * want.double().abs().max()).all())


def weight(*size: int, dtype: torch.dtype = torch.bfloat16, **words: object) -> torch.Tensor:
    return create_blocked_tensor(*size, dtype=dtype, device=CUDA, **words)  # type: ignore[arg-type]


def numbers(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    g = torch.Generator(CUDA).manual_seed(1)
    if dtype == torch.int8:
        return torch.randint(-9, 9, size, dtype=dtype, generator=g, device=CUDA)
    return torch.randn(size, generator=g, device=CUDA).to(dtype)


def some(backend: str, name: str) -> list[Choice]:
    """A few choices: of the first ones, which are tried in any search, and of each kind that a model ranks first."""
    choices = load(backend).enumerate(PROBLEMS[name], detect(CUDA), Settings()).choices
    most = MOST_OF_TORCH if backend == "aten" else MOST_OF_OURS
    return list(rotated(choices, max(len(choices) // most, 1), name))[:most]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_choices_are_right(backend: str, name: str) -> None:
    problem, device = PROBLEMS[name], detect(CUDA)
    verifier = Verifier(problem, device.torch_device)
    found = {choice.name: verifier.check(choice, choice.build()) for choice in some(backend, name)}
    assert found
    assert {v.status for v in found.values()} == {Status.OK}, {n: v.reason for n, v in found.items() if v.status is not Status.OK}


@pytest.mark.parametrize("order", ["alike", "pairs"])
def test_ordered_rows_are_right(order: str) -> None:
    device = detect(CUDA)
    for problem in (
        Problem.bsr_mm(300, 832, 768, block=64, imbalance="skewed", layout="tt", device_type=CUDA, prepacked=True),
        Problem.bsr_mm(129, 544, 512, block=(32, 16), dtype=torch.float16, density=0.3, device_type=CUDA, prepacked=True),
    ):
        found = load("triton").enumerate(problem, device, Settings(search="exhaustive")).choices
        choice = next(c for c in found if order in c.name)
        checked = Verifier(problem, device.torch_device).check(choice, choice.build())
        assert checked.status is Status.OK, checked.reason


def test_the_dense_products_of_other_backends_are_offered_for_prepacked_weights() -> None:
    names = [c.name for c in offers_for(PROBLEMS["bf16-tokens-16"], detect(CUDA), Settings()).choices]
    assert any(name.endswith("+dense") and not name.startswith("aten:") for name in names)


def test_patterns_are_those_of_the_cpu() -> None:
    skewed = Sparsity(block_n=16, block_k=16, density=0.2, imbalance="skewed")
    assert random_mask((256, 512), skewed, torch.Generator(CUDA).manual_seed(3)).is_cuda
    for imbalance in ("even", "skewed"):
        here, there = (
            create_blocked_tensor(256, 512, block=16, density=0.2, imbalance=imbalance, seed=3, device=where)
            for where in ("cpu", CUDA)
        )
        assert torch.equal(mask_of(here), mask_of(there).cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8], ids=str)
def test_calls(dtype: torch.dtype) -> None:
    bsr, x = (
        weight(96, 128, block=32, density=0.4, imbalance="skewed", index_dtype=torch.int64, dtype=dtype),
        numbers(128, 33, dtype=dtype),
    )
    want = bsr.to_dense().double() @ x.double()
    with settings.patch(tune="never"):
        for _ in range(2):
            assert close(gemmtune.bsr_mm(bsr, x), want)
            assert close(
                gemmtune.bsr_mm(gemmtune.prepack(bsr), numbers(3, 128, 5, dtype=dtype))[0],
                bsr.to_dense().double() @ numbers(3, 128, 5, dtype=dtype)[0].double(),
            )
        assert close(bsr_scatter_mm(bsr, x), want)
        if dtype == torch.int8:
            inp = torch.arange(96, device=CUDA, dtype=torch.int32).unsqueeze(1)
            assert torch.equal(gemmtune.int_bsr_addmm(inp, bsr, x, beta=2, alpha=3).double(), 2 * inp + 3 * want)
            return
        left, right, inp = (numbers(*size, dtype=dtype) for size in ((96,), (33,), (96, 1)))
        got = gemmtune.bsr_addmm(inp, bsr, x, beta=0.5, alpha=2, left_alpha=left, right_alpha=right, epilogue=torch.relu)
        assert close(got, torch.relu(0.5 * inp.double() + left[:, None].double() * (2 * want) * right.double()))
        bsr.values().mul_(-2)
        assert close(gemmtune.bsr_mm(bsr, x), -2 * want)


def test_scattered_products() -> None:
    blocks, others = numbers(4, 16, 32), numbers(3, 32, 24)
    c_offsets, pq = torch.tensor([0, 2, 2, 4], device=CUDA), torch.tensor([[0, 1], [2, 1], [3, 0], [1, 2]], device=CUDA)
    got = scatter_mm(blocks, others, ("scatter_mm", c_offsets, pq))
    want = torch.stack(
        [
            sum((blocks[p].double() @ others[q].double() for p, q in pq[a:b].tolist()), torch.zeros(16, 24, device=CUDA).double())
            for a, b in ((0, 2), (2, 2), (2, 4))
        ]
    )
    assert close(got, want)


@pytest.mark.slow
def test_tuning_and_its_pick() -> None:
    bsr, x = weight(256, 256, block=64, density=0.3), numbers(256, 32)
    packed = gemmtune.prepack(bsr)
    with settings.patch(search="quick", backends=("aten",), tune_in_subprocess=False):
        [found] = gemmtune.tune(gemmtune.bsr_mm, packed, x, progress=False)
    assert found.pick is not None
    assert close(gemmtune.bsr_mm(packed, x), bsr.to_dense().double() @ x.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    made = weight(64, 96, block=32, density=0.5, dtype=dtype)
    values, crow, col = parts(made)
    values, x, bias = (t.clone().requires_grad_() for t in (values, numbers(7, 96, dtype=dtype), numbers(64, dtype=dtype)))
    dense = made.to_dense().double().requires_grad_()
    g = numbers(7, 64, dtype=dtype)
    with settings.patch(tune="never"):
        got = torch.autograd.grad(OPS.bsr_linear(x, crow, col, values, bias), (x, values, bias), g)
        bsr = torch.sparse_bsr_tensor(crow, col, values, size=(64, 96))
        through = torch.autograd.grad(gemmtune.bsr_mm(bsr, x.t(), epilogue=lambda acc: acc * 2), (x, values), g.t())
    wide = x.detach().double().requires_grad_()
    want_x, want_w = torch.autograd.grad(nn.functional.linear(wide, dense), (wide, dense), g.double())
    at_blocks = torch.sparse_bsr_tensor(crow, col, got[1], size=(64, 96)).to_dense()
    assert close(got[0], want_x)
    assert close(at_blocks, want_w * (at_blocks != 0))
    assert close(got[2], g.double().sum(0))
    assert close(through[0], 2 * want_x)
    assert close(through[1], 2 * sampled_product(made.detach(), g.t(), x.detach().t()).double())


def test_opcheck_and_a_compiled_function() -> None:
    # Copies: torch 2.11 cannot compile a view once it has seen others of another rank in its place.
    values, crow, col = (x.clone() for x in parts(weight(64, 96, block=32, density=0.5, dtype=torch.float32)))
    x = numbers(5, 96, dtype=torch.float32)
    with settings.patch(tune="never"):
        torch.library.opcheck(OPS.bsr_linear.default, (x.clone().requires_grad_(), crow, col, values.clone().requires_grad_()))
        compiled = torch.compile(lambda y: torch.relu(OPS.bsr_linear(y, crow, col, values)) + 1, fullgraph=True)
        dense = torch.sparse_bsr_tensor(crow, col, values, size=(64, 96)).to_dense()
        assert close(compiled(x), torch.relu(x.double() @ dense.double().t()) + 1)


def test_a_sparse_model_runs_by_its_picks() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64)).to(CUDA, torch.bfloat16)
    gemmtune.sparsify_(model, block=32, density=0.3)
    want = nn.functional.linear(
        torch.relu(nn.functional.linear(x := numbers(16, 128), model[0].weight.to_dense(), model[0].bias)),
        model[2].weight.to_dense(), model[2].bias,
    )  # fmt: skip
    with torch.no_grad(), settings.patch(search="quick", backends=("aten",), tune_in_subprocess=False):
        gemmtune.optimize(model, tune=x)
        assert close(model(x), want.detach())


def cases() -> list[Case]:
    """A small one of each property, above all of those that need a GPU."""
    traits = TRAITS
    found: list[Case] = []
    for wanted in PROPERTIES:
        scope = Scope(traits=traits, device_type=CUDA)
        fitting = [c for c in wanted.cases(scope) if c.m * c.n * c.k <= 2**21] if not wanted.needs(scope) else []
        found += fitting[:1]
    return found


TRAITS = Traits(
    ops=("bsr_mm",), dtypes=("bfloat16",), blocks=("32x32",), out=True, empty=True, streams=True, capturable=True, splits=64,
    partials={"bfloat16": "bfloat16"}, accumulate={}, least=(1, 1, 1),
)  # fmt: skip


def test_conformance() -> None:
    with settings.patch(tune="never"):
        judged = {case.id: judge(FunctionSubject("ours", gemmtune.bsr_mm, TRAITS), case, torch.device(CUDA)) for case in cases()}
    assert {case.partition(":")[0] for case in judged} >= {"streams", "graph-replay", "block-patterns", "changed-in-place", "bound"}
    wrong = {name: outcome for name, outcome in judged.items() if outcome.status is not CaseStatus.PASSED}
    assert not wrong


def test_a_captured_call_sees_values_that_changed() -> None:
    for packed in (False, True):
        bsr = weight(256, 256, block=32)
        x, out = numbers(256, 16), torch.empty(256, 16, dtype=torch.bfloat16, device=CUDA)
        given = gemmtune.prepack(bsr) if packed else bsr
        with settings.patch(tune="never"):
            gemmtune.bsr_mm(given, x, out=out)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                gemmtune.bsr_mm(given, x, out=out)
            bsr.values().mul_(2)
            if packed:
                gemmtune.bsr_mm(given, x)  # packs the new values, where a kernel keeps a copy
            graph.replay()
        assert close(out, bsr.to_dense().double() @ x.double())


def test_indices_that_are_not_known_cannot_be_read_in_a_capture() -> None:
    bsr, x = weight(64, 64, block=32, dtype=torch.float32), numbers(64, 16, dtype=torch.float32)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(gemmtune.InvalidProblemError, match="call it once before"), torch.cuda.graph(graph):
        gemmtune.bsr_mm(bsr, x)


@pytest.mark.parametrize("way", ["dense", "batched", "grouped", "measured"])
def test_sampled_products_by_every_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "SMALL_FLOPS", 0)
    if way != "measured":
        monkeypatch.setattr(sampled, "_way_for", lambda *_: way)
    inp, a, b = weight(256, 512, block=(32, 64), density=0.3), numbers(256, 128), numbers(128, 512)
    with settings.patch(backends=("aten", "triton"), search="quick"):
        got = gemmtune.sampled_addmm_bsr(inp, a, b, beta=2, alpha=0.5)
    exists = spread(mask_of(inp), Sparsity(block_n=32, block_k=64, density=0.5))
    assert close(got.to_dense(), 2 * inp.to_dense().double() + 0.5 * (a.double() @ b.double()) * exists)
