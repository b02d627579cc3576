"""key: what makes a stored time valid here, and how a difference is told."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from gemmtune.device import detect, preset
from gemmtune.store import key

GPU = preset("sm90")
CPU = detect("cpu")
NVIDIA = """NVRM version: NVIDIA UNIX {kind}Kernel Module{target}  {version}  Release Build  (dvs-builder@U16)  Tue Mar 5 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    caches = (key.fingerprint_text, key.driver_version, key.cublas_version)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_fields_of_a_cpu() -> None:
    assert set(key.fingerprint(CPU, "graph")) == {"device", "arch", "threads", "isa", "torch", "timing", "method"}
    assert key.fingerprint(CPU, "graph")["threads"] == str(torch.get_num_threads())
    assert key.fingerprint(CPU, "graph")["method"] == "1", "another one forgets all that was measured"


def test_fields_of_a_gpu() -> None:
    assert set(key.fingerprint(GPU, "graph")) == {
        "device", "arch", "sm_count", "driver", "cuda", "triton", "cublas", "torch", "timing", "method",
    }  # fmt: skip


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_every_value_is_a_text_and_the_text_is_canonical(device: object) -> None:
    fields = key.fingerprint(device, "eager")  # type: ignore[arg-type]
    assert all(isinstance(value, str) and (value or name == "isa") for name, value in fields.items()), "some CPUs have no isa"
    text = key.fingerprint_text(device, "eager")  # type: ignore[arg-type]
    assert json.loads(text) == fields
    assert text == json.dumps(fields, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("change", [{"sm_count": 114}, {"name": "another GPU"}, {"arch": "sm100"}], ids=str)
def test_another_gpu_has_another_fingerprint(change: dict[str, object]) -> None:
    assert key.fingerprint_text(dataclasses.replace(GPU, **change), "graph") != key.fingerprint_text(GPU, "graph")  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"threads": 99}, {"isa": ("avx2",)}, {"name": "another CPU"}], ids=str)
def test_another_cpu_has_another_fingerprint(change: dict[str, object]) -> None:
    assert key.fingerprint_text(dataclasses.replace(CPU, **change), "graph") != key.fingerprint_text(CPU, "graph")  # type: ignore[arg-type]


def test_timing_and_method_count_and_which_of_equal_gpus_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    text = key.fingerprint_text(GPU, "graph")
    assert key.fingerprint_text(GPU, "eager") != text
    assert key.fingerprint_text(dataclasses.replace(GPU, index=3), "graph") == text
    monkeypatch.setattr(key, "METHOD_VERSION", key.METHOD_VERSION + 1)
    key.fingerprint_text.cache_clear()
    assert key.fingerprint_text(GPU, "graph") != text


def test_triton_is_not_imported_for_its_version() -> None:
    before = "triton" in sys.modules
    key.fingerprint(GPU, "graph")
    assert ("triton" in sys.modules) == before


@pytest.mark.parametrize("as_text", [False, True], ids=["mapping", "text"])
def test_difference_names_the_fields(as_text: bool) -> None:
    was = {"device": "H200", "driver": "550.54.15", "gone": "1"}
    now = {"device": "H200", "driver": "560.35.03", "new": "2"}
    told = key.difference(key.canonical(was), key.canonical(now)) if as_text else key.difference(was, now)
    assert told == ["driver: was 550.54.15, is 560.35.03", "new: was not recorded, is 2", "gone: was 1, is not recorded"]
    assert key.difference(was, was) == []


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (NVIDIA.format(kind="x86_64 ", target="", version="550.54.15"), "550.54.15"),
        (NVIDIA.format(kind="Open ", target=" for x86_64", version="570.86"), "570.86"),
        (NVIDIA.format(kind="Open ", target=" for aarch64", version="580.65.06"), "580.65.06"),
    ],
)
def test_the_driver_version_is_read_from_proc(monkeypatch: pytest.MonkeyPatch, text: str, version: str) -> None:
    monkeypatch.setattr(key, "text_of", {"/proc/driver/nvidia/version": text}.__getitem__)
    assert key.driver_version("cuda") == version


def test_driver_version_comes_from_nvml_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    calls: list[str] = []
    nvml = types.ModuleType("pynvml")
    vars(nvml).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlSystemGetDriverVersion=lambda: b"550.54.15",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(key, "text_of", lambda path: "")
    assert key.driver_version("cuda") == "550.54.15"
    assert calls == ["init", "shutdown"]

    def fail() -> None:
        raise NVMLError

    vars(nvml)["nvmlInit"] = fail
    key.driver_version.cache_clear()
    assert key.driver_version("cuda") == "unknown"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    key.driver_version.cache_clear()
    assert key.driver_version("cuda") == "unknown"


def test_the_driver_version_of_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "text_of", {"/sys/module/amdgpu/version": "6.10.5\n"}.__getitem__)
    assert key.driver_version("hip") == "6.10.5"


def test_the_fingerprint_of_an_amd_gpu_has_the_versions_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/module/amdgpu/version": "6.10.5\n", "/opt/rocm/.info/version": "6.4.1-83\n"}
    monkeypatch.setattr(key, "text_of", files.__getitem__)
    monkeypatch.setattr(torch.version, "hip", "6.4.43483")
    found = key.fingerprint(preset("gfx942"), "graph")
    assert (found["hip"], found["driver"], found["rocm"], found["sm_count"]) == ("6.4.43483", "6.10.5", "6.4.1-83", "304")
    assert "cublas" not in found
    monkeypatch.setitem(files, "/opt/rocm/.info/version", "")
    assert key.rocm_version() == "6.4.43483"


def test_the_cublas_version_of_the_loaded_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Function:
        restype: object = None

        def __call__(self) -> int:
            return 120804

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(key.ctypes, "CDLL", lambda name, mode: types.SimpleNamespace(cublasLtGetVersion=Function()))
    assert key.cublas_version() == "12.8.4"


def test_the_cublas_version_of_a_wheel_where_the_library_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(key, "package_version", {"nvidia-cublas-cu12": "12.8.4.1", "nvidia-cublas": ""}.__getitem__)
    assert key.cublas_version() == "12.8.4.1"


def test_now_is_utc_with_microseconds() -> None:
    text = key.now()
    assert len(text) == len("2024-01-01T00:00:00.000000+00:00")
    assert abs((datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds()) < 60


@pytest.mark.gpu
def test_the_fingerprint_of_this_gpu_is_complete() -> None:
    fields = key.fingerprint(detect("cuda"), "graph")
    assert "unknown" not in fields.values(), fields
    assert (
        Path("/proc/driver/nvidia/version").exists() is False or fields["driver"] in Path("/proc/driver/nvidia/version").read_text()
    )
