"""Dimensions of size 1, whose stride no element depends on: every such stride gives the same problem and the same result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.choice import Choice, Status
from gemmtune.device import detect
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Layout, Problem
from gemmtune.selector.offers import legal_offers
from gemmtune.settings import Settings
from gemmtune.store.row import Row
from gemmtune.store.store import Store

ODD = 977
FLOAT8 = torch.float8_e4m3fn


def odd(x: torch.Tensor) -> torch.Tensor:
    """The same elements with another stride along each dimension of size 1."""
    return x.as_strided(x.shape, [ODD if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)])


def some(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size).mul(20 if dtype == torch.int8 else 1).to(dtype)


Call = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
CALLS: dict[str, Call] = {
    "row": (gemmtune.mm, (some(1, 64), some(64, 48))),
    "column": (gemmtune.mm, (some(8, 64), some(1, 64).t())),
    "term": (gemmtune.mm, (some(8, 1), some(1, 48))),
    "number": (gemmtune.mm, (some(1, 1), some(1, 1))),
    "bias of one row": (gemmtune.addmm, (some(1, 48), some(4, 64), some(64, 48))),
    "bias of one column": (gemmtune.addmm, (some(4, 1), some(4, 64), some(64, 48))),
    "matrix": (gemmtune.bmm, (some(1, 8, 64), some(1, 64, 48))),
    "row of each matrix": (gemmtune.baddbmm, (some(2, 1, 48), some(2, 1, 64), some(2, 64, 48))),
    "group": (gemmtune.grouped_mm, (some(8, 64), some(1, 64, 48), torch.tensor([8], dtype=torch.int32))),
    "int8": (gemmtune.int_mm, (some(1, 64, dtype=torch.int8), some(64, 48, dtype=torch.int8))),
    "float8": (gemmtune.scaled_mm, (some(1, 64, dtype=FLOAT8), some(48, 64, dtype=FLOAT8).t(), some(1, 1), some(1, 48))),
}
MADE: dict[str, Callable[[str], Problem]] = {
    "mm": lambda on: Problem.mm(1, 256, 128, device_type=on),
    "column": lambda on: Problem.mm(64, 1, 128, device_type=on),
    "term": lambda on: Problem.mm(64, 64, 1, device_type=on),
    "addmm": lambda on: Problem.addmm(1, 256, 128, bias="1n", device_type=on),
    "bmm": lambda on: Problem.bmm(1, 64, 256, 128, device_type=on),
    "grouped": lambda on: Problem.grouped_mm(64, 256, 128, groups=1, device_type=on),
    "int8": lambda on: Problem.int_mm(1, 256, 128, device_type=on),
    "mixed": lambda on: Problem.mixed_mm(1, 256, 128, scales="column", zeros=True, device_type=on),
    "float8": lambda on: Problem.scaled_mm(1, 256, 128, scales="row", device_type=on),
    "float8 blocks": lambda on: Problem.scaled_mm(1, 256, 256, scales="block_1x128", device_type=on),
}


def problem_of(name: str, tensors: tuple[torch.Tensor, ...]) -> Problem:
    with settings.patch(tune="never"):
        found = gemmtune.explain(CALLS[name][0].__name__, *tensors).problem
    assert found is not None
    return found


@pytest.mark.parametrize("name", CALLS)
def test_another_stride_is_the_same_call(name: str) -> None:
    function, tensors = CALLS[name]
    assert problem_of(name, tensors) == problem_of(name, tuple(map(odd, tensors)))
    with settings.patch(tune="never"):
        first = function(*tensors)
        assert torch.equal(function(*map(odd, tensors)), first)
        if function is not gemmtune.grouped_mm:
            out = odd(torch.empty_like(first))
            assert function(*map(odd, tensors), out=out) is out
            assert torch.equal(out, first)


def kernels(problem: Problem) -> Iterator[tuple[Choice, Callable[..., None]]]:
    """Built choices: all on a GPU, one of each backend on a CPU."""
    seen: set[str] = set()
    for choice in legal_offers(problem, detect(torch.device(problem.device_type)), Settings()).choices:
        if choice.packed_format is None and not (choice.backend in seen and problem.device_type == "cpu"):
            seen.add(choice.backend)
            yield choice, choice.build().run


def check_choices(problem: Problem) -> None:
    device = torch.device(problem.device_type)
    for choice, run in kernels(problem):
        x = random_operands(problem, device, seed=5)
        plain, other = torch.zeros_like(x.out), odd(torch.ones_like(x.out))
        run(plain, x.tensors, x.scalars)
        run(other, tuple(map(odd, x.tensors)), x.scalars)
        if choice.backend == "aten":  # cuBLAS may take another algorithm for other strides
            torch.testing.assert_close(other, plain)
        else:
            assert torch.equal(plain, other), f"{choice.name} of {problem}"


@pytest.mark.parametrize("name", ["mm", "column", "float8"])
def test_kernels_do_not_read_the_stride_of_one_element(name: str) -> None:
    check_choices(MADE[name]("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MADE)
def test_gpu_kernels_do_not_read_the_stride_of_one_element(name: str) -> None:
    check_choices(MADE[name]("cuda"))


def test_a_row_stored_under_such_a_stride_is_found_and_imported(tmp_path: Path) -> None:
    problem = Problem.mm(1, 48, 64, dtype=torch.float32, device_type="cpu")
    a = list(problem.a.stride)
    former = problem.key.replace(f'"stride":[{a[0]},{a[1]}]', f'"stride":[{ODD},1]', 1)
    assert former != problem.key
    row = Row(
        key=former, fingerprint='{"device":"x"}', name="aten:mm", backend="aten", content_hash="h", status=Status.OK, time_us=2.0
    )
    store, other = Store.open(tmp_path / "one.sqlite"), Store.open(tmp_path / "two.sqlite")
    store.put([row])
    assert [x.key for x in store.rows(problem.key, row.fingerprint).values()] == [problem.key]
    store.export_file(tmp_path / "rows.json")
    other.import_file(tmp_path / "rows.json")
    assert [x.key for x in other.every_row()] == [problem.key]


def test_layouts_settle_once() -> None:
    for size, columns in itertools.product(itertools.product((1, 3), (1, 4), (1, 5)), (False, True)):
        for strides in itertools.permutations((1, 5, 20)):
            layout = Layout(size=size, stride=strides, dtype=torch.float32).settled(columns=columns)
            assert layout == layout.settled(columns=columns)
            assert all(n == 1 or s == t for n, s, t in zip(size, strides, layout.stride, strict=True))
            assert layout.numel == 1 or layout.span <= Layout(size=size, stride=strides, dtype=torch.float32).span
