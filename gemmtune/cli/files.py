"""Files that commands write: checked before any work, and never a store or a file that the command reads."""

import os
import re
from collections.abc import Iterator
from typing import Any

import click

from ..replacing import is_store

STDOUT = "-"


class OutputFile(click.Path):
    """File, or with ``folders`` also a folder, that a command writes. Only with ``stdout`` ``-`` is standard output."""

    def __init__(self, *, stdout: bool = False, folders: bool = False) -> None:
        super().__init__()
        self._stdout, self._folders = stdout, folders

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reject a path at once that would fail after minutes of measuring."""
        if value == STDOUT:
            return value if self._stdout else self.fail("got '-', which is not possible here; expected a file", param, ctx)
        or_stdout = ", or - for standard output" if self._stdout else ""
        if os.path.isdir(value) and not self._folders:
            self.fail(f"got {value!r}, which is a folder; expected a file to write{or_stdout}", param, ctx)
        parent = os.path.dirname(value) or "."
        if not os.path.isdir(parent) and not self._folders:
            self.fail(f"got {value!r}, but the folder {parent!r} does not exist; make it, or name another", param, ctx)
        return super().convert(value, param, ctx)


def refuse_overwriting(context: click.Context) -> None:
    """Raise click.UsageError for an output that is a store, another output, or an argument that the command reads."""
    outputs: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for parameter in context.command.params:
        if isinstance(parameter.type, click.Choice):
            continue  # a word of a list, such as a format, names no file
        value = context.params.get(parameter.name or "")
        known = outputs if isinstance(parameter.type, OutputFile) else others
        known[parameter.opts[0] if isinstance(parameter, click.Option) else (parameter.name or "").upper()] = value
    read = {real: name for name, value in others.items() for real in _places(value)}
    for name, value in outputs.items():
        if value in (None, STDOUT) or (os.path.exists(value) and not os.path.isfile(value)):
            continue
        real = _real(value)
        if real in read:
            raise click.UsageError(f"{name}: got {value}, expected another file than {read[real]}, which would be overwritten")
        if is_store(real):
            raise click.UsageError(f"{name}: got {value}, a store, expected another file: its measurements would be lost")
        read[real] = name


def _places(value: Any) -> Iterator[str]:
    """Yield the files that a value may name: one for a text, and for MODULE:NAME those of the module in the working folder."""
    for text in value if isinstance(value, tuple | list) else (value,):
        if isinstance(text, str) and text not in ("", STDOUT):
            yield from {_real(text), _real(text.rpartition(":")[0] or text)}
            module = text.partition(":")[0]
            if re.fullmatch(r"[\w.]+", module):
                yield from (_real(module.replace(".", "/") + end) for end in (".py", "/__init__.py"))


def _real(text: str) -> str:
    return os.path.realpath(text) if "\0" not in text else text
