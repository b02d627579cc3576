"""Kernels of the quantized operations in plain torch, right and broken ones: what becomes of scales is a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from broken_kernels import CPU, Product

from gemmtune.problem import Problem
from gemmtune.problem.epilogue import evaluate

Run = Callable[..., None]
Matrix = torch.Tensor


def unpacked(b: Matrix, encoding: str) -> Matrix:
    """The numbers of b [K, N], int16 where it is packed."""
    if not encoding:
        return b
    k, n = b.shape
    result = torch.empty(2 * k, n, dtype=torch.int16, device=b.device)
    result[::2], result[1::2] = (b % 16).short(), (b // 16).short()
    if encoding == "int4":
        result[result > 7] -= 16
    return result


def swapped(b: Matrix, encoding: str) -> Matrix:
    """The numbers of b with the two of each byte exchanged."""
    return unpacked(b % 16 * 16 + b // 16, encoding)


def unsigned(b: Matrix, encoding: str) -> Matrix:
    """The numbers of b without their sign."""
    return unpacked(b, "uint4") if encoding else b.view(torch.uint8)


def signed(b: Matrix, encoding: str) -> Matrix:
    """The numbers of b with a sign that they do not have."""
    return unpacked(b, "int4") if encoding else b.view(torch.int8)


def spread(scale: Matrix, block: tuple[int, int], size: tuple[int, int]) -> Matrix:
    """The scale of each element of an operand of ``size``, float64."""
    whole = scale.double().reshape(scale.shape if scale.dim() == 2 else (1, 1))
    return whole.repeat_interleave(block[0], 0)[: size[0]].repeat_interleave(block[1], 1)[:, : size[1]].expand(size)


def terms(problem: Problem, extra: tuple[Matrix, ...], device: torch.device = CPU) -> tuple[Matrix, Matrix, Matrix]:
    """scale_a [M, K], scale_b and zero_b [K, N] of each element, float64."""
    given = iter(extra)
    made = []
    for name, size, default in (
        ("scale_a", (problem.m, problem.k), 1.0),
        ("scale_b", problem.b_size, 1.0),
        ("zero_b", problem.b_size, 0.0),
    ):
        if getattr(problem, name) is None:
            made.append(torch.full(size, default, dtype=torch.float64, device=device))
        else:
            made.append(spread(next(given), problem.scale_block(name), size))  # type: ignore[arg-type]
    return made[0], made[1], made[2]


def finish(problem: Problem, out: Matrix, acc: Matrix, extra: tuple[Matrix, ...]) -> None:
    """The epilogue, and the rounding to out."""
    if problem.epilogue is not None:
        acc = evaluate(problem.epilogue, acc.to(problem.epilogue_dtype), extra[len(problem.scales) :])
    out.copy_(acc)


def on_terms(
    problem: Problem,
    product: Product = torch.matmul,
    *,
    weights: torch.dtype | None = None,
    read: Callable[[Matrix, str], Matrix] = unpacked,
    change: Callable[..., tuple[Matrix, Matrix, Matrix]] | None = None,
) -> Run:
    """Scales and zero points applied to a and b, and those rounded to ``weights`` if given, then ``product``.

    ``change(scale_a, scale_b, zero_b)`` gives other ones.
    """

    def run(out: Matrix, a: Matrix, b: Matrix, inp: Any, alpha: float, beta: float, extra: tuple[Matrix, ...]) -> None:
        scale_a, scale_b, zero_b = terms(problem, extra, a.device)
        if change is not None:
            scale_a, scale_b, zero_b = change(scale_a, scale_b, zero_b)
        left, right = a.double() * scale_a, (read(b, problem.encoding).double() - zero_b) * scale_b
        if weights is not None:
            right = right.to(weights)
        work = problem.accumulator
        finish(problem, out, product(left.to(work), right.to(work)), extra)

    return run


def on_sums(problem: Problem, product: Product = torch.matmul, *, steps: int | None = None, remainder: bool = True) -> Run:
    """Scales and zero points applied to sums over ``steps`` elements of K (else over what shares a scale), in float32.

    ``remainder``: a last block that is shorter counts as well.
    """

    def run(out: Matrix, a: Matrix, b: Matrix, inp: Any, alpha: float, beta: float, extra: tuple[Matrix, ...]) -> None:
        scale_a, scale_b, zero_b = (x.float() for x in terms(problem, extra, a.device))
        left, right = a.float(), unpacked(b, problem.encoding).float()
        acc = torch.zeros(problem.m, problem.n, device=a.device)
        block = steps or max(problem.k, 1)
        for begin in range(0, problem.k if remainder else problem.k // block * block, block):
            part = slice(begin, begin + block)
            total = product(left[:, part], right[part])
            if problem.zero_b is not None:
                total = total - left[:, part].sum(dim=1, keepdim=True) * zero_b[begin]
            acc += total * scale_a[:, begin : begin + 1] * scale_b[begin]
        finish(problem, out, acc, extra)

    return run
