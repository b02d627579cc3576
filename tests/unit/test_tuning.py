"""tune, plans and explain over a backend whose choices do as told."""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_choices import LIMITS_S, PROBLEM
from fixed_backend import FixedBackend, install

import gemmtune
from gemmtune import settings
from gemmtune.choice import Offers, Refusal, Status
from gemmtune.dispatch.ready import forget_plans
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Problem
from gemmtune.selector.candidates import Candidates
from gemmtune.selector.result import Outcome
from gemmtune.selector.session import Session
from gemmtune.store.store import Store, open_store
from gemmtune.tuning.explain import Explanation
from gemmtune.workers.pool import WORKERS

A, B = torch.randn(64, 32), torch.randn(48, 32).t()


@pytest.fixture
def backend(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> FixedBackend:
    forget_plans()
    made = FixedBackend(
        ["multiply", "slow", "wrong", "fail", "out_of_resources"], [Refusal(name="triton:huge", reason="too large")]
    )
    install(monkeypatch, made)
    return made


def tuned(problem: Problem = PROBLEM) -> gemmtune.selector.result.ProblemResult:
    return gemmtune.tune(problem, progress=False)[0]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the choices that were examined, as they are."""
    names: list[str] = []
    original = Session.examine

    def examine(self, choice, best_us):
        names.append(choice.name)
        return original(self, choice, best_us)

    monkeypatch.setattr(Session, "examine", examine)
    return names


def test_each_choice_has_its_status(backend: FixedBackend):
    result = tuned()
    assert {o.name: o.status for o in result.outcomes} == {
        "fake:multiply": Status.OK,
        "fake:slow": Status.OK,
        "fake:wrong": Status.WRONG_RESULT,
        "fake:fail": Status.RUNTIME_ERROR,
        "fake:out_of_resources": Status.OUT_OF_RESOURCES,
    }
    assert result.pick == "fake:multiply"
    assert result.source == "measured"
    assert 0 < result.seconds < 60
    assert "triton:huge" in str(gemmtune.TuningResult((result,)))
    assert str(result).startswith(f"{PROBLEM}: fake:multiply, ")


def test_the_second_time_nothing_is_measured(backend: FixedBackend, examined: list[str]):
    tuned()
    examined.clear()
    again = tuned()
    assert again.source == "store"
    assert again.pick == "fake:multiply"
    assert not examined


def test_one_new_choice_costs_one_measurement(backend: FixedBackend, examined: list[str]):
    tuned()
    examined.clear()
    backend.kinds.append("multiply-again")
    result = tuned()
    # The fastest of the old ones runs along, to tell by how much the machine has changed since.
    assert examined == ["fake:multiply", "fake:multiply-again"]
    assert {o.name for o in result.outcomes if o.from_store} >= {"fake:multiply", "fake:slow"}
    assert tuned().source == "store"


def test_a_new_choice_that_leaves_all_ranked_ones_far_behind_is_the_pick(backend: FixedBackend):
    backend.kinds = ["slow", "slow-too"]
    assert tuned().pick in ("fake:slow", "fake:slow-too")
    backend.kinds.append("multiply")
    result = tuned()
    assert result.pick == "fake:multiply"
    assert result.picked is not None
    assert result.picked.finalist


def test_force_measures_again(backend: FixedBackend, examined: list[str]):
    tuned()
    examined.clear()
    with settings.patch(tune="force"):
        assert tuned().source == "measured"
    assert len(examined) == len(backend.kinds)


def test_a_wider_search_remembered_is_used_by_a_narrower_one(backend: FixedBackend, monkeypatch: pytest.MonkeyPatch):
    tuned()
    original = FixedBackend.enumerate

    def enumerate_less(self, problem, device, chosen):
        if chosen.search != "exhaustive":
            self = FixedBackend(["slow"])
        return original(self, problem, device, chosen)

    monkeypatch.setattr(FixedBackend, "enumerate", enumerate_less)
    assert tuned().pick == "fake:multiply"


def test_an_interruption_keeps_what_was_measured(backend: FixedBackend, own_store: Path, monkeypatch: pytest.MonkeyPatch):
    original = Session.examine

    def interrupted(self, choice, best_us):
        if choice.name == "fake:wrong":
            raise KeyboardInterrupt
        return original(self, choice, best_us)

    monkeypatch.setattr(Session, "examine", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned()
    monkeypatch.setattr(Session, "examine", original)
    assert {row.name for row in Store.open(own_store).every_row()} == {"fake:multiply", "fake:slow"}
    result = tuned()
    assert {o.name for o in result.outcomes if o.from_store} <= {"fake:multiply", "fake:slow"}
    assert result.pick == "fake:multiply"
    assert tuned().source == "store"


def test_a_budget_keeps_and_picks_what_was_measured_and_a_later_tuning_goes_on(
    backend: FixedBackend, examined: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Candidates, "late", property(lambda self: self.deadline < math.inf and len(examined) >= 2))
    [first] = gemmtune.tune(PROBLEM, progress=False, budget_s=100.0)
    assert len(examined) == 2
    assert first.partial == f"{len(backend.kinds) - 2} of {len(backend.kinds)} choices are not measured yet"
    assert first.pick in {o.name for o in first.outcomes}
    assert "; tune it again to go on" in str(gemmtune.TuningResult((first,)))
    with settings.patch(first_call_budget_s=100.0):  # what is missing is still late, so nothing is measured
        assert torch.equal(gemmtune.mm(A, B), A @ B)
    assert len(examined) == 2
    second = tuned()
    assert second.partial == ""
    assert {o.name for o in second.outcomes} == {f"fake:{kind}" for kind in backend.kinds}


def test_a_budget_is_for_single_problems(backend: FixedBackend):
    for more in ({"m": range(1, 9), "budget_s": 1.0}, {"budget_s": 0.0}):
        with pytest.raises(InvalidProblemError, match="tune: budget_s: got"):
            gemmtune.tune(PROBLEM, progress=False, **more)


def test_what_was_measured_on_a_busy_machine_is_marked_and_measured_again_if_asked_for(
    backend: FixedBackend, examined: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("gemmtune.timing.neighbours.disturbance", lambda *_: "other processes used 80% of the cores")
    first = gemmtune.tune(PROBLEM, progress=False)
    assert first[0].disturbed == "other processes used 80% of the cores"
    assert "measured on a busy machine (other processes used 80% of the cores)" in str(first)
    assert [record.levelname for record in caplog.records if "busy machine" in record.message] == ["WARNING"]
    examined.clear()
    gemmtune.mm(A, B)  # a call takes what there is
    with monkeypatch.context() as patch:  # so does a tuning that had to wait for another process: ranks have one pick
        patch.setattr("gemmtune.selector.select.tuning_lock", lambda *_: nullcontext(True))
        assert tuned().source == "store"
    assert not examined
    second = gemmtune.tune(PROBLEM, progress=False)
    assert second[0].source == "store"
    assert not examined
    for text in (str(second), str(gemmtune.explain(PROBLEM)), str(second[0])):
        assert "on a busy machine" in text
    assert "gemmtune tune --again" in str(second)
    monkeypatch.setattr("gemmtune.timing.neighbours.disturbance", lambda *_: "")
    [again] = gemmtune.tune(PROBLEM, progress=False, again=True)
    assert set(examined) == {"fake:multiply", "fake:slow"}
    assert again.disturbed == ""
    assert tuned().source == "store"


def test_on_a_cpu_times_are_those_of_whole_calls(backend: FixedBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gemmtune.tuning.tune.host_us", lambda *_: 700.0)
    backend.kinds = ["multiply", "slow"]
    result = tuned()
    assert result.picked is not None
    assert result.picked.time_us is not None
    assert result.picked.time_us > 700
    assert result.picked.direct_us == pytest.approx(result.picked.time_us - 700)
    assert [o.host_us for o in result.outcomes] == [700.0, 700.0]


def test_other_strides_are_another_problem(backend: FixedBackend):
    tuned()
    assert tuned(Problem.mm(64, 48, 32, dtype=torch.float32, layout="nn", device_type="cpu")).source == "measured"


def test_the_log_has_a_line_for_each_choice(backend: FixedBackend, tmp_path: Path):
    with settings.patch(log_file=str(tmp_path / "tuning.jsonl")):
        tuned()
        tuned()
    lines = [json.loads(line) for line in (tmp_path / "tuning.jsonl").read_text().splitlines()]
    assert {line["name"] for line in lines} == {f"fake:{kind}" for kind in backend.kinds} | {"triton:huge"}
    assert len(lines) == len(backend.kinds) + 1
    assert {(line["M"], line["N"], line["K"]) for line in lines} == {(64, 48, 32)}


def test_a_call_tunes_once_and_says_so(backend: FixedBackend, examined: list[str], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "gemmtune"):
        gemmtune.mm(A, B)
    assert len(examined) == len(backend.kinds)
    assert sum("tuned mm 64x48x32" in record.message for record in caplog.records) == 1
    gemmtune.mm(A, B)
    forget_plans()
    gemmtune.mm(A, B)
    assert len(examined) == len(backend.kinds)


def test_a_first_call_enumerates_once_whether_it_tunes_or_the_store_knows(backend: FixedBackend):
    for tune in ("on_miss", "on_miss", "never", "force"):
        forget_plans()
        backend.enumerations = 0
        with settings.patch(tune=tune):
            gemmtune.mm(A, B)
            assert backend.enumerations == 1, tune
    backend.enumerations = 0
    tuned()
    assert backend.enumerations == 1


def test_never_runs_torch_without_measuring_until_the_store_knows(backend: FixedBackend, examined: list[str]):
    with settings.patch(tune="never"):
        gemmtune.mm(A, B)
        assert not examined
        assert gemmtune.explain("mm", A, B).pick is None
    tuned()
    examined.clear()
    with settings.patch(tune="never"):
        gemmtune.mm(A, B)
        assert not examined
        assert gemmtune.explain("mm", A, B).pick == "fake:multiply"


def test_nothing_valid_warns_and_runs_torch(backend: FixedBackend):
    backend.kinds = ["wrong", "fail"]
    with pytest.warns(
        UserWarning, match=r"no valid choice for mm 64x48x32 (.|\n)*fake:wrong: wrong_result(.|\n)*torch runs instead"
    ):
        got = gemmtune.mm(A, B)
    assert torch.allclose(got, A @ B, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemmtune.mm(A, B)


def test_without_worker_processes_torch_runs_and_nothing_is_stored(backend: FixedBackend, monkeypatch: pytest.MonkeyPatch):
    WORKERS.close()  # those of earlier tests wait for work
    monkeypatch.setattr(sys, "executable", "")
    with settings.patch(tune_in_subprocess=True):
        with pytest.warns(UserWarning, match=r"cannot be tuned: no worker process (.|\n)*torch runs instead"):
            assert torch.equal(gemmtune.mm(A, B), A @ B)
        with pytest.raises(gemmtune.UnavailableError, match="tune_in_subprocess=False"):
            tuned()
        with settings.patch(fallback_to_aten=False), pytest.raises(gemmtune.UnavailableError):
            gemmtune.mm(A, B)
    assert tuned().source == "measured"


def test_nothing_valid_without_fallback_is_an_error(backend: FixedBackend):
    backend.kinds = ["wrong", "fail"]
    with settings.patch(fallback_to_aten=False), pytest.raises(gemmtune.NoValidChoicesError) as caught:
        gemmtune.mm(A, B)
    assert {(name, status) for name, status, _ in caught.value.left_out} == {
        ("fake:wrong", "wrong_result"),
        ("fake:fail", "runtime_error"),
        ("triton:huge", "refused"),
    }


def test_a_single_choice_is_proved_but_torchs_own_is_taken_at_once(backend: FixedBackend, examined: list[str]):
    backend.kinds = ["wrong"]
    with settings.patch(fallback_to_aten=False), pytest.raises(gemmtune.NoValidChoicesError, match="fake:wrong: wrong_result"):
        gemmtune.mm(A, B)
    assert examined == ["fake:wrong"]
    with pytest.warns(UserWarning, match="torch runs instead"):
        assert torch.equal(gemmtune.mm(A, B), A @ B)
    explained = gemmtune.explain("mm", A, B)
    assert (explained.pick, explained.origin) == (None, "no choice is left")
    backend.kinds = ["multiply"]
    original, torchs = FixedBackend.enumerate, {"baseline": True}
    backend.enumerate = lambda *x: Offers(choices=tuple(replace(c, **torchs) for c in original(backend, *x).choices))  # type: ignore[method-assign]
    forget_plans()
    assert torch.allclose(gemmtune.mm(A, B), A @ B, atol=1e-5)
    assert examined == ["fake:wrong"]


def test_what_was_tuned_alone_is_ranked_when_there_are_others(backend: FixedBackend, examined: list[str]):
    backend.kinds = ["multiply"]
    assert [tuned().source for _ in range(2)] == ["measured", "store"]
    backend.kinds = ["multiply", "multiply-2"]
    assert [(o.name, o.finalist) for o in sorted(tuned().outcomes, key=lambda o: o.name)] == [
        ("fake:multiply", True),
        ("fake:multiply-2", True),
    ]


def test_a_pick_that_cannot_be_loaded_warns_and_runs_torch(backend: FixedBackend):
    backend.kinds = ["build_fails"]
    with settings.patch(verify=False), pytest.warns(UserWarning, match="fake:build_fails cannot be loaded"):
        got = gemmtune.mm(A, B)
    assert torch.allclose(got, A @ B, atol=1e-5)
    forget_plans()
    alone = settings.patch(verify=False, fallback_to_aten=False)
    with alone, pytest.raises(gemmtune.ErrorFromChoice, match="cannot load the artifact"):
        gemmtune.mm(A, B)


def test_tuning_leaves_the_random_state_alone(backend: FixedBackend):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    tuned()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_worker_process_survives_what_the_choices_do(backend: FixedBackend):
    backend.kinds = ["segfault", "hang", "multiply", "slow"]
    expected = {"fake:multiply": "ok", "fake:slow": "ok", "fake:segfault": "crashed", "fake:hang": "timed_out"}
    for limit_s in LIMITS_S:
        with settings.patch(tune="force", tune_in_subprocess=True, choice_timeout_s=limit_s):
            result = tuned()
        found = {o.name: str(o.status) for o in result.outcomes}
        if found == expected:
            break
    assert found == expected
    assert result.pick == "fake:multiply"


@pytest.mark.parametrize(
    ("missing", "line"), [(1, "1 offered choice is not measured yet"), (2, "2 offered choices are not measured yet")]
)
def test_explain_counts_what_is_not_measured(missing: int, line: str):
    explanation = Explanation(problem=None, pick=None, origin="nothing is known", missing=missing)
    assert str(explanation).splitlines() == ["this call: torch (nothing is known)", f"   {line}"]


def test_tune_and_explain_take_a_problem_or_a_call(own_store: Path):
    x, weight = torch.randn(6, 64), gemmtune.QuantizedWeight.quantize(torch.randn(64, 8))
    relu = {"epilogue": torch.relu}
    with settings.patch(backends=("aten",), search="quick"):
        for op, operands, arguments in (("mm", (x, x.t()), relu), (gemmtune.mixed_mm, (x, weight), {})):
            [tuned] = gemmtune.tune(op, *operands, progress=False, **arguments)
            assert tuned.source == "measured"
            explained = gemmtune.explain(op, *operands, **arguments)
            assert explained.problem == tuned.problem
            assert (explained.pick, explained.origin) in ((tuned.pick, "from the store"), (tuned.pick, "the only choice"))
            assert gemmtune.explain(tuned.problem) == explained
            [again] = gemmtune.tune(tuned.problem, progress=False)
            assert (again.source, again.pick) == ("store", tuned.pick)


def test_explain_tells_a_crash_in_one_line():
    crash = "worker process died by SIGSEGV; the end of its output:\nFatal Python error: Segmentation fault\n\nStack:\n  File 1"
    failed = Outcome(name="fake:a", backend="fake", content_hash="a", status=Status.CRASHED, reason=crash)
    [_, line] = str(Explanation(problem=None, pick=None, origin="nothing is known", outcomes=(failed,))).splitlines()
    assert line.split(maxsplit=1) == ["fake:a", f"crashed: {crash.splitlines()[0]} Fatal Python error: Segmentation fault"]


def test_explain_tells_what_differs_from_an_earlier_machine(backend: FixedBackend):
    tuned()
    store = open_store(settings.current())
    with settings.patch(timing="eager"):
        text = str(gemmtune.explain("mm", A, B))
    assert "the first call tunes it" in text
    assert "timing: was graph, is eager" in text
    assert "* fake:multiply" in str(gemmtune.explain("mm", A, B))
    assert store.every_row()


def test_progress_hears_of_every_problem(backend: FixedBackend):
    heard: list[str] = []

    class Listener:
        def begin(self, problem, total_problems):
            heard.append(f"begin {total_problems}")

        def stage(self, name, done, total):
            heard.append(name)

        def end(self, result):
            heard.append("end")

        def message(self, text):
            heard.append(text)

        def close(self):
            heard.append("close")

    gemmtune.tune([PROBLEM], progress=Listener())
    assert heard[:2] == ["list choices", "begin 1"]
    assert "verify and measure" in heard
    assert heard[-2:] == ["end", "close"]
