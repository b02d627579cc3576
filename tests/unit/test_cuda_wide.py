"""The kernel for more rows: what is offered and in which order, its text, what a launch is told."""

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
from gemmtune.backends.cuda.mixed.weights import Factor, Weights
from gemmtune.backends.cuda.wide import offers
from gemmtune.backends.cuda.wide.build import WideChoice
from gemmtune.backends.cuda.wide.configs import SHAPES, Config, Shape
from gemmtune.backends.cuda.wide.legality import check_config
from gemmtune.backends.cuda.wide.rank import LIKELY, candidates, estimate_us, select
from gemmtune.backends.cuda.wide.source import Source
from gemmtune.choice import Offers
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings

SM90 = preset("sm90")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
MORE = Shape(rows=128, groups=2, tiles=1, line=128, stages=4)
GROUPS, COLUMN = Factor(dtype=F16, group=128), Factor(dtype=F16, group=0)
PLAIN = Source(shape=MORE, weights=Weights(bits=4, signed=True, scale=GROUPS), dtype=F16, out_dtype=F16)
KINDS: list[dict[str, Any]] = [
    {},
    {"scales": "column"},
    {"encoding": "int4", "scales": "group_128"},
    {"encoding": "uint4", "scales": "group_32", "zeros": True},
    {"dtype": BF16, "scales": "group_64"},
]


def mixed_mm(m: int = 64, n: int = 8192, k: int = 8192, **fields: Any) -> Problem:
    return Problem.mixed_mm(m, n, k, device_type="cuda", **fields)


def offered(problem: Problem, search: str = "default") -> Offers:
    return offers(problem, SM90, Settings(search=search))  # type: ignore[arg-type]


def choices(problem: Problem, search: str = "default") -> list[WideChoice]:
    return [choice for choice in offered(problem, search).choices if isinstance(choice, WideChoice)]


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvcc]:
    with installed(tmp_path, monkeypatch) as fake:
        yield fake


@pytest.mark.parametrize("m", [33, 64, 100, 256, 1000, 4096])
@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_a_search_has_a_few_shapes_and_a_quick_one_the_first_two_of_them(m: int, fields: dict[str, Any]) -> None:
    problem = mixed_mm(m, **fields)
    found = choices(problem)
    assert 1 <= len(found) <= 4
    assert len({choice.config.shape for choice in found}) == len(found)
    assert choices(problem, "quick") == found[:2]
    assert all(check_config(problem, SM90, choice.config) is None for choice in found)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("m", [33, 48, 64])
def test_rows_of_one_small_tile_are_tried_with_two_blocks_on_a_multiprocessor_and_with_one(m: int, dtype: torch.dtype) -> None:
    found = [choice.config for choice in choices(mixed_mm(m, dtype=dtype, scales="column"), "quick")]
    assert [(config.shape.rows, config.shape.resident) for config in found] == [(64, 1), (64, 2)]


def test_the_backend_has_the_kernel_beside_its_others() -> None:
    problem = mixed_mm(scales="column")
    found = BACKEND.enumerate(problem, SM90, Settings())
    assert found.choices == offered(problem).choices
    assert [refusal.name for refusal in found.refusals] == ["cuda:cluster", "cuda:few"]


def test_few_rows_are_left_to_the_kernel_for_them_but_in_an_exhaustive_search() -> None:
    found = offered(mixed_mm(32))
    assert not found.choices
    assert [(refusal.name, refusal.reason) for refusal in found.refusals] == [("cuda:wide", "a has 32 rows, tried from 33 on")]
    assert choices(mixed_mm(32), "exhaustive")


def test_an_exhaustive_search_has_every_legal_shape() -> None:
    problem = mixed_mm(100, encoding="int4")
    found = choices(problem, "exhaustive")
    legal = {shape for shape in SHAPES[4] if check_config(problem, SM90, Config(shape=shape)) is None}
    assert {choice.config.shape for choice in found} == legal
    assert len(found) > len(legal), "with several numbers of blocks each"
    assert len({choice.name for choice in found}) == len({choice.content_hash for choice in found}) == len(found)


def test_more_to_do_takes_the_model_longer() -> None:
    config = Config(shape=MORE, blocks=2)
    times = [estimate_us(mixed_mm(m, n, 8192), SM90, config) for m, n in ((64, 8192), (64, 16384), (512, 16384), (4096, 16384))]
    assert times == sorted(set(times))
    few = Config(shape=Shape(rows=64, groups=2, tiles=1, line=128, stages=4), blocks=2)
    assert estimate_us(mixed_mm(64), SM90, few) < estimate_us(mixed_mm(64), SM90, config)


def test_a_shape_that_takes_the_model_much_longer_is_left_to_an_exhaustive_search() -> None:
    problem = mixed_mm(64, 4096, 14336)
    ordered = candidates(problem, SM90)
    times = [estimate_us(problem, SM90, config) for config in select(problem, SM90, ordered, len(ordered))]
    assert times == sorted(times)
    assert times[-1] <= LIKELY * times[0] < estimate_us(problem, SM90, ordered[-1])


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_variants_are_told_at_launch_and_need_no_compilation(fields: dict[str, Any]) -> None:
    choice = choices(mixed_mm(**fields))[0]
    near = choice.launch_variants()
    assert {variant.compile_key for variant in near} == {choice.compile_key}
    assert len({variant.content_hash for variant in (choice, *near)}) == len({v.name for v in (choice, *near)}) == len(near) + 1
    assert {variant.config.pdl for variant in (choice, *near)} == {True, False}
    assert len({variant.config.blocks for variant in near}) > 1
    assert all(check_config(variant.problem, SM90, variant.config) is None for variant in near)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": SHAPES[4][0]},
        {"dtype": BF16},
        {"out_dtype": F32},
        {"weights": Weights(bits=4, signed=False, scale=GROUPS)},
        {"weights": Weights(bits=8, signed=True, scale=GROUPS)},
        {"weights": Weights(bits=4, signed=True)},
        {"weights": Weights(bits=4, signed=True, scale=GROUPS, zero=GROUPS)},
        {"weights": Weights(bits=4, signed=True, scale=Factor(dtype=F32, group=128))},
        {"weights": Weights(bits=4, signed=True, scale=COLUMN)},
        {"operands": (BF16,), "epilogue": trace(lambda acc, x: acc + x, F32, [torch.empty(8, dtype=BF16)])},
    ],
    ids=str,
)
def test_whatever_changes_the_text_changes_the_digest(changes: dict[str, object]) -> None:
    other = dataclasses.replace(PLAIN, **changes)  # type: ignore[arg-type]
    assert other.text != PLAIN.text
    assert other.digest != PLAIN.digest
    assert dataclasses.replace(PLAIN).digest == PLAIN.digest


def test_results_are_put_in_rows_as_they_are_stored_unless_an_epilogue_has_their_sums() -> None:
    epilogue = trace(lambda acc, bias: torch.relu(acc + bias), F32, [torch.empty(8192, dtype=F16)])
    plain, fused = mixed_mm(scales="column"), dataclasses.replace(mixed_mm(scales="column"), epilogue=epilogue)
    for problem, stored, called in ((plain, "using Staged = f16;", 0), (fused, "using Staged = float;", 2)):
        text = choices(problem)[0].source.text
        assert stored in text
        assert text.count("f_relu(") == called, "once called, once defined"
        assert text.count("read_column_scales(") == 2, "once, for a thread's own columns"


@needs_compiler
def test_a_shape_is_compiled_once_for_every_size_and_launch(nvcc: FakeNvcc) -> None:
    choice = choices(mixed_mm(scales="column"))[0]
    other = dataclasses.replace(choice, problem=mixed_mm(51, 1000, 2064, scales="column"))
    same = [choice, other, *choice.launch_variants(), *other.launch_variants()]
    assert {c.compile_key for c in same} == {choice.compile_key}
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
    assert choice.claims.splits == choice.config.blocks
    with pytest.raises(UnavailableError, match="got a newer GPU, expected sm90"):
        choice.forward()
