"""Baseline files: writing, reading, comparing, rejecting."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch

from gemmtune.cli.shapes import problems_and_ranges
from gemmtune.cli.spec import Spec
from gemmtune.device import detect, preset
from gemmtune.errors import GateError
from gemmtune.perf_gate.baselines import Baseline, Baselines, slug
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for
from gemmtune.settings import Settings

ROOT = Path(__file__).parents[2]
CPU = detect("cpu")
SMALL, LARGE = (Problem.mm(m, 32, 64, dtype=torch.float32, device_type="cpu") for m in (16, 256))


def baseline(problem: Problem, log_ratio: float = -0.25) -> Baseline:
    return Baseline(
        problem=str(problem), key=problem.to_json(), timing="graph", pick="cpp:x", log_ratio=log_ratio, spread=0.004, processes=14,
        versions={"torch": "2.13.0"},
    )  # fmt: skip


def test_reads_a_written_file(tmp_path):
    written = Baselines.of(str(tmp_path), CPU)
    assert written.get(SMALL, "graph") is None
    for problem in (SMALL, LARGE):
        written.put(baseline(problem))
    written.write()
    read = Baselines.of(str(tmp_path), CPU)
    assert read.path == tmp_path / f"{slug(CPU)}.json"
    assert read.get(SMALL, "graph") == baseline(SMALL)
    assert read.get(SMALL, "eager") is None
    assert read.get(LARGE, "graph").ratio == pytest.approx(math.exp(-0.25))
    assert read.get(SMALL, "graph").estimate.count == 14


def test_files_are_sorted_and_equal_for_equal_entries(tmp_path):
    texts = []
    for order in ((SMALL, LARGE), (LARGE, SMALL)):
        baselines = Baselines.of(str(tmp_path), CPU)
        for problem in order:
            baselines.put(baseline(problem))
        baselines.write()
        texts.append(baselines.path.read_text())
    assert texts[0] == texts[1]
    lines = texts[0].splitlines()
    assert '    "log_ratio": -0.25,' in lines
    assert lines.index('    "problem": "mm 16x32x64 float32 nt on cpu",') < lines.index(
        '    "problem": "mm 256x32x64 float32 nt on cpu",'
    )
    assert not list(tmp_path.glob("*.tmp"))


def test_a_new_baseline_replaces_the_old_one_and_keeps_the_others(tmp_path):
    baselines = Baselines.of(str(tmp_path), CPU)
    baselines.put(baseline(SMALL))
    baselines.put(baseline(LARGE))
    baselines.put(baseline(SMALL, -0.5))
    baselines.write()
    read = Baselines.of(str(tmp_path), CPU)
    assert (read.get(SMALL, "graph").log_ratio, read.get(LARGE, "graph").log_ratio) == (-0.5, -0.25)


@pytest.mark.parametrize("arch", ["avx512", "avx2"])
def test_ci_gates_one_choice_of_each_product(arch):
    """With more choices, or none, the pick is torch's, and its time says nothing of our kernels."""
    pattern = re.search("CHOICE_ALLOWLIST_REGEX='(.*?)'", (ROOT / ".ci/run").read_text())[1]
    assert pattern in (ROOT / "docs/ci.md").read_text()
    problems, _ = problems_and_ranges(Spec(device_type="cpu"), (), str(ROOT / "benchmarks/shapes/ci.json"), None, None)
    settings = Settings(backends=("cpp",), choice_allowlist_regex=pattern)
    offers = [offers_for(problem, preset(arch), settings, on_this_machine=False) for problem in problems]
    assert [len(each.choices) for each in offers] == [1] * 3


def test_slugs():
    assert slug(preset("sm90")) == "nvidia-h100"
    assert (
        slug(dataclasses.replace(preset("avx512"), name="AMD EPYC 9B14", threads=2)) == "cpu-amd-epyc-9b14-avx512-9cab38-2-threads"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"cpu-.*\.json cannot be read: .*; repair it, or remove it"),
        ("[]", "got list, expected an object with format 1 and a list of entries"),
        ('{"format": 2, "entries": []}', "got format 2, expected an object with format 1"),
        ('{"format": 1, "entries": [3]}', "entry 1: got 3, expected exactly key, log_ratio, pick,"),
        ('{"format": 1, "entries": [{"problem": "mm", "key": {}}]}', "entry 1: got fields key, problem, expected exactly key,"),
    ],
)
def test_reports_a_file_without_baselines(tmp_path, text, message):
    (tmp_path / f"{slug(CPU)}.json").write_text(text)
    with pytest.raises(GateError, match=message):
        Baselines.of(str(tmp_path), CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"log_ratio": "fast"},
            "entry 1: mm 16x32x64 float32 nt on cpu: got log_ratio 'fast' and spread 0.004, expected finite numbers",
        ),
        ({"spread": -1}, "expected finite numbers"),
        ({"pick": None}, "expected plain texts"),
        ({"processes": 1}, "processes: got 1, expected a whole number of at least 2"),
    ],
)
def test_reports_a_wrong_entry(tmp_path, change, message):
    entry = dataclasses.asdict(baseline(SMALL)) | change
    (tmp_path / f"{slug(CPU)}.json").write_text(json.dumps({"format": 1, "device": {}, "entries": [entry]}))
    with pytest.raises(GateError, match=message):
        Baselines.of(str(tmp_path), CPU)


def test_reports_an_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    baselines = Baselines.of(str(tmp_path / "file" / "x"), CPU)
    with pytest.raises(GateError, match=r"cannot write .*file/x/cpu-.*\.json: .*; name another folder"):
        baselines.write()
