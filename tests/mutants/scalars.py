"""Mutants with a wrong epilogue: alpha, beta, scales, the bias or special values, after a right product."""

from __future__ import annotations

import dataclasses
import math

import torch

from .gemm import DENSE, SCALED, Gemm, Terms, apply_epilogue

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
    return apply_epilogue(acc, terms)


bias_along_the_rows = Gemm(epilogue=_bias_along_rows)
"""bias[i] is used in place of bias[j], which fits only if M = N."""
alpha_dropped = Gemm(epilogue=lambda acc, terms: apply_epilogue(acc, dataclasses.replace(terms, alpha=1)))
beta_dropped = Gemm(epilogue=lambda acc, terms: apply_epilogue(acc, dataclasses.replace(terms, beta=1 if terms.beta else 0)))
beta_truncated = Gemm(epilogue=lambda acc, terms: apply_epilogue(acc, dataclasses.replace(terms, beta=math.trunc(terms.beta))))
"""beta is passed as an integer."""


minus_one_taken_for_one = Gemm(
    epilogue=lambda acc, terms: apply_epilogue(acc, dataclasses.replace(terms, alpha=1 if terms.alpha == -1 else terms.alpha))
)
"""A kernel without alpha runs for any alpha of absolute value 1."""


def _alpha_on_all(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    return (
        terms.alpha * apply_epilogue(acc, dataclasses.replace(terms, alpha=1)) if terms.alpha != 1 else apply_epilogue(acc, terms)
    )


alpha_applied_to_the_bias = Gemm(epilogue=_alpha_on_all)
"""The result is alpha · (a @ b + beta · inp)."""


def _without_scale_b(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    ones = None if terms.scale_b is None else torch.ones_like(terms.scale_b)
    return apply_epilogue(acc, dataclasses.replace(terms, scale_b=ones))


scale_b_dropped = Gemm(gemm_traits=SCALED, epilogue=_without_scale_b)


def _always_reading(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    acc = apply_epilogue(acc, dataclasses.replace(terms, inp=None))
    return acc if terms.inp is None else acc + terms.inp.to(acc.dtype) * terms.beta


reads_c_when_beta_is_0 = Gemm(epilogue=_always_reading)
"""The added operand is read with beta 0, and 0 · NaN is NaN."""


reads_c_when_there_are_no_terms = Gemm(
    epilogue=lambda acc, terms: _always_reading(acc, terms) if terms.a.shape[-1] == 0 else apply_epilogue(acc, terms)
)
"""A special path for K = 0 computes beta · C even if beta is 0."""


def _misread_without_scalars(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    c = terms.inp
    if c is not None and (terms.alpha, terms.beta) == (1, 1) and not c.is_contiguous():
        terms = dataclasses.replace(terms, inp=c.as_strided(c.shape, torch.empty(c.shape).stride()))
    return apply_epilogue(acc, terms)


strides_of_c_ignored_without_scalars = Gemm(epilogue=_misread_without_scalars)
"""The kernel for alpha = beta = 1 takes the added operand for contiguous."""


def _first_batch_of_c(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    if terms.inp is not None and terms.inp.dim() == 3:
        terms = dataclasses.replace(terms, inp=terms.inp[:1])
    return apply_epilogue(acc, terms)


c_of_the_first_batch = Gemm(epilogue=_first_batch_of_c)
"""The batch stride of the added operand is ignored."""


def _nan_to_zero(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    whole = apply_epilogue(acc, terms)
    return torch.where(whole.isnan(), 0.0, whole)


nan_becomes_zero = Gemm(epilogue=_nan_to_zero)


nan_of_c_lost_for_alpha_0 = Gemm(epilogue=lambda acc, terms: (apply_epilogue if terms.alpha else _nan_to_zero)(acc, terms))
"""A special path computes beta · C if there is no product."""


def _saturated_first(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    largest = torch.finfo(torch.float16).max
    return apply_epilogue(acc if terms.alpha == 1 else acc.clamp(-largest, largest), terms)


sums_saturated_before_alpha = Gemm(gemm_traits=dataclasses.replace(DENSE, dtypes=("float16",)), epilogue=_saturated_first)
"""Sums are stored as float16 without infinities, and then multiplied by alpha."""


def _clamped(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    largest = torch.finfo(torch.float16).max
    whole = apply_epilogue(acc, terms)
    return torch.where(whole.isinf(), whole.clamp(-largest, largest), whole)


infinity_clamped = Gemm(epilogue=_clamped)
"""An infinity becomes the largest float16."""


def _finite_c(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    c = terms.inp
    if c is None or not c.dtype.is_floating_point:
        return apply_epilogue(acc, terms)
    largest = torch.finfo(c.dtype).max
    return apply_epilogue(acc, dataclasses.replace(terms, inp=c.clamp(-largest, largest)))


infinity_of_c_clamped = Gemm(epilogue=_finite_c)
"""A mask of -inf in the added operand becomes the lowest finite number."""


def _relu_for_nan(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return max(x, lowest), computed so that the number wins over NaN."""
    whole = apply_epilogue(acc, terms)
    return torch.fmax(whole, torch.full_like(whole, -math.inf))


relu_for_nan = Gemm(epilogue=_relu_for_nan)
