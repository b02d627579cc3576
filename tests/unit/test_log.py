"""log_file: a complete JSON line for each choice and problem, also with concurrent writers; a bad path warns once."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from store_cases import fork, in_child, one_warning, status_of

from gemmtune.choice import Refusal, Status
from gemmtune.problem import Problem
from gemmtune.selector.log import append_log
from gemmtune.selector.result import Outcome, ProblemResult

TRITON = Outcome(
    name="triton:bmm_64x128x32_s4_w8",
    backend="triton",
    content_hash="abc",
    status=Status.OK,
    time_us=12.5,
    error_over_bound=0.03,
    finalist=True,
    info={"tile": (64, 128, 32), "stages": 4, "warps": 8, "acc": torch.float32},
)
ATEN = Outcome(name="aten:bmm", backend="aten", content_hash="def", status=Status.OK, time_us=20.0, baseline=True, from_store=True)
WRONG = Outcome(
    name="cpp:x", backend="cpp", content_hash="ghi", status=Status.WRONG_RESULT, reason="row 3 is wrong", error_over_bound=math.inf
)


def result(problem: Problem | None = None, **fields: Any) -> ProblemResult:
    values: dict[str, Any] = {
        "problem": problem or Problem.bmm(10, 48, 80, 96, dtype=torch.float16, layout="tn", device_type="cpu"),
        "outcomes": (TRITON, ATEN, WRONG),
        "refusals": (Refusal(name="triton:bmm_256x256x64_s5_w8", reason="needs 320 KiB of shared memory, there are 227"),),
        "pick": TRITON.name,
        "limit_us": None,
        "seconds": 1.5,
        "source": "measured",
    }
    return ProblemResult(**(values | fields))


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_for_each_choice(tmp_path: Path) -> None:
    path = tmp_path / "new-folder" / "log.jsonl"
    append_log(path, result())
    lines = read(path)
    assert [(line["name"], line["backend"], line["status"], line["pick"]) for line in lines] == [
        ("triton:bmm_64x128x32_s4_w8", "triton", "ok", True),
        ("aten:bmm", "aten", "ok", False),
        ("cpp:x", "cpp", "wrong_result", False),
        ("triton:bmm_256x256x64_s5_w8", "triton", "refused", False),
    ]
    assert len({frozenset(line) for line in lines}) == 1, "every line has the same fields"


def test_sizes_are_those_of_the_problem(tmp_path: Path) -> None:
    append_log(tmp_path / "log", result())
    for line in read(tmp_path / "log"):
        assert (line["op"], line["batch"], line["M"], line["N"], line["K"]) == ("bmm", 10, 48, 80, 96)
        assert (line["dtype"], line["out_dtype"], line["layout"], line["device_type"]) == ("float16", "float16", "tn", "cpu")


def test_a_line_has_configuration_time_and_reason(tmp_path: Path) -> None:
    append_log(tmp_path / "log", result())
    triton, aten, wrong, refused = read(tmp_path / "log")
    assert (triton["tile"], triton["stages"], triton["warps"], triton["time_us"]) == ([64, 128, 32], 4, 8, 12.5)
    assert triton["info"] == {"tile": [64, 128, 32], "stages": 4, "warps": 8, "acc": "torch.float32"}
    assert (triton["error_over_bound"], triton["finalist"], triton["baseline"], triton["from_store"]) == (0.03, True, False, False)
    assert (aten["tile"], aten["info"], aten["baseline"], aten["from_store"]) == (None, {}, True, True)
    assert (wrong["time_us"], wrong["reason"], wrong["error_over_bound"]) == (None, "row 3 is wrong", "inf")
    assert refused["reason"] == "needs 320 KiB of shared memory, there are 227"


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append_log(path, result())
    append_log(path, result(Problem.mm(1, 2, 3, device_type="cpu"), outcomes=(ATEN,), refusals=(), pick=None))
    append_log(path, result(outcomes=(), refusals=()))
    assert [(line["M"], line["N"], line["K"]) for line in read(path)] == [(48, 80, 96)] * 4 + [(1, 2, 3)]


@pytest.mark.turn(5, 8)
def test_lines_of_many_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "log"

    def work() -> None:
        for _ in range(20):
            append_log(path, result())

    assert [status_of(child) for child in [fork(work) for _ in range(8)]] == [0] * 8
    lines = read(path)
    assert len(lines) == 8 * 20 * 4
    assert [line["name"] for line in lines[:: len(lines) // 160]] == [TRITON.name] * 160


def test_an_unwritable_path_warns_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with one_warning(r"log_file: got .*file.*, expected a writable file\. Give this user .*, or set log_file"):
        append_log(tmp_path / "file" / "log", result())
        append_log(tmp_path / "file" / "log", result())


def test_a_partial_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append_log(path, result())
    size = path.stat().st_size

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
        with one_warning(r"log_file: got only 100 of \d+ bytes fit into .*log, expected a writable file"):
            append_log(path, result())

    in_child(work)
    assert path.stat().st_size == size
    assert len(read(path)) == 4


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_warns_once() -> None:
    with one_warning(r"log_file: got .*No space left on device.* free some space"):
        append_log("/dev/full", result())
