"""Test files related to a module: those that mention what it defines, or what its users define, the most specific ones first."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

__all__ = ["MOST_FOR_SURVIVORS", "NEEDED", "has_turns", "related_tests"]

FOLDERS = ("unit", "correctness", "alignment", "perf", "judge")
MOST_FILES = 8
"""Files that a mutant is tried against first. A survivor is tried against all within MOST_FOR_SURVIVORS."""
MOST_FOR_SURVIVORS = 24
LEAST_LETTERS = 5
"""Letters of a test's name that start the name of its module, as ``record`` does of ``recording``."""
STEPS = 4
"""Imports between a module and one that a test mentions. Each halves the weight."""
SLOW = ("test_cpp", "triton", "cutlass", "test_cuda", "must_list", "cross_compile", "test_architectures", "hacks", "test_adding")
"""Parts of the names of test files that mostly compile, or start many processes. They run for backends and toolchains only."""
NEVER = ("_gpu", "test_imports", "test_mutation", "test_prose")
"""Parts of the names of test files that need a GPU, or that read all modules."""
BROAD: dict[str, tuple[str, ...]] = {
    "backends": ("alignment/test_ranking.py", "alignment/test_offers.py"),
    "cli": ("unit/test_cli_tune.py",),
    "conformance": (
        "unit/test_conformance_cases.py", "correctness/test_conformance_mutants.py", "correctness/test_conformance_bsr.py",
        "unit/test_answers.py",
    ),
    "declaration": ("correctness/test_expectations.py", "correctness/test_conformance_bsr.py"),
    "dispatch": ("unit/test_answers.py",),
    "numerics": ("correctness/test_expectations.py", "correctness/test_bsr.py", "correctness/test_verify_broken.py"),
    "ops": ("unit/test_answers.py",),
    "problem": (
        "unit/test_problem_facts.py", "correctness/test_expectations.py", "alignment/test_offers.py", "unit/test_rules.py",
        "correctness/test_grouped.py", "correctness/test_verify_broken.py", "unit/test_answers.py",
    ),
    "quantized": ("unit/test_answers.py",),
    "sparse": ("unit/test_answers.py",),
    "untrusted": ("judge/test_verdict.py", "judge/test_walls.py", "judge/test_hacks.py"),
}  # fmt: skip
"""Tests that use many modules of a package without mentioning them. They run last."""
EVERYWHERE = ("unit/test_docs_tables.py",)
"""Tests that use modules of all packages. They run after those."""
NEEDED = {"gemmtune/fleet/ray_roster.py": "fleet"}
"""Modules without edits where an extra is absent, because all their tests need it. A stand-in serves tests of other extras."""
COMPILED = ("backends", "toolchain", "architectures", "untrusted", "judging")
"""Packages whose tests may be slow."""

TURNS = {"rotated", "rotation", "pytest.mark.rotates", "pytest.mark.turn"}
"""Words of files with cases that only some commits run."""
DEFINED = re.compile(r"^(?:(?: {4})?(?:def|class) +(?!__)|(?=[\w:, \[\]]+ = ))(\w+)", re.MULTILINE)
"""Functions, classes, methods and constants in the text of a module."""
FROM = re.compile(r"^ *from (\.*)([\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


def related_tests(root: Path, module: Path, most: int = MOST_FILES) -> list[Path]:
    """Return the test files for a module of the package (``module`` is relative to ``root``) in the order to run them.

    Besides the broad ones, these are the ``most`` most specific files.
    """
    scores = _scores(root)[_name(module)]
    package = module.parts[1]
    fit = [path for path in scores if package in COMPILED or not any(part in path.name for part in SLOW)]
    kept = sorted(fit, key=lambda path: (-scores[path], path))[:most]
    broad = [root / "tests" / path for path in (*BROAD.get(package, ()), *EVERYWHERE)]
    return kept + [path for path in broad if path in scores and path not in kept]


@functools.cache
def _scores(root: Path) -> Mapping[str, Mapping[Path, float]]:
    """Return for each module of the package how specific each test file is to it."""
    texts = {path.relative_to(root): path.read_text() for path in sorted((root / "gemmtune").rglob("*.py"))}
    numbers = {_name(path): i for i, path in enumerate(texts)}
    tests = _mentions(root)
    files = Counter(word for words in tests.values() for word in words)
    direct, shares = np.zeros((len(texts), len(tests))), np.zeros((len(texts), len(texts)))
    for i, (path, text) in enumerate(texts.items()):
        defined = {*DEFINED.findall(text), _name(path), path.stem} & files.keys()
        for j, (test, words) in enumerate(tests.items()):
            direct[i, j] = _named_after(test.stem, path) + sum(words[word] / files[word] for word in defined & words.keys())
        shares[[numbers[name] for name in _imported(text, path.parent.parts) & numbers.keys() - {_name(path)}], i] = 1
    shares /= 2 * np.maximum(1, shares.sum(axis=1, keepdims=True))  # half of the mean of a module's users
    scores = direct
    for _ in range(STEPS):
        scores = direct + shares @ scores
    return {name: dict(zip(tests, scores[i].tolist(), strict=True)) for name, i in numbers.items()}


def has_turns(root: Path, test: Path) -> bool:
    """Return True for a test file of which other commits run other cases."""
    return not TURNS.isdisjoint(_mentions(root)[test])


def _name(module: Path) -> str:
    return ".".join(module.with_suffix("").parts).removesuffix(".__init__")


def _named_after(test: str, module: Path) -> float:
    """Return 1 for tests named after the module, or with the start of its name, less for those named after a folder above it."""
    starts = any(len(word) >= LEAST_LETTERS and module.stem.startswith(word) for word in test.split("_"))
    return 1.0 if starts or f"_{module.stem}_" in f"{test}_" else 0.1 * sum(folder in test for folder in module.parts[1:-1])


def test_files(root: Path) -> list[Path]:
    """Return the test files that mutants may be tried against, in order."""
    paths = (path for folder in FOLDERS for path in sorted((root / "tests" / folder).rglob("test_*.py")))
    return [path for path in paths if not any(part in path.stem for part in NEVER)]


def _in_names(text: str) -> set[str]:
    """Return the words of the names of tests, such as ``swiglu`` of ``test_swiglu_is_fused``."""
    return {word for name in re.findall(r"def test_(\w+)", text) for word in name.split("_")}


@functools.cache
def _mentions(root: Path) -> dict[Path, dict[str, float]]:
    """Return the words and dotted names in each test file, and with half the weight those in its helpers."""
    texts = {path: path.read_text() for folder in FOLDERS for path in sorted((root / "tests" / folder).rglob("*.py"))}
    tests = test_files(root)
    words = {path.stem: {*re.findall(r"[\w.]+", text), *re.findall(r"\w+", text), *_in_names(text)} for path, text in texts.items()}
    helpers = {path.stem: _imported(text) & words.keys() for path, text in texts.items()}
    found = {}
    for path in tests:
        seen, new = set[str](), {path.stem}
        while new:
            seen |= new
            new = set[str]().union(*(helpers[one] for one in new)) - seen
        found[path] = {word: 0.5 for one in seen for word in words[one]} | dict.fromkeys(words[path.stem], 1.0)
    return found


def _imported(text: str, package: tuple[str, ...] = ()) -> set[str]:
    """Return the modules that a file of a package imports, and the imported names, which may be modules too."""
    names = set(re.findall(r"^ *import ([\w.]+)", text, re.MULTILINE))
    for dots, module, imported in FROM.findall(text):
        base = ".".join((*package[: len(package) - len(dots) + 1 if dots else 0], *([module] if module else [])))
        names |= {base, *(f"{base}.{name}" for name in re.findall(r"\w+", imported))}
    return names
