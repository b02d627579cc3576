"""The text of the cluster kernel and its compilation: what it depends on, once for all sizes, life without nvcc."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cpp_kernels import needs_compiler
from fake_nvcc import FakeNvcc, installed

from gemmtune import settings
from gemmtune.backends.cuda import BACKEND
from gemmtune.backends.cuda.cluster.build import ClusterChoice
from gemmtune.backends.cuda.cluster.configs import SHAPES
from gemmtune.backends.cuda.cluster.source import Source
from gemmtune.backends.cuda.finish import Finish
from gemmtune.device import preset
from gemmtune.errors import CompileError, UnavailableError
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.offers import offers_for

SM90 = preset("sm90")
NO_NVCC = "nvcc is not on PATH: install the CUDA toolkit, or compile on a machine that has it (gemmtune build)"
PLAIN = Source(shape=SHAPES[0], dtype=torch.bfloat16, out_dtype=torch.bfloat16, p_by_k=True, q_by_k=True)


def choices(m: int = 128, n: int = 128, k: int = 16384) -> list[ClusterChoice]:
    with settings.patch(backends=("cuda",)) as chosen:
        found = BACKEND.enumerate(Problem.mm(m, n, k, device_type="cuda"), SM90, chosen).choices
    return [choice for choice in found if isinstance(choice, ClusterChoice)]


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvcc]:
    with installed(tmp_path, monkeypatch) as fake:
        yield fake


def test_the_text_has_the_constants_of_the_shape_and_nothing_left_to_fill() -> None:
    text = PLAIN.text
    assert "constexpr int ROWS = 64, COLS = 64, DEPTH = 64;" in text
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" in text
    assert "{{" not in text
    assert "{%" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": SHAPES[1]},
        {"dtype": torch.float16},
        {"out_dtype": torch.float32},
        {"p_by_k": False},
        {"q_by_k": False},
        {"finish": Finish(alpha="general")},
        {"patience": 0},
        {"finish": Finish(operands=(torch.bfloat16,), added=True, beta="one")},
    ],
)
def test_whatever_changes_the_text_changes_the_digest(changes: dict[str, object]) -> None:
    other = dataclasses.replace(PLAIN, **changes)  # type: ignore[arg-type]
    assert other.text != PLAIN.text
    assert other.digest != PLAIN.digest
    assert dataclasses.replace(PLAIN).digest == PLAIN.digest


def test_an_epilogue_is_printed_once_for_each_element_and_after_scalars() -> None:
    epilogue = trace(lambda acc, x: torch.relu(acc) * x, torch.float32, [torch.empty(8, 8, dtype=torch.bfloat16)])
    finish = Finish(alpha="general", beta="general", added=True, epilogue=epilogue, operands=(torch.float16, torch.bfloat16))
    text = dataclasses.replace(PLAIN, finish=finish).text
    steps = ["acc = acc * scalars.alpha;", "acc = acc + scalars.beta * x0;", "f_relu(acc)"]
    assert [text.count(step) for step in steps] == [1, 1, 1]
    assert sorted(steps, key=text.index) == steps
    assert "x1 = value_of<bf16>" in text


@needs_compiler
def test_a_shape_is_compiled_once_for_every_size(nvcc: FakeNvcc) -> None:
    choice = choices()[0]
    same = [c for sizes in ((128, 128, 16384), (100, 120, 32768)) for c in choices(*sizes) if c.source.shape == choice.source.shape]
    assert len(same) > 1
    assert {c.compile_key for c in same} == {choice.compile_key}
    assert not choice.compiled
    for each in same:
        each.compile()
        assert each.compiled
    assert nvcc.runs == 1


@needs_compiler
def test_nvcc_is_told_the_architecture_and_a_refusal_is_a_compile_error(nvcc: FakeNvcc) -> None:
    nvcc.does('echo "$@" >&2; exit 1')
    with pytest.raises(CompileError) as caught:
        choices()[0].compile()
    assert "-gencode=arch=compute_90a,code=sm_90a " in caught.value.output


@needs_compiler
def test_without_nvcc_what_was_compiled_before_is_used_and_the_rest_refused(nvcc: FakeNvcc) -> None:
    with settings.patch(backends=("cuda",)) as chosen:
        problem = Problem.mm(128, 128, 16384, device_type="cuda")
        assert BACKEND.available(SM90).detail == "nvcc 12.8"
        first, *others = offers_for(problem, SM90, chosen).choices
        first.compile()
        nvcc.remove()
        assert BACKEND.available(SM90).detail == f"only kernels that were compiled before: {NO_NVCC}"
        found = offers_for(problem, SM90, chosen)
        assert list(found.choices) == [first]
        assert {r.name: r.reason for r in found.refusals}.items() >= {choice.name: NO_NVCC for choice in others}.items()
        with pytest.raises(UnavailableError, match=r"^nvcc is not on PATH"):
            others[0].compile()


def test_a_choice_travels_and_runs_on_its_architecture_alone() -> None:
    choice = choices()[0]
    travelled = pickle.loads(pickle.dumps(choice))
    assert travelled == choice
    assert (travelled.content_hash, travelled.compile_key, travelled.arch) == (choice.content_hash, choice.compile_key, "sm90")
    with pytest.raises(UnavailableError, match="got a newer GPU, expected sm90"):
        choice.forward()
