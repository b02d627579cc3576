"""Tables by rule: what serves which M, what is left out, and which calls run by one."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest
import torch
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.device import detect, preset
from gemmtune.dispatch.ready import forget_plans
from gemmtune.errors import NoValidChoicesError
from gemmtune.integration import defaults as made_by
from gemmtune.integration import eager
from gemmtune.problem import Problem
from gemmtune.problem.rows import row_classes
from gemmtune.selector import defaults
from gemmtune.selector.predicted import MOST_KERNELS
from gemmtune.selector.progress import Progress
from gemmtune.selector.segments import DEFAULT, Table
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Ranged, open_store

RULE = defaults.RULE_ON_CPU
PROBLEM = Problem.mixed_mm(16, 32, 64, dtype=torch.float32, scales="column", scale_dtype=torch.float32, device_type="cpu")


@pytest.fixture(autouse=True)
def rule(own_store, monkeypatch):
    """Give a CPU a short rule."""
    monkeypatch.setattr(defaults, "RULE_ON_CPU", ((1, ("nobody:",)), (8, ("nobody:", "cpp:")), (20, ("cpp:",))))
    with settings.patch(backends=("aten", "cpp"), search="quick", rows="shared", tune_in_subprocess=False, tune="never"):
        yield


def table() -> Table | None:
    (rows_class,) = row_classes(PROBLEM)
    (made,) = defaults.defaults_for([rows_class], detect("cpu"), settings.current(), Progress())
    return made.table()


def store(made: Table) -> None:
    (rows_class,) = row_classes(PROBLEM)
    machine = fingerprint_text(detect("cpu"), settings.current().timing)
    open_store(settings.current()).put_ranged(Ranged(key=rows_class.key, fingerprint=machine, kind=DEFAULT, value=made.to_json()))
    forget_plans()


def test_each_interval_has_its_first_legal_choice_verified_at_both_ends():
    made = table()
    assert next((x.lo, x.hi, x.backend, x.time_us) for x in made.segments) == (1, 1, "aten", None)
    assert made.hi == 20
    assert {x.backend for x in made.segments[1:]} == {"cpp"}
    assert all({x.lo, x.hi} <= set(x.checked) for x in made.segments)


def test_wrong_choices_are_left_out(monkeypatch):
    proofs = []

    def failures(jobs, *_):
        proofs.append([choice.name for choice, _ in jobs])
        return {choice.name: "planted" for choice, _ in jobs if not choice.baseline}

    monkeypatch.setattr("gemmtune.selector.ranges.failures_of", failures)
    assert {x.backend for x in table().segments} == {"aten"}
    assert len(proofs) == 2  # with the wrong ones, then torch alone
    with settings.patch(backends=("cpp",)), pytest.raises(NoValidChoicesError, match="planted"):
        table()


def test_settings_without_torch_or_without_anything(monkeypatch):
    with settings.patch(backends=("cpp",)):
        assert {(x.lo, x.backend) for x in table().segments} >= {(2, "cpp")}
        assert table().index(1) is None
    with settings.patch(choice_denylist_regex="."):
        assert table() is None


def test_calls_that_may_not_tune_run_by_the_rule_and_measured_picks_come_first():
    store(table())
    a, b, scale = torch.randn(10, 64), torch.randint(-9, 9, (32, 64), dtype=torch.int8).t(), torch.rand(1, 32)
    expected = a @ (b.float() * scale)
    for rows in (1, 5, 10):
        assert torch.allclose(gemmtune.mixed_mm(a[:rows], b, scale_b=scale), expected[:rows], atol=1e-3)
    said = str(gemmtune.explain("mixed_mm", a, b, scale_b=scale))
    assert "cpp:" in said
    assert "by the rule" in said
    with settings.patch(tune="on_miss"):
        untuned = gemmtune.explain("mixed_mm", a, b, scale_b=scale)
        assert untuned.pick is None
        layers = r"not tuned yet: .*; until then layers of optimize\(\) run cpp:\S+, by the rule .* not measured"
        assert re.fullmatch(layers, untuned.origin)
        gemmtune.tune("mixed_mm", a, b, scale_b=scale, progress=False)
    assert "from the store" in str(gemmtune.explain("mixed_mm", a, b, scale_b=scale))
    assert "by the rule" in str(gemmtune.explain("mixed_mm", a[:5], b, scale_b=scale))


def test_a_call_with_predict_makes_the_table_of_a_new_weight_once(monkeypatch):
    a, b, scale = torch.randn(10, 64), torch.randint(-9, 9, (32, 64), dtype=torch.int8).t(), torch.rand(1, 32)
    expected, made = a @ (b.float() * scale), []
    measured = defaults.Default.stored
    monkeypatch.setattr(defaults.Default, "stored", lambda self, *to: made.append(self) or measured(self, *to))
    monkeypatch.setattr("gemmtune.selector.select.select", pytest.fail)
    with settings.patch(tune="predict"):
        assert "a call predicts one" in str(gemmtune.explain("mixed_mm", a, b, scale_b=scale))
        for rows in (5, 1, 10):
            assert torch.allclose(gemmtune.mixed_mm(a[:rows], b, scale_b=scale), expected[:rows], atol=1e-3)
        assert "by the rule" in str(gemmtune.explain("mixed_mm", a, b, scale_b=scale))
        dense = torch.randn(64, 16)
        assert torch.equal(gemmtune.mm(a, dense), a @ dense)  # nothing is known of such weights on a CPU: torch runs
    assert len(made) == 1


def with_other_kernels(made: Table) -> Table:
    """Return the table as another version wrote it, whose kernels had other sources."""
    segments = [x if x.backend == "aten" else dataclasses.replace(x, content_hash=f"{x.content_hash[:-1]}-") for x in made.segments]
    return dataclasses.replace(made, segments=tuple(segments))


@pytest.mark.parametrize("lost", ["another version", "an emptied cache"])
def test_a_table_whose_kernels_are_lost_is_made_again(lost, monkeypatch):
    """Else torch would run the weight for ever. What the settings exclude is no loss."""
    a, b, scale = torch.randn(10, 64), torch.randint(-9, 9, (32, 64), dtype=torch.int8).t(), torch.rand(1, 32)
    expected, made = a @ (b.float() * scale), table()
    [rows_class], device, again = row_classes(PROBLEM), detect("cpu"), []
    stored = defaults.Default.stored
    monkeypatch.setattr(defaults.Default, "stored", lambda self, *to: again.append(self) or stored(self, *to))
    store(with_other_kernels(made) if lost == "another version" else made)
    if lost == "an emptied cache":
        kernel = type(next(x for x in defaults.offered_by("cpp", _work(rows_class), PROBLEM)))
        monkeypatch.setattr(kernel, "compiled", property(lambda _: bool(again)))
    assert not made_by._has_table(rows_class, device, settings.current())
    for excluded in ({"backends": ("aten",)}, {"choice_denylist_regex": "cpp:.*"}, {"choice_allowlist_regex": "aten:.*"}):
        with settings.patch(**excluded):
            assert made_by._has_table(rows_class, device, settings.current())
    with settings.patch(tune="predict"):
        forget_plans()
        for rows in (5, 10):
            assert torch.allclose(gemmtune.mixed_mm(a[:rows], b, scale_b=scale), expected[:rows], atol=1e-3)
    assert len(again) == 1
    assert made_by._has_table(rows_class, device, settings.current())


def _work(rows_class):
    return defaults.Work(rows_class, range(1, 21), detect("cpu"), settings.current(), 0.0, Progress())


ORIGINS = [("predicted 1a", "predicted, verified here, not measured"), ("shipped 2b", "shipped: ")]


@pytest.mark.parametrize(("origin", "words"), ORIGINS)
def test_explain_names_the_origin_of_a_default_table(origin, words):
    made = dataclasses.replace(table(), origin=origin)
    assert Table.of(Ranged(key="{}", fingerprint="{}", kind=DEFAULT, value=made.to_json())) == made
    store(made)
    a, b, scale = torch.randn(10, 64), torch.randint(-9, 9, (32, 64), dtype=torch.int8).t(), torch.rand(1, 32)
    assert words in str(gemmtune.explain("mixed_mm", a, b, scale_b=scale))


def test_processes_start_first_and_inductor_is_imported_while_kernels_compile(monkeypatch):
    """The order in which ``optimize`` makes the tables of a model on a GPU, whose timing Inductor's options decide."""
    events = []

    def in_models(given, device):
        events.append("inductor")
        return dataclasses.replace(given, timing="spaced")

    prepared = []
    monkeypatch.setattr(made_by, "prepare_measuring", lambda device, given, timed: prepared.append((device.type, timed)))
    monkeypatch.setattr(made_by, "prepare_compiling", lambda given, most: prepared.append(most))
    for device, subprocess in ((detect("cpu"), True), (preset("sm90"), True), (preset("sm90"), False)):
        made_by.start_processes(device, dataclasses.replace(settings.current(), tune_in_subprocess=subprocess))
    assert prepared == [("cpu", False), ("cuda", False), MOST_KERNELS, MOST_KERNELS]
    monkeypatch.setattr(made_by, "start_processes", lambda *_: events.append("processes"))
    monkeypatch.setattr(made_by, "in_models", in_models)
    add, wait = defaults.Compilation.add, defaults.Compilation.wait
    monkeypatch.setattr(defaults.Compilation, "add", lambda self, choices: events.append("compiling") or add(self, choices))
    monkeypatch.setattr(defaults.Compilation, "wait", lambda self, *args: events.append("wait") or wait(self, *args))
    made_by.make_defaults(detect("cpu"), [row_classes(PROBLEM)[0]], Progress())
    assert events[:4] == ["processes", "compiling", "inductor", "wait"]
    [fact] = [fact for fact in open_store(settings.current()).every_ranged() if fact.kind == DEFAULT]
    assert fact.fingerprint == fingerprint_text(detect("cpu"), "spaced")


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_quantized_model_on_a_cpu_runs_by_the_rule_where_few_rows_meet_a_weight(kind, monkeypatch):
    monkeypatch.setattr(defaults, "RULE_ON_CPU", RULE)
    monkeypatch.setattr(defaults, "MOST_ROWS_OF_FLOAT32", 64)
    ran = Counter()
    run = eager.Bound.run
    monkeypatch.setattr(eager.Bound, "run", lambda self, *x: ran.update([self.pick.plan.choice.backend]) or run(self, *x))
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32, bias=False))
    weights = [layer.weight.detach().clone() for layer in model]
    gemmtune.optimize(model, progress=False)
    assert not [fact for fact in open_store(settings.current()).every_ranged() if fact.kind == DEFAULT], "torch runs floats"
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(model, weights, strict=True))
    gemmtune.quantize_(gemmtune.restore(model), kind, group=32)
    inputs = [torch.randn(rows, 64) for rows in (1, 3, 64, 65, 300)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        gemmtune.optimize(model, progress=False)
        assert len([fact for fact in open_store(settings.current()).every_ranged() if fact.kind == DEFAULT]) == 2
        monkeypatch.setattr(made_by, "defaults_for", pytest.fail)
        gemmtune.optimize(gemmtune.restore(model), progress=False)  # by the stored tables
        for x, y in zip(inputs, expected, strict=True):
            ran.clear()
            torch.testing.assert_close(model(x), y, atol=1e-4, rtol=1e-4)
            assert set(ran) == ({"cpp"} if len(x) <= 64 else set()), len(x)
    weight = model[0].weight
    given = {"scale_b": weight.scales, "encoding": weight.encoding}
    assert "by the rule" in str(gemmtune.explain("mixed_mm", inputs[1], weight.tensor, **given))


@pytest.mark.parametrize(
    ("dtype", "isa", "most"),
    [
        (torch.bfloat16, ("avx512_bf16",), 8192),
        (torch.float16, (), 8192),
        (torch.float32, ("amx_bf16",), defaults.MOST_ROWS_OF_FLOAT32),
        (torch.bfloat16, ("amx_bf16",), defaults.MOST_ROWS_BY_TILES),
    ],
    ids=str,
)
def test_torch_runs_many_rows_where_its_product_is_faster(dtype, isa, most, monkeypatch):
    monkeypatch.setattr(defaults, "RULE_ON_CPU", RULE)
    problem = Problem.mixed_mm(16, 64, 64, dtype=dtype, scales="column", device_type="cpu")
    work = dataclasses.replace(_work(row_classes(problem)[0]), device=dataclasses.replace(detect("cpu"), isa=isa))
    assert max(m for m, names in defaults.rule_for(work) if names) == most


def test_without_a_compiler_torch_runs_a_quantized_model_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr("gemmtune.backends.cpp.library.why_no_compiler", lambda: "there is none")
    model = gemmtune.quantize_(nn.Sequential(nn.Linear(64, 40)), "int4", group=32)
    x = torch.randn(3, 64)
    with settings.patch(cache_dir=str(tmp_path)), torch.no_grad():
        expected = model(x)
        assert torch.equal(gemmtune.optimize(model, progress=False)(x), expected)
    assert not open_store(settings.current()).every_ranged()


def test_an_interrupted_verification_ends_the_compilations(monkeypatch):
    closed = []
    close = defaults.Compilation.close
    monkeypatch.setattr(defaults.Compilation, "close", lambda self: closed.append(True) or close(self))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(defaults.Default, "stored", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        made_by.make_defaults(detect("cpu"), [row_classes(PROBLEM)[0]], Progress())
    assert caught.tb is not None, "its frames still have the generator"
    assert closed
