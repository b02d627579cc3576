"""Legality predicate and enumeration of the Triton backend, without a GPU, for every preset architecture."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gemmtune.backends.table import load
from gemmtune.backends.triton.arch import arch_of
from gemmtune.backends.triton.backend import legal_configs
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.configs import Config, geometry, pool
from gemmtune.backends.triton.legality import Predicate, check_problem
from gemmtune.backends.triton.parts import PartsPredicate
from gemmtune.backends.triton.persistent import persistent_choices, persistent_resources
from gemmtune.backends.triton.rank import estimate_us, ranked
from gemmtune.backends.triton.sums import SumPredicate
from gemmtune.choice import Choice
from gemmtune.device import PRESETS, preset
from gemmtune.effort import EFFORT
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.settings import Settings

pytestmark = pytest.mark.rotates(8)

GPUS = sorted(name for name, info in PRESETS.items() if info.type != "cpu")
BACKEND = load("triton")
QUICK = Settings(search="quick")

problems = st.builds(
    lambda shape, dtype, layout, tf32, offset: _with_offset(
        Problem.mm(
            *shape,
            dtype=dtype,
            layout=layout,
            device_type="cuda",
            precision=Precision(input_mode="tf32" if tf32 and dtype == torch.float32 else "ieee"),
        ),
        offset,
    ),
    st.tuples(*[st.integers(1, 9) | st.integers(1, 20000)] * 3),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from(["nn", "nt", "tn", "tt"]),
    st.booleans(),
    st.integers(0, 1),
)


def _with_offset(problem: Problem, offset: int) -> Problem:
    return replace(problem, a=replace(problem.a, offset=offset))


def _offers(problem: Problem, arch: str, search: str = "default") -> list[TritonChoice]:
    choices = BACKEND.enumerate(problem, preset(arch), Settings(search=search)).choices  # type: ignore[arg-type]
    return [choice for choice in choices if isinstance(choice, TritonChoice)]


@pytest.mark.parametrize("arch", GPUS)
@given(problem=problems)
@hypothesis_settings(max_examples=5)
def test_every_offer_fits_the_device(arch: str, problem: Problem) -> None:
    device = preset(arch)
    choices = _offers(problem, arch)
    assert 1 <= len(choices) <= 24
    assert len({c.name for c in choices}) == len(choices)
    assert len({c.content_hash for c in choices}) == len(choices)
    for choice in choices:
        config = choice.config
        assert Predicate(problem, device).check(config) is None
        need = Predicate(problem, device).resources(config)
        assert need.smem_bytes <= device.smem_per_block_bytes
        assert need.registers <= arch_of(device).registers_per_thread
        assert config.warps * device.warp_size <= 1024
        assert geometry(problem, config).splits == config.split_k == choice.claims.splits


@given(problem=problems, split_k=st.integers(1, 64), block_k=st.sampled_from([16, 32, 64, 128]))
def test_every_block_of_the_sum_belongs_to_one_split(problem: Problem, split_k: int, block_k: int) -> None:
    config = Config(block_m=16, block_n=16, block_k=block_k, stages=2, warps=1, split_k=split_k)
    where = geometry(problem, config)
    assert where.k_per_split % block_k == 0
    assert (where.splits - 1) * where.k_per_split < problem.k <= where.splits * where.k_per_split


@pytest.mark.parametrize("search", EFFORT)
def test_each_search_has_its_declared_size(search: str) -> None:
    problem = Problem.mm(512, 6144, 4096, device_type="cuda")
    count, most = len(_offers(problem, "sm90", search)), EFFORT[search].configs["triton:mm"]
    others = len(persistent_choices(problem, preset("sm90"), EFFORT[search].configs["triton:persistent"]))
    assert others > 1
    assert count == (len(legal_configs(Predicate(problem, preset("sm90")))) if most is None else most - others)
    assert search != "exhaustive" or count > 200


def test_a_larger_search_keeps_the_smaller_one_first() -> None:
    problem = Problem.mm(16, 6144, 4096, device_type="cuda")
    quick, default = _offers(problem, "sm90", "quick"), _offers(problem, "sm90")
    assert quick[0].name == default[0].name
    assert {c.name for c in default} <= {c.name for c in _offers(problem, "sm90", "exhaustive")} | {
        c.name for c in default if c.config.group_m != 8
    }


SHAPES = [(1, 6144, 4096), (16, 4096, 14336), (64, 6144, 4096), (512, 6144, 4096), (4096, 4096, 4096), (12608, 3072, 768)]


def test_tuning_many_shapes_compiles_each_kernel_once() -> None:
    choices = [c for m, n, k in SHAPES for c in _offers(Problem.mm(m, n, k, device_type="cuda"), "sm90")]
    keys = {c.compile_key for c in choices}
    assert len(keys) < 0.8 * len(choices)
    by_key: dict[object, set[tuple[object, ...]]] = {}
    for c in choices:
        by_key.setdefault(c.compile_key, set()).add((c.source.text, c.config.stages, c.config.warps, c.source.arguments))
    assert all(len(kernels) == 1 for kernels in by_key.values())


def test_compile_key_omits_sizes_and_content_hash_has_the_config() -> None:
    one, other = (_offers(Problem.mm(m, 4096, 4096, device_type="cuda"), "sm90", "exhaustive") for m in (4096, 8192))
    keys = {str(c.config): c.compile_key for c in one}
    assert all(keys.get(str(c.config), c.compile_key) == c.compile_key for c in other)


def test_compile_key_has_the_target_and_content_hash_omits_it() -> None:
    problem = Problem.mm(64, 64, 64, device_type="cuda")
    a, b = ({str(c.config): c for c in _offers(problem, arch)} for arch in ("sm80", "sm86"))
    name = next(iter(a.keys() & b.keys()))
    assert a[name].compile_key != b[name].compile_key
    assert a[name].content_hash == b[name].content_hash


@pytest.mark.parametrize(
    ("m", "n", "k", "tile_m"), [(1, 6144, 4096, 16), (16, 6144, 4096, 16), (64, 6144, 4096, 64), (4096, 4096, 4096, 128)]
)
def test_the_model_prefers_tiles_that_suit_the_rows(m: int, n: int, k: int, tile_m: int) -> None:
    assert _offers(Problem.mm(m, n, k, device_type="cuda"), "sm90")[0].config.block_m == tile_m


def test_few_tiles_and_a_long_sum_are_split() -> None:
    assert all(c.config.split_k > 1 for c in _offers(Problem.mm(128, 128, 65536, device_type="cuda"), "sm90")[:8])
    assert all(c.config.split_k == 1 for c in _offers(Problem.mm(8192, 8192, 8192, device_type="cuda"), "sm90"))


def test_configs_of_equal_time_are_ranked_by_name() -> None:
    first, second = sorted((replace(pool()[0], stages=stages) for stages in (2, 3)), key=str)
    assert ranked([(2.0, second), (2.0, first), (1.0, second)]) == [(1.0, second), (2.0, first), (2.0, second)]


def test_the_model_counts_waves() -> None:
    device = replace(preset("sm90"), sm_count=128)
    config = Config(block_m=128, block_n=256, block_k=64, stages=3, warps=8)
    full, spill_over = (Problem.mm(128 * rows, 4096, 4096, device_type="cuda") for rows in (8, 9))
    times = [estimate_us(p := Predicate(problem, device), config, p.resources(config)) for problem in (full, spill_over)]
    assert times[1] > 1.6 * times[0]


def _config(m: int, n: int, k: int, stages: int, warps: int, split_k: int = 1) -> Config:
    return Config(block_m=m, block_n=n, block_k=k, stages=stages, warps=warps, split_k=split_k)


LARGE, SMALL, ODD = (4096, 4096, 4096), (16, 4096, 1024), (1000, 1001, 999)
CASES = [
    (_config(256, 128, 64, 2, 4), LARGE, "registers: needs about 288"),
    (_config(128, 256, 128, 4, 8), LARGE, "takes 393216 bytes of shared memory"),
    (_config(64, 64, 64, 3, 4), SMALL, "block_m 64: half of it or more"),
    (_config(16, 64, 64, 3, 4, 64), SMALL, "split_k 64: k = 1024 has 16"),
    (_config(16, 64, 64, 3, 4, 9), SMALL, "leave a split without work"),
    (_config(64, 64, 64, 2, 4), ODD, "stages have no effect"),
    (_config(64, 64, 16, 2, 4), LARGE, "rows of less than 64 bytes"),
    (_config(64, 64, 8, 2, 4), LARGE, "at least 16"),
    (_config(64, 64, 64, 2, 64), LARGE, "more than 1024 threads"),
    (_config(64, 64, 64, 2, 4, 64), (8192, 8192, 8192), "bytes of partial sums"),
]


@pytest.mark.parametrize(("config", "shape", "reason"), CASES, ids=[case[2][:24] for case in CASES])
def test_refusals_name_their_reason(config: Config, shape: tuple[int, int, int], reason: str) -> None:
    found = Predicate(Problem.mm(*shape, device_type="cuda"), preset("sm90")).check(config)
    assert found is not None
    assert reason in found


NEEDS = {
    (Predicate, Problem.mm(512, 512, 512, device_type="cuda")): {
        "sm75": (32768, 96), "sm80": (32768, 144), "sm90": (36864, 96), "sm100": (36928, 96), "gfx942": (24576, 103),
    },
    (SumPredicate, Problem.mm_plus_mm(512, 512, 512, device_type="cuda")): {
        "sm75": (32768, 104), "sm80": (32768, 152), "sm90": (36864, 104), "sm100": (36928, 104), "gfx942": (24576, 111),
    },
    (PartsPredicate, Problem.mm(512, 512, 512, dtype=torch.float32, device_type="cuda")): {
        "sm75": (32768, 256), "sm80": (49152, 424), "sm90": (61440, 232), "sm100": (73792, 232), "gfx942": (49152, 378),
    },
}  # fmt: skip
"""By predicate and problem: the modelled bytes of shared memory and registers of one config on each architecture."""


def test_each_architecture_has_its_needs() -> None:
    config = Config(block_m=128, block_n=64, block_k=32, stages=3, warps=4)
    for (kind, problem), needs in NEEDS.items():
        found = {arch: kind(problem, preset(arch)).resources(config) for arch in needs}
        assert {arch: (x.smem_bytes, x.registers) for arch, x in found.items()} == needs, kind


def test_a_persistent_kernel_holds_an_added_matrix_in_registers() -> None:
    """A thread has its part of the tile, or of half of a large tile. A row takes none."""
    device, size = preset("sm90"), (4096, 4096, 4096)
    for config, part in (
        (Config(block_m=128, block_n=64, block_k=64, stages=3, warps=4), 64),
        (Config(block_m=128, block_n=256, block_k=64, stages=3, warps=8), 64),
    ):
        need = persistent_resources(Problem.mm(*size, device_type="cuda"), device, config)
        added = {bias: Problem.addmm(*size, bias=bias, device_type="cuda") for bias in ("n", "mn")}
        found = {bias: persistent_resources(problem, device, config).registers for bias, problem in added.items()}
        assert found == {"n": need.registers, "mn": need.registers + part}


def test_more_shared_memory_and_fewer_stages_stay_legal() -> None:
    problem = Problem.mm(4096, 4096, 4096, device_type="cuda")
    small, large = preset("sm86"), preset("sm80")
    for config in pool()[::7]:
        if Predicate(problem, small).check(config) is None:
            assert Predicate(problem, large).check(config) is None
        if config.stages > 2 and Predicate(problem, small).check(config) is None:
            assert Predicate(problem, small).check(replace(config, stages=config.stages - 1)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"block_m": 48}, "block_m: got 48, expected a power of two"), ({"stages": 0}, "stages: got 0, expected at least 1")],
)
def test_a_config_checks_its_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{"block_m": 16, "block_n": 16, "block_k": 16, "stages": 1, "warps": 1} | changes)


def test_unserved_problems_are_refused_with_a_reason() -> None:
    device = preset("sm90")
    empty = Problem.mm(0, 16, 16, device_type="cuda")
    assert "no elements" in str(check_problem(empty, device))
    offers = BACKEND.enumerate(empty, device, QUICK)
    assert not offers.choices
    assert "no elements" in offers.refusals[0].reason
    huge = Problem(
        op="mm",
        a=Layout(size=(2**31, 16), stride=(16, 1), dtype=torch.float16),
        b=Layout(size=(16, 16), stride=(16, 1), dtype=torch.float16),
        out=Layout(size=(2**31, 16), stride=(16, 1), dtype=torch.float16),
        device_type="cuda",
    )
    assert "32 bits" in str(check_problem(huge, device))
    assert "sm75 and newer" in str(check_problem(Problem.mm(16, 16, 16, device_type="cuda"), replace(device, arch="sm70")))


def test_an_unknown_architecture_counts_as_an_older_known_one() -> None:
    assert arch_of(replace(preset("sm90"), arch="sm103")) == arch_of(preset("sm100"))
    assert arch_of(replace(preset("sm90"), arch="sm87")) == arch_of(preset("sm86"))


def test_choices_can_be_pickled() -> None:
    choice: Choice = _offers(Problem.mm(512, 1024, 256, device_type="cuda"), "sm90", "quick")[0]
    copy = pickle.loads(pickle.dumps(choice))
    assert copy == choice
    assert (copy.content_hash, copy.compile_key) == (choice.content_hash, choice.compile_key)


def test_a_cpu_is_served_by_the_interpreter_only_and_not_by_default() -> None:
    device = preset("avx512")
    assert not BACKEND.serves_by_default(device)
    assert BACKEND.serves_by_default(preset("sm90"))
    availability = BACKEND.available(device)
    assert not availability.ok
    assert "TRITON_INTERPRET=1" in availability.detail
    assert BACKEND.available(preset("sm90")).ok
    choices = BACKEND.enumerate(Problem.mm(64, 64, 64, device_type="cpu"), device, QUICK).choices
    assert choices
    assert all(c.compile_key is None for c in choices)


def test_without_triton_the_backend_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    availability = BACKEND.available(preset("sm90"))
    assert not availability.ok
    assert "pip install 'gemmtune[triton]'" in availability.detail
