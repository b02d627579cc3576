"""Names of failures, and the number of kinds into which the failures of one bug are grouped."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from conformance_gemms import one_thread, subject_of
from made_subjects import judged, made
from rotation import rotated

from gemmtune.conformance.bench.outcome import CaseStatus
from gemmtune.conformance.diagnose.match import AT_ONCE, DIFFERS, FIRST_CALL, KEPT, WRONG_DTYPE, kind_of
from gemmtune.conformance.options import RunOptions
from gemmtune.conformance.properties.calls import THREADS
from gemmtune.conformance.report.summary import UNEXAMINED, UNKNOWN, Summary, summarise
from gemmtune.conformance.runs.run import EXAMINED, Run
from gemmtune.declaration.subject import SubjectSpec, load
from gemmtune.errors import SubjectError
from gemmtune.problem.dtypes import accumulator_dtype

SAMPLED = 60
MOST_KINDS = 6


class NotImplementedByLibrary(Exception):
    """Own error of a library, as onnxruntime has one."""


@pytest.mark.parametrize("error", [KeyError("bfloat16"), NotImplementedByLibrary("no kernel"), IndexError("3"), RuntimeError("no")])
def test_any_error_refuses_what_is_undeclared_and_fails_what_is_declared(error: Exception) -> None:
    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise error

    case_id = "bound:mm-bf16-8x8x8"
    assert judged(subject_of(gemm), case_id).status is CaseStatus.REFUSED
    declared = judged(subject_of(gemm, dtypes=("bfloat16",), layouts=("row",)), case_id)
    assert declared.status is CaseStatus.RAISED
    assert type(error).__name__ in declared.reason


def test_a_result_of_the_wrong_dtype_has_only_that_diagnosis() -> None:
    subject = subject_of(lambda a, b: a.float() @ b.float(), dtypes=("bfloat16",))
    outcome = judged(subject, "bound:mm-bf16-8x9x10")
    assert [(failure.property_name, failure.diagnosis) for failure in outcome.failures] == [("result", WRONG_DTYPE)]
    assert "returned float32[8, 9] on cpu, expected bfloat16[8, 9] on cpu" in outcome.failures[0].message


def test_a_result_that_depends_on_addresses_is_named() -> None:
    known: dict[int, torch.Tensor] = {}

    def packed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a, known.setdefault(b.data_ptr(), b.clone())

    outcome = judged(made(read=packed), "fresh-pointers:mm-f32-33x40x65-variant.overwritten")
    assert [failure.diagnosis for failure in outcome.failures] == [KEPT]


def test_a_race_between_threads_is_named() -> None:
    busy = threading.Barrier(THREADS)

    def shared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        alone = threading.current_thread() is threading.main_thread()
        return a @ b + (0 if alone else 1 + 0 * busy.wait())

    outcome = judged(made(shared, threads=True), "threads:mm-f32-33x40x65")
    assert [failure.diagnosis for failure in outcome.failures] == [AT_ONCE]
    assert outcome.failures[0].message.startswith(f"thread 1 of {THREADS}, call 1: ")


def test_a_call_that_is_right_when_repeated_is_named() -> None:
    calls: list[int] = []

    def every_other(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return a @ b + len(calls) % 2

    subject = made(every_other)
    names = [failure.diagnosis for _ in range(3) for failure in judged(subject, "integers:mm-f32-33x40x65").failures]
    assert names[0] == FIRST_CALL
    assert set(names[1:]) == {DIFFERS}


@pytest.mark.turn(1, 8)
def test_a_dropped_row_is_not_named_a_dropped_block_of_k() -> None:
    """Check one-hot rows: a missing row could be explained by its K as well as by the row, and the row is named."""

    def last_row_dropped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = (a.to(accumulator_dtype(a.dtype)) @ b.to(accumulator_dtype(a.dtype))).to(a.dtype)
        result[..., -1, :] = 0
        return result

    subject = subject_of(last_row_dropped, dtypes=("float32", "bfloat16"))
    for dtype in ("f32", "bf16"):
        for seed in range(3):
            for property_name in ("one-hot-a", "one-hot-b", "cancellation", "bound", "identity"):
                for failure in judged(subject, f"{property_name}:mm-{dtype}-33x40x40-seed.{seed}").failures:
                    assert "last row" in failure.diagnosis, (property_name, failure)


def summary_of(target: str) -> Summary:
    run = Run.open(RunOptions(backend=target, device="cpu", in_process=True, max_cases=SAMPLED))
    with one_thread():
        return summarise(run, [run.judge(case) for case in run.cases()], narrowed=True, seconds=1)


@pytest.mark.turn(5, 8)
@pytest.mark.parametrize(
    ("target", "looks_like"),
    rotated(
        [
            ("mutants.sums:last_k_block_dropped", "last K block dropped"),
            ("mutants.writing:bottom_rows_of_zeros", "zeros"),
            ("mutants.sums:float16_accumulation", "accumulation in float16"),
            ("mutants.sums:partial_sum_lost_sometimes", DIFFERS),
            ("mutants.sums:wrong_at_the_first_call", FIRST_CALL),
        ],
        3,
        "names",
    ),
)
def test_one_bug_has_few_names_and_few_examined_cases(target: str, looks_like: str) -> None:
    summary = summary_of(target)
    kinds = {kind_of(group.looks_like): group.cases for group in summary.groups}
    assert next(iter(kinds)) == looks_like, kinds
    assert len(kinds.keys() - {UNEXAMINED}) <= MOST_KINDS, kinds
    examined = sum(cases for name, cases in kinds.items() if name != UNEXAMINED)
    properties = {record.case.property_name for record in summary.records}
    contexts = {(record.case.op, record.case.dtype) for record in summary.records}
    assert examined <= EXAMINED * (len(properties) + len(contexts))
    assert kinds.get(UNKNOWN, 0) <= examined // 4, kinds


@pytest.mark.parametrize(("text", "kind"), [
    ("last K block of 1 (K = 65 is 1 past a multiple of 64) dropped", "last K block dropped"),
    ("zeros in the last 2 of 130 rows, past a multiple of 128", "zeros"),
    ("zeros in row 7", "zeros"),
    ("float16 partial sums of 4 K splits", "float16 partial sums of # K splits"),
    ("b @ a in place of a @ b", "b @ a in place of a @ b"),
])  # fmt: skip
def test_a_kind_omits_places_and_sizes(text: str, kind: str) -> None:
    assert kind_of(text) == kind


def test_our_backends_have_a_short_name() -> None:
    assert load(SubjectSpec(target="backend:cpp")).name == "gemmtune backend cpp"
    with pytest.raises(SubjectError, match="got 'own:cpp', expected backend:cpp; own: is the prefix of choices"):
        load(SubjectSpec(target="own:cpp"))


def test_a_module_named_backend_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "backend.py").write_text("def matmul(a, b):\n    return a @ b\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load(SubjectSpec(target="backend:matmul")).name == "backend:matmul"
    assert load(SubjectSpec(target="backend:cpp")).name == "gemmtune backend cpp"
    del sys.modules["backend"]
