"""Decompose-K on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rotation import rotated

from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.splits.decompose import decomposed_choice, why_not_decomposed
from gemmtune.choice import Choice, Kernel, Status
from gemmtune.device import detect
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.problem import Precision, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.precompile import precompile
from gemmtune.selector.verify import Verifier
from gemmtune.settings import current
from gemmtune.toolchain.kept import kept

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SPLITS = 8


def _tile(problem: Problem) -> Config:
    return Config(block_m=64, block_n=64, block_k=128 // problem.dtype.itemsize, stages=3, warps=4)


def _decomposed(problem: Problem) -> list[Choice]:
    """Return the choices by our template and by torch."""
    device = detect("cuda")
    assert why_not_decomposed(problem, device) is None
    return [decomposed_choice(problem, device, SPLITS, inner, pdl=False) for inner in (_tile(problem), None)]


def _choices(problem: Problem) -> list[Choice]:
    """Return the choices with their variants, compiled."""
    choices = _decomposed(problem)
    assert choices
    choices += [variant for choice in choices for variant in choice.launch_variants()]
    assert not precompile(choices, current())
    return choices


def _silu(acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(acc) * x


LONG = Problem.mm(192, 128, 16384, dtype=torch.float16, device_type="cuda")
PROBLEMS = {
    "f16-nt": LONG,
    "f16-nn-edges": Problem.mm(201, 264, 9000, dtype=torch.float16, layout="nn", device_type="cuda"),
    "bf16-tn": Problem.mm(128, 264, 16384, layout="tn", device_type="cuda"),
    "f32-tt": Problem.mm(256, 256, 8192, dtype=torch.float32, layout="tt", device_type="cuda"),
    "tf32-nt": Problem.mm(256, 256, 8192, dtype=torch.float32, precision=Precision(input_mode="tf32"), device_type="cuda"),
    "f64-nn": Problem.mm(100, 128, 4096, dtype=torch.float64, layout="nn", device_type="cuda"),
    "addmm-bf16-n": Problem.addmm(136, 128, 8192, bias="n", alpha=2, beta=0.5, device_type="cuda"),
    "addmm-f16-mn": Problem.addmm(136, 128, 8192, dtype=torch.float16, bias="mn", device_type="cuda"),
    "silu-mul": replace(
        Problem.mm(128, 128, 8192, device_type="cuda"),
        epilogue=trace(_silu, torch.float32, [torch.zeros(128, 128, dtype=torch.bfloat16)]),
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_verification_accepts_every_choice_with_its_own_claims(name: str) -> None:
    problem = PROBLEMS[name]
    verifier = Verifier(problem, CUDA)
    for choice in rotated(_choices(problem), 2, name):
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, (choice.name, verdict.reason)


def _run(kernel: Kernel, x: Operands) -> torch.Tensor:
    x.out.fill_(torch.nan)
    kernel.run(x.out, x.tensors, x.scalars)
    return x.out.clone()


def _assert_right(x: Operands) -> None:
    expected = x.a.double() @ x.b.double()
    assert float((x.out.double() - expected).norm() / expected.norm()) < 1e-3


def test_results_repeat_bit_by_bit() -> None:
    for choice in _choices(LONG):
        kernel, operands = choice.build(), random_operands(LONG, CUDA, seed=0)
        first = _run(kernel, operands)
        _assert_right(operands)
        assert all(torch.equal(_run(kernel, operands), first) for _ in range(20)), choice.name


def test_a_capture_may_be_the_first_call_and_replays_run_concurrently() -> None:
    for choice in _choices(LONG):
        kernel, sets = choice.build(), [random_operands(LONG, CUDA, seed=seed) for seed in range(2)]
        streams = [torch.cuda.Stream() for _ in sets]  # type: ignore[no-untyped-call]
        graphs = []
        for stream, x in zip(streams, sets, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(6):
                    kernel.run(x.out, x.tensors, x.scalars)
            graphs.append(graph)
        for _ in range(10):
            for stream, graph, x in zip(streams, graphs, sets, strict=True):
                with torch.cuda.stream(stream):
                    x.out.fill_(torch.nan)
                    graph.replay()
        torch.cuda.synchronize()
        for x in sets:
            _assert_right(x)


def test_concurrent_streams() -> None:
    for choice in _choices(LONG):
        kernel, sets = choice.build(), [random_operands(LONG, CUDA, seed=seed) for seed in range(3)]
        streams = [torch.cuda.Stream() for _ in sets]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, x in zip(streams, sets, strict=True):
                with torch.cuda.stream(stream):
                    kernel.run(x.out, x.tensors, x.scalars)
        torch.cuda.synchronize()
        for x in sets:
            _assert_right(x)


def test_alternating_problems() -> None:
    """One kernel's workspace contents do not affect another kernel."""
    problems = [LONG, Problem.mm(128, 192, 16384, dtype=torch.float16, device_type="cuda")]
    kernels = [(choice.build(), random_operands(p, CUDA, seed=1)) for p in problems for choice in _choices(p)]
    for _ in range(5):
        for kernel, operands in kernels:
            _run(kernel, operands)
            _assert_right(operands)


def test_memory_kept_for_a_stream_is_made_on_that_stream() -> None:
    """A kernel on the stream finds counters that are zero. The default stream's handle is 0, which torch takes for a new stream."""
    side = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), side):
        assert kept(lambda: torch.cuda.current_stream().cuda_stream, 0, stream.cuda_stream) == stream.cuda_stream
