"""The operators that torch knows: torch's own check of each, and everything of torch that has to see a call."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import gemmtune
from gemmtune import settings
from gemmtune.operators.library import OPERATORS

F8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def torch_alone(own_store):
    with settings.patch(backends=("aten",), tune="never"):
        yield


def floats(*size: int, grad: bool = False, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)), dtype=dtype).requires_grad_(grad)


def integers(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, generator=torch.Generator().manual_seed(sum(size))).to(torch.int8)


def arguments(name: str, *, grad: bool) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    """The arguments of a call of an operator, with gradients where it has them."""

    def dense(*size: int) -> torch.Tensor:
        return floats(*size, grad=grad)

    narrow = floats(4, 6, grad=grad, dtype=torch.float32)
    groups = torch.tensor([1, 1, 4], dtype=torch.int32)
    positive, ones = torch.rand(1, 5) + 0.5, torch.ones(1, 1)
    cases: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, object]]] = {
        "mm": ((dense(4, 3), dense(3, 5)), {}),
        "addmm": ((dense(5), dense(4, 3), dense(3, 5)), {"beta": 0.5, "alpha": -2.0}),
        "bmm": ((dense(2, 4, 3), dense(2, 3, 5)), {}),
        "baddbmm": ((dense(4, 1), dense(2, 4, 3), dense(2, 3, 5)), {"alpha": 3.0}),
        "mm_plus_mm": ((dense(4, 3), dense(3, 5), dense(4, 2), dense(2, 5)), {}),
        "int_mm": ((integers(4, 6), integers(6, 5)), {}),
        "int_mm_mul": ((integers(4, 6), integers(6, 5), positive), {"out_dtype": torch.bfloat16}),
        "mixed_mm": ((narrow, integers(6, 5), positive.requires_grad_(grad), positive.detach().clone().requires_grad_(grad)), {}),
        "scaled_mm": ((floats(4, 6).to(F8), floats(6, 5).to(F8), ones, ones, positive.detach()), {"out_dtype": torch.float32}),
    }
    cases |= {
        "grouped_mm": ((narrow, floats(3, 6, 5, grad=grad, dtype=torch.float32), groups), {}),
        "grouped_k_mm": ((narrow.mT, floats(4, 5, grad=grad, dtype=torch.float32), groups), {}),
    }
    picked = torch.tensor([3, 0, 0, 1])
    cases |= {
        "routed_grouped_mm": ((narrow.detach(), floats(3, 6, 10, dtype=torch.float32), groups, picked), {"gated": "silu"}),
        "combined_grouped_mm": (
            (narrow.detach(), floats(3, 6, 5, dtype=torch.float32), groups, torch.tensor([3, 0, 2, 1]), torch.rand(2, 2)),
            {},
        ),
    }
    weights, scales = integers(6, 5).repeat(3, 1, 1), positive.detach().repeat(3, 1, 1)
    cases["scaled_grouped_mm"] = (
        (floats(4, 6).to(F8), floats(3, 6, 5).to(F8), torch.rand(4, 1) + 0.5, scales, groups),
        {"out_dtype": torch.float32},
    )
    cases["mixed_grouped_mm"] = ((narrow.detach(), weights, scales, groups), {})
    return cases[name]


def call(name: str, tensors: tuple[torch.Tensor, ...], words: dict[str, object], **more: object) -> torch.Tensor:
    """The public function called with the arguments of the operator."""
    keywords = {"mixed_mm": ("scale_b", "zero_b"), "scaled_mm": ("bias",)}.get(name, ())
    count = len(tensors) - len(keywords)
    if name in ("routed_grouped_mm", "combined_grouped_mm"):
        index = {"rows": tensors[3]} if name.startswith("routed") else {"scatter": tensors[3:]}
        return gemmtune.grouped_mm(*tensors[:3], **index, **words, **more)
    return getattr(gemmtune, "grouped_mm" if name == "grouped_k_mm" else name)(
        *tensors[:count], **dict(zip(keywords, tensors[count:], strict=True)), **words, **more
    )


DIFFERENTIABLE = [name for name, operator in OPERATORS.items() if operator.row.gradient is not None]


@pytest.fixture
def comparable_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's check compares operands before and after by allclose, which its CPU does not have for 8-bit floats."""
    allclose = torch.allclose

    def comparing(x, y, **more):
        return allclose(*(t.float() if t.dtype == F8 else t for t in (x, y)), **more)

    monkeypatch.setattr(torch, "allclose", comparing)


@pytest.mark.rotates(8)
@pytest.mark.usefixtures("comparable_float8")
@pytest.mark.parametrize("name", OPERATORS)
def test_torch_finds_nothing_wrong_with_the_operator(name: str):
    tensors, words = arguments(name, grad=name in DIFFERENTIABLE)
    opcheck(getattr(torch.ops.gemmtune, name).default, tensors, words)


@pytest.mark.rotates(8)
@pytest.mark.usefixtures("comparable_float8")
@pytest.mark.parametrize("name", OPERATORS)
def test_torch_finds_nothing_wrong_with_its_form_that_writes_into_out(name: str):
    tensors, words = arguments(name, grad=False)
    out = torch.empty_like(call(name, tensors, words))
    opcheck(getattr(torch.ops.gemmtune, name).out, tensors, {**words, "out": out})


class Seen(TorchDispatchMode):
    """Remembers what is called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operator_gives_what_the_function_gives(name: str):
    tensors, words = arguments(name, grad=False)
    want = call(name, tensors, words)
    for _ in range(2):
        assert torch.equal(getattr(torch.ops.gemmtune, name)(*tensors, **words), want)
    with Seen() as seen:
        got = call(name, tensors, words)
    assert torch.equal(got, want)
    assert seen.names == [f"gemmtune.{name}.default"]
