"""Kinds of operands by name. They need no torch, so the command's help reads them too."""

from __future__ import annotations

from typing import Literal

BiasShape = Literal["n", "mn", "m1", "1n", "scalar"]
"""The shape of an added operand: [N], [M, N], [M, 1], [1, N] or a scalar."""
Scales = Literal["tensor", "row", "block_1x128", "block_128x128"]
"""The scales of scaled_mm: one for each operand; one for each row of a and each column of b; one for each 128 elements along K
of a row or column; or for b one for each 128×128 block."""
WeightScales = Literal["none", "tensor", "column", "group_32", "group_64", "group_128"]
"""The scales of b in mixed_mm: none, one number, one for each column, or one for each 32, 64 or 128 elements of a column."""
Encoding = Literal["", "int4", "uint4"]
"""The encoding of b: its dtype alone, or two numbers in each uint8, with the number of the even k in the low four bits."""
Imbalance = Literal["even", "skewed"]
"""Balance of the blocks: ``even`` if the longest block row has at most SKEWED times the mean number of blocks, plus one."""
Gate = Literal["", "silu", "gelu", "gelu_tanh"]
"""Activation of the half of b's columns that are gates; empty for a product without gates."""
