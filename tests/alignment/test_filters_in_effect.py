"""Filters as a user meets them: in calls, tunings, explanations, tables, logs, the store and on the command line."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from cpp_kernels import needs_compiler
from fake_choices import PROBLEM
from fixed_backend import FixedBackend, install

import gemmtune
from gemmtune import cli, settings
from gemmtune.dispatch.ready import forget_plans, ready
from gemmtune.selector.result import ProblemResult
from gemmtune.store.store import open_store

A, B = torch.randn(64, 32), torch.randn(48, 32).t()
FAST, SLOW = "fake:multiply", "fake:slow"


@pytest.fixture(autouse=True)
def no_plans(own_store: Path) -> None:
    forget_plans()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FixedBackend:
    made = FixedBackend(["multiply", "slow", "wrong"])
    install(monkeypatch, made)
    return made


def tuned() -> ProblemResult:
    return gemmtune.tune(PROBLEM, progress=False)[0]


def runs() -> str:
    """The name of the choice that a call runs."""
    before = set(ready)
    assert torch.allclose(gemmtune.mm(A, B), A @ B, atol=1e-5)
    [new] = set(ready) - before
    return ready[new].choice.name


def test_a_changed_setting_takes_effect_between_two_calls(backend: FixedBackend) -> None:
    with settings.patch(choice_allowlist_regex="slow"):
        assert runs() == SLOW
    with settings.patch(choice_allowlist_regex="multiply"):
        assert runs() == FAST
    with settings.patch(choice_denylist_regex="multiply|wrong"):
        assert runs() == SLOW
    with settings.patch(choice_denylist_regex="slow|wrong"):
        assert runs() == FAST
    with settings.patch(max_profiling_configs=1):
        assert runs() == FAST
    assert len(ready) == 5


def test_a_patch_inside_a_patch_and_after_it(backend: FixedBackend) -> None:
    with settings.patch(choice_allowlist_regex="multiply"):
        assert runs() == FAST
        with settings.patch(choice_allowlist_regex="slow"):
            assert runs() == SLOW
            gemmtune.mm(A, B)
        gemmtune.mm(A, B)
    assert [plan.choice.name for plan in ready.values()] == [FAST, SLOW]


def test_what_was_measured_before_is_kept_and_what_is_denied_is_not_tried(backend: FixedBackend) -> None:
    with settings.patch(choice_denylist_regex="slow|wrong"):
        result = tuned()
    assert [o.name for o in result.outcomes] == [FAST]
    reason = "choice_denylist_regex 'slow|wrong' matches the name"
    assert [(r.name, r.reason) for r in result.refusals] == [(SLOW, reason), ("fake:wrong", reason)]
    assert {row.name for row in open_store(settings.current()).every_row()} == {FAST}
    everything = tuned()
    assert {o.name for o in everything.outcomes if not o.from_store} == {SLOW, "fake:wrong"}


def test_a_stored_pick_that_is_denied_now_is_not_used(backend: FixedBackend) -> None:
    assert tuned().pick == FAST
    with settings.patch(choice_denylist_regex="multiply"):
        assert tuned().pick == SLOW
        assert runs() == SLOW
        assert gemmtune.explain("mm", A, B).pick == SLOW
        with settings.patch(tune="never"):
            assert runs() == SLOW
            assert gemmtune.explain("mm", A, B).pick == SLOW
    with settings.patch(tune="never"):
        assert runs() == FAST


def test_what_a_wider_search_stored_is_denied_too(backend: FixedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned()
    original = FixedBackend.enumerate

    def enumerate_less(self, problem, device, chosen):
        return original(self if chosen.search == "exhaustive" else FixedBackend(["slow", "wrong"]), problem, device, chosen)

    monkeypatch.setattr(FixedBackend, "enumerate", enumerate_less)
    assert tuned().pick == FAST
    with settings.patch(choice_denylist_regex="multiply"):
        assert tuned().pick == SLOW
    with settings.patch(template_min_gemm_size=64 * 48 * 32 + 1), pytest.warns(UserWarning, match="torch runs instead"):
        gemmtune.mm(A, B)


def test_a_cap_says_how_much_is_tried_and_not_what_may_run(backend: FixedBackend) -> None:
    backend.kinds = ["slow", "slow-too", "multiply"]
    with settings.patch(max_profiling_configs=2):
        assert tuned().pick in (SLOW, "fake:slow-too")
    assert tuned().pick == FAST
    with settings.patch(max_profiling_configs=2):
        assert tuned().pick == FAST


def test_a_name_that_changed_since_it_was_stored_is_shown_and_matched_as_it_is_now(
    backend: FixedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned()
    original = FixedBackend.enumerate

    def renamed(self, problem, device, chosen):
        offers = original(self, problem, device, chosen)
        for choice in offers.choices:
            digest = choice.content_hash
            object.__setattr__(choice, "name", choice.name.replace("multiply", "times"))
            monkeypatch.setattr(type(choice), "content_hash", property(lambda c: "fake-" + c.name.replace("times", "multiply")))
            assert choice.content_hash == digest
        return offers

    monkeypatch.setattr(FixedBackend, "enumerate", renamed)
    again = tuned()
    assert again.source == "store"
    assert again.pick == "fake:times"
    with settings.patch(choice_denylist_regex="times"):
        assert tuned().pick == SLOW
    with settings.patch(choice_denylist_regex="multiply"):
        assert tuned().pick == "fake:times"


def test_a_filter_that_leaves_nothing_warns_and_torch_runs(backend: FixedBackend) -> None:
    with settings.patch(choice_allowlist_regex="pingpong"):
        with pytest.warns(RuntimeWarning, match="choice_allowlist_regex: got 'pingpong', which matches no choice's name"):
            explanation = gemmtune.explain("mm", A, B)
        assert (explanation.pick, explanation.origin) == (None, "no choice is left")
        assert "3 × fake, for instance fake:multiply: choice_allowlist_regex 'pingpong' does not match the name" in str(explanation)
        with pytest.warns() as caught:
            got = gemmtune.mm(A, B)
        assert torch.equal(got, A @ B)
        assert any("choice_allowlist_regex: got 'pingpong'" in str(w.message) for w in caught)
        assert any("torch runs instead" in str(w.message) for w in caught)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gemmtune.mm(A, B)


def test_without_a_fallback_the_error_names_every_choice_and_the_regex(backend: FixedBackend) -> None:
    every = "choice_denylist_regex: got '.', which matches the name of every choice"
    with settings.patch(choice_denylist_regex=".", fallback_to_aten=False):
        with pytest.warns(RuntimeWarning, match=every):
            assert "NoValidChoicesError" in gemmtune.explain("mm", A, B).origin
        with pytest.warns(RuntimeWarning, match=every), pytest.raises(gemmtune.NoValidChoicesError) as caught:
            gemmtune.mm(A, B)
    assert caught.value.left_out == tuple(
        (name, "refused", "choice_denylist_regex '.' matches the name") for name in (FAST, SLOW, "fake:wrong")
    )


def test_the_same_warning_is_shown_once(backend: FixedBackend) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with settings.patch(choice_allowlist_regex="cooperative"):
            for _ in range(3):
                tuned()
                gemmtune.explain("mm", A, B)
    assert sum("cooperative" in str(w.message) for w in caught) == 1


def test_torchs_own_operation_goes_when_it_is_denied() -> None:
    with (
        settings.patch(backends=("aten",), choice_denylist_regex="^aten", fallback_to_aten=False),
        pytest.warns(RuntimeWarning, match="choice_denylist_regex: got '\\^aten'"),
        pytest.raises(gemmtune.NoValidChoicesError, match="aten:mm: refused: choice_denylist_regex '\\^aten'"),
    ):
        gemmtune.mm(A, B)


@needs_compiler
def test_the_name_shown_is_the_name_matched_logged_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["64x48x32", "--dtype", "float32", "--search", "quick", "--backends", "aten,cpp"]
    assert cli.run(["choices", *words, "--json", "-"]) == 0
    shown = [choice["name"] for choice in json.loads(capsys.readouterr().out)["choices"]]
    assert len(shown) > 2
    for name in shown:
        assert cli.run(["choices", *words, "--json", "-", "--allow", f"^{re.escape(name)}$"]) == 0
        assert [choice["name"] for choice in json.loads(capsys.readouterr().out)["choices"]] == [name]
    log = tmp_path / "log.jsonl"
    with settings.patch(log_file=str(log), search="quick", backends=("aten", "cpp")):
        result = gemmtune.tune(gemmtune.Problem.mm(64, 48, 32, dtype=torch.float32, device_type="cpu"), progress=False)
        stored = {row.name for row in open_store(settings.current()).every_row() if row.backend in ("aten", "cpp")}
    logged = {json.loads(line)["name"] for line in log.read_text().splitlines()}
    assert set(shown) == {o.name for o in result[0].outcomes} == logged == stored
    assert all(name in str(result) for name in shown)


def test_the_command_line_filters(backend: FixedBackend, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["64x48x32", "--dtype", "float32", "--allow", "multiply|wrong", "--deny", "wrong"]
    assert cli.run(["choices", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:4]] == [FAST]
    assert lines[-3:] == [
        "refused: 2",
        "  fake:slow: choice_allowlist_regex 'multiply|wrong' does not match the name",
        "  fake:wrong: choice_denylist_regex 'wrong' matches the name",
    ]
    assert cli.run(["tune", *words, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert f"pick: {FAST}" in text
    assert "left out: 2 choices" in text
    assert "  refused: fake:slow: choice_allowlist_regex 'multiply|wrong' does not match the name" in text
    assert "  refused: fake:wrong: choice_denylist_regex 'wrong' matches the name" in text


def test_the_command_line_says_what_leaves_nothing(backend: FixedBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tune", "64x48x32", "--dtype", "float32", "--device", "cpu", "--deny", "fake"]) == 1
    err = capsys.readouterr().err
    assert "warning: choice_denylist_regex: got 'fake', which matches the name of every choice, such as fake:multiply; " in err
    assert (
        "error: no valid choice for mm 64x48x32 float32 nt on cpu:\n  fake:multiply: refused: choice_denylist_regex 'fake'" in err
    )
    assert cli.run(["choices", "64x48x32", "--dtype", "float32", "--allow", "("]) == 2
    assert "error: --allow: got '(', expected a regular expression" in capsys.readouterr().err
