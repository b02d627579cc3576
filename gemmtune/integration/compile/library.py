"""The library of the operators that only graphs of our pass name, and the operator that needs no plan."""

from __future__ import annotations

import torch

from ...operators.schema import NAMESPACE

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("sum_of_experts(Tensor rows) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("sum_of_experts", lambda rows: rows.sum(1), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
SUM = torch.ops.gemmtune.sum_of_experts.default
"""Operator that sums [tokens, experts of a token, columns] to [tokens, columns]."""
