"""Scattered products in the three formats of torch, against torch's own on the CPU and loops."""

from __future__ import annotations

import pytest
import torch
from torch.sparse._triton_ops import bsr_scatter_mm_indices_data
from torch.sparse._triton_ops import scatter_mm as of_torch

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.ready import forget_plans
from gemmtune.sparse import bsr_scatter_mm, create_blocked_tensor, scatter_mm

pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")


@pytest.fixture(autouse=True)
def fresh(own_store):
    forget_plans()
    with settings.patch(backends=("aten",), verify=False, tune="never"):
        yield


def test_lists_in_any_order_with_repetitions_and_empty_sums() -> None:
    blocks, others = torch.randn(3, 8, 4, dtype=torch.float64), torch.randn(5, 4, 7, dtype=torch.float64)
    offsets = torch.tensor([0, 3, 3, 7])
    pq = torch.tensor([[2, 4], [0, 1], [1, 1], [0, 3], [0, 3], [2, 0], [1, 4]])
    want = torch.zeros(3, 8, 7, dtype=torch.float64)
    for r in range(3):
        for p, q in pq[offsets[r] : offsets[r + 1]].tolist():
            want[r] += blocks[p] @ others[q]
    assert torch.allclose(scatter_mm(blocks, others, ("scatter_mm", offsets, pq)), want)
    start = torch.randn(3, 8, 7, dtype=torch.float64)
    into = start.clone()
    assert scatter_mm(blocks, others, ("scatter_mm", offsets, pq), accumulators=into) is into
    assert torch.allclose(into, start + want)


@pytest.mark.parametrize("form", ["bsr_strided_mm", "bsr_strided_mm_compressed"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_strided_formats_are_those_of_torch(form: str, batch: tuple[int, ...]) -> None:
    bsr = create_blocked_tensor(32, 24, block=(8, 4), density=0.5, imbalance="skewed", dtype=torch.float64, seed=2)
    other = torch.randn(*batch, 24, 12, dtype=torch.float64)
    meta = {"SPLIT_N": 3, "TILE_M": 8, "TILE_N": 4, "GROUP_SIZE": 1, "num_stages": 1, "num_warps": 1}
    data = bsr_scatter_mm_indices_data(bsr, other, indices_format=form, **meta)
    want = torch.zeros(*batch, 32, 12, dtype=torch.float64)
    of_torch(bsr.values(), other, data, accumulators=want)
    assert torch.allclose(want, bsr.to_dense() @ other)
    got = torch.zeros_like(want)
    assert scatter_mm(bsr.values(), other, data, accumulators=got) is got
    assert torch.allclose(got, want)
    assert torch.allclose(bsr_scatter_mm(bsr, other, data), want)
    assert torch.allclose(bsr_scatter_mm(bsr, other, out=torch.empty_like(want)), want)


LISTED = {
    "got 4 among blocks, expected 0 to 1": {"pq": [[0, 1], [4, 0]]},
    "got -1 among blocks": {"pq": [[0, 1], [-1, 0]]},
    "got 3 among others, expected 0 to 2": {"pq": [[0, 3], [1, 0]]},
    r"c_offsets: got \[0, 2, 1\], expected offsets that rise from 0 to 2": {"starts": [0, 2, 1]},
    "got blocks of 4 columns and others of 5 rows": {"height": 5},
    r"accumulators: got a tensor of shape \[3, 8, 6\], expected \[2, 8, 6\]": {"accumulators": torch.zeros(3, 8, 6)},
}


@pytest.mark.parametrize("message", LISTED)
def test_lists_that_do_not_fit_are_told(message: str) -> None:
    given = {"pq": [[0, 1], [1, 0]], "starts": [0, 1, 2], "height": 4, "accumulators": None} | LISTED[message]
    data = ("scatter_mm", torch.tensor(given["starts"]), torch.tensor(given["pq"]))
    with pytest.raises(gemmtune.InvalidProblemError, match=message):
        scatter_mm(torch.ones(2, 8, 4), torch.ones(3, given["height"], 6), data, accumulators=given["accumulators"])


def test_what_does_not_fit_is_refused() -> None:
    blocks, others = torch.ones(1, 8, 4), torch.ones(8, 12)
    some = torch.tensor([0, 1])
    with pytest.raises(gemmtune.InvalidProblemError, match="got int, expected one of scatter_mm"):
        scatter_mm(blocks, others, 5)
    with pytest.raises(gemmtune.InvalidProblemError, match="got 'csr', expected one of scatter_mm"):
        scatter_mm(blocks, others, ("csr",))
    for function in (scatter_mm, bsr_scatter_mm):
        with pytest.raises(gemmtune.InvalidProblemError, match=f"^{function.__name__}: indices_data: got nothing, expected one of"):
            function(blocks, others, ())
    for parts, columns in (({}, 12), ({"SPLIT_N": 2}, 0)):
        with pytest.raises(gemmtune.InvalidProblemError, match="expected at least one part and one column"):
            scatter_mm(blocks, others[:, :columns], ("bsr_strided_mm", some, some[:1], some[:1], some[1:], parts))
    with pytest.raises(gemmtune.InvalidProblemError, match=r"accumulators: got a tensor of shape \[8\], expected \[..., M, 12\]"):
        scatter_mm(
            blocks, others, ("bsr_strided_mm", some, some[:1], some[:1], some[1:], {"SPLIT_N": 2}), accumulators=torch.zeros(8)
        )
    with pytest.raises(gemmtune.InvalidProblemError, match="of other dimensions"):
        scatter_mm(blocks, others, ("scatter_mm", some, torch.zeros(1, 2)))
    with pytest.raises(gemmtune.InvalidProblemError, match="bsr_strided_mm: got 5 parts of indices_data, expected 6"):
        scatter_mm(blocks, others, ("bsr_strided_mm", some, some, some, {"SPLIT_N": 2}))
    with pytest.raises(gemmtune.InvalidProblemError, match=r"other: got shape \[8\]"):
        bsr_scatter_mm(create_blocked_tensor(8, 8, block=4), others[:, 0])
    with pytest.raises(gemmtune.InvalidProblemError, match="an offset inside of a tile of 4x6"):
        scatter_mm(blocks, others, ("bsr_strided_mm", some, some[:1], some[:1], some[1:], {"SPLIT_N": 2}))
    with pytest.raises(gemmtune.InvalidProblemError, match="expected multiples of 4 rows, 5 columns"):
        scatter_mm(blocks, others, ("bsr_strided_mm", some, some[:1], some[:1], some[1:], {"SPLIT_N": 5}))
