"""The setting ``disable``: every product of gemmtune is torch's, and nothing is tuned, compiled or read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gemmtune
from gemmtune import cli, settings
from gemmtune.ops.products import addmm, bmm, mixed_mm, mm

A, B = torch.randn(32, 48), torch.randn(48, 16)
PRODUCTS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "mm": (lambda: mm(A, B), lambda: A @ B),
    "epilogue": (lambda: mm(A, B, epilogue=torch.relu), lambda: (A @ B).relu()),
    "addmm": (lambda: addmm(A[:, :16], A, B), lambda: torch.addmm(A[:, :16], A, B)),
    "bmm": (lambda: bmm(A[None], B[None]), lambda: A[None] @ B[None]),
    "prepacked": (lambda: mm(A, gemmtune.prepack(B)), lambda: A @ B),
    "mixed_mm": (lambda: mixed_mm(A, B.to(torch.int8)), lambda: A @ B.to(torch.int8).float()),
    "grouped_mm": (
        lambda: gemmtune.grouped_mm(A.bfloat16(), B.bfloat16()[None], torch.tensor([32], dtype=torch.int32)),
        lambda: A.bfloat16() @ B.bfloat16(),
    ),
    "multi": (lambda: gemmtune.multi("mm", A, B, choices=["aten:mm", "cpp:one of any"])(A, B), lambda: A @ B),
}


@pytest.fixture
def disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disabled gemmtune whose cache folder would tell of any use. A tuning or a look at a file fails."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a disabled gemmtune does this")

    for name in ("selector.measure.open_session", "store.database.Database._opened", "native.build.load"):
        monkeypatch.setattr(f"gemmtune.{name}", fail, raising=False)
    with settings.patch(disable=True, cache_dir=str(tmp_path / "cache"), batch_invariant=True, fallback_to_aten=False):
        yield tmp_path / "cache"


def test_every_product_is_torchs_and_nothing_is_read(disabled: Path) -> None:
    for name, (ours, torchs) in PRODUCTS.items():
        assert torch.equal(ours(), torchs()), name
    layer = torch.nn.Linear(48, 16)
    expected = layer(A)
    assert torch.equal(gemmtune.optimize(layer, tune=A)(A), expected)
    gemmtune.restore(layer)
    with gemmtune.use():
        assert torch.equal(A @ B, torch.matmul(A, B))
    assert str(gemmtune.explain("mm", A, B)).endswith("torch (torch, because the setting disable is on (GEMMTUNE_DISABLE))")
    assert not disabled.exists()


def test_tune_tells_that_it_does_nothing(disabled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(RuntimeWarning, match="tune: nothing is tuned, because the setting disable is on"):
        [result] = gemmtune.tune("mm", A, B)
    assert (result.pick, result.outcomes) == (None, ())
    assert str(gemmtune.TuningResult((result,))).splitlines()[0].endswith(": not tuned")
    with pytest.warns(RuntimeWarning):
        assert gemmtune.tune("mm", A, B, m=range(1, 9)) == ()
    assert cli.run(["tune", "8x8x8"]) == 2
    assert "error: the setting disable is on (GEMMTUNE_DISABLE)" in capsys.readouterr().err
