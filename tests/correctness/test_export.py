"""torch.export and AOTInductor of a model whose layers are optimized and quantized, with any number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpp_kernels import needs_compiler
from rotation import takes
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.integration import compile as compile_pass

Tensor = torch.Tensor
ROWS = (8, 8, 3, 16)
"""Rows of the example, and of calls."""


@pytest.fixture
def exported(own_store):
    """Yield a model with a layer of each kind, and what torch.export makes of it."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(4)]
    for layer, kind in zip(layers, ("int8", "int4", "float8"), strict=False):
        gemmtune.quantize_(layer, kind, group=32)
    model = nn.Sequential(*layers[:2], nn.GELU(), *layers[2:]).eval()
    with settings.patch(backends=("aten", "cpp"), search="quick", max_profiling_configs=1), torch.no_grad():
        gemmtune.optimize(model, tune=torch.randn(ROWS[0], 64), progress=False)
        yield model, torch.export.export(model, (torch.randn(ROWS[0], 64),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    compile_pass.uninstall()


def check(model: nn.Module, found) -> None:
    for rows in ROWS:
        x = torch.randn(rows, 64)
        assert torch.allclose(found(x), model(x), atol=1e-5), rows


@pytest.mark.turn(6, 8)
def test_export(exported, tmp_path: Path):
    model, program = exported
    check(model, program.module())
    torch.export.save(program, tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").stat().st_size < 2**16, "weights of four layers are 64 KiB in floats"
    check(model, torch.export.load(tmp_path / "model.pt2").module())


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("package", ["whole"] if takes("AOTInductor") else [])
def test_aot_inductor(exported, package, tmp_path: Path):
    model, program = exported
    with torch._inductor.config.patch({"aot_inductor.precompile_headers": False}):  # which take longer than one package
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    check(model, torch._inductor.aoti_load_package(path))


def test_a_product_with_an_epilogue_is_exported_and_saved(own_store, tmp_path: Path):
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return gemmtune.mm(x, self.weight.t(), epilogue=lambda y, z: (y * z).to(torch.bfloat16), epilogue_args=(self.bias,))

    layer, x = Layer(8, 4), torch.randn(3, 8)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    with settings.patch(tune="never"):
        assert torch.equal(torch.export.load(tmp_path / "layer.pt2").module()(x), layer(x))
