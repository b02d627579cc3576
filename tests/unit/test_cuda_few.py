"""The kernel for few rows: what is offered and in which order, its text and compilation, what a launch is told."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_kernels import needs_compiler
from fake_nvcc import FakeNvcc, installed

from gemmtune.backends.cuda import BACKEND
from gemmtune.backends.cuda.few import offers
from gemmtune.backends.cuda.few.build import FewChoice
from gemmtune.backends.cuda.few.configs import SHAPES, Config, Shape
from gemmtune.backends.cuda.few.legality import check_config
from gemmtune.backends.cuda.few.rank import LIKELY, candidates, estimate_us, select
from gemmtune.backends.cuda.few.source import Source
from gemmtune.backends.cuda.mixed.launch import launch_of
from gemmtune.backends.cuda.mixed.weights import Factor, Weights
from gemmtune.choice import Offers
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings

SM90 = preset("sm90")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
WIDE = Shape(eights=2, cols=128, stages=4, warps_n=2, warps_k=4)
GROUPS = Factor(dtype=F16, group=128)
PLAIN = Source(shape=WIDE, weights=Weights(bits=4, signed=True, scale=GROUPS), dtype=F16, out_dtype=F16)
KINDS: list[dict[str, Any]] = [
    {},
    {"scales": "column"},
    {"encoding": "int4", "scales": "group_128"},
    {"encoding": "uint4", "scales": "group_32", "zeros": True},
    {"dtype": BF16, "scales": "group_64"},
]


def mixed_mm(m: int = 16, n: int = 8192, k: int = 8192, **fields: Any) -> Problem:
    return Problem.mixed_mm(m, n, k, device_type="cuda", **fields)


def offered(problem: Problem, search: str = "default", arch: str = "sm90") -> Offers:
    return offers(problem, preset(arch), Settings(search=search))  # type: ignore[arg-type]


def choices(problem: Problem, search: str = "default") -> list[FewChoice]:
    return [choice for choice in offered(problem, search).choices if isinstance(choice, FewChoice)]


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvcc]:
    with installed(tmp_path, monkeypatch) as fake:
        yield fake


@pytest.mark.parametrize("m", [1, 8, 9, 16, 32])
@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_a_search_has_a_few_shapes_and_a_quick_one_the_first_two_of_them(m: int, fields: dict[str, Any]) -> None:
    problem = mixed_mm(m, **fields)
    few = choices(problem)
    assert 1 <= len(few) <= 4
    assert len({choice.config.shape for choice in few}) == len(few)
    assert choices(problem, "quick") == few[:2]
    assert all(check_config(problem, SM90, choice.config) is None for choice in few)


def test_the_backend_has_the_kernel_beside_its_others() -> None:
    problem = mixed_mm(encoding="int4", scales="group_128")
    found = BACKEND.enumerate(problem, SM90, Settings())
    assert found.choices == offered(problem).choices
    assert [refusal.name for refusal in found.refusals] == ["cuda:cluster", "cuda:wide"]


def test_what_is_not_legal_is_one_refusal() -> None:
    for problem, reason in (
        (mixed_mm(33), "a has 33 rows, at most 32 are served"),
        (mixed_mm(k=8), "K is 8, expected a multiple of 16"),
    ):
        found = offered(problem)
        assert not found.choices
        assert [(refusal.name, refusal.reason) for refusal in found.refusals] == [("cuda:few", reason)]


def test_an_exhaustive_search_has_every_legal_shape_of_the_least_rows_that_are_enough() -> None:
    found = choices(mixed_mm(9, encoding="int4"), "exhaustive")
    legal = {shape for shape in SHAPES if shape.eights == 2 and check_config(mixed_mm(9), SM90, Config(shape=shape)) is None}
    assert {choice.config.shape for choice in found} == legal
    assert len(found) > len(legal), "with several numbers of blocks each"
    assert len({choice.name for choice in found}) == len({choice.content_hash for choice in found}) == len(found)


def test_configs_that_are_not_legal_are_counted_by_their_reason() -> None:
    small = dataclasses.replace(SM90, smem_per_block_bytes=64 * 1024)
    problem = mixed_mm(32, encoding="int4")
    found = offers(problem, small, Settings(search="exhaustive"))
    assert not found.choices
    assert sum(refusal.count for refusal in found.refusals) == len(candidates(problem, small))
    assert all("of shared memory, a block has 65536" in refusal.reason for refusal in found.refusals)
    assert all(refusal.name == f"cuda:few:{refusal.count} configs" for refusal in found.refusals)


def test_more_to_do_takes_the_model_longer() -> None:
    config = Config(shape=WIDE, blocks=2)
    times = [estimate_us(mixed_mm(16, n, k), SM90, config) for n, k in ((8192, 4096), (8192, 8192), (16384, 8192), (16384, 16384))]
    assert times == sorted(set(times))
    assert estimate_us(mixed_mm(encoding="int4"), SM90, config) < estimate_us(mixed_mm(), SM90, config)


def test_a_shape_that_takes_the_model_much_longer_is_left_to_an_exhaustive_search() -> None:
    problem = mixed_mm(1, 4096, 14336)
    ordered = candidates(problem, SM90)
    times = [estimate_us(problem, SM90, config) for config in select(problem, SM90, ordered, len(ordered))]
    assert times == sorted(times)
    assert times[-1] <= LIKELY * times[0] < estimate_us(problem, SM90, ordered[-1])


@pytest.mark.parametrize(
    ("problem", "shape", "blocks"),
    [
        (mixed_mm(16, 8192, 8192, encoding="int4", scales="group_128"), (128, 4), 2),
        (mixed_mm(16, 4096, 14336, encoding="int4", scales="group_128"), (64, 8), 2),
        (mixed_mm(16, 6144, 4096, encoding="int4", scales="group_128"), (128, 4), 2),
        (mixed_mm(1, 8192, 8192, encoding="int4", scales="group_128"), (256, 3), 3),
        (mixed_mm(16, 8192, 8192, scales="column"), (128, 8), 2),
        (mixed_mm(16, 4096, 14336, scales="column"), (128, 8), 3),
    ],
    ids=str,
)
def test_a_search_has_what_was_fastest_on_an_h200(problem: Problem, shape: tuple[int, int], blocks: int) -> None:
    tried = {((c.config.shape.cols, c.config.shape.stages), c.config.blocks) for c in choices(problem)}
    assert (shape, blocks) in tried


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_variants_are_told_at_launch_and_need_no_compilation(fields: dict[str, Any]) -> None:
    choice = choices(mixed_mm(**fields))[0]
    near = choice.launch_variants()
    assert {variant.compile_key for variant in near} == {choice.compile_key}
    assert len({variant.content_hash for variant in (choice, *near)}) == len({v.name for v in (choice, *near)}) == len(near) + 1
    for told in ("pdl", "ahead"):
        assert {bool(getattr(variant.config, told)) for variant in (choice, *near)} == {True, False}
    assert len({variant.config.blocks for variant in near}) > 1
    assert all(check_config(variant.problem, SM90, variant.config) is None for variant in near)


def test_the_text_has_the_constants_of_the_shape_and_nothing_left_to_fill() -> None:
    text = PLAIN.text
    assert "constexpr int COLS = 128;" in text
    assert "constexpr int SCALE_GROUP = 128;" in text
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in text
    assert "ZERO_GROUP" not in text
    for mark in ("{{", "{%", "{#"):
        assert mark not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": SHAPES[-1]},
        {"dtype": BF16},
        {"out_dtype": F32},
        {"weights": Weights(bits=4, signed=False, scale=GROUPS)},
        {"weights": Weights(bits=8, signed=True, scale=GROUPS)},
        {"weights": Weights(bits=4, signed=True)},
        {"weights": Weights(bits=4, signed=True, scale=GROUPS, zero=GROUPS)},
        {"weights": Weights(bits=4, signed=True, scale=Factor(dtype=F32, group=128))},
        {"weights": Weights(bits=4, signed=True, scale=Factor(dtype=F16, group=0))},
        {"operands": (BF16,), "epilogue": trace(lambda acc, x: acc + x, F32, [torch.empty(8, dtype=BF16)])},
    ],
    ids=str,
)
def test_whatever_changes_the_text_changes_the_digest(changes: dict[str, object]) -> None:
    other = dataclasses.replace(PLAIN, **changes)  # type: ignore[arg-type]
    assert other.text != PLAIN.text
    assert other.digest != PLAIN.digest
    assert dataclasses.replace(PLAIN).digest == PLAIN.digest


def test_an_epilogue_is_printed_once_for_each_element() -> None:
    epilogue = trace(lambda acc, bias: torch.relu(acc + bias), F32, [torch.empty(8192, dtype=F16)])
    [choice, *_] = choices(dataclasses.replace(mixed_mm(scales="column"), epilogue=epilogue))
    assert choice.source.operands == (F16,)
    text = choice.source.text
    assert text.count("f_relu(") == 2, "once called, once defined"
    assert "value_of<f16>(work.x[1], row, col)" in text, "after the scale"


def test_a_launch_has_the_strides_of_scales_and_lines() -> None:
    problem = mixed_mm(13, 1000, 4096, encoding="int4", scales="group_128", zeros=True)
    words = launch_of(Config(shape=WIDE, blocks=4, takes_turns=True, pdl=True, ahead=6), problem, device=2)
    assert (words.rows, words.cols, words.k) == (13, 1000, 4096)
    assert (words.a_pitch, words.b_pitch) == (8192, 2048)
    assert (words.out_strides.row, words.out_strides.col) == (1000, 1)
    assert [(x.row, x.col) for x in words.x_strides[:2]] == [(1000, 1), (1000, 1)]
    assert (words.blocks, words.takes_turns, words.overlaps, words.ahead, words.device) == (4, 1, 1, 6, 2)


def test_one_scale_for_all_is_not_moved_along() -> None:
    words = launch_of(Config(shape=WIDE), mixed_mm(1, 1000, 4096, scales="tensor"), device=0)
    assert (words.x_strides[0].row, words.x_strides[0].col) == (0, 0)
    assert (words.overlaps, words.ahead, words.a_pitch) == (0, 0, 8192)


@needs_compiler
def test_a_shape_is_compiled_once_for_every_size_and_launch(nvcc: FakeNvcc) -> None:
    choice = choices(mixed_mm(scales="column"))[0]
    other = dataclasses.replace(choice, problem=mixed_mm(11, 1000, 2064, scales="column"))
    same = [choice, other, *choice.launch_variants(), *other.launch_variants()]
    assert {c.compile_key for c in same} == {choice.compile_key}
    assert not choice.compiled
    for each in same:
        each.compile()
        assert each.compiled
    assert nvcc.runs == 1


def test_a_choice_travels_and_runs_on_its_architecture_alone() -> None:
    choice = choices(mixed_mm(encoding="int4", scales="group_128", zeros=True))[0]
    travelled = pickle.loads(pickle.dumps(choice))
    assert travelled == choice
    assert (travelled.content_hash, travelled.compile_key, travelled.arch) == (choice.content_hash, choice.compile_key, "sm90")
    assert (choice.claims.accumulate, choice.claims.partials, choice.claims.weights) == (F32, F32, F16)
    assert choice.claims.splits == choice.config.blocks * choice.config.shape.warps_k
    with pytest.raises(UnavailableError, match="got a newer GPU, expected sm90"):
        choice.forward()
