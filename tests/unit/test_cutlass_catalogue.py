"""List of CUTLASS's operations: made once per copy, architecture and element; errors of a failing generator."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmtune import settings
from gemmtune.backends.cutlass import toolkit as catalogue
from gemmtune.backends.cutlass.operation import ELEMENTS
from gemmtune.backends.cutlass.toolkit import Toolkit, find_toolkit, operations
from gemmtune.errors import UnavailableError

GENERATOR = """
raise RuntimeError("this generator does nothing")
"""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    operations.cache_clear()
    with settings.patch(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache" / "cutlass"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands that ran the generator."""
    commands: list[list[str]] = []
    run = subprocess.run

    def counting(command, *args, **kwargs):
        commands.append(command)
        return run(command, *args, **kwargs)

    monkeypatch.setattr(catalogue.subprocess, "run", counting)
    return commands


@pytest.fixture
def toolkit() -> Toolkit:
    pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
    return find_toolkit(None)


def test_lists_operations_once(toolkit: Toolkit, cache: Path, runs: list[list[str]]) -> None:
    first = operations(toolkit, 75, "f16")
    assert operations(toolkit, 75, "f16") is first
    operations.cache_clear()  # as in another process
    assert operations(toolkit, 75, "f16") == first
    assert len(runs) == 1
    assert len(list(cache.iterdir())) == 1
    operations(toolkit, 80, "f16")
    operations(toolkit, 75, "f32")
    assert [command[-3:] for command in runs] == [["75", "f16", "13.0"], ["80", "f16", "13.0"], ["75", "f32", "13.0"]]


def test_relists_damaged_file(toolkit: Toolkit, cache: Path, runs: list[list[str]]) -> None:
    first = operations(toolkit, 75, "f32")
    [path] = cache.iterdir()
    path.write_text(path.read_text()[:100])
    operations.cache_clear()
    assert operations(toolkit, 75, "f32") == first
    assert len(runs) == 2
    assert json.loads(path.read_text())


@pytest.mark.parametrize(
    ("capability", "element", "kinds"),
    [
        (75, "f16", {(75, "TensorOp")}),
        (75, "f32", {(50, "Simt")}),
        (75, "s8", {(75, "TensorOp")}),
        (80, "bf16", {(80, "TensorOp")}),
        (80, "f64", {(50, "Simt"), (80, "Simt"), (80, "TensorOp")}),
        (80, "tf32", {(80, "TensorOp")}),
        (90, "bf16", {(80, "TensorOp"), (90, "TensorOp")}),
    ],
)
def test_listed_operations(capability: int, element: str, kinds: set[tuple[int, str]], toolkit: Toolkit) -> None:
    found = operations(toolkit, capability, element)
    assert {(op.introduced, op.opcode) for op in found} == kinds
    assert {op.a for op in found} == {op.b for op in found} == {element}
    assert all(op.introduced <= capability and op.accumulator in ELEMENTS for op in found)
    assert len({op.name for op in found}) == len(found)
    assert all(op.modern == (op.introduced == 90) for op in found if element != "f64")


def test_failing_generator_reports_its_last_lines(tmp_path: Path, cache: Path) -> None:
    package = tmp_path / "python" / "cutlass_library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(GENERATOR)
    broken = Toolkit(version="9.9.9", package=package.parent, include=())
    with pytest.raises(UnavailableError) as caught:
        operations(broken, 80, "f16")
    text = str(caught.value)
    assert text.startswith(f"the generator of CUTLASS 9.9.9 at {package.parent} failed:\n")
    assert text.endswith("RuntimeError: this generator does nothing")
    assert not list(cache.glob("*.json"))


def test_generator_times_out(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "python" / "cutlass_library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(catalogue, "TIMEOUT_S", 0.3)
    with pytest.raises(UnavailableError, match=r"the generator of CUTLASS 9\.9\.9 at .*timed out after 0\.3 seconds"):
        operations(Toolkit(version="9.9.9", package=package.parent, include=()), 80, "f16")
