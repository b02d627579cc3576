"""Classes of block-sparse weights, their problems, and tensors of a given density."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gemmtune
from gemmtune.cli.spec import Spec
from gemmtune.numerics.block_sparse import mask_of
from gemmtune.problem import Layout, Problem
from gemmtune.problem.sparsity import DENSITIES, Sparsity, density_class, imbalance_of
from gemmtune.sparse import create_blocked_tensor

pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")


def test_densities_go_to_the_nearest_class() -> None:
    assert [density_class(x) for x in DENSITIES] == list(DENSITIES)
    assert density_class(-0.1) == 0
    assert [density_class(x) for x in (1e-6, 0.014, 0.015, 0.34, 0.36, 0.97, 1.2)] == [0.01, 0.01, 0.02, 0.3, 0.4, 1.0, 1.0]


def test_rows_are_skewed_beyond_twice_the_mean() -> None:
    assert [imbalance_of(longest, 40, 10) for longest in (4, 9, 10)] == ["even", "even", "skewed"]
    assert imbalance_of(0, 0, 0) == "even"
    assert [imbalance_of(longest, 4, 1) for longest in (9, 10)] == ["even", "skewed"]


def test_a_problem_has_its_class_in_text_and_json_and_counts_what_exists() -> None:
    problem = Problem.bsr_addmm(16, 64, 128, block=(16, 32), density=0.27, wide_index=True, dtype=torch.float32, device_type="cpu")
    assert str(problem).endswith("beta=one blocks 16x32 density 0.3 even int64 on cpu")
    assert Problem.from_json(problem.to_json()) == problem
    assert problem.flops == round(0.3 * 2 * 16 * 64 * 128)
    dense = Problem.addmm(16, 64, 128, dtype=torch.float32, device_type="cpu")
    assert dense.bytes - problem.bytes == round(0.7 * 64 * 128 * 4)
    assert "sparsity" not in dense.to_json()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "block": ({"block": 24}, "expected whole blocks of 24x24"),
    "no block": ({"block": 0}, "expected its side, or"),
    "density": ({"density": 1.5}, "expected the share of blocks that exist"),
    "layout": ({"layout": "nn"}, "expected nt or tt"),
    "imbalance": ({"imbalance": "odd"}, "expected one of even, skewed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_rejects_invalid_block_sparse_problems(name: str) -> None:
    words, message = WRONG[name]
    with pytest.raises(gemmtune.InvalidProblemError, match=message):
        Problem.bsr_mm(16, 64, 128, device_type="cpu", **words)


def test_rejects_invalid_classes() -> None:
    assert str(Sparsity(block_n=1, block_k=16, density=0.5)) == "blocks 1x16 density 0.5 even"
    assert str(Sparsity(block_n=16, block_k=1, density=1.0)) == "blocks 16x1 density 1 even"
    for block_n, block_k in ((0, 16), (16, 0)):
        with pytest.raises(gemmtune.InvalidProblemError, match=f"got blocks of {block_n}x{block_k}, expected sides of 1 or more"):
            Sparsity(block_n=block_n, block_k=block_k, density=0.5)
    with pytest.raises(gemmtune.InvalidProblemError, match=r"got a density of 0\.51, expected one of 0\.0, 0\.01, .*, 1\.0"):
        Sparsity(block_n=16, block_k=16, density=0.51)


def test_other_operations_reject_a_class() -> None:
    dense = Problem.mm(16, 64, 128, device_type="cpu")
    fields = {name: getattr(dense, name) for name in ("a", "b", "out", "device_type")}
    with pytest.raises(gemmtune.InvalidProblemError, match="takes no sparsity"):
        Problem(op="mm", sparsity=Sparsity(block_n=16, block_k=16, density=0.5), **fields)
    with pytest.raises(gemmtune.InvalidProblemError, match="sparsity is missing"):
        Problem(op="bsr_mm", **fields)
    padded = Layout(size=(128, 64), stride=(1, 136), dtype=dense.b.dtype)
    with pytest.raises(gemmtune.InvalidProblemError, match="expected the transpose of a contiguous matrix"):
        Problem(op="bsr_mm", sparsity=Sparsity(block_n=16, block_k=16, density=0.5), **fields | {"b": padded})


def test_options_of_the_command_line_name_the_class() -> None:
    spec = Spec(op="bsr_mm", dtype="float32", block="16x32", density=0.1, imbalance="skewed", prepacked=True)
    assert spec.problem((8, 64, 128), "test") == Problem.bsr_mm(
        8, 64, 128, dtype=torch.float32, block=(16, 32), density=0.1, imbalance="skewed", prepacked=True, device_type="cpu"
    )
    with pytest.raises(gemmtune.InvalidProblemError, match="density: not for mm, expected one of bsr_mm, bsr_addmm"):
        Spec(op="mm", density=0.5).problem((8, 64, 128), "test")
    with pytest.raises(gemmtune.InvalidProblemError, match="block: got '64x', expected a side"):
        Spec(op="bsr_mm", block="64x").problem((8, 64, 128), "test")


@pytest.mark.parametrize("imbalance", ["even", "skewed"])
def test_blocked_tensors_have_the_requested_density(imbalance: Any) -> None:
    made = create_blocked_tensor(640, 320, block=(16, 32), density=0.3, imbalance=imbalance, dtype=torch.bfloat16, seed=3)
    mask = mask_of(made)
    assert made.dtype == torch.bfloat16
    assert abs(float(mask.float().mean()) - 0.3) < 0.06
    assert imbalance_of(int(mask.sum(1).max()), int(mask.sum()), 40) == imbalance
    assert made.to_dense().count_nonzero() > 0.99 * int(mask.sum()) * 16 * 32
    again = create_blocked_tensor(640, 320, block=(16, 32), density=0.3, imbalance=imbalance, seed=3)
    assert torch.equal(again.col_indices(), made.col_indices())


@pytest.mark.parametrize(
    "words",
    [{"block": 48}, {"block": "64x64"}, {"block": (8, 8, 8)}, {"density": 2}, {"index_dtype": torch.int8}, {"dtype": torch.int32}],
    ids=str,
)
def test_rejects_impossible_blocked_tensors(words: Any) -> None:
    with pytest.raises(gemmtune.InvalidProblemError):
        create_blocked_tensor(64, 64, **words)


def test_the_result_is_stored_as_a_is() -> None:
    for layout, row_major in (("nt", True), ("tt", False)):
        assert Problem.bsr_mm(16, 64, 128, layout=layout, device_type="cpu").out.row_major == row_major  # type: ignore[arg-type]
