"""What a person sees while a tuning runs."""

from __future__ import annotations

import io

from tuning_results import FAST, PROBLEM, TORCH, problem_result

from gemmtune.selector.progress import Bar, Lines, Progress, Silent, progress_for

RESULT = problem_result(FAST, TORCH)


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

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


def test_lines_tell_the_start_and_end_of_each_stage():
    stream = io.StringIO()
    play(Lines(stream, interval_s=60))
    assert stream.getvalue().splitlines() == [
        "[1/2] mm 16x4096x4096 float32 nt on cpu",
        "  compile: 0/24",
        "  compile: 24/24",
        "  measure: 0/24",
        "  another process tunes the same problem: waiting",
        "  pick: cpp:avx512_12x32, 2000 µs, 2.50× torch (aten:mm 5000 µs) (4.2 s)",
    ]


def test_lines_tell_of_a_long_stage_now_and_then():
    stream = io.StringIO()
    lines = Lines(stream, interval_s=0)
    for done in range(3):
        lines.stage("compile", done, 24)
    assert stream.getvalue().splitlines() == ["  compile: 0/24", "  compile: 1/24", "  compile: 2/24"]


def test_lines_count_problems():
    stream = io.StringIO()
    lines = Lines(stream)
    lines.begin(PROBLEM, 2)
    lines.begin(PROBLEM, 2)
    assert stream.getvalue().splitlines()[1].startswith("[2/2] ")


def test_bar_leaves_one_line_for_each_problem():
    stream = Terminal()
    play(Bar(stream))
    assert "[1/2] mm 16x4096x4096 float32 nt on cpu" in stream.getvalue()
    assert "another process tunes the same problem: waiting\n" in stream.getvalue()
    assert "2.50× torch (aten:mm 5000 µs) (4.2 s)\n" in stream.getvalue()


def test_bar_works_for_stages_outside_a_problem():
    stream = Terminal()
    bar = Bar(stream)
    bar.stage("limits", 0, 1)
    bar.close()
    assert "limits" in stream.getvalue()


def test_the_stream_decides_between_bar_and_lines():
    assert isinstance(progress_for(Terminal()), Bar)
    assert isinstance(progress_for(io.StringIO()), Lines)


def test_silent_says_nothing(capfd):
    play(Silent())
    assert capfd.readouterr() == ("", "")
