"""Rounded operands show by the errors that they leave, far below the bound, and no other error is taken for them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

from gemmtune.choice import Claims
from gemmtune.problem import Problem
from gemmtune.untrusted.checks import Checker
from gemmtune.untrusted.rounded import rounded, rounded_to
from gemmtune.untrusted.variations import special

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Draw = Callable[..., torch.Tensor]
Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def errors(gemm: Gemm, dtype: torch.dtype, draw: Draw, rows: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(k)
    a, b = draw(1, rows, k).to(dtype), draw(1, k, n).to(dtype)
    return gemm(a.float(), b.float()).to(dtype).double() - a.double() @ b.double(), a, b


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float()


def of_bits(bits_a: int, bits_b: int) -> Gemm:
    return lambda a, b: exact(rounded(a, bits_a), rounded(b, bits_b))


def in_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (x, dx), (y, dy) = ((x.bfloat16().float(), (x - x.bfloat16()).bfloat16().float()) for x in (a, b))
    return exact(x, y) + exact(x, dy) + exact(dx, y)


def biased(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double() - 1e-5 * (a.abs().double() @ b.abs().double())).float()


def last_columns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a @ b[..., :-32], of_bits(11, 11)(a, b[..., -32:])], -1)


@pytest.mark.parametrize("draw", [torch.rand, torch.randn], ids=["positive", "normal"])
@pytest.mark.parametrize(
    ("gemm", "dtype", "found"),
    [
        (of_bits(11, 24), F32, "tf32 or float16"), (of_bits(24, 8), F32, "bfloat16"), (of_bits(8, 8), F32, "bfloat16"),
        (in_parts, F32, "two bfloat16 parts, multiplied in three products"), (last_columns, F32, "tf32 or float16"),
        (of_bits(24, 4), BF16, "8-bit floats"), (of_bits(4, 4), F16, "8-bit floats"),
    ],
)  # fmt: skip
def test_rounded_operands_are_found(gemm: Gemm, dtype: torch.dtype, found: str, draw: Draw) -> None:
    assert rounded_to(*errors(gemm, dtype, draw, 6, 1100, 1024), dtype, "ieee") == found


@pytest.mark.parametrize("draw", [torch.rand, torch.randn], ids=["positive", "normal"])
@pytest.mark.parametrize("gemm", [torch.matmul, exact, biased], ids=["torch", "exact", "biased"])
def test_no_other_error_is_one_of_rounded_operands(gemm: Gemm, draw: Draw) -> None:
    for dtype in (F32, F16, BF16):
        for sizes in ((6, 1, 64), (6, 2, 100), (1, 4000, 200), (40, 33, 1), (6, 1100, 300)):
            assert rounded_to(*errors(gemm, dtype, draw, *sizes), dtype, "ieee") is None, (dtype, sizes)
    assert rounded_to(*errors(of_bits(11, 11), F32, draw, 6, 500, 64), F32, "tf32") is None


def test_equal_errors_count_once() -> None:
    """Most columns of b are equal, and so are their errors."""
    for seed in range(150):
        torch.manual_seed(seed)
        a, b = torch.randn(65, 69).abs().remainder(1), torch.randn(69, 86)
        special("one b", a, b, random.Random(seed))
        a, b = a[:6] * (1 + 2.0**-10), b * (1 + 2.0**-10)
        error = (a @ b).double() - a.double() @ b.double()
        assert rounded_to(error[None], a[None].double(), b[None].double(), F32, "ieee") is None, seed


def test_operands_that_a_type_holds_are_not_rounded() -> None:
    error, a, b = errors(torch.matmul, BF16, torch.randn, 6, 300, 64)
    assert rounded_to(error, a.float(), b.float(), F32, "ieee") is None


def test_takes_no_like_errors_of_near_rows_for_rounded_operands() -> None:
    """Errors of rows that are nearly the same are one error, and agree with any pattern by chance."""
    generator = torch.Generator().manual_seed(8)
    base = torch.randn(1, 4, 64, generator=generator)
    near = base[:, [0, 1, 2, 3] * 40] * (1 + 1e-5 * torch.rand(1, 160, 64, generator=generator))
    b = torch.randn(1, 64, 96, generator=generator)
    error = (rounded(near, 11) - near).double() @ b.double()
    assert rounded_to(error, near, b, torch.float32, "ieee") is None
    apart = torch.randn(near.shape, generator=generator)
    error = (rounded(apart, 11) - apart).double() @ b.double()
    assert rounded_to(error, apart, b, torch.float32, "ieee") == "tf32 or float16"


@pytest.mark.parametrize("dtype", [F32, torch.float64])
def test_equal_terms_show_no_narrower_type_of_a_plain_sum(dtype: torch.dtype) -> None:
    """Signs by their own transpose: the terms of each sum of the diagonal are equal, and all rounded in one direction."""
    a = torch.randn(293, 293, generator=torch.Generator().manual_seed(1)).sign().to(dtype) / 293**0.5
    problem = Problem.mm(293, 293, 293, dtype=dtype)
    checker = Checker(problem, Claims(accumulate=dtype), torch.device("cpu"), 5)
    operands = dataclasses.replace(checker.plain(), a=a, b=a.mT.contiguous())
    total = torch.zeros_like(a)
    for column in range(293):
        total += a[:, column, None] * operands.b[None, column]
    assert checker.trouble(total, operands) is None
    rough = checker.trouble((a.half() @ operands.b.half()).to(dtype), operands)
    assert rough is not None
