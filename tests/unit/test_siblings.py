"""Weights of one model: what one tells the next, and the compilation of the next one's kernels."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_choices import CLAIMS, Fake

from gemmtune import settings
from gemmtune.choice import Choice, Offers, Status
from gemmtune.device import detect
from gemmtune.problem import Problem
from gemmtune.selector import siblings as module
from gemmtune.selector.candidates import Candidates
from gemmtune.selector.range_work import ready_ahead
from gemmtune.selector.result import Outcome, ProblemResult
from gemmtune.selector.siblings import Siblings
from gemmtune.settings import Settings, current

GPU = dataclasses.replace(detect("cpu"), type="cuda")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled(Fake):
    """A choice with a kernel of its own, which the cache lacks."""

    @property
    def compile_key(self) -> str | None:
        return None if self.baseline else self.name

    @property
    def compiled(self) -> bool:
        return False


def problem(m: int, n: int = 8, **options: object) -> Problem:
    return Problem.mm(m, n, 16, device_type="cpu", **options)


def candidates(p: Problem, *names: str) -> Candidates:
    choices = [Compiled(name=x, backend="b", problem=p, claims=CLAIMS, baseline=x == "torch") for x in names]
    return Candidates(
        problem=p,
        device=GPU,
        settings=current(),
        offers=Offers(choices=tuple(choices)),
        choices={c.content_hash: c for c in choices},
        known={},
    )


def result_of(p: Problem, **times_us: float) -> ProblemResult:
    outcomes = tuple(
        Outcome(name=name, backend="b", content_hash=name, status=Status.OK, time_us=time_us) for name, time_us in times_us.items()
    )
    return ProblemResult(
        problem=p, outcomes=outcomes, refusals=(), pick=None, limit_us=None, seconds=0.0, source="measured"
    )  # fmt: skip


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of kernels that were compiled, which fills up."""
    names: list[str] = []
    monkeypatch.setattr(module.Compilation, "_compile", lambda self, choice: names.append(choice.name))
    return names


def names_of(found: Candidates) -> list[str]:
    return [c.name for c in found.offers.choices]


OFFERED = ("torch", "t_1", "t_2", "t_3", "t_4", "u_1", "u_2", "u_3")


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (problem(4, 32), ["torch", "t_1", "t_2", "t_4", "u_1", "u_2"]),
        (problem(5, 32), list(OFFERED)),
        (problem(4, 32, layout="nn"), list(OFFERED)),
    ],
    ids=["like the first", "another M", "another layout"],
)
def test_the_next_weight_tries_what_was_near_the_fastest_and_the_likeliest(asked: Problem, kept: list[str], compiled: list[str]):
    with Siblings(GPU, current()) as siblings:
        assert names_of(siblings.narrowed(candidates(problem(4), *OFFERED))) == list(OFFERED), "the first weight tries all"
        siblings.learn([result_of(problem(4), t_4=1.0, torch=1.2, u_3=1.3, t_3=9.0)])
        assert names_of(siblings.narrowed(candidates(asked, *OFFERED))) == kept


@pytest.mark.parametrize("changes", [{"search": "exhaustive"}, {"batch_invariant": True}], ids=str)
def test_some_settings_try_everything(changes: dict[str, object], compiled: list[str]):
    with Siblings(GPU, dataclasses.replace(Settings(), **changes)) as siblings:
        siblings.learn([result_of(problem(4), t_4=1.0)])
        assert names_of(siblings.narrowed(candidates(problem(4), *OFFERED))) == list(OFFERED)


def test_the_next_weight_compiles_once_the_present_one_has_results(compiled: list[str], own_store: Path):
    begun = threading.Event()

    def missing() -> tuple[Compiled, ...]:
        begun.set()
        return candidates(problem(4, 32), "x_1", "x_2").offers.choices

    with Siblings(GPU, current()) as siblings:
        siblings.then(missing)
        with siblings.compiling(candidates(problem(4), "t_1").offers.choices) as compilation:
            assert not compilation.wait(candidates(problem(4), "t_1").offers.choices)
        assert compiled == ["t_1"]
        assert not begun.is_set()
        siblings.learn([])
        assert begun.wait(10)
        both = candidates(problem(4, 32), "x_1", "x_2", "x_3").offers.choices
        with siblings.compiling(both) as compilation:
            compilation.wait(both)
    assert sorted(compiled) == ["t_1", "x_1", "x_2", "x_3"], "each kernel once"


def test_threads_see_the_settings_of_the_caller(tmp_path: Path):
    """The cache of kernels is that of the settings. Another one would call a kernel compiled or not by mistake."""
    seen: list[str | None] = []

    class Work(SimpleNamespace):
        device = GPU

        def ready(self, m: int) -> list[Choice]:
            seen.append(current().cache_dir)
            return []

    with settings.patch(cache_dir=str(tmp_path)), Siblings(GPU, current()) as siblings:
        assert list(ready_ahead(Work(), [1, 2])) == [[], []]
        siblings.then(lambda: seen.append(current().cache_dir) or ())
        siblings.learn([])
        with siblings.compiling(()):
            assert seen == [str(tmp_path)] * 3


def test_a_cpu_compiles_nothing_ahead(compiled: list[str]):
    with Siblings(detect("cpu"), current()) as siblings:
        siblings.then(lambda: pytest.fail("compilers would disturb the measurements"))
        siblings.learn([])
        with siblings.compiling(candidates(problem(4), "t_1").offers.choices):
            pass
    assert not compiled


def test_an_error_of_the_thread_is_raised_where_the_kernels_are_needed(compiled: list[str]):
    with Siblings(GPU, current()) as siblings:
        siblings.then(lambda: [int("no number")])
        siblings.learn([])
        with pytest.raises(ValueError, match="no number"):
            siblings.compiling(())
