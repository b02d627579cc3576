"""Offers of atomic split-K and decompose-K."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rotation import rotated

from gemmtune.backends.table import load
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.splits import decompose, offers
from gemmtune.device import preset
from gemmtune.filters import filtered
from gemmtune.problem import Precision, Problem
from gemmtune.settings import Settings

LONG = Problem.mm(128, 256, 16384, device_type="cuda")


def test_refusals_of_atomic_sums_name_their_reason() -> None:
    config, device = Config(block_m=64, block_n=64, block_k=64, stages=4, warps=4, split_k=8), preset("sm90")
    assert offers.why_not_added(LONG, device, config) is None
    assert "nothing is added up" in str(offers.why_not_added(LONG, device, replace(config, split_k=1)))
    large = Problem.mm(2048, 2048, 16384, device_type="cuda")
    assert "4194304 sums" in str(offers.why_not_added(large, device, config))


def test_refusals_of_decomposed_sums_name_their_reason() -> None:
    device = preset("sm90")
    assert decompose.why_not_decomposed(LONG, device) is None
    assert "less than 32 times" in str(decompose.why_not_decomposed(Problem.mm(1024, 8, 16384, device_type="cuda"), device))
    assert decompose.why_not_slices(LONG, 64) is None
    assert "not a multiple" in str(decompose.why_not_slices(LONG, 48))


@pytest.mark.parametrize("why_not", [offers.why_not_atomic, decompose.why_not_decomposed])
def test_rejects_architectures_without_triton_tensor_cores(why_not: Any) -> None:
    assert "no tensor cores for Triton" in str(why_not(LONG, preset("sm75")))
    assert all(why_not(LONG, preset(arch)) is None for arch in ("sm80", "sm86", "sm90", "sm100"))


def test_only_atomic_float_sums_depend_on_the_order() -> None:
    device, config = preset("sm90"), Config(block_m=64, block_n=64, block_k=64, stages=4, warps=4, split_k=8)
    assert not offers.AtomicChoice.of(LONG, device, config).claims.deterministic
    whole = Problem.int_mm(128, 256, 16384, layout="nt", device_type="cuda")
    assert offers.AtomicChoice.of(whole, device, config).claims.deterministic
    assert decompose.decomposed_choice(LONG, device, 64, None, pdl=True).claims.deterministic


def _offered(problem: Problem, search: str = "default", *, arch: str = "sm90") -> dict[str, list[str]]:
    """Return the names of the choices of each family that divides sums."""
    choices = load("triton").enumerate(problem, preset(arch), Settings(search=search)).choices  # type: ignore[arg-type]
    names = [choice.name.removeprefix("triton:").removesuffix("_pdl") for choice in choices]
    assert len(names) == len(set(names))
    return {family: [name for name in names if name.startswith(family)] for family in ("decompose", "atomic")}


TF32 = Precision(input_mode="tf32")
DECOMPOSED = {
    "f32": (Problem.mm(256, 256, 16384, dtype=torch.float32, device_type="cuda"), ["32_bmm", "64_bmm"]),
    "f32-few-tiles": (Problem.mm(128, 128, 65536, dtype=torch.float32, device_type="cuda"), ["128_bmm", "256_bmm"]),
    "f64": (Problem.mm(256, 256, 16384, dtype=torch.float64, device_type="cuda"), ["16_bmm", "32_bmm"]),
    "f32-shorter": (Problem.mm(256, 256, 8192, dtype=torch.float32, device_type="cuda"), ["32_bmm"]),
    "tf32": (Problem.mm(256, 256, 32768, dtype=torch.float32, precision=TF32, device_type="cuda"), ["32_128x128x"]),
    "bf16": (Problem.mm(64, 64, 65536, device_type="cuda"), ["32_64x16x"]),
    "bf16-many-tiles": (Problem.mm(512, 512, 32768, device_type="cuda"), []),
    "f32-short": (Problem.mm(512, 512, 8192, dtype=torch.float32, device_type="cuda"), []),
    "f32-prime": (Problem.mm(64, 64, 10007, dtype=torch.float32, device_type="cuda"), []),
}


@pytest.mark.parametrize("name", rotated(list(DECOMPOSED), 2, "decomposed"))
def test_decomposed_sums_are_offered_only_if_promising(name: str) -> None:
    problem, expected = DECOMPOSED[name]
    offered = [name.removeprefix("decompose_") for name in _offered(problem)["decompose"]]
    assert len(offered) == len(expected)
    assert all(name.startswith(beginning) for name, beginning in zip(offered, expected, strict=True))
    assert _offered(problem, "quick")["decompose"] == []


def test_atomic_sums_are_refused_unless_the_settings_allow_them() -> None:
    assert len(_offered(LONG)["atomic"]) == 3
    assert len(_offered(LONG, "quick")["atomic"]) == 1
    assert _offered(Problem.mm(8192, 8192, 8192, device_type="cuda"))["atomic"] == []
    offers = load("triton").enumerate(LONG, preset("sm90"), Settings())
    refused = [refusal for refusal in filtered(offers, Settings(), templates=()).refusals if "atomic" in refusal.name]
    assert len(refused) == 3
    assert all("deterministic forbids it" in refusal.reason for refusal in refused)
    assert filtered(offers, Settings(deterministic=False), templates=()).choices == offers.choices


@pytest.mark.parametrize("search", ["quick", "default"])
def test_sums_of_two_products_and_batches_are_not_decomposed(search: str) -> None:
    pair = Problem.mm_plus_mm(64, 64, 8192, 8192, device_type="cuda")
    assert _offered(pair, search) == {"decompose": [], "atomic": []}
    assert _offered(Problem.bmm(2, 64, 64, 8192, device_type="cuda"), search)["decompose"] == []
