"""Verifier: right kernels pass, every kernel that is broken on purpose fails with a reason that tells how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_kernels import (
    CPU,
    MadeChoice,
    backwards,
    blocks,
    choice_of,
    claims_of,
    kernel,
    narrowed,
    one_by_one,
    pairwise,
    rounding_blocks,
    split_k,
    tf32,
)

from gemmtune.choice import Claims, Status
from gemmtune.problem import Epilogue, Layout, Precision, Problem
from gemmtune.problem.epilogue import Node, Ref
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verdict, Verifier

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
Run = Callable[..., None]


def verdict(problem: Problem, run: Run, claims: Claims | None = None, **fields: Any) -> Verdict:
    choice = choice_of(problem, run, claims, **fields)
    return Verifier(problem, CPU).check(choice, choice.build())


def mm(m: int = 33, n: int = 40, k: int = 129, dtype: torch.dtype = F32, layout: str = "nt", **fields: Any) -> Problem:
    return Problem.mm(m, n, k, dtype=dtype, layout=layout, device_type="cpu", **fields)


def addmm(bias: Any = "n", alpha: float = 1.5, beta: float = 0.5, m: int = 32, dtype: torch.dtype = F32) -> Problem:
    return Problem.addmm(m, 32, 96, dtype=dtype, bias=bias, alpha=alpha, beta=beta, device_type="cpu")


def with_epilogue(problem: Problem, function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> Problem:
    epilogue = trace(function, problem.accumulator, operands)
    out = dataclasses.replace(problem.out, dtype=epilogue.result_dtype or problem.out.dtype)
    return dataclasses.replace(problem, epilogue=epilogue, out=out)


def padded(problem: Problem, *, a: int = 0, out: int = 0, offset: int = 0) -> Problem:
    """The problem with ``a`` or ``out`` more elements between rows, and that offset for both."""

    def pad(layout: Layout, by: int) -> Layout:
        return dataclasses.replace(layout, stride=(layout.size[1] + by, 1), offset=offset) if by else layout

    return dataclasses.replace(problem, a=pad(problem.a, a), out=pad(problem.out, out))


RIGHT = {
    "torch": torch.matmul,
    "one by one": one_by_one,
    "backwards": backwards,
    "pairwise": pairwise,
    "split-K in float32": split_k(F32, 3),
}


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("product", RIGHT.values(), ids=RIGHT)
def test_right_kernels_pass_in_any_order(product: Any, dtype: torch.dtype) -> None:
    problem = addmm(dtype=dtype)
    if product is RIGHT["split-K in float32"] and dtype == F64:
        product = split_k(F64, 3)
    result = verdict(problem, kernel(problem, product))
    assert result.status == Status.OK, result.reason
    assert 0 < result.error_over_bound <= 1


@pytest.mark.parametrize("bias", ["n", "mn", "m1", "1n", "scalar"])
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (1, 0), (2, 0), (0, 1), (0.3, -2)])
def test_right_addmm_passes_for_every_bias_and_scalar(bias: Any, alpha: float, beta: float) -> None:
    problem = addmm(bias, alpha, beta)
    result = verdict(problem, kernel(problem))
    assert result.status == Status.OK, result.reason


PROBLEMS = {
    "row vector": mm(1, 65, 129),
    "column": mm(65, 1, 129, layout="tn"),
    "dot product": mm(1, 1, 500, F16),
    "K of 1": mm(5, 7, 1),
    "K of 0": mm(5, 7, 0),
    "no rows": mm(0, 7, 5),
    "tt": mm(layout="tt"),
    "padded": padded(mm(17, 31, 45, F16), a=3, out=5, offset=1),
    "bmm": Problem.bmm(5, 9, 17, 33, dtype=F32, device_type="cpu"),
    "baddbmm": Problem.baddbmm(3, 9, 17, 33, dtype=BF16, alpha=2.5, bias="1n", device_type="cpu"),
    "a expanded along M": dataclasses.replace(mm(), a=Layout(size=(33, 129), stride=(0, 1), dtype=F32)),
    "a expanded along K": dataclasses.replace(mm(), a=Layout(size=(33, 129), stride=(1, 0), dtype=F32)),
    "b shared by the batch": dataclasses.replace(
        Problem.bmm(5, 9, 17, 33, dtype=F32, device_type="cpu"), b=Layout(size=(5, 33, 17), stride=(0, 17, 1), dtype=F32)
    ),
    "a as a sliding window": dataclasses.replace(mm(), a=Layout(size=(33, 129), stride=(1, 1), dtype=F32)),
    "every second element": dataclasses.replace(mm(), b=Layout(size=(129, 40), stride=(90, 2), dtype=F32, offset=1)),
    "relu": with_epilogue(mm(), lambda x: torch.relu(x * 3.3 - 1.234)),
    "gelu of bf16": with_epilogue(mm(dtype=BF16), lambda x: torch.nn.functional.gelu(x)),
    "pole": with_epilogue(mm(), lambda x: 1 / x),
    "root": with_epilogue(mm(), lambda x: torch.sqrt(x)),
    "overflow": with_epilogue(mm(dtype=F16), lambda x: torch.exp(x)),
    "step": with_epilogue(mm(), lambda x: torch.where(x > 0.5, x, x * 0.01)),
    "cast": with_epilogue(mm(), lambda x: (x.to(BF16) * 3.0).to(F16)),
    "operand": with_epilogue(mm(dtype=F16), lambda x, y: x / (1 + y * y), torch.empty(40, dtype=F16)),
}  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_right_kernel_passes_for_every_kind_of_problem(problem: Problem) -> None:
    result = verdict(problem, kernel(problem))
    assert result.status == Status.OK, result.reason


@pytest.mark.parametrize(
    ("problem", "product", "claims"),
    [
        pytest.param(mm(dtype=F16), rounding_blocks(F16), claims_of(F16, accumulate=F16, partials=F16), id="fp16 accumulator"),
        pytest.param(mm(dtype=F16, k=1024), split_k(F16, 4), claims_of(F16, partials=F16, splits=4), id="fp16 partials"),
        pytest.param(mm(dtype=BF16, k=1024), split_k(BF16, 4), claims_of(BF16, partials=BF16, splits=4), id="bf16 partials"),
        pytest.param(mm(precision=Precision(input_mode="tf32")), tf32, claims_of(F32, input_mode="tf32"), id="tf32"),
    ],
)
def test_declared_lower_precision_passes(problem: Problem, product: Any, claims: Claims) -> None:
    result = verdict(problem, kernel(problem, product), claims)
    assert result.status == Status.OK, result.reason


def test_declared_unfused_epilogue_passes() -> None:
    problem = with_epilogue(mm(dtype=BF16), lambda x: torch.nn.functional.gelu(x * 1.7 - 0.3))

    def run(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        out.copy_(torch.nn.functional.gelu((a @ b) * 1.7 - 0.3))

    assert verdict(problem, run, claims_of(BF16, epilogue_input=BF16)).status == Status.OK


def test_prepacked_b_and_own_result_pass() -> None:
    problem = mm(prepacked=True)
    result = verdict(
        problem,
        lambda out, a, b, *_: out.copy_(a @ b.T),
        packing=lambda b: b.T.contiguous(),
        run_new=lambda a, b, *_: a @ b.T,
    )
    assert result.status == Status.OK, result.reason


def changed(run: Run, after: Callable[..., None]) -> Run:
    """``run`` and then ``after(out, a, b)``."""

    def both(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
        run(out, a, b, *rest)
        after(out, a, b)

    return both


def before(run: Run, **replacements: Callable[..., Any]) -> Run:
    """``run`` with some of its arguments replaced."""
    names = ("out", "a", "b", "inp", "alpha", "beta", "extra")

    def replaced(*args: Any) -> None:
        values = dict(zip(names, args, strict=True))
        run(**(values | {name: f(values[name]) for name, f in replacements.items()}))

    return replaced


def ragged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Wrong in the last row when M is not a multiple of 8: it repeats the row before."""
    result = a @ b
    if result.shape[-2] % 8:
        result[..., -1, :] = result[..., -2, :]
    return result


def first_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b[:1]


def outside(distance: int) -> Callable[..., None]:
    """Write one element so far from out's first one."""

    def after(out: torch.Tensor, *_: object) -> None:
        out.as_strided((1,), (1,), out.storage_offset() + distance).fill_(1.0)

    return after


def stale() -> Run:
    """Gives the result of its first call again."""
    kept: list[torch.Tensor] = []

    def run(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        if not kept:
            kept.append(a @ b)
        out.copy_(kept[0])

    return run


def early_epilogue(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
    out.copy_(sum(torch.relu(block) for block in blocks(a, b, 64)))


def swapping(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    a[[0, 1]] = a[[1, 0]]


def misread(problem: Problem, offset: int = 0) -> Run:
    """a taken as if it lay row after row without padding."""
    return before(kernel(problem), a=lambda a: a.as_strided(a.size(), (a.size(1), 1), a.storage_offset() + offset))


RELU = with_epilogue(mm(), torch.relu)
CAST = with_epilogue(mm(), lambda x: x.to(BF16) * 3.0)
ADDED, BETA_0, SQUARE = addmm(), addmm(beta=0), mm(40, 40, 40, layout="nn")
PADDED, BATCHES = padded(mm(), a=7, out=7), Problem.bmm(4, 9, 17, 33, dtype=F32, device_type="cpu")
LONG16, LONGB16 = mm(k=4096, dtype=F16), mm(k=4096, dtype=BF16)

BROKEN: dict[str, tuple[Problem, Run, str]] = {
    "last K block dropped": (mm(), kernel(mm(), lambda a, b: a[:, :-1] @ b[:-1]), "out["),
    "last K block of many dropped": (mm(k=4096), kernel(mm(), lambda a, b: a[:, :-16] @ b[:-16]), "out["),
    "last row clamped": (mm(), kernel(mm(), ragged), "out[32, "),
    "bias on the wrong axis": (ADDED, before(kernel(ADDED), inp=lambda x: x.unsqueeze(1)), "P5 cancellation: out["),
    "fp16 accumulation": (LONG16, kernel(LONG16, rounding_blocks(F16)), "P5 cancellation: out["),
    "bf16 accumulation": (LONGB16, kernel(LONGB16, rounding_blocks(BF16)), "P5 cancellation: out["),
    "fp16 partials": (LONG16, kernel(LONG16, split_k(F16)), "P5 cancellation: out["),
    "bf16 partials": (LONGB16, kernel(LONGB16, split_k(BF16)), "P5 cancellation: out["),
    "fp16 partials of a short K": (mm(k=64, dtype=F16), kernel(mm(dtype=F16), split_k(F16)), "P5 cancellation: out["),
    "alpha dropped": (ADDED, before(kernel(ADDED), alpha=lambda _: 1.0), "P5 cancellation: out["),
    "beta dropped": (ADDED, before(kernel(ADDED), beta=lambda _: 1.0), "P5 cancellation: out["),
    "inp dropped": (ADDED, before(kernel(ADDED), beta=lambda _: 0.0), "P5 cancellation: out["),
    "a read as bf16": (mm(), kernel(mm(), narrowed("a", BF16)), "P3 one-hot b: out["),
    "b read as bf16": (mm(), kernel(mm(), narrowed("b", BF16)), "P2 one-hot a: out["),
    "tf32 not asked for": (mm(), kernel(mm(), tf32), "P2 one-hot a: out["),
    "fp32 for fp64": (mm(dtype=F64), kernel(mm(dtype=F64), narrowed("a", F32)), "P3 one-hot b: out["),
    "fp32 accumulation for fp64": (mm(dtype=F64), kernel(mm(dtype=F64), rounding_blocks(F32)), "P5 cancellation: out["),
    "row stride ignored": (PADDED, misread(PADDED), "out["),
    "offset ignored": (mm(), misread(mm(), -1), "out["),
    "written before out": (mm(), changed(kernel(mm()), outside(-1)), "wrote outside of out, 1 elements before its first"),
    "written after out": (mm(), changed(kernel(mm()), outside(33 * 40)), "wrote outside of out, 1 elements after its last"),
    "row written after out": (mm(), changed(kernel(mm()), outside(40 * 40)), "wrote outside of out, 281 elements after its last"),
    "written between rows": (PADDED, changed(kernel(PADDED), outside(42)), "wrote into the padding of out, 42 elements after"),
    "element left unwritten": (
        mm(), before(kernel(mm()), out=lambda out: out[:, :-1], b=lambda b: b[:, :-1]), "out[0, 39] was not written"),
    "nothing written": (mm(), lambda *_: None, "out[0, 0] was not written"),
    "inp read with beta 0": (
        BETA_0, lambda out, a, b, inp, alpha, beta, _: out.copy_(a @ b * alpha + beta * inp), "= nan, expected"),
    "a changed": (mm(), changed(kernel(mm()), lambda out, a, b: a[3].mul_(2)), "the call changed its input: a of "),
    "b changed": (mm(), changed(kernel(mm()), lambda out, a, b: b[0, :1].fill_(5)), "the call changed its input: b of "),
    "a reordered": (mm(), changed(kernel(mm()), swapping), "the call changed its input: a of "),
    "stale result": (mm(), stale(), "out["),
    "first batch for all": (BATCHES, kernel(BATCHES, first_batch), "out[1, "),
    "a transposed": (SQUARE, before(kernel(SQUARE), a=lambda a: a.T), "out["),
    "epilogue before the last partial sum": (RELU, early_epilogue, "out["),
    "NaN swallowed": (RELU, lambda out, a, b, *_: out.copy_((a @ b).nan_to_num(0).clamp_min(0)), "expected nan"),
    "infinity swallowed": (mm(), lambda out, a, b, *_: out.copy_((a @ b).clamp(-1e30, 1e30)), "= 1.00000002e+30, expected inf"),
    "NaN spread": (mm(), changed(kernel(mm()), lambda out, a, b: out[1:2].add_(out[:1] * 0)), "= nan, expected"),
    "cast in the epilogue left out": (CAST, lambda out, a, b, *_: out.copy_(a @ b * 3.0), "out["),
}  # fmt: skip


@pytest.mark.parametrize(("problem", "run", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_kernels_are_found(problem: Problem, run: Run, reason: str) -> None:
    result = verdict(problem, run)
    assert result.status == Status.WRONG_RESULT
    assert reason in result.reason


@pytest.mark.parametrize("name", ["last K block dropped", "last row clamped", "a transposed", "element left unwritten"])
def test_broken_kernels_are_found_where_no_element_can_be_picked(name: str) -> None:
    problem = dataclasses.replace(SQUARE, a=Layout(size=(40, 40), stride=(3, 1), dtype=F32))
    run = {
        "last K block dropped": kernel(problem, lambda a, b: a[:, :-1] @ b[:-1]),
        "last row clamped": kernel(problem, lambda a, b: (a @ b)[[*range(39), 38]]),
        "a transposed": kernel(problem, lambda a, b: a.T @ b),
        "element left unwritten": before(kernel(problem), out=lambda out: out[:-1], a=lambda a: a[:-1]),
    }[name]
    assert verdict(problem, run).status == Status.WRONG_RESULT


def test_wrong_own_result_is_found() -> None:
    result = verdict(mm(), kernel(mm()), run_new=lambda a, b, *_: (a @ b).mul_(1.01))
    assert result.status == Status.WRONG_RESULT
    assert result.reason.startswith("random: out[")


def test_wrong_on_a_later_run_only_is_found() -> None:
    runs = iter(range(100))

    def run(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        out.copy_(a @ b)
        if next(runs) == 3:
            out[7, 9] += 1

    result = verdict(mm(), run)
    assert result.status == Status.WRONG_RESULT
    assert "out[7, 9]" in result.reason


def test_operands_are_made_anew_after_a_choice_changed_them() -> None:
    verifier = Verifier(mm(), CPU)
    bad = choice_of(mm(), changed(kernel(mm()), lambda out, a, b: b.zero_()))
    good = choice_of(mm(), kernel(mm()))
    assert verifier.check(bad, bad.build()).status == Status.WRONG_RESULT
    assert verifier.check(good, good.build()).status == Status.OK


def test_reason_names_the_picked_element() -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ torch.cat([b[:1], b[:-1]])

    problem = mm(dtype=F32)
    verifier = Verifier(problem, CPU)
    choice: MadeChoice = choice_of(problem, kernel(problem, product))
    reason = verifier.check(choice, choice.build()).reason
    assert "expected" in reason
    assert "(from b[" in reason


def test_callers_random_state_is_untouched() -> None:
    state = torch.get_rng_state()
    verdict(mm(), kernel(mm()))
    assert torch.equal(state, torch.get_rng_state())


def test_exceptions_of_the_kernel_pass_through() -> None:
    def run(*_: object) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        verdict(mm(), run)


def test_large_cpu_problem_shares_its_probe_and_samples_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.selector.verify.SEPARATE_PROBES_MACS", 1)
    monkeypatch.setattr("gemmtune.numerics.reference.MOST_MACS", {"cpu": 20_000, "cuda": 20_000})
    problem = mm(64, 72, 128)
    assert verdict(problem, kernel(problem)).status == Status.OK
    for product in (narrowed("a", BF16), narrowed("b", BF16), lambda a, b: a[:, :-1] @ b[:-1]):
        result = verdict(problem, kernel(problem, product))
        assert result.status == Status.WRONG_RESULT
        assert result.reason.startswith(("P2+P3 one-hot: out[", "P5 cancellation: out["))


def test_step_at_the_threshold_does_not_reject() -> None:
    nodes = (
        Node(op="acc", args=(), dtype=F32),
        Node(op="ge", args=(Ref(0), 1.0), dtype=torch.bool),
        Node(op="where", args=(Ref(1), Ref(0), 0.0), dtype=F32),
    )
    problem = dataclasses.replace(mm(1, 8, 3, layout="nn"), epilogue=Epilogue(nodes=nodes))
    for product in (torch.matmul, one_by_one, backwards):
        assert verdict(problem, kernel(problem, product)).status == Status.OK
