"""Parts of the process of an untrusted GEMM that need no process: how it is called, and whose question a file's opening is."""

from __future__ import annotations

import asyncio
import os
import platform
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.choice import Claims
from gemmtune.declaration.traits import Traits
from gemmtune.numerics.operands import Operands
from gemmtune.problem import Problem
from gemmtune.untrusted.candidate import Candidate, RemoteError
from gemmtune.untrusted.checks import Checker
from gemmtune.untrusted.gemm_process import first
from gemmtune.untrusted.gemm_process.journal import _asker
from gemmtune.untrusted.gemm_process.manners import BESIDE, in_manner, watched
from gemmtune.untrusted.target import TORCH
from gemmtune.untrusted.turns import Turns
from gemmtune.untrusted.twin import Elsewhere
from gemmtune.untrusted.uses import FIRST, NO_WINDOWS, WINDOWS, overlap

PLAIN = {
    "mode": "plain", "times": 1, "thread": False, "one_core": False, "parameter": False, "offset": 0, "changed": [],
    "before": "", "beside": 0, "wider": 0, "trained": False, "inside": False, "one": False, "around": "", "many": False,
    "mapped": False, "first": "", "result": False, "windows": -1,
}  # fmt: skip


def test_a_gemm_is_called_as_programs_do() -> None:
    seen: list[tuple[object, ...]] = []

    def gemm(a: torch.Tensor, b: torch.Tensor) -> int:
        seen.append((a.tolist(), b.tolist(), a.is_inference(), type(b), torch.get_num_threads(), threading.get_ident()))
        return len(seen)

    a, b, threads = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.get_num_threads()
    assert in_manner(gemm, PLAIN)(a, b) == 1
    assert seen == [([1, 2], [3, 4], False, torch.Tensor, threads, threading.get_ident())]
    for changed, earlier in (([], ([2, 1], [4, 3])), ([0.5], ([1, 0], [3, 0]))):
        seen.clear()
        other = PLAIN | {"mode": "inference", "times": 3, "thread": True, "one_core": True, "parameter": True, "offset": 3}
        assert in_manner(gemm, other | {"changed": changed})(a, b) == 3, "the last result"
        assert [x[:5] for x in seen] == [(*x, True, torch.nn.Parameter, 1) for x in (earlier, earlier, ([1, 2], [3, 4]))]
        assert threading.get_ident() not in {x[5] for x in seen}
    assert torch.get_num_threads() == threads


def test_a_gemm_is_called_with_fewer_rows_before_parts_of_wider_matrices_and_other_threads() -> None:
    seen: list[tuple[object, ...]] = []
    others = dict[int, bool]()

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if (ident := threading.get_ident()) == threading.main_thread().ident:
            seen.append((a.tolist(), a.stride(), b.stride(), a.data_ptr()))
        else:
            others[ident] = torch.is_inference_mode_enabled()
        return a @ b

    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2)
    assert torch.equal(in_manner(gemm, PLAIN | {"before": "a row less", "beside": 2, "wider": 6, "mode": "inference"})(a, b), a)
    (before, *_, place), *several = seen
    assert before == [[2.0, 1.0]], "other numbers, and no last row"
    assert several == [(a.tolist(), (8, 1), (8, 1), place)] * BESIDE, "at the same place"
    assert [*others.values()] == [True, True]


BEFORE = {
    "other numbers": ([[2, 1], [4, 3]], [[6, 5], [8, 7]]), "a row less": ([[2, 1]], [[6, 5], [8, 7]]),
    "a column less": ([[2, 1], [4, 3]], [[6], [8]]), "a term less": ([[2], [4]], [[6, 5]]),
    "a row more": ([[2, 1], [4, 3], [1, 1]], [[6, 5], [8, 7]]), "both swapped": ([[6, 8], [5, 7]], [[2, 4], [1, 3]]),
    "fewer terms": ([[2], [1], [4], [3]], [[6, 5, 8, 7]]), "a that does not fit": ([[2], [1]], [[6, 5], [8, 7]]),
    "b that does not fit": ([[2, 1], [4, 3]], [[6, 5]]),
}  # fmt: skip


@pytest.mark.parametrize("before", BEFORE)
def test_a_call_with_other_numbers_comes_before_in_the_same_place(before: str) -> None:
    seen: list[tuple[object, ...]] = []

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(((a.tolist(), b.tolist()), {a.data_ptr(), b.data_ptr()}))
        return a @ b

    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    place = "first" if before in FIRST else "before"
    parts = PLAIN | {place: before, "parameter": True, "trained": True, "mode": "no_grad", "inside": True}
    assert torch.equal(in_manner(gemm, parts)(a, b), a @ b)
    (earlier, places), (last, same) = seen
    assert (earlier, last) == (BEFORE[before], (a.tolist(), b.tolist()))
    assert places == same


def test_a_gemm_is_called_after_more_terms_that_are_nan_and_with_weights_that_nobody_can_write() -> None:
    seen: list[tuple[object, ...]] = []

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ranges = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
        (mode,) = (how for x, how in ranges if int(x.split("-")[0], 16) <= b.data_ptr() < int(x.split("-")[1], 16))
        seen.append((list(a.shape), list(b.shape), bool(a.isnan().all()), mode))
        return a @ b

    def reads_on(a: torch.Tensor, b: torch.Tensor) -> list[str]:
        end = f"{b.data_ptr() + b.nbytes:08x}-"
        return [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(end)]

    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2)
    assert in_manner(reads_on, PLAIN | {"mapped": 4})(a, b) == ["---s"], "no byte after it can be read"
    for manner in ({"before": "a NaN more"}, {"mapped": True, "parameter": True}):
        assert torch.equal(in_manner(gemm, PLAIN | manner)(a, b), a)
    assert seen == [([2, 3], [3, 2], True, "rw-p"), ([2, 2], [2, 2], False, "rw-p"), ([2, 2], [2, 2], False, "r--s")]


FLUSHED = """
#include <xmmintrin.h>
#include <omp.h>
extern "C" void flush() {
#pragma omp parallel num_threads(2)
  if (omp_get_thread_num()) _mm_setcsr(_mm_getcsr() | 0x8040);
}
"""
LOOKS = """
import ctypes, sys, torch
from gemmtune.untrusted.gemm_process.state import State
state = State("cpu")
ctypes.CDLL(sys.argv[1]).flush()
print(torch.get_num_threads(), state.changed().get("flushed subnormals"))
"""


@pytest.mark.skipif(find_compiler() is None or platform.machine() != "x86_64", reason="needs a C++ compiler for x86-64")
def test_threads_of_torch_that_lose_small_numbers_are_seen(tmp_path: Path) -> None:
    (source := tmp_path / "flush.cpp").write_text(FLUSHED)
    library, compiler = str(tmp_path / "flush.so"), find_compiler()
    assert compiler is not None
    subprocess.run([compiler.path, "-fopenmp", "-shared", "-fPIC", str(source), "-o", library], check=True)
    run = subprocess.run(
        [sys.executable, "-c", LOOKS, library],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split(maxsplit=1) == ["2", "['False', 'True']\n"], run.stderr


@pytest.mark.parametrize("around", ["", "event loop"])
def test_a_call_has_a_loop_around_it_and_operands_of_one_tensor(around: str) -> None:
    def gemm(a: torch.Tensor, b: torch.Tensor) -> object:
        loop = asyncio._get_running_loop()
        return loop is not None, a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()

    a = torch.ones(2, 2)
    assert in_manner(gemm, PLAIN | {"around": around, "one": True})(a, a) == (around != "", True)


@pytest.mark.parametrize("how", WINDOWS)
def test_rows_are_windows_of_a_signal(how: str) -> None:
    a, b = torch.randn(5, 6), torch.randn(6, 3)
    step = overlap(a, how)
    assert (step == NO_WINDOWS) == (how == "")

    def gemm(x: torch.Tensor, y: torch.Tensor) -> object:
        return x.stride(), torch.equal(x, a), torch.equal(y, b)

    assert in_manner(gemm, PLAIN | {"windows": step})(a, b) == ((6 if step < 0 else step, 1), True, True)
    assert step < 0 or torch.equal(a[0, step:], a[1, : 6 - step])


def test_one_matrix_twice_is_one_tensor() -> None:
    a = torch.randn(4, 4)
    assert in_manner(lambda x, y: x.data_ptr() == y.data_ptr() and x.stride() == y.stride(), PLAIN | {"one": True})(a, a.clone())


def test_a_huge_term_comes_before_the_same_numbers() -> None:
    a, b = torch.randn(4, 5), torch.randn(5, 3)
    seen = list[tuple[bool, bool, bool]]()

    def gemm(x: torch.Tensor, y: torch.Tensor) -> None:
        seen.append((torch.equal(x, a), torch.equal(y[0], b[0]), torch.equal(y[1:], b[1:])))

    in_manner(gemm, PLAIN | {"before": "a huge term"})(a, b)
    assert seen == [(True, False, True), (True, True, True)]


def test_each_result_of_many_calls_is_kept_and_what_changes_of_an_argument_is_noted() -> None:
    kept: list[object] = []
    notes: list[tuple[str, str]] = []

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b.requires_grad_(False)

    parts = PLAIN | {"many": True, "parameter": True, "trained": True, "mode": "no_grad"}
    in_manner(watched(gemm, lambda *x: notes.append(x)), parts, kept.append)(torch.ones(2, 2), torch.ones(2, 2))
    assert len(kept) > 100
    assert notes == [("inputs", "the sizes, the memory, the gradients or the attributes of one")]


def test_only_what_a_gemm_refuses_is_left_out_of_later_manners() -> None:
    elsewhere = Elsewhere(Candidate(TORCH), {}, has_twin=False)
    manners: list[dict[str, object]] = []

    def result(problem: Problem, operands: Operands) -> str:
        manners.append(elsewhere._in_use.candidate.manner)  # type: ignore[union-attr, arg-type]
        if manners[-1]["trained"]:
            raise RemoteError("it cannot have gradients")
        return "a result"

    elsewhere._in_use.result = result  # type: ignore[union-attr, method-assign, assignment]
    problem, turns = Problem.mm(8, 8, 8, dtype=torch.float32), Turns(random.Random(1))
    operands = Checker(problem, Claims(accumulate=torch.float32), torch.device("cpu"), 1).fresh()
    said = [elsewhere.in_use(problem, operands, turns, Traits()) for _ in range(40)]
    assert {x[0] for x in said if x} == {"a result"}
    assert sum(bool(x["trained"]) for x in manners) == 1
    assert {x["around"] for x in manners} >= {"event loop", ""}
    assert sum(x["wider"] != 0 for x in manners) > 1
    assert not elsewhere.given_up


def test_a_question_of_pythons_own_modules_is_that_of_their_caller() -> None:
    def asked_by(*files: str) -> str:
        """Return the file that counts, from the frames of these files, the innermost first."""
        frame = None
        for file in reversed(files):
            frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_back=frame)
        found: list[str] = []
        _asker(lambda x: found.append(x.f_code.co_filename) or True, ("/python/lib/",))(frame)  # type: ignore[arg-type, func-returns-value]
        return found[0]

    assert asked_by("/python/lib/io.py", "/python/lib/json.py", "/kernels/gemm.py", "/torch.py") == "/kernels/gemm.py"
    package = "/python/lib/site-packages/torch/serialization.py"
    assert asked_by("/python/lib/io.py", package, "/kernels/gemm.py") == package


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_the_children_of_a_process_are_found() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        found = first._children()
        child.kill()
    assert child.pid in found
    assert child.pid not in first._children()
