"""trace: graphs of Python functions, and errors for functions without a graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemmtune.errors import EpilogueError
from gemmtune.problem import Layout
from gemmtune.problem.epilogue import OPERATIONS, Node, Ref
from gemmtune.problem.trace import trace

SCALE = torch.ones(4, 5, dtype=torch.bfloat16)


def text(function: Callable[..., Any], *operands: torch.Tensor, acc_dtype: torch.dtype = torch.float32) -> str:
    return str(trace(function, acc_dtype, operands))


def refusal(function: Any, *operands: torch.Tensor) -> str:
    with pytest.raises(EpilogueError) as caught:
        trace(function, torch.float32, operands)
    return str(caught.value)


UNARY = {
    "neg(acc)": (lambda x: -x, torch.neg, torch.negative, lambda x: x.neg()),
    "abs(acc)": (abs, torch.abs, torch.absolute, lambda x: x.abs()),
    "exp(acc)": (torch.exp, lambda x: x.exp()),
    "sqrt(acc)": (torch.sqrt, lambda x: x**0.5),
    "rsqrt(acc)": (torch.rsqrt, lambda x: x.pow(-0.5)),
    "sigmoid(acc)": (torch.sigmoid, torch.special.expit, F.sigmoid, nn.Sigmoid()),
    "tanh(acc)": (torch.tanh, F.tanh, nn.Tanh(), lambda x: x.tanh()),
    "erf(acc)": (torch.erf, torch.special.erf),
    "relu(acc)": (torch.relu, F.relu, nn.ReLU(), nn.ReLU(inplace=True), lambda x: x.relu_(), lambda x: F.relu(x, inplace=True)),
    "relu6(acc)": (F.relu6,),
    "clamp(acc, 0.0, 6.0)": (nn.ReLU6(),),
    "silu(acc)": (F.silu, nn.SiLU()),
    "gelu(acc)": (F.gelu, nn.GELU(), lambda x: F.gelu(x, approximate="none")),
    "gelu_tanh(acc)": (lambda x: F.gelu(x, approximate="tanh"), nn.GELU(approximate="tanh")),
    "mul(acc, acc)": (torch.square, lambda x: x**2, lambda x: torch.pow(x, 2), lambda x: x * x),
    "mul(mul(acc, acc), acc)": (lambda x: x**3,),
    "div(1.0, acc)": (torch.reciprocal, lambda x: 1 / x, lambda x: x**-1),
    "acc": (lambda x: x, lambda x: +x, nn.Identity(), lambda x: x**1),
    "acc.to(bfloat16)": (lambda x: x.to(torch.bfloat16), lambda x: x.bfloat16(), lambda x: x.type(torch.bfloat16)),
    "acc.to(float16)": (lambda x: x.half(), lambda x: x.to(dtype=torch.float16, copy=True)),
    "acc.to(float64)": (lambda x: x.double(),),
    "acc.to(float32)": (lambda x: x.float(), lambda x: x.to(x.dtype)),
}
BINARY = {
    "add(acc, x0)": (lambda x, y: x + y, torch.add, lambda x, y: x.add(y), lambda x, y: x.add_(y)),
    "add(acc, mul(x0, 2))": (lambda x, y: torch.add(x, y, alpha=2),),
    "sub(acc, x0)": (lambda x, y: x - y, torch.sub, torch.subtract, lambda x, y: torch.rsub(y, x)),
    "sub(x0, mul(acc, 3))": (lambda x, y: torch.rsub(x, y, alpha=3),),
    "mul(acc, x0)": (lambda x, y: x * y, torch.multiply),
    "div(acc, x0)": (lambda x, y: x / y, torch.true_divide, torch.divide),
    "minimum(acc, x0)": (torch.minimum, torch.min, lambda x, y: x.minimum(y), lambda x, y: torch.clamp(x, max=y)),
    "maximum(acc, x0)": (torch.maximum, torch.max, lambda x, y: x.clamp_min(y)),
    "minimum(maximum(acc, x0), x0)": (lambda x, y: x.clamp(y, y),),
    "where(gt(acc, x0), acc, x0)": (lambda x, y: torch.where(x > y, x, y), lambda x, y: x.where(torch.greater(x, y), y)),
    "acc.to(bfloat16)": (lambda x, y: x.to(y), lambda x, y: x.type_as(y), lambda x, y: x.to(y.dtype)),
}
WITH_NUMBERS = {
    "relu(sub(mul(acc, 3.3), 1.234))": (lambda x: torch.relu(x * 3.3 - 1.234),),
    "sub(2, acc)": (lambda x: 2 - x, lambda x: torch.rsub(x, 2)),
    "add(acc, 2)": (lambda x: 2 + x, lambda x: torch.add(2, x)),
    "mul(div(1.0, acc), 2)": (lambda x: 2 / x,),
    "clamp(acc, 0, inf)": (lambda x: x.clamp(min=0), lambda x: torch.clip(x, 0), lambda x: torch.clamp_min(x, 0)),
    "clamp(acc, -inf, 3)": (lambda x: x.clamp(max=3), lambda x: torch.clamp_max(x, 3)),
    "clamp(acc, -1.0, 1.0)": (F.hardtanh, nn.Hardtanh(), lambda x: torch.clamp(x, -1.0, 1.0)),
    "where(gt(acc, 0), acc, mul(acc, 0.1))": (lambda x: F.leaky_relu(x, 0.1), nn.LeakyReLU(0.1)),
    "where(lt(acc, 0), 2.0, acc)": (lambda x: x.masked_fill(x < 0, 2.0), lambda x: torch.where(0 > x, 2.0, x)),  # noqa: SIM300
    "mul(acc, le(acc, 6).to(float32))": (lambda x: x * (x <= 6),),
    "silu(relu(acc))": (nn.Sequential(nn.ReLU(), nn.SiLU()),),
}


def _cases(table: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(f, graph, id=f"{graph}-{i}") for graph, functions in table.items() for i, f in enumerate(functions)]


@pytest.mark.parametrize(("function", "graph"), _cases(UNARY | WITH_NUMBERS))
def test_functions_of_the_accumulator(function: Callable[..., Any], graph: str) -> None:
    assert text(function) == graph


@pytest.mark.parametrize(("function", "graph"), _cases(BINARY))
def test_functions_of_an_operand(function: Callable[..., Any], graph: str) -> None:
    assert text(function, SCALE) == graph


def test_every_operation_of_the_graph_can_be_written() -> None:
    made = {
        node.op for f in [f for fs in (UNARY | WITH_NUMBERS).values() for f in fs] for node in trace(f, torch.float32, []).nodes
    }
    made |= {node.op for f in [f for fs in BINARY.values() for f in fs] for node in trace(f, torch.float32, [SCALE]).nodes}
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        made |= {n.op for n in trace(lambda x, f=name: getattr(torch, f)(x, 1.0).float(), torch.float32, []).nodes}
    assert made >= set(OPERATIONS)


def test_outside_numbers_and_operand_sizes() -> None:
    b, factor = torch.empty(3, 7), 0.5
    assert text(lambda acc: acc * factor / b.size(1)) == "div(mul(acc, 0.5), 7)"
    assert text(lambda acc, s: acc * (s.size(1) + 1) / s.shape[0] + s.dim(), SCALE) == "add(div(mul(acc, 6), 4), 2)"


@pytest.mark.parametrize("number", [np.float64(2.5), np.float32(2.5), np.float16(2.5), np.int64(2), True], ids=repr)
def test_every_kind_of_number_becomes_a_plain_one(number: Any) -> None:
    for function in (lambda acc: acc * number, lambda acc: number * acc, functools.partial(torch.mul, other=number)):
        argument = trace(function, torch.float32, []).nodes[-1].args[1]
        assert type(argument) in (int, float)
        assert argument == number


def test_a_bound_method_and_a_callable_object() -> None:
    class Activation:
        slope = 0.25

        def method(self, acc: torch.Tensor) -> torch.Tensor:
            return acc * self.slope

        def __call__(self, acc: torch.Tensor) -> torch.Tensor:
            return acc / self.slope

    assert text(Activation().method) == "mul(acc, 0.25)"
    assert text(Activation()) == "div(acc, 0.25)"


def test_equal_nodes_are_shared_and_dead_ones_dropped() -> None:
    def function(acc: torch.Tensor, s: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        torch.exp(acc * 7)
        return (acc * s) * torch.sigmoid(acc * s)

    epilogue = trace(function, torch.float32, [SCALE, SCALE])
    assert [n.op for n in epilogue.nodes] == ["acc", "operand", "mul", "sigmoid", "mul"]
    assert epilogue.nodes[-1] == Node(op="mul", args=(Ref(2), Ref(3)), dtype=torch.float32)
    assert epilogue.operands == (Layout.of(SCALE), Layout.of(SCALE))


def test_graphs_are_equal_if_their_numbers_mean_the_same() -> None:
    graphs = [trace(lambda x, c=c: x / c, torch.float32, ()) for c in (0.0, -0.0, 0.0, float("nan"), float("nan"))]
    assert [graphs.index(graph) for graph in graphs] == [0, 1, 0, 3, 3]
    assert len({*graphs}) == 3


def test_equal_numbers_of_different_meaning_are_not_shared() -> None:
    epilogue = trace(lambda acc: torch.div(0.0, acc) + torch.div(-0.0, acc), torch.float32, [])
    assert [math.copysign(1, n.args[0]) for n in epilogue.nodes if n.op == "div"] == [1.0, -1.0]


@pytest.mark.parametrize("acc_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (4, 5)], ids=str)
def test_dtypes_are_those_of_torch(acc_dtype: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    operand = torch.ones(shape, dtype=dtype)

    def function(acc: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
        return [
            acc * s,
            acc.to(torch.float16) + s,
            s * 2 + acc.bfloat16(),
            torch.where(acc > s, s, 1.5) - acc,
            torch.minimum(acc, s),
        ]

    eager = function(torch.ones(4, 5, dtype=acc_dtype), operand)
    for i, expected in enumerate(eager):
        epilogue = trace(lambda acc, s, i=i: function(acc, s)[i], acc_dtype, [operand])
        assert epilogue.nodes[-1].dtype == expected.dtype, str(epilogue)


def test_a_final_cast_sets_the_result_dtype() -> None:
    assert trace(lambda acc: (acc * 2).float(), torch.float32, []).result_dtype == torch.float32
    assert trace(lambda acc: acc.half() * 2, torch.float32, []).result_dtype is None


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: torch.softmax(x, -1), "torch.softmax is not a pointwise function that an epilogue can use; usable are abs, add"),
        (lambda x: F.softplus(x), "torch.nn.functional.softplus is not a pointwise function"),
        (lambda x: x.mean(), "torch.Tensor.mean is not a pointwise function"),
        (lambda x: torch.stack([x, x]), "torch.stack is not a pointwise function"),
        (lambda x: torch.max(x), "torch.max cannot be used so"),
        (lambda x: x[0], "operator.getitem is not a pointwise function"),
        (lambda x: x.T, "torch.Tensor.T is not a pointwise function"),
        (lambda x: x @ x, "operator.matmul is not a pointwise function"),
        (lambda x: (x > 0) & (x < 1), "operator.and_ is not a pointwise function"),
        (lambda x: x**5, "torch.pow: expected a tensor and one of the exponents -2, -1, -0.5, 0.5, 1, 2, 3"),
        (lambda x: x if x > 0 else -x, "use torch.where(condition, x, y) in place of if"),
        (lambda x: x * float(x), "cannot be traced"),
        (lambda x: x * math.exp(x), "must be real number, not _Proxy); use torch functions only"),
        (lambda x: (x, x), "returns a tuple, expected one tensor"),
        (lambda x: 1.0, "returns 1.0, expected a tensor computed from the accumulator"),
        (lambda x: x.dtype, "the result is torch.float32, which is not computed from the accumulator"),
        (lambda x: SCALE, "uses a tensor of shape [4, 5] that is not among its arguments; pass it through epilogue_args=(...)"),
        (lambda x: x + SCALE, "uses a tensor of shape [4, 5] that is not among its arguments; pass it through epilogue_args=(...)"),
        (nn.PReLU(), "uses a tensor of shape [1] that is not among its arguments"),
        (lambda x: x > 0, "the result is torch.bool; end the function in a cast, such as .to(torch.float32)"),
        (lambda x: x.to(torch.int8), "got torch.int8, expected one of torch.float64, torch.float32, torch.float16, torch.bfloat16"),
        (lambda x: x.to("cuda"), "torch.Tensor.to: got 'cuda', expected a dtype: an epilogue moves nothing between devices"),
        (lambda x: x.to(device="cpu", dtype=torch.float16), "torch.Tensor.to: got device, expected a dtype"),
        (
            lambda x: x / x.size(1),
            "reads the size of a computed value, which is unknown during tracing; take sizes from the",
        ),
        (lambda x: torch.add(x, x, out=x), "torch.add cannot be used so"),
        (lambda x: torch.where(x, x, 0.0), "torch.where: got a condition of torch.float32, expected torch.bool"),
        (lambda x: torch.clamp(x), "torch.clamp: got neither min nor max"),
        (lambda x: torch.clamp(x, min=x, max=2.0), "torch.clamp: got a tensor and a number, expected bounds of the same kind"),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), "torch.div: got rounding_mode='floor', expected None"),
        (lambda x: F.gelu(x, approximate="quick"), "got approximate='quick', expected 'none' or 'tanh'"),
        (lambda x: x * "2", "mul: got an argument of type str, expected a tensor or a Python number"),
        (lambda x: x * 2j, "mul: got an argument of type complex, expected a tensor or a Python number"),
        (
            lambda x: torch.where(x > 0, 1, 0),
            "where: the result would be torch.int64, expected a float; write the numbers as floats",
        ),
        (lambda x, y: x, "is called with the accumulator and 0 epilogue_args (missing a required argument: 'y')"),
        (lambda: 1, "is called with the accumulator and 0 epilogue_args (too many positional arguments)"),
        (3, "expected a function of the accumulator, got int"),
    ],
)
def test_rejects_inexpressible_functions(function: Any, said: str) -> None:
    message = refusal(function)
    assert said in message
    assert message.startswith("epilogue ")


def test_the_message_names_the_function() -> None:
    def fancy(acc: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(acc, 0)

    assert refusal(fancy).startswith("epilogue fancy: torch.cumsum is not a pointwise function that an epilogue can use")
    assert refusal(fancy).endswith("or call the operation without epilogue= and apply the function to its result")


def test_the_result_must_depend_on_the_accumulator() -> None:
    assert "does not depend on the accumulator" in refusal(lambda acc, s: s * 2, SCALE)


def test_operands_of_other_dtypes_are_refused() -> None:
    message = refusal(lambda acc, i: acc * i, torch.ones(3, dtype=torch.int64))
    assert "epilogue_args[0]: got torch.int64, expected torch.bool or one of torch.float64" in message


def test_a_mask_operand_is_a_condition() -> None:
    assert text(lambda acc, mask: torch.where(mask, acc, 0.0), torch.ones(3, dtype=torch.bool)) == "where(x0, acc, 0.0)"


def test_in_place_needs_an_unshared_value() -> None:
    assert text(lambda acc: (acc * 2).relu_()) == "relu(mul(acc, 2))"
    assert "changes the caller's" not in text(lambda acc: acc.add_(1))
    assert "used again" in refusal(lambda acc: (acc.relu_(), acc)[1])
    assert "used again" in refusal(lambda acc: acc.float().relu_() + acc)
    assert "which would change the caller's tensor" in refusal(lambda acc, s: acc + s.relu_(), SCALE)


def test_in_place_keeps_the_dtype() -> None:
    assert trace(lambda acc, s: acc.half().mul_(s), torch.float32, [SCALE.float()]).nodes[-1].dtype == torch.float16


def test_errors_of_the_functions_own_code_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        trace(lambda acc: acc * (1 // 0), torch.float32, [])
    with pytest.raises(NameError):
        trace(lambda acc: acc * not_there, torch.float32, [])  # type: ignore[name-defined]  # noqa: F821


def test_tracing_leaves_the_random_state() -> None:
    state = torch.get_rng_state()
    trace(lambda acc, s: torch.relu(acc * s - 1.234), torch.float32, [SCALE])
    assert torch.equal(state, torch.get_rng_state())


def test_a_method_called_with_keywords_alone_is_refused_with_the_remedy() -> None:
    with pytest.raises(EpilogueError, match=r"where cannot be used so"):
        trace(lambda x: x.where(condition=x > 0, other=0.0), torch.float32, [])
