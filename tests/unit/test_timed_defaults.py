"""Default tables of float weights on a CPU: which choices compete, what gain counts, and what is stored."""

from __future__ import annotations

import contextlib

import pytest
import torch
from store_cases import row
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans
from gemmtune.integration import defaults as made_by
from gemmtune.integration.picks import pick_for, stated
from gemmtune.problem import Problem
from gemmtune.problem.rows import RowClass, row_classes, with_columns
from gemmtune.selector import defaults, timed
from gemmtune.selector.progress import Progress
from gemmtune.selector.samples import Ranking
from gemmtune.selector.segments import Table
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import open_store
from gemmtune.timing.rounds import Ranked

PROBLEM = Problem.mm(16, 320, 256, dtype=torch.float32, device_type="cpu")
CPU = detect("cpu")


@pytest.fixture(autouse=True)
def own(own_store):
    with settings.patch(backends=("aten", "cpp"), rows="shared", tune_in_subprocess=False, tune="never"):
        yield


def problem_of(n: int, k: int, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem.mm(16, n, k, dtype=dtype, device_type="cpu")


def timings(monkeypatch: pytest.MonkeyPatch, gains: dict[int, float], *, margin: float = 0.01) -> list[int]:
    """Let the last choice of each ranking be faster than torch by the gain at its M. Return the Ms that are ranked."""
    ranked: list[int] = []

    class Session:
        def rank(self, choices, _rounds_s):
            m = choices[0].problem.m
            ranked.append(m)
            times = {c.name: 100.0 * (1 + gains.get(m, -0.5)) if c.baseline else 150.0 for c in choices}
            times[choices[-1].name] = 100.0
            return Ranking(times={name: Ranked(time_us=x, margin_us=margin * x) for name, x in times.items()})

    monkeypatch.setattr(timed, "open_session", lambda *_: contextlib.nullcontext(Session()))
    return ranked


def table(problem: Problem = PROBLEM) -> Table | None:
    (rows_class,) = row_classes(problem)
    (made,) = defaults.defaults_for([rows_class], CPU, settings.current(), Progress())
    return made.stored(open_store(settings.current()))


GAINS = {1: 0.9, 4: 0.3, 16: 0.06, 64: 0.01, 256: 0.0}


@pytest.mark.parametrize(
    ("gains", "margin", "ours", "compared"),
    [
        (GAINS, 0.01, range(1, 17), [1, 4, 16, 64]),
        (GAINS, 0.2, range(1, 2), [1, 4, 16, 64]),
        (dict.fromkeys(timed.ROWS, 0.5), 0.01, range(1, timed.LAST + 1), [*timed.ROWS]),
        (dict.fromkeys(timed.ROWS, 0.1), 0.01, range(1, 257), [*timed.ROWS]),
        ({}, 0.01, range(0), [1, 4, 16, 64]),
    ],
    ids=["few rows", "disturbed", "all rows", "up to the last timed", "none"],
)
def test_choices_serve_the_intervals_where_they_gain(gains, margin, ours, compared, monkeypatch):
    ranked = timings(monkeypatch, gains, margin=margin)
    made = table()
    assert made is not None
    sampled = (1, *timed.ROWS, timed.LAST)
    assert [m for m in sampled if made.segments[made.index(m)].backend == "cpp"] == [m for m in sampled if m in ours]
    assert ranked == compared
    assert made.origin == defaults.TIMED
    assert bool(made.disturbed) == (margin == 0.2)
    assert all(x.checked and max(x.checked) <= 96 for x in made.segments if x.backend == "cpp")


def test_a_wrong_kernel_leaves_torch(monkeypatch):
    timings(monkeypatch, dict.fromkeys(timed.ROWS, 0.5))
    wrong = lambda jobs, *_: {choice.name: "planted" for choice, _ in jobs if not choice.baseline}  # noqa: E731
    monkeypatch.setattr("gemmtune.selector.ranges.failures_of", wrong)
    assert {x.backend for x in table().segments} == {"aten"}


@pytest.mark.parametrize("margin", [0.01, 0.6], ids=["quiet", "disturbed"])
def test_a_table_is_made_once_unless_other_work_disturbed_it(margin, monkeypatch):
    model = nn.Linear(256, 320)
    ranked = timings(monkeypatch, dict.fromkeys(timed.ROWS, 0.5), margin=margin)
    for _ in range(2):
        gemmtune.optimize(model, progress=False)
        forget_plans()
    assert ranked.count(1) == (1 if margin == 0.01 else 2)
    said = gemmtune.explain("addmm", model.bias, torch.randn(3, 256), model.weight.t())
    assert "verified and timed against torch here" in f"{said.origin} {said}"


def test_the_time_for_a_model_ends(monkeypatch):
    timings(monkeypatch, GAINS)
    monkeypatch.setattr(defaults, "BUDGET_S", -1.0)
    assert table() is None


def test_which_weights_are_timed():
    small, double = (problem_of(256, 128), problem_of(320, 256, torch.float64))
    assert defaults.origin_for(RowClass(problem=PROBLEM), CPU) == defaults.TIMED
    assert [defaults.origin_for(RowClass(problem=x), CPU) for x in (small, double)] == ["", ""]
    with settings.patch(backends=("aten",)):
        assert table() is None


def test_fewer_columns_are_those_of_narrower_operands():
    """As the call of a layer with the first columns of its weight states it."""
    x, bias = torch.randn(16, 64), torch.randn(96)
    for weight in (torch.randn(96, 64).t(), torch.randn(64, 96)):
        narrow = weight[:, :32] if weight.stride(0) == 1 else weight[:, :32].contiguous()
        for op, last in (("mm", ()), ("addmm", (bias,))):
            scalars = (1.0, 1.0) if last else ()
            whole = stated(op, (x, weight, *last), scalars, ())
            assert with_columns(whole, 32) == stated(op, (x, narrow, *(y[:32] for y in last)), scalars, ())
    layers = [nn.Linear(64, n, bias=False) for n in (96, 32)]
    for layer in layers:
        gemmtune.quantize_(layer, "int4", group=32)
    whole, narrow = (made_by._quantized(layer.weight) for layer in layers)
    assert with_columns(whole, 32) == narrow


def test_a_model_gets_timed_tables_and_keeps_its_values():
    model, x = nn.Sequential(nn.Linear(256, 320), nn.Linear(320, 256)), torch.randn(4, 256)
    with torch.no_grad():
        expected = model(x)
        gemmtune.optimize(model, progress=False)
        assert torch.allclose(model(x), expected, atol=1e-5)
    origins = {Table.of(x).origin for x in open_store(settings.current()).every_ranged()}
    assert origins == {defaults.TIMED}


def test_a_measured_gemm_of_other_weights_leaves_a_layer_its_table():
    """A stored GEMM of the same sizes, with weights of another kind, says nothing about this one."""
    rows = torch.randn(16, 64)
    layers = {kind: gemmtune.quantize_(nn.Linear(64, 96, bias=False), kind) for kind in ("int4", "int8")}
    operands = {kind: (rows, *layer.weight.t().parts) for kind, layer in layers.items()}
    measured = stated("mixed_mm", operands["int4"], (), ("int4",))
    machine = fingerprint_text(CPU, settings.current().timing)
    open_store(settings.current()).put([row(key=measured.key, fingerprint=machine, backend="aten", name="aten:mixed_mm")])
    gemmtune.optimize(layers["int8"], progress=False)
    assert pick_for("mixed_mm", operands["int8"], (), ("",)).plan.choice.backend == "cpp"
