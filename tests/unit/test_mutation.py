"""The mutation script: the edits that it finds, the tests that it runs for a module, and its results."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutation import run as script
from mutation.edits import Edit, edits_of
from mutation.related import related_tests
from rotation import VARIABLE, rotated

ROOT = Path(__file__).resolve().parents[2]
TEXT = '''
"""A docstring with 1 < 2 and 3."""
from x import y

LIMIT: int = 2**28

@decorated(1)
def size(a: int, b: int = 3) -> bool:
    """Not 1."""
    if a <= b and not y(a):
        log("é %d", max(a, b))
        raise ValueError(f"got {a + 1}")
    total = a + (b)
    total += 1000
    while time.monotonic() < total:
        pass
    return total not in (a, b)
'''


def edited(kind: str, text: str = TEXT) -> list[str]:
    """Return the lines that edits of a kind produce."""
    return [edit.diff(text).splitlines()[-1][1:].strip() for edit in edits_of(text) if edit.kind == kind]


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("comparison", ["if a < b and not y(a):", "return total in (a, b)"]),
        ("boolean", ["if a <= b or not y(a):"]),
        ("not", ["if a <= b and y(a):"]),
        ("condition", ["if not (a <= b and not y(a)):"]),
        ("constant", ["def size(a: int, b: int = 2) -> bool:", "def size(a: int, b: int = 4) -> bool:"]),
        ("extreme", ['log("é %d", (a))', 'log("é %d", (b))']),
        ("arithmetic", ["total = a - (b)"]),
        ("statement", ["pass", "pass", "pass"]),
        ("return", ["return not (total not in (a, b))"]),
    ],
)
def test_edits_of_each_kind(kind: str, lines: list[str]) -> None:
    assert sorted(edited(kind)) == sorted(lines)


def test_every_edit_gives_another_valid_module() -> None:
    text = (ROOT / "gemmtune/numerics/one_hot.py").read_text()
    edits = edits_of(text)
    assert len(edits) > 50
    unedited = ast.dump(ast.parse(text))
    for edit in edits:
        assert ast.dump(ast.parse(edit.applied(text))) != unedited, edit


def test_returns_of_other_types() -> None:
    text = 'def f(x) -> int | None:\n    return x\n\ndef g(x) -> str:\n    return "a" + x\n\ndef h() -> float:\n    return 2.5\n'
    assert edited("return", text) == ["return None", 'return ""', "return (2.5) + 1"]


@pytest.mark.turn(0, 8)
def test_related_tests_are_those_named_after_a_module_first() -> None:
    assert related_tests(ROOT, Path("gemmtune/numerics/bounds.py"))[0].name == "test_numerics_bounds.py"
    for module in rotated(sorted((ROOT / "gemmtune/numerics").glob("*.py")), 4, "related tests"):
        tests = related_tests(ROOT, module.relative_to(ROOT))
        assert len(tests) >= 3
        assert all(test.exists() for test in tests)


@pytest.mark.turn(7, 8)
def test_every_listed_edit_exists_and_has_a_reason() -> None:
    reasons = script.equivalent_edits(ROOT)
    assert reasons
    assert all(reasons.values())


def test_a_listed_edit_that_no_longer_exists_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected an edit of the file as it is now, with a reason"):
        script.equivalent_edits(tmp_path)


def tree_with(folder: Path, test: str) -> script.Mutant:
    """Make a small tree whose module has one edit, and return the edit."""
    (folder / "gemmtune/store").mkdir(parents=True)
    (folder / "tests/unit").mkdir(parents=True)
    module = Path("gemmtune/store/least.py")
    for path, text in (
        (module, "def least(a, b):\n    return min(a, b)\n"),
        (Path("gemmtune/__init__.py"), ""),
        (Path("gemmtune/store/__init__.py"), ""),
        (Path("tests/unit/test_least.py"), f"from gemmtune.store.least import least\n\ndef test():\n    {test}\n"),
        (Path("tox.ini"), "[pytest]\n"),
    ):
        (folder / path).write_text(text)
    text = (folder / module).read_text()
    edit = next(edit for edit in edits_of(text) if edit.new == "(a)")
    return script.Mutant(path=module, edit=edit, diff=edit.diff(text))


@pytest.mark.turn(1, 8)
@pytest.mark.parametrize(
    ("test", "verdict"),
    rotated(
        [
            ("assert least(2, 1) == 1", "killed"),
            ("assert least(1, 2) == 1", "survived"),
            ("assert least(1, 2) == 3", "untested"),  # fails without the edit too
            ("assert least(2, 1) == 1 or __import__('time').sleep(30)", "killed"),
        ],
        2,
        "mutants of a tree",
    ),
)
def test_the_result_of_a_mutant(tmp_path: Path, test: str, verdict: str) -> None:
    mutant, said = tree_with(tmp_path, test), list[str]()
    (result,) = script.run(tmp_path, [mutant], 1, 2.0 if "sleep" in test else 60.0, said.append)
    assert result.verdict == verdict, said
    assert result.killed == (verdict == "killed")
    assert (tmp_path / mutant.path).read_text() == "def least(a, b):\n    return min(a, b)\n"


def test_a_summary_counts_by_package() -> None:
    edit = Edit(kind="not", line=1, start=0, end=1, new="")

    def result(path: str, verdict: str) -> script.Result:
        return script.Result(mutant=script.Mutant(path=Path(path), edit=edit, diff=""), verdict=verdict, seconds=1.0)

    results = [
        result("gemmtune/store/a.py", "killed"),
        result("gemmtune/store/b.py", "survived"),
        result("gemmtune/problem/a.py", "killed"),
    ]
    lines = [line.split() for line in script.summary(results).splitlines()]
    assert [(x[0], x[1], x[3]) for x in lines] == [("problem", "1", "1"), ("store", "1", "2"), ("all", "2", "3")]
    sample = script.sampled([r.mutant for r in results], 2, 5)
    assert len(sample) == 2
    assert sample == script.sampled([r.mutant for r in results], 2, 5)


@pytest.mark.turn(2, 8)
def test_all_cases_of_more_files_run_for_a_mutant_that_survives_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    mutant = tree_with(tmp_path, "assert True")
    files = [tmp_path / "tests/unit" / name for name in ("test_least.py", "test_more.py")]
    test = f"assert __import__('os').environ['{VARIABLE}'] != 'all' or least(2, 1) == 1"
    files[1].write_text(f"from gemmtune.store.least import least\n\ndef test():\n    {test}\n")
    monkeypatch.setattr(script, "related_tests", lambda _root, _module, most=1: files[:most])
    (result,) = script.run(tmp_path, [mutant], 1, 60.0, list[str]().append)
    assert result.verdict == "killed"


def test_tests_that_cannot_run_kill_nothing(tmp_path: Path) -> None:
    mutant = tree_with(tmp_path, "assert True")
    (tmp_path / "tox.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    with pytest.raises(RuntimeError, match="pytest ends with status 4"):
        script.run(tmp_path, [mutant], 1, 60.0, list[str]().append)


def test_a_module_gets_no_edits_without_the_package_of_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for absent in (True, False):
        monkeypatch.setattr(script, "missing", lambda extra, absent=absent: absent and extra == "fleet")
        counts.append(len(script.mutants_of(ROOT, [Path("gemmtune/fleet/ray_roster.py")])))
    assert counts[0] == 0 < counts[1]
