"""Stream-K, atomic split-K and decompose-K: what they are offered for, and that every block of a sum is added up once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.backends.table import load
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.splits import decompose, offers, streamk
from gemmtune.backends.triton.splits.streamk import StreamConfig, StreamGeometry, stream_geometry
from gemmtune.device import preset
from gemmtune.filters import filtered
from gemmtune.problem import Precision, Problem
from gemmtune.settings import Settings

LONG = Problem.mm(128, 256, 16384, device_type="cuda")


def pieces(where: StreamGeometry, blocks: int, program: int) -> list[tuple[int, int, int]]:
    """(tile, first block, end block) of the cut tiles that the program works on, in its order."""
    begin = program * where.blocks_per_program
    end = min(begin + where.blocks_per_program, where.cut_tiles * blocks)
    tiles = range(begin // blocks, -(-end // blocks)) if begin < end else range(0)
    return [(tile, max(begin - tile * blocks, 0), min(end - tile * blocks, blocks)) for tile in tiles]


@given(
    shape=st.tuples(st.integers(1, 700), st.integers(1, 700), st.integers(1, 5000)),
    sm_count=st.integers(1, 40),
    resident=st.integers(1, 2),
    waves=st.integers(0, 1),
)
def test_every_block_is_added_up_once(shape: tuple[int, int, int], sm_count: int, resident: int, waves: int) -> None:
    device = replace(preset("sm90"), sm_count=sm_count)
    config = StreamConfig(block_m=64, block_n=64, block_k=64, stages=3, warps=4, resident=resident, waves=waves)
    problem = Problem.mm(*shape, device_type="cuda")
    where, blocks = stream_geometry(problem, device, config), -(-shape[2] // 64)
    seen: Counter[tuple[int, int]] = Counter()
    parts: Counter[int] = Counter()
    for program in range(where.programs):
        cut = pieces(where, blocks, program)
        seen.update((tile, block) for tile, first, end in cut for block in range(first, end))
        partial = [(tile, first, end) for tile, first, end in cut if end - first < blocks]
        parts.update(tile for tile, _, _ in partial)
        # A program keeps a part of its first tile, and one of its last.
        assert len(partial) <= 2
        assert all(tile in (cut[0][0], cut[-1][0]) for tile, _, _ in partial)
    assert seen == Counter((tile, block) for tile in range(where.cut_tiles) for block in range(blocks))
    assert max(parts.values(), default=1) <= where.splits
    for tile, count in parts.items():
        first, last = tile * blocks // where.blocks_per_program, (tile * blocks + blocks - 1) // where.blocks_per_program
        assert count == last - first + 1
    # What is left for whole tiles fills every program.
    assert (where.tiles - where.cut_tiles) % where.programs == 0


STREAM = StreamConfig(block_m=128, block_n=128, block_k=64, stages=4, warps=8)
STREAM_CASES: list[tuple[Any, StreamConfig, str]] = [
    ((2048, 1408, 4096), replace(STREAM, resident=2), "2 times 131"),
    ((1536, 1408, 4096), STREAM, "132 tiles are whole waves of 132 programs"),
    ((1536, 1408, 4096), replace(STREAM, split_k=2), "does not split"),
    ((1537, 1409, 4097), replace(STREAM, described=True), "begin at multiples of 16 bytes"),
    ((1537, 1409, 4097), STREAM, "stages change nothing"),
]


@pytest.mark.parametrize(("shape", "config", "reason"), STREAM_CASES, ids=[case[2] for case in STREAM_CASES])
def test_refusals_of_streamk_name_their_reason(shape: tuple[int, int, int], config: StreamConfig, reason: str) -> None:
    problem = Problem.mm(*shape, device_type="cuda")
    assert reason in str(streamk.why_not_config(problem, preset("sm90"), config))


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
    assert "no multiple" in str(decompose.why_not_slices(LONG, 48))


@pytest.mark.parametrize("why_not", [streamk.why_not_stream, offers.why_not_atomic, decompose.why_not_decomposed])
def test_architectures_without_tensor_cores_for_triton_have_none_of_them(why_not: Any) -> None:
    assert "no tensor cores for Triton" in str(why_not(LONG, preset("sm75")))
    assert all(why_not(LONG, preset(arch)) is None for arch in ("sm80", "sm86", "sm90", "sm100"))


def test_only_atomic_float_sums_depend_on_the_order() -> None:
    device, config = preset("sm90"), Config(block_m=64, block_n=64, block_k=64, stages=4, warps=4, split_k=8)
    assert not offers.AtomicChoice.of(LONG, device, config).claims.deterministic
    whole = Problem.int_mm(128, 256, 16384, layout="nt", device_type="cuda")
    assert offers.AtomicChoice.of(whole, device, config).claims.deterministic
    assert decompose.decomposed_choice(LONG, device, 64, None, pdl=True).claims.deterministic


def _offered(problem: Problem, search: str = "default", *, arch: str = "sm90") -> dict[str, list[str]]:
    """The names of the choices of each family that divides sums."""
    choices = load("triton").enumerate(problem, preset(arch), Settings(search=search)).choices  # type: ignore[arg-type]
    names = [choice.name.removeprefix("triton:").removesuffix("_pdl") for choice in choices]
    assert len(names) == len(set(names))
    return {family: [name for name in names if name.startswith(family)] for family in ("streamk", "decompose", "atomic")}


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


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposed_sums_are_tried_where_they_have_a_chance(name: str) -> None:
    problem, expected = DECOMPOSED[name]
    offered = [name.removeprefix("decompose_") for name in _offered(problem)["decompose"]]
    assert len(offered) == len(expected)
    assert all(name.startswith(beginning) for name, beginning in zip(offered, expected, strict=True))
    assert _offered(problem, "quick")["decompose"] == []


def test_blocks_are_dealt_out_where_whole_tiles_leave_multiprocessors_idle() -> None:
    last_wave, whole_waves = ((1536, 1536, 8192), (1536, 1408, 8192))
    assert len(_offered(Problem.int_mm(*last_wave, layout="nn", device_type="cuda"))["streamk"]) == 1
    assert _offered(Problem.int_mm(*last_wave, layout="nt", device_type="cuda"))["streamk"] == []
    assert _offered(Problem.int_mm(*whole_waves, layout="nn", device_type="cuda"))["streamk"] == []
    assert _offered(Problem.mm(*last_wave, device_type="cuda"))["streamk"] == []
    assert len(_offered(Problem.mm(*last_wave, device_type="cuda"), "exhaustive")["streamk"]) > 10


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
def test_sums_of_two_products_and_batches_are_not_cut_into_batches(search: str) -> None:
    pair = Problem.mm_plus_mm(64, 64, 8192, 8192, device_type="cuda")
    assert _offered(pair, search) == {"streamk": [], "decompose": [], "atomic": []}
    assert _offered(Problem.bmm(2, 64, 64, 8192, device_type="cuda"), search)["decompose"] == []
