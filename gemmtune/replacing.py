"""Files that a user names for output, written completely or not at all, and never in the place of a store."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SQLITE = b"SQLite format 3\0"
"""First bytes of a store."""


def is_store(path: Path | str) -> bool:
    """Return True for a regular file that begins as SQLite's do."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False  # writing it says why


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a new file's path, which takes the place of ``path`` when the block ends without an error.

    A link stays, and its target is replaced. A device, a pipe or a folder is yielded itself: root could replace a device by a file.
    Raises OSError, FileExistsError for a store among them.
    """
    if is_store(path):
        raise FileExistsError(errno.EEXIST, "a store, whose measurements would be lost; name another file", str(path))
    if os.path.exists(path) and not os.path.isfile(path):
        yield Path(path)
        return
    target = Path(os.path.realpath(path))
    new = target.with_name(f"{target.name}.new-{os.getpid()}")
    try:
        yield new
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    """Write a text file in UTF-8 as ``replacing`` does. Raises OSError, which names ``path``."""
    try:
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = str(path)
        raise
