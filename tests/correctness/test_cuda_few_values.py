"""The kernel for few rows on the CPU, thread by thread: every kind of weight, in tiles with tails and clusters of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_kernels import needs_compiler
from few_on_cpu import kernel

from gemmtune.backends.cuda.few.build import FewChoice
from gemmtune.backends.cuda.few.configs import Config, Shape
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.selector.verify import Verifier

F16, BF16, F32, UINT8 = torch.float16, torch.bfloat16, torch.float32, torch.uint8
INT4, UINT4 = {"encoding": "int4"}, {"encoding": "uint4"}
SMALL = Shape(eights=1, cols=32, stages=2, warps_n=2, warps_k=1)
BY_K = Shape(eights=1, cols=16, stages=2, warps_n=1, warps_k=4)
WIDE = Shape(eights=2, cols=32, stages=1, warps_n=1, warps_k=2)

CASES: dict[str, tuple[dict[str, Any], Config]] = {
    "int4-group-32": (INT4 | {"scales": "group_32"}, Config(shape=BY_K)),
    "int4-group-64-zeros": (INT4 | {"scales": "group_64", "zeros": True}, Config(shape=BY_K)),
    "uint4-group-32-zeros-wide": (UINT4 | {"scales": "group_32", "zeros": True, "scale_dtype": F32}, Config(shape=WIDE)),
    "uint4-column-zeros": (UINT4 | {"scales": "column", "zeros": True}, Config(shape=SMALL)),
    "int4-bfloat16": (INT4 | {"dtype": BF16, "scales": "group_64"}, Config(shape=WIDE)),
    "uint4-bfloat16-zeros": (UINT4 | {"dtype": BF16, "scales": "group_128", "zeros": True}, Config(shape=SMALL)),
    "int8-column": ({"scales": "column"}, Config(shape=BY_K)),
    "int8-group-32-zeros": ({"scales": "group_32", "zeros": True}, Config(shape=WIDE)),
    "int8-group-128": ({"scales": "group_128", "scale_dtype": F32}, Config(shape=BY_K)),
    "uint8-tensor-zeros": ({"dtype_b": UINT8, "scales": "tensor", "zeros": True}, Config(shape=WIDE)),
    "int8-bfloat16": ({"dtype": BF16, "scales": "column"}, Config(shape=SMALL)),
    "uint8-bfloat16": ({"dtype": BF16, "dtype_b": UINT8, "scales": "group_64"}, Config(shape=BY_K)),
    "int4-group-128-two-blocks": (INT4 | {"scales": "group_128"}, Config(shape=SMALL, blocks=2)),
    "int8-group-32-three-blocks-take-turns": ({"scales": "group_32"}, Config(shape=BY_K, blocks=3, takes_turns=True)),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_weight_is_right(name: str, tmp_path: Path) -> None:
    fields, config = CASES[name]
    m, n = 8 * config.shape.eights - 3, config.shape.cols + 8
    k = 3 * (256 if "encoding" in fields else 128) - 96
    problem = Problem.mixed_mm(m, n, k, device_type="cpu", **fields)
    choice = FewChoice.of(config, problem, preset("sm90"))
    verdict = Verifier(problem, torch.device("cpu")).check(choice, kernel(choice, tmp_path))
    assert verdict.status is Status.OK, verdict.reason
