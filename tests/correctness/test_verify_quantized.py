"""Verifier on the quantized operations: right kernels of every kind pass, broken ones are found with a reason."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_kernels import (
    CPU,
    backwards,
    choice_of,
    claims_of,
    kernel,
    one_by_one,
    pairwise,
    rounding_blocks,
    shuffled,
    split_k,
    tensor_core,
)
from hypothesis import given
from hypothesis import strategies as st
from problem_strategies import mixed_problems, narrow_problems
from quantized_kernels import Run, finish, on_sums, on_terms, signed, swapped, unpacked, unsigned
from rotation import rotated
from verify_cases import BF16, F16, F32, changed, mm, verdict

from gemmtune.choice import Claims, Status
from gemmtune.device import preset
from gemmtune.numerics.buffers import storage_bits
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier
from gemmtune.timing.rotation import Rotation

INT8, UINT8, INT32 = torch.int8, torch.uint8, torch.int32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EXACT = claims_of(INT8, accumulate=INT32, partials=INT32)
Matrix = torch.Tensor


def mixed(scales: Any = "group_32", *, m: int = 9, n: int = 40, k: int = 130, **fields: Any) -> Problem:
    return Problem.mixed_mm(m, n, k, scales=scales, device_type="cpu", **fields)


def scaled(scales: Any, *, m: int = 9, n: int = 40, k: int = 300, **fields: Any) -> Problem:
    return Problem.scaled_mm(m, n, k, scales=scales, **({"device_type": "cpu"} | fields))


def integers(epilogue: Callable[..., Matrix] | None = None, *operands: Matrix, m: int = 33, n: int = 40, k: int = 129) -> Problem:
    problem = Problem.int_mm(m, n, k, device_type="cpu")
    if epilogue is None:
        return problem
    graph = trace(epilogue, problem.epilogue_dtype, operands)
    out = dataclasses.replace(problem.out, dtype=graph.result_dtype or F32)
    return dataclasses.replace(problem, epilogue=graph, out=out)


def int_product(
    problem: Problem, change: Callable[[Matrix], Matrix] = lambda acc: acc, read: Callable[..., Matrix] | None = None
) -> Run:
    """Exact sums of int8, to which ``change`` is done before the epilogue."""

    def run(out: Matrix, a: Matrix, b: Matrix, inp: Any, alpha: float, beta: float, extra: tuple[Matrix, ...]) -> None:
        left, right = (x if read is None else read(x, "") for x in (a, b))
        finish(problem, out, change(left.long() @ right.long()).int(), extra)

    return run


def in_pairs(problem: Problem) -> Run:
    """Sums of two products saturate at 16 bits, as one instruction for 8-bit integers has it."""

    def run(out: Matrix, a: Matrix, b: Matrix, inp: Any, alpha: float, beta: float, extra: tuple[Matrix, ...]) -> None:
        products = a.long().unsqueeze(-1) * b.long()
        pairs = torch.nn.functional.pad(products, (0, 0, 0, problem.k % 2)).unflatten(1, (-1, 2)).sum(2)
        finish(problem, out, pairs.clamp(-(2**15), 2**15 - 1).sum(1).int(), extra)

    return run


WEIGHTS: dict[str, dict[str, Any]] = {
    "int8": {}, "uint8": {"dtype_b": UINT8}, "e4m3": {"dtype_b": E4M3}, "e5m2": {"dtype_b": E5M2},
    "int4": {"encoding": "int4"}, "uint4": {"encoding": "uint4"},
}  # fmt: skip
SCALES: tuple[Any, ...] = ("none", "tensor", "column", "group_32", "group_64", "group_128")


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    ("weights", "scales", "zeros"),
    rotated([(name, SCALES[(i + 2 * j) % 6], j % 2 == 1) for i, name in enumerate(WEIGHTS) for j in range(4)], 4, "mixed_mm"),
)
def test_right_kernels_of_mixed_mm_pass(weights: str, scales: Any, zeros: bool) -> None:
    if zeros and scales == "none":
        zeros, scales = True, "tensor"
    steps = int(scales[6:]) if scales.startswith("group") else None
    for dtype, size in ((F16, {}), (BF16, {"m": 1, "n": 33, "k": 288}), (F32, {"m": 1, "n": 1, "k": 64})):
        problem = mixed(scales, dtype=dtype, zeros=zeros, **size, **WEIGHTS[weights])
        plain, rounding = claims_of(dtype, splits=4), claims_of(dtype, weights=dtype)
        kernels: dict[str, tuple[Run, Claims]] = {
            "on terms": (on_terms(problem), plain),
            "weights rounded": (on_terms(problem, weights=dtype), rounding),
            "on sums": (on_sums(problem, steps=steps), plain),
            "K reversed": (on_sums(problem, backwards, steps=steps), plain),
            "small sums": (on_sums(problem, pairwise, steps=steps and steps // 4), plain),
            "shuffled": (on_terms(problem, shuffled), plain),
            "split": (on_terms(problem, split_k(F32, 3)), plain),
        }
        for name, (run, claims) in kernels.items():
            result = verdict(problem, run, claims)
            assert result.status == Status.OK, (name, str(problem), result.reason)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("fast_accum", rotated([False, True], 2, "fast"), ids=lambda fast: "fast" if fast else "promoted")
@pytest.mark.parametrize("scales", ["tensor", "row", "block_1x128", "block_128x128"])
def test_right_kernels_of_scaled_mm_pass(scales: Any, fast_accum: bool) -> None:
    for dtypes, size in (
        ((E4M3, E4M3, BF16), {}), ((E5M2, E4M3, F16), {"m": 130, "k": 256}), ((E4M3, E5M2, F32), {"m": 1}),
        ((torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, BF16), {"m": 3}),
    ):  # fmt: skip
        kinds = dict(zip(("dtype", "dtype_b", "out_dtype"), dtypes, strict=True))
        for device_type in ("cpu", "cuda"):
            problem = scaled(scales, fast_accum=fast_accum, device_type=device_type, **kinds, **size)
            kernels = [on_terms(problem), on_sums(problem, steps=128), on_sums(problem, backwards, steps=128)]
            if device_type == "cuda":
                kernels.append(on_sums(problem, tensor_core(14), steps=128))
            for run in kernels:
                result = verdict(problem, run, claims_of(dtypes[0]))
                assert result.status == Status.OK, (str(problem), result.reason)


@pytest.mark.parametrize(
    "problem",
    [
        integers(),
        integers(lambda acc, s: acc * s, torch.ones(40)),
        integers(lambda acc, s: (acc * s).to(BF16), torch.ones(33, 1)),
        integers(lambda acc, s, t: torch.relu(acc * s + t), torch.ones(40), torch.ones(33, 1), k=3000),
    ],
    ids=str,
)
def test_right_kernels_of_int_mm_pass(problem: Problem) -> None:
    for claimed in (F32, INT32):
        result = verdict(problem, int_product(problem), dataclasses.replace(EXACT, epilogue_input=claimed))
        assert result.status == Status.OK, result.reason


@pytest.mark.parametrize(
    "problem",
    [
        mixed(k=0, zeros=True), mixed(k=0, encoding="int4"), mixed(m=0), mixed(n=0, zeros=True), scaled("block_1x128", k=0),
        scaled("row", m=0), integers(k=0), integers(lambda acc, s: acc * s + 1, torch.ones(40), k=0),
    ],
    ids=str,
)  # fmt: skip
def test_empty_problems_pass(problem: Problem) -> None:
    claims = EXACT if problem.op == "int_mm" else claims_of(problem.dtype)
    assert verdict(problem, on_terms(problem), claims).status == Status.OK
    if not problem.empty:
        wrong = verdict(problem, changed(on_terms(problem), lambda out, a, b: out[0].add_(1)), claims)
        assert wrong.status == Status.WRONG_RESULT


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_result_narrower_than_a_may_be_rounded(dtype: torch.dtype) -> None:
    problem = mixed(dtype=F32, encoding="int4")
    problem = dataclasses.replace(problem, out=dataclasses.replace(problem.out, dtype=dtype))
    assert verdict(problem, on_sums(problem, steps=32)).status == Status.OK
    assert verdict(problem, on_terms(problem, lambda a, b: (a @ b) * 1.01)).status == Status.WRONG_RESULT


def test_an_epilogue_follows_the_scales() -> None:
    problem = mixed(zeros=True, encoding="uint4")
    problem = dataclasses.replace(problem, epilogue=trace(lambda x, bias: torch.relu(x + bias), F32, [torch.ones(40)]))
    assert verdict(problem, on_sums(problem, steps=32)).status == Status.OK
    early = dataclasses.replace(problem, epilogue=None)
    assert verdict(problem, on_sums(early, steps=32)).status == Status.WRONG_RESULT


# Broken kernels


def moved(by: int) -> Callable[[Matrix], Matrix]:
    return lambda x: x[(torch.arange(len(x)) + by).clamp(max=len(x) - 1)]


def with_scale(problem: Problem, change: Callable[[Matrix], Matrix]) -> Run:
    return on_terms(problem, change=lambda a, b, z: (a, change(b), z))


def with_zero(problem: Problem, change: Callable[[Matrix], Matrix]) -> Run:
    return on_terms(problem, change=lambda a, b, z: (a, b, change(z)))


def neighbour(x: Matrix) -> Matrix:
    return x.roll(1, dims=1)


def without_sign_of_upper(b: Matrix, encoding: str) -> Matrix:
    """The sign of the numbers in the upper four bits is lost: a shift without it."""
    both = unpacked(b, encoding)
    both[1::2] %= 16
    return both


GROUPS, ZEROS = mixed(encoding="int4"), mixed(zeros=True, encoding="uint4")
ROW_OF_GROUPS = mixed(m=1, k=4096, zeros=True, encoding="int4")
COLUMNS, TENSOR, SQUARE = mixed("column", zeros=True), mixed("tensor"), mixed("column", m=40, n=64, k=64)
UNSIGNED, LONG, LONGB = mixed(dtype_b=UINT8), mixed(k=4096), mixed(k=4096, dtype=BF16)
WIDE = mixed("group_128", k=1024, dtype=F32, scale_dtype=F32)
BLOCKS, SQUARES, ROWS = scaled("block_1x128"), scaled("block_128x128", m=140, n=130), scaled("row")
REMAINDER, WHOLE = mixed(k=140), mixed("group_128", k=130)
INT, TIMES = integers(k=600), integers(lambda acc, s: acc * s, torch.ones(40), k=600)

BROKEN: dict[str, tuple[Problem, Run, str]] = {
    "scale of the next group": (GROUPS, with_scale(GROUPS, moved(32)), "P5 cancellation: out["),
    "first group's scale for all": (GROUPS, with_scale(GROUPS, lambda s: s[:1].expand(s.shape)), "P5 cancellation: out["),
    "one row, scale of the next group": (ROW_OF_GROUPS, with_scale(ROW_OF_GROUPS, moved(32)), "P5 cancellation: out["),
    "one row, zero point of the next group": (ROW_OF_GROUPS, with_zero(ROW_OF_GROUPS, moved(32)), "P5 cancellation: out["),
    "groups of twice the size": (GROUPS, with_scale(GROUPS, lambda s: s[torch.arange(130) // 64 * 64]), "out["),
    "groups begin one late": (GROUPS, with_scale(GROUPS, lambda s: s[(torch.arange(130) - 1).clamp(min=0)]), "out["),
    "scale of the next column": (GROUPS, with_scale(GROUPS, neighbour), "out["),
    "scale axis swapped": (SQUARE, lambda out, a, b, *rest: out.copy_(a.float() @ (b.float() * rest[-1][0].T.float())), "out["),
    "scale dropped": (TENSOR, with_scale(TENSOR, torch.ones_like), "P5 cancellation: out["),
    "scale applied twice": (TENSOR, with_scale(TENSOR, torch.square), "P5 cancellation: out["),
    "zero point ignored": (COLUMNS, with_zero(COLUMNS, torch.zeros_like), "P5 cancellation: out["),
    "zero point added": (ZEROS, with_zero(ZEROS, torch.neg), "out["),
    "zero point of the next column": (COLUMNS, with_zero(COLUMNS, neighbour), "out["),
    "zero point of the next group": (ZEROS, with_zero(ZEROS, moved(32)), "out["),
    "zero point after the scale": (
        ZEROS, on_terms(ZEROS, change=lambda a, b, z: (a, b, z / b)), "P5 cancellation: out["),
    "zero point as an integer": (ZEROS, with_zero(ZEROS, torch.round), "P2 one-hot a: out["),
    "nibbles exchanged": (GROUPS, on_terms(GROUPS, read=swapped), "P5 cancellation: out["),
    "int4 without its sign": (GROUPS, on_terms(GROUPS, read=unsigned), "P5 cancellation: out["),
    "upper int4 without its sign": (GROUPS, on_terms(GROUPS, read=without_sign_of_upper), "out["),
    "uint4 with a sign": (ZEROS, on_terms(ZEROS, read=signed), "out["),
    "uint8 with a sign": (UNSIGNED, on_terms(UNSIGNED, read=signed), "P2 one-hot a: out["),
    "int8 without its sign": (TENSOR, on_terms(TENSOR, read=unsigned), "P5 cancellation: out["),
    "fp16 accumulation": (LONG, on_terms(LONG, rounding_blocks(F16)), "P5 cancellation: out["),
    "fp16 sums of groups": (LONG, on_sums(LONG, lambda a, b: (a @ b).half().float(), steps=32), "out["),
    "bf16 partials": (LONGB, on_terms(LONGB, split_k(BF16, 2)), "P5 cancellation: out["),
    "22 bits": (WIDE, on_terms(WIDE, tensor_core(22, width=4)), "P4 width: out["),
    "end of K without a whole group": (REMAINDER, on_sums(REMAINDER, steps=32, remainder=False), "P5 cancellation: out["),
    "the same, one group in all": (WHOLE, on_sums(WHOLE, steps=128, remainder=False), "out["),
    "K of the packed b": (GROUPS, on_terms(GROUPS, lambda a, b: a[:, :65] @ b[:65]), "out["),
    "scales read as bfloat16": (WIDE, with_scale(WIDE, lambda s: s.bfloat16().double()), "P6 scales: out["),
    "weights rounded to bfloat16": (LONG, on_terms(LONG, weights=BF16), "P6 scales: out["),
    "scale of the wrong block of a": (
        BLOCKS, on_terms(BLOCKS, change=lambda a, b, z: (moved(128)(a.T).T, b, z)), "P5 cancellation: out["),
    "scale of the wrong block of b": (BLOCKS, with_scale(BLOCKS, moved(128)), "P5 cancellation: out["),
    "both of the wrong block": (
        BLOCKS, on_terms(BLOCKS, change=lambda a, b, z: (moved(128)(a.T).T, moved(128)(b), z)), "P5 cancellation: out["),
    "square block of the wrong column": (SQUARES, with_scale(SQUARES, lambda s: s.roll(128, 1)), "out["),
    "scale_a dropped": (ROWS, on_terms(ROWS, change=lambda a, b, z: (torch.ones_like(a), b, z)), "out["),
    "scale_a by column": (
        SQUARES, on_terms(SQUARES, change=lambda a, b, z: (a.roll(128, 0), b, z)), "out["),
    "end of K without a whole block": (BLOCKS, on_sums(BLOCKS, steps=128, remainder=False), "out["),
    "14 bits not claimed": (BLOCKS, on_sums(BLOCKS, tensor_core(14), steps=128), "P4 width: out["),
    "NaN of an 8-bit float as a number": (
        ROWS, lambda out, a, b, inp, alpha, beta, s: out.copy_((a.float().nan_to_num(480) @ b.float()) * s[0] * s[1]),
        "expected nan"),
    "sums saturate at 24 bits": (
        integers(k=8000), int_product(integers(k=8000), lambda acc: acc.clamp(-(2**23), 2**23 - 1)), "out["),
    "sums wrap at 16 bits": (INT, int_product(INT, lambda acc: acc.short()), "random: out[0, 0] = "),
    "pairs saturate at 16 bits": (INT, in_pairs(INT), "random: out["),
    "int8 read as uint8": (INT, int_product(INT, read=unsigned), "P5 cancellation: out["),
    "float32 sums": (integers(k=8000), on_terms(integers(k=8000), lambda a, b: one_by_one(a.float(), b.float())), "out["),
    "sums as float16 before the epilogue": (TIMES, int_product(TIMES, lambda acc: acc.half().long()), "out["),
}  # fmt: skip


@pytest.mark.parametrize(("problem", "run", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_kernels_are_found(problem: Problem, run: Run, reason: str) -> None:
    result = verdict(problem, run, EXACT if problem.op == "int_mm" else None)
    assert result.status == Status.WRONG_RESULT
    assert reason in result.reason


@pytest.mark.parametrize(("which", "name"), list(enumerate(("scale_b", "zero_b"))))
def test_changed_scales_are_noticed(which: int, name: str) -> None:
    def doubling(out: Matrix, a: Matrix, b: Matrix, inp: Any, alpha: float, beta: float, extra: tuple[Matrix, ...]) -> None:
        on_sums(COLUMNS)(out, a, b, inp, alpha, beta, extra)
        extra[which].mul_(2).add_(1)

    result = verdict(COLUMNS, doubling)
    assert result.status == Status.WRONG_RESULT
    assert result.reason == f"the call changed its input: {name} of P5 cancellation"


def test_packed_weights_and_own_results_get_scales() -> None:
    problem = dataclasses.replace(GROUPS, prepacked=True)
    right = on_terms(problem)

    def run_new(a: Matrix, b: Matrix, inp: Any, alpha: float, beta: float, extra: tuple[Matrix, ...]) -> Matrix:
        out = torch.empty(9, 40, dtype=F16)
        right(out, a, b.T, inp, alpha, beta, extra)
        return out

    result = verdict(
        problem,
        lambda out, a, b, *rest: right(out, a, b.T, *rest),
        packing=lambda b: b.T.contiguous(),
        run_new=run_new,
    )
    assert result.status == Status.OK, result.reason


def test_large_cpu_problems_share_their_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.selector.verify.SEPARATE_PROBES_MACS", 1)
    monkeypatch.setattr("gemmtune.numerics.reference.MOST_MACS", {"cpu": 20_000, "cuda": 20_000})
    for problem in (GROUPS, ZEROS, COLUMNS, BLOCKS, SQUARES):
        steps = 128 if problem.op == "scaled_mm" else 32
        for right in (on_terms(problem), on_sums(problem, steps=steps)):
            assert verdict(problem, right).status == Status.OK
        for wrong in (
            with_scale(problem, torch.square),
            with_scale(problem, neighbour),
            on_terms(problem, lambda a, b: a[:, :-1] @ b[:-1]),
        ):
            assert verdict(problem, wrong).status == Status.WRONG_RESULT


def test_the_width_probe_is_run_for_every_claim_of_its_own() -> None:
    problem = mm(20, 20, 64, F16)
    narrow = kernel(problem, tensor_core(20, width=16))
    assert verdict(problem, narrow).reason.startswith("P4 width: out[")
    assert verdict(problem, narrow, claims_of(F16, accumulator_bits=20)).status == Status.OK
    verifier = Verifier(problem, CPU)
    for claims, status in ((claims_of(F16, accumulator_bits=20), Status.OK), (claims_of(F16), Status.WRONG_RESULT)):
        choice = choice_of(problem, narrow, claims)
        assert verifier.check(choice, choice.build()).status == status


def test_operand_sets_share_no_memory() -> None:
    problem = mixed(zeros=True, encoding="uint4")
    sets = Rotation(problem, preset("avx512")).sets
    assert len(sets) > 1
    for first, other in itertools.pairwise(sets):
        assert (other.encoding, len(other.scales)) == ("uint4", 2)
        for name in ("a", "b", "out", "scale_b", "zero_b"):
            x, y = getattr(first, name), getattr(other, name)
            assert storage_bits(x).data_ptr() != storage_bits(y).data_ptr()
            assert Layout.of(x) == Layout.of(y)
            assert name == "out" or torch.equal(x, y)


def steps_of(problem: Problem) -> int:
    """A number of elements along K that divides every block."""
    return 32 if problem.op == "mixed_mm" else 128


@pytest.mark.turn(1, 8)
@given(problem=st.one_of(narrow_problems(), mixed_problems()), order=st.sampled_from([torch.matmul, backwards, pairwise]))
def test_right_kernels_pass_for_drawn_problems(problem: Problem, order: Any) -> None:
    claims = EXACT if problem.op == "int_mm" else claims_of(problem.dtype)
    kernels = [on_terms(problem, order)]
    if problem.op != "int_mm":
        kernels.append(on_sums(problem, order, steps=steps_of(problem)))
    for run in kernels:
        result = verdict(problem, run, claims)
        assert result.status == Status.OK, result.reason


@given(problem=st.one_of(narrow_problems(), mixed_problems()), data=st.data())
def test_any_wrong_element_is_found_in_drawn_problems(problem: Problem, data: st.DataObject) -> None:
    index = tuple(data.draw(st.integers(0, n - 1)) for n in problem.out.size)

    def nudge(out: Matrix, *_: object) -> None:
        out[index] = out[index] * 2 + 1

    result = verdict(problem, changed(on_terms(problem), nudge), EXACT if problem.op == "int_mm" else None)
    assert result.status == Status.WRONG_RESULT
    assert f"out[{', '.join(map(str, index))}]" in result.reason
