"""Triton's kernel of block-sparse products in the interpreter: verification with its own claims, and panels."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
from rotation import rotated

from gemmtune.backends.triton.blocks import rows
from gemmtune.backends.triton.blocks.choice import ranked
from gemmtune.backends.triton.blocks.configs import BlocksConfig, Rows, why_not_config
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.numerics.block_sparse import panels_of, parts
from gemmtune.problem import Problem
from gemmtune.sparse import create_blocked_tensor

pytest.importorskip("triton", reason="the interpreter is Triton's")

import triton_jobs
from interpreter import Run

pytestmark = [pytest.mark.filterwarnings("ignore:Sparse BSR tensor support"), pytest.mark.rotates(9)]
SMALL = BlocksConfig(block_m=16, block_n=16, block_k=16, stages=1, warps=1)
SWAPPED = BlocksConfig(block_m=16, block_n=32, block_k=32, stages=1, warps=1, swap=True)
SPLIT = BlocksConfig(block_m=16, block_n=16, block_k=32, stages=1, warps=1, split_k=3)

VERIFIED = {
    "bf16-blocks-of-two-tiles": (
        Problem.bsr_addmm(
            17, 64, 96, block=32, density=0.3, imbalance="skewed", wide_index=True, alpha=2, beta=0.5, device_type="cpu"
        ),
        SMALL,
    ),
    "fp32-joined": (Problem.bsr_mm(5, 48, 72, block=(8, 24), dtype=torch.float32, device_type="cpu", prepacked=True), SWAPPED),
    "fp64-split": (Problem.bsr_mm(3, 32, 192, block=32, dtype=torch.float64, layout="tt", device_type="cpu"), SPLIT),
    "e4m3-swapped": (
        Problem.bsr_mm(17, 64, 96, block=32, dtype=torch.float8_e4m3fn, density=0.3, device_type="cpu", prepacked=True),
        SWAPPED,
    ),
    "bf16-alike-split": (
        Problem.bsr_addmm(5, 80, 96, block=(16, 32), density=0.4, alpha=2, beta=0.5, device_type="cpu", prepacked=True),
        dataclasses.replace(SPLIT, block_n=32, rows="alike"),
    ),
    "fp32-pairs": (
        Problem.bsr_mm(17, 72, 64, block=(24, 16), dtype=torch.float32, device_type="cpu", imbalance="skewed", prepacked=True),
        dataclasses.replace(SMALL, rows="pairs"),
    ),
    "int8-pairs-swapped": (
        Problem.bsr_mm(9, 160, 64, block=16, dtype=torch.int8, layout="tt", device_type="cpu", prepacked=True),
        dataclasses.replace(SWAPPED, rows="pairs"),
    ),
    "int8-cut": (Problem.bsr_mm(16, 64, 64, block=64, dtype=torch.int8, device_type="cpu", prepacked=True), SWAPPED),
}


@pytest.mark.parametrize("name", rotated(list(VERIFIED), 2, "blocks"))
def test_verification_accepts_the_kernel_with_its_own_claims(interpreted: Run, name: str) -> None:
    problem, config = VERIFIED[name]
    [verdict] = interpreted(triton_jobs.verdicts, problem, [config], family=triton_jobs.blocked)
    assert verdict.status is Status.OK, verdict.reason


@pytest.mark.parametrize("panel", [(16, 16), (32, 16), (16, 64), (64, 128), (8, 24)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_panels_hold_the_same_matrix(panel: tuple[int, int], density: float) -> None:
    weight = create_blocked_tensor(48, 72, block=(8, 24), density=density, index_dtype=torch.int64)
    packed = panels_of(weight, *panel)
    assert packed.values().shape[1:] == panel
    assert packed.col_indices().dtype == packed.crow_indices().dtype == torch.int32
    whole = packed.to_dense()
    assert torch.equal(whole[:48, :72], weight.to_dense())
    assert whole.count_nonzero() == weight.to_dense().count_nonzero()
    torch.sparse_bsr_tensor(
        *(x.clone() for x in (packed.crow_indices(), packed.col_indices(), packed.values())), check_invariants=True
    )


def shuffled(mask: torch.Tensor) -> torch.Tensor:
    return mask[torch.randperm(len(mask), generator=torch.Generator().manual_seed(3))]


def columns_read(mask: torch.Tensor, order: torch.Tensor, joined: int) -> int:
    whole = torch.cat([mask, mask.new_zeros(len(order) - len(mask), mask.shape[1])])[order]
    return int(whole.unflatten(0, (-1, joined)).any(dim=1).sum())


def test_rows_with_the_most_common_columns_share_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    fours = shuffled(torch.eye(8, dtype=torch.bool).repeat_interleave(4, 0))
    band = (torch.arange(32).unsqueeze(1) - torch.arange(32)).abs() < 4
    chance = torch.rand(30, 32, generator=torch.Generator().manual_seed(4)) < 0.5
    for most_compared in (rows.MOST_COMPARED, 16):
        monkeypatch.setattr(rows, "MOST_COMPARED", most_compared)
        for mask in (fours, band, chance, torch.zeros_like(band), chance[:, :0], chance[:1]):
            for joined in (1, 2, 4):
                order = rows.most_alike(mask, joined)
                assert len(order) % joined == 0
                assert torch.equal(order.sort().values, torch.arange(len(order)))
                assert columns_read(mask, order, joined) <= columns_read(mask, torch.arange(len(order)), joined)
    monkeypatch.undo()
    assert columns_read(fours, rows.most_alike(fours, 4), 4) == 8
    assert columns_read(chance, rows.most_alike(chance, 2), 2) < 0.95 * columns_read(chance, torch.arange(30), 2)
    lengths = chance[rows.most_alike(chance, 1)].sum(dim=1)
    assert torch.equal(lengths, lengths.sort(descending=True).values)


def test_remaining_rows_are_paired_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_ROUNDS", 1)
    chain = (torch.arange(40).unsqueeze(1) <= torch.arange(40)) & (torch.arange(40).unsqueeze(1) % 8 != 5)
    order = rows.most_alike(shuffled(chain), 4)
    assert torch.equal(order.sort().values, torch.arange(40))


def test_paired_panels_hold_each_block_once() -> None:
    weight = create_blocked_tensor(88, 96, block=(8, 24), density=0.4)
    config = dataclasses.replace(SMALL, block_k=32, rows="pairs")
    whole = rows.packed(weight, config)
    values, crow, col = parts(whole)
    starts, order = crow[: 3 * 3 + 1].tolist(), crow[3 * 3 + 1 :]
    assert starts[-1] == len(col)
    dense = torch.zeros(96, 96)
    for i, (begin, behind) in enumerate(itertools.pairwise(starts)):
        pair, part = divmod(i, 3)
        for place in range(begin, behind):
            row, column = 16 * (2 * pair + ((place - begin) % 2 if part == 0 else part - 1)), 32 * int(col[place])
            dense[row : row + 16, column : column + 32] += values[place]
        if part == 0:
            assert torch.equal(col[begin:behind:2], col[begin + 1 : behind : 2])
    back = torch.empty(12, 8, 96)
    back[order.long()] = dense.view(12, 8, 96)
    assert torch.equal(back.view(96, 96)[:88], weight.to_dense())


@pytest.mark.parametrize("order", ["alike", "pairs"])
def test_reordered_rows_compile_into_an_asynchronous_pipeline(order: Rows) -> None:
    device = preset("sm90")
    problem = Problem.bsr_mm(4096, 4096, 4096, block=64, device_type="cuda", prepacked=True)
    config = next(config for config in ranked(problem, device)[:24] if config.rows == order)
    [artifact] = triton_jobs.BlocksChoice.of(problem, device, config).artifacts(device)
    assert artifact.shared_bytes == artifact.predicted_bytes
    assert artifact.spilled_share == 0
    loops = 1 if order == "alike" else 3
    left = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+([1-9])", artifact.code)
    assert len(left) == loops
    few = Problem.bsr_mm(1000, 4096, 4096, block=64, device_type="cuda", prepacked=True)
    assert triton_jobs.BlocksChoice.of(problem, device, config).at(few, device).where.grid == (128, 1, 1)
    small = Problem.bsr_mm(1000, 128, 4096, block=64, device_type="cuda", prepacked=True)
    assert "128 rows share one panel in any order" in triton_jobs.BlocksChoice.of(problem, device, config).at(small, device)
    assert why_not_config(problem, device, dataclasses.replace(config, rows="pairs", split_k=2))
    unpacked = dataclasses.replace(problem, prepacked=False)
    assert "gemmtune.prepack" in str(why_not_config(unpacked, device, dataclasses.replace(config, block_n=64)))


@pytest.mark.parametrize("block", [16, (32, 64)], ids=str)
@pytest.mark.parametrize("tokens", [16, 4096])
def test_every_config_fits_and_the_best_compile(tokens: int, block: int | tuple[int, int]) -> None:
    device = preset("sm90")
    problem = Problem.bsr_mm(tokens, 4096, 4096, block=block, device_type="cuda", prepacked=True)
    configs = ranked(problem, device)
    assert {why_not_config(problem, device, config) for config in configs} == {None}
    assert any(config.split_k > 1 for config in configs) == (tokens == 16)
    assert {config.stages for config in configs} == ({3, 4, 5} if tokens == 16 else {3, 4})
    choice = triton_jobs.BlocksChoice.of(problem, device, configs[0])
    [artifact] = choice.artifacts(device)
    assert artifact.shared_bytes <= device.smem_per_block_bytes
    assert artifact.spilled_share == 0


@pytest.mark.parametrize("tokens", [16, 4096])
def test_8_bit_floats_are_widened_to_float16(tokens: int) -> None:
    device = preset("sm90" if tokens == 16 else "sm80")  # sm80 has to convert them by their bits
    problem = Problem.bsr_mm(tokens, 4096, 4096, block=64, dtype=torch.float8_e4m3fn, device_type="cuda", prepacked=True)
    config = ranked(problem, device)[0]
    [artifact] = triton_jobs.BlocksChoice.of(problem, device, config).artifacts(device)
    assert artifact.spilled_share < 0.05
    assert artifact.shared_bytes <= device.smem_per_block_bytes
    assert "f32.f16.f16" in artifact.code
    assert "e4m3.e4m3" not in artifact.code


def test_weight_rows_as_left_operand_determine_the_buffered_stages() -> None:
    device = preset("sm90")
    problem = Problem.bsr_mm(16, 512, 768, block=64, device_type="cuda", prepacked=True)
    config = BlocksConfig(block_m=16, block_n=128, block_k=64, stages=3, warps=4, swap=True)
    [artifact] = triton_jobs.BlocksChoice.of(problem, device, config).artifacts(device)
    assert artifact.shared_bytes == artifact.predicted_bytes == 3 * (16 + 128) * 64 * 2
    assert why_not_config(problem, device, config) is None
    too_deep = why_not_config(problem, device, dataclasses.replace(config, block_n=256, block_k=128, stages=4))
    assert too_deep is not None
    assert "takes 278528 bytes of shared memory" in too_deep


def test_blocks_that_need_packing_are_refused_without_it() -> None:
    problem = Problem.bsr_mm(16, 64, 64, block=8, device_type="cuda")
    offers = triton_jobs.offers_of(problem, "sm90")
    assert not offers.choices
    assert "unless gemmtune.prepack" in offers.refusals[0].reason
