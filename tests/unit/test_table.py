"""The text of tuning results."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rich.text import Text
from tuning_results import FAST, TORCH, failure, outcome, problem_result

from gemmtune import Problem
from gemmtune.choice import Refusal, Status
from gemmtune.selector import text_table
from gemmtune.selector.result import HOST_US
from gemmtune.selector.table import TuningResult, pick_line, render, renderables


def text_of(*problems, **options):
    return render(TuningResult(problems), **options)


def row_of(text, name):
    return next(line for line in text.splitlines() if line.startswith(name)).split()


def test_a_row_has_time_rate_shares_and_error():
    text = text_of(problem_result(FAST, TORCH))
    assert row_of(text, "choice") == ["choice", "backend", "time", "µs", "GFLOP/s", "%", "best", "%", "limit", "verified", "note"]
    # 2·16·4096·4096 flops in 2000 µs are 268.4 GFLOP/s.
    assert row_of(text, "cpp:avx512_12x32") == ["cpp:avx512_12x32", "cpp", "2000", "268.4", "100.0", "50.0", "0.031", "pick"]
    assert row_of(text, "aten:mm") == ["aten:mm", "aten", "5000", "107.4", "40.0", "20.0", "0.031", "torch"]


def test_a_wrong_choice_has_no_row():
    wrong = dataclasses.replace(FAST, status=Status.WRONG_RESULT, reason="off by one")
    text = text_of(problem_result(wrong, TORCH))
    assert not any(line.startswith("cpp:") for line in text.splitlines())
    assert "wrong_result: cpp:avx512_12x32: off by one" in text


def test_the_pick_is_green_on_a_terminal():
    heading, table, *others = renderables(
        TuningResult((problem_result(FAST, TORCH, refusals=(Refusal(name="cpp:a", reason="no"),)),))
    )
    assert [style for _, style in table.rows] == ["green", None]
    assert [text.style for text in (heading, *others)] == ["bold", "dim", "dim", "bold green"]
    assert [text.style for text in renderables(TuningResult((problem_result(),)))] == ["bold", "bold red"]


def test_heading_and_pick_line():
    lines = text_of(problem_result(FAST, TORCH)).splitlines()
    assert lines[0] == "mm 16x4096x4096 float32 nt on cpu: 2 choices tried in 4.2 s"
    assert lines[-1] == "pick: cpp:avx512_12x32, 2000 µs, 2.50× torch (aten:mm 5000 µs)"
    assert lines[1:-1] == [
        "choice            backend  time µs  GFLOP/s  % best  % limit  verified  note",
        "─────────────────────────────────────────────────────────────────────────────",
        "cpp:avx512_12x32  cpp         2000    268.4   100.0     50.0     0.031  pick",
        "aten:mm           aten        5000    107.4    40.0     20.0     0.031  torch",
    ]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (problem_result(FAST), "pick: cpp:avx512_12x32, 2000 µs; torch was not measured"),
        (problem_result(), "pick: none, every choice was left out"),
        (problem_result(failure("cpp:a", Status.CRASHED, "SIGSEGV")), "pick: cpp:a; torch was not measured"),
    ],
    ids=["no-baseline", "nothing", "pick-without-time"],
)
def test_pick_line_without_a_comparison(result, expected):
    assert pick_line(result) == expected


def test_pick_line_explains_a_ratio_below_1():
    slow_host = {HOST_US: 1.0}
    result = problem_result(outcome("cpp:a", 10.0, info=slow_host), outcome("aten:mm", 10.5, baseline=True, info=slow_host))
    assert pick_line(result) == "pick: cpp:a, 10.0 µs, 0.95× torch (aten:mm 9.50 µs called directly, without gemmtune's 1.00 µs)"


def test_an_empty_problem_needs_no_pick():
    empty = Problem.mm(0, 5, 4, dtype=torch.float32, device_type="cpu")
    refused = Refusal(name="cpp:a", reason="an empty result")
    assert text_of(problem_result(problem=empty, refusals=(refused,))).splitlines() == [
        "mm 0x5x4 float32 nt on cpu: an empty result, nothing to run",
        "pick: none needed",
    ]


def test_heading_counts_stored_outcomes():
    stored = dataclasses.replace(TORCH, from_store=True)
    assert text_of(problem_result(FAST, stored)).splitlines()[0].endswith("1 choice tried in 4.2 s, 1 known from the store")
    assert text_of(problem_result(FAST, source="store")).splitlines()[0].endswith(": from the store")


def test_rows_are_sorted_by_time_with_rough_times_after_the_finalists():
    rough = outcome("cpp:rough", 1900.0, finalist=False)
    text = text_of(problem_result(TORCH, FAST, rough, pick=FAST.name))
    names = [line.split()[0] for line in text.splitlines() if line.startswith(("cpp:", "aten:"))]
    assert names == ["cpp:avx512_12x32", "aten:mm", "cpp:rough"]
    assert row_of(text, "cpp:rough")[2:] == ["~1900", "282.6", "105.3", "52.6", "0.031", "dropped"]


@pytest.mark.parametrize(("time_us", "text"), [(9.99, "9.99"), (10.0, "10.0"), (999.9, "999.9"), (1000.0, "1000")])
def test_numbers_have_significant_places_only(time_us, text):
    assert row_of(text_of(problem_result(outcome("cpp:a", time_us))), "cpp:a")[2] == text


def test_no_choice_is_marked_dropped_without_final_rounds():
    text = text_of(problem_result(outcome("cpp:only", 10.0, finalist=False)))
    assert row_of(text, "cpp:only") == ["cpp:only", "cpp", "10.0", "53687", "100.0", "10000.0", "0.031", "pick"]


def test_unknown_limit_and_unchecked_choices_have_dashes():
    text = text_of(problem_result(outcome("cpp:a", 10.0, error_over_bound=None), limit_us=None))
    assert row_of(text, "cpp:a")[5:] == ["–", "–", "pick"]


def test_long_lists_are_cut_but_keep_torch_and_the_pick():
    many = [outcome(f"cpp:c{i:02}", 100.0 + i) for i in range(20)]
    text = text_of(problem_result(*many, TORCH, pick="cpp:c15"), max_rows=3)
    names = [line.split()[0] for line in text.splitlines() if line.startswith(("cpp:", "aten:"))]
    assert names == ["cpp:c00", "cpp:c01", "cpp:c02", "cpp:c15", "aten:mm"]
    assert "… and 16 slower choices" in text
    assert "slower" not in text_of(problem_result(*many, TORCH, pick="cpp:c15"), max_rows=None)


def test_failures_are_grouped_by_backend_status_and_reason_numbers_aside():
    failures = [failure(f"cpp:bad{i}", Status.WRONG_RESULT, f"error {i} × the bound") for i in (3, 5)]
    text = text_of(problem_result(FAST, *failures, failure("cpp:slow", Status.TIMED_OUT, "60 s")))
    assert "left out: 3 choices" in text
    assert "  wrong_result: 2 × cpp, for instance cpp:bad3: error 3 × the bound" in text
    assert "  timed_out: cpp:slow: 60 s" in text
    assert "bad5" not in text


def test_refusals_take_one_line_for_each_backend():
    memory = [Refusal(name=f"triton:m{i}", reason=f"needs {i} bytes of shared memory") for i in (64, 128)]
    others = [Refusal(name="cutlass:9 operations", reason="stores f32", count=9), Refusal(name="aten:x", reason="needs M > 16")]
    text = text_of(problem_result(FAST, refusals=(*memory, *others, Refusal(name="triton:n", reason="spills"))))
    lines = text.splitlines()
    start = lines.index("left out: 13 choices")
    assert lines[start + 1 : start + 4] == [
        "  refused: triton: 3 choices: needs 64 bytes of shared memory (2); spills (1)",
        "  refused: cutlass:9 operations: stores f32",
        "  refused: aten:x: needs M > 16",
    ]


def test_refused_user_kernels_are_listed_by_name():
    refusals = [Refusal(name=f"own:mylib.ops:{name}", reason=f"no {name}") for name in ("out", "streams")]
    lines = text_of(problem_result(FAST, refusals=refusals)).splitlines()
    start = lines.index("left out: 2 choices")
    assert lines[start + 1 : start + 3] == ["  refused: own:mylib.ops:out: no out", "  refused: own:mylib.ops:streams: no streams"]


def test_what_a_regex_left_out_is_told_by_name():
    regex = "choice_denylist_regex 'n' matches the name"
    refusals = (*(Refusal(name=f"triton:m{i}", reason="spills") for i in (1, 2)), Refusal(name="triton:n", reason=regex))
    lines = text_of(problem_result(FAST, refusals=refusals)).splitlines()
    start = lines.index("left out: 3 choices")
    assert lines[start + 1 : start + 3] == [f"  refused: triton:n: {regex}", "  refused: triton: 2 choices: spills (2)"]


def test_the_most_frequent_reasons_are_shown():
    refusals = tuple(Refusal(name=f"cutlass:{i} operations", reason="x" * i, count=i) for i in range(1, 6))
    text = text_of(problem_result(FAST, refusals=refusals))
    assert "  refused: cutlass: 15 choices: xxxxx (5); xxxx (4); xxx (3); and 2 more reasons" in text
    three = text_of(problem_result(FAST, refusals=refusals[2:]))
    assert "  refused: cutlass: 12 choices: xxxxx (5); xxxx (4); xxx (3)\n" in three


@pytest.mark.parametrize(("length", "shown"), [(160, "y" * 160), (161, "y" * 159 + "…")])
def test_a_long_reason_is_cut(length, shown):
    text = text_of(problem_result(FAST, refusals=(Refusal(name="aten:x", reason="y" * length),)))
    assert f"  refused: aten:x: {shown}\n" in text


def test_a_compiler_message_takes_one_line():
    reason = "cpp:a did not compile:\n  In file included\n  kernel.cpp:3: error: no such thing\n  note: more"
    text = text_of(problem_result(FAST, failure("cpp:a", Status.COMPILE_ERROR, reason)))
    assert "  compile_error: cpp:a: cpp:a did not compile: kernel.cpp:3: error: no such thing\n" in text


def test_several_problems_end_with_the_geometric_mean():
    other = problem_result(outcome("cpp:b", 4000.0), TORCH, source="store")
    last = text_of(problem_result(FAST, TORCH), other).splitlines()[-1]
    assert last == "2 problems in 8.5 s, 1 of them from the store; over torch: geometric mean 1.77×, least 1.25×, most 2.50×"


def test_a_result_prints_as_its_table():
    result = TuningResult((problem_result(FAST, TORCH),))
    assert str(result) == render(result)
    assert "pick: cpp:avx512_12x32" in str(result)


def test_nothing_tuned_gives_no_text():
    assert text_of() == ""


@pytest.mark.parametrize(
    ("width", "cells"),
    [
        (130, ["triton", "12346", "43.5", "40.5", "8.1", "0.031", "pick"]),
        (116, ["12346", "43.5", "40.5", "8.1", "0.031", "pick"]),
        (107, ["12346", "40.5", "8.1", "0.031", "pick"]),
        (98, ["12346", "40.5", "0.031", "pick"]),
        (88, ["12346", "40.5", "pick"]),
    ],
)
def test_narrow_tables_leave_out_columns_before_they_fold_a_name(width, cells):
    name = "triton:mm_128x256x64_s4_w8_group8_splitk16_persistent_tma_evenk"
    text = text_of(problem_result(outcome(name, 12345.6), TORCH), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert row_of(text, name) == [name, *cells]


def test_a_name_folds_where_it_does_not_fit_at_all():
    name = "triton:" + "x" * 200
    lines = text_of(problem_result(outcome(name, 12345.6), TORCH), width=60).splitlines()
    assert max(map(len, lines)) <= 60
    first = next(i for i, line in enumerate(lines) if line.startswith("triton:"))
    assert "".join(line.split()[0] for line in lines[first : first + 10] if set(line.split()[0]) & set("x"))[:207].count("x") == 200


def test_without_a_width_no_line_is_folded():
    name = "triton:" + "x" * 200
    assert any(line.startswith(name) and line.endswith("pick") for line in text_of(problem_result(outcome(name, 1.0))).splitlines())


def test_markup_in_a_reason_is_printed_as_it_is():
    text = text_of(problem_result(FAST, failure("cpp:a", Status.RUNTIME_ERROR, "[bold]a[1] :smile:")))
    assert "[bold]a[1] :smile:" in text


def test_a_reason_is_its_first_line_and_first_error_line():
    reasons = {
        "error: it did not compile\nin line 3\na warning": "error: it did not compile",
        "nvcc failed\nin line 3\nan error: no such type\nanother error": "nvcc failed an error: no such type",
        "it died; its last words:\nTraceback\nKeyboardInterrupt": "it died; its last words: KeyboardInterrupt",
    }
    for reason, told in reasons.items():
        text = text_of(problem_result(FAST, failure("cpp:a", Status.COMPILE_ERROR, reason)))
        assert any(line.rstrip().endswith(told) for line in text.splitlines()), text


@pytest.mark.parametrize("width", [200, 62, 40, 20])
def test_a_long_table_is_the_one_that_rich_makes(monkeypatch, width):
    found = []
    for most in (10**9, 0):
        monkeypatch.setattr(text_table, "MOST_RENDERED", most)
        table = text_table.TextTable(texts=("problem", "choice"), numbers=("time", "ratio"), last="note", optional=("ratio",))
        for i in range(5):
            table.add_row(Text(f"mm {i}" * (i + 1)), "cpp:abc" * (i % 3 + 1), f"{i * 100.5}", "1.2×", "")
        table.add_row("行", Text("b"))
        found.append(text_table.plain_text([table], width))
    assert found[0] == found[1]
