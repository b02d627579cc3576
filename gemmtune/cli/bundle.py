"""``gemmtune bundle``: store, kernels and the native look-up of this machine, packed for an image of the same versions."""

import contextlib
import gzip
import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import click
import torch

from .. import settings
from ..cache import announce, folder_of, kernel_files
from ..device import MIB
from ..errors import GemmtuneError, SettingsError
from ..native import build
from ..replacing import replacing
from ..settings import Settings
from ..store.store import Store
from ..toolchain.triton_artifacts import FOLDER as TRITON
from ..toolchain.triton_kernels import keep_driver_module
from .files import STDOUT
from .output import write_json

ARCHIVES = (".tar.gz", ".tgz")
OTHER_ARCHIVES = (".zip", ".tar", ".gz", ".xz", ".bz2", ".zst", ".7z")
STORE = "store.sqlite"
COMPRESSION = 6


def bundle(output: str, json_file: str | None) -> None:
    """Pack what the cache folder and the store have into an archive, or into a folder that is new or empty."""
    chosen, target = settings.current(), Path(output)
    place = folder_of(chosen)
    if place.lost:
        raise SettingsError(place.problem)
    if place.problem:
        announce(place, chosen)
    if not output.endswith(ARCHIVES) and os.path.exists(target) and (not os.path.isdir(target) or any(target.iterdir())):
        raise click.ClickException(f"--output: got {output}, expected a new or empty folder, or a name that ends with .tar.gz")
    if not output.endswith(ARCHIVES) and target.suffix in OTHER_ARCHIVES:
        raise click.ClickException(f"--output: got {output}, expected a name that ends with .tar.gz, or a folder")
    missing = _native_missing(chosen)
    if torch.cuda.is_available() and place.folder.joinpath(*TRITON).exists():
        keep_driver_module(place.folder)
    with tempfile.TemporaryDirectory() as folder:
        files = dict(kernel_files(place.folder))
        rows = _copied_store(chosen, Path(folder, STORE))
        if rows is not None:
            files[STORE] = Path(folder, STORE)
        mib = sum(path.stat().st_size for path in files.values()) / MIB
        try:
            _write(files, target, archive=output.endswith(ARCHIVES))
        except OSError as error:
            raise click.ClickException(f"--output: cannot write {output}: {error.strerror}") from error
    data = {"output": output, "files": len(files), "mib": round(mib, 1), "rows": rows, "native_lookup": missing is None}
    if json_file != STDOUT:
        click.echo(
            f"{output}: {data['files']} files, {data['mib']} MiB; {'no store' if rows is None else f'{rows} rows of the store'}"
        )
        if missing is not None:
            click.echo(f"without the C++ look-up: {missing}")
    write_json(json_file, data)


def _native_missing(chosen: Settings) -> str | None:
    """Build the native look-up if it is missing. Return why it is not packed, None if it is."""
    if not chosen.native:
        return "the setting native is off"
    try:
        build.make()
    except GemmtuneError as error:
        return str(error)
    return None


def _copied_store(chosen: Settings, path: Path) -> int | None:
    """Copy the store to a file that readers need not write to, and return the number of its rows. None if there is no store."""
    if not chosen.store_file.exists():
        return None
    with contextlib.closing(Store.open(path)) as store:
        rows = store.merge(chosen.store_file).total
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return rows


def _write(files: Mapping[str, Path], target: Path, *, archive: bool) -> None:
    """Write the files for everyone to read and for their owner alone to change. An archive is complete or not there at all."""
    if archive:
        with replacing(target) as new:
            _write_archive(files, new)
        return
    for name in ("", *_folders(files)):
        (target / name).mkdir(exist_ok=True, parents=True)
        (target / name).chmod(0o755)
    for name, path in files.items():
        shutil.copyfile(path, target / name)
        (target / name).chmod(0o644)


def _write_archive(files: Mapping[str, Path], path: Path) -> None:
    """Write an archive whose bytes depend on the files alone. They belong to root where root unpacks them."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="", compresslevel=COMPRESSION) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        for name in _folders(files):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            made.addfile(entry)
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o644, files[name].stat().st_size
            with files[name].open("rb") as content:
                made.addfile(entry, content)


def _folders(files: Iterable[str]) -> list[str]:
    """Return the folders of the files, each after the one above it."""
    return sorted({str(parent) for name in files for parent in PurePosixPath(name).parents if str(parent) != "."})
