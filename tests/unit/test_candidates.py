"""Stored outcomes of a problem's choices under the current settings."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from fake_choices import CLAIMS, PROBLEM, Fake

from gemmtune.choice import Availability, Offers, Refusal, Status
from gemmtune.device import detect
from gemmtune.selector import offers as offers_module
from gemmtune.selector.candidates import Candidates, Retry, row_of
from gemmtune.selector.result import ALONE, DISTURBED, LIMIT_S, SETTLED, Outcome, remedy_for
from gemmtune.settings import Settings, current

TIMES = {"aten:mm": 20.0, "fake:multiply": 10.0, "fake:dropped": 12.0, "fake:slow": 30.0}


class Known:
    """A store in which torch and the fastest choice were ranked, and the others were dropped before. Some then failed."""

    def __init__(self, **failed: dict[str, object]) -> None:
        self.failed = {name.replace("_", ":"): fields for name, fields in failed.items()}

    def rows(self, key: str, fingerprint: str) -> dict[str, object]:
        found = {}
        for name, time_us in TIMES.items():
            one = Outcome(
                name=name, backend=name.partition(":")[0], content_hash=name, status=Status.OK, time_us=time_us,
                finalist=time_us in (10.0, 20.0), baseline=name == "aten:mm", info={SETTLED: True},
            )  # fmt: skip
            found[name] = row_of(dataclasses.replace(one, **self.failed.get(name, {})), PROBLEM, fingerprint)
        return found


class Named(Fake):
    """A choice whose hash is its name."""

    @property
    def content_hash(self) -> str:
        return self.name


def stored(*names: str, store: Known | None = None, retry: Retry = "needed") -> Candidates:
    """Return the stored candidates if only these choices may run."""
    offered = [Named(name=name, backend=name.partition(":")[0], problem=PROBLEM, claims=CLAIMS, run="multiply") for name in names]
    empty = Candidates(
        problem=PROBLEM, device=detect("cpu"), settings=current(), offers=Offers(choices=offered),
        choices={c.content_hash: c for c in offered}, known={},
    )  # fmt: skip
    return empty.stored(store or Known(), retry=retry)


def test_ranked_candidates_are_complete() -> None:
    assert stored(*TIMES).complete


def test_losers_to_an_excluded_choice_are_ranked_again() -> None:
    left = stored("aten:mm", "fake:dropped", "fake:slow")
    assert not left.complete
    assert [name for name, outcome in left.known.items() if not outcome.settled] == ["fake:dropped"]


def test_torch_alone_is_complete_if_nothing_looked_faster() -> None:
    assert stored("aten:mm", "fake:slow").complete


KILLED = {"status": Status.CRASHED, "time_us": None, "finalist": False, "info": {DISTURBED: "the process was killed"}}
WRONG = {"status": Status.WRONG_RESULT, "time_us": None, "finalist": False, "info": {}}


def test_torch_is_measured_again_after_an_accident() -> None:
    """No kernel is picked unopposed because torch's worker was once killed."""
    found = stored(*TIMES, store=Known(aten_mm=KILLED))
    assert [c.name for c in found.missing] == ["aten:mm"]
    assert not found.complete


def test_a_kernel_that_had_an_accident_waits_for_the_next_tuning() -> None:
    store = Known(fake_multiply=KILLED)
    assert not stored(*TIMES, store=store).missing
    assert [c.name for c in stored(*TIMES, store=store, retry="failed").missing] == ["fake:multiply"]


def test_times_of_a_busy_machine_stay_until_they_are_asked_for() -> None:
    store = Known(fake_multiply={"info": {DISTURBED: "a neighbour", SETTLED: True}})
    for retry, missing in (("needed", []), ("failed", []), ("disturbed", ["fake:multiply"])):
        assert [c.name for c in stored(*TIMES, store=store, retry=retry).missing] == missing  # type: ignore[arg-type]


def test_all_are_measured_again_if_accidents_left_nothing() -> None:
    found = stored("aten:mm", "fake:multiply", store=Known(**{name.replace(":", "_"): KILLED for name in TIMES}))
    assert [c.name for c in found.missing] == ["aten:mm", "fake:multiply"]


@pytest.mark.parametrize("status", [Status.COMPILE_TIMEOUT, Status.TIMED_OUT])
@pytest.mark.parametrize(
    ("info", "retried"), [({LIMIT_S: 30.0}, True), ({LIMIT_S: 1e9}, False), ({LIMIT_S: "x"}, True), ({}, True)]
)
def test_a_larger_time_limit_tries_again(status: Status, info: dict[str, object], retried: bool) -> None:
    late = {"status": status, "time_us": None, "finalist": False, "info": info}
    assert bool(stored(*TIMES, store=Known(fake_multiply=late)).missing) == retried


def test_failures_of_a_choice_stay() -> None:
    assert stored("aten:mm", "fake:multiply", store=Known(aten_mm=WRONG, fake_multiply=WRONG)).complete


@pytest.mark.parametrize(("wrong", "settled"), [((), False), (("fake_multiply", "fake_dropped", "fake_slow"), True)])
def test_the_only_correct_choice_is_ranked_once_it_has_rivals(wrong: tuple[str, ...], settled: bool) -> None:
    found = stored(*TIMES, store=Known(aten_mm={"info": {SETTLED: ALONE}}, **dict.fromkeys(wrong, WRONG)))
    assert found.known["aten:mm"].settled == settled


@pytest.mark.parametrize("setting", ["choice_allowlist_regex", "cutlass_op_denylist_regex"])
def test_remedy_names_the_regex_that_refused_choices(setting: str) -> None:
    by_regex, other = (Refusal(name="cutlass:x", reason=f"{x}: left out") for x in (f"{setting} 'x'", "no tensor cores"))
    assert remedy_for([], Settings(), (other, by_regex)) == f"Change or unset {setting}."
    assert remedy_for([], Settings(), (other,)).startswith("Enable more backends")


@pytest.mark.parametrize(
    ("failures", "fallback", "remedy"),
    [
        ([KILLED], True, "Tune it again on an idle machine: the process was killed."),
        (
            [KILLED, KILLED | {"status": Status.TIMED_OUT, "info": {DISTURBED: "it ran out of time"}}],
            True,
            "Tune it again on an idle machine, or raise choice_timeout_s: it ran out of time, the process was killed.",
        ),
        ([WRONG | {"status": Status.COMPILE_TIMEOUT}], True, "Raise compile_timeout_s, and tune it again."),
        ([WRONG], True, "Enable more backends (settings.backends)."),
        ([WRONG], False, "Enable more backends (settings.backends), or set fallback_to_aten to run torch instead."),
    ],
)
def test_remedy_names_what_helps(failures: list[dict[str, Any]], fallback: bool, remedy: str) -> None:
    outcomes = [Outcome(name="x", backend="x", content_hash="x", **failed) for failed in failures]
    assert remedy_for(outcomes, Settings(fallback_to_aten=fallback)) == remedy


class Compiled(Named):
    """A choice that needs a compilation."""

    @property
    def compile_key(self) -> str:
        return self.name


def test_a_fused_product_tries_only_kernels_near_the_unfused_fastest() -> None:
    times = {"aten:mm": 5.0, "fake:best": 10.0, "fake:near": 12.5, "fake:far": 12.6, "fake:only alone": 11.0}
    kinds = {name: (Named if name == "aten:mm" else Compiled) for name in (*times, "fake:only fused")}
    made = {
        name: kind(name=name, backend=name.partition(":")[0], problem=PROBLEM, claims=CLAIMS, run="multiply")
        for name, kind in kinds.items()
    }
    known = {
        name: Outcome(name=name, backend="fake", content_hash=name, status=Status.OK, time_us=time_us)
        for name, time_us in times.items()
    }
    empty = Candidates(problem=PROBLEM, device=detect("cpu"), settings=current(), offers=Offers(), choices=made, known={})
    alone = dataclasses.replace(empty, known=known)
    fused = dataclasses.replace(empty, offers=Offers(choices=[x for name, x in made.items() if name != "fake:only alone"]))
    assert [c.name for c in fused.narrowed(alone).offers.choices] == ["aten:mm", "fake:best", "fake:near"]
    assert fused.narrowed(empty) is fused


class Hindered(Named):
    """A choice that this machine cannot compile."""

    obstacle = "no compiler"


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("on_this_machine", [True, False])
def test_what_this_machine_cannot_run_is_offered_for_others_only(
    available: bool, on_this_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [kind(name=f"fake:{kind.__name__}", backend="aten", problem=PROBLEM, claims=CLAIMS) for kind in (Named, Hindered)]
    backend = SimpleNamespace(
        available=lambda _: Availability(ok=available, detail="no library"), enumerate=lambda *_: Offers(choices=tuple(made)),
        serves_by_default=lambda _: True,
    )  # fmt: skip
    monkeypatch.setattr(offers_module, "load", lambda _: backend)
    found = offers_module.legal_offers(PROBLEM, detect("cpu"), Settings(backends=("aten",)), on_this_machine=on_this_machine)
    names = ["fake:Named", "fake:Hindered"] if not on_this_machine else ["fake:Named"] if available else []
    refused = {"fake:Hindered": "no compiler"} if available else {"aten": "no library"}
    assert [x.name for x in found.choices] == names
    assert {x.name: x.reason for x in found.refusals} == (refused if on_this_machine else {})
