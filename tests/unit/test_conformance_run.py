"""A run after failures, crashes and hangs: what it still examines, draws and runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from gemmtune.conformance.bench.outcome import CaseStatus, Outcome
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.options import RunOptions
from gemmtune.conformance.properties.table import property_named
from gemmtune.conformance.report.summary import summarise
from gemmtune.conformance.runs import run as runs
from gemmtune.conformance.runs.isolation import Ground
from gemmtune.conformance.suite.drawing import explore
from gemmtune.declaration.subject import Gone, is_fatal
from gemmtune.declaration.traits import Traits
from gemmtune.errors import ErrorFromChoice, GemmtuneError


class FixedRunner:
    """Runner with the same status for every case that it takes. It records which cases it should examine."""

    def __init__(self, status: CaseStatus, takes: Callable[[Case], bool] = lambda _: True) -> None:
        self.status = status
        self.takes = takes
        self.examined: list[bool] = []

    def run(self, case: Case, *, examine: bool = True) -> Outcome:
        self.examined.append(examine)
        return Outcome(case=case, status=self.status if self.takes(case) else CaseStatus.REFUSED)

    def close(self) -> None:
        pass


class Described:
    """Runner that only describes a GEMM for the CPU alone, on the device that was asked for."""

    made: ClassVar[list[Described]] = []

    def __init__(self, _options: RunOptions, device: str) -> None:
        self.device, self.closed = device, False
        self.made.append(self)

    def describe(self) -> Ground:
        return Ground(name="told", traits=Traits(devices=("cpu",)), device=self.device, device_name="told", sm=90)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Described]:
    monkeypatch.setattr(Described, "made", [])
    monkeypatch.setattr(runs, "runner_for", Described)
    monkeypatch.setattr(runs.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runs, "detect", lambda _: SimpleNamespace(torch_device="cuda:0"))
    return Described.made


def run_of(runner: FixedRunner, **options: object) -> runs.Run:
    ground = Ground(name="told", traits=Traits(), device="cpu", device_name="CPU", sm=0)
    return runs.Run(RunOptions(backend="nowhere:told", **options), ground, runner)  # type: ignore[arg-type]


def case(name: str = "bound", m: int = 1, dtype: str = "float32") -> Case:
    return Case(property_name=name, dtype=dtype, m=m, n=1, k=1)


def test_a_gemm_for_the_cpu_alone_is_tested_there_beside_a_gpu(described: list[Described]) -> None:
    run = runs.Run.open(RunOptions(backend="nowhere:told"))
    assert (run.ground.device, run.scope.device_type) == ("cpu", "cpu")
    assert [(one.device, one.closed) for one in described] == [("cuda:0", True), ("cpu", False)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "cuda"}, "told: got device cuda, expected one that it declares: cpu; choose it with --device"),
        ({"device": "meta"}, "device: got 'meta', expected cpu, cuda or cuda:N"),
        ({"device": "cpu", "sanitize": True}, "sanitize: got device cpu, expected a CUDA device"),
        ({"skips_file": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"op": ("bmm",)}, "op: got bmm, expected what the GEMM declares: mm"),
    ],
    ids=str,
)
def test_a_run_that_cannot_begin_leaves_no_process(described: list[Described], options: dict[str, Any], expected: str) -> None:
    with pytest.raises(GemmtuneError, match=re.escape(expected)):
        runs.Run.open(RunOptions(backend="nowhere:told", **options))
    assert all(one.closed for one in described)


def test_three_failures_of_a_property_and_of_a_dtype_are_examined() -> None:
    runner = FixedRunner(CaseStatus.FAILED)
    run = run_of(runner)
    asked = [case(m=m) for m in range(1, 6)] + [case(m=m, dtype="float16") for m in range(1, 6)] + [case("edges"), case("nan")]
    records = [run.judge(one) for one in asked]
    assert all(record.failed for record in records)
    assert runner.examined == [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2 + [True, True]
    assert run.established("bound")
    assert not run.established("width")


def test_passing_and_repeated_cases_are_always_examined() -> None:
    runner = FixedRunner(CaseStatus.PASSED)
    run = run_of(runner)
    assert all(run.judge(case(m=m)).executed for m in range(1, 9))
    assert all(runner.examined)
    failing = FixedRunner(CaseStatus.FAILED)
    repeated = run_of(failing, repro=tuple(case(m=m).id for m in range(1, 9)))
    for one in repeated.cases():
        repeated.judge(one)
    assert all(failing.examined)


@pytest.mark.parametrize("limits", [{"max_cases": 60}, {"max_cases": 60, "max_seconds": 3600.0}], ids=str)
def test_others_of_its_property_take_the_place_of_a_refused_case(limits: dict[str, Any]) -> None:
    run = run_of(FixedRunner(CaseStatus.PASSED, lambda case: case.dtype == "float16"), **limits)
    found = {case: run.judge_or_replace(case) for case in run.cases()}
    records = [record for own in found.values() for record in own]
    assert len({record.case for record in records}) == len(records), "each case once"
    assert sum(record.executed for record in records) > 50 > sum(own[0].executed for own in found.values())
    assert all({x.case.property_name for x in own} == {case.property_name} for case, own in found.items())
    assert all(not any(x.executed for x in own[:-1]) for own in found.values()), "one result for each"
    assert summarise(run, records, narrowed=False, seconds=1).notes[0].startswith(f"sampled {len(records)} of ")
    drawn = explore(run_of(run._runner, max_examples=7), property_named("bound"))  # type: ignore[arg-type]
    assert sum(record.executed for record in drawn) == 7 < len(drawn)


@pytest.mark.parametrize(
    ("status", "takes", "late_s", "judged"),
    [(CaseStatus.PASSED, False, 0, 6), (CaseStatus.PASSED, False, 7200, 1), (CaseStatus.FAILED, True, 0, 1)],
    ids=["refuses all", "too late", "fails"],
)
def test_no_case_takes_the_place_of_another(
    monkeypatch: pytest.MonkeyPatch, status: CaseStatus, takes: bool, late_s: int, judged: int
) -> None:
    """A GEMM that refuses nearly everything is not asked for each case. Cases that ran, and the time limit, end it too."""

    def taken(_: Case) -> bool:
        now_s = time.monotonic() + late_s
        monkeypatch.setattr(runs.time, "monotonic", lambda: now_s)
        return takes

    monkeypatch.setattr(runs, "PATIENCE", 5)
    run = run_of(FixedRunner(status, taken), max_cases=1, max_seconds=3600.0)
    assert len(run.judge_or_replace(run.cases()[0])) == judged
    assert len(run.judge_or_replace(run.cases()[0])) == 1


@pytest.mark.parametrize(("most", "same"), [("MOST_COSTS", True), ("MOST_COSTS_OF_ALL", False)])
def test_remaining_cases_are_not_run_after_many_crashes(monkeypatch: pytest.MonkeyPatch, most: str, same: bool) -> None:
    monkeypatch.setattr(runs, most, 2)
    runner = FixedRunner(CaseStatus.CRASHED)
    run = run_of(runner)
    first, second, third = (run.judge(case("bound" if same else name, m)) for m, name in enumerate(("bound", "edges", "nan"), 1))
    assert first.failed
    assert second.failed
    assert (third.outcome, third.reason) == (None, "not run: too many cases have crashed or hung before")
    assert run.judge(case("width")).failed == same


def test_an_error_is_fatal_if_the_device_is_lost():
    lost, full = "CUDA error: unspecified launch failure", "CUDA error: out of memory"
    cases = {
        RuntimeError(lost): True, RuntimeError(full): False, Gone("it died"): True, ErrorFromChoice("triton:x", "mm", lost): False,
        torch.AcceleratorError("CUDA error: another"): True, torch.AcceleratorError(full): False,
    }  # fmt: skip
    assert {error: is_fatal(error) for error in cases} == cases
