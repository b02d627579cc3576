"""House rules read off the source: imports point downwards, nothing is circular, one module reads the environment."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import gemmtune

ROOT = Path(gemmtune.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "version", "foreign", "regex", "warning", "bounded"),
    ("page",),
    ("setting_types", "operand_kinds", "replacing", "forks", "interrupts", "project_file", "threads", "blocks"),
    ("settings",),
    ("cache", "effort"),
    ("passes",),
    ("problem",),
    ("device",),
    ("numerics",),
    ("choice",),
    ("declaration",),
    ("filters",),
    ("toolchain",),
    ("backends",),
    ("workers",),
    ("native",),
    ("store",),
    ("timing",),
    ("untrusted",),
    ("selector",),
    ("dispatch",),
    ("operators",),
    ("quantized",),
    ("ops",),
    ("sparse",),
    ("fleet",),
    ("tuning", "architectures"),
    ("integration", "conformance"),
    ("perf_gate", "judging"),
    ("report",),
    ("",),  # gemmtune/__init__.py: the public surface
    ("cli",),
    ("__main__",),
)
"""Top-level modules and folders from the bottom up. Each may import those below it and what is within it."""

SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(ROOT.rglob("*.py"))
}
"""Module name below gemmtune (the package itself is the empty name) to its file."""

ENVIRONMENT_READERS = (
    "settings",
    *(f"untrusted.gemm_process.{name}" for name in ("program", "first", "places")),
)  # run without gemmtune


def layer_of(module: str) -> int:
    top = module.split(".")[0]
    for i, names in enumerate(LAYERS):
        if top in names:
            return i
    raise LookupError(f"gemmtune.{module} is in no layer; add its folder to LAYERS in {__file__}")


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(), filename=str(SOURCES[module]))


@functools.cache
def nodes_of(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(module)))


@functools.cache
def all_imports(module: str) -> tuple[tuple[str, int], ...]:
    return tuple(our_imports(module, nodes_of(module)))


def our_imports(module: str, nodes: Iterable[ast.AST], *, by_name: bool = True) -> Iterator[tuple[str, int]]:
    """(module below gemmtune, line) of everything of ours that these nodes import, be it for its types alone."""
    package = module.split(".") if SOURCES[module].name == "__init__.py" else module.split(".")[:-1]
    package = [p for p in package if p]
    for node in nodes:
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
        elif by_name and isinstance(node, ast.Call) and (name := imported_by_name(module, node)) is not None:
            yield name, node.lineno


def imported_by_name(module: str, call: ast.Call) -> str | None:
    """Return the module of ours that ``import_module("gemmtune.x")`` or ``import_module(".x", __package__)`` names, or None."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
    name = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if function not in ("import_module", "__import__") or not isinstance(name, str):
        return None
    if name.startswith("."):
        package = [part for part in module.split(".") if part]
        package = package if SOURCES[module].name == "__init__.py" else package[:-1]
        level = len(name) - len(name.lstrip(".")) - 1
        return ".".join([*package[: len(package) - level], name.lstrip(".")])
    return name.removeprefix("gemmtune").lstrip(".") if name.split(".")[0] == "gemmtune" else None


def cycles(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Every circle that a walk along the edges comes upon, as a text."""
    found: list[str] = []
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            found.append(" -> ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    return found


def everywhere(check: Callable[[str], Iterator[str]]) -> None:
    """Fails with every line that ``check`` has to say of any module."""
    offenders = [line for module in SOURCES for line in check(module)]
    assert not offenders, "\n" + "\n".join(offenders)


ROOMS = (
    "option_table",
    "cases",
    "gemms",
    "diagnose",
    "bench",
    "properties",
    "options",
    "runs",
    "report",
    "suite",
)
"""The rooms of the conformance suite from the bottom up, but for its plugin and what it exports."""


def test_rooms_of_the_suite_import_those_below_them() -> None:
    for module in SOURCES:
        room = module.split(".")[1] if module.startswith("conformance.") else ""
        for target, line in all_imports(module) if room in ROOMS else ():
            other = target.split(".")[1] if target.startswith("conformance.") else room
            assert ROOMS.index(other) <= ROOMS.index(room), f"{SOURCES[module]}:{line}: {room} imports {other}, which is above it"


def test_imports_point_downwards() -> None:
    def check(module: str) -> Iterator[str]:
        for target, line in all_imports(module):
            if target.split(".")[0] != module.split(".")[0] and layer_of(target) >= layer_of(module):
                yield f"{SOURCES[module]}:{line}: gemmtune.{module} imports gemmtune.{target}, which is not below it"

    everywhere(check)


def test_no_import_is_circular() -> None:
    # A package's __init__ that re-exports its own modules is not a circle: those modules import each other by name.
    graph = {m: {t for t, _ in all_imports(m) if t in SOURCES and t != m} for m in SOURCES}
    assert not cycles(graph)


def test_our_own_modules_are_imported_at_the_top() -> None:
    def check(module: str) -> Iterator[str]:
        for function in nodes_of(module):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for target, line in our_imports(module, ast.walk(function), by_name=False):  # those by name are late on purpose
                    yield f"{SOURCES[module]}:{line}: gemmtune.{target} is imported inside of a function"

    everywhere(check)


def test_only_settings_reads_the_environment() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}

    def check(module: str) -> Iterator[str]:
        for node in nodes_of(module) if module not in ENVIRONMENT_READERS else ():
            by_name = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}
            if by_name or (isinstance(node, ast.Attribute) and node.attr in names):
                yield f"{SOURCES[module]}:{node.lineno}: reads the environment; settings.py does that"

    everywhere(check)


def test_no_text_names_a_file_that_is_not_installed() -> None:
    """A message may name only what a user of the wheel has. Docstrings of code speak to readers of the repository."""

    def check(module: str) -> Iterator[str]:
        bare = {id(node.value) for node in nodes_of(module) if isinstance(node, ast.Expr)}
        if re.fullmatch(r"cli\.\w*commands", module):  # whose docstrings are printed as help
            bare -= {id(getattr(node.body[0], "value", None)) for node in tree_of(module).body if isinstance(node, ast.FunctionDef)}
        for node in nodes_of(module):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if id(node) not in bare and re.search(
                r"\b(docs|tests|examples|benchmarks)/\w+\.\w+|\b[A-Z]{3,}\.md\b|\b\w+\.md\b", text
            ):
                yield f"{SOURCES[module]}:{node.lineno}: names a file that the wheel lacks: {text[:80]!r}"

    everywhere(check)


def test_no_exception_is_swallowed_whole() -> None:
    def check(module: str) -> Iterator[str]:
        for node in nodes_of(module):
            if isinstance(node, ast.ExceptHandler):
                only_passes = all(isinstance(statement, ast.Pass) for statement in node.body)
                if node.type is None:
                    yield f"{SOURCES[module]}:{node.lineno}: bare except"
                elif only_passes and ast.unparse(node.type) in ("Exception", "BaseException"):
                    yield f"{SOURCES[module]}:{node.lineno}: swallows every exception"

    everywhere(check)


def test_the_package_imports_torch_at_the_first_use_of_a_name_and_no_heavy_toolchain() -> None:
    program = (
        "import sys, gemmtune\n"
        "print('torch' in sys.modules)\n"
        "import torch\n"
        "by_torch = set(sys.modules)\n"
        "gemmtune.Layout\n"
        "print(*(str(getattr(torch.ops.gemmtune, name).default) for name in ('mm', 'bsr_mm')))\n"
        "heavy = ('triton', 'nvmath', 'cuda', 'cutlass_library', 'torch.utils.cpp_extension', 'torch._inductor', 'torch._dynamo')\n"
        "print([name for name in heavy if name in set(sys.modules) - by_torch], torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["False", "gemmtune.mm.default gemmtune.bsr_mm.default", "[] False"]


class TestTheChecksThemselves:
    """A check that cannot fail proves nothing: the helpers on sources made up for it."""

    @pytest.fixture(autouse=True)
    def _sources(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(SOURCES, "selector.made_up", ROOT / "selector" / "made_up.py")

    def imports(self, source: str) -> set[str]:
        return {target for target, _ in our_imports("selector.made_up", ast.walk(ast.parse(source)))}

    def test_relative_and_absolute_imports(self) -> None:
        assert self.imports("from ..problem import Problem") == {"problem"}
        assert self.imports("from ..problem.layout import Layout") == {"problem.layout"}
        assert self.imports("from .. import settings") == {"settings"}
        assert self.imports("from . import pick as picks") == {"selector.pick"}
        assert self.imports("from .persistence.store import Store") == {"selector.persistence.store"}
        assert self.imports("import gemmtune.ops\nfrom gemmtune.ops import autograd\nfrom gemmtune import cli") <= {
            "ops",
            "ops.autograd",
            "cli",
            "",
        }
        assert self.imports("import torch\nfrom os import path") == set()

    def test_imports_by_a_name_in_a_string(self) -> None:
        assert self.imports('import_module("gemmtune.ops.autograd")\nimportlib.import_module("torch")') == {"ops.autograd"}
        assert self.imports('importlib.import_module(".pick", __package__)\nimport_module(name)') == {"selector.pick"}

    def test_imports_for_types_alone_count(self) -> None:
        assert self.imports("if TYPE_CHECKING:\n    from ..ops import autograd\nelse:\n    from ..errors import X") == {
            "ops.autograd",
            "errors",
        }

    def test_a_circle_is_told_module_by_module(self) -> None:
        assert cycles({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b -> c -> b"]
        assert cycles({"a": ["b", "c"], "b": ["c"], "c": []}) == []

    def test_every_offender_is_told(self) -> None:
        with pytest.raises(AssertionError, match=r"one of problem\n(.|\n)*one of settings"):
            everywhere(lambda module: iter([f"one of {module}"] if module in ("problem", "settings") else []))

    def test_an_unknown_folder_is_an_error(self) -> None:
        with pytest.raises(LookupError, match="add its folder to LAYERS"):
            layer_of("nowhere.x")
