"""torch's and cuBLASLt's choices for quantized problems on a GPU: all pass verification; calls, graphs and streams work."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.backends.table import load
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.problem import Layout, Problem
from gemmtune.problem.fused import bias_epilogue, factor_epilogue
from gemmtune.problem.problem import Scales
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

pytestmark = pytest.mark.gpu
F32, F16, BF16, E4M3, E5M2 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(1, 64, 128), (16, 256, 512), (17, 24, 40), (100, 1001, 999), (300, 512, 1024), (129, 272, 656)]
BOTH = ("aten", "cublaslt")


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def with_epilogue(problem: Problem, epilogue, dtype: torch.dtype | None = None) -> Problem:
    out = problem.out if dtype is None else Layout.contiguous(problem.out.size, dtype)
    return dataclasses.replace(problem, epilogue=epilogue, out=out)


def check(problem: Problem, device: torch.device, backends: tuple[str, ...] = BOTH) -> list[str]:
    """Verify every choice of the backends. Returns the names."""
    verifier, names = Verifier(problem, device), []
    for name in backends:
        offers = load(name).enumerate(problem, detect(device), Settings())
        if name == "aten":
            assert [c.baseline for c in offers.choices].count(True) == 1
        for choice in offers.choices:
            verdict = verifier.check(choice, choice.build())
            assert verdict.status is Status.OK, f"{choice.name} of {problem}: {verdict.reason}"
            names.append(choice.name)
    return names


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_int_mm(cuda: torch.device, size: tuple[int, int, int], layout: str) -> None:
    problem = Problem.int_mm(*size, layout=layout, device_type="cuda")
    check(problem, cuda)
    check(with_epilogue(problem, factor_epilogue((size[1],), F32), BF16), cuda, ("aten",))


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("pad", [0, 1, 8])
def test_int_mm_of_views(cuda: torch.device, pad: int, offset: int) -> None:
    a = Layout(size=(64, 96), stride=(96 + pad, 1), dtype=torch.int8, offset=offset)
    b = Layout(size=(96, 48), stride=(1, 96 + pad), dtype=torch.int8, offset=offset)
    out = Layout(size=(64, 48), stride=(48 + pad, 1), dtype=torch.int32, offset=offset % 4)
    check(Problem(op="int_mm", a=a, b=b, out=out, device_type="cuda"), cuda)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype_b": E4M3, "scales": "tensor"},
        {"dtype_b": torch.uint8, "scales": "column", "zeros": True},
        {"encoding": "int4", "scales": "group_128"},
        {"encoding": "uint4", "scales": "group_32", "zeros": True, "scale_dtype": F32},
    ],
    ids=str,
)
def test_mixed_mm(cuda: torch.device, options: dict, dtype: torch.dtype) -> None:
    for size in ((1, 256, 512), (33, 1001, 998)):
        check(Problem.mixed_mm(*size, dtype=dtype, device_type="cuda", **options), cuda, ("aten",))


@pytest.mark.parametrize("out_dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("scales", ["tensor", "row", "block_1x128", "block_128x128"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scaled_mm(cuda: torch.device, size: tuple[int, int, int], scales: Scales, out_dtype: torch.dtype) -> None:
    problem = Problem.scaled_mm(*size, scales=scales, out_dtype=out_dtype, device_type="cuda")
    check(problem, cuda)
    check(with_epilogue(problem, bias_epilogue((size[1],), out_dtype)), cuda)


@pytest.mark.parametrize("dtypes", [*itertools.product([E4M3, E5M2], repeat=2)], ids=str)
@pytest.mark.parametrize("scales", ["tensor", "row", "block_128x128"])
@pytest.mark.parametrize("fast_accum", [False, True], ids=["promoted", "fast"])
def test_scaled_mm_dtypes(cuda: torch.device, dtypes: tuple[torch.dtype, torch.dtype], scales: Scales, fast_accum: bool) -> None:
    problem = Problem.scaled_mm(
        64, 96, 512, dtype=dtypes[0], dtype_b=dtypes[1], scales=scales, fast_accum=fast_accum, device_type="cuda"
    )
    check(problem, cuda)


@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
def test_scaled_mm_layouts(cuda: torch.device, layout: str) -> None:
    for scales in ("tensor", "row", "block_1x128"):
        check(Problem.scaled_mm(64, 96, 512, scales=scales, layout=layout, device_type="cuda"), cuda)  # type: ignore[arg-type]


def test_a_warm_call_in_a_captured_graph_and_on_another_stream(own_store) -> None:
    with settings.patch(search="quick", backends=("aten",)):
        a, b = (torch.randn(shape, device="cuda").to(E4M3) for shape in ((64, 512), (96, 512)))
        scale_a, scale_b = torch.rand(64, 4, device="cuda"), torch.rand(4, 1, device="cuda")
        first = gemmtune.scaled_mm(a, b.t(), scale_a, scale_b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gemmtune.scaled_mm(a, b.t(), scale_a, scale_b)
        scale_a.mul_(2)
        graph.replay()
        torch.testing.assert_close(out, 2 * first)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again = gemmtune.scaled_mm(a, b.t(), scale_a, scale_b)
        stream.synchronize()
        torch.testing.assert_close(again, out)


def test_scales_on_the_cpu_are_moved(own_store) -> None:
    with settings.patch(search="quick", backends=("aten",)):
        a, b = (torch.randn(shape, device="cuda").to(E4M3) for shape in ((64, 512), (96, 512)))
        got = gemmtune.scaled_mm(a, b.t(), torch.tensor(0.5), torch.tensor(2.0))
        torch.testing.assert_close(got, gemmtune.scaled_mm(a, b.t(), torch.ones((), device="cuda"), torch.ones((), device="cuda")))
