"""Block-sparse products on the CPU: values, what is refused, prepacking, in-place edits, NaN, and what verification finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bsr_mutants import MUTANTS
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.backends.table import load
from gemmtune.choice import Choice, Kernel, Status, Tensors
from gemmtune.device import detect, preset
from gemmtune.dispatch.ready import forget_plans
from gemmtune.numerics.block_sparse import densified, parts, random_mask
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for
from gemmtune.selector.samples import Sample
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings
from gemmtune.sparse import create_blocked_tensor

CPU = torch.device("cpu")
PARTS = (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")


@pytest.fixture(autouse=True)
def fresh(own_store):
    forget_plans()
    with settings.patch(backends=("aten",), verify=False, search="quick", tune="never"):
        yield


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a result is what float64 gives, up to a few roundings."""
    eps = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.int8: 0.0}[dtype]
    assert got.dtype == (torch.int32 if dtype == torch.int8 else dtype)
    return bool(((got.double() - want).abs() <= eps * want.abs().max()).all())


def numbers(*size: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(size, generator=g).to(dtype) if dtype != torch.int8 else torch.randint(-9, 9, size, dtype=dtype, generator=g)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_values(dtype: torch.dtype, packed: bool) -> None:
    wide, narrow = torch.int64, torch.int32
    for block, tokens, index, density in ((16, 5, narrow, 0.5), ((8, 24), 1, wide, 0.2), ((48, 4), 33, wide, 0.0)):
        bsr = create_blocked_tensor(96, 48, block=block, density=density, dtype=dtype, index_dtype=index)
        x = numbers(48, tokens, dtype=dtype)
        weight = gemmtune.prepack(bsr) if packed else bsr
        want = bsr.to_dense().double() @ x.double()
        for _ in range(2):  # the second call runs the plan of the first
            got = gemmtune.bsr_mm(weight, x)
            assert got.is_contiguous()
            assert close(got, want, dtype)
        strided = torch.empty(48, 2 * tokens, dtype=dtype)[:, ::2].copy_(x)
        assert close(gemmtune.bsr_mm(weight, strided), want, dtype)


def test_alpha_beta_and_factors_of_rows_and_columns() -> None:
    bsr, x = create_blocked_tensor(64, 96, block=(16, 32)), numbers(96, 7, dtype=torch.float32)
    left, right = torch.rand(64), torch.rand(7)
    product = bsr.to_dense().double() @ x.double()
    for inp in (numbers(64, 7, dtype=torch.float32), numbers(7, dtype=torch.float32), numbers(64, 1, dtype=torch.float32)):
        want = 0.5 * inp.double() + 2 * product
        assert close(gemmtune.bsr_addmm(inp, bsr, x, beta=0.5, alpha=2), want, torch.float32)
        for of_rows, of_cols in ((left, right), (left, None), (None, right)):
            scaled = 2 * product * (1 if of_rows is None else of_rows[:, None].double())
            scaled = scaled * (1 if of_cols is None else of_cols.double())
            got = gemmtune.bsr_addmm(inp, bsr, x, beta=0.5, alpha=2, left_alpha=of_rows, right_alpha=of_cols)
            assert close(got, 0.5 * inp.double() + scaled, torch.float32)
    unread = torch.full((64, 7), torch.nan)
    for factors in ({}, {"left_alpha": left}):
        assert gemmtune.bsr_addmm(unread, bsr, x, beta=0, **factors).isfinite().all()
        assert torch.equal(gemmtune.bsr_addmm(inp, bsr, x * torch.nan, alpha=0, **factors), inp.expand(64, 7))
    relu = gemmtune.bsr_addmm(inp, bsr, x, left_alpha=left, epilogue=lambda acc, y: torch.relu(acc) + y, epilogue_args=(right,))
    assert close(relu, torch.relu(inp + product * left[:, None]) + right.double(), torch.float32)


def test_out_may_be_inp_and_is_returned() -> None:
    bsr, x = create_blocked_tensor(64, 96, block=32), numbers(96, 7, dtype=torch.float32)
    want = bsr.to_dense().double() @ x.double()
    for out in (torch.full((64, 7), torch.nan), torch.full((7, 64), torch.nan).t(), torch.full((64, 14), torch.nan)[:, ::2]):
        version = out._version
        assert gemmtune.bsr_mm(bsr, x, out=out, epilogue=torch.relu) is out
        assert out._version > version
        assert close(out, torch.relu(want), torch.float32)
    inp = numbers(64, 7, dtype=torch.float32)
    want = want + inp.double()
    assert close(gemmtune.bsr_addmm(inp, bsr, x, out=inp), want, torch.float32)
    with pytest.raises(gemmtune.InvalidProblemError, match="out shares memory with bsr"):
        gemmtune.bsr_mm(bsr, x, out=bsr.values().view(-1)[: 64 * 7].view(64, 7))


def test_empty_sizes() -> None:
    for m, k, n in ((0, 32, 4), (32, 0, 4), (32, 32, 0)):
        bsr = torch.zeros(m, k).to_sparse_bsr((16, 16))
        assert torch.equal(gemmtune.bsr_mm(bsr, torch.ones(k, n)), torch.zeros(m, n))
    bsr = torch.zeros(32, 0).to_sparse_bsr((16, 16))
    assert torch.equal(gemmtune.bsr_addmm(torch.ones(4), bsr, torch.ones(0, 4), beta=2), torch.full((32, 4), 2.0))


def wrong(crow: list[int], col: list[int]) -> torch.Tensor:
    values = torch.ones(len(col), 16, 16)
    return torch.sparse_bsr_tensor(torch.tensor(crow), torch.tensor(col), values, size=(32, 64), check_invariants=False)


STRIPE, ONES = wrong([0, 1, 2], [1, 3]), torch.ones(64, 1)


def times_ones(crow: list[int], col: list[int], **words: Any) -> Callable[[], Any]:
    return lambda: gemmtune.bsr_mm(wrong(crow, col), torch.ones(64, 1, **words))


def blocks_of(rows: int, cols: int) -> torch.Tensor:
    """Return a weight without blocks, each of which would have so many rows and columns."""
    crow, col = torch.zeros(32 // max(rows, 1) + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    return torch.sparse_bsr_tensor(crow, col, torch.ones(0, rows, cols), size=(32, 64), check_invariants=False)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unsorted": (times_ones([0, 1, 3], [0, 3, 2]), r"col_indices\[2\] = 2 follows 3 in block row 1"),
    "repeated": (times_ones([0, 2, 3], [1, 1, 0]), r"col_indices\[1\] = 1 follows 1 in block row 0"),
    "outside": (times_ones([0, 1, 2], [0, 4]), r"col_indices\[1\] of bsr is 4, expected 0 to 3"),
    "falling": (times_ones([0, 2, 1], [0]), r"must rise from 0 to 1, got \[0, 2, 1\]"),
    "dtype": (times_ones([0, 0, 1], [2], dtype=torch.float16), "must have the same dtype"),
    "dense": (
        lambda: gemmtune.bsr_mm(torch.ones(32, 64), torch.ones(64, 1)),
        "must be a sparse_bsr tensor, got a tensor of",
    ),
    "shape": (lambda: gemmtune.bsr_mm(wrong([0, 0, 0], []), torch.ones(32, 1)), r"got bsr \[32, 64\] and x \[32, 1\]"),
    "complex alpha": (lambda: gemmtune.bsr_addmm(torch.ones(1), STRIPE, ONES, alpha=2j), "alpha: got 2j, expected a number"),
    "no weight": (lambda: gemmtune.bsr_addmm(torch.ones(1), [1], ONES), "must be a sparse_bsr tensor, got list"),
    "blocks without rows": (lambda: gemmtune.bsr_mm(blocks_of(0, 16), ONES), "got blocks of 0x16, expected sides of 1 or more"),
    "blocks without columns": (lambda: gemmtune.bsr_mm(blocks_of(16, 0), ONES), "got blocks of 16x0, expected sides of 1 or more"),
    "rows": (
        lambda: gemmtune.bsr_addmm(torch.ones(1), STRIPE, ONES, left_alpha=torch.ones(31)),
        r"bsr_addmm: left_alpha: got a tensor of shape \[31\], expected \[32\]",
    ),
    "number": (lambda: gemmtune.bsr_addmm(ONES, STRIPE, ONES, right_alpha=2.0), "right_alpha must be a torch.Tensor, got float"),
    "factor": (
        lambda: gemmtune.bsr_addmm(ONES, STRIPE, ONES, left_alpha=torch.ones(32).int()),
        "dtype of left_alpha: got torch.int32, expected a float dtype",
    ),
    "meta": (lambda: gemmtune.bsr_mm(STRIPE.to("meta"), ONES.to("meta")), "bsr is on the device meta"),
    "forward mode": (
        lambda: torch.func.jvp(lambda x: gemmtune.bsr_mm(STRIPE, x), (ONES,), (ONES,)),
        "forward-mode differentiation",
    ),
    "gradient transform": (
        lambda: torch.func.grad(lambda x: gemmtune.bsr_mm(STRIPE, x).sum())(ONES),
        r"bsr_mm: a gradient transform of torch.func is active",
    ),
    "gradient transform of a batch": (
        lambda: torch.func.vmap(torch.func.grad(lambda x: gemmtune.bsr_mm(STRIPE, x).sum()))(ONES.expand(2, 64, 1)),
        r"bsr_mm: a gradient transform of torch.func is active",
    ),
    "gradient transform of sampled": (
        lambda: torch.func.vjp(lambda x: gemmtune.sampled_addmm_bsr(STRIPE, torch.ones(32, 1), x).values(), ONES.t()),
        r"sampled_addmm_bsr: a gradient transform of torch.func is active",
    ),
    "converted": (
        lambda: gemmtune.bsr_mm(nn.ParameterList([nn.Parameter(STRIPE.clone())]).half()[0].detach(), ONES.half()),
        "got bsr of torch.float16 with values of torch.float32",
    ),
    "batched inp": (
        lambda: gemmtune.bsr_addmm(torch.ones(3, 32, 1), STRIPE, ONES.expand(2, 64, 1)),
        r"inp: got an operand of shape \(3, 32, 1\)",
    ),
    "batched out": (
        lambda: gemmtune.bsr_mm(STRIPE, ONES.expand(2, 64, 1), out=torch.ones(32, 1).expand(2, 32, 1)),
        "several elements of out share memory",
    ),
    "gradient into out": (
        lambda: gemmtune.bsr_mm(STRIPE, torch.ones(2, 64, 1, requires_grad=True), out=torch.empty(2, 32, 1)),
        "a call with out= is not differentiable",
    ),
    "int8 sum": (
        lambda: gemmtune.bsr_addmm(torch.ones(1), wrong([0, 0, 1], [2]).to(torch.int8), torch.ones(64, 1).char()),
        "dtype of bsr: got torch.int8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_is_wrong(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(gemmtune.InvalidProblemError, match=message):
        call()


def test_autocast_leaves_what_is_sparse_in_its_dtype() -> None:
    bsr, x = create_blocked_tensor(64, 96, block=16), numbers(96, 7, dtype=torch.float32)
    crow, col, values = (part(bsr) for part in PARTS)
    with torch.autocast("cpu", torch.bfloat16):
        found = gemmtune.bsr_mm(bsr, x), gemmtune.bsr_mm(gemmtune.prepack(bsr), x), torch.ops.gemmtune.bsr_mm(crow, col, values, x)
    assert all(close(got, bsr.to_dense().double() @ x.double(), torch.float32) for got in found)


def test_a_change_in_place_is_noticed() -> None:
    for packed in (False, True):
        bsr, x = create_blocked_tensor(64, 64, block=16, density=0.4), numbers(64, 3, dtype=torch.float32)
        weight = gemmtune.prepack(bsr) if packed else bsr
        gemmtune.bsr_mm(weight, x)
        bsr.values().mul_(-3)
        assert close(gemmtune.bsr_mm(weight, x), bsr.to_dense().double() @ x.double(), torch.float32)
        bsr.col_indices()[:2] = torch.tensor([0, 3])
        assert close(gemmtune.bsr_mm(weight, x), bsr.to_dense().double() @ x.double(), torch.float32)
        bsr.col_indices()[1] = 7
        with pytest.raises(gemmtune.InvalidProblemError, match="expected 0 to 3"):
            gemmtune.bsr_mm(weight, x)


def test_another_tensor_at_the_same_address_is_another_weight() -> None:
    x = numbers(64, 3, dtype=torch.float32)
    for seed in range(4):
        bsr = create_blocked_tensor(64, 64, block=16, density=0.25 * (seed + 1), seed=seed)
        assert close(gemmtune.bsr_mm(bsr, x), bsr.to_dense().double() @ x.double(), torch.float32)
        del bsr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_beside_absent_blocks_is_hidden_on_demand(dtype: torch.dtype) -> None:
    bsr, x = create_blocked_tensor(64, 64, block=16, density=0.25, dtype=dtype), torch.ones(64, 2, dtype=dtype)
    x[40] = torch.nan
    shows = torch.zeros(4, dtype=torch.bool)
    _, crow, col = parts(bsr)
    for row in range(4):
        shows[row] = bool((col[crow[row] : crow[row + 1]] == 2).any())
    assert 0 < shows.sum() < 4
    with settings.patch(absent_blocks="skipped"):
        got = gemmtune.bsr_mm(gemmtune.prepack(bsr), x)
    assert torch.equal(got.isnan(), shows.repeat_interleave(16)[:, None].expand(64, 2))


def test_skipping_leaves_out_dense_products() -> None:
    problem = Problem.bsr_mm(8, 64, 64, block=16, dtype=torch.float32, device_type="cpu", prepacked=True)
    names = {}
    for setting in ("any", "skipped"):
        chosen = Settings(backends=("aten", "cpp"), absent_blocks=setting)  # type: ignore[arg-type]
        names[setting] = {choice.name for choice in offers_for(problem, preset("avx512"), chosen).choices}
    blocks = {name for name in names["skipped"] if name.startswith("cpp:bsr_")}
    assert names["skipped"] - blocks == {"aten:bsr_mm", "aten:bsr_batched"} & names["any"]
    assert blocks < {name for name in names["any"] if name.startswith("cpp:bsr_")}  # without panels that join blocks
    assert any(name.startswith("cpp:") and name.endswith("+dense") for name in names["any"])


def test_tuning_finds_a_right_choice_for_a_prepacked_weight() -> None:
    bsr, x = create_blocked_tensor(64, 64, block=16, density=0.25), numbers(64, 3, dtype=torch.float32)
    stated = Problem.bsr_mm(3, 64, 64, block=16, density=0.25, dtype=torch.float32, layout="tt", device_type="cpu", prepacked=True)
    with settings.patch(tune="on_miss", verify=True, tune_in_subprocess=False):
        got = gemmtune.bsr_mm(gemmtune.prepack(bsr), x)
        [found] = gemmtune.tune(stated, progress=False)
    assert close(got, bsr.to_dense().double() @ x.double(), torch.float32)
    assert found.source == "store"
    assert {o.status for o in found.outcomes} == {Status.OK}


def test_tune_and_explain_take_the_operation_and_its_tensors() -> None:
    bsr, x, inp = create_blocked_tensor(64, 96, block=16), numbers(96, 3, dtype=torch.float32), torch.ones(3)
    packed = gemmtune.prepack(bsr)
    for op, tensors, more in (
        (gemmtune.bsr_mm, (packed, x), {}),
        ("bsr_addmm", (inp, packed, x), {"alpha": 2, "epilogue": torch.relu}),
    ):
        explained = gemmtune.explain(op, *tensors, **more)
        with settings.patch(tune="on_miss", tune_in_subprocess=False):
            [found] = gemmtune.tune(op, *tensors, progress=False, **more)
        assert explained.problem == found.problem
        assert gemmtune.explain(op, *tensors, **more).pick == found.pick
    with pytest.raises(gemmtune.InvalidProblemError, match="got left_alpha, expected none but alpha, beta, out"):
        gemmtune.explain("bsr_addmm", inp, bsr, x, left_alpha=torch.ones(64))
    with pytest.raises(gemmtune.InvalidProblemError, match="got 1 operands, expected bsr, x"):
        gemmtune.tune("bsr_mm", bsr)


PROBLEMS = {
    "fp32": Problem.bsr_mm(17, 48, 64, block=16, dtype=torch.float32, device_type="cpu"),
    "bf16-sum-prepacked": Problem.bsr_addmm(
        5, 48, 64, block=(16, 8), density=0.2, imbalance="skewed", wide_index=True, alpha=2, beta=0.5, device_type="cpu",
        prepacked=True,
    ),
    "e4m3-prepacked": Problem.bsr_mm(
        17, 48, 64, block=16, dtype=torch.float8_e4m3fn, layout="tt", device_type="cpu", prepacked=True
    ),
    "int8-none": Problem.bsr_mm(4, 48, 64, block=16, density=0, dtype=torch.int8, layout="tt", device_type="cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_verification_accepts_torch(name: str) -> None:
    problem = PROBLEMS[name]
    verifier = Verifier(problem, CPU)
    choices = load("aten").enumerate(problem, detect("cpu"), Settings()).choices
    found = {choice.name: verifier.check(choice, choice.build()) for choice in choices}
    assert {verdict.status for verdict in found.values()} == {Status.OK}, found


def test_every_tensor_is_made_on_the_device_of_the_operands() -> None:
    problem = PROBLEMS["bf16-sum-prepacked"]
    generator = torch.Generator().manual_seed(0)
    bsr, x = create_blocked_tensor(64, 96, block=(16, 32), imbalance="skewed", device="cpu"), torch.ones(96, 2)
    want = bsr.to_dense() @ x
    with torch.device("meta"):  # where a tensor lands that is made without a word on its device
        assert random_mask((48, 64), problem.sparsity, generator).device == CPU
        for choice in load("aten").enumerate(problem, detect("cpu"), Settings()).choices:
            assert Verifier(problem, CPU).check(choice, choice.build()).status is Status.OK
        for weight in (bsr, gemmtune.prepack(bsr)):
            assert close(gemmtune.bsr_mm(weight, x), want, torch.float32)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_verification_finds_what_is_wrong(mutant: str) -> None:
    problem = PROBLEMS["fp32"]
    [choice] = [c for c in load("aten").enumerate(problem, detect("cpu"), Settings()).choices if c.name == "aten:bsr_batched"]
    verdict = _verdict(problem, choice, MUTANTS[mutant])
    assert (verdict.status is Status.OK) == (mutant == "right"), verdict


def _verdict(problem: Problem, choice: Choice, product: Callable[..., torch.Tensor]) -> Sample:
    def run(out: torch.Tensor, tensors: Tensors, scalars: tuple[float, ...]) -> None:
        a, weight = tensors
        product(out, a, *parts(weight))

    return Verifier(problem, CPU).check(choice, Kernel(run=run))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_batches_of_weights_and_of_matrices(dtype: torch.dtype) -> None:
    one = create_blocked_tensor(48, 64, block=16, density=0.5, dtype=dtype)
    rows = [create_blocked_tensor(48, 64, block=16, density=0.5, dtype=dtype, seed=seed) for seed in range(6)]
    stacked = [torch.stack([part(row) for row in rows]).unflatten(0, (2, 3)) for part in PARTS]
    batch = torch.sparse_bsr_tensor(*stacked, size=(2, 3, 48, 64), check_invariants=False)
    dense = torch.stack([row.to_dense() for row in rows]).unflatten(0, (2, 3)).double()
    for bsr, want, lead in (one, one.to_dense().double(), (3,)), *((batch, dense, lead) for lead in ((), (2, 3), (1, 3))):
        x = numbers(*lead, 64, 5, dtype=dtype)
        for weight in (bsr, gemmtune.prepack(bsr)) if bsr is one else (bsr, bsr):
            assert close(gemmtune.bsr_mm(weight, x), want @ x.double(), dtype)
    if dtype == torch.float32:
        batch.values().neg_()
        assert close(gemmtune.bsr_mm(batch, x), -want @ x.double(), dtype)
        inp = numbers(3, 48, 1, dtype=dtype)
        got = gemmtune.bsr_addmm(inp, batch, x, beta=2, out=torch.empty(2, 3, 48, 5))
        assert close(got, 2 * inp.double() - want @ x.double(), dtype)
        with pytest.raises(gemmtune.InvalidProblemError, match="apply them to the result"):
            gemmtune.bsr_mm(batch, x, epilogue=torch.relu)
    with pytest.raises(gemmtune.InvalidProblemError, match="which do not broadcast"):
        gemmtune.bsr_mm(batch, numbers(4, 64, 5, dtype=dtype))
    with pytest.raises(gemmtune.InvalidProblemError, match="expected weights for each matrix, or one; expand bsr"):
        gemmtune.bsr_mm(batch, numbers(4, 2, 3, 64, 5, dtype=dtype))


def test_batches_without_elements() -> None:
    for lead, rows, blocks, columns in itertools.product(((), (2,)), (0, 2), (0, 1), (0, 3)):
        if rows == 0 < blocks:
            continue
        crow, col = torch.tensor([0, *[blocks] * rows]).expand(*lead, -1), torch.zeros(*lead, blocks, dtype=torch.int64)
        values = torch.ones(*lead, blocks, 4, 2)
        bsr = torch.sparse_bsr_tensor(crow.contiguous(), col, values, size=(*lead, 4 * rows, 6), check_invariants=False)
        for batch in ((), (2,)):
            x, inp = torch.ones(*batch, 6, columns), torch.ones(4 * rows, columns)
            want = torch.cat([torch.full((4 * blocks, columns), 3.0), torch.ones(4 * (rows - blocks), columns)])
            got = gemmtune.bsr_addmm(inp, bsr, x)
            assert torch.equal(got, want.expand(*(batch or lead), -1, -1))


def test_sums_of_integers_are_exact() -> None:
    bsr, x = create_blocked_tensor(48, 64, block=16, dtype=torch.int8), numbers(64, 5, dtype=torch.int8)
    inp, left, right = torch.arange(48).int().unsqueeze(1), torch.arange(48).int() - 20, torch.arange(5).char() - 2
    product = bsr.to_dense().long() @ x.long()
    got = gemmtune.int_bsr_addmm(inp, bsr, x, beta=-3, alpha=2, left_alpha=left, right_alpha=right)
    assert torch.equal(got, (-3 * inp + left[:, None] * (2 * product) * right).int())
    assert torch.equal(gemmtune.int_bsr_addmm(inp, gemmtune.prepack(bsr), x, beta=0, out=got), product.int())
    with pytest.raises(gemmtune.InvalidProblemError, match=r"dtype of inp: got torch.float32, expected torch.int32"):
        gemmtune.int_bsr_addmm(inp.float(), bsr, x)
    wrongly = {
        "dtype of inp: got torch.int64": {"inp": inp.long()},
        "dtype of left_alpha: got torch.int64": {"left_alpha": left.long()},
        "alpha: got 4294967296, expected an integer of 32 bits": {"alpha": 2**32},
        r"inp: got an operand of shape \(2, 48, 5\)": {"inp": torch.ones(2, 48, 5).int()},
        "out must have dtype torch.int32": {"out": torch.empty(48, 5)},
    }
    for message, words in wrongly.items():
        with pytest.raises(gemmtune.InvalidProblemError, match=message):
            gemmtune.int_bsr_addmm(**{"inp": inp, "bsr": bsr, "x": x} | words)
    with pytest.raises(gemmtune.InvalidProblemError, match="bsr_addmm takes floats"):
        gemmtune.int_bsr_addmm(inp, bsr.float(), x.float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bit_floats_have_scales_of_rows_and_columns(dtype: torch.dtype) -> None:
    bsr, x = create_blocked_tensor(48, 64, block=(16, 8), density=0.4, dtype=dtype), numbers(64, 5, dtype=dtype)
    inp, left, right = numbers(48, 5, dtype=torch.bfloat16), numbers(48, dtype=torch.float32), numbers(5, dtype=torch.float32)
    product = densified(bsr).double() @ x.double()
    for weight in (bsr, gemmtune.prepack(bsr)):
        assert close(gemmtune.bsr_mm(weight, x), product, torch.bfloat16)
        got = gemmtune.bsr_addmm(inp, weight, x, beta=2, alpha=3, left_alpha=left, right_alpha=right)
        assert close(got, 2 * inp.double() + 3 * left[:, None] * product * right, torch.bfloat16)
        assert close(gemmtune.bsr_addmm(inp, weight, x), inp.double() + product, torch.bfloat16)
    batch = x.expand(2, 64, 5)
    assert close(gemmtune.bsr_mm(bsr, batch), product.expand(2, 48, 5), torch.bfloat16)
    crow, col, values = (part(bsr) for part in PARTS)
    assert close(torch.ops.gemmtune.bsr_mm(crow, col, values, x), product, torch.bfloat16)
    with pytest.raises(gemmtune.InvalidProblemError, match="bsr and x must have the same dtype"):
        gemmtune.bsr_mm(bsr, x.float())


def test_a_warm_call_into_memory_beside_the_blocks_is_not_stated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = create_blocked_tensor(64, 64, block=16, density=0.25)
    count = made.values().numel()
    memory = torch.empty(count + 64 * 16)
    values = memory[:count].view_as(made.values()).copy_(made.values())
    bsr = torch.sparse_bsr_tensor(made.crow_indices(), made.col_indices(), values, size=(64, 64), check_invariants=False)
    x, out = numbers(64, 16, dtype=torch.float32), memory[count:].view(64, 16)
    weight, want = gemmtune.prepack(bsr), made.to_dense().double() @ x.double()
    gemmtune.bsr_mm(weight, x, out=out)
    monkeypatch.setattr("gemmtune.ops.operate.call_of", lambda *_, **__: pytest.fail("stated again"))
    assert close(gemmtune.bsr_mm(weight, x, out=out.zero_()), want, torch.float32)
    monkeypatch.undo()
    with pytest.raises(gemmtune.InvalidProblemError, match="out shares memory with bsr"):
        gemmtune.bsr_mm(weight, x, out=memory[16 : 16 + 64 * 16].view(64, 16))


@pytest.mark.parametrize("packed", [False, True])
def test_warm_calls_with_an_epilogue_or_a_gradient_are_not_stated_again(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Tensor] = []
    for seed in range(2):
        bsr = create_blocked_tensor(64, 64, block=16, density=0.25, seed=seed)
        weight = gemmtune.prepack(bsr) if packed else bsr
        x, ones = numbers(64, 16, dtype=torch.float32).requires_grad_(), torch.ones(64, 1)
        for _ in range(2):
            with torch.no_grad():
                calls.append(gemmtune.bsr_mm(weight, x, epilogue=torch.relu))
            calls.append(
                gemmtune.bsr_addmm(ones, weight, x, epilogue=lambda acc, y: torch.relu(acc) * y, epilogue_args=(2 * ones,))
            )
            calls.append(gemmtune.bsr_mm(weight, x))
        product = bsr.to_dense().double() @ x.double()
        for got, want in zip(calls, (product.relu(), 2 * (product + 1).relu(), product) * 2, strict=True):
            assert close(got, want, torch.float32)
        (g_x,) = torch.autograd.grad(calls[-1].sum(), x)
        assert close(g_x, bsr.to_dense().double().t() @ torch.ones(64, 16).double(), torch.float32)
        calls.clear()
        # The second weight is of the same kind as the first, whose plans it finds.
        monkeypatch.setattr("gemmtune.ops.operate.call_of", lambda *_, **__: pytest.fail("stated again"))
