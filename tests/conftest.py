"""What every test starts from: a cache folder of the run's own, so that no test reads or writes the user's, and Ctrl-C at work."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmtune import settings

_made_here = "GEMMTUNE_CACHE_DIR" not in os.environ
if _made_here:
    os.environ["GEMMTUNE_CACHE_DIR"] = tempfile.mkdtemp(prefix="gemmtune-tests-")
    settings.from_environment.cache_clear()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell's script starts in the background, and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """Remove the run's cache folder."""
    if _made_here:
        shutil.rmtree(os.environ["GEMMTUNE_CACHE_DIR"], ignore_errors=True)


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[Path]:
    """A store of the test's own; compiled kernels are shared with the other tests. Tunes in this process, which is quicker."""
    path = tmp_path / "store.sqlite"
    with settings.patch(store_path=str(path), tune_in_subprocess=False):
        yield path
