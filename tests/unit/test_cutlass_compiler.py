"""Compilation of CUTLASS's operations: once for all shapes and processes, errors, damaged files, use without nvcc."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpp_kernels import needs_compiler
from fake_nvcc import FakeNvcc, installed

from gemmtune import settings
from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.toolkit import Toolkit
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.errors import CompileError, UnavailableError
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for, widest_offers_for
from gemmtune.selector.precompile import precompile
from gemmtune.settings import Settings

pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
pytestmark = needs_compiler

SM90 = preset("sm90")
NO_NVCC = "nvcc is not on PATH: install the CUDA toolkit, or compile on a machine that has it (gemmtune build)"


def choices(m: int = 512, n: int = 512, k: int = 512, arch: str = "sm90") -> list[CutlassChoice]:
    problem = Problem.mm(m, n, k, device_type="cuda")
    found = BACKEND.enumerate(
        problem, preset(arch), Settings(search="quick", cutlass_op_allowlist_regex="epi_tma|sm80|tensorop_bf16")
    )
    return [choice for choice in found.choices if isinstance(choice, CutlassChoice)]


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvcc]:
    with installed(tmp_path, monkeypatch) as fake:
        yield fake


def artifacts(nvcc: FakeNvcc) -> list[Path]:
    return sorted((nvcc.folder / "cache" / "cutlass").glob("*.so"))


def test_compiles_operation_once_for_all_shapes_and_variants(nvcc: FakeNvcc) -> None:
    choice = choices()[0]
    same = [c for shape in ((512, 512, 512), (1024, 512, 2048), (640, 512, 512)) for c in choices(*shape)
            if c.config.operation == choice.config.operation]  # fmt: skip
    assert {c.compile_key for c in same} == {choice.compile_key}
    assert not choice.compiled
    for each in same:
        each.compile()
        assert each.compiled
    assert nvcc.runs == 1
    assert len(artifacts(nvcc)) == 1


def test_recompiles_for_another_kernel(nvcc: FakeNvcc) -> None:
    problem = Problem.addmm(512, 512, 512, bias="n", alpha=2, beta=0.5, device_type="cuda")
    added = BACKEND.enumerate(problem, SM90, Settings(search="quick")).choices[0]
    plain, older = choices()[0], choices(arch="sm80")[0]
    keys = {plain.compile_key, older.compile_key, added.compile_key}
    for choice in (plain, older, added):
        choice.compile()
    assert len(keys) == nvcc.runs == len(artifacts(nvcc)) == 3


def test_other_cutlass_version_is_another_kernel(nvcc: FakeNvcc) -> None:
    choice = choices()[0]
    other = Toolkit(version="5.0.0", package=choice.toolkit.package, include=choice.toolkit.include)
    values = {field: getattr(choice, field) for field in choice.__dataclass_fields__} | {"toolkit": other}
    assert CutlassChoice(**values).compile_key != choice.compile_key
    assert CutlassChoice(**values).content_hash != choice.content_hash


def test_nvcc_gets_architecture_and_include_folders(nvcc: FakeNvcc) -> None:
    nvcc.does('echo "$@" >&2; exit 1')
    texts = []
    for choice in (choices()[0], choices(arch="sm80")[0]):
        with pytest.raises(CompileError) as caught:
            choice.compile()
        texts.append(caught.value.output)
    include = choices()[0].toolkit.include[0]
    assert all(f"-I{include} " in text and "-shared" in text and "-O3" in text for text in texts)
    assert "-gencode=arch=compute_90a,code=sm_90a " in texts[0]
    assert "-gencode=arch=compute_80,code=[sm_80,compute_80] " in texts[1]


def test_refused_source_raises_compile_error_with_last_lines(nvcc: FakeNvcc) -> None:
    nvcc.refuses("error: static assertion failed", lines=50)
    choice = choices()[0]
    with pytest.raises(CompileError) as caught:
        choice.compile()
    assert caught.value.name == choice.name
    assert caught.value.output.splitlines() == [f"error: static assertion failed {i}" for i in range(31, 51)]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert artifacts(nvcc) == []


def test_failed_compilation_marks_every_choice_that_needs_it(nvcc: FakeNvcc) -> None:
    nvcc.refuses("error: no such schedule")
    found = choices()
    failures = precompile(found, settings.current())
    assert failures.keys() == {c.name for c in found}
    assert {f.status for f in failures.values()} == {Status.COMPILE_ERROR}
    assert {f.reason for f in failures.values()} == {"error: no such schedule 1"}


@pytest.mark.parametrize("damage", ["truncated", "empty", "text"])
def test_recompiles_damaged_shared_object(nvcc: FakeNvcc, damage: str) -> None:
    choice = choices()[0]
    choice.compile()
    [path] = artifacts(nvcc)
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"no shared object" * 100}[damage])
    library = choice.load()
    assert (library.threads, library.shared_bytes) == (384, 200000)
    assert nvcc.runs == 2
    assert path.read_bytes() == whole


def test_reports_shared_object_that_stays_damaged(nvcc: FakeNvcc) -> None:
    nvcc.does('for last; do :; done\necho none > "$last"')
    with pytest.raises(
        UnavailableError, match=r"cutlass:.*: the compiled file cannot be loaded here: .*\.so: .* expected an ELF file"
    ):
        choices()[0].build()


def test_without_nvcc_uses_existing_kernels_and_refuses_others(nvcc: FakeNvcc) -> None:
    with settings.patch(backends=("cutlass",), search="quick") as chosen:
        problem = Problem.mm(512, 512, 512, device_type="cuda")
        first, *others = offers_for(problem, SM90, chosen).choices
        first.compile()
        nvcc.remove()
        assert BACKEND.available(SM90).ok
        found = offers_for(problem, SM90, chosen)
        [known] = found.choices
        assert known == first
        assert known.obstacle is None
        known.compile()
        assert {r.name: r.reason for r in found.refusals}.items() >= {choice.name: NO_NVCC for choice in others}.items()
        assert {c.config.operation for c in widest_offers_for(problem, SM90, chosen).choices} == {first.config.operation}
        assert offers_for(problem, SM90, chosen, on_this_machine=False).choices == (first, *others)
        with pytest.raises(UnavailableError, match=r"^nvcc is not on PATH: install the CUDA toolkit"):
            others[0].compile()
    assert nvcc.runs == 1


def test_full_disk_raises_compile_error(nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choices()[0]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    words = r"the cache folder cannot be used: .*No space left.*; set GEMMTUNE_CACHE_DIR to a folder of yours"
    with pytest.raises(CompileError, match=words):
        choice.compile()
    assert not choice.compiled


def test_choice_can_be_pickled(nvcc: FakeNvcc) -> None:
    choice = choices()[0]
    travelled = pickle.loads(pickle.dumps(choice))
    assert travelled == choice
    assert (travelled.content_hash, travelled.compile_key) == (choice.content_hash, choice.compile_key)


def test_2x_operations_run_on_newer_gpus_and_3x_do_not(nvcc: FakeNvcc) -> None:
    newest, older = choices()[0], choices(arch="sm80")[0]
    assert (newest.arch, older.arch) == ("sm90", "sm80")
    assert older.forward() is older
    with pytest.raises(UnavailableError, match=r"got a newer GPU, expected sm90: the kernel uses instructions that only it has"):
        newest.forward()
