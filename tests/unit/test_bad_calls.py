"""Every bad call says what was got, what was expected and what to do."""

from __future__ import annotations

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.errors import InvalidProblemError


@pytest.fixture(autouse=True)
def quick(own_store):
    with settings.patch(search="quick", backends=("aten",)):
        yield


A, B, BATCH = torch.ones(4, 3), torch.ones(3, 5), torch.ones(2, 4, 3)
WIDE = torch.ones(8, 16)

BAD_CALLS = {
    "inner sizes": (
        lambda: gemmtune.mm(A, A),
        r"mm: shapes do not fit, got a \[4, 3\] and b \[4, 3\]; expected a \[M, K\] and b \[K, N\]",
    ),
    "batch sizes": (
        lambda: gemmtune.bmm(BATCH, torch.ones(3, 3, 5)),
        r"bmm: shapes do not fit, got a \[2, 4, 3\] and b \[3, 3, 5\]",
    ),
    "1-D": (lambda: gemmtune.mm(A[0], B), r"mm: a must be a 2-D tensor, got shape \[3\]"),
    "3-D for mm": (lambda: gemmtune.mm(BATCH, B), r"mm: a must be a 2-D tensor, got shape \[2, 4, 3\]"),
    "2-D for bmm": (lambda: gemmtune.bmm(A, B), r"bmm: a must be a 3-D tensor, got shape \[4, 3\]"),
    "dtypes": (
        lambda: gemmtune.mm(A, B.half()),
        "mm: a and b must have the same dtype, got torch.float32 and torch.float16; cast one of them",
    ),
    "no tensor": (lambda: gemmtune.mm(A, [[1.0]]), "mm: b must be a torch.Tensor, got list"),
    "devices": (
        lambda: gemmtune.mm(A, B.to("meta")),
        "all operands must be on one device, got a on cpu and b on meta; move one of them",
    ),
    "inp shape": (
        lambda: gemmtune.addmm(torch.ones(4), A, B),
        r"got an operand of shape \(4,\), expected one that broadcasts to \(4, 5\)",
    ),
    "inp dtype": (
        lambda: gemmtune.addmm(torch.ones(5).half(), A, B),
        "addmm: inp must have the dtype of a, got torch.float16 and torch.float32",
    ),
    "out shape": (lambda: gemmtune.mm(A, B, out=torch.empty(5, 4)), r"mm: out must have shape \[4, 5\], got \[5, 4\]"),
    "out dtype": (
        lambda: gemmtune.mm(A, B, out=torch.empty(4, 5).half()),
        "mm: out must have dtype torch.float32, got torch.float16",
    ),
    "out device": (
        lambda: gemmtune.mm(A, B, out=torch.empty(4, 5, device="meta")),
        "got a on cpu and out on meta; move one of them",
    ),
    "out type": (lambda: gemmtune.mm(A, B, out=3), "mm: out must be a torch.Tensor, got int"),
    "out is an input": (
        lambda: gemmtune.mm(WIDE[:, :8], WIDE[:, :8], out=WIDE[:, :8]),
        "mm: out shares memory with a; give an out of its own",
    ),
    "out overlaps itself": (lambda: gemmtune.mm(A, B, out=torch.empty(5).expand(4, 5)), "several elements of out share memory"),
    "epilogue args": (lambda: gemmtune.mm(A, B, epilogue_args=(A,)), "mm: got 1 epilogue_args without an epilogue"),
    "epilogue shape": (
        lambda: gemmtune.mm(A, B, epilogue=lambda x, y: x + y, epilogue_args=(torch.ones(7),)),
        r"epilogue_args\[0\]: got an operand of shape \(7,\), expected one that broadcasts to \(4, 5\)",
    ),
    "prepack": (lambda: gemmtune.prepack(BATCH), r"prepack: b must be a 2-D tensor \[K, N\], got a 3-D tensor"),
    "prepacked bmm": (lambda: gemmtune.bmm(BATCH, gemmtune.prepack(B)), "bmm: b must be a torch.Tensor, got a prepacked operand"),
    "explain": (lambda: gemmtune.explain("conv", A, B), "explain: got op 'conv', expected one of mm, addmm, bmm, baddbmm"),
    "explain count": (lambda: gemmtune.explain("addmm", A, B), "explain: addmm takes 3 operands, got 2"),
    "tune": (lambda: gemmtune.tune([3]), "tune: expected a Problem or several, got int"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_message(name: str):
    call, message = BAD_CALLS[name]
    with pytest.raises(InvalidProblemError, match=message):
        call()


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_bad_shapes_are_what_torch_callers_catch(kind: type[Exception]):
    with pytest.raises(kind):
        gemmtune.mm(A, A)


def test_a_bad_call_leaves_out_as_it_was():
    out = torch.full((5, 4), 7.0)
    with pytest.raises(InvalidProblemError):
        gemmtune.mm(A, B, out=out)
    assert (out == 7).all()


def test_interleaved_views_of_one_buffer_do_not_count_as_overlap():
    buffer = torch.zeros(4, 8)
    a, out = buffer[:, :3].copy_(A), buffer[:, 3:]
    gemmtune.mm(a, B, out=out)
    assert torch.equal(out, A @ B)
    assert torch.equal(buffer[:, :3], A)
