"""Tables of a model's weights: one for every number of rows, of inputs, of ``m=``, in eager calls and in compiled graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from compiled_graphs import rewriting_backend
from models import made, result
from test_ranges import RowedBackend, W, backend, problem
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.device import detect
from gemmtune.dispatch import ready
from gemmtune.dispatch.ranges import range_plan_for
from gemmtune.errors import InvalidProblemError, NoValidChoicesError
from gemmtune.integration import eager, measured
from gemmtune.integration.compile.store_policy import StorePolicy
from gemmtune.integration.measured import rounded_up
from gemmtune.integration.weights import classes_of, tables_and_singles
from gemmtune.selector.segments import DEFAULT, TABLE
from gemmtune.settings import current
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import open_store

__all__ = ["backend"]


def layer() -> nn.Linear:
    linear = nn.Linear(W.shape[0], W.shape[1], bias=False)
    linear.weight = nn.Parameter(W.t(), requires_grad=False)
    return linear


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Return the list of (M, choice) of picks that layers ran. Nothing may be tuned."""
    found: list[tuple[int, str]] = []
    run = eager.Bound.run

    def noted(self, op, tensors):
        found.append((tensors[0].shape[0], self.pick.plan.choice.name))
        return run(self, op, tensors)

    monkeypatch.setattr(eager.Bound, "run", noted)
    monkeypatch.setattr("gemmtune.dispatch.strategies.select", None)
    return found


@pytest.mark.parametrize("example", [1, 30], ids=["of one row", "of 30 rows"])
def test_an_example_makes_a_table_that_serves_other_rows(backend: RowedBackend, ran: list[tuple[int, str]], example: int):
    """A decoding step and prompts of other lengths have a choice. Above the table torch runs."""
    model = gemmtune.optimize(layer(), tune=torch.randn(example, W.shape[0]), progress=False)
    end = rounded_up(example, detect("cpu"))
    with torch.no_grad():
        for m in (1, 2, 15, end, end + 1, 900):
            x = torch.randn(m, W.shape[0])
            torch.testing.assert_close(model(x), x @ W)
    assert [m for m, _ in ran] == sorted({1, 2, 15, end})
    assert dict(ran) == {m: "fake:high" if m >= 20 else "fake:low" for m, _ in ran}
    assert gemmtune.explain("mm", torch.randn(15, W.shape[0]), W).origin == "from the table of its range"


def test_all_choices_compete_at_the_rows_of_the_example(backend: RowedBackend):
    gemmtune.optimize(layer(), tune=torch.randn(37, W.shape[0]), progress=False)
    machine = fingerprint_text(detect("cpu"), current().timing)
    tuned = [m for m in range(1, 65) if problem(m).key in open_store(current()).keys(machine)]
    assert tuned == [1, 37, 64]


def test_a_compiled_model_with_dynamic_shapes_takes_the_table(backend: RowedBackend, monkeypatch: pytest.MonkeyPatch):
    """Nothing is tuned while it compiles, and above the table torch runs."""
    model = gemmtune.optimize(layer(), tune=torch.randn(30, W.shape[0]), progress=False)
    monkeypatch.setattr("gemmtune.integration.compile.stored_decisions.tune_products", None)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=rewriting_backend(StorePolicy(tunes=True)))
    for m in (7, 25, 100):
        x = torch.randn(m, W.shape[0])
        torch.testing.assert_close(compiled(x), x @ W)
    assert {plan.problem.m: plan.choice.name for plan in ready._plans.values()} == {7: "fake:low", 25: "fake:high"}


@pytest.mark.turn(7, 8)
def test_the_rule_serves_what_the_measured_table_does_not(backend: RowedBackend):
    """Example rows end a table early. The choices of the rule stay in force above it."""
    wide = gemmtune.tune(problem(2), m=(1, 4096), progress=False)[0]
    store, machine = open_store(current()), fingerprint_text(detect("cpu"), current().timing)
    store.put_ranged(dataclasses.replace(store.ranged(wide.rows_class.key, machine)[TABLE], kind=DEFAULT))
    with settings.patch(tune="force"):
        gemmtune.tune(problem(2), m=(1, 16), progress=False)
    with settings.patch(tune="never"):
        found = {m: gemmtune.explain(problem(m)) for m in (16, 18, 4096)}
    assert {m: x.pick for m, x in found.items()} == {16: "fake:low", 18: "fake:low", 4096: "fake:high"}
    assert ["table" in x.origin for x in found.values()] == [True, False, False]
    assert "by the rule" in found[18].origin


@pytest.mark.turn(3, 8)
def test_rows_are_given_without_inputs(backend: RowedBackend, ran: list[tuple[int, str]]):
    model = gemmtune.optimize(nn.Sequential(layer(), nn.ReLU()), m=range(1, 65), progress=False)
    with torch.no_grad():
        model(torch.randn(64, W.shape[0])), model(torch.randn(1, W.shape[0]))
    assert ran == [(64, "fake:high"), (1, "fake:low")]
    gemmtune.optimize(model, m=(1, 300), tune=torch.randn(7, W.shape[0]), progress=False)
    shared = range_plan_for(problem(7), detect("cpu"), current())
    assert shared is not None
    assert shared.table is not None
    assert shared.table.hi == 300


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (layer(), {"m": 5}, r"optimize: m: got 5, expected range\(1, 8193\), or \(1, 8192\)"),
        (layer(), {"m": range(1, 9, 2)}, "optimize: m: got range.1, 9, 2., expected a range with step 1 that is not empty"),
        (layer(), {"m": range(4, 4)}, "expected a range with step 1 that is not empty, such as"),
        (layer(), {"m": range(0, 8)}, "optimize: rows: got M = 0, expected a whole number from 1"),
        (layer(), {"m": (9, 3), "tune": torch.ones(2, 16)}, r"optimize: rows: got the empty range 9..3"),
        (nn.ReLU(), {"m": range(1, 9)}, "optimize: got a ReLU without a layer that has a table, expected an nn.Linear or"),
    ],
    ids=["no range", "step", "empty", "zero", "backwards", "no layer"],
)
def test_bad_rows_are_refused(own_store, model: nn.Module, arguments: dict[str, object], message: str):
    with settings.patch(rows="shared"), pytest.raises(InvalidProblemError, match=message):
        gemmtune.optimize(model, progress=False, **arguments)
    assert "forward" not in model.__dict__


def test_rows_need_tables(own_store):
    with settings.patch(rows="exact"), pytest.raises(InvalidProblemError, match="setting rows='exact', which uses no table; set"):
        gemmtune.optimize(layer(), m=range(1, 9))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral"])
def test_weights_have_tables_and_attention_has_none(name: str, own_store):
    model, inputs = made(name)
    model.set_attn_implementation("eager")
    with settings.patch(rows="shared"), torch.no_grad():
        with gemmtune.record() as recording:
            result(model, inputs)
        tables, singles = tables_and_singles(model, recording.problems())
        known = classes_of(model)
    assert {p.op for p in singles} == {"bmm"} | ({"addmm"} if name == "bert" else set()), "the pooler reads every seventh row"
    assert all(14 in rows for x, rows in tables.items() if not x.problem.operation.grouped)
    assert (set(tables) <= set(known)) == (name != "mixtral"), "layers state what a run asks for; a router is none"


@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
def test_a_quantized_layer_of_one_row_has_the_class_of_many(kind: str, own_store):
    """Scales of one row may follow M or not. A class that serves one row only is of no use."""
    model = gemmtune.quantize_(nn.Sequential(nn.Linear(128, 64, dtype=torch.bfloat16)), kind)
    classes = []
    with settings.patch(rows="shared"), torch.no_grad():
        for rows in (1, 5):
            with gemmtune.record() as recording:
                model(torch.randn(rows, 128, dtype=torch.bfloat16))
            classes.append(list(tables_and_singles(model, recording.problems())[0]))
        assert classes[0] == classes[1] == classes_of(model)


def test_an_example_of_many_rows_ends_at_a_power_of_two():
    cpu, gpu = detect("cpu"), dataclasses.replace(detect("cpu"), type="cuda")
    assert [rounded_up(m, cpu) for m in (1, 16, 17, 800)] == [16, 16, 32, 1024]
    assert [rounded_up(m, gpu) for m in (1, 300, 800)] == [256, 512, 1024]


def test_a_weight_without_a_correct_choice_does_not_stop_the_others(backend: RowedBackend, caplog, monkeypatch):
    tried = []

    def fail(rows_class, *_, **__):
        tried.append(rows_class.problem.n)
        raise NoValidChoicesError(str(rows_class), [])

    monkeypatch.setattr(measured, "tune_rows", fail)
    gemmtune.optimize(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), tune=torch.ones(3, 16), progress=False)
    assert sorted(tried) == [4, 8]
    assert sum("torch runs addmm Mx" in line for line in caplog.messages) == 2
