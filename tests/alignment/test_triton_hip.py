"""Triton's configs for AMD GPUs: offers, compiler options, and properties of the compiled kernels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from rotation import rotated

from gemmtune.architectures.inspection import faults
from gemmtune.backends.triton import BACKEND
from gemmtune.backends.triton.backend import chosen_configs
from gemmtune.backends.triton.build import KernelChoice, TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.hip import MODES, HipConfig, hip_pool, most_hip_registers, why_not_on_hip, with_modes
from gemmtune.backends.triton.sums import predicate_for
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.settings import Settings

pytestmark = pytest.mark.rotates(9)

ARCHS = ("gfx90a", "gfx942")
LARGE = Problem.mm(4096, 4096, 4096, device_type="cuda")
WIDE = HipConfig(block_m=256, block_n=128, block_k=64, stages=2, warps=8)


def test_modes_contain_each_pair_of_option_values_once() -> None:
    for one, other in itertools.combinations(MODES[0], 2):
        pairs = [(mode[one], mode[other]) for mode in MODES]
        assert len(set(pairs)) == len(MODES)
        assert set(pairs) == set(itertools.product({a for a, _ in pairs}, {b for _, b in pairs}))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "problem",
    [LARGE, Problem.mm(16, 4096, 4096, device_type="cuda"), Problem.mm(500, 504, 1001, dtype=torch.float64, device_type="cuda")],
    ids=str,
)
def test_offers_have_hip_options_and_fit_the_device(arch: str, problem: Problem) -> None:
    device = preset(arch)
    predicate = predicate_for(problem, device)
    configs = chosen_configs(problem, device, "default")
    assert len(configs) == len(set(configs)) == 24
    for config in configs:
        assert isinstance(config, HipConfig)
        assert predicate.check(config) is None
        assert predicate.resources(config).smem_bytes <= 64 * 1024
        assert config.stages <= 2
    modes = {tuple(config.compile_options.values()) for config in configs if isinstance(config, HipConfig)}
    assert tuple(MODES[0].values()) in modes
    assert len(modes) >= 2


def test_offers_need_neither_tma_nor_overlapping_launches() -> None:
    for choice in BACKEND.enumerate(LARGE, preset("gfx942"), Settings()).choices:
        assert isinstance(choice, KernelChoice)
        assert choice.family == "mm"
        assert not choice.config.pdl
        assert choice.kernels[0].target is not None
        assert (choice.kernels[0].target.backend, choice.kernels[0].target.warp_size) == ("hip", 64)
        assert set(dict(choice.kernels[0].options)) == {"matrix_instr_nonkdim", "kpack", "waves_per_eu"}


def test_other_gpus_get_no_hip_options() -> None:
    choice = chosen_configs(LARGE, preset("sm90"), "quick")[0]
    assert not isinstance(choice, HipConfig)
    assert choice.compile_options == {}
    assert TritonChoice.of(LARGE, preset("sm90"), choice).kernels[0].options == ()


def test_each_mode_has_its_own_name_and_compilation() -> None:
    made = [TritonChoice.of(LARGE, preset("gfx942"), replace(WIDE, **mode)) for mode in MODES]
    assert [choice.name for choice in made] == [
        f"triton:mm_256x128x64_s2_w8_{end}" for end in ("m16_p2", "m32_p2_e2", "m16_p1_e2", "m32_p1")
    ]
    assert len({choice.compile_key for choice in made}) == len(MODES)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "sm90"])
def test_only_gfx942_multiplies_fnuz_floats(arch: str) -> None:
    problem = Problem.scaled_mm(512, 512, 1024, dtype=torch.float8_e4m3fnuz, dtype_b=torch.float8_e5m2fnuz, device_type="cuda")
    offers = BACKEND.enumerate(problem, preset(arch), Settings())
    if arch != "gfx942":
        assert "float8_e4m3fnuz is a float of AMD's gfx942" in offers.refusals[0].reason
        return
    choice = offers.choices[0]
    assert isinstance(choice, KernelChoice)
    types = {argument.type for argument in choice.kernels[0].source.arguments}
    assert {"*fp8e4b8", "*fp8e5b16"} <= types


REASONS = [
    (replace(WIDE, matrix_instr_nonkdim=4), torch.bfloat16, False, "matrix_instr_nonkdim 4: matrix instructions have 16 or 32"),
    (replace(WIDE, block_n=16, matrix_instr_nonkdim=32), torch.bfloat16, False, "matrix_instr_nonkdim 32: the tile is 256x16"),
    (replace(WIDE, matrix_instr_nonkdim=32), torch.float64, False, "float64 has instructions of 16 rows and columns only"),
    (replace(WIDE, block_k=16, kpack=2), torch.float32, True, "kpack 2: Triton 3.7 fails on tf32 if kpack covers all 16"),
]


@pytest.mark.parametrize(("config", "product", "tf32", "reason"), REASONS, ids=[reason[:24] for *_, reason in REASONS])
def test_rejects_missing_matrix_instructions(config: Config, product: torch.dtype, tf32: bool, reason: str) -> None:
    assert reason in str(why_not_on_hip(config, product, tf32=tf32))


def test_waves_of_a_simd_share_registers() -> None:
    few, many = (HipConfig(block_m=256, block_n=256, block_k=64, stages=2, warps=warps) for warps in (4, 8))
    assert (most_hip_registers(few), most_hip_registers(many), most_hip_registers(replace(few, waves_per_eu=2))) == (512, 256, 256)
    predicate = predicate_for(LARGE, preset("gfx942"))
    assert predicate.check(few) is None
    assert predicate.check(many) == "registers: needs about 296 for each thread, 256 are available"  # the compiler spills 128 bytes


def mm(m: int, n: int, k: int, layout: str = "nt", dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem.mm(m, n, k, layout=layout, dtype=dtype, device_type="cuda")


SPILLED: list[tuple[str, Problem, tuple[int, int, int, int], Mapping[str, int]]] = [
    ("gfx90a", mm(1000, 1001, 999), (128, 128, 128, 4), MODES[3]),
    ("gfx90a", mm(1000, 1001, 999, "tn"), (64, 128, 128, 4), MODES[3]),
    ("gfx90a", mm(504, 504, 1024, "tn"), (128, 128, 128, 8), MODES[0]),
    ("gfx90a", mm(512, 6144, 4096, "tn", torch.float32), (256, 256, 16, 4), MODES[0]),
    ("gfx90a", Problem.int_mm(1000, 1001, 999, layout="tn", device_type="cuda"), (64, 128, 128, 4), MODES[0]),
    ("gfx942", mm(1000, 1001, 999), (64, 128, 128, 2), MODES[0]),
    ("gfx942", mm(512, 6144, 4096, "tt"), (256, 256, 32, 4), MODES[3]),
    ("gfx942", mm(128, 128, 65536, "nn", torch.float32), (64, 32, 128, 4), MODES[1]),
    ("gfx942", mm(384, 640, 768, "nn", torch.float16), (128, 32, 128, 1), MODES[0]),
    ("gfx942", mm(1000, 1001, 1024, "nt", torch.float64), (128, 256, 16, 4), MODES[0]),
]


@pytest.mark.parametrize(("arch", "problem", "tile", "mode"), SPILLED, ids=str)
def test_rejects_tiles_whose_registers_spill(
    arch: str, problem: Problem, tile: tuple[int, int, int, int], mode: Mapping[str, int]
) -> None:
    block_m, block_n, block_k, warps = tile
    config = HipConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=2, warps=warps, **mode)
    assert str(predicate_for(problem, preset(arch)).check(config)).startswith("registers: needs about")


@pytest.mark.parametrize("arch", ARCHS)
def test_large_tiles_that_fit_are_offered(arch: str) -> None:
    predicate = predicate_for(LARGE, preset(arch))
    for block_m, block_n, block_k, warps in ((256, 256, 64, 4), (256, 256, 32, 4), (256, 128, 64, 8), (128, 128, 128, 8)):
        config = HipConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=2, warps=warps, **MODES[0])
        assert predicate.check(config) is None


def test_other_modes_rotate() -> None:
    pool = [config for config in hip_pool() if config.block_m >= 32 and config.block_n >= 32][:9]
    made = with_modes(pool, 6, lambda _: True)
    assert made[:3] == pool[:3]
    assert [config.compile_options for config in made[3:]] == [dict(mode) for mode in MODES[1:]]
    assert len(with_modes(pool, None, lambda _: True)) == len(pool) * len(MODES)
    assert with_modes(pool, 6, lambda _: False) == pool[:6]


def test_only_gfx942_has_tf32_and_gfx90a_flushes_16_bit_subnormals() -> None:
    tf32 = Problem.mm(512, 512, 512, dtype=torch.float32, device_type="cuda")
    tf32 = replace(tf32, precision=replace(tf32.precision, input_mode="tf32"))
    small = HipConfig(block_m=64, block_n=64, block_k=32, stages=2, warps=4)
    precision = {arch: TritonChoice.of(tf32, preset(arch), small).spec.input_precision for arch in ARCHS}
    assert precision == {"gfx90a": "ieee", "gfx942": "tf32"}
    assert BACKEND.enumerate(tf32, preset("gfx90a"), Settings()).choices
    flushes = {arch: TritonChoice.of(LARGE, preset(arch), WIDE).claims.flush_subnormals for arch in ARCHS}
    assert flushes == {"gfx90a": True, "gfx942": False}
    wide = replace(LARGE, a=replace(LARGE.a, dtype=torch.float32), b=replace(LARGE.b, dtype=torch.float32))
    wide = replace(wide, out=replace(wide.out, dtype=torch.float32))
    assert not TritonChoice.of(wide, preset("gfx90a"), WIDE).claims.flush_subnormals


Case = tuple[Problem, tuple[int, int, int, int], Mapping[str, int]]
CASES: list[Case] = [
    (LARGE, (256, 256, 64, 4), MODES[0]),
    (LARGE, (128, 128, 64, 4), MODES[1]),
    (LARGE, (256, 128, 64, 8), MODES[3]),
    (Problem.mm(4096, 4096, 4096, dtype=torch.float16, layout="tn", device_type="cuda"), (256, 128, 64, 4), MODES[0]),
    (Problem.mm(4096, 4096, 4096, dtype=torch.float32, device_type="cuda"), (128, 128, 32, 4), MODES[3]),
    (Problem.mm(512, 512, 512, dtype=torch.float64, device_type="cuda"), (64, 64, 16, 4), MODES[0]),
    (Problem.mm(16, 4096, 4096, device_type="cuda"), (16, 64, 256, 1), MODES[0]),
    (Problem.mm(500, 504, 1001, device_type="cuda"), (64, 32, 64, 4), MODES[2]),
]
FNUZ = Problem.scaled_mm(512, 512, 1024, dtype=torch.float8_e4m3fnuz, scales="row", device_type="cuda")


@pytest.mark.parametrize(
    ("arch", "case"),
    [*rotated([*itertools.product(ARCHS, CASES)], 4, "hip"), ("gfx942", (FNUZ, (64, 64, 256, 2), MODES[0]))],
    ids=lambda value: value if isinstance(value, str) else str(value[0]),
)
def test_compiled_resources_match_legality(arch: str, case: Case) -> None:
    problem, (block_m, block_n, block_k, warps), mode = case
    config = HipConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=2, warps=warps, **mode)
    device = preset(arch)
    predicate = predicate_for(problem, device)
    assert predicate.check(config) is None
    [artifact] = TritonChoice.of(problem, device, config).artifacts(device)
    assert list(faults(artifact, device)) == []
    assert artifact.stack_bytes == 0, "no scratch"
    assert artifact.registers is not None
    assert artifact.registers <= most_hip_registers(config)
    need = predicate.resources(config)
    assert artifact.shared_bytes <= need.smem_bytes
    assert 0.7 * artifact.registers <= need.registers <= 2 * artifact.registers, "generous where narrow accesses may spill"


@pytest.mark.parametrize(
    "problem",
    [Problem.bsr_mm(64, 512, 512, device_type="cuda"), Problem.grouped_mm(256, 512, 512, device_type="cuda")],
    ids=lambda problem: problem.op,
)
def test_block_sparse_and_grouped_kernels_use_matrix_instructions(problem: Problem) -> None:
    device = preset("gfx942")
    choice = BACKEND.enumerate(problem, device, Settings()).choices[0]
    assert isinstance(choice, KernelChoice)
    [artifact] = choice.artifacts(device)
    assert str(artifact.expected).startswith("v_mfma_f32_")
    assert list(faults(artifact, device)) == []
    assert artifact.stack_bytes == 0, "no scratch"
