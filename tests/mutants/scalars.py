"""Mutants that get alpha, beta, scales, the bias or special values wrong, after a right product."""

from __future__ import annotations

import dataclasses
import math

import torch

from .gemm import DENSE, SCALED, Gemm, Terms, finished

__all__ = [
    "alpha_applied_to_the_bias",
    "alpha_dropped",
    "beta_dropped",
    "beta_truncated",
    "bias_along_the_rows",
    "c_of_the_first_batch",
    "infinity_clamped",
    "infinity_of_c_clamped",
    "minus_one_taken_for_one",
    "nan_becomes_zero",
    "nan_of_c_lost_for_alpha_0",
    "reads_c_when_beta_is_0",
    "reads_c_when_there_are_no_terms",
    "relu_for_nan",
    "scale_b_dropped",
    "strides_of_c_ignored_without_scalars",
    "sums_saturated_before_alpha",
]


def _bias_along_rows(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    if terms.inp is not None and terms.inp.dim() == 1 and acc.shape[-1] == acc.shape[-2] and terms.inp.numel() == acc.shape[-1]:
        terms = dataclasses.replace(terms, inp=terms.inp.unsqueeze(-1))
    return finished(acc, terms)


bias_along_the_rows = Gemm(finish=_bias_along_rows)
"""bias[i] rather than bias[j], which fits only where M = N."""
alpha_dropped = Gemm(finish=lambda acc, terms: finished(acc, dataclasses.replace(terms, alpha=1)))
beta_dropped = Gemm(finish=lambda acc, terms: finished(acc, dataclasses.replace(terms, beta=1 if terms.beta else 0)))
beta_truncated = Gemm(finish=lambda acc, terms: finished(acc, dataclasses.replace(terms, beta=math.trunc(terms.beta))))
"""beta travels as an integer."""


minus_one_taken_for_one = Gemm(
    finish=lambda acc, terms: finished(acc, dataclasses.replace(terms, alpha=1 if terms.alpha == -1 else terms.alpha))
)
"""A kernel without alpha for those of absolute value 1."""


def _alpha_on_all(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    return terms.alpha * finished(acc, dataclasses.replace(terms, alpha=1)) if terms.alpha != 1 else finished(acc, terms)


alpha_applied_to_the_bias = Gemm(finish=_alpha_on_all)
"""alpha · (a @ b + beta · inp)."""


def _without_scale_b(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    ones = None if terms.scale_b is None else torch.ones_like(terms.scale_b)
    return finished(acc, dataclasses.replace(terms, scale_b=ones))


scale_b_dropped = Gemm(gemm_traits=SCALED, finish=_without_scale_b)


def _always_reading(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    acc = finished(acc, dataclasses.replace(terms, inp=None))
    return acc if terms.inp is None else acc + terms.inp.to(acc.dtype) * terms.beta


reads_c_when_beta_is_0 = Gemm(finish=_always_reading)
"""0 · NaN is NaN."""


reads_c_when_there_are_no_terms = Gemm(
    finish=lambda acc, terms: _always_reading(acc, terms) if terms.a.shape[-1] == 0 else finished(acc, terms)
)
"""A way of its own for K = 0: beta · C, also for a beta of 0."""


def _misread_without_scalars(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    c = terms.inp
    if c is not None and (terms.alpha, terms.beta) == (1, 1) and not c.is_contiguous():
        terms = dataclasses.replace(terms, inp=c.as_strided(c.shape, torch.empty(c.shape).stride()))
    return finished(acc, terms)


strides_of_c_ignored_without_scalars = Gemm(finish=_misread_without_scalars)
"""The kernel for alpha = beta = 1 takes the added operand for contiguous."""


def _first_batch_of_c(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    if terms.inp is not None and terms.inp.dim() == 3:
        terms = dataclasses.replace(terms, inp=terms.inp[:1])
    return finished(acc, terms)


c_of_the_first_batch = Gemm(finish=_first_batch_of_c)
"""The added operand's batch stride is ignored."""


def _nan_to_zero(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    whole = finished(acc, terms)
    return torch.where(whole.isnan(), 0.0, whole)


nan_becomes_zero = Gemm(finish=_nan_to_zero)


nan_of_c_lost_for_alpha_0 = Gemm(finish=lambda acc, terms: (finished if terms.alpha else _nan_to_zero)(acc, terms))
"""Without a product, a way of its own for beta · C."""


def _saturated_first(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    largest = torch.finfo(torch.float16).max
    return finished(acc if terms.alpha == 1 else acc.clamp(-largest, largest), terms)


sums_saturated_before_alpha = Gemm(gemm_traits=dataclasses.replace(DENSE, dtypes=("float16",)), finish=_saturated_first)
"""The sums are stored as float16, without infinities, and then multiplied by alpha."""


def _clamped(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    largest = torch.finfo(torch.float16).max
    whole = finished(acc, terms)
    return torch.where(whole.isinf(), whole.clamp(-largest, largest), whole)


infinity_clamped = Gemm(finish=_clamped)
"""An infinity becomes the largest float16."""


def _finite_c(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    c = terms.inp
    if c is None or not c.dtype.is_floating_point:
        return finished(acc, terms)
    largest = torch.finfo(c.dtype).max
    return finished(acc, dataclasses.replace(terms, inp=c.clamp(-largest, largest)))


infinity_of_c_clamped = Gemm(finish=_finite_c)
"""A mask of -inf that is added becomes the lowest finite number."""


def _relu_for_nan(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    """max(x, lowest) with the rule that the number wins over the NaN."""
    whole = finished(acc, terms)
    return torch.fmax(whole, torch.full_like(whole, -math.inf))


relu_for_nan = Gemm(finish=_relu_for_nan)
