"""``gemmtune export --format t4``, read by the packages that know the format where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from extras import needs
from store_cases import KEYS, failure, row

from gemmtune import cli
from gemmtune.choice import Status
from gemmtune.store.store import Store

FIELDS = {
    "timestamp": str, "configuration": dict, "objectives": list, "times": dict, "invalidity": str, "correctness": float,
    "measurements": list,
}  # fmt: skip
WORDS = {
    Status.OK: "correct", Status.REFUSED: "constraints", Status.COMPILE_ERROR: "compile", Status.COMPILE_TIMEOUT: "timeout",
    Status.TIMED_OUT: "timeout", Status.OUT_OF_RESOURCES: "runtime", Status.RUNTIME_ERROR: "runtime", Status.CRASHED: "runtime",
    Status.WRONG_RESULT: "correctness", Status.TOO_FAST: "correctness", Status.DISHONEST: "correctness",
}  # fmt: skip


@pytest.fixture
def file(own_store: Path, tmp_path: Path) -> Path:
    """An export with a choice of each status, one that was compared with the reference, and none of another problem."""
    facts = {"margin_us": 0.1, "place": 3, "settled": "alone", "disturbed": "other work", "host_us": 2.0, "moved": {"from": "x"}}
    rows = [failure(i, status, name=f"cpp:{status}") for i, status in enumerate(Status) if status is not Status.OK]
    rows += [
        row(20, name=f"cpp:{Status.OK}", time_us=30.0, error_over_bound=None),
        row(21, name="cpp:compared", time_us=20.0, error_over_bound=0.5, info={"tile": [16, 32], "stages": 3} | facts),
        row(22, name="cpp:elsewhere", key=KEYS[2]),
    ]
    Store.open(own_store).put(rows)
    path = tmp_path / "t4.json"
    assert cli.run(["export", str(path), "16x64x32", "--match", " nn ", "--format", "t4"]) == 0
    return path


def test_fields_words_and_units(file: Path) -> None:
    data = json.loads(file.read_text())
    timed = [bool(result["times"]["runtimes"]) for result in data["results"]]
    assert timed == sorted(timed, reverse=True), "a reader refuses a file whose first result has no time"
    results: dict[str, Any] = {result["configuration"]["choice"]: result for result in data.pop("results")}
    assert data == {"schema_version": "1.0.0", "metadata": {"timeunit": "milliseconds"}}
    for result in results.values():
        assert {name: type(value) for name, value in result.items()} == FIELDS
        assert result["objectives"] == ["time"]
        assert {type(time_ms) for time_ms in result["times"]["runtimes"]} <= {float}
        for measured in result["measurements"]:
            assert measured.keys() == {"name", "value", "unit"}
            assert isinstance(measured["value"], (float, str)), measured
    assert {name: result["invalidity"] for name, result in results.items()} == {
        f"cpp:{status}": word for status, word in WORDS.items()
    } | {"cpp:compared": "correct"}
    assert [name for name, result in results.items() if result["correctness"]] == ["cpp:compared"], "others were not compared"
    reasons = {name: [x["value"] for x in result["measurements"] if x["name"] == "reason"] for name, result in results.items()}
    failed = [f"cpp:{status}" for status in WORDS if status is not Status.OK]
    assert {name: found for name, found in reasons.items() if found} == {name: ["gave no answer"] for name in failed}
    compared = results["cpp:compared"]
    assert compared["configuration"].keys() == {"problem", "machine", "choice", "backend", "tile", "stages"}
    assert compared["times"] == {"runtimes": [0.02]}
    assert {x["name"]: x["value"] for x in compared["measurements"]} == {
        "time": 0.02, "error_over_bound": 0.5, "disturbed": "other work"
    }  # fmt: skip


@needs("kernel_tuner")
def test_the_schema_of_kernel_tuner_accepts_the_file(file: Path) -> None:
    validator = importlib.import_module("jsonschema").Draft202012Validator
    spec = importlib.util.find_spec("kernel_tuner")
    assert spec is not None
    assert spec.origin
    schema = json.loads(Path(spec.origin).with_name("schema").joinpath("T4", "1.0.0", "results-schema.json").read_text())
    validator.check_schema(schema)
    data = json.loads(file.read_text())
    assert not list(validator(schema).iter_errors(data))
    known = schema["properties"]["results"]["items"]["properties"]
    assert known.keys() >= FIELDS.keys()
    assert set(known["invalidity"]["enum"]) == set(WORDS.values())
    data["results"][0]["invalidity"] = "slow"
    assert list(validator(schema).iter_errors(data)), "the schema accepts anything"


@needs("autotuning_methodology")
@pytest.mark.filterwarnings("ignore:(Mean of empty slice|invalid value encountered)")  # of choices without a time
def test_autotuning_methodology_finds_the_fastest_time(file: Path) -> None:
    module = importlib.import_module("autotuning_methodology.searchspace_statistics")
    words: dict[str, Any] = {"minimization": True, "objective_time_keys": ["runtimes"], "objective_performance_keys": ["time"]}
    found = module.SearchspaceStatistics("gemm", "a GPU", full_search_space_file_path=file, **words)
    assert (found.size, found.total_performance_absolute_optimum()) == (len(WORDS) + 1, 0.02)
    assert list(found.objective_times_total_sorted) == pytest.approx([2e-5, 3e-5]), "in seconds"
