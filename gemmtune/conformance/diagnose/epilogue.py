"""Bugs of the epilogue: alpha, beta, the added operand, scales."""

import math
from collections.abc import Iterator
from typing import Unpack

import torch

from ...problem.dtypes import dtype_name
from .evidence import Reading, View
from .match import Suspect

MOST_SPLITS = 16
NOTHING = ("zeros", "product missing, only the bias is there", "product missing, only C is there")
"""Names of a missing product."""


def added_name(view: View) -> str:
    """Return the name of the added operand in diagnoses: C if it is larger than a row or column, else the bias."""
    inp = view.evidence.operands.inp
    return "C" if inp is not None and inp.numel() > max(view.problem.m, view.problem.n) else "the bias"


def missing(view: View) -> Iterator[Suspect]:
    """Yield suspects that compute nothing, or only one of the two terms."""
    zeros = torch.zeros_like(view.expected)
    yield Suspect("zeros", zeros)
    if view.inp is not None:
        yield Suspect(f"product missing, only {added_name(view)} is there", view.result(zeros))
        yield Suspect(f"{added_name(view)} dropped", view.alpha * view.product)


def scalars(view: View) -> Iterator[Suspect]:
    """Yield suspects that drop, repeat or exchange alpha and beta, or apply them to the wrong term."""
    product, alpha, beta = view.product, view.alpha, view.beta
    yield Suspect("alpha dropped", view.result(alpha=1.0))
    yield Suspect("alpha applied twice", view.result(alpha=alpha**2))
    yield Suspect("sign of alpha ignored", view.result(alpha=abs(alpha)))
    yield Suspect("alpha rounded to an integer", view.result(alpha=float(math.trunc(alpha))))
    dtype = view.problem.dtype
    narrow = dtype.is_floating_point and dtype.itemsize == 2
    rounded_alpha, rounded_beta = torch.tensor([alpha, beta], dtype=torch.float64).to(dtype).tolist() if narrow else (alpha, beta)
    if narrow:
        yield Suspect(f"alpha rounded to {dtype_name(dtype)}", view.result(alpha=rounded_alpha))
    if view.inp is None:
        return
    inp, name = view.inp, added_name(view)
    yield Suspect("beta dropped", alpha * product + inp)
    yield Suspect("alpha and beta dropped", product + inp)
    yield Suspect("beta applied twice", alpha * product + beta**2 * inp)
    repeated = f", or {name} added {alpha:g} times" if alpha >= 2 and alpha % 1 == 0 else ""
    yield Suspect(f"alpha applied to {name}{repeated}", alpha * (product + beta * inp))
    yield Suspect("beta rounded to an integer", alpha * product + math.trunc(beta) * inp)
    yield Suspect("beta applied to the product", beta * (alpha * product + inp))
    yield Suspect("alpha and beta exchanged", beta * product + alpha * inp)
    yield Suspect(f"alpha in place of beta for {name}", alpha * (product + inp))
    yield Suspect(f"{name} subtracted", alpha * product - beta * inp)
    if narrow:
        yield Suspect(f"beta rounded to {dtype_name(dtype)}", alpha * product + rounded_beta * inp)


def per_split(view: View) -> Iterator[Suspect]:
    """Yield suspects that add the added operand to the partial sum of every K split."""
    if view.inp is None:
        return
    name = added_name(view)
    for splits in range(2, MOST_SPLITS + 1):
        text = f"{name} added {splits} times, as if once for each of {splits} K splits"
        yield Suspect(text, view.result() + (splits - 1) * view.beta * view.inp, MOST_SPLITS)


def wrong_axis(view: View) -> Iterator[Suspect]:
    """Yield suspects that read the added operand along the other dimension, from one element or line only, or one place off."""
    if view.inp is None:
        return
    inp, name, (m, n) = view.matrix("inp"), added_name(view), (view.problem.m, view.problem.n)
    batch_step, row_step, col_step = inp.stride()
    rows, cols = view.rows, view.cols

    def read(**how: Unpack[Reading]) -> torch.Tensor:
        return view.result(inp=view.read("inp", **how))

    if row_step == 0 or col_step == 0:
        length = n if row_step == 0 else m
        swapped = (batch_step, col_step, row_step)
        yield Suspect(f"{name} on the wrong axis", read(stride=swapped, rows=rows % length, cols=cols % length))
    elif m == n:
        yield Suspect(f"{name} transposed", read(stride=(batch_step, col_step, row_step)))
    yield Suspect(f"first element of {name} used for all", read(stride=(batch_step, 0, 0)))
    yield Suspect(f"first row of {name} used for all", read(stride=(batch_step, 0, col_step)))
    yield Suspect(f"first column of {name} used for all", read(stride=(batch_step, row_step, 0)))
    for shift, text in ((1, "one element too far"), (-1, "one element too early")):
        if col_step:
            yield Suspect(f"{name} read {text}", read(cols=(cols + shift).clamp(0, n - 1)))
        elif row_step:
            yield Suspect(f"{name} read {text}", read(rows=(rows + shift).clamp(0, m - 1)))


def scales(view: View) -> Iterator[Suspect]:
    """Yield suspects that drop scales of scaled_mm, or read them along the other dimension."""
    operands = view.evidence.operands
    if operands.scale_a is None or operands.scale_b is None or view.scaled_inside:
        return
    plain = view.a @ view.b
    first, second = (x.double().flatten().cpu() for x in (operands.scale_a, operands.scale_b))
    by_row = first[view.rows] if len(first) > 1 else first
    by_col = second[view.cols] if len(second) > 1 else second
    alike = bool((by_row.unsqueeze(-1) == by_col).all())
    yield Suspect("scale_a or scale_b dropped" if alike else "scale_a dropped", plain * by_col)
    yield Suspect("scale_b dropped", plain * by_row.unsqueeze(-1))
    yield Suspect("both scales dropped", plain)
    yield Suspect("scales applied twice", view.product * view.scales)
    yield Suspect("first scale used for all", plain * first[:1] * second[:1])
    if len(first) > 1 and len(second) > 1:
        swapped = first[view.cols % len(first)] * second[view.rows % len(second)].unsqueeze(-1)
        yield Suspect("scale_a and scale_b on each other's axis", plain * swapped)
