"""cuBLASLt's algorithms against float64 products on a GPU: layouts, dtypes, added operands, streams and graph capture."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gemmtune.backends.cublaslt import BACKEND
from gemmtune.device import detect
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.settings import Settings

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCES)


@pytest.fixture(autouse=True)
def _available():
    available = BACKEND.available(detect("cuda"))
    if not available.ok:
        pytest.skip(available.detail)


def choices(problem: Problem, **settings):
    return BACKEND.enumerate(problem, detect("cuda"), Settings(**settings)).choices


def operand(layout: Layout, seed: int) -> torch.Tensor:
    """Random data of that layout; storage comes 256-byte aligned from torch's allocator."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    flat = torch.randn(layout.offset + layout.span + 64, device="cuda", generator=generator, dtype=torch.float32).to(layout.dtype)
    return flat.as_strided(layout.size, layout.stride, layout.offset)


def check_every_choice(problem: Problem, alpha: float = 1.0, beta: float = 0.0) -> None:
    found = choices(problem)
    assert found, BACKEND.enumerate(problem, detect("cuda"), Settings()).refusals
    a, b = operand(problem.a, 1), operand(problem.b, 2)
    inp = operand(problem.inp, 3) if problem.inp is not None else None
    expected = alpha * (a.double() @ b.double()) + (beta * inp.double() if inp is not None and beta else 0)
    size = alpha * (a.double().abs() @ b.double().abs()) + 1
    tolerance = 2**-7 if problem.precision.input_mode == "tf32" else TOLERANCES[problem.dtype]
    for choice in found:
        out = operand(problem.out, 4)
        whole = out.as_strided((problem.out.span + 64,), (1,), problem.out.offset)
        before = whole.clone()
        choice.build().run(out, (a, b) if inp is None else (a, b, inp), () if inp is None else (alpha, beta))
        error = ((out.double() - expected).abs() / (size.sqrt() + expected.abs())).max().item()
        assert error <= tolerance, f"{choice.name}: error {error:.2e}, expected at most {tolerance:.2e}"
        gaps = torch.ones(whole.shape, dtype=torch.bool, device="cuda")
        gaps.as_strided(out.shape, out.stride()).fill_(False)
        assert torch.equal(whole[gaps], before[gaps]), f"{choice.name} wrote outside of out"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("sizes", [(128, 256, 512), (1, 1024, 512), (77, 33, 129)], ids=lambda s: "x".join(map(str, s)))
def test_mm(dtype, layout, sizes):
    check_every_choice(Problem.mm(*sizes, dtype=dtype, layout=layout, device_type="cuda"))


def test_mm_tf32():
    check_every_choice(Problem.mm(256, 256, 256, dtype=torch.float32, device_type="cuda", precision=Precision(input_mode="tf32")))


def test_mm_split_k_keeps_full_precision():
    check_every_choice(Problem.mm(64, 64, 65536, dtype=torch.float16, device_type="cuda"))
    for choice in choices(Problem.mm(64, 64, 65536, dtype=torch.float16, device_type="cuda")):
        assert choice.claims.partials == torch.float32


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("pad", [0, 1, 8])
def test_mm_offsets_and_padding(offset, pad):
    def matrix(rows, cols):
        return Layout(size=(rows, cols), stride=(cols + pad, 1), dtype=torch.bfloat16, offset=offset)

    problem = Problem(op="mm", a=matrix(96, 64), b=matrix(64, 80), out=matrix(96, 80), device_type="cuda")
    check_every_choice(problem)


def test_mm_into_a_column_major_result():
    problem = Problem.mm(96, 80, 64, dtype=torch.float16, device_type="cuda")
    check_every_choice(dataclasses.replace(problem, out=Layout.contiguous((80, 96), torch.float16).transposed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("bias", "alpha", "beta"), [("n", 1, 1), ("n", 0.5, 1), ("mn", 1, 1), ("mn", 2.0, 0.4), ("m1", 1, 0)])
def test_addmm(dtype, bias, alpha, beta):
    problem = Problem.addmm(64, 128, 256, dtype=dtype, bias=bias, alpha=alpha, beta=beta, device_type="cuda")
    check_every_choice(problem, alpha, beta)


def test_addmm_with_an_unaligned_bias():
    problem = Problem.addmm(64, 128, 256, dtype=torch.bfloat16, device_type="cuda")
    check_every_choice(dataclasses.replace(problem, inp=Layout(size=(128,), stride=(1,), dtype=torch.bfloat16, offset=1)), 1, 1)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_bmm(layout):
    check_every_choice(Problem.bmm(10, 64, 48, 32, dtype=torch.float16, layout=layout, device_type="cuda"))


def test_bmm_with_a_shared_operand():
    problem = Problem.bmm(6, 64, 48, 32, dtype=torch.float16, device_type="cuda")
    shared = dataclasses.replace(problem.b, stride=(0, *problem.b.stride[1:]))
    check_every_choice(dataclasses.replace(problem, b=shared))


@pytest.mark.parametrize(("bias", "alpha", "beta"), [("mn", 0.5, 2.0), ("n", 1, 1)])
def test_baddbmm(bias, alpha, beta):
    problem = Problem.baddbmm(6, 64, 48, 32, dtype=torch.float16, bias=bias, alpha=alpha, beta=beta, device_type="cuda")
    check_every_choice(problem, alpha, beta)


def test_choices_are_the_same_when_asked_again():
    problem = Problem.mm(1024, 1024, 1024, device_type="cuda")
    first = choices(problem)
    assert 1 < len(first) <= 8
    assert len({c.content_hash for c in first}) == len(first)
    assert [c.name for c in first] == [c.name for c in choices(problem)]
    assert [c.name for c in choices(problem, cublaslt_top_k=2)] == [c.name for c in first[:2]]


def test_captured_graph_gives_the_same_values():
    problem = Problem.mm(64, 64, 32768, dtype=torch.float16, device_type="cuda")
    a, b = operand(problem.a, 1), operand(problem.b, 2)
    for choice in choices(problem):
        run = choice.build().run
        eager, captured = operand(problem.out, 3), operand(problem.out, 4)
        run(eager, (a, b), ())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(captured, (a, b), ())
        a.mul_(2)
        graph.replay()
        torch.testing.assert_close(captured, eager * 2, rtol=2e-3, atol=2e-2, msg=choice.name)
        a.div_(2)


def test_two_streams_at_once():
    problem = Problem.mm(64, 64, 65536, dtype=torch.float16, device_type="cuda")
    choice = max(choices(problem), key=lambda c: c.info["workspace_bytes"])
    run = choice.build().run
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [(operand(problem.a, i), operand(problem.b, 10 + i)) for i in range(2)]
    expected = [a.double() @ b.double() for a, b in inputs]
    torch.cuda.synchronize()
    outputs = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                out = torch.empty(64, 64, dtype=torch.float16, device="cuda")
                run(out, inputs[i], ())
                outputs[i].append(out)
    torch.cuda.synchronize()
    for i in range(2):
        for out in outputs[i]:
            torch.testing.assert_close(out.double(), expected[i], rtol=2e-3, atol=1.0)
