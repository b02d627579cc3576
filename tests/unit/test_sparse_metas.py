"""torch's table of parameters: what a look-up finds, and in which order."""

from __future__ import annotations

import pytest
import torch

import gemmtune
from gemmtune.backends.table import load
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.sparse import Family, MetaTable, Shape, import_torch_meta

HALF = Family("bsr_dense_addmm", "NVIDIA H200", "bfloat16", 0.5)
SHAPE = Shape(1024, 512, 256, 64, 32)


@pytest.fixture(scope="module")
def imported() -> MetaTable:
    return import_torch_meta()


def test_every_row_of_torch_is_there(imported: MetaTable) -> None:
    from torch.sparse import _triton_ops_meta as meta

    assert len(imported) == sum(map(len, meta._operation_device_version_data.values())) > 6000
    device = "NVIDIA A100-SXM4-80GB"
    for (op, name, (version, dtype, sparsity)), rows in meta._operation_device_version_data.items():
        if op == "bsr_dense_addmm":
            key = min(rows)
            asked = Family(op, name, str(dtype).removeprefix("torch."), sparsity)
            found = imported.lookup(asked, Shape(*key))
            assert found.how == "exact"
            assert found.parameters == meta.get_meta(op, key, device, version=(version, dtype, sparsity))


def test_the_order_of_a_lookup() -> None:
    table = MetaTable()
    assert table.lookup(HALF, SHAPE).how == "default"
    assert table.lookup(HALF, SHAPE).parameters == {"GROUP_SIZE_ROW": 4, "SPLIT_N": 4, "num_stages": 1, "num_warps": 4}
    table.update(HALF, SHAPE._replace(n=96), (1, 2, 3, 8))  # tiles of 48, which do not divide 256
    table.update(HALF, SHAPE._replace(n=64), (2, 2, 3, 8))
    table.update(HALF, SHAPE._replace(n=512), (3, 2, 3, 8))
    found = table.lookup(HALF, SHAPE)
    assert (found.how, found.parameters["SPLIT_N"], found.parameters["GROUP_SIZE_ROW"]) == ("other N", 8, 2)
    table.update(HALF._replace(device="NVIDIA A100", sparsity=0.5), SHAPE, (7, 4, 2, 4))
    found = table.lookup(HALF, SHAPE)
    assert (found.how, found.parameters["GROUP_SIZE_ROW"]) == ("other GPU", 7)
    table.update(HALF._replace(sparsity=0.9), SHAPE, (5, 4, 2, 4))
    table.update(HALF._replace(sparsity=0.6), SHAPE, (6, 4, 2, 4))
    found = table.lookup(HALF, SHAPE)
    assert (found.how, found.parameters["GROUP_SIZE_ROW"]) == ("near density", 6)
    table.update(HALF, SHAPE, (8, 4, 2, 4))
    found = table.lookup(HALF, SHAPE)
    assert (found.how, found.parameters["GROUP_SIZE_ROW"]) == ("exact", 8)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        (HALF, (1, 2, 3), "expected a positive integer for each of GROUP_SIZE_ROW, SPLIT_N, num_stages, num_warps"),
        (HALF, (1, 2, 3, 0), "expected a positive integer"),
        (HALF._replace(op="mm"), (1,), "op: got 'mm', expected one of bsr_dense_addmm"),
    ],
)
def test_rows_that_cannot_be(family: Family, values: tuple[int, ...], message: str) -> None:
    with pytest.raises(gemmtune.InvalidProblemError, match=message):
        MetaTable().update(family, SHAPE, values)
    if family.op == "mm":
        with pytest.raises(gemmtune.InvalidProblemError, match=f"lookup: {message}"):
            MetaTable().lookup(family, SHAPE)


def test_parameters_of_torchs_table_are_tried_first(imported: MetaTable) -> None:
    problem = Problem.bsr_mm(256, 1024, 1024, block=32, dtype=torch.float16, device_type="cuda")
    choices = [c for c in load("aten").enumerate(problem, preset("sm90"), Settings()).choices if "SPLIT_N" in c.info]
    found = imported.lookup(Family("bsr_dense_addmm", "any", "float16", 0.5), Shape(1024, 1024, 256, 32, 32))
    assert found.how == "other GPU"
    assert found.parameters.items() <= choices[0].info.items()
    assert len({c.name for c in choices}) == len(choices) >= 3
    # A tile of 20 columns is one that torch's kernel gets wrong.
    odd = Problem.bsr_mm(48, 1024, 1024, block=32, dtype=torch.float16, device_type="cuda")
    names = [
        c.name for c in load("aten").enumerate(odd, preset("sm90"), Settings()).choices if c.info.get("template") == "bsr_triton"
    ]
    assert all("triton_16_" in name for name in names)
