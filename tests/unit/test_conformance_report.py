"""Findings of a run, summarised and shown: statuses, groups, exit statuses, text, JSON, HTML."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest

from gemmtune.conformance.bench.outcome import CaseStatus, Failure, HeatMap, Outcome, Record
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Level
from gemmtune.conformance.options import RunOptions
from gemmtune.conformance.report.as_json import SCHEMA, as_json_text
from gemmtune.conformance.report.page import COLOURS, as_html, heat_map
from gemmtune.conformance.report.summary import NOT_ASKED, Standing, Summary, summarise, tile_places
from gemmtune.conformance.report.text import declarations, header_lines, renderables
from gemmtune.conformance.runs.isolation import Ground
from gemmtune.conformance.runs.run import LEAST_EXECUTED, Run
from gemmtune.declaration.traits import Traits
from gemmtune.selector.text_table import plain_text

NASTY = "<script>alert('x')</script> & more"
HEAT = HeatMap(batch=0, rows=4, cols=8, cells=((0.0, 0.5, 2.0, 70.0), (2e4, float("inf"), 1.0, 0.0)))


MM = Traits(ops=("mm",))


def run_of(traits: Traits = MM, **options: object) -> Run:
    given = RunOptions(**({"backend": "mypkg:f"} | options))  # type: ignore[arg-type]
    return Run(given, Ground(name="mypkg:f", traits=traits, device="cpu", device_name="CPU", sm=0))


def record(name: str = "bound", status: CaseStatus = CaseStatus.PASSED, *failures: Failure, k: int = 33, **more: object) -> Record:
    case = Case(property_name=name, m=37, n=70, k=k)
    reason = "NotImplementedError: no" if status is CaseStatus.REFUSED else ""
    return Record(case=case, outcome=Outcome(case=case, status=status, failures=failures, reason=reason), **more)  # type: ignore[arg-type]


def outcome(case: Case, status: CaseStatus = CaseStatus.PASSED) -> Record:
    reason = "NotImplementedError: no" if status is CaseStatus.REFUSED else ""
    return Record(case=case, outcome=Outcome(case=case, status=status, reason=reason))


def failure(diagnosis: str = "", name: str = "bound") -> Failure:
    return Failure(property_name=name, message=f"out[33, 65] = 1 {NASTY}", diagnosis=diagnosis, index=(33, 65), got=1.0, heat=HEAT)


def summary_of(records: Sequence[Record], run: Run | None = None, **more: object) -> Summary:
    return summarise(run or run_of(min_executed=1), records, narrowed=False, seconds=1.0, **more)  # type: ignore[arg-type]


def standings(summary: Summary) -> dict[str, Standing]:
    return {p.name: p.standing for p in summary.properties}


class TestSummary:
    def test_right_cases_conform(self) -> None:
        summary = summary_of([record(), record("nan")])
        assert (summary.standing, summary.exit_status, summary.executed) == (Standing.CONFORMS, 0, 2)
        assert standings(summary)["bound"] is Standing.CONFORMS

    def test_a_property_without_cases_has_a_reason(self) -> None:
        reasons = {p.name: p.reason for p in summary_of([record()]).untested}
        assert reasons["out"] == "out= is not declared"
        assert reasons["nan"] == "no case of this level matches both the declarations and the options"
        narrowed = summarise(run_of(), [record()], narrowed=True, seconds=1.0)
        assert {p.reason for p in narrowed.untested} == {NOT_ASKED}

    def test_a_failure_counts_against_the_violated_property(self) -> None:
        summary = summary_of([record("bound", CaseStatus.FAILED, failure("", "inputs-unchanged"))])
        assert summary.exit_status == 1
        by_name = {p.name: p for p in summary.properties}
        assert (by_name["bound"].standing, by_name["bound"].failed) == (Standing.CONFORMS, 0)
        assert (by_name["inputs-unchanged"].standing, by_name["inputs-unchanged"].failed) == (Standing.FAILS, 1)

    def test_a_property_of_which_nothing_was_compared_does_not_conform(self) -> None:
        """A case that another violation ended shows nothing about its own property, listed as known or not."""
        ended = record("bound", CaseStatus.FAILED, failure("", "result"))
        assert ended.outcome is not None
        ended = dataclasses.replace(ended, outcome=dataclasses.replace(ended.outcome, complete=False))
        summary = summary_of([ended])
        [bound] = [p for p in summary.properties if p.name == "bound"]
        assert (bound.standing, bound.executed, bound.cut_short, summary.exit_status) == (Standing.NOT_TESTED, 1, 1, 1)
        assert bound.reason.startswith("every case that ran was cut short by a failure of result: out[33, 65] = 1")
        some = summary_of([ended, record("bound")])
        assert standings(some)["bound"] is Standing.CONFORMS
        assert re.search(r"executed +failed +refused +cut short", plain_text(renderables(some)))
        known = summary_of([dataclasses.replace(ended, known="issue 12")])
        assert known.exit_status == 2
        assert "NOT TESTED: every case that ran was cut short by a failure of result" in plain_text(renderables(known))

    def test_a_violated_property_outside_the_table_has_a_row(self) -> None:
        assert standings(summary_of([record("bound", CaseStatus.FAILED, failure("", "memcheck"))]))["memcheck"] is Standing.FAILS

    @pytest.mark.parametrize(
        ("traits", "fields", "expected"),
        [
            ({"out": True}, {"out": "col"}, "out"),
            ({"threads": True}, {"property_name": "threads"}, "threads"),
            ({"empty": True}, {"n": 0}, "empty"),
            ({"ops": ("addmm",), "alpha": True}, {"alpha": "general"}, "alpha"),
            ({"ops": ("addmm",), "bias": ("n", "mn")}, {"bias": "mn"}, "bias=mn"),
            ({"ops": ("mixed_mm",), "weights": ("int8", "int4")}, {"weights": "int4"}, "weights=int4"),
            ({"ops": ("mm", "bmm")}, {"op": "bmm"}, "ops=bmm"),
        ],
    )
    def test_what_is_declared_and_always_refused_fails(self, traits: dict[str, Any], fields: dict[str, Any], expected: str) -> None:
        """Undeclared dtypes may be refused, but that is no excuse where the same call without ``expected`` is not."""
        run = run_of(MM.changed(traits), min_executed=1)
        plain = Case(property_name="bound", op=run.scope.tested_ops[0], m=32, n=64, k=128)
        without, with_it, double = plain, plain.changed(**fields), plain.changed(dtype="float64")
        refused = outcome(with_it, CaseStatus.REFUSED)
        [complaint] = summary_of([outcome(without), refused], run).complaints
        assert complaint.startswith(
            f"{expected}: declared, but each case with it was refused (1, the first with NotImplementedError"
        )
        for more in (outcome(with_it.changed(seed=1)), outcome(double), outcome(without, CaseStatus.REFUSED)):
            records = [refused, more] if more.refused else [outcome(without), refused, more]
            assert summary_of(records, run).complaints == ()

    def test_nothing_executed_is_not_tested(self) -> None:
        assert (summary_of([]).standing, summary_of([]).exit_status) == (Standing.NOT_TESTED, 2)
        refused = summary_of([record("bound", CaseStatus.REFUSED)])
        assert (refused.exit_status, refused.refused) == (2, 1)
        [reason] = [p.reason for p in refused.properties if p.name == "bound"]
        assert reason == "every case was refused: NotImplementedError: no"

    def test_too_few_executed_cases_are_an_error(self) -> None:
        summary = summary_of([record()], run_of())
        assert summary.exit_status == 1
        least = LEAST_EXECUTED[Level.SMOKE]
        assert summary.complaints == (f"only 1 cases were executed, expected at least {least} (min_executed)",)
        assert summary_of([record()], run_of(dtype=("float32",))).exit_status == 0

    def test_a_narrowed_level_needs_one_executed_case(self) -> None:
        for part in ({"properties": ("bound",)}, {"max_cases": 10}, {"max_seconds": 1.0}, {"op": ("mm",)}):
            assert summary_of([record()], run_of(**part)).exit_status == 0

    def test_a_property_without_a_sampled_case_has_that_reason(self) -> None:
        summary = summary_of([record()], run_of(max_cases=1))
        reasons = {p.name: p.reason for p in summary.untested}
        assert (reasons["nan"], reasons["out"]) == ("no case of it is in the sample", "out= is not declared")
        asked = summary_of([record()], run_of(properties=("bound",)))
        assert {p.reason for p in asked.untested} == {NOT_ASKED}

    def test_a_finding_of_the_sanitizer_is_no_executed_case(self) -> None:
        found = summary_of([record("bound", CaseStatus.FAILED, failure("", "memcheck"), sanitized=True)], sanitized=4)
        assert (found.exit_status, found.executed, found.sanitized) == (1, 0, 4)
        assert "0 cases executed, 0 refused, 4 runs under compute-sanitizer, in 1 s" in plain_text(renderables(found))
        assert summary_of([], sanitized=4).exit_status == 0

    def test_choices_are_counted(self) -> None:
        records = [record(k=k) for k in (1, 2, 3)]
        outcomes = [dataclasses.replace(r.outcome, choice=c) for r, c in zip(records, ("x", "y", "y"), strict=True)]
        summary = summary_of([dataclasses.replace(r, outcome=o) for r, o in zip(records, outcomes, strict=True)])
        assert list(summary.choices.items()) == [("y", 2), ("x", 1)]
        assert "2 choices ran: y in 2 cases, …: --json FILE has them all" in plain_text(renderables(summary))
        assert re.search(r"<td class=\"[^\"]*\">x</td><td [^>]*>1</td>", as_html(summary))

    def test_a_known_failure_does_not_count_and_one_that_passes_is_an_error(self) -> None:
        known = summary_of([record("bound", CaseStatus.FAILED, failure(), known="issue 12"), record("nan")])
        assert (known.exit_status, known.failed) == (0, 0)
        assert next(p for p in known.properties if p.name == "bound").known == 1
        passes = summary_of([record(known="issue 12")])
        assert passes.exit_status == 1
        assert passes.complaints == ("bound:mm-f32-37x70x33 is listed as known to fail (issue 12), but passes: remove the line",)

    def test_cases_that_were_not_run_are_counted(self) -> None:
        skipped = Record(case=Case(property_name="nan", m=1, n=1, k=1), outcome=None, reason="issue 3")
        summary = summary_of([record(), skipped])
        row = next(p for p in summary.properties if p.name == "nan")
        assert (row.standing, row.reason, row.skipped) == (Standing.NOT_TESTED, "issue 3", 1)

    def test_failures_are_grouped_by_bug_regardless_of_numbers(self) -> None:
        records = [
            record("bound", CaseStatus.FAILED, failure("last K block of 16 (K = 33) dropped"), k=133),
            record("nan", CaseStatus.FAILED, failure("last K block of 32 dropped", "nan"), k=64),
            record("bound", CaseStatus.FAILED, failure(), k=7),
            record("bound", CaseStatus.CRASHED, Failure(property_name="bound", message="died"), k=8),
        ]
        groups = summary_of(records).groups
        assert [(g.looks_like, g.cases, g.by_property) for g in groups] == [
            ("last K block of 32 dropped", 2, {"nan": 1, "bound": 1}),
            ("the process died", 1, {"bound": 1}),
            ("wrong values like no known bug", 1, {"bound": 1}),
        ]

    @pytest.mark.turn(3, 8)
    def test_list_lines_without_a_case_warn_or_fail(self, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "skips.txt"
        path.write_text("bound:mm-f16-*\nbound:mm-f99-*\n")
        monkeypatch.delenv("CI", raising=False)
        traits = Traits(ops=("mm",), layouts=("row",), dtypes=("float16",))
        listed = functools.partial(run_of, traits, skips_file=str(path), min_executed=1)
        relaxed = summary_of([record()], listed())
        assert relaxed.exit_status == 0
        assert [text.partition(": ")[2] for text in relaxed.warnings] == [
            "no case has the id 'bound:mm-f99-*'; correct the line or remove it"
        ]
        strict = summary_of([record()], listed(strict_lists=True))
        assert (strict.exit_status, strict.complaints, strict.warnings) == (1, relaxed.warnings, ())
        monkeypatch.setenv("CI", "true")
        assert summary_of([record()], listed()).exit_status == 1

    def test_an_interrupted_run_does_not_conform(self) -> None:
        early = summary_of([record()], interrupted=True)
        assert (early.exit_status, early.complaints) == (2, ())
        assert "NOT TESTED: interrupted, without a failure until then; 1 case executed" in plain_text(renderables(early))
        failed = summary_of([record("bound", CaseStatus.FAILED, failure())], interrupted=True)
        assert failed.exit_status == 1
        assert "interrupted; FAILS: 1 property, 1 case" in plain_text(renderables(failed))

    def test_places_in_tiles(self) -> None:
        assert tile_places((1, 33, 65)) == {
            16: ((2, 4), (1, 1)), 32: ((1, 2), (1, 1)), 64: ((0, 1), (33, 1)), 128: ((0, 0), (33, 65)),
        }  # fmt: skip


class TestText:
    def test_the_header_names_what_is_tested(self) -> None:
        run = run_of()
        lines = header_lines(run.options, run.ground)
        assert lines[0].split() == ["GEMM", "mypkg:f"]
        assert lines[-1].split(maxsplit=1) == ["declares", "ops mm"]

    def test_only_declarations_that_differ_from_the_defaults_are_shown(self) -> None:
        traits = Traits(out=True, dtypes=("float16", "bfloat16"), accumulate={"float16": "float16"}, splits=4)
        assert declarations(traits) == "dtypes float16, bfloat16; out; accumulate float16 in float16; splits 4"
        assert declarations(Traits()) == ""

    def test_a_failure_shows_its_place_its_diagnosis_and_two_commands(self) -> None:
        text = plain_text(renderables(summary_of([record("bound", CaseStatus.FAILED, failure("last K block of 16 dropped"))])))
        for line in (
            "1 case of bound: last K block of 16 dropped",
            "in the tile of 16 (2, 4) at (1, 1), of 32 (1, 2) at (1, 1), of 64 (0, 1) at (33, 1), of 128 (0, 0) at (33, 65)",
            "again: gemmtune conformance mypkg:f --repro bound:mm-f32-37x70x33",
            "--pyargs gemmtune.conformance --gemm-backend=mypkg:f --gemm-repro bound:mm-f32-37x70x33",
            "FAILS: 1 property, 1 case; 1 case executed, 0 refused, in 1 s",
        ):
            assert line in text
        assert "NOT TESTED: out= is not declared" in text

    def test_the_last_lines_suggest_next_steps(self) -> None:
        right = plain_text(renderables(summary_of([record()])))
        assert "CONFORMS in 1 of " in right
        assert "Next: --level full tests more." in right
        refused = plain_text(renderables(summary_of([record("bound", CaseStatus.REFUSED)])))
        assert "NOT TESTED: every case was refused, 1 case, the first with NotImplementedError: no" in refused
        assert "Next: declare what the GEMM takes with --trait" in refused


class TestJson:
    def test_the_report_is_complete_plain_json(self) -> None:
        records = [
            record("bound", CaseStatus.FAILED, failure("x")),
            record("nan", CaseStatus.REFUSED),
            record("width", CaseStatus.FAILED, failure(), known="issue 12"),
            Record(case=Case(property_name="edges", m=1, n=1, k=1), outcome=None, reason="listed"),
        ]
        data = json.loads(as_json_text(summary_of(records, complaints=["c"], notes=["n"])), parse_constant=pytest.fail)
        assert {name: data[name] for name in ("schema", "gemm", "level", "verdict", "exit_status", "executed", "refused")} == {
            "schema": SCHEMA, "gemm": "mypkg:f", "level": "smoke", "verdict": "FAILS", "exit_status": 1, "executed": 2,
            "refused": 1,
        }  # fmt: skip
        [found] = data["failures"]
        assert (found["case"], found["property"], found["verdict"]) == ("bound:mm-f32-37x70x33", "bound", "failed")
        assert (found["diagnosis"], found["index"], found["tiles"]["16"]) == ("x", [33, 65], [[2, 4], [1, 1]])
        assert found["heat"]["cells"][1][1] == "inf"
        assert data["refusals"] == [{"reason": "NotImplementedError: no", "count": 1, "cases": ["nan:mm-f32-37x70x33"]}]
        assert data["known"] == [{"case": "width:mm-f32-37x70x33", "reason": "issue 12"}]
        assert data["not_run"] == [{"reason": "listed", "count": 1, "cases": ["edges:mm-f32-1x1x1"]}]
        assert (data["complaints"], data["notes"]) == (["c"], ["n"])
        assert {p["verdict"] for p in data["properties"]} == {"FAILS", "CONFORMS", "NOT TESTED"}


class Page(HTMLParser):
    """Parser that checks that every element is closed, and collects addresses and names of elements."""

    OPEN = ("meta", "rect", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in self.OPEN:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


class TestHtml:
    def test_the_page_is_self_contained_and_escapes_text(self) -> None:
        text = as_html(summary_of([record("bound", CaseStatus.FAILED, failure(NASTY)), record("nan")], complaints=[NASTY]))
        page = Page(text)
        assert page.addresses == []
        assert page.tags.count("script") == 1  # ours, which sorts tables
        assert text.count("&lt;script&gt;") >= 3
        assert "prefers-color-scheme: dark" in text
        assert "Where bound:mm-f32-37x70x33 is wrong, batch 0, 4 by 8:" in text

    def test_other_cases_of_a_failure_are_listed_once_each(self) -> None:
        both = record("bound", CaseStatus.FAILED, failure("x", "bound"), failure("x", "nan"))
        text = as_html(summary_of([both, record("bound", CaseStatus.FAILED, failure("x"), k=34)]))
        assert text.count("1 other case</summary><pre>bound:mm-f32-37x70x34</pre>") == 1

    def test_a_page_without_failures_has_no_such_section(self) -> None:
        page = as_html(summary_of([record()]))
        assert "--repro" not in page
        assert "out= is not declared" in page
        Page(page)

    def test_a_heat_map_has_a_colour_for_each_cell_and_a_legend(self) -> None:
        page = heat_map("x", HEAT)
        cells = re.findall(r'<rect x="(\d)" y="(\d)" width="(\d)" height="1" fill="([^"]*)"/>', page)
        found = {(int(y), int(x) + i): colour for x, y, width, colour in cells for i in range(int(width))}
        assert [[found.pop((y, x)) for x in range(4)] for y in range(2)] == [
            [COLOURS[shade] for shade in shades] for shades in ((0, 0, 1, 3), (4, 5, 0, 0))
        ]
        assert not found
        assert "NaN or infinity" in page
