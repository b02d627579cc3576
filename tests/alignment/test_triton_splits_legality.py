"""Offers of decompose-K."""

from __future__ import annotations

import pytest
import torch
from rotation import rotated

from gemmtune.backends.table import load
from gemmtune.backends.triton.splits import decompose
from gemmtune.device import preset
from gemmtune.problem import Precision, Problem
from gemmtune.settings import Settings

LONG = Problem.mm(128, 256, 16384, device_type="cuda")


def test_refusals_of_decomposed_sums_name_their_reason() -> None:
    device = preset("sm90")
    assert decompose.why_not_decomposed(LONG, device) is None
    assert "less than 32 times" in str(decompose.why_not_decomposed(Problem.mm(1024, 8, 16384, device_type="cuda"), device))
    assert decompose.why_not_slices(LONG, 64) is None
    assert "not a multiple" in str(decompose.why_not_slices(LONG, 48))


def test_rejects_architectures_without_triton_tensor_cores() -> None:
    assert "no tensor cores for Triton" in str(decompose.why_not_decomposed(LONG, preset("sm75")))
    assert all(decompose.why_not_decomposed(LONG, preset(arch)) is None for arch in ("sm80", "sm86", "sm90", "sm100"))


def _offered(problem: Problem, search: str = "default") -> list[str]:
    """Return the names of the choices of decompose-K."""
    choices = load("triton").enumerate(problem, preset("sm90"), Settings(search=search)).choices  # type: ignore[arg-type]
    names = [choice.name.removeprefix("triton:").removesuffix("_pdl") for choice in choices]
    assert len(names) == len(set(names))
    return [name.removeprefix("decompose_") for name in names if name.startswith("decompose")]


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
    offered = _offered(problem)
    assert len(offered) == len(expected)
    assert all(name.startswith(beginning) for name, beginning in zip(offered, expected, strict=True))
    assert _offered(problem, "quick") == []


@pytest.mark.parametrize("search", ["quick", "default"])
def test_sums_of_two_products_and_batches_are_not_decomposed(search: str) -> None:
    pair = Problem.mm_plus_mm(64, 64, 8192, 8192, device_type="cuda")
    assert _offered(pair, search) == []
    assert _offered(Problem.bmm(2, 64, 64, 8192, device_type="cuda"), search) == []


def test_slices_are_added_in_chunks_of_a_power_of_two() -> None:
    wanted = {2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 16: 16, 17: 16, 100: 16}
    choices = {slices: decompose.AddingChoice.after(LONG, preset("sm90"), slices, pdl=False) for slices in wanted}
    assert {slices: choice.values["chunk"] for slices, choice in choices.items()} == wanted
