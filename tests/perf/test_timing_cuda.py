"""Timing on a GPU: graphs, eager calls, captures that fail, contexts that are lost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gemmtune.choice import Choice, Claims, Kernel, Status
from gemmtune.device import detect
from gemmtune.problem import Problem
from gemmtune.selector.remote import RemoteSession
from gemmtune.selector.session import Session
from gemmtune.settings import Settings
from gemmtune.timing.contenders import Call, EagerContender, GraphContender
from gemmtune.timing.rounds import play

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

CLAIMS = Claims(accumulate=torch.float32)


def multiply(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
    a, b, *_rest = tensors
    torch.mm(a, b, out=out)


def twice(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
    a, b, *_rest = tensors
    torch.mm(a, b, out=out)
    torch.mm(a, b, out=out)


def with_workspace(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
    a, b, *_rest = tensors
    out.copy_(torch.mm(a, b))


def waits_for_the_gpu(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
    """Right, but no graph can hold it."""
    a, b, *_rest = tensors
    torch.mm(a, b, out=out)
    torch.cuda.synchronize()


def illegal(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
    """A device-side assertion: every later call in the process fails."""
    tensors[0].flatten()[torch.tensor([1 << 40], device=tensors[0].device)]


RUNS = {f.__name__: f for f in (multiply, twice, with_workspace, waits_for_the_gpu, illegal)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaFake(Choice):
    """Runs RUNS[run]."""

    run: str

    @property
    def content_hash(self) -> str:
        return self.run

    def bind(self, loaded: object) -> Kernel:
        return Kernel(run=RUNS[self.run])


def fake(run: str, problem: Problem) -> CudaFake:
    return CudaFake(name=f"fake:{run}", backend="fake", problem=problem, claims=CLAIMS, run=run)


@pytest.fixture
def problem() -> Problem:
    return Problem.mm(256, 1024, 1024, dtype=torch.bfloat16, device_type="cuda")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=str(tmp_path))


def spin(cycles: int) -> Call:
    """A kernel that takes that many cycles."""
    return functools.partial(torch.cuda._sleep, cycles)


@pytest.mark.parametrize("kind", [GraphContender, EagerContender])
def test_a_planted_difference_of_20_percent_is_found(kind: Callable[[list[Call], torch.cuda.Stream], GraphContender]) -> None:
    stream = torch.cuda.Stream()
    contenders = {name: kind([spin(cycles)], stream) for name, cycles in (("slow", 120_000), ("fast", 100_000))}
    ranked = play(contenders, warm_up_s=0.1, budget_s=0.5)
    assert ranked["slow"].time_us / ranked["fast"].time_us == pytest.approx(1.2, abs=0.03)


def test_a_graph_leaves_the_cost_of_launches_out() -> None:
    stream = torch.cuda.Stream()
    tensor = torch.zeros(1, device="cuda")
    graph, eager = (kind([lambda: tensor.add_(1)], stream).sample_us() for kind in (GraphContender, EagerContender))
    assert graph < 0.8 * eager


def test_after_a_capture_that_fails_torch_captures_and_allocates_as_before() -> None:
    contender = GraphContender([torch.cuda.synchronize], torch.cuda.Stream())
    with pytest.raises(RuntimeError, match="captur"):
        contender.begin()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(torch.full((1000,), float(len(results)), device="cuda") + 1)
    for graph in graphs:
        graph.replay()
    assert [float(result.sum()) for result in results] == [1000.0, 2000.0]
    assert torch.rand(4, device="cuda").isfinite().all()


@pytest.mark.parametrize("timing", ["graph", "spaced", "eager"])
def test_sessions_measure_kernel_time(problem: Problem, settings: Settings, timing: str) -> None:
    state = torch.cuda.get_rng_state()
    with Session(problem, detect("cuda"), dataclasses.replace(settings, timing=timing)) as session:
        for run in ("multiply", "twice", "with_workspace"):
            sample = session.examine(fake(run, problem), None)
            assert sample.status is Status.OK, sample.reason
        ranked = session.rank([fake("twice", problem), fake("multiply", problem)]).times
    assert ranked["fake:twice"].time_us > (1.1 if timing == "spaced" else 1.3) * ranked["fake:multiply"].time_us
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_failed_capture_is_a_runtime_error_and_the_next_kernel_works(problem: Problem, settings: Settings) -> None:
    with RemoteSession(problem, detect("cuda"), settings) as session:
        assert session.examine(fake("multiply", problem), None).status is Status.OK
        sample = session.examine(fake("waits_for_the_gpu", problem), None)
        assert sample.status is Status.RUNTIME_ERROR
        assert "captur" in sample.reason
        assert session.examine(fake("multiply", problem), None).status is Status.OK
        assert set(session.rank([fake("multiply", problem), fake("twice", problem)]).times) == {"fake:multiply", "fake:twice"}


def test_a_lost_context_costs_one_choice(problem: Problem, settings: Settings) -> None:
    with RemoteSession(problem, detect("cuda"), settings) as session:
        assert session.examine(fake("multiply", problem), None).status is Status.OK
        sample = session.examine(fake("illegal", problem), None)
        assert sample.status is Status.CRASHED, sample.reason
        assert session.examine(fake("multiply", problem), None).status is Status.OK


def test_limits_of_the_gpu(settings: Settings) -> None:
    problem = Problem.mm(64, 64, 64, dtype=torch.bfloat16, device_type="cuda")
    with Session(problem, detect("cuda"), settings) as session:
        limits, _ = session.limits({})
    assert limits["bandwidth_gbps"] > 50
    assert limits["bfloat16_gflops"] > 500


def test_memory_is_given_back(problem: Problem, settings: Settings) -> None:
    with Session(problem, detect("cuda"), settings) as session:
        session.examine(fake("with_workspace", problem), None)  # once, for what libraries keep for good
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with Session(problem, detect("cuda"), settings) as session:
        session.examine(fake("with_workspace", problem), None)
        assert torch.cuda.memory_allocated() > before + 1_000_000
    assert torch.cuda.memory_allocated() <= before + 20_000_000
