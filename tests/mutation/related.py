"""Test files related to a module: those that import it, directly or through a helper, the most specific ones first."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

__all__ = ["related_tests"]

FOLDERS = ("unit", "correctness", "alignment")
LEAST_FILES, MOST_FILES = 3, 6
ALWAYS: dict[str, tuple[str, ...]] = {
    "numerics": ("correctness/test_numerics_compare.py", "correctness/test_verify.py", "correctness/test_verify_broken.py"),
    "problem": ("unit/test_problem.py", "unit/test_rules.py", "unit/test_key.py"),
    "selector": ("unit/test_session.py", "unit/test_tuning.py", "unit/test_pick.py"),
    "store": ("unit/test_store.py", "unit/test_store_machine.py"),
}
"""Tests of a package that use many of its modules without importing them. They run last, if there is room."""
BESIDES = {
    "numerics/expectation": ("correctness/test_bsr.py",),
    "numerics/buffers": ("correctness/test_numerics_operands.py",),
    "numerics/judging": ("correctness/test_numerics_compare.py", "correctness/test_conformance_values.py"),
    "numerics/quantized": ("correctness/test_numerics_drawing.py",),
    "numerics/routed": ("correctness/test_numerics_bounds.py", "correctness/test_experts.py", "correctness/test_grouped.py"),
    "numerics/scaling": ("correctness/test_numerics_quantized.py",),
    "numerics/width": ("correctness/test_numerics_probes.py", "correctness/test_numerics_quantized.py"),
    "numerics/operands": (
        "correctness/test_numerics_operands.py",
        "correctness/test_numerics_quantized.py",
        "correctness/test_numerics_drawing.py",
        "correctness/test_numerics_block_sparse.py",
    ),
    "numerics/probes": (
        "correctness/test_numerics_probes.py",
        "correctness/test_numerics_quantized.py",
        "correctness/test_numerics_block_sparse.py",
    ),
    "problem/constructors": ("unit/test_compositions.py", "unit/test_rules.py", "unit/test_sparsity.py"),
    "problem/contiguous": ("unit/test_compositions.py", "unit/test_rules.py", "unit/test_sparsity.py"),
    "problem/fields": ("unit/test_sum_problem.py", "unit/test_sparsity.py", "unit/test_rules.py"),
    "problem/forms": ("unit/test_rebuild.py", "unit/test_cli_shapes.py"),
    "problem/gradients": ("unit/test_rules.py", "correctness/test_autograd.py"),
    "problem/grouped_compositions": ("unit/test_compositions.py", "correctness/test_grouped.py"),
    "problem/operation": ("unit/test_rules.py",),
    "problem/rules": ("unit/test_rules.py", "unit/test_sparsity.py", "correctness/test_grouped.py"),
    "problem/scales": ("unit/test_rules.py", "unit/test_compositions.py"),
    "selector/candidates": ("unit/test_candidates.py", "unit/test_measure.py"),
    "selector/offers": ("unit/test_variants.py", "unit/test_candidates.py", "unit/test_minimize.py"),
    "selector/result": ("unit/test_candidates.py",),
    "selector/select": ("unit/test_limits.py", "unit/test_variants.py"),
    "selector/walls": ("judge/test_walls.py",),
    "selector/verify": ("correctness/test_verify.py", "correctness/test_verify_broken.py", "correctness/test_grouped.py"),
    "report/t4": ("unit/test_t4.py",),
    "store/database": ("unit/test_cli_stores.py",),
    "store/exchange": ("unit/test_foreign.py",),
}
"""Tests of single modules that import other ones."""
NEVER = ("_gpu", "test_cpp", "triton", "cutlass", "test_imports", "test_cuda", "must_list", "cross_compile", "test_architectures")
"""Parts of the names of test files that need a GPU, or mostly compile."""


def related_tests(root: Path, module: Path) -> list[Path]:
    """Return the test files for a module of the package (``module`` is relative to ``root``) in the order to run them."""
    name = ".".join(module.with_suffix("").parts)
    imports = {path: set(found) for path, found in _imports(root).items()}
    direct: list[Path] = []
    names, near = {name}, {name}
    while len(direct) < LEAST_FILES and near:  # next, tests that import a module which imports it, and so on
        found = [path for path, own in imports.items() if own & near and path not in direct]
        direct += sorted(found, key=lambda path: (_distance(path, module), len(imports[path]), path))
        near = {".".join(x.relative_to(root).with_suffix("").parts) for one in near for x in _users(root, one)} - names
        names |= near
    always = [root / "tests" / path for path in ALWAYS.get(module.parts[1], ()) if (root / "tests" / path).exists()]
    extra = [root / "tests" / path for path in BESIDES.get("/".join(module.with_suffix("").parts[1:]), ())]
    kept = list(dict.fromkeys([*extra, *direct]))[:MOST_FILES]
    return kept + [path for path in always if path not in kept][: max(2, MOST_FILES - len(kept))]


def _distance(test: Path, module: Path) -> int:
    """Return 0 for tests named after the module, 1 for tests named after its package, 2 for others."""
    return 0 if module.stem in test.stem else 1 if module.parts[1] in test.stem else 2


@functools.cache
def _imports(root: Path) -> dict[Path, frozenset[str]]:
    """Return the imported modules of the package for each test file."""
    helpers = {path.stem: path for folder in FOLDERS for path in (root / "tests" / folder).glob("*.py")}
    found: dict[Path, frozenset[str]] = {}
    for path in helpers.values():
        if path.name.startswith("test_") and not any(part in path.name for part in NEVER):
            own, names = _imported(path), set[str]()
            waiting, seen = [own], set[str]()
            while waiting:
                modules = waiting.pop()
                names |= {name for name in modules if name.startswith("gemmtune")}
                new = {name for name in modules if name in helpers and name not in seen}
                seen |= new
                waiting += [_imported(helpers[name]) for name in new]
            found[path] = frozenset(names)
    return found


@functools.cache
def _users(root: Path, name: str) -> tuple[Path, ...]:
    """Return the modules of the package that import ``name``."""
    return tuple(path for path in sorted((root / "gemmtune").rglob("*.py")) if name in _imported(path, root))


@functools.cache
def _imported(path: Path, root: Path | None = None) -> frozenset[str]:
    """Return the modules that a file imports, and the imported names, which may be modules too."""
    names: set[str] = set()
    package = path.relative_to(root).parent.parts if root else ()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(names)
