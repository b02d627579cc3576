"""Options of a conformance run: words, numbers, files, declarations."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune import cli
from gemmtune.conformance.cases.scope import Level
from gemmtune.conformance.option_table import LEVELS, OPTIONS, as_typed
from gemmtune.conformance.options import RunOptions, declared_by
from gemmtune.declaration.subject import FunctionSubject, SubjectSpec, wrapped
from gemmtune.declaration.traits import Traits
from gemmtune.errors import ConformanceError, SubjectError, TraitsError


def test_every_option_but_the_gemm_has_a_help_text_and_all_levels_are_options() -> None:
    assert {option.name for option in OPTIONS if option.help} | {"backend"} == {f.name for f in dataclasses.fields(RunOptions)}
    assert tuple(level.name.lower() for level in Level) == LEVELS


def test_words_may_be_joined_by_commas_and_dtypes_be_short() -> None:
    options = RunOptions.of({"backend": "x:f", "dtype": ["bf16,float16", "f32"], "op": ["mm,bmm"], "layout": None})
    assert (options.dtype, options.op, options.layout) == (("bfloat16", "float16", "float32"), ("mm", "bmm"), ())
    assert options.narrowed


def test_options_not_given_to_pytest_have_their_defaults() -> None:
    assert RunOptions.of({"backend": None, "device": None, "trait": None, "random": False}) == RunOptions()
    assert not RunOptions().active


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"level": "huge"}, "level: got 'huge', expected one of smoke, full, exhaustive"),
        ({"dtype": ["f17"]}, "dtype: got 'f17', expected one of float64, float32"),
        ({"layout": ["diagonal"]}, "layout: got 'diagonal', expected one of row, col"),
        ({"sm": ["70"]}, "sm: got '70', expected one of 75, 80, 90"),
        ({"max_examples": 0}, "max_examples: got 0, expected at least 1"),
        ({"min_executed": 0}, "min_executed: got 0, expected at least 1"),
        ({"max_cases": 0}, "max_cases: got 0, expected at least 1"),
        ({"max_seconds": -1.0}, "max_seconds: got -1, expected a number of seconds above 0"),
        ({"properties": ["bound,bonud"]}, "properties: got 'bonud', expected one of integers, one-hot-a"),
        ({"max_seconds": float("nan")}, "max_seconds: got nan, expected a number of seconds above 0"),
        ({"timeout": math.inf}, "timeout: got inf, expected a number of seconds above 0"),
        ({"html": "-"}, "html: got '-', expected a file to write, in a folder that exists"),
        ({"timeout": 0.0}, "timeout: got 0, expected a number of seconds above 0"),
        ({"derandomize": True, "seed": 3}, "derandomize: got seed as well, expected one of them"),
        ({"backend": "x:f", "sm": ["80"]}, "sm: got the GEMM 'x:f' as well, expected no GEMM"),
        ({"sm": ["80"], "html": "x.html"}, "html: got it together with sm, expected json"),
        ({"skips_file": "nowhere.txt"}, "skips_file: got 'nowhere.txt', expected a file that exists"),
        ({"traits": "nowhere.toml"}, "traits: got 'nowhere.toml', expected a file that exists"),
        ({"json": "nowhere/report.json"}, "json: got 'nowhere/report.json', expected a file to write, in a folder that exists"),
    ],
)
def test_rejects_illegal_options(values: dict, text: str) -> None:
    with pytest.raises(ConformanceError, match=text):
        RunOptions.of(values)


def test_declarations_are_parsed_by_their_type() -> None:
    words = ("out", "beta=true", "min_alignment=16", "multiples=1,8,8", "dtypes=float16,bfloat16", "accumulate=float16:float16")
    assert declared_by((*words, "bias_name=c", "sms=90", "layouts=row")) == {
        "out": True, "beta": True, "min_alignment": 16, "multiples": [1, 8, 8], "dtypes": ["float16", "bfloat16"],
        "accumulate": {"float16": "float16"}, "bias_name": "c", "sms": [90], "layouts": ["row"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("outt", r"declarations: got outt \(did you mean out\?\), expected names out of accumulate, alpha"),
        ("out=maybe", "out: got 'maybe', expected true or false"),
        ("dtypes=float17", "dtypes: got 'float17', expected float64"),
        ("min_alignment=0", "min_alignment: got 0, expected an integer of at least 1"),
    ],
)
def test_rejects_illegal_declarations(word: str, text: str) -> None:
    with pytest.raises(TraitsError, match=text):
        RunOptions(backend="x:f", trait=(word,))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Traits)])
def test_declares_any_value_or_says_what_it_expects(field: str) -> None:
    """A value of a wrong type is no error of another kind."""
    for value in (None, True, -1, 2.5, "x", ["x"], [1], [None], {}, {"x": "y"}, {1: 2}, torch.float16, object(), b"x", {"row"}):
        with contextlib.suppress(TraitsError):
            Traits.of({field: value})


@pytest.mark.parametrize(("declared", "got"), [(None, "None"), (["float32"], "['float32']"), ({1: 2}, "1, expected names")])
def test_declarations_that_are_no_mapping_are_refused(declared: Any, got: str) -> None:
    with pytest.raises(TraitsError, match=re.escape(f"declarations: got {got}")):
        Traits.of(declared)


def test_an_illegal_declaration_names_its_gemm() -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    product.gemm_traits = {"multiples": 16}  # type: ignore[attr-defined]
    with pytest.raises(TraitsError, match="mine:product: multiples: got 16, expected three integers for M, N and K, such as"):
        wrapped(SubjectSpec(target="mine:product"), product)


def test_a_declared_keyword_is_one_that_the_function_takes() -> None:
    for traits, takes in (({"out": True}, "out"), ({"ops": ["addmm"], "beta": True}, "beta")):
        with pytest.raises(SubjectError, match=f"f: declares {takes}, but takes only a, b; add that parameter, or declare less"):
            FunctionSubject("f", lambda a, b: a @ b, Traits.of(traits))
    FunctionSubject("f", lambda a, b, **options: a @ b, Traits.of({"out": True}))
    FunctionSubject("f", lambda a, b: a @ b, Traits.of({"alpha": True}))  # mm has no alpha


def test_the_spec_finds_the_traits_file_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traits.toml").write_text("out = true\n")
    monkeypatch.chdir(tmp_path)
    spec = RunOptions(backend="x:f", traits="traits.toml", trait=("alpha",)).spec
    assert (spec.target, spec.declared, spec.traits_file) == ("x:f", {"alpha": True}, str(tmp_path / "traits.toml"))


def test_errors_name_options_as_they_were_typed(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {
        ("--max-cases", "0"): "--max-cases: got 0",
        ("--property", "bonud"): "--property: got 'bonud'",
        ("--seed", "1", "--derandomize"): "--derandomize: got seed as well",
        ("--skips-file", "nowhere"): "--skips-file: got 'nowhere'",
        ("--trait", "outt"): "--trait: declarations: got outt",
        ("--repro", "@nowhere"): "--repro: got",
    }
    for words, text in commands.items():
        assert cli.run(["conformance", "backend:aten", "--device", "cpu", *words]) == 2, words
        assert f"error: {text}" in capsys.readouterr().err, words
    plugin = {option.name: option.pytest_spelling for option in OPTIONS}
    assert as_typed("max_cases: got 0", plugin) == "--gemm-max-cases: got 0"
