"""The Triton template of mm_plus_mm: values in the interpreter, code for architectures that this machine lacks."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from rotation import rotated

from gemmtune.backends.triton.backend import chosen_configs
from gemmtune.backends.triton.configs import Config, geometry
from gemmtune.backends.triton.sums import SumChoice
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.problem.trace import trace

pytest.importorskip("triton", reason="the interpreter is Triton's")

import triton_jobs
from interpreter import Run

pytestmark = pytest.mark.rotates(8)

PLAIN = Config(block_m=16, block_n=16, block_k=16, stages=1, warps=1)
WIDE = Config(block_m=32, block_n=32, block_k=32, stages=2, warps=4, group_m=2)
SPLITS = tuple(Config(block_m=16, block_n=32, block_k=16, stages=1, warps=1, split_k=split) for split in (2, 3, 5))


def _problem(dtype: torch.dtype, layout: str, k: int = 40, k2: int = 21) -> Problem:
    return Problem.mm_plus_mm(17, 35, k, k2, dtype=dtype, layout=layout, device_type="cpu")


_HALF = Problem.mm_plus_mm(17, 35, 64, 37, dtype=torch.float16, device_type="cpu")
_TURNED = Problem.mm_plus_mm(17, 35, 64, 37, dtype=torch.float16, layout="tn", device_type="cpu")
_GATE = torch.empty(17, 35, dtype=torch.float16, device="meta")
VERIFIED = {
    "f32-nn": _problem(torch.float32, "nn"),
    "f16-nt": _problem(torch.float16, "nt"),
    "bf16-tn": _problem(torch.bfloat16, "tn"),
    "f64-tt": _problem(torch.float64, "tt"),
    "K of one block, K2 of six": _problem(torch.float32, "nt", 5, 90),
    "K of six blocks, K2 of one": _problem(torch.float32, "nt", 90, 5),
    "rows of two tiles of 32": Problem.mm_plus_mm(33, 17, 40, 21, dtype=torch.float32, device_type="cpu"),
    "other strides of c and d": dataclasses.replace(_HALF, c=_TURNED.c, d=_TURNED.d),
    "c repeats a row": dataclasses.replace(_HALF, c=Layout(size=(17, 37), stride=(0, 1), dtype=torch.float16)),
    "d has no contiguous dimension": dataclasses.replace(
        _HALF, d=Layout(size=(37, 35), stride=(110, 3), dtype=torch.float16, offset=1)
    ),
    "column-major out": dataclasses.replace(_HALF, out=Layout.contiguous((35, 17), torch.float16).transposed),
    "epilogue": dataclasses.replace(_HALF, epilogue=trace(lambda acc, x: torch.relu(acc) * x, torch.float32, [_GATE])),
}


@pytest.mark.turn(2, 8)
@pytest.mark.parametrize(("turn", "name"), rotated(list(enumerate(VERIFIED)), 3, "sums"), ids=str)
def test_verification_accepts_it_with_its_own_claims(interpreted: Run, turn: int, name: str) -> None:
    """The configs rotate. If the two sums differ in length, each way to split them is verified."""
    problem = VERIFIED[name]
    splits = [config for config in SPLITS if geometry(problem, config).splits == config.split_k]
    assert splits
    chosen = splits if name.startswith("K of") else [(PLAIN, WIDE)[turn % 2], splits[turn % len(splits)]]
    verdicts = interpreted(triton_jobs.verdicts, problem, chosen, family=triton_jobs.summed)
    assert [verdict.status for verdict in verdicts] == [Status.OK] * len(verdicts), verdicts


@pytest.mark.turn(7, 8)
@pytest.mark.parametrize(
    ("dtype", "arch"),
    rotated([*itertools.product((torch.float16, torch.float32), ("sm75", "sm80", "sm90"))], 3, "sums"),
    ids=str,
)
def test_it_compiles_within_the_predicted_resources_to_the_expected_instruction(arch: str, dtype: torch.dtype) -> None:
    device = preset(arch)
    problem = Problem.mm_plus_mm(512, 384, 1000, 520, dtype=dtype, device_type="cuda", precision=Precision())
    configs = chosen_configs(problem, device, "default")
    split = next((config for config in configs if config.split_k > 1), configs[-1])
    for config in (configs[0], split):
        [artifact] = SumChoice.of(problem, device, config).artifacts(device)
        assert artifact.shared_bytes <= artifact.predicted_bytes <= artifact.shared_bytes + artifact.slack_bytes
        assert artifact.predicted_bytes <= device.smem_per_block_bytes
        assert artifact.spilled_share < 0.1
        assert artifact.code


def test_one_kernel_serves_shapes_of_one_class() -> None:
    device, config = preset("sm90"), Config(block_m=64, block_n=64, block_k=64, stages=3, warps=4)
    sizes = [(512, 512, 512, 512), (512, 1024, 512, 256), (1024, 512, 128, 4096)]
    keys = {SumChoice.of(Problem.mm_plus_mm(*size, device_type="cuda"), device, config).compile_key for size in sizes}
    assert len(keys) == 1
    uneven = SumChoice.of(Problem.mm_plus_mm(512, 512, 512, 500, device_type="cuda"), device, config)
    assert uneven.compile_key not in keys


def test_variants_overlap_the_previous_kernel() -> None:
    choice = SumChoice.of(Problem.mm_plus_mm(512, 512, 512, device_type="cuda"), preset("sm90"), WIDE)
    assert [variant.name for variant in choice.launch_variants()] == [f"{choice.name}_pdl"]
    assert not SumChoice.of(Problem.mm_plus_mm(512, 512, 512, device_type="cuda"), preset("sm80"), WIDE).launch_variants()
