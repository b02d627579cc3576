"""DeviceInfo: presets, detection, and what is said of devices that are not here."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from gemmtune.device import PRESETS, DeviceInfo, detect, preset
from gemmtune.errors import UnavailableError
from gemmtune.timing.rotation import cache_bytes

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")


@pytest.mark.parametrize("arch", PRESETS)
def test_presets_are_complete(arch: str) -> None:
    device = preset(arch)
    assert device.arch == arch
    assert pickle.loads(pickle.dumps(device)) == device
    if device.type == "cpu":
        assert (device.sm_count, device.smem_per_block_bytes, device.capability) == (0, 0, 0)
        assert 0 < device.l2_bytes < device.l3_bytes == cache_bytes(device)
        assert device.threads >= 1
        assert device.torch_device == torch.device("cpu")
    else:
        assert device.sm_count > 0
        assert 0 < device.smem_per_block_bytes <= device.smem_per_sm_bytes
        assert device.registers_per_sm >= 65536
        assert cache_bytes(device) == (256 * 2**20 if arch == "gfx942" else device.l2_bytes) > 0
        assert device.torch_device == torch.device("cuda", 0)
        assert device.warp_size == (64 if device.type == "hip" else 32)


@pytest.mark.parametrize(
    ("arch", "capability", "smem_kib"), [("sm75", 75, 64), ("sm80", 80, 163), ("sm90", 90, 227), ("sm100", 100, 227)]
)
def test_compute_capability_and_shared_memory(arch: str, capability: int, smem_kib: int) -> None:
    assert (preset(arch).capability, preset(arch).smem_per_block_bytes) == (capability, smem_kib * 1024)


def test_names_of_presets_are_read_leniently() -> None:
    assert preset("SM_80") is preset("sm80")


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(UnavailableError) as caught:
        preset("sm42")
    assert str(caught.value) == f"arch: got 'sm42', expected one of {', '.join(PRESETS)}"


def test_a_device_is_a_frozen_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("sm80").name = "x"  # type: ignore[misc]
    assert {preset("sm80"): 1}[preset("sm80")] == 1


def test_detect_the_cpu() -> None:
    device = detect("cpu")
    assert isinstance(device, DeviceInfo)
    assert device.type == "cpu"
    assert device.name
    assert device.threads == torch.get_num_threads()
    assert device.arch in ("avx512", "avx2", "portable")
    assert ("avx512f" in device.isa) or device.arch != "avx512"
    assert min(device.l2_bytes, device.l3_bytes) > 0
    assert detect(torch.device("cpu")) == device


def test_detect_follows_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert detect("cpu").threads == 1
    finally:
        torch.set_num_threads(before)
    assert detect("cpu").threads == before


@needs_no_gpu
def test_missing_gpu_names_a_remedy() -> None:
    with pytest.raises(UnavailableError) as caught:
        detect("cuda")
    assert str(caught.value) == (
        "device: got 'cuda', but torch sees no GPU of NVIDIA or AMD here; use cpu. Without a GPU, gemmtune choices and "
        "build take --arch, and gemmtune conformance takes --sm"
    )
    assert detect().type == "cpu"


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnavailableError) as caught:
        detect("mps")
    assert str(caught.value) == "device: got 'mps', expected cpu or cuda"


@pytest.mark.gpu
def test_detect_a_gpu() -> None:
    device = detect("cuda")
    assert device.type in ("cuda", "hip")
    assert device.name == torch.cuda.get_device_name()
    assert device.sm_count == torch.cuda.get_device_properties(0).multi_processor_count
    assert 48 * 1024 <= device.smem_per_block_bytes <= device.smem_per_sm_bytes
    with pytest.raises(UnavailableError, match="but this machine has"):
        detect("cuda:99")
