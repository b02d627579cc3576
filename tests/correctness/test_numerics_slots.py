"""Copies of an operand with gaps share buffers, never elements, and tuning takes a bounded multiple of an operand's span."""

from __future__ import annotations

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.choice import Status
from gemmtune.numerics import buffers, slots
from gemmtune.numerics.buffers import distinct, overlapping
from gemmtune.numerics.slots import Slots, copy_elements, slots_of
from gemmtune.problem import Layout

CPU = torch.device("cpu")
LAYOUTS = {
    "a position of each sequence": Layout(size=(4, 512), stride=(4096 * 512, 1), dtype=torch.float32),
    "a batch of those": Layout(size=(2, 4, 64), stride=(1 << 20, 1 << 18, 1), dtype=torch.bfloat16, offset=3),
    "a column": Layout(size=(100, 1), stride=(4096, 1), dtype=torch.float32),
    "columns": Layout(size=(64, 100), stride=(1, 4096), dtype=torch.int8),
    "padded": Layout(size=(30, 40), stride=(48, 1), dtype=torch.float32),
    "dense": Layout(size=(30, 40), stride=(40, 1), dtype=torch.float64),
    "every second element": Layout(size=(30, 40), stride=(80, 2), dtype=torch.float32),
    "interleaved batches": Layout(size=(3, 8, 16), stride=(4096, 3 * 4096, 1), dtype=torch.float32),
    "blocks of close rows": Layout(size=(5, 4, 16), stride=(64, 1024, 1), dtype=torch.float32),
    "expanded": Layout(size=(30, 40), stride=(0, 1), dtype=torch.float32),
    "overlapping": Layout(size=(30, 40), stride=(3, 1), dtype=torch.float32),
}
SHARED = ("a position of each sequence", "a batch of those", "a column", "columns", "interleaved batches", "blocks of close rows")


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_share_no_elements(name: str):
    layout = LAYOUTS[name]
    made = Slots(layout, CPU)
    count = min(slots_of(layout)[0], 20) + 2
    taken = [made.take() for _ in range(count)]
    for i, x in enumerate(taken):
        assert (tuple(x.shape), x.stride(), Layout.of(x).offset) == (layout.size, layout.stride, layout.offset)
        distinct(x).fill_(i)
    if not overlapping(layout):
        assert [x.float().unique().tolist() for x in taken] == [[float(i)] for i in range(count)]


def test_layouts_with_large_gaps_share_a_buffer():
    found = {name: slots_of(layout)[0] for name, layout in LAYOUTS.items()}
    assert {name for name, count in found.items() if count > 1} == set(SHARED)
    assert found["a position of each sequence"] == 4096


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_have_the_elements(name: str):
    source, target = (Slots(LAYOUTS[name], CPU).take() for _ in range(2))
    buffers.flat(source).copy_(torch.arange(LAYOUTS[name].span) % 100)
    copy_elements(target, source)
    assert torch.equal(target, source)


def test_a_full_buffer_is_not_kept():
    made = Slots(LAYOUTS["dense"], CPU)
    first = made.take()
    assert made._whole is None
    assert made.take().untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_tuning_of_a_view_takes_few_spans(own_store: object, monkeypatch: pytest.MonkeyPatch):
    """The last position of each sequence: 2048 elements in a span of 25 MB. A buffer for each copy took 6 GB."""
    h, w = torch.randn(4, 4096, 512), torch.randn(512, 64)
    taken = [0]
    original = buffers.allocate

    def counted(layout: Layout, *args: object, **kwargs: object) -> torch.Tensor:
        made = original(layout, *args, **kwargs)  # type: ignore[arg-type]
        taken[0] += made.untyped_storage().nbytes() if layout.size[-1] == 512 else 0
        return made

    for module in (buffers, slots):
        monkeypatch.setattr(module, "allocate", counted)
    with settings.patch(backends=("aten", "cpp"), search="quick", max_profiling_configs=1):
        [found] = gemmtune.tune("mm", h[:, -1], w, progress=False)
        assert {o.status for o in found.outcomes} == {Status.OK}
        torch.testing.assert_close(gemmtune.mm(h[:, -1], w), h[:, -1] @ w, rtol=1e-4, atol=1e-3)
    span_bytes = Layout.of(h[:, -1]).span * 4
    assert 0 < taken[0] < 3 * span_bytes, f"{taken[0] / span_bytes:.1f} spans"
