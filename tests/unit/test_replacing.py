"""Files that a user names for output: whole or unchanged, and never in the place of a device, a pipe or a link."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmtune import settings
from gemmtune.conformance.runs.files import write as conformance_file
from gemmtune.errors import ConformanceError, StoreError
from gemmtune.integration.recording import Recording
from gemmtune.problem import Problem
from gemmtune.replacing import replacing
from gemmtune.store.store import Store, open_store

PROBLEM = Problem.mm(16, 64, 32, device_type="cpu")


def export(path: Path) -> None:
    Store().export_file(path)


def record(path: Path) -> None:
    recording = Recording()
    recording.note(PROBLEM, 1)
    recording.write(path)


WRITERS: tuple[Callable[[Path], None], ...] = (export, record)


def test_a_pipe_gets_the_text_and_stays_a_pipe(tmp_path: Path) -> None:
    for write in WRITERS:
        pipe, got = tmp_path / f"{write.__name__}.json", list[str]()
        os.mkfifo(pipe)
        reader = threading.Thread(target=lambda pipe=pipe, got=got: got.append(pipe.read_text()))
        reader.start()
        write(pipe)
        reader.join()
        assert "format" in json.loads(got[0])
        assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    for write in WRITERS:
        target, link = tmp_path / f"{write.__name__}-target", tmp_path / write.__name__
        target.write_text("old")
        link.symlink_to(target.name)
        write(link)
        assert link.is_symlink()
        assert "format" in json.loads(target.read_text())


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(path) as new:
        new.write_text("half \ud800", encoding="utf-8")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["x"])
    with pytest.raises(IsADirectoryError), replacing(tmp_path) as new:
        new.write_text("x")


def test_a_store_never_takes_the_place_of_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.sqlite"
    os.mkfifo(pipe)
    with settings.patch(store_path=str(pipe)), pytest.warns(RuntimeWarning, match="a device, pipe or folder, expected a file"):
        assert open_store(settings.current()).every_row() == []
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == [pipe.name]


def test_a_folder_is_no_store(tmp_path: Path) -> None:
    with settings.patch(store_path=str(tmp_path)), pytest.warns(RuntimeWarning, match="a device, pipe or folder, expected a file"):
        assert open_store(settings.current()).every_row() == []
    assert os.listdir(tmp_path) == []


def test_no_function_writes_over_a_store(own_store: Path) -> None:
    store = open_store(settings.current())
    store.put_limits("here", {"bandwidth_gbps": 1.0})
    before = own_store.read_bytes()
    for write in (store.export_file, record, lambda path: conformance_file("json", path, "{}")):
        with pytest.raises((StoreError, OSError, ConformanceError), match="a store, whose measurements would be lost"):
            write(own_store)
        assert own_store.read_bytes() == before
