"""Check of what a run really executed: a run that tests too little fails, however many tests it counts.

    TEST_EXECUTED=noted.txt pytest --junit-xml=results.xml && python tests/executed.py noted.txt results.xml

The tests of our backends note each passed case. Afterwards, every backend that runs on a CPU must have passed cases of each of its
properties and operations. Every test file must have passed a test, except those for a GPU only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.gemms import backends
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.declaration.labels import GROUPED, ONE_PRODUCT, OPS, SPARSE

__all__ = [
    "OPERATIONS",
    "VARIABLE",
    "WITHOUT_ANYTHING",
    "WITHOUT_PRODUCTS",
    "faults",
    "files",
    "main",
    "note",
    "passed_files",
    "wanted",
]

VARIABLE = "TEST_EXECUTED"
"""Environment variable with the path of the notes. Without it nothing is noted."""
OPERATIONS: Mapping[str, tuple[str, ...]] = {"aten": OPS, "cpp": (*ONE_PRODUCT, *GROUPED, *SPARSE)}
"""Backends that run on a CPU, with their operations."""
WITHOUT_PRODUCTS = ("empty", "k-zero")
"""Properties of the operations themselves: backends never get an empty product."""
GROUPS = tuple(p.name for p in PROPERTIES if "group" in p.name)
WITHOUT_ANYTHING: Mapping[str, tuple[str, ...]] = {"cublaslt": ("absent-blocks", *GROUPS), "cpp": ("absent-blocks",)}
"""Properties that these backends do not support or do not declare."""
FOR_A_GPU = ("_gpu", "_cuda")
"""Endings of the names of test files that need a GPU."""
Note = tuple[str, str]


def note(backend: str, executed: Iterable[str]) -> None:
    """Note the properties and operations with passed cases for a backend."""
    if VARIABLE in os.environ:
        with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
            file.write("".join(f"{backend} {name}\n" for name in executed))


def wanted() -> set[Note]:
    """Return the notes that a run without a GPU must have."""
    found: set[Note] = {("gemmtune", name) for name in WITHOUT_PRODUCTS}
    for backend, operations in OPERATIONS.items():
        scope = Scope(traits=getattr(backends, backend).traits, device_type="cpu", level=Level.SMOKE)
        left_out = (*WITHOUT_PRODUCTS, *WITHOUT_ANYTHING.get(backend, ()))
        names = [p.name for p in PROPERTIES if p.needs(scope) is None and p.name not in left_out]
        found |= {(backend, name) for name in (*names, *operations)}
    return found


def files(folder: Path) -> set[str]:
    """Return the test files that any machine can run, such as ``tests.unit.test_cli``."""
    paths = [path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("test_*.py")]
    return {".".join(path.parts) for path in paths if not path.name.endswith(FOR_A_GPU)}


def passed_files(results: Path) -> set[str]:
    """Return the files with a passed test, according to pytest's XML."""
    cases = ElementTree.parse(results).getroot().iter("testcase")
    passed = [
        case.get("classname", "") for case in cases if all(child.tag not in ("skipped", "failure", "error") for child in case)
    ]
    return {".".join(part for part in name.split(".") if not part.startswith("Test")) for name in passed}


def faults(noted: set[Note], expected: set[Note], passed: set[str], present: set[str]) -> list[str]:
    """Return a line for each thing that was not executed."""
    lines = [f"{backend}: no case of {name} passed" for backend, name in sorted(expected - noted)]
    return lines + [f"{name}: none of its tests passed" for name in sorted(present - passed)]


def main(notes: Path, results: Path) -> str | None:
    """Return a text with everything missing, for ``sys.exit``, or None."""
    noted = {(backend, name) for backend, name in map(str.split, notes.read_text().splitlines())} if notes.exists() else set()
    expected, present = wanted(), files(Path(__file__).parent)
    lines = faults(noted, expected, passed_files(results), present)
    if lines:
        return "too little was executed:\n  " + "\n  ".join(lines)
    print(f"executed: {len(expected)} properties and operations of {', '.join(OPERATIONS)}, tests of {len(present)} files")
    return None


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
