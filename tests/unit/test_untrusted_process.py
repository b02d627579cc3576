"""Parts of the process of an untrusted GEMM that need no process: how it is called, and whose question a file's opening is."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from gemmtune.untrusted.gemm_process import first
from gemmtune.untrusted.gemm_process.journal import _asker
from gemmtune.untrusted.gemm_process.manners import in_manner

PLAIN = {
    "mode": "plain", "times": 1, "thread": False, "one_core": False, "parameter": False, "offset": 0, "changed": [],
    "before": "", "beside": 0, "wider": 0, "trained": False, "inside": False, "one": False, "around": "", "many": False,
}  # fmt: skip


def test_a_gemm_is_called_as_programs_do() -> None:
    seen: list[tuple[object, ...]] = []

    def gemm(a: torch.Tensor, b: torch.Tensor) -> int:
        seen.append((a.tolist(), b.tolist(), a.is_inference(), type(b), torch.get_num_threads(), threading.get_ident()))
        return len(seen)

    a, b, threads = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.get_num_threads()
    assert in_manner(gemm, PLAIN)(a, b) == 1
    assert seen == [([1, 2], [3, 4], False, torch.Tensor, threads, threading.get_ident())]
    for changed, earlier in (([], ([2, 1], [4, 3])), ([0.5], ([1, 0], [3, 0]))):
        seen.clear()
        other = PLAIN | {"mode": "inference", "times": 3, "thread": True, "one_core": True, "parameter": True, "offset": 3}
        assert in_manner(gemm, other | {"changed": changed})(a, b) == 3, "the last result"
        assert [x[:5] for x in seen] == [(*x, True, torch.nn.Parameter, 1) for x in (earlier, earlier, ([1, 2], [3, 4]))]
        assert threading.get_ident() not in {x[5] for x in seen}
    assert torch.get_num_threads() == threads


def test_a_gemm_is_called_with_fewer_rows_before_parts_of_wider_matrices_and_other_threads() -> None:
    seen: list[tuple[object, ...]] = []
    others = dict[int, bool]()

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if (ident := threading.get_ident()) == threading.main_thread().ident:
            seen.append((a.tolist(), a.stride(), b.stride(), a.data_ptr()))
        else:
            others[ident] = torch.is_inference_mode_enabled()
        return a @ b

    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2)
    assert torch.equal(in_manner(gemm, PLAIN | {"before": "a row less", "beside": 2, "wider": 6, "mode": "inference"})(a, b), a)
    (before, *_, place), last = seen
    assert before == [[2.0, 1.0]], "other numbers, and no last row"
    assert last == (a.tolist(), (8, 1), (8, 1), place), "at the same place"
    assert [*others.values()] == [True, True]


def test_a_question_of_pythons_own_modules_is_that_of_their_caller() -> None:
    def asked_by(*files: str) -> str:
        """Return the file that counts, from the frames of these files, the innermost first."""
        frame = None
        for file in reversed(files):
            frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_back=frame)
        found: list[str] = []
        _asker(lambda x: found.append(x.f_code.co_filename) or True, ("/python/lib/",))(frame)  # type: ignore[arg-type, func-returns-value]
        return found[0]

    assert asked_by("/python/lib/io.py", "/python/lib/json.py", "/kernels/gemm.py", "/torch.py") == "/kernels/gemm.py"
    package = "/python/lib/site-packages/torch/serialization.py"
    assert asked_by("/python/lib/io.py", package, "/kernels/gemm.py") == package


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_the_children_of_a_process_are_found() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        found = first._children()
        child.kill()
    assert child.pid in found
    assert child.pid not in first._children()
