"""Table ``[tool.gemmtune]`` of a project's pyproject.toml."""

import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SettingsError
from .warning import warn

FILE = "pyproject.toml"
TABLE = "[tool.gemmtune]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectTable:
    """Settings of a file. ``path`` is None where no file has any."""

    path: Path | None = None
    values: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Folder of the file, to which its paths are relative."""
        return Path() if self.path is None else self.path.parent

    @property
    def source(self) -> str:
        """Text that names the table."""
        return f"{self.path} {TABLE}"


def find_table() -> ProjectTable:
    """Return the table of the nearest pyproject.toml that has one, in the working folder or above it.

    A file that another user can change is ignored with a warning: settings name code that runs. Raises SettingsError if the file is
    not TOML, or its table is none.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the working folder was removed
        return ProjectTable(values={})
    for folder in (here, *here.parents):
        path = folder / FILE
        values = _table_of(path)
        if values is not None:
            return ProjectTable(path=path, values=values)
    return ProjectTable(values={})


def _table_of(path: Path) -> Mapping[str, Any] | None:
    """Return the table of a file, or None if the file is missing, has none, or cannot be trusted."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would have to be waited for
            return None
        data = path.read_bytes()
    except OSError:
        return None
    if b"gemmtune" not in data:  # parsing costs milliseconds
        return None
    try:
        tool = tomllib.loads(data.decode()).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        if TABLE.encode() not in data:
            return None
        raise SettingsError(f"{path}: got text that is not TOML ({error}), expected a table {TABLE}") from None
    if not isinstance(tool, dict) or "gemmtune" not in tool:
        return None
    if not isinstance(tool["gemmtune"], dict):
        raise SettingsError(f"{path}: tool.gemmtune: got {tool['gemmtune']!r}, expected a table of settings")
    if status.st_uid not in (os.getuid(), 0) or stat.S_IMODE(status.st_mode) & 0o022:
        warn(
            f"{path}: {TABLE} is ignored, because others than you can change the file (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}) and settings name code that runs; chown it and chmod go-w it, or set GEMMTUNE_* "
            "variables"
        )
        return None
    return tool["gemmtune"]
