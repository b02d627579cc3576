"""What users of a GEMM library rely on, through the public operations, for each configuration of backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rotation import rotated

import gemmtune
from gemmtune import settings

CPU_BACKENDS = (("aten",), *rotated((("cpp",), ("aten", "cpp")), 2, "must"))
GPU_BACKENDS = (("triton",), ("aten", "triton"), ("aten", "cublaslt", "triton"))
WHERE = [
    *(pytest.param("cpu", names, id=f"cpu-{'+'.join(names)}") for names in CPU_BACKENDS),
    *(pytest.param("cuda", names, id=f"cuda-{'+'.join(names)}", marks=pytest.mark.gpu) for names in GPU_BACKENDS),
]
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
UNOPTIMIZED = 128
"""Rows and columns on a CPU, where the tests' compiler does not optimize what is run."""
Function = Callable[..., torch.Tensor]


@pytest.fixture
def place(request: pytest.FixtureRequest, own_store: Any) -> Iterator[str]:
    """The device of a parametrized (device, backends), with those backends in force."""
    where, names = request.param
    with settings.patch(backends=names, search="quick"):
        yield where


everywhere = pytest.mark.parametrize("place", [pytest.param(p.values, id=p.id, marks=p.marks) for p in WHERE], indirect=True)


def randn(place: str, *size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device=place).manual_seed(seed + sum(size))
    return torch.randn(size, generator=generator, device=place).to(dtype)


def assert_product(
    got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, after: Function = lambda acc: acc, slope: float = 1.0
) -> None:
    """``got`` is after(a @ b), for an ``after`` that nowhere magnifies an error more than ``slope`` times."""
    exact = after(a.double() @ b.double())
    magnitude = a.double().abs() @ b.double().abs()
    error = (a.shape[-1] + 8) * 2.0**-22 * magnitude * slope + 3 * ROUNDOFF[got.dtype] * (exact.abs() + slope * 2.0**-20)
    assert bool(((got.double() - exact).abs() <= error).all())


@everywhere
@pytest.mark.parametrize("dtype", rotated([torch.float32, torch.float16], 2, "must mm"), ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(128, 16, 128), (1024, 256, 1024), (10, 40, 2000)])
def test_mm(place: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    m, n = (m, n) if place == "cuda" else (min(m, UNOPTIMIZED), min(n, UNOPTIMIZED))
    a, b = randn(place, m, k, dtype=dtype), randn(place, k, n, dtype=dtype)
    assert_product(gemmtune.mm(a, b), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1024, 1408])
@pytest.mark.parametrize("names", GPU_BACKENDS, ids="+".join)
def test_mm_of_16384_rows(own_store: Any, names: tuple[str, ...], n: int) -> None:
    a, b = randn("cuda", 16384, 16384, dtype=torch.float16), randn("cuda", 16384, n, dtype=torch.float16)
    with settings.patch(backends=names, search="quick"):
        assert_product(gemmtune.mm(a, b), a, b)


EPILOGUES: dict[str, tuple[Function, float]] = {
    "times-3": (lambda acc: acc * 3.0, 3),
    "affine": (lambda acc: acc * 3.3 - 1.234, 3.3),
    "relu-of-affine": (lambda acc: torch.relu(acc * 3.3 - 1.234), 3.3),
    "relu6": (lambda acc: F.relu6(acc), 1),
    "gelu": (lambda acc: F.gelu(acc), 1.2),
}


@everywhere
@pytest.mark.parametrize("name", rotated(list(EPILOGUES), 2, "must epilogues"))
def test_epilogue(place: str, name: str) -> None:
    function, slope = EPILOGUES[name]
    a, b = randn(place, 96, 64, dtype=torch.float16), randn(place, 64, 80, dtype=torch.float16)
    assert_product(gemmtune.mm(a, b, epilogue=function), a, b, function, slope)


@everywhere
def test_epilogue_that_depends_on_a_shape(place: str) -> None:
    for n in (48, 72):
        a, b = randn(place, 40, 64), randn(place, 64, n)
        assert_product(gemmtune.mm(a, b, epilogue=lambda acc, b=b: acc / b.size(1)), a, b, lambda acc, n=n: acc / n)


@everywhere
def test_cast_then_scale_rounds_where_the_cast_stands(place: str) -> None:
    a, b = randn(place, 33, 64), randn(place, 64, 50)
    got = gemmtune.mm(a, b, epilogue=lambda acc: acc.to(torch.float16) * 0.3)
    assert got.dtype == torch.float32
    assert torch.equal(got.half().float(), got), "every step after the cast is one of float16"
    assert_product(gemmtune.mm(a, b, epilogue=lambda acc: (acc * 3.0).to(torch.float16)), a, b, lambda acc: acc * 3.0, 3)


@everywhere
def test_bmm_of_10(place: str) -> None:
    a, b = randn(place, 10, 48, 64, dtype=torch.float16), randn(place, 10, 64, 40, dtype=torch.float16)
    assert_product(gemmtune.bmm(a, b), a, b)


@everywhere
def test_linear_with_bias(place: str) -> None:
    n = 2048 if place == "cuda" else UNOPTIMIZED
    x, weight, bias = randn(place, 16, 4096), randn(place, n, 4096), randn(place, n)
    assert_product(gemmtune.addmm(bias, x, weight.t()), x, weight.t(), lambda acc: acc + bias.double())


BIASES = {"mn": lambda m, n: (m, n), "n": lambda m, n: (n,), "m1": lambda m, n: (m, 1)}


@pytest.mark.rotates(8)
@everywhere
@pytest.mark.parametrize("bias", BIASES)
def test_addmm(place: str, bias: str) -> None:
    check_addmm(place, bias, 256, 201, 128, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("names", GPU_BACKENDS, ids="+".join)
@pytest.mark.parametrize("bias", BIASES)
def test_addmm_4096x25728x2048(own_store: Any, names: tuple[str, ...], bias: str) -> None:
    with settings.patch(backends=names, search="quick"):
        check_addmm("cuda", bias, 4096, 25728, 2048, torch.float16)


def check_addmm(place: str, bias: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    a, b, inp = randn(place, m, k, dtype=dtype), randn(place, k, n, dtype=dtype), randn(place, *BIASES[bias](m, n), dtype=dtype)
    got = gemmtune.addmm(inp, a, b, alpha=2.0, beta=0.4)
    assert_product(got, a, b, lambda acc: 2.0 * acc + 0.4 * inp.double(), 2)


@everywhere
def test_beta_0_ignores_what_is_added(place: str) -> None:
    a, b = randn(place, 32, 40), randn(place, 40, 24)
    assert_product(gemmtune.addmm(torch.full((24,), float("nan"), device=place), a, b, beta=0), a, b)


@everywhere
def test_sizes_of_zero(place: str) -> None:
    assert gemmtune.mm(randn(place, 0, 8), randn(place, 8, 5)).shape == (0, 5)
    assert bool((gemmtune.mm(randn(place, 3, 0), randn(place, 0, 5)) == 0).all())
    inp = randn(place, 5)
    assert torch.equal(gemmtune.addmm(inp, randn(place, 3, 0), randn(place, 0, 5), beta=2), (2 * inp).expand(3, 5))
