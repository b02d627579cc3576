"""Triton's statements of an epilogue, computed by torch under Triton's names."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gemmtune.backends.triton.printer import TRITON_DTYPES, print_epilogue
from gemmtune.problem.trace import trace

NUMBERS = torch.tensor([-float("inf"), -7.0, -1.5, -0.2, -0.0, 0.0, 0.1, 1.0, 3.0, 6.5, float("inf"), float("nan")])
OTHERS = torch.tensor([1.0, -8.0, 2.0, -0.2, 0.5, 0.0, float("nan"), -1.0, 3.0, 6.0, 4.0, 2.0])
NAMES = {
    "tl": SimpleNamespace(
        abs=torch.abs, exp=torch.exp, rsqrt=torch.rsqrt, erf=torch.erf, sqrt=torch.sqrt, sqrt_rn=torch.sqrt, where=torch.where,
        div_rn=torch.div, full=lambda size, value, dtype: torch.full(size, value, dtype=dtype),
        **{name.removeprefix("tl."): dtype for dtype, name in TRITON_DTYPES.items()},
    ),
    "libdevice": SimpleNamespace(tanh=torch.tanh),
    "round_bfloat16": lambda x: x.bfloat16().float(),
}  # fmt: skip
OF_ONE: dict[str, Callable[..., torch.Tensor]] = {
    "neg": lambda x: -x, "abs": torch.abs, "exp": torch.exp, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "erf": torch.erf,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu, "relu": torch.relu, "relu6": F.relu6,
    "gelu": lambda x: F.gelu(torch.clamp(x, -9, 9)),  # torch's own has NaN at infinity on some CPUs
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "clamp": lambda x: torch.clamp(x, -0.5, 2.5),
    "one bound": lambda x: torch.clamp(x, min=0.3), "halves": lambda x: x.half() * 0.1, "double": lambda x: x.double() / 3,
}  # fmt: skip
OF_TWO: dict[str, Callable[..., torch.Tensor]] = {
    "arithmetic": lambda x, y: (x + y) * 2 - x / 3.3, "minimum": torch.minimum, "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, 0.5),
    "comparisons": lambda x, y: torch.where(x < y, 1.0, 2.0) + torch.where(x <= 3, 4.0, 8.0) + torch.where(x >= y, 16.0, 32.0),
    "equality": lambda x, y: torch.where(x == y, 1.0, 2.0) + torch.where(x != 3, 4.0, 8.0),
    "bfloat16": lambda x, y: x.bfloat16() + y.bfloat16(),
}  # fmt: skip


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("name", [*OF_ONE, *OF_TWO])
def test_statements_compute_torchs_function(name: str, interpret: bool) -> None:
    function, operands = (OF_ONE[name], ()) if name in OF_ONE else (OF_TWO[name], (OTHERS,))
    lines = print_epilogue(trace(function, torch.float32, operands), "acc", ["other"], "result", interpret=interpret)
    values: dict[str, Any] = {"acc": NUMBERS, "other": OTHERS}
    exec("\n".join(lines), dict(NAMES), values)
    expected = function(NUMBERS, *operands)
    tolerance = 2e-5 if expected.dtype == torch.float32 else 0.0
    assert torch.allclose(values["result"].to(expected.dtype), expected, rtol=tolerance, atol=tolerance, equal_nan=True), lines
