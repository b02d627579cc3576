"""Progress that users see during a tuning."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from tuning_results import FAST, PROBLEM, TORCH, problem_result

from gemmtune.selector.progress import Bar, FirstCall, Lines, Progress, notify, progress_for

RESULT = problem_result(FAST, TORCH)


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def play(progress: Progress) -> None:
    progress.begin(PROBLEM, 2)
    for done in range(25):
        progress.stage("compile", done, 24)
    progress.stage("measure", 0, 24)
    progress.message("another process tunes the same problem: waiting")
    progress.end(RESULT)
    progress.close()
    progress.close()


def test_log_lines_mark_start_and_end_of_each_stage(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    with caplog.at_level(logging.INFO, "gemmtune"):
        play(Lines(interval_s=60))
    assert caplog.messages == [
        "[1/2] mm 16x4096x4096 float32 nt on cpu",
        "  compile: 0/24",
        "  compile: 24/24",
        "  measure: 0/24",
        "  another process tunes the same problem: waiting",
        "  pick: cpp:avx512_12x32, 2000 µs, 2.50× torch (aten:mm 5000 µs) (4.2 s)",
    ]
    assert capfd.readouterr() == ("", "")


def test_log_lines_report_long_stages_at_intervals_and_count_problems(caplog: pytest.LogCaptureFixture):
    lines = Lines(interval_s=0)
    with caplog.at_level(logging.INFO, "gemmtune"):
        for done in range(3):
            lines.stage("compile", done, 24)
        lines.begin(PROBLEM, 2)
        lines.begin(PROBLEM, 2)
    assert caplog.messages[:3] == ["  compile: 0/24", "  compile: 1/24", "  compile: 2/24"]
    assert caplog.messages[4].startswith("[2/2] ")


@pytest.mark.parametrize(("terminal", "configured", "shown"), [(True, False, 2), (False, False, 0), (True, True, 0)])
def test_a_first_call_says_that_it_tunes_on_a_terminal_without_logging(
    terminal: bool, configured: bool, shown: int, monkeypatch: pytest.MonkeyPatch
):
    log = logging.getLogger("gemmtune")
    monkeypatch.setattr(log, "propagate", False)  # pytest's own handlers are the root's
    monkeypatch.setattr(log, "handlers", [logging.NullHandler()] if configured else [])
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    play(FirstCall(PROBLEM))
    lines = stream.getvalue().splitlines()
    assert len(lines) == shown
    if shown:
        assert lines[0].startswith("gemmtune: tuning mm 16x4096x4096 float32 nt on cpu")
        assert lines[1] == "gemmtune: tuned mm 16x4096x4096 float32 nt on cpu in 4.2 s: cpp:avx512_12x32, 2.50x torch"


def test_bar_leaves_one_line_for_each_problem():
    stream = Terminal()
    play(Bar(stream))
    assert "[1/2] mm 16x4096x4096 float32 nt on cpu" in stream.getvalue()
    assert "another process tunes the same problem: waiting\n" in stream.getvalue()
    assert "2.50× torch (aten:mm 5000 µs) (4.2 s)\n" in stream.getvalue()


def test_bar_removes_its_line_after_a_problem():
    bar = Bar(Terminal())
    bar.begin(PROBLEM, 2)
    assert bar._bar is not None
    bar.end(RESULT)
    assert bar._bar is None


def test_bar_works_for_stages_outside_a_problem():
    stream = Terminal()
    bar = Bar(stream)
    bar.stage("limits", 0, 1)
    bar.close()
    assert "limits" in stream.getvalue()


def test_the_stream_decides_between_bar_and_lines():
    assert isinstance(progress_for(Terminal()), Bar)
    assert isinstance(progress_for(io.StringIO()), Lines)


def test_a_daemon_has_no_standard_error_or_a_closed_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda _: False)
    closed = Terminal()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        assert isinstance(progress_for(), Lines)
        notify("tuning")


def test_the_base_listener_is_silent(capfd):
    play(Progress())
    assert capfd.readouterr() == ("", "")
