"""Tables of Ms in the native look-up: a new M costs what a known one does, and is done as Python does it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tables_of_rows import put_table

import gemmtune
from gemmtune import settings
from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.dispatch import plan as plans
from gemmtune.dispatch.plan import forget_plans
from gemmtune.native import lookup
from gemmtune.native.lookup import native
from gemmtune.ops import operate as path
from gemmtune.problem import Problem

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
Tensor = torch.Tensor
N, K, MOST = 40, 32, 90
HANDOVER = 40


@pytest.fixture(autouse=True)
def _in_place(own_store: object) -> Iterator[None]:
    native.begun = False
    lookup.load(path.FOR_NATIVE)
    forget_plans()
    try:
        with settings.patch(native=True, rows="shared", backends=("aten", "cpp"), search="quick"):
            yield
    finally:
        native.call, native.layer, native.begun = None, None, True
        forget_plans()


@contextlib.contextmanager
def counted_python() -> Iterator[list[str]]:
    """The names of calls that came to Python."""
    seen: list[str] = []
    original = native.module.look_up

    def in_python(missing: bool, name: str, *rest: Any) -> Tensor:
        seen.append(name)
        return path._in_python(missing, name, *rest)

    native.module.surround(
        settings.patched, in_python, path.FOR_NATIVE.meaning_of, path.FOR_NATIVE.packed_type, vars(lookup.profiler)
    )  # fmt: skip
    try:
        yield seen
    finally:
        assert native.module.look_up is original
        native.module.surround(
            settings.patched, path._in_python, path.FOR_NATIVE.meaning_of, path.FOR_NATIVE.packed_type, vars(lookup.profiler)
        )  # fmt: skip


def by_relu(acc: Tensor, bias: Tensor, rows: Tensor) -> Tensor:
    return torch.relu(acc + bias) * rows


def calls() -> dict[str, tuple[Problem, Callable[[int], Tensor], Callable[[int], Tensor]]]:
    """By name the problem of M = 2, our call for an M, and what its result should be."""
    w = torch.randn(N, K).t()
    bias, full, x = torch.randn(N), torch.randn(MOST, N), torch.randn(MOST, K + 3)[:, :K]
    numbers = torch.randint(-9, 9, (K, N), dtype=torch.int8)
    scale = torch.rand(1, N)
    weight = gemmtune.prepack(w)
    rows = torch.rand(MOST, 1)
    epilogue = {"epilogue": by_relu}
    out = torch.empty(MOST, N)
    return {
        "mm": (lambda m: gemmtune.mm(x[:m], w), lambda m: x[:m] @ w),
        "mm out": (lambda m: gemmtune.mm(x[:m], w, out=out[:m]), lambda m: x[:m] @ w),
        "mm prepacked": (lambda m: gemmtune.mm(x[:m], weight), lambda m: x[:m] @ w),
        "mm epilogue": (
            lambda m: gemmtune.mm(x[:m], w, epilogue_args=(bias, rows[:m]), **epilogue),
            lambda m: torch.relu(x[:m] @ w + bias) * rows[:m],
        ),
        "addmm": (lambda m: gemmtune.addmm(full[:m], x[:m], w, beta=2), lambda m: 2 * full[:m] + x[:m] @ w),
        "addmm bias": (lambda m: gemmtune.addmm(bias, x[:m], w), lambda m: bias + x[:m] @ w),
        "mixed_mm": (lambda m: gemmtune.mixed_mm(x[:m], numbers, scale_b=scale), lambda m: x[:m] @ (numbers * scale)),
    }  # type: ignore[return-value]


def stated(call: Callable[[int], Tensor]) -> Problem:
    """The problem of a call with three rows."""
    forget_plans()
    seen: list[Problem] = []
    with settings.patch(backends=("aten",), rows="exact"):
        original = plans.make_plan
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plans, "make_plan", lambda problem, *rest: seen.append(problem) or original(problem, *rest))
            call(3)
    return seen[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", calls())
def test_every_m_of_a_table_is_served_natively(name: str) -> None:
    call, exact = calls()[name]  # type: ignore[misc]
    served = "cpp" if name != "addmm bias" else "aten"
    put_table(stated(call), [(1, HANDOVER - 1, "cpp"), (HANDOVER, MOST, served)])
    call(7)
    call(5)
    with counted_python() as seen:
        for m in random.Random(1).sample(range(2, MOST + 1), 60):
            torch.testing.assert_close(call(m), exact(m), atol=1e-4, rtol=1e-4)
    assert not seen
