"""Classes of problems that differ only in M."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gemmtune.backends.aten.blocks import BlocksChoice
from gemmtune.backends.table import load
from gemmtune.choice import Choice
from gemmtune.device import detect, preset
from gemmtune.dispatch.keys import without_rows
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Layout, Problem
from gemmtune.problem.rows import classes_over, row_classes
from gemmtune.problem.trace import trace
from gemmtune.selector.offers import legal_offers
from gemmtune.settings import Settings

SIZES = (1, 2, 7, 33, 128, 130, 1000)


def problems(m: int) -> dict[str, Problem]:
    """Return one problem for each kind of operand, with and without M rows."""
    n, k = 256, 384
    padded = Problem.mm(m, n, k, dtype=torch.float32, layout="nn", device_type="cpu")
    scaled = Problem.scaled_mm(m, n, k, device_type="cpu")
    return {
        **{f"mm-{letters}": Problem.mm(m, n, k, layout=letters, device_type="cpu") for letters in ("nn", "nt", "tn", "tt")},
        **{f"addmm-{bias}": Problem.addmm(m, n, k, bias=bias, device_type="cpu") for bias in ("n", "mn", "m1", "1n", "scalar")},
        "bmm": Problem.bmm(3, m, n, k, device_type="cpu"),
        "baddbmm": Problem.baddbmm(3, m, n, k, device_type="cpu"),
        "mm_plus_mm": Problem.mm_plus_mm(m, n, k, 64, device_type="cpu"),
        "int_mm": Problem.int_mm(m, n, k, device_type="cpu"),
        **{f"scaled-{s}": Problem.scaled_mm(m, n, k, scales=s, device_type="cpu") for s in ("tensor", "row", "block_1x128")},
        "mixed": Problem.mixed_mm(m, n, k, scales="group_128", encoding="int4", device_type="cpu"),
        "epilogue": dataclasses.replace(
            padded,
            epilogue=trace(
                lambda acc, x, y, z: acc * x + y * z, torch.float32, [torch.ones(n), torch.ones(m, 1), torch.ones(m, n)]
            ),
        ),
        "one scale": dataclasses.replace(scaled, scale_a=Layout.contiguous((1, 1), torch.float32)),
        "rows of a wider buffer": dataclasses.replace(padded, a=dataclasses.replace(padded.a, stride=(2 * k, 1))),
    }


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", problems(2))
def test_a_class_has_all_problems_that_differ_in_m(name: str):
    for m in SIZES:
        here = problems(m)[name]
        classes = row_classes(here)
        assert any(found.at(m) == here for found in classes)
        for other in SIZES:
            there = problems(other)[name]
            if 1 in (m, other) and (name == "rows of a wider buffer" or here.layout_letters != there.layout_letters):
                continue  # a single row is row-major, and the distance to the next one is settled
            having = [found for found in classes if found.has(other)]
            assert not having or any(found.at(other) == there for found in having), (m, other)


def test_other_weights_have_other_classes():
    mm = Problem.mm(8, 64, 32, device_type="cpu")
    others = [Problem.mm(8, 64, 33, device_type="cpu"), Problem.mm(8, 64, 32, layout="nn", device_type="cpu")]
    others.append(dataclasses.replace(mm, a=dataclasses.replace(mm.a, offset=1)))
    assert len({row_classes(p) for p in (mm, *others)}) == 4
    assert row_classes(mm) == row_classes(Problem.mm(9, 64, 32, device_type="cpu"))


def test_key_and_text_do_not_depend_on_the_first_problem():
    """The store contains the key, so the representative M, a little above 1024, must not change between versions."""
    (found,) = row_classes(Problem.mm(8, 1040, 32, device_type="cpu"))
    assert (found.problem.m, found.key) == (1040, Problem.mm(1040, 1040, 32, device_type="cpu").key)
    assert str(found) == "mm Mx1040x32 bfloat16 nt on cpu"
    assert [found.has(m) for m in (-1, 0, 1, 2)] == [False, False, True, True]
    (even,) = row_classes(Problem.mm(6, 64, 32, layout="tn", device_type="cpu"))
    assert even.problem.m == 1026


def test_m_in_a_stride_separates_alignment_classes():
    first, second = (row_classes(Problem.mm(m, 64, 32, layout="tn", device_type="cpu"))[0] for m in (6, 7))
    assert (first.step, second.step) == (2, 1)
    assert first.has(10)
    assert not first.has(12)
    with pytest.raises(InvalidProblemError, match=r"got M = 12, expected .* is 2"):
        first.at(12)
    assert [x.step for x in classes_over(Problem.mm(6, 64, 32, layout="tn", device_type="cpu"), range(1, 100))] == [1, 2, 4, 8, 16]
    assert [x.step for x in classes_over(Problem.mm(6, 64, 32, layout="tn", device_type="cpu"), range(4, 9))] == [1, 2, 4, 8]


def test_one_row_is_ambiguous():
    one = Problem.addmm(1, 64, 32, bias="mn", device_type="cpu")
    classes = row_classes(one)
    assert {found.at(5).inp for found in classes} == {
        Layout.contiguous((1, 64), torch.bfloat16), Layout.contiguous((5, 64), torch.bfloat16),
    }  # fmt: skip
    assert len(row_classes(Problem.addmm(2, 64, 32, bias="1n", device_type="cpu"))) == 1
    blocks = row_classes(Problem.scaled_mm(1, 64, 300, scales="block_1x128", device_type="cpu"))
    scales = [x.size for found in blocks if (x := found.at(300).scale_a) is not None]
    assert scales == [(300, 3), (3, 3)], "one for each row, or for 128 of them"
    with pytest.raises(InvalidProblemError, match=r"may broadcast or may follow M; expected a problem with M = 2 or more"):
        classes_over(one, range(1, 9))


def test_indexed_rows_have_no_class():
    for problem in (
        Problem.routed_grouped_mm(8, 16, 32, groups=2, tokens=4, device_type="cpu"),
        Problem.combined_grouped_mm(8, 16, 32, groups=2, tokens=4, device_type="cpu"),
    ):
        assert row_classes(problem) == ()
        with pytest.raises(InvalidProblemError, match="picked or added up by an index; expected one without an index"):
            classes_over(problem, range(1, 9))


def test_an_empty_problem_has_no_class():
    empty = Problem.mm(0, 64, 32, device_type="cpu")
    assert row_classes(empty) == ()
    with pytest.raises(InvalidProblemError, match="whose result is empty; expected M, N"):
        classes_over(empty, range(1, 9))


CASES = [("aten", "cpu"), ("cpp", "cpu"), ("aten", "sm90"), ("triton", "sm90"), ("cuda", "sm90")]


@pytest.mark.rotates(8)
@pytest.mark.parametrize(("backend", "arch"), CASES)
def test_a_choice_at_its_own_problem_is_itself(backend: str, arch: str):
    """In every family, ``at`` for another M gives the name and the kernel of the offer there."""
    device = detect("cpu") if arch == "cpu" else preset(arch)
    kind = "cpu" if arch == "cpu" else "cuda"
    families = set()
    for m in (1, 2, 200):
        asked = (
            Problem.mm(m, 512, 1024, device_type=kind),
            Problem.mm(m, 72, 8192, dtype=torch.float32, layout="tn", device_type=kind),
            Problem.mm(m, 512, 1001, device_type=kind),
            Problem.mixed_mm(m, 512, 1024, dtype=torch.bfloat16, scales="column", device_type=kind),
            Problem.mm_plus_mm(m, 512, 1024, device_type=kind),
        )
        for problem in asked:
            for choice in load(backend).enumerate(problem, device, Settings(search="quick")).choices:
                for one in (choice, *list(choice.launch_variants())[:1]):
                    there = one.at(problem, device)
                    assert not isinstance(there, str), there
                    assert (there.name, there.content_hash) == (one.name, one.content_hash)
                families.add(type(choice).__name__)
    assert len(families) >= {"triton": 7}.get(backend, 1)


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
@pytest.mark.parametrize("prepacked", [False, True])
def test_block_sparse_choices_serve_any_number_of_tokens(arch: str, prepacked: bool):
    """Torch's operations, our kernels and dense products at another M equal the offers there."""
    device, chosen = (detect("cpu"), Settings()) if arch == "cpu" else (preset(arch), Settings(search="quick"))

    def offered(m: int) -> dict[str, Choice]:
        kind = "cpu" if arch == "cpu" else "cuda"
        problem = Problem.bsr_mm(m, 256, 512, dtype=torch.float32, block=64, device_type=kind, prepacked=prepacked)
        return {x.name: x for x in legal_offers(problem, device, chosen, on_this_machine=False).choices}

    first, second = offered(64), offered(192)
    compared = 0
    for name, choice in first.items():
        there = choice.at(next(iter(second.values())).problem, device)
        if name in second:
            assert there == second[name]
            compared += 1
    assert compared >= (3 if arch == "cpu" else 5)
    of_torch = [x for x in first.values() if isinstance(x, BlocksChoice) and x.meta]
    reasons = [
        x.at(Problem.bsr_mm(m, 256, 512, dtype=torch.float32, device_type="cuda"), device) for x in of_torch for m in (56, 8)
    ]
    assert all("multiples of" in str(reason) for reason in reasons)
    assert bool(of_torch) == (arch != "cpu")


def test_an_illegal_m_has_a_reason():
    device = preset("sm90")
    tall = Problem.mm(4096, 4096, 4096, device_type="cuda")
    choices = load("triton").enumerate(tall, device, Settings()).choices
    reasons = [there for c in choices if isinstance(there := c.at(Problem.mm(1, 4096, 4096, device_type="cuda"), device), str)]
    assert any("block_m 128: half of it or more hangs over m = 1" in reason for reason in reasons)


def test_the_key_of_a_call_without_rows_keeps_the_columns_of_a_bias() -> None:
    """A bias [M, N] serves every M by one entry, and is another one than [M, 1]."""

    def rest(m: int, *bias: int) -> object:
        return without_rows(((m, 8), *[None] * 10, "addmm", None, None, False, bias, "more"))

    first, *_ = rest(4, 4, 5)  # type: ignore[misc]
    assert rest(7, 7, 5) == (first, 7)
    assert rest(4, 4, 1) != (first, 4)
    assert rest(1, 1, 5) is None
