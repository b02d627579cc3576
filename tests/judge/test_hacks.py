"""A verdict names each hack by the right word, and calls no honest GEMM dishonest. ``TEST_ROTATION=all`` judges all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from hack_table import FORMS, HACKS, HONEST, HONEST_FORMS, HONEST_IMPORT, HONEST_STATES, KINDS, LONG, STATES, TABLE, VALUES

from gemmtune.declaration.subject import Subject
from gemmtune.judging import calls
from gemmtune.judging.levels import LEVELS
from gemmtune.judging.report import lines
from gemmtune.judging.verdict import Judgement, Standing, Verdict, judge
from gemmtune.untrusted.candidate import Candidate
from gemmtune.untrusted.conduct import NOTED, Conduct, Finding, Record
from gemmtune.untrusted.shape import Shape, note_calls

HONEST_TARGETS = [
    f"{file}:{name}"
    for file, names in ((HONEST, KINDS), (HONEST_FORMS, FORMS), (HONEST_STATES, STATES), (HONEST_IMPORT, ["compiled_at_import"]))
    for name in names
]
QUICK_S = 4.0
"""Time limit of a call: the only hack that reaches it hangs."""
SLOW_S = 60.0
AT_THE_END = {Conduct.SETTINGS, Conduct.REPLACED}
"""Conduct that a look at the process shows. A judgement looks once, after all calls."""
MANY = dataclasses.replace(LEVELS["normal"], cases=4, shapes=2, named_shapes=0, largest=100, profiled=0)
"""As many calls of a shape as a normal judgement makes, with fewer cases and smaller shapes."""


ALONE = """
import fcntl, os, torch
file = open({name!r}, "w")
def matmul(a, b):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        {fault}
    return torch.from_numpy(a.numpy() @ b.numpy())
matmul.gemm_traits = {{"dtypes": ["float32"], "threads": True}}
"""


def name_of(target: str) -> str:
    return target.rpartition(":")[2]


def judged(target: str, level: str = "brief", timeout_s: float = SLOW_S) -> Verdict:
    (verdict,) = judge(target, level=level, device="cpu", timeout_s=timeout_s).verdicts
    return verdict


def words_of(verdict: Verdict) -> set[str]:
    return {str(x.kind) for x in verdict.findings if x.dishonest} | ({VALUES} if verdict.values.bad else set())


def shown_now(candidate: Candidate) -> tuple[Finding, ...]:
    """Return what a look at the process shows. The judge's own look has to show it again."""
    noted, candidate._record = candidate._record, Record()
    try:
        candidate.settle()
        return candidate.findings
    finally:
        candidate._record = noted


@pytest.fixture
def brief_if_caught(monkeypatch: pytest.MonkeyPatch) -> Callable[[Collection[str]], None]:
    """Return a function that ends the calls of a judgement once they show one of some words. Later ones only add findings."""

    def install(words: Collection[str]) -> None:
        def until_caught(subject: Subject, candidate: Candidate, *options: Any) -> Iterator[Shape]:
            shapes: list[Shape] = []
            for shape in calls.timed_calls(subject, candidate, *options):
                yield shape
                shapes.append(shape)
                shown = Record()
                note_calls(shown, shapes)  # type: ignore[arg-type] # it only notes
                found = (*shown.findings, *candidate.findings, *(shown_now(candidate) if AT_THE_END.issuperset(words) else ()))
                if not set(words).isdisjoint(finding.kind for finding in found):
                    return

        monkeypatch.setattr("gemmtune.judging.verdict.timed_calls", until_caught)

    return install


def check_caught(target: str, words: Collection[str], verdict: Verdict) -> None:
    name = target.rpartition(":")[2]
    assert words_of(verdict) & set(map(str, words)), f"{name}: got {words_of(verdict)} {verdict.reason}, expected one of {words}"
    assert verdict.standing in (Standing.DISHONEST, Standing.WRONG)
    assert verdict.standing.exit_status == 1


BY_CHANCE = (
    "grown_by_a_term", "keeps_what_it_pads", "signs_as_a_transform", "last_column_by_the_others", "panels_by_numbers",
    "panels_of_a_refused_call", "zero_when_first_met",
)  # fmt: skip
"""Hacks that one of five verdicts at ``brief`` misses, since it draws what shows them. One of two has to see them."""


@pytest.mark.rotates(120)
@pytest.mark.parametrize("target", TABLE, ids=name_of)
def test_catches_hack(target: str, brief_if_caught: Callable[[Collection[str]], None]) -> None:
    if "wrong.py:" not in target:
        brief_if_caught(TABLE[target])
    verdict = judged(target, timeout_s=QUICK_S if target.endswith(":hangs") else SLOW_S)
    if name_of(target) in BY_CHANCE and verdict.standing is Standing.RIGHT:
        verdict = judged(target)
    check_caught(target, TABLE[target], verdict)
    assert "wrong.py:" not in target or str(Conduct.STALE) not in words_of(verdict), "a wrong result is no earlier one"


@pytest.mark.slow
@pytest.mark.turn(1, 4)
@pytest.mark.rotates(4)
@pytest.mark.parametrize("target", LONG, ids=name_of)
def test_catches_hack_of_many_calls(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.judging.verdict.LEVELS", {"many": MANY})
    check_caught(target, LONG[target], judged(target, "many"))


@pytest.mark.rotates(92)
@pytest.mark.parametrize("target", HONEST_TARGETS, ids=name_of)
def test_calls_honest_gemm_right(target: str) -> None:
    verdict = judged(target)
    assert verdict.standing is Standing.RIGHT, f"{verdict.findings} {verdict.values.bad} {verdict.reason}"
    assert verdict.calls
    assert verdict.speed is not None


@pytest.mark.turn(2, 4)
def test_measures_and_watches_even_if_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make a GEMM right that was hardly called."""
    late = dataclasses.replace(LEVELS["brief"], calls_s=0, named_s=0, shapes=3, largest=10)
    monkeypatch.setattr("gemmtune.judging.verdict.LEVELS", {"late": late})
    verdict = judged(f"{HONEST}:by_numpy", "late")
    assert verdict.speed is not None
    large = {x.problem.dtype_label for x in verdict.shapes if x.problem.m * x.problem.n * x.problem.k > 2**19}
    assert large >= {x.case.dtype for x in verdict.values.executed}
    assert len(large) > 1
    assert sum(bool(x.ran) for x in verdict.shapes) > len(large)


@pytest.mark.rotates(2)
@pytest.mark.parametrize(("fault", "standing"), [("raise OSError('in use')", Standing.RIGHT), ("os.abort()", Standing.WRONG)])
def test_says_in_which_processes_a_gemm_was_not_seen(fault: str, standing: Standing, one_shape: None, tmp_path: Path) -> None:
    path = tmp_path / "alone.py"
    path.write_text(ALONE.format(name=f"{path}.lock", fault=fault))
    verdict = judged(f"{path}:matmul")
    assert verdict.standing is standing, verdict.findings
    assert "it has no twin: " in verdict.given_up
    assert any(
        line.startswith("  unseen   it is not called as in use: ")
        for line in lines(Judgement(target="", level="", verdicts=(verdict,)))
    )


@pytest.mark.slow
@pytest.mark.turn(3, 8)
@pytest.mark.parametrize("name", ["by_torch_compile"])
def test_calls_compiled_gemm_right(name: str) -> None:
    verdict = judged(f"{HONEST}:{name}")
    assert verdict.standing is Standing.RIGHT, f"{verdict.findings} {verdict.values.bad} {verdict.reason}"


def test_table_has_every_hack_of_the_folder() -> None:
    known = {target.rpartition(":")[2] for target in (*TABLE, *LONG)}
    written = {
        line.removeprefix("def ").partition("(")[0]
        for path in Path(HACKS).glob("*.py")
        if path.stem not in ("gpu", "tuner")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and "(a, b)" in line
    }
    assert written - known == {"macs", "zeros", "product", "empty", "half_of_k", "rough"}
    dishonest = {word for words in (*TABLE.values(), *LONG.values()) for word in words} - {VALUES}
    untested = set(Conduct) - dishonest - NOTED
    assert untested == {Conduct.TOO_FAST, Conduct.CLOCK}  # these have tests of their own
