"""Triton kernels on a GPU: values, layouts, streams, capture, and no failures for lack of resources."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rotation import rotated

from gemmtune.backends.table import load
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.launch import launcher_of
from gemmtune.choice import Kernel
from gemmtune.device import detect
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.problem.dtypes import dtype_info
from gemmtune.problem.epilogue import evaluate
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TF32_ROUNDOFF = 2.0**-11


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _choices(problem: Problem, search: str = "quick") -> list[TritonChoice]:
    offers = load("triton").enumerate(problem, detect("cuda"), Settings(search=search))  # type: ignore[arg-type]
    return [choice for choice in offers.choices if isinstance(choice, TritonChoice)]


def _run(kernel: Kernel, x: Operands) -> None:
    kernel.run(x.out, x.tensors, x.scalars)


def _expected(problem: Problem, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (result in float64, allowed error) for any order of summation and truncating tensor cores."""
    info, acc = dtype_info(problem.out.dtype), dtype_info(problem.accumulator)
    a, b = x.a.double(), x.b.double()
    value, magnitude = x.alpha * (a @ b), abs(x.alpha) * (a.abs() @ b.abs())
    if x.inp is not None and problem.beta != "zero":
        value, magnitude = value + x.beta * x.inp.double(), magnitude + abs(x.beta) * x.inp.double().abs()
    inputs = 2 * TF32_ROUNDOFF if problem.precision.input_mode == "tf32" else 0.0
    allowed = ((2 * problem.k + 8) * acc.unit_roundoff + inputs) * magnitude
    if problem.epilogue is not None:
        value = evaluate(problem.epilogue, value.to(problem.accumulator), x.extra).double()
        allowed = 16 * allowed + 64 * acc.unit_roundoff * (1 + value.abs())
    return value, (1 + info.unit_roundoff) * allowed + info.unit_roundoff * value.abs() + info.smallest_subnormal


def _check(problem: Problem, search: str = "quick", *, every: int = 1) -> None:
    operands = random_operands(problem, _cuda(), seed=1)
    value, allowed = _expected(problem, operands)
    choices = _choices(problem, search)[::every]
    assert choices
    for choice in choices:
        kernel = choice.build()
        for _ in range(2):
            operands.out.fill_(torch.nan)
            _run(kernel, operands)
            try:
                error = float(((operands.out.double() - value).abs() / allowed).max())
            except RuntimeError as fault:  # such as an illegal access, which would otherwise name no kernel
                fault.add_note(f"{choice.name} for {problem}")
                raise
            assert error <= 1, f"{choice.name} for {problem}: error {error:.3g} of what is allowed"


SHAPES = [(256, 512, 384), (129, 257, 65), (1, 1024, 2048), (17, 8, 4096)]


@pytest.mark.parametrize(
    ("dtype", "shape", "layout"), rotated([*itertools.product(DTYPES, SHAPES, ["nn", "nt", "tn", "tt"])], 3, "triton mm"), ids=str
)
def test_mm(dtype: torch.dtype, shape: tuple[int, int, int], layout: str) -> None:
    _check(Problem.mm(*shape, dtype=dtype, layout=layout, device_type="cuda"), every=2)


def test_tf32() -> None:
    precision = Precision(input_mode="tf32")
    _check(Problem.mm(512, 512, 512, dtype=torch.float32, precision=precision, device_type="cuda"))


@pytest.mark.slow
@pytest.mark.parametrize("k", [8192, 8200, 8191])
def test_split_k_on_few_tiles(k: int) -> None:
    problem = Problem.mm(64, 64, k, device_type="cuda")
    assert any(choice.config.split_k > 1 for choice in _choices(problem))
    _check(problem, "default")


@pytest.mark.parametrize("offsets", [(0, 0, 0), (1, 0, 0), (0, 2, 0), (0, 0, 4), (3, 5, 7)], ids=str)
def test_misaligned_pointers(offsets: tuple[int, int, int]) -> None:
    problem = Problem.mm(128, 256, 192, device_type="cuda")
    a, b, out = (replace(x, offset=o) for x, o in zip((problem.a, problem.b, problem.out), offsets, strict=True))
    _check(replace(problem, a=a, b=b, out=out))


@pytest.mark.parametrize("padding", [1, 2, 4, 8])
def test_padded_rows(padding: int) -> None:
    problem = Problem.mm(100, 200, 150, layout="nn", device_type="cuda")
    a, b, out = (replace(x, stride=(x.size[1] + padding, 1)) for x in (problem.a, problem.b, problem.out))
    _check(replace(problem, a=a, b=b, out=out))


def test_a_column_major_out() -> None:
    problem = Problem.mm(96, 128, 64, device_type="cuda")
    _check(replace(problem, out=replace(problem.out, stride=(1, 96))))


@pytest.mark.parametrize("bias", ["n", "mn", "m1", "1n", "scalar"])
@pytest.mark.parametrize("op", ["addmm", "baddbmm"])
def test_bias(op: str, bias: str) -> None:
    shape = (3, 65, 128, 256) if op == "baddbmm" else (65, 128, 256)
    _check(getattr(Problem, op)(*shape, bias=bias, alpha=2, beta=0.5, device_type="cuda"))


@pytest.mark.parametrize(("alpha", "beta"), list(itertools.product([0, 1, 2.5], [0, 1, 0.3])))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_alpha_and_beta(dtype: torch.dtype, alpha: float, beta: float) -> None:
    _check(Problem.addmm(64, 96, 128, dtype=dtype, alpha=alpha, beta=beta, device_type="cuda"), every=4)


@pytest.mark.parametrize("strides", [(0, 64 * 96), (80 * 64, 0), (0, 0), (80 * 64 + 8, 64 * 96 + 1)], ids=str)
def test_batch_strides(strides: tuple[int, int]) -> None:
    dtype = torch.float16
    problem = Problem(
        op="bmm",
        a=Layout(size=(5, 80, 64), stride=(strides[0], 64, 1), dtype=dtype),
        b=Layout(size=(5, 64, 96), stride=(strides[1], 1, 64), dtype=dtype),
        out=Layout.contiguous((5, 80, 96), dtype),
        device_type="cuda",
    )
    _check(problem)


EPILOGUES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "relu-of-scale": (lambda acc: torch.relu(acc * 3.3 - 1.234), ()),
    "gelu": (torch.nn.functional.gelu, ()),
    "gelu-tanh": (lambda acc: torch.nn.functional.gelu(acc, approximate="tanh"), ()),
    "silu-mul": (lambda acc, x: torch.nn.functional.silu(acc) * x, ((96, 128),)),
    "tanh-exp": (lambda acc: torch.tanh(acc) + torch.exp(-torch.abs(acc)), ()),
    "where-column": (lambda acc, x: torch.where(acc > x, acc, torch.minimum(x, acc * 2)), ((96, 1),)),
    "row-cast": (lambda acc, x: acc.to(torch.bfloat16) / (torch.abs(x) + 2), ((128,),)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str, dtype: torch.dtype) -> None:
    function, sizes = EPILOGUES[name]
    extra = [torch.zeros(size, dtype=dtype) for size in sizes]
    problem = replace(Problem.mm(96, 128, 256, dtype=dtype, device_type="cuda"), epilogue=trace(function, torch.float32, extra))
    _check(problem, every=2) if name != "row-cast" else _check_rounded(problem)


def _check_rounded(problem: Problem) -> None:
    """A cast inside the epilogue may round either way if the accumulator is near a tie, so allow one more unit of bfloat16."""
    operands = random_operands(problem, _cuda(), seed=1)
    value, allowed = _expected(problem, operands)
    for choice in _choices(problem)[::2]:
        _run(choice.build(), operands)
        assert bool(((operands.out.double() - value).abs() <= allowed + 2.0**-7 * value.abs()).all()), choice.name


@pytest.mark.parametrize("shape", [(64, 256, 512), (64, 64, 8192)], ids=["whole", "split"])
def test_another_stream_and_fresh_pointers(shape: tuple[int, int, int]) -> None:
    problem = Problem.mm(*shape, device_type="cuda")
    choice = _choices(problem)[0]
    kernel = choice.build()
    streams = [torch.cuda.Stream() for _ in range(4)]
    sets = [random_operands(problem, _cuda(), seed=i) for i in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, operands in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                _run(kernel, operands)
    torch.cuda.synchronize()
    for operands in sets:
        value, allowed = _expected(problem, operands)
        assert bool(((operands.out.double() - value).abs() <= allowed).all())


@pytest.mark.parametrize("shape", [(64, 256, 512), (64, 64, 8192)], ids=["whole", "split"])
def test_a_captured_graph_replays_with_changed_inputs(shape: tuple[int, int, int]) -> None:
    problem = Problem.mm(*shape, device_type="cuda")
    kernel = _choices(problem)[0].build()
    operands = random_operands(problem, _cuda(), seed=0)
    _run(kernel, operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            _run(kernel, operands)
    for seed in range(3):
        operands.a.copy_(random_operands(problem, _cuda(), seed=seed).a)
        operands.out.fill_(torch.nan)
        graph.replay()
        value, allowed = _expected(problem, operands)
        assert bool(((operands.out.double() - value).abs() <= allowed).all())


def test_replays_on_two_streams_do_not_share_counters() -> None:
    problem = Problem.mm(64, 64, 16384, device_type="cuda")
    kernel = next(c for c in _choices(problem) if c.config.split_k > 1).build()
    sets, graphs = [random_operands(problem, _cuda(), seed=i) for i in range(2)], []
    for operands in sets:
        _run(kernel, operands)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                _run(kernel, operands)
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for operands in sets:
        value, allowed = _expected(problem, operands)
        assert bool(((operands.out.double() - value).abs() <= allowed).all())


def test_split_k_is_deterministic() -> None:
    problem = Problem.mm(128, 128, 32768, device_type="cuda")
    choice = next(c for c in _choices(problem) if c.config.split_k > 1)
    kernel, operands = choice.build(), random_operands(problem, _cuda(), seed=0)
    _run(kernel, operands)
    first = operands.out.clone()
    for _ in range(20):
        _run(kernel, operands)
        assert torch.equal(operands.out, first)


RESOURCE_SHAPES = [(1, 6144, 4096), (16, 4096, 14336), (64, 6144, 4096), (512, 1024, 4096), (1000, 1001, 999), (128, 128, 65536)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", RESOURCE_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_default_config_fails_for_resources(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Each commit tests a quarter of the configs."""
    problem = Problem.mm(*shape, dtype=dtype, device_type="cuda")
    operands = random_operands(problem, _cuda(), seed=0)
    for choice in rotated(_choices(problem, "default"), 4, str(shape)):
        operands.out.fill_(torch.nan)
        _run(choice.build(), operands)
        assert not operands.out.isnan().any(), choice.name


def test_launches_go_below_tritons_own_launcher() -> None:
    """The launch bypasses Triton's own launcher object: no hooks, no allocation, pointers as integers."""
    problem = Problem.mm(16, 64, 64, device_type="cuda")
    choice = _choices(problem)[0]
    choice.build()
    compiled = choice.kernels[0].compile()
    compiled._init_handles()
    assert launcher_of(compiled, (1, 1, 1)).function is not compiled.run
