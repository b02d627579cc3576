"""mm_plus_mm on the CPU: values, what verification asks of it, gradients, empty products, bad calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch_faults import makes_nan_of_infinity

import gemmtune
from gemmtune import settings
from gemmtune.backends.aten import BACKEND
from gemmtune.choice import Choice, Kernel, Status
from gemmtune.device import detect, preset
from gemmtune.dispatch.ready import forget_plans
from gemmtune.errors import InvalidProblemError
from gemmtune.numerics.bounds import accumulation_bound, exact_limit
from gemmtune.numerics.joined import joined
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.numerics.probes import Probes
from gemmtune.numerics.reference import Region, reference
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings
from gemmtune.timing.rotation import Rotation

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def fresh(own_store):
    forget_plans()
    with settings.patch(search="quick"):
        yield


def tensors(dtype: torch.dtype = torch.float32, m: int = 17, n: int = 33, k: int = 20, k2: int = 45) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=g, dtype=torch.float64).to(dtype) for size in ((m, k), (k, n), (m, k2), (k2, n))]


def exact(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double() + c.double() @ d.double()


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    eps = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= eps * want.abs().max()


@dtypes
def test_values(dtype: torch.dtype) -> None:
    operands = tensors(dtype)
    for _ in range(2):  # the second call runs the plan of the first
        assert_close(gemmtune.mm_plus_mm(*operands), exact(*operands), dtype)


def test_another_k2_or_other_strides_have_a_plan_of_their_own() -> None:
    for k2 in (45, 7):
        for turned in (False, True):
            a, b, c, d = tensors(k2=k2)
            d = d.t().contiguous().t() if turned else d
            assert_close(gemmtune.mm_plus_mm(a, b, c, d), exact(a, b, c, d), torch.float32)


def test_out_is_filled_and_returned() -> None:
    operands = tensors()
    memory = torch.full((17, 70), torch.nan)
    for out in (torch.full((17, 33), torch.nan), torch.full((33, 17), torch.nan).t(), memory[:, 1::2][:, :33]):
        assert gemmtune.mm_plus_mm(*operands, out=out) is out
        assert_close(out, exact(*operands), torch.float32)


def test_epilogue_gets_the_sum() -> None:
    operands, bias = tensors(torch.bfloat16), torch.randn(33, dtype=torch.bfloat16)
    got = gemmtune.mm_plus_mm(*operands, epilogue=lambda acc, x: torch.relu(acc + x).to(torch.float32), epilogue_args=(bias,))
    assert_close(got, torch.relu(exact(*operands) + bias.double()), torch.float32)


@pytest.mark.parametrize(("k", "k2"), [(0, 5), (5, 0), (0, 0)])
def test_an_empty_product_is_zero(k: int, k2: int) -> None:
    operands = tensors(k=k, k2=k2)
    out = torch.full((17, 33), torch.nan)
    for result in (gemmtune.mm_plus_mm(*operands), gemmtune.mm_plus_mm(*operands, out=out)):
        assert torch.allclose(result.double(), exact(*operands))
    expected = "nothing to multiply" if k == k2 else "one of the products has no terms"
    assert expected in str(gemmtune.explain("mm_plus_mm", *operands))


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0)])
def test_an_empty_result(m: int, n: int) -> None:
    assert gemmtune.mm_plus_mm(*tensors(m=m, n=n)).shape == (m, n)


@pytest.mark.turn(3, 8)
def test_gradients() -> None:
    leaves = [x.requires_grad_() for x in tensors(torch.float64, 4, 5, 3, 2)]
    assert torch.autograd.gradcheck(gemmtune.mm_plus_mm, leaves)
    assert torch.autograd.gradgradcheck(gemmtune.mm_plus_mm, leaves)
    scale = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def through_an_epilogue(*x: torch.Tensor) -> torch.Tensor:
        return gemmtune.mm_plus_mm(*x[:4], epilogue=lambda acc, s: torch.sigmoid(acc * s), epilogue_args=x[4:])

    assert torch.autograd.gradcheck(through_an_epilogue, [*leaves, scale])


def test_gradient_of_c_alone() -> None:
    a, b, c, d = tensors()
    c.requires_grad_()
    gemmtune.mm_plus_mm(a, b, c, d).sum().backward()
    assert torch.allclose(c.grad, d.sum(1).expand(17, -1), atol=1e-5)


def test_what_torch_does_with_it_is_done() -> None:
    operands = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gemmtune.mm_plus_mm(*operands).dtype == torch.bfloat16
    compiled = torch.compile(gemmtune.mm_plus_mm, backend="eager", fullgraph=True)
    assert_close(compiled(*operands), exact(*operands), torch.float32)
    batched = torch.func.vmap(gemmtune.mm_plus_mm)(*(x[None] for x in operands))
    assert_close(batched[0], exact(*operands), torch.float32)
    whole = [x.round().to(torch.int32) for x in operands]
    assert torch.equal(gemmtune.mm_plus_mm(*whole).double(), exact(*whole))


A, B, C, D = tensors()
BAD = {
    "shape": ((A, B, C, D.t()), {}, "shapes do not fit, got a [17, 20], b [20, 33], c [17, 45] and d [33, 45]; expected a [M, K]"),
    "rank": ((A, B, C[0], D), {}, "c must be a 2-D tensor, got shape [45]"),
    "dtype": ((A, B, C, D.half()), {}, "a and d must have the same dtype, got torch.float32 and torch.float16; cast one of them"),
    "no tensor": ((A, B, C, None), {}, "d must be a torch.Tensor, got NoneType"),
    "prepacked": ((A, gemmtune.prepack(B), C, D), {}, "b must be a torch.Tensor, got a prepacked operand"),
    "out": ((A, B, C, D), {"out": torch.empty(3, 3)}, "out must have shape [17, 33], got [3, 3]"),
    "out is c": ((A[:, :17], B[:17], C[:, :33], torch.ones(33, 33)[:, :33]), {"out": C[:, :33]}, "out shares memory with c"),
    "epilogue_args": ((A, B, C, D), {"epilogue_args": (A,)}, "got 1 epilogue_args without an epilogue"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_told(name: str) -> None:
    operands, keywords, message = BAD[name]
    with pytest.raises(InvalidProblemError) as caught:
        gemmtune.mm_plus_mm(*operands, **keywords)
    assert str(caught.value).startswith("mm_plus_mm: ")
    assert message in str(caught.value)


def test_tuning_and_the_call_after_it() -> None:
    problem = Problem.mm_plus_mm(17, 33, 20, 45, layout="nn", dtype=torch.float32, device_type="cpu")
    result = gemmtune.tune(problem, progress=False)
    assert "pick: aten:mm_plus_mm" in str(result)
    assert "aten:mm_plus_mm" in str(gemmtune.explain(gemmtune.mm_plus_mm, *tensors()))


# Verification


def torchs(problem: Problem, device: str | None = None) -> Choice:
    [choice] = BACKEND.enumerate(problem, preset(device) if device else detect("cpu"), Settings()).choices
    assert choice.baseline
    return choice


def _turned(problem: Problem, **layouts: Layout) -> Problem:
    return dataclasses.replace(problem, **layouts)


_PLAIN = Problem.mm_plus_mm(17, 20, 64, 32, dtype=torch.float16, device_type="cpu")
_ROW = trace(lambda acc, x: torch.relu(acc + x), torch.float32, [torch.empty(20, dtype=torch.float16, device="meta")])
VERIFIED = {
    **{f"{dtype}-{layout}".removeprefix("torch."): Problem.mm_plus_mm(33, 47, 40, 21, dtype=dtype, layout=layout, device_type="cpu")
       for dtype, layout in zip(DTYPES, ("nn", "nt", "tn", "tt"), strict=True)},
    "1x1": Problem.mm_plus_mm(1, 1, 1, 200, dtype=torch.bfloat16, device_type="cpu"),
    "no first": Problem.mm_plus_mm(16, 16, 0, 32, dtype=torch.float32, device_type="cpu"),
    "no second": Problem.mm_plus_mm(16, 16, 32, 0, dtype=torch.float32, device_type="cpu"),
    "c repeats a row": _turned(_PLAIN, c=Layout(size=(17, 32), stride=(0, 1), dtype=torch.float16)),
    "c overlaps": _turned(_PLAIN, c=Layout(size=(17, 32), stride=(1, 1), dtype=torch.float16)),
    "d is strided": _turned(_PLAIN, d=Layout(size=(32, 20), stride=(70, 3), dtype=torch.float16, offset=1)),
    "epilogue": dataclasses.replace(_PLAIN, epilogue=_ROW),
    "float32 out": dataclasses.replace(_PLAIN, epilogue=trace(lambda acc: acc.to(torch.float32), torch.float32, []),
                                       out=Layout.contiguous((17, 20), torch.float32)),
}  # fmt: skip


@pytest.mark.parametrize("name", VERIFIED)
def test_torchs_composition_keeps_its_claims(name: str) -> None:
    problem = VERIFIED[name]
    choice = torchs(problem)
    verdict = Verifier(problem, CPU).check(choice, choice.build())
    faulty = problem.dtype == torch.bfloat16 and makes_nan_of_infinity() and "nan, expected" in verdict.reason
    assert verdict.status is Status.OK or faulty, verdict.reason


def _broken(kernel: Kernel, kind: str) -> Kernel:
    def run(out, tensors, scalars):
        a, b, c, d = tensors
        if kind == "no second product":
            c = torch.zeros_like(c)
        elif kind == "K for both":
            c, d = c[:, : a.shape[1]], d[: a.shape[1]]
        elif kind == "last of K2 dropped":
            c, d = c[:, :-1], d[:-1]
        elif kind == "d read as a transposed matrix":
            d = d.t().reshape(d.shape)
        elif kind == "second product rounded to 8 bits":
            out.copy_(a @ b + (c @ d).to(torch.bfloat16).to(a.dtype))
            return
        kernel.run(out, (a, b, c.contiguous(), d), scalars)
        if kind == "c changed":
            tensors[2][0, 0] += 1

    return Kernel(run=run)


BREAKS = ("no second product", "K for both", "last of K2 dropped", "d read as a transposed matrix", "c changed")


@pytest.mark.parametrize("kind", [*BREAKS, "second product rounded to 8 bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_broken_sums_are_rejected(kind: str, dtype: torch.dtype) -> None:
    problem = Problem.mm_plus_mm(33, 40, 24, 40, dtype=dtype, device_type="cpu")
    choice = torchs(problem)
    verdict = Verifier(problem, CPU).check(choice, _broken(choice.build(), kind))
    right = kind == "second product rounded to 8 bits" and dtype == torch.bfloat16  # which torch's composition does
    assert verdict.status is (Status.OK if right else Status.WRONG_RESULT)
    if kind == "c changed":
        assert "changed its input: c of" in verdict.reason


def test_claims_say_that_one_product_is_rounded() -> None:
    half = torchs(Problem.mm_plus_mm(64, 64, 64, dtype=torch.float16, device_type="cuda", precision=Precision()), "sm90")
    assert (half.claims.accumulate, half.claims.partials, half.claims.splits) == (torch.float32, torch.float16, 2)
    flags = Precision(reduced_partials=True)
    split = torchs(Problem.mm_plus_mm(64, 64, 256, 128, dtype=torch.float16, device_type="cuda", precision=flags), "sm90")
    assert split.claims.splits == 4 + 2
    single = torchs(Problem.mm_plus_mm(64, 64, 64, dtype=torch.float32, device_type="cpu"))
    assert single.claims.partials == single.claims.accumulate == torch.float32
    assert torchs(VERIFIED["float32 out"]).claims.partials == torch.float32


# Numerics


def known(problem: Problem, operands: Operands) -> torch.Tensor:
    a, b, c, d = (x.double() for x in operands.tensors)
    return (a.unsqueeze(-1) * b).sum(1) + (c.unsqueeze(-1) * d).sum(1)


@pytest.mark.parametrize("sizes", [(5, 6, 7, 3), (4, 4, 1, 1), (9, 3, 16, 40), (3, 5, 0, 6), (3, 5, 6, 0)], ids=str)
@dtypes
def test_probes_pick_from_both_products_exactly(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    problem = Problem.mm_plus_mm(*sizes, dtype=dtype, device_type="cpu")
    probes = Probes(problem, CPU)
    random = probes.random()
    made = [probes.rows_of_b(random.right), probes.cols_of_a(random.left), probes.cancel(2**20)]
    made += [probes.both(random)] if probes.can_pick_both else []
    made += [probes.width(2**20)] if probes.can_measure_width else []
    for pick in made:
        given = pick.operands
        assert [Layout.of(x) for x in (given.a, given.b, given.c, given.d)] == [problem.a, problem.b, problem.c, problem.d]
        expected = known(problem, given)
        got = pick.exact(slice(None), slice(0, problem.m), torch.float64)[0]
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7)), pick.name


def test_a_probe_says_which_operand_an_element_is_from() -> None:
    problem = Problem.mm_plus_mm(64, 4, 3, 5, dtype=torch.float32, device_type="cpu")
    pick = Probes(problem, CPU).rows_of_b(random_operands(problem, CPU, seed=1).right)
    origins = {pick.origin((row, 1), batched=False) for row in range(64)}
    assert origins == {f" (from b[{k}, 1])" for k in range(3)} | {f" (from d[{k}, 1])" for k in range(5)}


def test_reference_and_bound_have_the_terms_of_both() -> None:
    problem = Problem.mm_plus_mm(6, 5, 40, 24, dtype=torch.float32, device_type="cpu")
    operands = random_operands(problem, CPU, seed=3)
    whole = reference(operands, Region())
    assert torch.allclose(whole.value[0], exact(*operands.tensors))
    magnitude = operands.a.abs().double() @ operands.b.abs().double() + operands.c.abs().double() @ operands.d.abs().double()
    assert torch.allclose(whole.magnitude[0], magnitude)
    claims = torchs(problem).claims
    bound, of_one = (accumulation_bound(p, claims, alpha=1) for p in (problem, joined(problem)))
    assert bound == of_one
    first = Problem.mm(6, 5, 40, dtype=torch.float32, device_type="cpu")
    assert bound.relative > accumulation_bound(first, claims, alpha=1).relative
    half = Problem.mm_plus_mm(6, 5, 40, 24, dtype=torch.bfloat16, device_type="cpu")
    assert exact_limit(half, torchs(half).claims) == 128


def test_measured_operands_are_sets_of_their_own() -> None:
    problem = Problem.mm_plus_mm(64, 64, 64, 32, dtype=torch.float32, device_type="cpu")
    sets = Rotation(problem, detect("cpu")).sets
    for name in ("a", "b", "c", "d", "out"):
        assert len({getattr(x, name).data_ptr() for x in sets}) == len(sets) > 1
    assert [Layout.of(x) for x in sets[1].tensors] == [layout for _, layout in problem.operands]
