"""The kernel for unaligned lines on a GPU: shapes, majors and epilogues are verified; addresses; captures, streams, repeats."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from launches import GPU, assert_launched_by_a_new_thread, assert_replayable, assert_right, assert_streams_apart, call

from gemmtune.backends.cuda.unaligned.build import UnalignedChoice
from gemmtune.backends.cuda.unaligned.configs import SHAPES, Config, Shape
from gemmtune.backends.cuda.unaligned.legality import check_config, check_problem
from gemmtune.device import detect
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel runs on SM90 alone"
    ),
]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = ("nt", "nn", "tn", "tt")


def mm(m: int, n: int, k: int, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.mm(m, n, k, dtype=dtype, layout=layout, device_type="cuda")


def addmm(m: int, n: int, k: int, layout: str = "nt", dtype: torch.dtype = F16, bias: str = "n") -> Problem:
    return Problem.addmm(m, n, k, dtype=dtype, layout=layout, bias=bias, alpha=2, beta=0.5, device_type="cuda")


def gated(problem: Problem) -> Problem:
    """silu(a @ b) · x, x a matrix in float16."""
    epilogue = trace(lambda acc, x: torch.nn.functional.silu(acc) * x, F32, [torch.empty(problem.m, problem.n, dtype=F16)])
    return dataclasses.replace(problem, epilogue=epilogue)


def placed(problem: Problem, *, a: tuple[int, int] = (0, 0), b: tuple[int, int] = (0, 0), out: tuple[int, int] = (0, 0)) -> Problem:
    """The same with (elements between lines, elements after an address of 16 bytes)."""
    return dataclasses.replace(problem, a=_placed(problem.a, *a), b=_placed(problem.b, *b), out=_placed(problem.out, *out))


def _placed(layout: Layout, padding: int, offset: int) -> Layout:
    row, col = layout.stride
    return dataclasses.replace(layout, stride=(row + padding, 1) if col == 1 else (1, col + padding), offset=offset)


def with_out(problem: Problem, stride: tuple[int, int], dtype: torch.dtype, offset: int = 0) -> Problem:
    out = Layout(size=(problem.m, problem.n), stride=stride, dtype=dtype, offset=offset)
    return dataclasses.replace(problem, out=out)


PROBLEMS: dict[str, Problem] = {
    **{f"odd-{layout}": mm(333, 517, 203, layout) for layout in LAYOUTS},
    **{f"long-{layout}": mm(300, 301, 1003, layout, F16) for layout in LAYOUTS},
    "one-step": mm(301, 513, 9),
    "last-step-of-one": mm(301, 513, 65, "nn"),
    "even-steps": mm(301, 513, 127, "tn"),
    "one-row": mm(1, 259, 77),
    "one-column": mm(259, 1, 77),
    "a-alone": mm(300, 512, 203, "nn"),
    "b-alone": mm(256, 301, 192, "nn"),
    "apart": placed(mm(200, 301, 160), a=(3, 5), b=(1, 7)),
    "apart-across": placed(mm(200, 301, 160, "tn"), a=(2, 1), b=(5, 3)),
    "offset-alone": placed(mm(256, 384, 256), a=(0, 1)),
    "both-offsets": placed(mm(256, 384, 256, "nn"), a=(8, 6), b=(16, 3)),
    "two-of-eight": mm(258, 514, 330, "nn"),
    "four-of-eight": mm(260, 516, 332, "tt", F16),
    "out-offset": placed(mm(201, 304, 203), out=(0, 1)),
    "out-apart": placed(mm(201, 304, 203), out=(8, 0)),
    "out-by-columns": with_out(mm(201, 303, 203), (1, 204), BF16),
    "out-by-columns-odd": with_out(mm(201, 303, 203, "tn"), (1, 201), F16, offset=3),
    "out-in-float32": with_out(mm(201, 304, 203), (304, 1), F32),
    "out-in-float32-odd": with_out(mm(201, 303, 203), (303, 1), F32, offset=1),
    "out-every-second": with_out(mm(201, 303, 203), (610, 2), BF16),
    "added": addmm(201, 303, 203),
    "added-matrix": addmm(200, 304, 203, "nn", BF16, "mn"),
    "fused": gated(mm(201, 303, 203)),
    "fused-across": gated(mm(203, 302, 195, "tn", F16)),
    "fused-out-by-columns": gated(with_out(mm(201, 303, 203), (1, 204), BF16)),
    "batch-of-one": Problem.bmm(1, 201, 303, 203, dtype=BF16, device_type="cuda"),
}


def choice_of(problem: Problem, shape: Shape, *, swapped: bool = False) -> UnalignedChoice | None:
    """The choice, where it is legal."""
    device, config = detect("cuda"), Config(shape=shape, swapped=swapped)
    assert check_problem(problem, device) is None
    return UnalignedChoice.of(config, problem, device) if check_config(problem, device, config) is None else None


def choices_of(problem: Problem) -> list[UnalignedChoice]:
    """Every third pair of a shape and an orientation, other ones for other problems: each is a compilation."""
    found = [choice_of(problem, shape, swapped=swapped) for shape in SHAPES for swapped in (False, True)]
    legal = [choice for choice in found if choice is not None]
    start = (problem.m + problem.n + problem.k + 2 * len(str(problem))) % 3
    return legal[start::3] or legal


def first(name: str) -> UnalignedChoice:
    problem = PROBLEMS[name]
    return next(choice for shape in SHAPES if (choice := choice_of(problem, shape) or choice_of(problem, shape, swapped=True)))


@pytest.mark.parametrize("name", PROBLEMS)
def test_shapes_are_right_both_ways_round(name: str) -> None:
    one, *others = choices_of(PROBLEMS[name])
    assert_right(PROBLEMS[name], [one, *one.variants(), *others])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_is_right(shape: Shape, layout: str) -> None:
    problem = mm(391, 521, 331, layout)
    choice = choice_of(problem, shape, swapped=layout in ("nn", "tt"))
    assert choice is not None
    assert_right(problem, [choice])


def view(rows: int, cols: int, pitch: int, offset: int, *, seed: int, transposed: bool) -> torch.Tensor:
    """Integers from −2 to 2 in a view into NaN."""
    size = (cols, rows) if transposed else (rows, cols)
    flat = torch.full((size[0] * pitch + 64,), float("nan"), device=GPU, dtype=BF16)
    inside = flat[8 + offset : 8 + offset + size[0] * pitch].view(size[0], pitch)[:, : size[1]]
    inside.copy_(torch.randint(-2, 3, size, generator=torch.Generator().manual_seed(seed)))
    return inside.t() if transposed else inside


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_address_is_right_and_what_surrounds_the_operands_is_not_read(shape: Shape, layout: str) -> None:
    """One kernel, planned once for each pair of strides: shifts are those of the addresses that it is called with."""
    m, n, k = 260, 267, 139
    wrong = []
    for more in (0, 1, 6):
        lines = [(k if layout[0] == "n" else m) + 4 + more, (n if layout[1] == "n" else k) + 6 + more]
        a, b = (
            view(m, k, lines[0], 0, seed=1, transposed=layout[0] == "t"),
            view(k, n, lines[1], 0, seed=2, transposed=layout[1] == "t"),
        )
        out = torch.full((m, n + more), float("nan"), device=GPU, dtype=BF16)
        problem = Problem(op="mm", a=Layout.of(a), b=Layout.of(b), out=Layout.of(out[:, :n]), device_type="cuda")
        choice = choice_of(problem, shape) or choice_of(problem, shape, swapped=True)
        assert choice is not None
        run, expected = choice.build().run, (a.double() @ b.double()).to(BF16)
        alone = choice.aligned_bytes != (1, 1, 1)
        for first_offset, second_offset in itertools.product(range(8), (0,) if alone else (0, 3, 7)):
            offsets = (second_offset, first_offset) if choice.exchanged else (first_offset, second_offset)
            x = view(m, k, lines[0], offsets[0], seed=1, transposed=layout[0] == "t")
            y = view(k, n, lines[1], offsets[1], seed=2, transposed=layout[1] == "t")
            out.fill_(float("nan"))
            run(out[:, :n], x, y, None, 1.0, 0.0, ())
            if not torch.equal(out[:, :n], expected) or not out[:, n:].isnan().all():
                wrong.append((more, offsets))
    assert not wrong


def test_an_operand_that_was_aligned_is_refused_where_it_is_not() -> None:
    problem = PROBLEMS["a-alone"]
    choice = choice_of(problem, SHAPES[-1])
    assert choice is not None
    x = random_operands(problem, GPU, seed=7)
    moved = torch.empty(x.b.numel() + 1, dtype=x.b.dtype, device=GPU)[1:].view(x.b.shape)
    with pytest.raises(Exception, match="an operand is not aligned as planned"):
        choice.build().run(x.out, x.a, moved, None, 1.0, 0.0, ())


@pytest.mark.parametrize("name", ["odd-nt", "odd-tn", "a-alone", "fused"])
def test_a_capture_may_have_the_first_call_and_can_be_replayed(name: str) -> None:
    assert_replayable(first(name))


@pytest.mark.parametrize("name", ["odd-nt", "long-tn", "a-alone"])
def test_calls_of_two_streams_do_not_share_a_copy(name: str) -> None:
    assert_streams_apart(first(name))


def test_the_first_use_of_cuda_in_a_thread_may_be_a_launch() -> None:
    assert_launched_by_a_new_thread(first("odd-nt"))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_launches_that_begin_early_read_what_the_one_before_writes(shape: Shape, layout: str, swapped: bool) -> None:
    """Each product is the next one's shifted operand, and the one after that's copied operand."""
    size = 301
    problem = mm(size, size, size, layout)
    choice = choice_of(problem, shape, swapped=swapped)
    assert choice is not None
    turned = [letter == "t" for letter in (layout[0], layout[1])]
    x = [torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).to(GPU, BF16) / 17 for seed in range(3)]

    def chain(config: Config, *, waits: bool) -> list[torch.Tensor]:
        run = UnalignedChoice.of(config, problem, choice.device).build().run
        held = [one.clone() for one in x]
        for i in range(12):
            a, b, out = held[i % 3], held[(i + 1) % 3], held[(i + 2) % 3]
            run(out, a.t() if turned[0] else a, b.t() if turned[1] else b, None, 1.0, 0.0, ())
            if waits:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return held

    alone = chain(dataclasses.replace(choice.config, pdl=False), waits=True)
    assert not torch.equal(alone[0], x[0])
    assert all(one.isfinite().all() for one in alone)
    for _ in range(5):
        early = chain(dataclasses.replace(choice.config, pdl=True), waits=False)
        assert all(torch.equal(one, other) for one, other in zip(early, alone, strict=True))


@pytest.mark.parametrize("name", ["odd-nt", "long-tn", "fused"])
def test_repeats_give_the_same_bits_with_other_sizes_in_between(name: str) -> None:
    """One shared object, two problems, launches that follow each other without a pause."""
    choice = first(name)
    sizes = choice.problem.m + 64, choice.problem.n + 2, choice.problem.k + 2
    other = mm(*sizes, name[-2:] if name != "fused" else "nt", choice.problem.dtype)
    other = gated(other) if name == "fused" else other
    longer = UnalignedChoice.of(choice.config, other, choice.device)
    assert longer.compile_key == choice.compile_key
    runs = [(one.build().run, random_operands(one.problem, GPU, seed=5)) for one in (choice, longer)]
    expected = [call(run, torch.empty_like(x.out), x) for run, x in runs]
    for _ in range(20):
        again = [call(run, torch.full_like(x.out, float("nan")), x) for run, x in runs]
        assert all(torch.equal(one, before) for one, before in zip(again, expected, strict=True))
