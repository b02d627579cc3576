"""Tables of Ms in the native look-up: a new M costs no more than a known one, with the same result as in Python."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from extras import needs
from native_calls import arguments, found, in_place
from tables_of_rows import put_table

import gemmtune
from gemmtune import settings
from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.choice import Choice
from gemmtune.device import detect
from gemmtune.dispatch import ready as plans
from gemmtune.dispatch import strategies
from gemmtune.dispatch.ready import forget_plans
from gemmtune.native import lookup
from gemmtune.native.lookup import native
from gemmtune.ops import operate as path
from gemmtune.problem import Problem
from gemmtune.problem.rows import row_classes

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
Tensor = torch.Tensor
N, K, MOST = 40, 32, 90
CROSSOVER = 40


@pytest.fixture(autouse=True)
def _in_place(own_store: object) -> Iterator[None]:
    with in_place(native=True, rows="shared", backends=("aten", "cpp"), search="quick"):
        yield


@contextlib.contextmanager
def counted_python() -> Iterator[list[str]]:
    """Record the names of calls that reach Python."""
    seen: list[str] = []

    def in_python(missing: bool, name: str, *rest: Any) -> Tensor:
        seen.append(name)
        return path.in_python(missing, name, *rest)

    def surround(function: Callable[..., Tensor]) -> None:
        above = path.FOR_NATIVE
        native.module.surround(settings.patched, function, above.meaning_of, above.packed_type, vars(lookup.profiler))

    surround(in_python)
    try:
        yield seen
    finally:
        surround(path.in_python)


def by_relu(acc: Tensor, bias: Tensor, rows: Tensor) -> Tensor:
    return torch.relu(acc + bias) * rows


def calls() -> dict[str, tuple[Problem, Callable[[int], Tensor], Callable[[int], Tensor]]]:
    """Return by name the problem with M = 2, our call for an M, and its expected result."""
    w = torch.randn(N, K).t()
    bias, full, x = torch.randn(N), torch.randn(MOST, N), torch.randn(MOST, K + 3)[:, :K]
    numbers = torch.randint(-9, 9, (K, N), dtype=torch.int8)
    scale = torch.rand(1, N)
    weight = gemmtune.prepack(w)
    rows = torch.rand(MOST, 1)
    epilogue = {"epilogue": by_relu}
    out = torch.empty(MOST, N)
    batch, w3, full3 = torch.randn(3, MOST, K), torch.randn(3, K, N), torch.randn(3, MOST, N)
    return {
        "bmm": (lambda m: gemmtune.bmm(batch[:, :m].contiguous(), w3), lambda m: batch[:, :m] @ w3),
        "bmm of slices": (lambda m: gemmtune.bmm(batch[:, :m], w3), lambda m: batch[:, :m] @ w3),
        "bmm out": (
            lambda m: gemmtune.bmm(batch[:, :m].contiguous(), w3, out=torch.empty(3, m, N)),
            lambda m: batch[:, :m] @ w3,
        ),
        "baddbmm": (
            lambda m: gemmtune.baddbmm(full3[:, :m].contiguous(), batch[:, :m], w3, beta=2),
            lambda m: 2 * full3[:, :m] + batch[:, :m] @ w3,
        ),
        "baddbmm rows": (lambda m: gemmtune.baddbmm(full[:m], batch[:, :m], w3), lambda m: full[:m] + batch[:, :m] @ w3),
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
    """Return the problem of a call with three rows."""
    forget_plans()
    seen: list[Problem] = []
    with settings.patch(backends=("aten",), rows="exact"):
        original = plans.make_plan
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plans, "make_plan", lambda problem, *rest: seen.append(problem) or original(problem, *rest))
            call(3)
    return seen[0]


@pytest.mark.rotates(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", calls())
def test_every_m_of_a_table_is_served_natively(name: str) -> None:
    call, exact = calls()[name]  # type: ignore[misc]
    served = "cpp" if name != "addmm bias" else "aten"
    put_table(stated(call), [(1, CROSSOVER - 1, "cpp"), (CROSSOVER, MOST, served)])
    call(7)
    call(5)
    with counted_python() as seen:
        for m in random.Random(1).sample(range(2, MOST + 1), 60):
            result = call(m)
            torch.testing.assert_close(result, exact(m), atol=1e-4, rtol=1e-4)
            assert result.is_contiguous()
    assert not seen


@pytest.mark.parametrize("name", ["a", "out", "inp"])
def test_ms_of_one_alignment_share_a_table_where_columns_are_m_apart(name: str) -> None:
    """Each largest power of two in M has its own table and entry. Python serves a matrix without a table."""
    w = torch.randn(N, K).t()

    def operands(m: int) -> tuple[Tensor, Tensor, Tensor | None]:
        dense = {"a": torch.randn(m, K), "inp": torch.randn(m, N), "out": torch.empty(m, N)}
        dense[name] = dense[name].t().contiguous().t()
        return dense["inp"], dense["a"], dense["out"] if name == "out" else None

    def call(m: int) -> tuple[Tensor, Tensor]:
        inp, a, out = operands(m)
        return gemmtune.addmm(inp, a, w, out=out), inp + a @ w

    for step in (1, 2, 16):
        problem = stated(lambda _, step=step: call(48 if step == 16 else 6 if step == 2 else 7)[0])  # type: ignore[misc]
        put_table(problem, [(1, CROSSOVER - 1, "aten"), (CROSSOVER, MOST, "cpp")])
    for m in (7, 6, 48):
        call(m)
    with counted_python() as seen:
        for m in (9, 33, 41, 89, 10, 38, 42, 90, 16, 32, 64, 80):
            result, exact = call(m)
            torch.testing.assert_close(result, exact, atol=1e-4, rtol=1e-4)
        natively = 12 - len(seen)
        assert natively == (12 if name != "out" else 0), "what writes a result by columns computes it transposed"
        call(24)
        assert len(seen) == 13 - natively, "no table has Ms of that alignment"


def aten_tables() -> list[tuple[Callable[..., Tensor], tuple[Any, ...]]]:
    """Return calls of three weights with tables, each taking a first operand and an added one."""
    made = []
    for k, n in ((16, 24), (24, 16), (32, 40)):
        problem = Problem.mm(3, n, k, dtype=torch.float32, device_type="cpu")
        put_table(problem, [(1, CROSSOVER - 1, "aten"), (CROSSOVER, MOST, "aten")])
        made.append((gemmtune.mm, (torch.randn(n, k).t(),)))
    return made


def test_random_ms_tune_nothing_and_reach_python_once_per_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = aten_tables()
    for name in ("select", "tune_rows"):
        monkeypatch.setattr(strategies, name, lambda *_, name=name, **__: pytest.fail(f"{name} within a call"))
    monkeypatch.setattr("gemmtune.toolchain.made_once.compile_text", lambda *_, **__: pytest.fail("a compilation within a call"))
    generator = random.Random(5)
    inputs = {k: torch.randn(MOST, k) for k in (16, 24, 32)}
    with counted_python() as seen:
        for _ in range(2000):
            function, (w,) = generator.choice(weights)
            a = inputs[w.shape[0]][: generator.randrange(2, MOST + 1)]
            assert function(a, w).shape == (a.shape[0], w.shape[1])
    assert len(seen) == len(weights)
    assert native.module.count() == len(weights)


def test_forgotten_plans_and_other_settings_have_no_rows() -> None:
    ((mm, (w,)), *_) = aten_tables()
    a = torch.randn(MOST, 16)
    mm(a[:9], w)
    assert found(arguments("mm", a[:50], w)).origin == "range"
    with settings.patch(backends=("aten",)):
        assert found(arguments("mm", a[:50], w)) is False
    assert found(arguments("mm", a[:50], w))
    forget_plans()
    assert found(arguments("mm", a[:50], w)) is False
    mm(a[:50], w)
    assert found(arguments("mm", a[:9], w))
    assert found(arguments("mm", a[:1], w)) is False, "one row may be one for all"
    assert found(arguments("mm", torch.randn(MOST + 1, 16), w)) is False, "beyond the table"


def test_a_separately_tuned_m_is_excluded_from_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ((mm, (w,)), *_) = aten_tables()
    original = strategies.range_plan_for

    def with_tuned(*arguments: Any) -> Any:
        known = original(*arguments)
        known.tuned = frozenset({20, 60})
        return known

    monkeypatch.setattr(strategies, "range_plan_for", with_tuned)
    a = torch.randn(MOST, 16)
    for _ in range(2):
        mm(a[:20], w)  # has its record before the table has its own
    assert found(arguments("mm", a[:20], w)).origin == "fallback"
    mm(a[:9], w)
    served = [bool(found(arguments("mm", a[:m], w))) for m in (19, 20, 21, 59, 60, 61)]
    assert served == [True, True, True, True, False, True]
    for _ in range(2):
        mm(a[:60], w)
    origins = [found(arguments("mm", a[:m], w)).origin for m in (20, 21, 60, 61)]
    assert origins == ["fallback", "range", "fallback", "range"]


def test_an_operand_with_m_rows_by_chance_does_not_follow_m() -> None:
    """The scales along K have the same number of rows as a by chance."""
    k, n = 128, 16
    numbers = torch.randint(-9, 9, (k, n), dtype=torch.int8)
    scales = {groups: torch.rand(groups, n) for groups in (2, 4)}

    def call(m: int, groups: int) -> Tensor:
        return gemmtune.mixed_mm(torch.ones(m, k), numbers, scale_b=scales[groups])

    for groups in (2, 4):
        put_table(stated(lambda m, groups=groups: call(m, groups)), [(1, 16, "aten")])  # type: ignore[misc]
    for m in (4, 2, 4, 2, 3, 5, 4, 2):
        for groups in (2, 4):
            exact = torch.ones(m, k) @ (numbers * scales[groups].repeat_interleave(k // groups, 0))
            torch.testing.assert_close(call(m, groups), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.turn(4, 8)
@pytest.mark.slow
def test_strides_and_misaligned_operands_match_python() -> None:
    """The cpp backend's plan contains strides and blocking. Each kind of operands has its rows, with 16 threads concurrently."""
    put_table(Problem.mm(3, N, K, dtype=torch.float32, device_type="cpu"), [(1, CROSSOVER - 1, "cpp"), (CROSSOVER, MOST, "cpp")])
    generator = random.Random(3)
    w = torch.randn(N, K).t()
    memory = torch.randn(MOST * (K + 8) + 16)

    def drawn(generator: random.Random) -> Tensor:
        m, pitch, offset = generator.randrange(1, MOST + 9), K + generator.choice((0, 0, 4, 5)), generator.choice((0, 0, 1, 4))
        return memory[: MOST * pitch + offset].as_strided((min(m, MOST), K), (pitch, 1), offset)

    for a in [drawn(generator) for _ in range(60)]:
        out = torch.empty(a.shape[0], N)
        got = [gemmtune.mm(a, w), gemmtune.mm(a, w, out=out)]
        call, native.call = native.call, None
        try:
            want = gemmtune.mm(a, w)
        finally:
            native.call = call
        assert all(torch.equal(x, want) for x in got)

    wrong: list[Any] = []

    def work(seed: int) -> None:
        mine = random.Random(seed)
        with settings.use(chosen):
            for i in range(60):
                a = drawn(mine)
                if not torch.allclose(gemmtune.mm(a, w), a @ w, atol=1e-4):
                    wrong.append(a.shape)
                if seed == 0 and i % 20 == 7:
                    forget_plans()

    chosen = settings.current()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_products_transposed_from_some_m_on_have_rows_below_it() -> None:
    """From M = 2 N on, the cpp backend computes the transposed product of few columns, and Python binds each M."""
    n = 12
    put_table(Problem.mm(3, n, K, dtype=torch.float32, device_type="cpu"), [(1, MOST, "cpp")])
    a, w = torch.randn(MOST, K), torch.randn(n, K).t()
    gemmtune.mm(a[:9], w)
    assert found(arguments("mm", a[: 2 * n], w))
    assert found(arguments("mm", a[: 2 * n + 1], w)) is False
    for m in (2 * n, 2 * n + 1, MOST):
        torch.testing.assert_close(gemmtune.mm(a[:m], w), a[:m] @ w)


CUBLASLT = pytest.param("cublaslt:", marks=needs("cublaslt"))
CUTLASS = pytest.param("cutlass:", marks=needs("cutlass"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton:mm", "triton:persistent", "cuda:cluster", CUBLASLT, CUTLASS, "aten:"])
def test_rows_on_a_gpu(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each backend's launches follow M on the default stream, on another stream and in a graph."""
    if name in ("cuda:cluster", "triton:persistent") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{name} is for SM90")
    caplog.set_level("DEBUG", "gemmtune")
    lo, hi, n, k = (2, 60, 768, 4096) if name == "cuda:cluster" else (130, 1500, 768, 512)
    with settings.patch(backends=("aten", name.split(":")[0]), search="default", native=True, rows="shared"):
        problem = Problem.mm(lo, n, k, dtype=torch.bfloat16, device_type="cuda")
        (choice,) = put_table(problem, [(lo, hi, name)])
        a, w = torch.randn(hi, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16().t()
        exact = a.float() @ w.float()
        gemmtune.mm(a[: lo + 1], w)
        gemmtune.mm(a[: lo + 2], w)
        rows = [*random.Random(7).sample(range(lo + 3, hi), 50), lo, hi]
        with counted_python() as seen:
            for m in rows:
                torch.testing.assert_close(gemmtune.mm(a[:m], w).float(), exact[:m], rtol=2e-2, atol=0.5)
        if name == "triton:persistent":  # Triton's descriptors are bound for each M
            assert len(seen) == len(rows)
        else:
            reasons = [record.getMessage() for record in caplog.records if "bound by Python" in record.getMessage()]
            (rows_class,) = row_classes(problem)
            at = {m: choice.at(rows_class.at(m), detect("cuda")) for m in rows}
            most = at[hi].info.get("workspace_bytes", 0) if isinstance(at[hi], Choice) else 0
            refused = [m for m, found in at.items() if isinstance(found, str) or found.info.get("workspace_bytes", 0) > most]
            assert len(seen) == len(refused), (len(seen), refused, reasons)
        with torch.cuda.stream(torch.cuda.Stream()):
            for m in (lo, (lo + hi) // 2, hi):
                torch.testing.assert_close(gemmtune.mm(a[:m], w).float(), exact[:m], rtol=2e-2, atol=0.5)
        torch.cuda.synchronize()
        graph, static = torch.cuda.CUDAGraph(), a[: (lo + hi) // 3]
        with torch.cuda.graph(graph):
            captured = gemmtune.mm(static, w)
        graph.replay()
        torch.testing.assert_close(captured.float(), exact[: len(static)], rtol=2e-2, atol=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bmm", "baddbmm", "columns"])
@pytest.mark.parametrize("name", ["triton:", "cuda:cluster", CUBLASLT, CUTLASS, "aten:"])
def test_rows_in_strides_on_a_gpu(name: str, form: str) -> None:
    """Native and Python results have the same bits if M is part of a batch or column stride."""
    if name == "cuda:cluster" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{name} is for SM90")
    # TMA reads columns of multiples of eight numbers.
    lo, hi, n, k = (6, 60, 768, 4096) if name == "cuda:cluster" else (130, 700, 384, 512)
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    w, batch = torch.randn(n, k, **like).t(), torch.randn(3, k, n, **like)  # type: ignore[call-overload]

    def call(m: int) -> Tensor:
        torch.manual_seed(m)
        if form == "columns":
            return gemmtune.mm(torch.randn(k, m, **like).t(), w)  # type: ignore[call-overload]
        a, inp = torch.randn(3, m, k, **like), torch.randn(3, m, n, **like)  # type: ignore[call-overload]
        return gemmtune.bmm(a, batch) if form == "bmm" else gemmtune.baddbmm(inp, a, batch)

    with settings.patch(backends=("aten", name.split(":")[0]), search="default", native=True, rows="shared"):
        problem = stated(lambda _: call(lo + 2))
        put_table(problem, [(lo, hi, name.replace("triton:", "triton:mm" if form == "columns" else "triton:bmm"))])
        (rows_class,) = row_classes(problem)
        rows = rows_class.within(range(lo, hi + 1))
        for m in rows[:3]:
            call(m)
        with counted_python() as seen:
            asked = [*rows[-2:], *random.Random(7).choices(rows, k=10)]
            ours = [call(m) for m in asked]
        assert len(seen) <= (len(asked) if name == "cublaslt:" else 0), "what cuBLASLt refuses for an M is Python's"
        native_call, native.call = native.call, None
        try:
            assert all(torch.equal(x, call(m)) for x, m in zip(ours, asked, strict=True))
        finally:
            native.call = native_call
