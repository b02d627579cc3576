"""Shell completion of lists of words, and of MODULE:NAME from files alone, importing only what finds modules."""

import ast
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

BACKENDS = Path(__file__).parents[1] / "conformance" / "gemms" / "backends.py"
"""Source of our backends, which are named like ``backend:triton``."""
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
Legal = Collection[str] | Callable[[], Collection[str]]
"""Words, or a function that returns them because their import takes long."""


def complete_of(words: Legal, *, several: bool = False) -> Complete:
    """Return the completion of a word of a list, or with ``several`` of the last of words that are joined by commas."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001 - click's
        *before, last = incomplete.split(",") if several else [incomplete]
        given = "".join(f"{word}," for word in before)
        known = words() if callable(words) else words
        return [CompletionItem(given + word) for word in known if word.startswith(last) and word not in before]

    return complete


def complete_gemm(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001 - click's
    """Return modules here and installed, and ``backend:`` for our backends, or after the colon a module's public names."""
    module, colon, name = incomplete.partition(":")
    if colon:
        path = BACKENDS if module == "backend" else _file_of(module)
        names = _public_names(path) if path is not None else []
        return [CompletionItem(f"{module}:{found}") for found in names if found.startswith(name)]
    found = ["backend:"] if "backend".startswith(module) else []
    return [CompletionItem(word) for word in [*found, *sorted(_modules(module))]]


def _modules(start: str) -> Iterator[str]:
    """Yield full names of packages and modules that begin with ``start``, one level deep."""
    package, dot, last = start.rpartition(".")
    folders = [str(path.parent) for path in [_file_of(package)] if path is not None] if dot else [os.getcwd(), *sys.path]
    for module in pkgutil.iter_modules(folders):
        if module.name.startswith(last) and not module.name.startswith("_"):
            yield f"{package}{dot}{module.name}"


def _file_of(module: str) -> Path | None:
    """Return the source of a module, as an import from the working folder would find it, or None."""
    parts = Path(*module.split("."))
    for folder in map(Path, (os.getcwd(), *sys.path)):
        for path in (folder / parts / "__init__.py", folder / parts.with_suffix(".py")):
            if path.is_file():
                return path
    return None


def _public_names(path: Path) -> list[str]:
    """Return the names defined at the top of a file, in order: functions, and objects in lower case."""
    found: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]
    return [name for name in dict.fromkeys(found) if name.islower() and not name.startswith("_")]
