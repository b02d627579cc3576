"""The exception tree: bases, texts and pickling (workers send exceptions to the process that started them)."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from gemmtune import errors
from gemmtune.errors import (
    CaseError,
    CompileError,
    ConformanceError,
    EpilogueError,
    ErrorFromChoice,
    ErrorWithData,
    FleetError,
    GateError,
    GemmtuneError,
    InvalidProblemError,
    NoValidChoicesError,
    SettingsError,
    ShortMemoryError,
    StoreError,
    SubjectError,
    TraitsError,
    UnavailableError,
)

EXAMPLES = [
    CompileError("cpp:x", "line 1\nline 2: error"),
    EpilogueError("epilogue f: no"),
    ErrorFromChoice("aten:mm", "mm 4x5x6", "out of memory"),
    InvalidProblemError("shapes"),
    NoValidChoicesError("mm 4x5x6", [("aten:mm", "wrong_result", "off by one"), ("cpp:x", "compile_error", "no")]),
    SettingsError("tune"),
    StoreError("locked"),
    UnavailableError("no nvcc"),
    GateError("no baselines"),
    CaseError("case id"),
    ConformanceError("level"),
    SubjectError("mypkg:f"),
    TraitsError("outt"),
    ShortMemoryError("mm 4x5x6", "cpu", 2**40, 2**30),
    FleetError([("mm 4x5x6", "ended its process again")]),
]


def test_every_exception_has_an_example() -> None:
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, GemmtuneError)}
    assert classes == {type(e) for e in EXAMPLES} | {GemmtuneError, ErrorWithData}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_pickling_keeps_type_text_and_data(error: GemmtuneError) -> None:
    for made in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(made) is type(error)
        assert str(made) == str(error)
        assert vars(made) == vars(error)


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (InvalidProblemError, (RuntimeError, ValueError)),
        (EpilogueError, (ValueError,)),
        (SettingsError, (ValueError,)),
        (StoreError, (RuntimeError,)),
        (CompileError, (RuntimeError,)),
        (UnavailableError, (RuntimeError,)),
        (ErrorFromChoice, (RuntimeError,)),
        (NoValidChoicesError, (RuntimeError,)),
    ],
)
def test_exceptions_derive_from_torch_exceptions(error: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    assert issubclass(error, (GemmtuneError,))
    assert all(issubclass(error, base) for base in bases)


def test_compile_error_keeps_the_last_lines() -> None:
    error = CompileError("triton:x", "\n".join(f"line {i}" for i in range(50)) + "\n\n", max_lines=3)
    assert str(error) == "triton:x did not compile:\nline 47\nline 48\nline 49"
    assert (error.name, error.output) == ("triton:x", "line 47\nline 48\nline 49")


def test_error_from_choice_names_choice_and_problem() -> None:
    assert str(EXAMPLES[2]) == "out of memory\n  from choice aten:mm\n  for problem mm 4x5x6"


def test_no_valid_choices_names_every_choice_and_the_remedy() -> None:
    assert str(EXAMPLES[4]) == (
        "no valid choice for mm 4x5x6:\n"
        "  aten:mm: wrong_result: off by one\n"
        "  cpp:x: compile_error: no\n"
        "Enable more backends (settings.backends), or set fallback_to_aten to run torch instead."
    )
    assert "no enabled backend offers a choice for it" in str(NoValidChoicesError("mm 4x5x6", []))


def test_the_docstring_shows_the_tree() -> None:
    assert errors.__doc__ is not None
    for name in (c.__name__ for c in {type(e) for e in EXAMPLES}):
        assert name in errors.__doc__
