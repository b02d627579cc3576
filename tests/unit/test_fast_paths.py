"""Fast paths that give the same results as the slow ones behind them: which calls take them is seen here alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import gemmtune
from gemmtune.dispatch import plan
from gemmtune.dispatch.keys import key_of
from gemmtune.dispatch.prepack import PackedOperand
from gemmtune.problem import Layout

Tensor = torch.Tensor
A, B, ROW = torch.ones(6, 32), torch.ones(32, 16), torch.ones(16)
PACKED = PackedOperand(B)
GRAD = torch.ones(6, 32, requires_grad=True)


class Other(Tensor):
    """A subclass, whose products are its own."""


def negative(x: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(x), x).conj().imag


def shifted(x: Tensor) -> Tensor:
    """Return the tensor at another alignment."""
    return torch.ones(x.numel() + 1)[1:].view(x.shape)


KEYED: dict[str, tuple[Any, ...]] = {
    "plain": (A, B), "parameter": (A.double(), torch.nn.Parameter(B.double())), "packed": (A, PACKED), "three": (A, B, ROW),
    "transposed": (A, torch.ones(16, 32).t()), "a shifted": (shifted(A), B), "b shifted": (A, shifted(B)),
    "both shifted": (shifted(A), shifted(B)), "a grows": (GRAD, B), "b grows": (A, B.clone().requires_grad_()),
    "third grows": (A, B, ROW.clone().requires_grad_()), "third shifted": (A, B, shifted(ROW)), "third wide": (A, B, ROW.double()),
    "third longer": (A, B, torch.ones(1, 16)), "third strided": (A, B, torch.ones(32)[::2]), "four": (A, B, ROW, ROW),
    "half": (A.half(), B.half()), "int8": (A, B.to(torch.int8)), "more rows": (torch.ones(7, 32), B),
    "wider": (A, torch.ones(32, 17)), "a strided": (torch.ones(32, 6).t(), B),
}  # fmt: skip
WITHOUT_KEY: dict[str, tuple[Any, ...]] = {
    "a list": ([1.0], B), "b none": (A, None), "a empty": (A[:0], B), "b empty": (A, B[:, :0]),
    "a subclass": (A.as_subclass(Other), B),
    "b subclass": (A, B.as_subclass(Other)), "a negative": (negative(A), B), "b negative": (A, negative(B)),
    "packed and grows": (GRAD, PACKED), "third subclass": (A, B, ROW.as_subclass(Other)), "third negative": (A, B, negative(ROW)),
    "third elsewhere": (A, B, ROW.to("meta")), "third empty": (A, B, ROW[:0]), "third a number": (A, B, 1.0),
    "fourth empty": (A, B, ROW, ROW[:0]), "sparse": (A, B.to_sparse()), "a packed": (PACKED, B),
}  # fmt: skip
"""Calls whose checks decide."""


def test_calls_that_differ_have_different_keys() -> None:
    keys = {name: key_of("mm", given) for name, given in KEYED.items()}
    keys |= {"named": key_of("addmm", (A, B)), "with options": key_of("mm", (A, B), "options")}
    with torch.no_grad():
        assert key_of("mm", (GRAD, B)) == keys["plain"]
        assert key_of("mm", (GRAD, PACKED)) == keys["packed"]
    same = {"a grows", "b grows"}  # which of them does not matter
    assert None not in keys.values()
    assert keys["a grows"] == keys["b grows"]
    assert len(set(keys.values())) == len(keys) - len(same) + 1
    assert key_of("mm", (A[:1], B)) == key_of("mm", (torch.ones(1, 64)[:, :32], B)), "no element depends on the stride of one row"


@pytest.mark.parametrize("name", WITHOUT_KEY)
def test_calls_that_the_checks_decide_have_no_key(name: str) -> None:
    assert key_of("mm", WITHOUT_KEY[name]) is None


@pytest.mark.parametrize("context", [lambda: torch.autocast("cpu"), forward_ad.dual_level], ids=["autocast", "forward gradients"])
def test_contexts_that_change_results_have_no_keys(context: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    with context():
        assert key_of("mm", (A, B)) is None
    known = key_of("mm", (A, B))
    assert known is not None
    with gemmtune.settings.patch(tune="never"):
        assert key_of("mm", (A, B)) != known
    assert key_of("mm", KEYED["plain"]) == known


@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize("absent", [False, True])
def test_new_outputs_come_from_inductors_allocator(is_cuda: bool, absent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for kind in ("cuda", "cpu"):
        allocator = None if absent else lambda size, stride, dtype, kind=kind: made.append(f"{kind} {size} {stride} {dtype}")
        monkeypatch.setattr(plan, f"_empty_{kind}", allocator)
    layout = Layout(size=(3, 2), stride=(1, 3), dtype=torch.float64)
    like: Any = SimpleNamespace(is_cuda=is_cuda, device=torch.device("cpu"))
    out = plan.new_output(layout, like)
    if absent:
        assert (out.shape, out.stride(), out.dtype) == ((3, 2), (1, 3), torch.float64)
    assert made == ([] if absent else [f"{'cuda' if is_cuda else 'cpu'} (3, 2) (1, 3) torch.float64"])
