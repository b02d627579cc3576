"""The processes of one test run: what they share, and which of them wait."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from parallel import pytest_ignore_collect, pytest_xdist_auto_num_workers, share_kernels, spread, turn

WAIT_S = 30
SOON_S = 0.2


class Other:
    """A turn of another process, in a thread. It is requested at once and ended by ``end``."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self.begun, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._take, args=(folder, alone))
        self._thread.start()

    def _take(self, folder: Path, alone: bool) -> None:
        with turn(folder, alone=alone):
            self.begun.set()
            self._ends.wait(WAIT_S)

    def end(self) -> None:
        self._ends.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@contextmanager
def other(folder: Path, *, alone: bool) -> Iterator[Other]:
    made = Other(folder, alone=alone)
    yield made
    made.end()


def test_turns_run_concurrently(tmp_path: Path) -> None:
    with other(tmp_path, alone=False) as one, other(tmp_path, alone=False) as two:
        assert one.begun.wait(WAIT_S)
        assert two.begun.wait(WAIT_S)


def test_an_isolated_turn_waits_for_all_others_including_later_ones(tmp_path: Path) -> None:
    with other(tmp_path, alone=False) as running:
        assert running.begun.wait(WAIT_S)
        with other(tmp_path, alone=True) as timing:
            assert not timing.begun.wait(SOON_S)
            with other(tmp_path, alone=False) as later:
                assert later.begun.wait(WAIT_S)
                running.end()
                assert not timing.begun.wait(SOON_S)
                later.end()
                assert timing.begun.wait(WAIT_S)
                with other(tmp_path, alone=False) as last:
                    assert not last.begun.wait(SOON_S)
                    timing.end()
                    assert last.begun.wait(WAIT_S)


def test_m_gpu_skips_files_without_gpu_tests(tmp_path: Path) -> None:
    (with_one := tmp_path / "test_one.py").write_text("@pytest.mark.gpu")
    (without := tmp_path / "test_two.py").write_text("def test_x(): ...")
    for expression, expected in (("gpu", True), ("not gpu", None), ("", None)):
        config = cast("Any", SimpleNamespace(option=SimpleNamespace(markexpr=expression)))
        assert pytest_ignore_collect(without, config) is expected
        assert pytest_ignore_collect(with_one, config) is None
        assert pytest_ignore_collect(tmp_path, config) is None


def test_two_isolated_turns_exclude_each_other(tmp_path: Path) -> None:
    with other(tmp_path, alone=True) as one:
        assert one.begun.wait(WAIT_S)
        with other(tmp_path, alone=True) as two:
            assert not two.begun.wait(SOON_S)
            one.end()
            assert two.begun.wait(WAIT_S)


def test_kernels_are_shared_and_the_store_is_not(tmp_path: Path) -> None:
    for name in ("one", "two"):
        share_kernels(tmp_path / name, tmp_path / "kernels")
    (tmp_path / "one" / "cpp" / "kernel.so").write_text("compiled")
    (tmp_path / "one" / "store.sqlite").write_text("measured")
    assert (tmp_path / "two" / "cpp" / "kernel.so").read_text() == "compiled"
    assert not (tmp_path / "two" / "store.sqlite").exists()
    assert not (tmp_path / "kernels" / "store.sqlite").exists()


@pytest.mark.parametrize(
    ("arguments", "cores", "expected"),
    [(["tests"], 2, 2), (["tests/unit"], 64, 16), (["tests/unit/test_parallel.py::test_x"], 8, 0), (["a.py"] * 5, 8, 8)],
    ids=["all", "many-cores", "one-file", "many-files"],
)
def test_processes(arguments: list[str], cores: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("GEMMTUNE_COMPILE_THREADS", "1")
    config = cast("Any", SimpleNamespace(args=arguments))
    assert pytest_xdist_auto_num_workers(config) == expected


def test_each_process_begins_with_slow_tests_and_ends_with_isolated_ones() -> None:
    names = ["a", "S1", "b", "ALONE", "c", "S2", "d", "e", "S3", "f"]
    assert spread(names, 2, slow={"S1", "S2", "S3"}, alone={"ALONE"}) == ["S1", "S3", "a", "b", "c", "S2", "d", "e", "f", "ALONE"]


def test_one_process_gets_the_slow_tests_of_a_file() -> None:
    names = ["x1", "y1", "x2", "z1", "x3", "z2", "a", "b"]
    order = spread(names, 2, slow={*names[:6]}, alone=set(), file=lambda name: name[0])
    assert order == ["x1", "x2", "x3", "a", "y1", "z1", "z2", "b"]


def test_no_test_is_lost() -> None:
    names = list(range(30))
    for count, slow, file in itertools.product((1, 2, 7, 16), (0, 1, 5, 30), (1, 4, 30)):
        assert sorted(spread(names, count, set(range(slow)), {3, 29}, lambda name, size=file: name // size)) == names
