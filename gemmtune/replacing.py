"""Files that a user names for output, written completely or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a new file's path, which takes the place of ``path`` when the block ends without an error.

    A link stays, and its target is replaced. A device, a pipe or a folder is yielded itself: root could replace a device by a file.
    Raises OSError.
    """
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
