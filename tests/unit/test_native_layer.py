"""The native forward of a layer: kept calls, calls left to Python, and results equal to Python's."""

from __future__ import annotations

import ctypes
import dataclasses
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from native_calls import in_place
from tables_of_rows import put_table
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import gemmtune
from gemmtune import settings
from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.dispatch.ready import forget_plans, generation
from gemmtune.integration.picks import pick_for
from gemmtune.native.lookup import keep_layer, native
from gemmtune.problem import Problem
from gemmtune.settings import current
from gemmtune.store.store import open_store

pytestmark = [pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"), pytest.mark.slow]
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _in_place(own_store: object) -> Iterator[None]:
    with in_place(backends=("aten", "cpp"), search="quick", native=True, rows="shared"):
        yield


def layer(bias: bool = True) -> nn.Linear:
    """An optimized layer."""
    made = nn.Linear(48, 32, bias=bias)
    gemmtune.optimize(nn.Sequential(made))
    return made


def looked_up(made: nn.Linear, input: Any) -> Any:
    return native.module.layer(input, made.weight, made.bias)


def torchs(made: nn.Linear, input: Tensor) -> Tensor:
    return functional.linear(input, made.weight, made.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 48), (1, 48), (2, 3, 48), (2, 1, 3, 48)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_keeps_the_operation_of_torch_without_a_pick(shape: tuple[int, ...], bias: bool, mode: Callable[[], Any]) -> None:
    made, input = layer(bias), torch.randn(shape)
    with mode():
        assert looked_up(made, input) is False
        assert torch.equal(made(input), torchs(made, input))
        found = looked_up(made, input)
        assert torch.equal(found, torchs(made, input))
        assert found.shape == (*shape[:-1], 32)
        assert found.is_inference() == torch.is_inference_mode_enabled()


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.turn(3, 4)
def test_the_last_row_of_a_prompt_is_no_batch_of_matrices() -> None:
    made = nn.Linear(256, 16384, bias=False).to(torch.bfloat16).requires_grad_(False)
    gemmtune.optimize(nn.Sequential(made))
    last, alone = torch.randn(1, 37, 256).to(torch.bfloat16)[:, -1:], torch.randn(1, 1, 256).to(torch.bfloat16)
    assert last.stride() != alone.stride()
    with torch.no_grad():
        with Operators() as seen:
            made(last)
        assert "aten::bmm" not in seen.names
        made(last)
        made(alone)
        last_s, alone_s = (min(timeit.repeat(lambda x=x: looked_up(made, x), number=1, repeat=7)) for x in (last, alone))
        assert torch.equal(looked_up(made, last), looked_up(made, last.clone(memory_format=torch.contiguous_format)))
    assert last_s < 8 * alone_s, "a batch of matrices takes 45 times as long"


def test_a_pick_is_launched_for_inputs_of_any_rank() -> None:
    with torch.no_grad():
        for bias in (True, False):
            made = layer(bias)
            for rows in (torch.randn(6, 48), torch.randn(2, 3, 48)):
                flat = rows.view(-1, 48)
                gemmtune.addmm(made.bias, flat, made.weight.t()) if bias else gemmtune.mm(flat, made.weight.t())
                store = open_store(current())
                slow = [row for row in store.every_row() if row.backend == "aten" and row.time_us is not None]
                store.put([dataclasses.replace(row, time_us=row.time_us + 1e6) for row in slow])
                forget_plans()
                tensors = (flat, made.weight.t(), made.bias) if bias else (flat, made.weight.t())
                found = pick_for("addmm" if bias else "mm", tensors, (1, 1) if bias else ())
                assert found is not None
                assert found.plan.choice.backend == "cpp"
                assert looked_up(made, rows) is False
                python = made(rows)
                found = looked_up(made, rows)
                assert torch.equal(found, python)
                assert found.is_contiguous()
                made.weight.add_(1)  # the memory of a call counts, not that of the first
                assert torch.allclose(looked_up(made, rows), torchs(made, rows), atol=1e-4)
                for other in weights_of_other_layouts():
                    made.weight = nn.Parameter(other, requires_grad=False)
                    made.bias = nn.Parameter(torch.randn(len(other))) if bias else None
                    for _ in range(3):
                        assert torch.allclose(made(rows), torchs(made, rows), atol=1e-4), (other.shape, other.stride())
                made.weight, made.bias = (nn.Parameter(torch.randn(size)) for size in ((32, 48), (32,)))
                for _ in range(3):
                    misaligned = torch.randn(6 * 48 + 1)[1:].view_as(rows)
                    assert torch.allclose(made(misaligned), torchs(made, misaligned), atol=1e-4)


def weights_of_other_layouts() -> list[Tensor]:
    """Weights whose products a pick for a dense one of 32x48 would compute wrong."""
    dense = torch.randn(64, 96)
    transposed, misaligned, with_gaps = torch.randn(48, 32).t(), dense[:32, 1:49], dense[::2, ::2]
    return [transposed, misaligned, with_gaps, dense[:1, :48].expand(32, 48), torch.randn(17, 48), torch.randn(40, 48)]


class Subclass(Tensor):
    """Any subclass of a tensor."""


def test_unusual_calls_are_left_to_python() -> None:
    made, input = layer(), torch.randn(5, 48)
    with torch.no_grad():
        made(input)
        assert isinstance(looked_up(made, input), Tensor)
        for other in (input.t().contiguous().t(), input[0], input.as_subclass(Subclass), torch.randn(0, 48), None):
            assert looked_up(made, other) is None
        with torch.autocast("cpu"):
            assert looked_up(made, input) is None
        with settings.patch(search="default"):
            assert looked_up(made, input) is False
    assert looked_up(made, input) is None  # the weight wants a gradient
    result = made(input)
    result.sum().backward()
    assert made.weight.grad is not None
    assert torch.equal(torch.func.vmap(made)(input), torch.func.vmap(lambda x: torchs(made, x))(input))


def test_dropped_plans_are_not_found() -> None:
    made, input = layer(), torch.randn(5, 48)
    with torch.no_grad():
        number = generation.number
        made(input)
        forget_plans()
        assert looked_up(made, input) is False
        keep_layer(number, None, 0, (input, made.weight, made.bias))
        assert looked_up(made, input) is False


def test_python_serves_while_a_graph_is_captured() -> None:
    made, input, capturing = layer(), torch.randn(5, 48), 0
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), *[ctypes.c_void_p] * 4)

    @kind
    def info(stream: Any, state: Any, *rest: Any) -> int:
        state[0] = capturing
        return 0

    with torch.no_grad():
        keep_layer(generation.number, None, ctypes.cast(info, ctypes.c_void_p).value or 0, (input, made.weight, made.bias))
        assert torch.equal(looked_up(made, input), torchs(made, input))
        capturing = 1
        assert looked_up(made, input) is None
        assert torch.equal(made(input), torchs(made, input))


def test_wrong_use_is_an_error() -> None:
    with pytest.raises(TypeError, match="expected"):
        native.module.layer(torch.ones(2, 2))
    with pytest.raises(TypeError, match="expected"):
        native.module.keep_layer(1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("served", ["cpp", "aten"])
def test_any_number_of_rows_is_found_where_the_weight_has_a_table(bias: bool, served: str) -> None:
    """This includes inputs of other ranks and both sides of a crossover. Beyond the table torch runs."""
    made = layer(bias)
    like = {"dtype": torch.float32, "device_type": "cpu"}
    problem = Problem.addmm(2, 32, 48, bias="n", **like) if bias else Problem.mm(2, 32, 48, **like)
    put_table(problem, [(1, 20, "cpp"), (21, 64, served)])
    with torch.no_grad():
        assert looked_up(made, torch.randn(7, 48)) is False
        made(torch.randn(7, 48))
        for shape in ((2, 48), (20, 48), (21, 48), (64, 48), (3, 11, 48), (2, 1, 5, 48)):
            input = torch.randn(shape)
            found = looked_up(made, input)
            assert isinstance(found, Tensor), shape
            assert found.shape == (*shape[:-1], 32)
            torch.testing.assert_close(found, torchs(made, input), atol=1e-4, rtol=1e-4)
        assert looked_up(made, torch.randn(65, 48)) is False
        assert native.module.rows_of(torch.randn(7, 48), made.weight, made.bias) is None, "they are known"
        for rows in (65, 1):
            input = torch.randn(rows, 48)
            torch.testing.assert_close(made(input), torchs(made, input), atol=1e-4, rtol=1e-4)
            assert isinstance(looked_up(made, input), Tensor)
        forget_plans()
        assert looked_up(made, torch.randn(20, 48)) is False


def test_a_bias_with_the_rows_of_the_input_is_no_bias_for_other_rows() -> None:
    weight, input = torch.randn(32, 48), torch.randn(4, 48)
    assert native.module.rows_of(input, weight, torch.randn(4, 32)) == 0
    assert native.module.rows_of(input, weight, torch.randn(32)) == 1
    assert native.module.rows_of(input[:1], weight, torch.randn(32)) is None, "one row"
    assert native.module.layer(input, weight, torch.randn(4, 32)) is False
    assert native.module.layer(input.view(2, 2, 48), weight, torch.randn(4, 32)) is None, "it broadcasts to the batch"
