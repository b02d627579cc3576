"""Layers and functions of every kind give torch's result, strides, storage and errors for inputs of every kind."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from input_kinds import TOLERANCE, difference, input_kinds, outcome
from models import transformers
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import gemmtune
from gemmtune import settings
from gemmtune.choice import Kernel
from gemmtune.dispatch import call
from gemmtune.dispatch.plan import Plan
from gemmtune.dispatch.ready import plan_for
from gemmtune.errors import InvalidProblemError
from gemmtune.integration import eager, picks
from gemmtune.integration.picks import Pick

Tensor = torch.Tensor
Runs = Callable[[Any], Any]
K, N = 4, 6
NARROW = {"rtol": 0.2, "atol": 0.2}
"""Tolerance for layers that round the rows of their input to eight bits."""
GARBAGE = ("meta",)
"""Inputs for which torch returns memory that nothing was written to."""


@pytest.fixture(autouse=True)
def picked(own_store: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let a pick run every product that a pick can run. Yield the operations of these products."""
    found: list[str] = []

    def pick_for(op: str, tensors: Any, scalars: Any = (), options: Any = ()) -> Pick | None:
        problem = picks.stated(op, tensors, scalars, options)
        if problem is None or problem.empty or 0 in problem.summed:
            return None
        found.append(op)
        return Pick(plan=plan_for(problem, tensors[0].get_device()), saves_us=1e9, in_graph_only=False)

    monkeypatch.setattr(eager, "pick_for", pick_for)
    with settings.patch(tune="never", backends=("aten",)):
        yield found


def differences(ours: Runs, torchs: Runs, *, without: tuple[str, ...] = (), tolerance: Any = TOLERANCE) -> dict[str, str]:
    """Return the differences between two callables by the kind of input. Ours is called twice with each."""
    found = {}
    inputs = [(kind, x) for kind, x in input_kinds(K) if kind not in without]
    for mode in (torch.enable_grad, torch.inference_mode):
        for kind, x in inputs:
            with mode():
                expected = outcome(lambda x=x: torchs(x))
                for _ in range(2):
                    why = difference(outcome(lambda x=x: ours(x)), expected, values=kind not in GARBAGE, tolerance=tolerance)
                    found |= {} if why is None else {f"{kind}, {mode.__name__}": why}
    return found


def recorded(runs: Runs) -> Runs:
    """Return a callable that runs while gemmtune records."""

    def run(x: Any) -> Any:
        with gemmtune.record():
            return runs(x)

    return run


def used(runs: Runs) -> Runs:
    """Return a callable that runs in a block of ``gemmtune.use()``."""
    block = gemmtune.use()

    def run(x: Any) -> Any:
        with block:
            return runs(x)

    return run


def test_optimized_layers(picked):
    conv1d = transformers.pytorch_utils.Conv1D
    layers = {
        "Linear": nn.Linear(K, N),
        "Linear without bias": nn.Linear(K, N, bias=False),
        "Linear of float16": nn.Linear(K, N).requires_grad_(False).half(),
        "Linear without outputs": nn.Linear(K, 0),
        "Linear without inputs": nn.Linear(0, N),
        "Linear without inputs or bias": nn.Linear(0, N, bias=False),
        "Conv1D": conv1d(N, K),
        "Conv1D without outputs": conv1d(0, K),
    }
    for rows in (3, 6):
        layers[f"Linear with a bias of {rows} rows"] = of_rows = nn.Linear(K, N)
        of_rows.bias = nn.Parameter(torch.randn(rows, N))
    found = {name: differences(gemmtune.optimize(copy.deepcopy(layer)), layer) for name, layer in layers.items()}
    assert not any(found.values()), found
    assert {*picked} == {"mm", "addmm"}


def test_layers_with_a_block_sparse_weight():
    dense, sparse = nn.Linear(K, N).requires_grad_(False), nn.Linear(K, N)
    sparse.weight, sparse.bias = nn.Parameter(dense.weight.to_sparse_bsr((2, 2)), requires_grad=False), dense.bias
    of_torch = differences(gemmtune.optimize(sparse), lambda x: functional.linear(x, sparse.weight, sparse.bias))
    of_dense = differences(sparse, dense)
    # torch's sparse product has transposed strides for a batch, and refuses inputs that the dense one and ours take.
    assert not of_torch.keys() & of_dense.keys(), of_dense


class Foreign(Tensor):
    """A weight of another library, which knows linear products and no views."""

    held: Tensor

    @staticmethod
    def of(held: Tensor) -> Foreign:
        found: Any = Tensor._make_wrapper_subclass(Foreign, held.shape, dtype=held.dtype)
        found.held = held
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return func(*(x.held if isinstance(x, Foreign) else x for x in args))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Foreign.of(args[0].held)
        raise NotImplementedError(func)


def test_layers_whose_weight_is_of_another_library(picked):
    dense = nn.Linear(K, N).requires_grad_(False)
    layer = copy.copy(dense)
    layer._parameters = {"weight": nn.Parameter(Foreign.of(dense.weight.detach()), requires_grad=False), "bias": dense.bias}
    x = torch.randn(3, K)
    for how in ({}, {"tune": x, "progress": False}):
        torch.testing.assert_close(gemmtune.optimize(layer, **how)(x), dense(x))
    assert not picked
    for kind in ("int8", "int4"):
        with pytest.raises(InvalidProblemError, match=r"Foreign is a subclass .* by one library only"):
            gemmtune.quantize_(layer, kind)
    with pytest.raises(InvalidProblemError, match=r"class Foreign in 1, expected .* of gemmtune; convert it, as gemmtune"):
        gemmtune.optimize(nn.Sequential(dense, layer), batch_invariant=True)


def test_a_layer_follows_the_encoding_of_its_weight(picked):
    numbers, scales = torch.randint(0, 256, (8, N), dtype=torch.uint8), torch.rand(1, N)
    layer, x = gemmtune.optimize(nn.Linear(16, N).requires_grad_(False)), torch.randn(3, 16)
    for encoding in ("int4", "uint4", "int4", "uint4"):
        layer.weight = nn.Parameter(gemmtune.QuantizedWeight(numbers, scales, None, encoding).t(), requires_grad=False)
        for _ in range(2):
            torch.testing.assert_close(layer(x), functional.linear(x, layer.weight.dequantize(), layer.bias))
    assert {*picked} == {"mixed_mm"}


@pytest.mark.turn(5, 8)
def test_quantized_layers():
    for kind, bias in (("int8", True), ("int4", False), ("float8", True)):
        quantized = gemmtune.quantize_(nn.Linear(K, N, bias=bias), kind, group=32)
        layer = copy.deepcopy(quantized)
        layer.weight = nn.Parameter(quantized.weight.dequantize(), requires_grad=False)
        for ours in (quantized, gemmtune.optimize(copy.deepcopy(quantized)), recorded(quantized)):
            # Inputs keep their dtype, while torch has no product of mixed ones.
            mixed = ("torch.float16", "torch.bfloat16", "nested torch.jagged of float16")
            found = differences(ours, layer, without=mixed, tolerance=NARROW)
            assert not found, (kind, found)


def functions() -> dict[str, Runs]:
    """Return calls of torch's products, with an input as one of their operands."""
    numbers = torch.Generator().manual_seed(5)

    def new(*size: int) -> Tensor:
        return torch.randn(size, generator=numbers)

    weight, bias, b, bs, inp, inps = new(N, K), new(N), new(K, N), new(2, K, N), new(3, N), new(2, 3, N)
    left, lefts, vector, none = new(5, 3), new(2, 5, 3), new(K), new(K, 0)
    trained = new(N, K).requires_grad_()
    return {
        "linear": lambda x: functional.linear(x, weight, bias),
        "linear by name": lambda x: functional.linear(input=x, weight=weight),
        "linear with a trained weight": lambda x: functional.linear(x, trained, bias),
        "linear of a vector": lambda x: functional.linear(x, vector),
        "linear with a matrix of biases": lambda x: functional.linear(x, weight, inp),
        "linear without outputs": lambda x: functional.linear(x, weight[:0]),
        "mm": lambda x: torch.mm(x, b),
        "x.mm": lambda x: x.mm(b),
        "mm from the right": lambda x: torch.mm(left, x),
        "mm without columns": lambda x: torch.mm(x, none),
        "matmul": lambda x: torch.matmul(x, b),
        "@": lambda x: x @ bs,
        "@ from the right": lambda x: lefts @ x,
        "@ of itself": lambda x: x @ x.transpose(-1, -2),
        "@ with a vector": lambda x: x @ vector,
        "addmm": lambda x: torch.addmm(inp, x, b),
        "addmm of a vector": lambda x: torch.addmm(bias, x, b, alpha=1, beta=1),
        "addmm of x": lambda x: torch.addmm(x, left[:3], left[:3]),
        "addmm with scalars": lambda x: torch.addmm(inp, x, b, alpha=0.5, beta=2),
        "addmm with a scalar that overflows": lambda x: torch.addmm(inp, x, b, alpha=1e39),
        "addmm with a complex scalar": lambda x: torch.addmm(inp, x, b, beta=1j),
        "bmm": lambda x: torch.bmm(x, bs),
        "bmm from the right": lambda x: torch.bmm(lefts, x),
        "baddbmm": lambda x: torch.baddbmm(inps, x, bs),
        "baddbmm of a matrix": lambda x: torch.baddbmm(inp, x, bs),
    }


@pytest.mark.turn(2, 8)
def test_functions_in_use(picked):
    found = {name: differences(used(runs), runs) for name, runs in functions().items()}
    assert not any(found.values()), found
    assert {*picked} == {"mm", "addmm", "bmm", "baddbmm"}


class Unchanged(TorchDispatchMode):
    """A mode that changes nothing. torch's own kernels for some inputs differ under any mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.turn(7, 8)
def test_functions_while_recording():
    def watched(runs: Runs) -> Runs:
        def run(x: Any) -> Any:
            with Unchanged():
                return runs(x)

        return run

    calls = functions()
    del calls["linear with a matrix of biases"]  # torch refuses it by an addition in place, which no mode sees
    plain = {name: differences(recorded(runs), runs) for name, runs in calls.items()}
    other = {name: differences(recorded(calls[name]), watched(calls[name])) for name, found in plain.items() if found}
    assert not any(plain[name].keys() & other[name].keys() for name in other), other


SCALARS = (
    1e39, -3.5e38, 3.4028235e38, 3.40282357e38, 1e308, float("nan"), float("inf"), -float("inf"), 10**400, 10**30, 2**64, 2**63,
    -(2**63) - 1, True, False, 0, 2, 1e5, 65520.0, 1e-50, 2 + 0j, 1j, None, "1", torch.tensor(2.0), torch.tensor(1j),
    torch.tensor(1e39, dtype=torch.float64), numpy.float32(2), numpy.float64(1e39), numpy.int64(3), numpy.bool_(True),
    Fraction(1, 2),
)  # fmt: skip
OVERFLOWING = (3.4028235e38, 1e308)
"""Finite scalars whose result depends on the order of the steps: one of them overflows."""


def by_a_kernel_of_any_scalars(problem: Any, index: int) -> Plan:
    """Return a plan whose kernel refuses no scalar."""

    def run(out: Tensor, tensors: Any, scalars: Any) -> None:
        a, b, inp = (x.double() for x in tensors)
        out.copy_(scalars[0] * (a @ b) + (scalars[1] * inp if scalars[1] else 0))

    return dataclasses.replace(plan_for(problem, index), kernel=Kernel(run=run))


@pytest.mark.parametrize("planned", [plan_for, by_a_kernel_of_any_scalars], ids=["torch's kernel", "another kernel"])
def test_scalars(planned, monkeypatch):
    monkeypatch.setattr(call, "plan_for", planned)
    found = []
    for dtype in (torch.float32, torch.float16, torch.float64):
        for name, inp, a, b in (("addmm", (3, N), (3, K), (K, N)), ("baddbmm", (1, N), (2, 3, K), (2, K, N))):
            operands = [(torch.arange(math.prod(size)).reshape(size) % 5).to(dtype) for size in (inp, a, b)]
            for value in SCALARS:
                for words in ({"alpha": value}, {"beta": value}):
                    runs = [functools.partial(getattr(module, name), *operands, **words) for module in (gemmtune, gemmtune, torch)]
                    *both, expected = map(outcome, runs)
                    differ = [difference(got, expected, values=not any(value is x for x in OVERFLOWING)) for got in both]
                    refused = isinstance(expected, Exception) and all(isinstance(got, InvalidProblemError) for got in both)
                    found += [] if refused or differ == [None, None] else [(dtype, name, words, differ)]
    assert not found


def test_inference_tensors_as_out_and_in_an_epilogue() -> None:
    """Check that out= refuses one outside of inference mode, by a new and by a known plan. An epilogue reads one."""
    a, b = torch.randn(4, 8), torch.randn(8, 4)
    with torch.inference_mode():
        frozen = torch.ones(4, 4)
    for out in (frozen, torch.empty(4, 4), frozen):
        if out is not frozen:
            gemmtune.mm(a, b, out=out)
            continue
        with pytest.raises(InvalidProblemError, match="out: got an inference tensor outside of"):
            gemmtune.mm(a, b, out=out)
    with torch.inference_mode():
        assert gemmtune.mm(a, b, out=frozen) is frozen
    a.requires_grad_()
    for function in (torch.add, torch.mul):
        ours = torch.autograd.grad(gemmtune.mm(a, b, epilogue=function, epilogue_args=(frozen,)).sum(), a)[0]
        torch.testing.assert_close(ours, torch.autograd.grad(function(a @ b, frozen.clone()).sum(), a)[0])
