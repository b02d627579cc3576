"""Kernels that one node of a cluster compiles for the GPUs of others: compiled files by their names below a cache folder."""

import contextlib
import dataclasses
import getpass
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ..cache import kernel_files, make_private
from ..device import DeviceInfo
from ..effort import EFFORT
from ..errors import UnavailableError
from ..problem import Problem
from ..selector.crossover import sampled_rows, spread
from ..selector.precompile import precompile
from ..selector.trials import tried_offers
from ..settings import Settings, use
from .job import Job

Kernels = Mapping[str, bytes]
"""Contents of compiled files, by their names below the cache folder."""
PREFIX = "gemmtune-fleet-"
"""Beginning of the names of temporary folders of a fleet."""
KEPT_S = 7 * 24 * 3600.0
"""Age at which a temporary folder that a killed process has left is removed."""


def compiled_for(job: Job, device: DeviceInfo, settings: Settings, run: str) -> Kernels:
    """Compile what a job needs for a device that this machine may lack. Return the files that this call has made.

    They lie in a temporary folder of the ``run``, so that a later job compiles only what is new. A kernel that cannot be compiled
    here is left to the device's own machine.
    """
    folder = Path(tempfile.gettempdir(), f"{PREFIX}{getpass.getuser()}-{run}")
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):  # what fleets of this user have left long ago
        with contextlib.suppress(OSError):
            status = old.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > KEPT_S:
                shutil.rmtree(old, ignore_errors=True)
    with use(dataclasses.replace(settings, cache_dir=str(folder))) as here:
        assert here is not None
        make_private(folder)
        before = {name for name, _ in kernel_files(folder)}
        offers = [tried_offers(problem, device, here, on_this_machine=False) for problem in tuned_problems(job, here)]
        precompile([c for each in offers for c in each.choices if c.compile_key and c.obstacle is None], here)
        return {name: path.read_bytes() for name, path in kernel_files(folder) if name not in before}


def tuned_problems(job: Job, settings: Settings) -> list[Problem]:
    """Return the problems of a job at which all choices compete."""
    if job.rows is None:
        return [job.problem]
    rows_class = job.rows_class
    sampled = sampled_rows(job.rows, rows_class.has)
    narrow = rows_class.at(sampled[0]).widens_b
    return [rows_class.at(m) for m in spread(sampled, EFFORT[settings.search].rows_apart, narrow)]


def unpack(kernels: Kernels, settings: Settings) -> int:
    """Write new compiled files into the cache folder and return their number. Raises UnavailableError for a name outside."""
    new = 0
    for name, content in kernels.items():
        parts = PurePosixPath(name).parts
        if not parts or any(part in ("..", "/") or not re.fullmatch(r"[\w.,+=@-]+", part) for part in parts):
            raise UnavailableError(f"kernels: got the file name {name!r}, expected one below the cache folder")
        path = settings.folder.joinpath(*parts)
        if path.exists():
            continue
        make_private(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix="tmp", delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
        new += 1
    return new
