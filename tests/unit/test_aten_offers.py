"""What the aten backend offers, what it marks as the baseline and what it claims."""

from __future__ import annotations

import pickle

import pytest
import torch

from gemmtune.backends.aten import BACKEND, AtenChoice
from gemmtune.device import detect, preset
from gemmtune.problem import Precision, Problem
from gemmtune.settings import Settings

CPU = detect("cpu")


def offered(problem: Problem, device: str | None = None) -> list[AtenChoice]:
    return [
        c for c in BACKEND.enumerate(problem, preset(device) if device else CPU, Settings()).choices if isinstance(c, AtenChoice)
    ]


def names(problem: Problem, device: str | None = None) -> list[tuple[str, bool]]:
    return [(c.name, c.baseline) for c in offered(problem, device)]


def test_baseline_is_the_callers_operation() -> None:
    cpu = {"device_type": "cpu"}
    assert names(Problem.mm(64, 32, 48, **cpu)) == [("aten:mm", True)]
    assert names(Problem.addmm(64, 32, 48, **cpu)) == [("aten:addmm", True)]
    assert names(Problem.bmm(2, 64, 32, 48, **cpu)) == [("aten:bmm", True)]
    assert names(Problem.baddbmm(2, 64, 32, 48, **cpu)) == [("aten:baddbmm", True)]


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ("n", [("aten:bias_addmm", True), ("aten:addmm", False)]),
        ("1n", [("aten:bias_addmm", False), ("aten:addmm", True)]),
        ("mn", [("aten:addmm", True)]),
        ("m1", [("aten:addmm", True)]),
        ("scalar", [("aten:addmm", True)]),
    ],
)
def test_bias_addmm_is_offered_first_for_a_repeated_row(bias: str, expected: list[tuple[str, bool]]) -> None:
    problem = Problem.addmm(64, 32, 48, bias=bias, device_type="cuda")  # type: ignore[arg-type]
    assert names(problem, "sm80") == expected


def test_bias_addmm_is_refused_with_a_reason() -> None:
    offers = BACKEND.enumerate(Problem.addmm(64, 32, 48, bias="m1", device_type="cuda"), preset("sm90"), Settings())
    assert [(r.name, r.reason) for r in offers.refusals] == [
        (
            "aten:bias_addmm",
            "inp bfloat16[64x1](1,1) is not a row of N=32 elements repeated along M; expected shape [N], [1, N] or stride 0",
        )
    ]
    offers = BACKEND.enumerate(Problem.addmm(64, 32, 48, beta=0, device_type="cuda"), preset("sm90"), Settings())
    assert offers.refusals[0].reason == "beta is 0: there is no bias to add"


def test_choices_are_picklable_and_have_hashes_of_their_own() -> None:
    vector, matrix = offered(Problem.addmm(64, 32, 48, device_type="cuda"), "sm80")
    assert pickle.loads(pickle.dumps(vector)) == vector
    assert pickle.loads(pickle.dumps(vector)).content_hash == vector.content_hash
    assert vector.content_hash != matrix.content_hash
    assert len({vector, matrix}) == 2
    assert vector.compile_key is None
    assert vector.compiled
    assert vector.packed_format is None


def test_enumeration_needs_no_device() -> None:
    for arch in ("sm75", "sm80", "sm90", "sm100", "gfx942", "avx2"):
        device = preset(arch)
        assert BACKEND.serves_by_default(device)
        assert BACKEND.enumerate(Problem.mm(64, 32, 48, device_type=device.torch_device.type), device, Settings()).choices


def test_availability() -> None:
    assert BACKEND.available(CPU).ok
    assert torch.__version__ in BACKEND.available(CPU).detail
    if not torch.cuda.is_available():
        assert not BACKEND.available(preset("sm80")).ok
        assert "sees no GPU here" in BACKEND.available(preset("sm80")).detail


def test_claims_on_a_gpu_follow_the_recorded_flags() -> None:
    reduced = Problem.mm(64, 32, 4096, dtype=torch.float16, device_type="cuda", precision=Precision(reduced_partials=True))
    strict = Problem.mm(64, 32, 4096, dtype=torch.float16, device_type="cuda", precision=Precision())
    tf32 = Problem.mm(64, 32, 4096, dtype=torch.float32, device_type="cuda", precision=Precision(input_mode="tf32"))
    claims = [offered(p, "sm80")[0].claims for p in (reduced, strict, tf32)]
    assert [c.partials for c in claims] == [torch.float16, torch.float32, torch.float32]
    assert [c.input_mode for c in claims] == ["ieee", "ieee", "tf32"]
    assert [c.splits for c in claims] == [16, 16, 16]
    assert offered(Problem.mm(64, 32, 48, device_type="cuda"), "sm80")[0].claims.splits == 1


def test_fnuz_floats_use_torch_scaled_mm_on_gfx942_only() -> None:
    def scaled(dtype: torch.dtype, arch: str | None, scales: str = "tensor") -> list[tuple[str, bool]]:
        device_type = "cpu" if arch is None else "cuda"
        return names(Problem.scaled_mm(64, 32, 48, dtype=dtype, scales=scales, device_type=device_type), arch)  # type: ignore[arg-type]

    native, composed = [("aten:_scaled_mm", True)], [("aten:dequantized_mm", True)]
    assert scaled(torch.float8_e4m3fnuz, "gfx942") == scaled(torch.float8_e5m2fnuz, "gfx942") == native
    assert scaled(torch.float8_e4m3fnuz, "gfx942", "row") == scaled(torch.float8_e4m3fn, "gfx942") == composed
    assert [scaled(torch.float8_e4m3fnuz, arch) for arch in ("gfx90a", "sm90", None)] == [composed] * 3
