"""House rules read off the source: imports point downwards, nothing is circular, one module reads the environment."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gemmtune

ROOT = Path(gemmtune.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "version"),
    ("settings",),
    ("cache", "effort"),
    ("problem",),
    ("device",),
    ("numerics",),
    ("choice",),
    ("filters",),
    ("toolchain",),
    ("backends",),
    ("workers",),
    ("store",),
    ("timing",),
    ("selector",),
    ("dispatch",),
    ("ops",),
    ("architectures",),
    ("integration", "conformance"),
    ("perf_gate",),
    ("public",),
    ("",),  # gemmtune/__init__.py: the public surface
    ("cli", "__main__"),
)
"""Top-level modules and folders from the bottom up. Each may import those below it and what is within it."""

SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(ROOT.rglob("*.py"))
}
"""Module name below gemmtune (the package itself is the empty name) to its file."""

ENVIRONMENT_READERS = ("settings",)


def layer_of(module: str) -> int:
    top = module.split(".")[0]
    for i, names in enumerate(LAYERS):
        if top in names:
            return i
    raise LookupError(f"gemmtune.{module} is in no layer; add its folder to LAYERS in {__file__}")


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(), filename=str(SOURCES[module]))


def our_imports(module: str, root: ast.AST) -> Iterator[tuple[str, int]]:
    """(module below gemmtune, line) of everything of ours that is imported under ``root``, typing-only imports left out."""
    package = module.split(".") if SOURCES[module].name == "__init__.py" else module.split(".")[:-1]
    package = [p for p in package if p]
    for node in walk_without_typing(root):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "gemmtune":
                    yield alias.name.removeprefix("gemmtune").lstrip("."), node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
            elif (node.module or "").split(".")[0] == "gemmtune":
                base = []
            else:
                continue
            name = (node.module or "").removeprefix("gemmtune").lstrip(".") if not node.level else node.module or ""
            target = ".".join([*base, *([name] if name else [])])
            for alias in node.names:
                submodule = f"{target}.{alias.name}".lstrip(".")
                yield (submodule if submodule in SOURCES else target), node.lineno


def walk_without_typing(root: ast.AST) -> Iterator[ast.AST]:
    """ast.walk, skipping the bodies of ``if TYPE_CHECKING:``, which never run."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


@pytest.mark.parametrize("module", SOURCES, ids=lambda m: m or "gemmtune")
def test_imports_point_downwards(module: str) -> None:
    for target, line in our_imports(module, tree_of(module)):
        same_part = target.split(".")[0] == module.split(".")[0]
        assert same_part or layer_of(target) < layer_of(module), (
            f"{SOURCES[module]}:{line}: gemmtune.{module} imports gemmtune.{target}, which is not below it"
        )


def test_no_import_is_circular() -> None:
    graph = {m: {t for t, _ in our_imports(m, tree_of(m)) if t in SOURCES and t != m} for m in SOURCES}
    # A package's __init__ that re-exports its own modules is not a circle: those modules import each other by name.
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"circular import: {' -> '.join((*path[path.index(module) :], module))}"
        if module in done:
            return
        for target in sorted(graph[module]):
            visit(target, (*path, module))
        done.add(module)

    for module in SOURCES:
        visit(module, ())


@pytest.mark.parametrize("module", SOURCES, ids=lambda m: m or "gemmtune")
def test_our_own_modules_are_imported_at_the_top(module: str) -> None:
    for function in ast.walk(tree_of(module)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for target, line in our_imports(module, function):
                pytest.fail(f"{SOURCES[module]}:{line}: gemmtune.{target} is imported inside of a function")


@pytest.mark.parametrize("module", SOURCES, ids=lambda m: m or "gemmtune")
def test_only_settings_reads_the_environment(module: str) -> None:
    if module in ENVIRONMENT_READERS:
        return
    for node in ast.walk(tree_of(module)):
        assert not (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb", "putenv")), (
            f"{SOURCES[module]}:{node.lineno}: reads the environment; settings.py does that"
        )
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            assert not names & {"environ", "environb", "getenv", "getenvb", "putenv"}, f"{SOURCES[module]}:{node.lineno}"


@pytest.mark.parametrize("module", SOURCES, ids=lambda m: m or "gemmtune")
def test_no_exception_is_swallowed_whole(module: str) -> None:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{SOURCES[module]}:{node.lineno}: bare except"
            only_passes = all(isinstance(statement, ast.Pass) for statement in node.body)
            wide = ast.unparse(node.type) in ("Exception", "BaseException")
            assert not (only_passes and wide), f"{SOURCES[module]}:{node.lineno}: swallows every exception"


def test_the_package_imports_no_heavy_toolchain_and_touches_no_gpu() -> None:
    program = (
        "import sys, torch\n"
        "by_torch = set(sys.modules)\n"
        "import gemmtune\n"
        "heavy = ('triton', 'nvmath', 'cuda', 'cutlass_library', 'torch.utils.cpp_extension', 'torch._inductor', 'torch._dynamo')\n"
        "print([name for name in heavy if name in set(sys.modules) - by_torch], torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[] False"


class TestTheChecksThemselves:
    """A check that cannot fail proves nothing: the helpers on sources made up for it."""

    @pytest.fixture(autouse=True)
    def _sources(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(SOURCES, "selector.made_up", ROOT / "selector" / "made_up.py")

    def imports(self, source: str) -> set[str]:
        return {target for target, _ in our_imports("selector.made_up", ast.parse(source))}

    def test_relative_and_absolute_imports(self) -> None:
        assert self.imports("from ..problem import Problem") == {"problem"}
        assert self.imports("from ..problem.layout import Layout") == {"problem.layout"}
        assert self.imports("from .. import settings") == {"settings"}
        assert self.imports("from . import pick as picks") == {"selector.pick"}
        assert self.imports("from .persistence.store import Store") == {"selector.persistence.store"}
        assert self.imports("import gemmtune.ops\nfrom gemmtune.ops import dense\nfrom gemmtune import cli") <= {
            "ops",
            "ops.dense",
            "cli",
            "",
        }
        assert self.imports("import torch\nfrom os import path") == set()

    def test_typing_only_imports_do_not_count(self) -> None:
        assert self.imports("if TYPE_CHECKING:\n    from ..ops import dense\nelse:\n    from ..errors import X") == {"errors"}

    def test_an_unknown_folder_is_an_error(self) -> None:
        with pytest.raises(LookupError, match="add its folder to LAYERS"):
            layer_of("nowhere.x")
