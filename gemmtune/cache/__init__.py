"""Cache folder of compiled kernels, locks and the store.

Files are looked up in the folder of the settings. New files go there too, or to a temporary folder of this user where it is
read-only. A folder that other users could change, or that code cannot be loaded from, is not used at all, with one warning.
"""

import contextlib
import functools
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import UnavailableError
from ..settings import Settings, current
from ..warning import warn
from .ownership import trusted_file, why_not_trusted

REMEDY = "set cache_dir (GEMMTUNE_CACHE_DIR) to a folder of yours on a file system that allows execution"

NOT_KERNELS = ("hypothesis", "limits", "locks", "trials")
"""Folders of the cache that no call reads."""

_warned: set[Path] = set()
_refused: set[tuple[int, ...]] = set()
"""Files that this process could not load, by ``_identity``. A file that replaces one of them is another file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder of compiled files and what it can be used for.

    ``problem`` is the reason why new files do not go there; empty if they do. ``lost`` is True if its own files are not used
    either, and ``untrusted`` if that is because other users could change them.
    """

    folder: Path
    problem: str = ""
    lost: bool = False
    untrusted: bool = False

    @property
    def advice(self) -> str:
        """The problem and its remedy."""
        return f"{self.problem}; {REMEDY}"


def cached(*parts: str) -> Path:
    """Return the path of a file of the cache, or the place where it is to be made, with its folders."""
    *folders, name = parts
    place = folder_of(current(), *folders)
    if place.lost:
        announce(place, current())
    if not place.problem or (not place.lost and present(place.folder / name)):
        return place.folder / name
    own = _own_folder(tuple(folders))
    return (own or place.folder) / name


def cache_dir(*parts: str, quietly: bool = False, settings: Settings | None = None) -> Path:
    """Return a folder for new files below the cache folder, or below a temporary one. It is made if missing.

    Warn once of a temporary folder, unless the files are to be used ``quietly``: they are no kernels. Raises UnavailableError if no
    folder of this machine can be used.
    """
    settings = settings or current()
    place = folder_of(settings, *parts)
    if not place.problem:
        make_private(place.folder)  # it may have been removed
        return place.folder
    if not quietly:
        announce(place, settings)
    own = _own_folder(parts)
    if own is None:
        raise UnavailableError(why_nothing_new(*parts) or "")
    return own


def why_nothing_new(*parts: str) -> str | None:
    """Return why no compiled file can be added below the cache folder, with a remedy; None if one can."""
    place = folder_of(current(), *parts)
    if not place.problem or _own_folder(parts) is not None:
        return None
    return f"{place.problem}, and no temporary folder can be used instead: {REMEDY}"


def present(path: Path) -> bool:
    """Return True if the file can be used: it exists, nobody else can change it, and it was not refused."""
    status = trusted_file(path)
    return status is not None and _identity(status) not in _refused


def refuse(path: Path) -> None:
    """Treat a file that cannot be loaded as missing, so that it is made anew."""
    with contextlib.suppress(OSError):
        _refused.add(_identity(path.stat()))


def folder_of(settings: Settings, *parts: str) -> Place:
    """Return the folder of the settings, or one below it, and what it can be used for."""
    return _place(settings.folder, parts, os.geteuid())


def announce(place: Place, settings: Settings) -> None:
    """Warn once that the folder of the settings is not used, or not for new files."""
    if settings.folder not in _warned:
        _warned.add(settings.folder)
        own = _own_folder(())
        instead = "no kernel can be compiled" if own is None else f"new compiled kernels go to {own} for now"
        warn(f"{place.problem}; {instead}. Otherwise {REMEDY}.")


def kernel_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names below a cache folder, and the paths, of all its compiled files."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        below = Path(parent).relative_to(folder)
        folders[:] = [x for x in folders if not x.startswith("tmp") and not (Path(parent) == folder and x in NOT_KERNELS)]
        for name in names if Path(parent) != folder else ():
            path = Path(parent, name)
            if path.suffix != ".lock" and present(path):
                yield (below / name).as_posix(), path


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents for this user alone. An existing folder stays unchanged."""
    if not folder.exists():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def write_once(path: Path, text: str) -> None:
    """Write a file in one step, with its folder, unless it has this text already."""
    if not present(path) or path.read_bytes() != text.encode():
        make_private(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            new.write_text(text, encoding="utf-8")
            new.chmod(0o644)
            new.replace(path)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@functools.cache
def _place(folder: Path, parts: tuple[str, ...], user: int) -> Place:  # noqa: ARG001 - another user has other rights
    path, missing = folder.joinpath(*parts), ""
    distrust = why_not_trusted(folder) if os.path.isdir(folder) else None  # of a sticky one, folders below could be trusted
    try:
        if distrust is None:
            make_private(path)
    except OSError as error:
        missing = str(error)
    real = Path(os.path.realpath(path if distrust is None else folder))
    got = f"cache_dir: got {folder}"
    if not os.path.isdir(real):  # False if it cannot be reached
        return Place(folder=real, problem=f"{got}, expected a writable folder ({missing or f'{real} is a file'})")
    if distrust is not None or (distrust := why_not_trusted(real)) is not None:
        expected = "expected a folder that only this user and root can change, because kernels are loaded from it"
        return Place(folder=real, problem=f"{got}, which is not used, {expected}: {distrust}", lost=True, untrusted=True)
    if os.statvfs(real).f_flag & os.ST_NOEXEC:
        expected = "expected a file system that kernels can be loaded from"
        return Place(folder=real, problem=f"{got}, {expected}: it is mounted noexec", lost=True)
    if not os.access(real, os.R_OK | os.X_OK):
        return Place(folder=real, problem=f"{got}, expected a folder that this user can read", lost=True)
    writable = os.access(real, os.W_OK)
    return Place(folder=real, problem="" if writable else f"{got}, expected a writable folder (it is read-only)")


def _own_folder(parts: tuple[str, ...]) -> Path | None:
    """Return a folder below this user's temporary folder, made if missing; None if there is none that can be used."""
    with contextlib.suppress(OSError):
        root = _own_root(Path(tempfile.gettempdir()), os.geteuid())
        if root is not None:
            make_private(root.joinpath(*parts))
            return root.joinpath(*parts)
    return None


def _own_root(above: Path, user: int) -> Path | None:
    """Return a folder below ``above`` that all processes of this user find, whatever other users put there first."""
    usual = above / f"gemmtune-{user}"
    if why_not_trusted(above / "new") is not None or os.statvfs(above).f_flag & os.ST_NOEXEC:
        return None
    with contextlib.suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    for folder in (usual, *sorted(above.glob(f"{usual.name}-*"))):
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == user and not status.st_mode & 0o077:
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=above))
