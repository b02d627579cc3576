"""Verifier: right kernels pass, whatever the problem; what a verdict says; drawn problems."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from broken_kernels import (
    CPU,
    MadeChoice,
    backwards,
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
from hypothesis import given
from hypothesis import strategies as st
from problem_strategies import problems
from verify_cases import BF16, F16, F32, F64, addmm, changed, mm, padded, verdict, with_epilogue

from gemmtune.choice import Claims, Kernel, Status
from gemmtune.errors import ErrorFromChoice
from gemmtune.problem import Epilogue, Layout, Precision, Problem
from gemmtune.problem.epilogue import Node, Ref
from gemmtune.selector import verify
from gemmtune.selector.verify import Verifier

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


def test_a_packed_b_that_was_written_to_is_noticed() -> None:
    run = changed(lambda out, a, b, *_: out.copy_(a @ b.T), lambda out, a, b: b.add_(1))
    result = verdict(mm(prepacked=True), run, packing=lambda b: b.T.clone())
    assert "the call changed its input: packed b" in result.reason


def test_b_is_packed_once_for_all_choices_of_a_format() -> None:
    packed: list[torch.Tensor] = []

    def packing(b: torch.Tensor) -> torch.Tensor:
        packed.append(b)
        return b.T.contiguous()

    verifier, counts = Verifier(mm(prepacked=True), CPU), []
    for _ in range(2):
        choice = choice_of(mm(prepacked=True), lambda out, a, b, *_: out.copy_(a @ b.T), packing=packing)
        assert verifier.check(choice, choice.build()).status == Status.OK
        counts.append(len(packed))
    assert counts[0] == counts[1] > 1


EPILOGUES: dict[str, Callable[..., torch.Tensor] | None] = {
    "none": None,
    "relu": lambda x: torch.relu(x * 3.3 - 1.234),
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": lambda x: torch.nn.functional.silu(x) / (1 + torch.abs(x)),
    "steps": lambda x: torch.where(x > 0.5, torch.sqrt(x), torch.where(x == 0, -1.0, torch.exp(x))),
    "casts": lambda x: (torch.tanh(x.to(BF16)) * 3.3).to(F16),
    "pole": lambda x: torch.rsqrt(x) + 1 / (x - 1),
}


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


def infinity_as_nan(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As a kernel that takes inputs apart into parts of fewer bits: ∞ − ∞ is the second part."""
    return torch.where(a.isinf(), math.nan, a) @ torch.where(b.isinf(), math.nan, b)


def zeros_skipped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Terms with a zero of a are left out."""
    return (torch.where(a.mT.unsqueeze(-1) == 0, 0, a.mT.unsqueeze(-1) * b.unsqueeze(-2))).sum(dim=-3)


def zero_columns_skipped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return zeros_skipped(b.mT, a.mT).mT


@pytest.mark.parametrize("size", [(33, 40, 129), (1, 40, 129), (40, 1, 129), (3, 2, 16), (1, 3, 9)], ids=str)
@pytest.mark.parametrize("product", [infinity_as_nan, zeros_skipped, zero_columns_skipped])
def test_kernels_that_go_wrong_at_infinities_are_found(size: tuple[int, int, int], product: Any) -> None:
    problem = mm(*size)
    assert verdict(problem, kernel(problem)).status == Status.OK
    assert verdict(problem, kernel(problem, product)).status == Status.WRONG_RESULT
    declared = verdict(problem, kernel(problem, product), claims_of(F32, skips_zeros=True))
    assert (declared.status == Status.OK) == (product is not infinity_as_nan), declared.reason


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_kernels_that_go_wrong_where_b_is_a_are_found(layout: str) -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b) * (1 if a.data_ptr() != b.data_ptr() else 2)

    problem = mm(33, 33, 33, layout=layout)
    assert verdict(problem, kernel(problem)).status == Status.OK
    assert verdict(problem, kernel(problem, product)).reason.startswith("b is a: out[")


def test_large_cpu_problem_has_an_infinity_in_its_shared_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.selector.verify.SEPARATE_PROBES_MACS", 1)
    problem = mm(64, 72, 128)
    assert verdict(problem, kernel(problem)).status == Status.OK
    for product in (infinity_as_nan, zero_columns_skipped):
        assert verdict(problem, kernel(problem, product)).reason.startswith("P2+P3 one-hot: out[")


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


def test_own_result_of_another_shape_or_dtype_is_an_error() -> None:
    with pytest.raises(ErrorFromChoice, match=r"run_new gave torch.float64 of shape \(33, 40\), expected torch.float32 of shape"):
        verdict(mm(), kernel(mm()), run_new=lambda a, b, *_: (a @ b).double())


class Foreign(MadeChoice):
    own_results = False


def test_results_of_others_have_memory_of_their_own() -> None:
    kept = torch.empty(33, 40)
    for run_new, whose in (
        (lambda a, b, *_: torch.mm(a, b, out=kept), "the next call's result"),
        (lambda a, b, *_: a[:, :40], "an operand"),
        (lambda a, b, *_: a @ b, ""),
    ):
        choice = Foreign(
            name="foreign:x", backend="foreign", problem=mm(), claims=claims_of(F32), run=kernel(mm()), run_new=run_new
        )  # fmt: skip
        raised = pytest.raises(ErrorFromChoice, match=f"returned memory that is also {whose}") if whose else nullcontext()
        with raised:
            assert Verifier(mm(), CPU).check(choice, choice.build()).status == Status.OK


def test_callers_random_state_is_untouched() -> None:
    state = torch.get_rng_state()
    verdict(mm(), kernel(mm()))
    assert torch.equal(state, torch.get_rng_state())


def test_exceptions_of_the_kernel_pass_through() -> None:
    def run(*_: object) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        verdict(mm(), run)


CHUNKED = {
    "several matrices at a time": Problem.bmm(5, 4, 6, 33, dtype=F32, device_type="cpu"),
    "some rows at a time": Problem.bmm(3, 9, 40, 33, dtype=F32, device_type="cpu"),
    "one row at a time": mm(7, 100, 33),
    "an epilogue": with_epilogue(mm(33, 40, 64, dtype=F16), lambda x, y: torch.relu(x) + y, torch.empty(33, 1, dtype=F16)),
}


@pytest.mark.parametrize("name", CHUNKED)
def test_large_results_are_compared_piece_by_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CHUNKED[name]
    monkeypatch.setattr("gemmtune.numerics.judging.CHUNK_ELEMENTS", {"cpu": 80, "cuda": 80})
    result = verdict(problem, kernel(problem))
    assert result.status == Status.OK, result.reason
    for position in (0, problem.out.numel // 2, problem.out.numel - 1):
        index = tuple(int(x) for x in torch.unravel_index(torch.tensor(position), problem.out.size))

        def nudge(out: torch.Tensor, *_: object, at: tuple[int, ...] = index) -> None:
            out[at] = out[at] * 1.5 + 0.5

        assert f"out[{', '.join(map(str, index))}]" in verdict(problem, changed(kernel(problem), nudge)).reason


def test_large_cpu_problem_shares_its_probe_and_samples_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.selector.verify.SEPARATE_PROBES_MACS", 1)
    monkeypatch.setattr("gemmtune.numerics.reference.MOST_MACS", {"cpu": 20_000, "cuda": 20_000})
    problem = mm(64, 72, 128)
    assert verdict(problem, kernel(problem), run_new=lambda a, b, *_: a @ b).status == Status.OK
    assert verdict(problem, kernel(problem), run_new=lambda a, b, *_: a @ b * 1.1).reason.startswith("random: out[")
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


PRODUCTS = {"torch": torch.matmul, "backwards": backwards, "pairwise": pairwise}


@pytest.mark.turn(0, 8)
@given(problem=problems(), product=st.sampled_from(list(PRODUCTS)), epilogue=st.sampled_from(sorted(EPILOGUES)))
def test_right_kernels_pass_for_drawn_problems(problem: Problem, product: str, epilogue: str) -> None:
    function = EPILOGUES[epilogue]
    problem = problem if function is None else with_epilogue(problem, function)
    result = verdict(problem, kernel(problem, PRODUCTS[product]))
    assert result.status == Status.OK, result.reason


@given(problem=problems(), data=st.data())
def test_any_wrong_element_is_found_in_drawn_problems(problem: Problem, data: st.DataObject) -> None:
    index = tuple(data.draw(st.integers(0, n - 1)) for n in problem.out.size)

    def nudge(out: torch.Tensor, *_: object) -> None:
        out[index] = out[index] * 1.5 + 0.5

    result = verdict(problem, changed(kernel(problem), nudge))
    assert result.status == Status.WRONG_RESULT
    assert f"out[{', '.join(map(str, index))}]" in result.reason


@pytest.mark.parametrize(("most", "run", "run_new"), [(0, 2, 1), (2**33, 5, 1)])
def test_where_calls_take_long_few_probes_are_run(most: int, run: int, run_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancelling one, one for both operands, and the random numbers through ``run_new`` alone."""
    called = {"run": 0, "run_new": 0}

    def into(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
        called["run"] += 1
        torch.mm(*tensors, out=out)

    def new(tensors: tuple[torch.Tensor, ...], _: object) -> torch.Tensor:
        called["run_new"] += 1
        return torch.mm(*tensors)

    monkeypatch.setattr(verify, "SEPARATE_PROBES_MACS", most)
    problem = Problem.mm(8, 9, 8, dtype=torch.float32, device_type="cpu")
    choice = SimpleNamespace(name="counted", claims=claims_of(torch.float32), packed_format=None, own_results=True)
    verdict = Verifier(problem, torch.device("cpu")).check(choice, Kernel(run=into, run_new=new))  # type: ignore[arg-type]
    assert verdict.status is Status.OK
    assert called == {"run": run, "run_new": run_new}


@pytest.mark.parametrize(("factor", "added", "beta", "told"), [(0.0, 0.0, 0, True), (None, 1.0, 0, False), (1.0, 1.0, 1, False)])
def test_a_verdict_says_that_inp_was_read_with_beta_0(factor: float | None, added: float, beta: int, told: bool) -> None:
    def run(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
        a, b, inp = tensors
        out.copy_(a @ b + added + (0 if factor is None else factor * inp))

    problem = addmm("n", 1, beta)
    choice = SimpleNamespace(name="reads", claims=claims_of(problem.dtype), packed_format=None, own_results=True)
    verdict = Verifier(problem, CPU).check(choice, Kernel(run=run))  # type: ignore[arg-type]
    assert verdict.status is Status.WRONG_RESULT
    assert ("inp is NaN, but must not be read with beta 0" in verdict.reason) == told, verdict.reason


def test_integers_are_tried_where_elements_cannot_be_chosen() -> None:
    shared = dataclasses.replace(mm(4, 5, 6), a=Layout(size=(4, 6), stride=(1, 0), dtype=F32))
    for problem, expected in ((mm(4, 5, 6), False), (shared, True)):
        assert any(x.name == "P1 integers" for x in Verifier(problem, CPU)._shared) == expected
