"""Scripts and tests that only run with a GPU name parts of the package that exist."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/*/*_gpu.py"), *ROOT.glob("tests/perf/*.py"))


def missing(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gemmtune":
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name) and not is_module(f"{node.module}.{name}"):
                    yield f"{source.relative_to(ROOT)}: {node.module}.{name}"


def is_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def test_scripts_for_a_gpu_import_names_that_exist() -> None:
    assert len(SOURCES) > 60
    assert not [found for source in SOURCES for found in missing(source)]
