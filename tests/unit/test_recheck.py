"""Results after the timing: what keeps results, or is right a number of times, is no pick on any way that times a choice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_choices
import pytest
import torch
from dishonest import DISHONEST, honest
from fake_choices import PROBLEM, fake
from fixed_backend import FixedBackend, install

import gemmtune
from gemmtune import settings
from gemmtune.choice import Choice, Status
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans
from gemmtune.errors import ErrorFromChoice
from gemmtune.perf_gate.sampling import Match, Sampling, sample_match
from gemmtune.problem import Problem
from gemmtune.selector import recheck
from gemmtune.selector.offers import offers_for
from gemmtune.selector.recheck import AFTER, CALLS
from gemmtune.selector.session import Session
from gemmtune.settings import Settings
from gemmtune.timing.overwritten import Overwritten
from gemmtune.timing.timer import Timer

DEVICE = detect("cpu")
CPU = DEVICE.torch_device


@pytest.fixture
def backend(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FixedBackend]:
    forget_plans()
    monkeypatch.setitem(fake_choices.RUNS, "honest", honest)
    for name, made in DISHONEST.items():
        monkeypatch.setitem(fake_choices.RUNS, name, made())
    backend = FixedBackend(["honest", *DISHONEST])
    install(monkeypatch, backend)
    with settings.patch(search="quick"):
        yield backend
    forget_plans()


def test_dishonest_gemms_are_refused_and_the_next_best_is_the_pick(backend: FixedBackend) -> None:
    [result] = gemmtune.tune(PROBLEM, progress=False)
    statuses = {o.name.removeprefix("fake:"): (o.status, o.time_us is None, AFTER in o.reason) for o in result.outcomes}
    assert statuses.pop("honest") == (Status.OK, False, False)
    assert statuses == dict.fromkeys(DISHONEST, (Status.WRONG_RESULT, True, True))
    assert result.pick == "fake:honest"
    [again] = gemmtune.tune(PROBLEM, progress=False)
    assert (again.source, again.pick) == ("store", "fake:honest"), "the refusal is stored"


def test_a_dishonest_gemm_that_is_alone_is_no_pick(backend: FixedBackend) -> None:
    backend.kinds = ["kept_by_version"]
    [result] = gemmtune.tune(PROBLEM, progress=False)
    assert (result.pick, [o.status for o in result.outcomes]) == (None, [Status.WRONG_RESULT])
    a, b = torch.randn(64, 32), torch.randn(48, 32).t()
    with pytest.warns(UserWarning, match="torch runs instead"):
        assert torch.equal(gemmtune.mm(a, b), a @ b)


def test_a_first_call_refuses_them_too(backend: FixedBackend) -> None:
    a, b = torch.randn(64, 32), torch.randn(48, 32).t()
    for _ in range(2):
        assert torch.allclose(gemmtune.mm(a, b), a @ b, atol=1e-5)
        a.add_(1)
    assert gemmtune.explain("mm", a, b).pick == "fake:honest"


def test_a_multi_refuses_them_too(own_store: Path) -> None:
    def slow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        time.sleep(0.0005)
        return a @ b

    kept: dict[tuple[int, int], torch.Tensor] = {}

    def kept_by_address(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return kept.setdefault((a.data_ptr(), b.data_ptr()), a @ b if (a.data_ptr(), b.data_ptr()) not in kept else a)

    with settings.patch(search="quick"):
        made = gemmtune.multi(PROBLEM, choices=[slow, kept_by_address])
    assert made.table is not None
    assert ["slow" in x.name for x in made.table.segments] == [True]


def test_repeats_give_the_new_result_and_the_operands_come_back(own_store: Path) -> None:
    """Every kind of product is checked in the memory of its timing, which then holds what it held."""
    f32, kind = torch.float32, {"device_type": "cpu"}
    problems = [
        Problem.mm(5, 48, 32, dtype=f32, layout="nn", **kind),
        Problem.addmm(7, 33, 20, dtype=torch.bfloat16, **kind),
        Problem.bmm(3, 9, 17, 8, dtype=f32, **kind),
        Problem.int_mm(32, 16, 64, **kind),
        Problem.mixed_mm(6, 64, 64, dtype=torch.bfloat16, **kind),
        Problem.mm(16, 32, 32, dtype=f32, prepacked=True, **kind),
        Problem.grouped_mm(24, 16, 32, groups=3, dtype=torch.bfloat16, **kind),
        Problem.bsr_mm(16, 64, 64, dtype=f32, block=16, density=0.5, **kind),
    ]
    for problem in problems:
        with settings.patch(backends=("aten",)) as chosen, Session(problem, DEVICE, chosen) as session:
            choices = offers_for(problem, DEVICE, chosen).choices[:3]
            right = [c for c in choices if session.examine(c, None).status is Status.OK]
            session.rank(right)
            timer = session._time(problem)
            before = [x.clone() for x in timer._sets[0].tensors if x.layout == torch.strided]
            assert right, problem
            assert session.recheck(right) == {}, problem
            after = [x for x in timer._sets[0].tensors if x.layout == torch.strided]
            assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True)), problem
            live, expectation = timer._sets[0], session._expected(problem)
            versions = [x._version for x in live.tensors]
            with timer.overwritten(expectation.operands) as other:
                assert all(other.holds(c) for c in right), problem
                other.write("a", whole=False)
                assert not torch.equal(live.a, expectation.operands.a), problem
                assert live.a.flatten()[[0, -1]].tolist() == expectation.operands.a.flatten()[[0, -1]].tolist(), problem
                other.write("a")
                assert torch.equal(live.a, expectation.operands.a), problem
            assert [x._version for x in live.tensors] == versions, "torch must not see the writes"


def test_the_gate_refuses_a_candidate_that_keeps_results(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Sampling(blocks=2, least_blocks=1, budget_s=0.1, warm_up_s=0.0)
    for name in ("honest", "kept_by_version", "right_for_60"):
        monkeypatch.setitem(fake_choices.RUNS, name, honest if name == "honest" else DISHONEST[name]())
        match = Match(problem=PROBLEM, candidate=fake(name, run=name), reference=fake("multiply"))
        if name == "honest":
            assert sample_match(match, DEVICE, Settings(), few, 0).blocks
        else:
            with pytest.raises(ErrorFromChoice, match=f"is wrong {AFTER}"):
                sample_match(match, DEVICE, Settings(), few, 0)


def test_rows_of_a_range_are_checked_once_for_each_choice(settings_in_process: Settings) -> None:
    whole = Problem.mm(64, 48, 32, dtype=torch.float32, device_type="cpu")
    parts = [Problem.mm(m, 48, 32, dtype=torch.float32, device_type="cpu") for m in (64, 5)]
    monkey = DISHONEST["kept_by_address"]()
    fake_choices.RUNS["kept_here"] = monkey
    try:
        with Session(whole, DEVICE, settings_in_process) as session:
            for part in parts:
                choices: list[Choice] = [fake(run, part, run=run) for run in ("multiply", "kept_here")]
                session.rank(choices, 0.01)
                assert list(session.recheck(choices)) == ["fake:kept_here"], part
    finally:
        del fake_choices.RUNS["kept_here"]


@pytest.fixture
def settings_in_process(tmp_path: Path) -> Settings:
    return Settings(cache_dir=str(tmp_path), tune_in_subprocess=False, search="quick")


def test_a_packed_form_of_another_size_is_checked_in_new_memory() -> None:
    timer = Timer(PROBLEM, DEVICE, "graph")
    other = Timer(Problem.mm(64, 49, 32, dtype=torch.float32, device_type="cpu"), DEVICE, "graph")
    with timer.overwritten(other._sets[0]) as live:
        assert not live.holds(fake("multiply"))


def test_a_choice_that_does_not_fit_the_memory_of_its_timing_is_judged_in_new_memory(
    own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Overwritten, "holds", lambda *_: False)
    monkeypatch.setitem(fake_choices.RUNS, "right_for_60", DISHONEST["right_for_60"]())
    choices: list[Choice] = [fake(run, run=run) for run in ("multiply", "right_for_60")]
    with settings.patch(search="quick") as chosen, Session(PROBLEM, DEVICE, chosen) as session:
        session.rank(choices, 0.01)
        assert list(session.recheck(choices)) == ["fake:right_for_60"]


@pytest.mark.turn(5, 8)
def test_honest_choices_pass_on_operands_with_large_gaps(own_store: Path) -> None:
    h, w = torch.randn(4, 4096, 512), torch.randn(512, 4096, 24)
    with settings.patch(backends=("aten", "cpp"), search="quick", tune="force", tune_in_subprocess=False):
        [found] = gemmtune.tune("mm", h[:, -1], w[:, 7], progress=False)
    assert {outcome.status for outcome in found.outcomes} == {Status.OK}
    assert len(found.outcomes) > 1


@pytest.mark.parametrize(("call_s", "kernel", "calls"), [(0.0, True, CALLS), (0.125, True, 1), (0.125, False, 5)])
def test_calls_before_the_operands_change_end_with_the_time(
    call_s: float, kernel: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python functions, which may count their calls, have more time than kernels."""
    ticks = count()
    monkeypatch.setattr(recheck, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * call_s))
    made: list[int] = []
    choice: Any = SimpleNamespace(name="x", own_results=kernel)
    assert recheck._begun(choice, lambda _: [lambda: made.append(1)], {}).status is Status.OK
    assert len(made) == calls
