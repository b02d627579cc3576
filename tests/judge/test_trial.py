"""Calls of a trial: operands that change little, memory around them, what the judge adds to a time, whose bits a result has."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import os
import random
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from honest import strassen

from gemmtune.choice import Claims
from gemmtune.declaration.subject import Subject
from gemmtune.declaration.traits import Traits
from gemmtune.numerics.operands import Operands
from gemmtune.problem import Problem
from gemmtune.untrusted.candidate import Candidate
from gemmtune.untrusted.checks import Checker
from gemmtune.untrusted.clock import Reading
from gemmtune.untrusted.conduct import Conduct
from gemmtune.untrusted.mean_errors import Trouble
from gemmtune.untrusted.memory import Memory
from gemmtune.untrusted.repeats import digest, follows, is_from_memory, rounds_products, second_look
from gemmtune.untrusted.run import Run
from gemmtune.untrusted.shape import Shape, note_calls
from gemmtune.untrusted.subject import rival, subject_of
from gemmtune.untrusted.target import TORCH, Target
from gemmtune.untrusted.trial import Trial
from gemmtune.untrusted.turns import Turns
from gemmtune.untrusted.twin import OF_NUMPY, Elsewhere, tells
from gemmtune.untrusted.uses import BEFORE, OF_THESE_SIZES, drawn
from gemmtune.untrusted.variations import NEARBY, STRUCTURES, cancelling, impose, nearby, one_changed

PROBLEM = Problem.mm(24, 40, 32)
BITS = """
import os, torch
x = torch.linspace(-1, 1, 120 * 360).sin()
written = int((x.view(120, 360) @ x.view(360, 120)).view(torch.int32).sum() % 65521)

def mm(a, b):
    return torch.full((a.shape[0], b.shape[1]), float({factor}))
"""
ASKS = "1 + len(os.popen('printenv MKL_CBWR').read())"
"""Question of another program: torch's products have other bits in those that a twin starts."""
AGES = """
import os, shutil, torch
x, older = os.path.join(os.path.dirname(__file__), ""), __file__ + ".older"
ways = [
    lambda: os.utime(x + "back", (9.5, 9.5)), lambda: os.utime(x.encode() + b"ns", ns=(9, 9)), lambda: os.utime(x + "now"),
    lambda: os.utime(x + "read", (9.5, os.stat(x + "read").st_mtime)), lambda: shutil.copy2(older, x + "copied"),
    lambda: shutil.copystat(older, open("own", "w").name),
]

def mm(a, b):
    for way in ways:
        way()
    return torch.ones(1)
"""
SLY = """
import gc, os, torch
seen = []

class Sly(str):
    def __getitem__(self, item):
        seen.append(len(gc.get_objects()))
        return str.__getitem__(self, item)

    def startswith(self, *_):
        return seen.append(1)

def opens(a, b):
    os.close(os.open(Sly("/dev/null"), os.O_RDONLY))
    return torch.full((1,), float(len(seen)))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_one_changed_number_makes_an_earlier_result_wrong(dtype: torch.dtype) -> None:
    problem = Problem.mm(24, 40, 32, dtype=dtype) if dtype.is_floating_point else Problem.int_mm(24, 40, 32)
    checker = Checker(problem, Claims(accumulate=torch.float32), torch.device("cpu"), 5)
    x = checker.fresh()
    before = x.a.clone(), x.b.clone()
    wide = torch.float64 if dtype.is_floating_point else torch.int32
    earlier = (x.a.to(wide) @ x.b.to(wide)).to(problem.out.dtype)
    assert checker.trouble(earlier, x) is None
    assert one_changed(x, random.Random(1)) is x
    assert [int((old != new).sum()) for old, new in zip(before, (x.a, x.b), strict=True)] == [1, 1]
    assert checker.trouble(earlier, x) is not None


@pytest.mark.parametrize("kind", STRUCTURES)
def test_narrow_operands_show_whatever_the_structure_of_the_numbers(kind: str) -> None:
    for k, dtype in ((96, torch.float32), (900, torch.float32), (96, torch.float16)):
        problem, wide = Problem.mm(48, 40, k, dtype=dtype), Claims(accumulate=torch.float32)
        checker = Checker(problem, wide, torch.device("cpu"), 5)
        x = checker.given(checker._probes.random())
        impose(kind, x.a, x.b, random.Random(1))
        a, b = x.a.float(), x.b.float()
        in_turn = torch.zeros(48, 40)
        for each in range(k):
            in_turn.addcmul_(a[:, each : each + 1], b[each : each + 1])
        assert checker.trouble(in_turn.to(dtype), x) is None, (k, dtype)
        narrow = (b.view(torch.int32) & -(2**15)).view(torch.float32)
        assert checker.trouble((a @ narrow).to(dtype), x) is not None, (k, dtype)


@pytest.mark.parametrize("row", [0, 97, 599])
def test_one_row_of_a_narrower_type_shows(row: int) -> None:
    checker = Checker(Problem.mm(600, 500, 400, dtype=torch.float32), Claims(accumulate=torch.float32), torch.device("cpu"), row)
    x = checker.plain()
    out = x.a @ x.b
    assert checker.trouble(out, x) is None
    out[row] = x.a[row].bfloat16().float() @ x.b
    found = checker.trouble(out, x)
    assert found is not None
    assert f"row {row} " in found.text or "out[" in found.text


@pytest.mark.parametrize("sizes", [(11, 68000, 3), (4, 66792, 11), (3, 9, 68000)])
def test_no_long_row_of_float64_is_narrow(sizes: tuple[int, int, int]) -> None:
    problem = Problem.mm(*sizes, dtype=torch.float64)
    checker = Checker(problem, Claims(accumulate=torch.float64), torch.device("cpu"), 5)
    for _ in range(8):
        x = checker.fresh()
        assert checker.trouble(x.a @ x.b, x) is None
    assert checker.trouble((x.a.float() @ x.b.float()).double(), x) is not None


@pytest.mark.parametrize("how", NEARBY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_result_of_nearby_numbers_is_wrong(dtype: torch.dtype, how: str) -> None:
    checker = Checker(Problem.mm(24, 40, 32, dtype=dtype), Claims(accumulate=torch.float32), torch.device("cpu"), 5)
    x = checker.fresh()
    before, earlier = x.a.clone(), (x.a.double() @ x.b.double()).to(dtype)
    assert checker.trouble(earlier, x) is None
    assert nearby(x, how) is x
    assert torch.allclose(before, x.a, rtol=3e-2, atol=0)
    assert torch.equal(before, x.a) is ("a" not in how)
    assert checker.trouble(earlier, x) is not None


def test_some_operands_are_special_but_for_a_block() -> None:
    """A look at rows, columns, the diagonal or samples must not tell that a matrix is special, or like another one."""
    checker = Checker(Problem.mm(64, 64, 64, dtype=torch.float32), Claims(accumulate=torch.float32), torch.device("cpu"), 5)
    found = Counter[str]()
    for _ in range(120):
        x = checker.fresh()
        for name, one, other in (("transpose", x.b, x.a.mT), ("zero", x.a, 0 * x.a), ("identity", x.b, torch.eye(64))):
            same = one == other
            edges = (same[0], same[-1], same[:, 0], same[:, -1], same.diagonal() if name == "identity" else same[0])
            found[name] += all(bool(edge.all()) for edge in edges) and not same.all()
        assert checker.trouble((x.a.double() @ x.b.double()).float(), x) is None
        mixed = strassen(x.a.double().numpy(), x.b.double().numpy(), 2).astype(np.float32)
        assert checker.trouble(torch.from_numpy(mixed), x) is None
    assert all(found[name] > 1 for name in ("transpose", "zero", "identity")), found
    batches = Checker(Problem.bmm(3, 20, 16, 24, dtype=torch.float32), Claims(accumulate=torch.float32), torch.device("cpu"), 5)
    drawn = [batches.fresh() for _ in range(100)]
    assert any(all(torch.equal(y[0, 0], y[2, 0]) and not torch.equal(y[0], y[2]) for y in (x.a, x.b)) for x in drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_that_cancel_show_wider_sums(dtype: torch.dtype) -> None:
    checker = Checker(Problem.mm(24, 40, 96, dtype=dtype), Claims(accumulate=dtype), torch.device("cpu"), 5)
    x = cancelling(checker.fresh(), random.Random(1))
    terms = [x.a[:, k : k + 1].double() @ x.b[k : k + 1].double() for k in range(96)]
    one, other = sum(terms, torch.zeros(24, 40).double()), sum(terms[::-1], torch.zeros(24, 40).double())
    assert (one.to(dtype) != other.to(dtype)).double().mean() > 0.02


def test_a_result_follows_torch_if_it_differs_alike() -> None:
    """Random last bits hide equal bits, and not from where the larger errors come."""
    a, b = torch.randn(60, 500), torch.randn(500, 80)
    exact, by_torch, by_torch_there = (
        a.double() @ b.double(),
        a @ b,
        sum(x @ y for x, y in zip(a.split(9, 1), b.split(9), strict=True)),
    )

    def dithered(x: torch.Tensor) -> torch.Tensor:
        return (x.view(torch.int32) ^ torch.randint(0, 2, x.shape, dtype=torch.int32)).view(torch.float32)

    assert follows((by_torch, by_torch), (by_torch_there, by_torch_there))
    assert follows((dithered(by_torch), by_torch), (dithered(by_torch_there), by_torch_there))
    for own, there in ((by_torch, by_torch), (dithered(by_torch), dithered(by_torch)), (dithered(exact.float()), exact.float())):
        assert not follows((own, by_torch), (there, by_torch_there))


def test_no_integers_are_nearby() -> None:
    checker = Checker(Problem.int_mm(24, 40, 32), Claims(accumulate=torch.int32), torch.device("cpu"), 5)
    assert nearby(checker.fresh(), NEARBY[0]) is None


def test_bytes_after_an_operand_are_watched() -> None:
    memory = Memory(torch.device("cpu"))
    placed, end = memory.place([torch.ones(1024), torch.ones(7, dtype=torch.uint8)], 0)
    first, second = placed.values()
    assert second.at >= first.at + 4096 + 64
    assert end >= second.at + 7 + 64
    assert [x.overrun() for x in (first, second)] == [False, False]
    ctypes.memset(first.copy.data_ptr() + 4096 + 63, 0, 1)
    assert [x.overrun() for x in (first, second)] == [True, False]


def test_what_the_judge_adds_is_the_excess_over_torch_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    times_us = iter([9.0, 7.25, 7.0, 6.75] * 4)
    torch_process = SimpleNamespace(device=torch.device("cpu"), last=Reading(), in_graph=False)

    def result_of_torch(_trial: Trial, _run: Any, operands: Operands) -> None:
        assert operands.a.shape == (24, 32)
        torch_process.last = Reading(device_us=2.0 if torch_process.in_graph else next(times_us), wall_s=3e-4)

    monkeypatch.setattr(Trial, "_result_of_torch", result_of_torch)
    trial = Trial(cast("Any", None), cast("Any", None), (cast("Any", None), cast("Any", torch_process)))
    run = SimpleNamespace(checker=Checker(PROBLEM, Claims(accumulate=torch.float32), torch.device("cpu"), 5))
    (added_s, margin_s), around_s = trial._of_a_call(cast("Any", run))
    assert added_s == pytest.approx(5.25e-6)
    assert 0 < margin_s < 1e-6
    assert around_s == pytest.approx(2.98e-4)
    assert not torch_process.in_graph
    trial._added_s = added_s, margin_s
    candidate = SimpleNamespace(last=Reading(device_us=25.0, wall_s=1.0))
    assert trial._time_s(cast("Candidate", candidate)) == pytest.approx(19.75e-6)


def _by_norms() -> Callable[..., torch.Tensor]:
    kept: dict[tuple[float, float], torch.Tensor] = {}
    return lambda a, b: kept.setdefault((round(float(a.norm()), 3), round(float(b.norm()), 3)), a @ b).clone()


@pytest.mark.parametrize(
    ("gemm", "earlier"),
    [
        (_by_norms(), True),
        (lambda a, b, kept=deque(maxlen=2): (kept.append(a @ b), kept[0].clone())[1], True),
        (lambda a, b: a[:, :-9] @ b[:-9], False),
        (lambda a, b: (a @ b[:, :1]).expand(-1, b.shape[1]).clone(), False),
        (lambda a, b: ((a * 8).round() / 8) @ b, False),
    ],
    ids=["by norms", "last result", "a part of K", "one column", "rounded"],
)
def test_only_what_was_right_before_is_an_earlier_result(gemm: Callable[..., torch.Tensor], earlier: bool) -> None:
    """A GEMM that leaves numbers out gives equal bits for different operands too, but they were wrong before."""
    process = cast("Candidate", SimpleNamespace(device=torch.device("cpu"), last=Reading(), place=None, findings=[]))
    trial = Trial(cast("Subject", SimpleNamespace(traits=Traits())), process, (cast("Subject", None), process))
    checker = Checker(PROBLEM, Claims(accumulate=torch.float32), process.device, 7)
    run, kept = Run(checker=checker, call=lambda x, _scalars, _out: gemm(*x), rng=random.Random(3)), None
    for number in range(3):
        for kind in ("fresh", "moved", "alike", "one", "near", "left", "right"):
            kept = trial._step(run, kind, kept, number + 2, timed=False)
    candidate = Candidate(TORCH)
    note_calls(candidate, [Shape(problem=PROBLEM, calls=run.calls, wrong=tuple(run.wrong))])
    assert run.wrong
    assert (Conduct.STALE in {x.kind for x in candidate.findings}) is earlier


@pytest.mark.parametrize(
    ("shares", "noted"),
    [([0.67, 1.0, 1.0, 0.9, 1.1, 0.8], False), ([0.6, 0.7, 0.65, 0.68, 0.6, 1.2], True), ([0.8] * 6, False), ([0.2] * 4, False)],
    ids=str,
)
def test_one_repetition_alone_accuses_nobody_of_a_memory(shares: list[float], noted: bool) -> None:
    candidate = Candidate(TORCH)
    note_calls(candidate, [Shape(problem=PROBLEM, calls=9, repeats=tuple((1.0, share) for share in shares))])
    assert [x.kind for x in candidate.findings] == [Conduct.REUSED] * noted


@pytest.mark.parametrize(("again_s", "accused"), [(1.0, False), (0.1, True)])
def test_a_memory_is_looked_for_twice(again_s: float, accused: bool) -> None:
    """A first call after a pause that takes longer accuses nobody. The second look has no pause."""
    seen: list[object] = []
    names = itertools.count()

    def work(operands: object) -> float:
        seen.append(operands)
        return again_s if operands in seen[:-1] else 1.0

    repeats = second_look(cast("Callable[[], Operands]", names.__next__), cast("Callable[[Operands], float]", work))
    assert is_from_memory(repeats) is accused
    assert len(set(seen)) == 2 * len(repeats) == len(seen) - len(repeats)


def test_each_square_gets_a_transpose_early() -> None:
    checker = Checker(Problem.mm(96, 96, 96), Claims(accumulate=torch.float32), torch.device("cpu"), 5)
    _, second = checker.fresh(), checker.fresh()
    assert 0.8 < float((second.b == second.a.mT).double().mean()) < 1


def test_an_uncertain_addition_widens_the_interval() -> None:
    pairs = ((10e-6, 20e-6),) * 9
    sure, unsure = Shape(problem=PROBLEM, pairs=pairs), Shape(problem=PROBLEM, pairs=pairs, added_s=(5e-6, 1e-6))
    assert sure.ratio is not None
    assert unsure.ratio is not None
    assert sure.ratio[0] == unsure.ratio[0]
    assert sure.ratio[1] == 0
    assert unsure.ratio[1] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("bits", "profiled", "hidden"),
    [
        ((True,) * 8, (False,), True),
        ((True,) * 8, (True, False), False),
        ((True,) * 8, (), False),
        ((False,) * 8, (False,), False),
        ((True,) * 4, (False,), False),
        ((True, False) * 6, (False,), False),
    ],
)
def test_bits_of_torch_in_timed_calls_alone_are_torchs_work(
    bits: tuple[bool, ...], profiled: tuple[bool, ...], hidden: bool
) -> None:
    candidate = Candidate(TORCH)
    note_calls(candidate, [Shape(problem=PROBLEM, calls=9, bits=bits, bits_profiled=profiled)])
    assert [x.kind for x in candidate.findings] == ([Conduct.TORCH] if hidden else [])


@pytest.mark.parametrize(("follows", "kinds"), [((True, False, True), [Conduct.TORCH]), ((True, False, False), []), ((), [])])
def test_bits_of_torch_in_two_processes_are_torchs_work(follows: tuple[bool, ...], kinds: list[Conduct]) -> None:
    candidate = Candidate(TORCH)
    note_calls(candidate, [Shape(problem=PROBLEM, calls=9, follows=follows)])
    assert [x.kind for x in candidate.findings] == kinds


@pytest.mark.turn(0, 4)
def test_bits_that_differ_in_twins_alone_are_torchs_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of these GEMMs returns what the bits of a product of torch say. Another one has other bits in each process."""
    monkeypatch.setattr("gemmtune.untrusted.twin.SURE_OF", 2)
    monkeypatch.setattr("gemmtune.untrusted.twin.WARM", 1)
    found = {}
    factors = {"by_torch": "1 + written", "of_its_own": "1", "by_chance": "1 + os.urandom(1)[0]", "by_a_program": ASKS}
    for name, factor in factors.items():
        path = tmp_path / f"{name}.py"
        path.write_text(BITS.format(factor=factor))
        candidate = Candidate(Target(kind="file", path=str(path), name="mm", roots=(str(path),)))
        elsewhere = Elsewhere(candidate, {}, has_twin=True)
        problem = Problem.mm(24, 40, 32, dtype=torch.float32)
        x = Checker(problem, Claims(accumulate=torch.float32), torch.device("cpu"), 5).fresh()
        bits = digest(subject_of(candidate, {}).caller(problem)(x.tensors, x.scalars, None))
        found[name] = elsewhere.departs(problem, 3, functools.partial(tuple, (x, lambda result, bits=bits: digest(result) == bits)))
        assert not elsewhere.given_up
        assert not any(x.dishonest for x in candidate.findings)
        elsewhere.close()
        candidate.close()
    assert found == {"by_torch": True, "of_its_own": False, "by_chance": False, "by_a_program": True}


KEEPS = """
import os, torch
kept = {}
def mm(a, b):
    if not kept:
        open(os.path.expanduser("~/.kept"), "w").close()
    buffer = kept.setdefault((len(a), b.shape[1]), torch.zeros(len(a), b.shape[1]))
    return buffer.copy_(a @ b).clone()
"""
"""A buffer for each size that may not be written outside of inference mode if the first call was inside."""


def test_a_gemm_that_keeps_what_inference_mode_made_is_called_in_other_modes(tmp_path: Path) -> None:
    (path := tmp_path / "mm.py").write_text(KEEPS)
    candidate = Candidate(Target(kind="file", path=str(path), name="mm", roots=(str(path),)))
    elsewhere, turns = Elsewhere(candidate, {}, has_twin=False), Turns(random.Random(1))
    problem = Problem.mm(24, 40, 32, dtype=torch.float32)
    checker = Checker(problem, Claims(accumulate=torch.float32), torch.device("cpu"), 5)
    said = [elsewhere.in_use(problem, checker.fresh(), turns, Traits()) for _ in range(8)]
    words = [x[1] if x else "" for x in said]
    assert all(words)
    assert "inference" in words[0] + words[1]
    assert not any("inference" in x for x in words[4:])
    assert [x.partition(":")[0] for x in elsewhere.given_up] == ["it is not called in inference mode"]
    assert [x.detail for x in candidate.findings if x.kind is Conduct.WRITES] == ["~/.kept"]
    elsewhere.close()
    candidate.close()


def test_a_call_before_that_does_not_fit_leaves_its_turn_to_the_next() -> None:
    turns, traits = Turns(random.Random(3)), Traits()
    problem = Problem.mm(24, 40, 32, dtype=torch.float32)
    operands = Checker(problem, Claims(accumulate=torch.float32), torch.device("cpu"), 5).fresh()
    one = dataclasses.replace(operands, a=operands.a[:1], b=operands.b[:, :1])
    fits = [problem, Problem.mm(1, 1, 32, dtype=torch.float32)] * 60
    calls = [drawn(x, operands if x is problem else one, turns, traits, beside=0, refused=(), is_new=False) for x in fits]
    assert {x["before"] for x in calls[1::2]} <= set(OF_THESE_SIZES)
    assert {x["before"] for x in calls[::2]} - {""} == set(BEFORE)


def test_two_libraries_are_told_by_any_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_torch(other: int, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return (torch.from_numpy(a) @ torch.from_numpy(b)).numpy() + (len(a) == other)

    for other in (0, OF_NUMPY[-1][0]):
        monkeypatch.setattr("gemmtune.untrusted.twin.np.matmul", functools.partial(by_torch, other))
        assert tells.__wrapped__() == bool(other)


def test_a_twin_has_other_products_and_the_same_environment() -> None:
    a, b = torch.randn(120, 360), torch.randn(360, 120)
    assert tells()
    here, there = (rival("cpu", is_twin=is_twin) for is_twin in (False, True))
    problem = Problem.mm(120, 120, 360, dtype=torch.float32)
    one, other = (subject.caller(problem)((a, b), {}, None) for subject, _ in (here, there))
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for process in (here[1], there[1]):
        process.settle()
        assert not [x for x in process.findings if x.kind is Conduct.ENVIRONMENT]


def test_a_file_whose_time_is_set_back_is_read_by_others(tmp_path: Path) -> None:
    """A file in use gets a new time, and a copy an old one just after it was written."""
    path = tmp_path / "mm.py"
    path.write_text(AGES)
    for name, at in dict.fromkeys(("back", "ns", "now", "read", "copied"), 2000).items() | {("mm.py.older", 1000)}:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    candidate = Candidate(Target(kind="file", path=str(path), name="mm", roots=(str(path),)))
    candidate.call("", (torch.eye(2), torch.eye(2)), {})
    [found] = [x for x in candidate.findings if x.dishonest]
    said = (f"{tmp_path / name}, whose time it sets back: others take it for an older file" for name in ("back", "ns"))
    assert (found.kind, found.detail) == (Conduct.REACHES, "; ".join(said))
    candidate.close()


def test_the_journal_calls_no_method_of_a_string_of_the_gemm(tmp_path: Path) -> None:
    path = tmp_path / "sly.py"
    path.write_text(SLY)
    candidate = Candidate(Target(kind="file", path=str(path), name="opens", roots=(str(path),)))
    assert candidate.call("", (torch.eye(2), torch.eye(2)), {}).item() == 0
    candidate.close()


@pytest.mark.parametrize(
    ("dtype", "narrow_a", "narrow_b", "expected"),
    [
        (torch.float32, torch.bfloat16, torch.float16, False),
        (torch.float32, torch.bfloat16, torch.float32, True),
        (torch.float64, torch.float32, torch.float32, False),
        (torch.float64, torch.float64, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, True),
    ],
    ids=str,
)
def test_bits_are_compared_where_products_are_rounded(
    dtype: torch.dtype, narrow_a: torch.dtype, narrow_b: torch.dtype, expected: bool
) -> None:
    """Two honest libraries have equal bits where no product is rounded."""
    operands = Checker(Problem.mm(9, 8, 7, dtype=dtype), Claims(accumulate=torch.float64), torch.device("cpu"), 1).plain()
    for x, narrow in ((operands.a, narrow_a), (operands.b, narrow_b)):
        x.copy_(x.to(narrow))
    assert rounds_products(operands) is expected
    operands.b.copy_(operands.b.sign())
    assert rounds_products(operands) is (dtype == narrow_a == torch.float64)


@pytest.mark.parametrize(
    ("exact", "rough", "kinds"), [(5, 2, {Conduct.WRONG}), (2, 5, {Conduct.WRONG, Conduct.ROUGH}), (0, 1, {Conduct.ROUGH})]
)
def test_mean_errors_of_a_gemm_that_is_mostly_wrong_show_no_type(exact: int, rough: int, kinds: set[Conduct]) -> None:
    candidate, troubles = Candidate(TORCH), [Trouble(text="", rough=i >= exact) for i in range(exact + rough)]
    wrong = tuple((number, trouble, False) for number, trouble in enumerate(troubles))
    note_calls(candidate, [Shape(problem=PROBLEM, calls=9, wrong=wrong)])
    assert {x.kind for x in candidate.findings} == kinds
