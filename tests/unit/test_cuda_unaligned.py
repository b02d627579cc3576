"""The kernel for operands that are not aligned: what is offered and in which order, its text, what a launch is told."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from gemmtune.backends.cuda import BACKEND
from gemmtune.backends.cuda.finish import Finish
from gemmtune.backends.cuda.unaligned import offers
from gemmtune.backends.cuda.unaligned.build import UnalignedChoice
from gemmtune.backends.cuda.unaligned.configs import SHAPES, Config
from gemmtune.backends.cuda.unaligned.launch import launch_of
from gemmtune.backends.cuda.unaligned.legality import check_config
from gemmtune.backends.cuda.unaligned.rank import LIKELY, WORTH_TRYING, copies_us, estimate_us
from gemmtune.choice import Offers
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings

SM90 = preset("sm90")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def mm(m: int, n: int, k: int, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.mm(m, n, k, dtype=dtype, layout=layout, device_type="cuda")


def offered(problem: Problem, search: str = "default") -> Offers:
    return offers(problem, SM90, Settings(search=search))  # type: ignore[arg-type]


def choices(problem: Problem, search: str = "default") -> list[UnalignedChoice]:
    return [choice for choice in offered(problem, search).choices if isinstance(choice, UnalignedChoice)]


def with_epilogue(problem: Problem) -> Problem:
    epilogue = trace(lambda acc, x: torch.relu(acc) + x, F32, [torch.empty(problem.m, problem.n, dtype=F16)])
    return dataclasses.replace(problem, epilogue=epilogue)


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (mm(4096, 512, 479), {"64x256_b8_pdl", "128x128_1x2_b8_pdl"}),
        (mm(4096, 512, 479, "nn"), {"64x256_b8_pdl", "128x128_1x2_b8_pdl"}),
        (mm(2048, 2047, 2049, "nn"), {"128x256_1x2_b8_pdl"}),
        (mm(4096, 4095, 4095), {"128x256_1x2_b8_pdl"}),
    ],
)
def test_the_search_has_what_was_the_fastest_on_an_h200(problem: Problem, wanted: set[str]) -> None:
    found = choices(problem)
    assert {str(choice.config) for choice in found} == wanted
    assert len(choices(problem, "quick")) == 1


def test_it_is_a_family_of_the_backend() -> None:
    found = BACKEND.enumerate(mm(4096, 512, 479), SM90, Settings())
    assert [choice.name for choice in found.choices] == [choice.name for choice in choices(mm(4096, 512, 479))]
    aligned = BACKEND.enumerate(mm(4096, 512, 480), SM90, Settings())
    assert not aligned.choices
    assert "cuda:unaligned" in {refusal.name for refusal in aligned.refusals}


@pytest.mark.parametrize(
    "problem",
    [
        mm(1000, 1001, 999), mm(1000, 1001, 999, "nn"), mm(512, 513, 511, "tn"), mm(300, 301, 8191), mm(1024, 50257, 768, "nn"),
        mm(128, 1001, 999, "nn"), mm(16, 4097, 4097),
    ],
)  # fmt: skip
def test_what_copies_beat_on_an_h200_is_one_refusal_but_in_an_exhaustive_search(problem: Problem) -> None:
    found = offered(problem)
    [refusal] = found.refusals
    assert (refusal.name, found.choices) == ("cuda:unaligned", ())
    assert refusal.reason.endswith("µs for a product of aligned copies")
    least_us = min(estimate_us(problem, SM90, choice.config) for choice in choices(problem, "exhaustive"))
    assert least_us > WORTH_TRYING * copies_us(problem, SM90)


def test_an_exhaustive_search_has_every_legal_shape_either_way_round() -> None:
    problem = mm(500, 501, 499)
    found = choices(problem, "exhaustive")
    assert {(choice.config.shape, choice.config.swapped) for choice in found} == {
        (shape, swapped)
        for shape in SHAPES
        for swapped in (False, True)
        if check_config(problem, SM90, Config(shape=shape, swapped=swapped)) is None
    }
    assert len({choice.name for choice in found}) == len(found) == 2 * len(SHAPES)


def test_no_shape_is_tried_twice_and_what_takes_the_model_longer_is_left() -> None:
    found = choices(mm(4096, 512, 479))
    assert len({choice.config.shape for choice in found}) == len(found)
    times = [estimate_us(choice.problem, SM90, choice.config) for choice in found]
    assert max(times) <= LIKELY * min(times)


def test_the_model_takes_longer_where_the_other_operand_is_copied_too() -> None:
    config = Config(shape=SHAPES[-1])
    assert estimate_us(mm(4096, 512, 479), SM90, config) > estimate_us(mm(4096, 512, 479, "nn"), SM90, config)
    assert copies_us(mm(4096, 512, 479), SM90) > copies_us(mm(4096, 512, 479, "nn"), SM90)


def test_variants_are_told_at_launch_and_need_no_compilation() -> None:
    [choice, *_] = choices(mm(4096, 512, 479))
    near = choice.variants()
    assert {str(variant.config) for variant in near} == {"128x128_1x2_b8", "128x128_1x2_b32_pdl"}
    assert {variant.compile_key for variant in near} == {choice.compile_key}
    assert len({variant.content_hash for variant in (choice, *near)}) == 3
    assert choice.claims.splits == 1


def test_one_source_serves_every_size_and_every_shift() -> None:
    [first, *_] = choices(mm(4096, 512, 479))
    other = UnalignedChoice.of(first.config, mm(77, 301, 1001), SM90)
    moved = dataclasses.replace(first.problem, a=dataclasses.replace(first.problem.a, offset=3))
    assert other.source == first.source
    assert UnalignedChoice.of(first.config, moved, SM90).compile_key == first.compile_key
    fused = [UnalignedChoice.of(first.config, with_epilogue(mm(*sizes)), SM90) for sizes in ((500, 501, 499), (333, 517, 203))]
    assert fused[0].compile_key == fused[1].compile_key != first.compile_key


def test_what_is_compiled_differs_where_the_text_does() -> None:
    config = Config(shape=SHAPES[-1])
    problems = [mm(500, 501, 499, layout, dtype) for layout in ("nt", "nn", "tn", "tt") for dtype in (F16, BF16)]
    problems.append(with_epilogue(mm(500, 501, 499)))
    sources = [UnalignedChoice.of(config, problem, SM90).source for problem in problems]
    sources.append(dataclasses.replace(sources[0], turned=True))
    assert len({source.text for source in sources}) == len(sources)
    assert len({source.digest for source in sources}) == len(sources)


def test_the_transpose_is_stored_along_the_rows_of_its_tiles() -> None:
    sources = [UnalignedChoice.of(Config(shape=SHAPES[-1], swapped=way), mm(500, 501, 499), SM90).source for way in (False, True)]
    assert [source.turned for source in sources] == [False, True]
    assert "constexpr bool TURNED = true" in sources[1].text


def test_sums_wait_for_an_epilogue_in_float32() -> None:
    plain = UnalignedChoice.of(Config(shape=SHAPES[-1]), mm(500, 501, 499), SM90)
    fused = UnalignedChoice.of(Config(shape=SHAPES[-1]), with_epilogue(mm(500, 501, 499)), SM90)
    assert "using Staged = bf16;" in plain.source.text
    assert "using Staged = float;" in fused.source.text
    assert "value_of<f16>(reads[0], batch, row, col)" in fused.source.text
    assert plain.source.finish == Finish()


def test_an_operand_that_was_aligned_has_to_stay_so_and_others_may_be_anywhere() -> None:
    config = Config(shape=SHAPES[-1])
    both, one = UnalignedChoice.of(config, mm(500, 501, 499), SM90), UnalignedChoice.of(config, mm(500, 504, 499, "nn"), SM90)
    assert (both.aligned_bytes, one.aligned_bytes) == ((1, 1, 1), (1, 1, 16))
    assert (launch_of(config, both.problem, 0).pads, launch_of(config, one.problem, 0).pads) == (1, 0)
    assert (both.info["copies"], one.info["copies"]) == (True, False)


def test_a_launch_is_told_the_problem_as_the_kernel_sees_it() -> None:
    words = launch_of(Config(shape=SHAPES[-1], swapped=True, pdl=False), mm(500, 501, 499, "nn"), 3)
    assert (words.rows, words.cols, words.k, words.band, words.overlaps, words.device) == (501, 500, 499, 8, 0, 3)
    assert (words.a_strides.row, words.a_strides.col) == (1, 501)
    assert (words.b_strides.row, words.b_strides.col) == (499, 1)
    assert (words.out_strides.row, words.out_strides.col) == (1, 501)


def test_a_choice_can_be_sent_to_another_process() -> None:
    [choice, *_] = choices(with_epilogue(mm(4096, 512, 479)))
    again = pickle.loads(pickle.dumps(choice))
    assert (again.name, again.content_hash) == (choice.name, choice.content_hash)
