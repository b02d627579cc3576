"""The C++ text of an epilogue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemmtune.backends.cpp.printer import print_epilogue
from gemmtune.errors import EpilogueError
from gemmtune.problem import Epilogue
from gemmtune.problem.epilogue import OPERATIONS, Node, Ref
from gemmtune.problem.trace import trace

ACC = Node(op="acc", args=(), dtype=torch.float32)


def printed(function, *operands: torch.Tensor, acc: torch.dtype = torch.float32) -> list[str]:
    return print_epilogue(trace(function, acc, operands), "acc", [f"e{i}" for i in range(len(operands))], "result")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x * 3.3 - 1.234, ["const float v1 = acc * float(0x1.a666666666666p+1);",
                                     "const float v2 = v1 - float(0x1.3be76c0000000p+0);", "result = v2;"]),
        (torch.relu, ["const float v1 = f_relu(acc);", "result = v1;"]),
        (lambda x: torch.where(x > 0, x, -x), ["const bool v1 = acc > float(0x0.0p+0);", "const float v2 = -acc;",
                                               "const float v3 = v1 ? acc : v2;", "result = v3;"]),
        (lambda x: torch.clamp(x, min=0.5), ["const float v1 = f_clamp(acc, float(0x1.0000000000000p-1), float(__builtin_inf()));",
                                             "result = v1;"]),
        (lambda x: x.to(torch.bfloat16) + 0.1, ["const float v1 = round_bf16(acc);",
                                                "const float v2 = round_bf16(v1 + float(0x1.9a00000000000p-4));", "result = v2;"]),
        (lambda x: x.half() * 0.1, ["const float v1 = round_f16(acc);",
                                    "const float v2 = round_f16(v1 * float(0x1.999999999999ap-4));", "result = v2;"]),
        (lambda x: x.double(), ["const double v1 = double(acc);", "result = v1;"]),
    ],
    ids=["numbers", "relu", "where", "one-bound", "rounded-number", "exact-number", "double"],
)  # fmt: skip
def test_statements(function, expected: list[str]) -> None:
    assert printed(function) == expected


def test_operands_promote_as_in_torch() -> None:
    half, double = torch.ones(3, dtype=torch.half), torch.ones(3, dtype=torch.double)
    assert printed(lambda acc, x, y: acc + x + y, half, double)[-2] == "const double v4 = double(v3) + e1;"
    assert "f_maximum(acc, e0)" in printed(lambda acc, x: torch.maximum(acc, x), half)[0]


def test_every_operation_has_a_form() -> None:
    for op in OPERATIONS:
        count = {"clamp": 3, "where": 3, "add": 2, "sub": 2, "mul": 2, "div": 2, "minimum": 2, "maximum": 2}.get(op, 1)
        count = 2 if op in ("lt", "le", "gt", "ge", "eq", "ne") else count
        dtype = torch.bool if count == 2 and op in ("lt", "le", "gt", "ge", "eq", "ne") else torch.float32
        epilogue = Epilogue(nodes=(ACC, Node(op=op, args=(Ref(0),) * count, dtype=dtype)))
        assert print_epilogue(epilogue, "acc", [], "result")[-1] == "result = v1;"


def test_every_function_that_is_printed_is_defined() -> None:
    text = (Path(print_epilogue.__code__.co_filename).parent / "math.jinja").read_text()
    for op in OPERATIONS:
        line = print_epilogue(Epilogue(nodes=(ACC, Node(op=op, args=(Ref(0),) * 3, dtype=torch.float32))), "acc", [], "r")[0]
        if "f_" in line:
            assert f"f_{op}(" in text


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Node(op="fft", args=(Ref(0),), dtype=torch.float32), "no form for 'fft'"),
        (Node(op="add", args=(Ref(0), 1), dtype=torch.int32), "no type for torch.int32, expected a float dtype or bool"),
    ],
    ids=["operation", "dtype"],
)
def test_rejects_nodes_without_a_form(node: Node, message: str) -> None:
    with pytest.raises(EpilogueError, match=message):
        print_epilogue(Epilogue(nodes=(ACC, node)), "acc", [], "result")
