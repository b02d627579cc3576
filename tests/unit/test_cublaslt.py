"""The cublaslt backend without a GPU: a fake of the bindings does on CPU memory what cuBLASLt is documented to do."""

from __future__ import annotations

import dataclasses
import gc
import importlib.resources
import pickle
import re
import sys

import pytest
import torch
from extras import needs
from fake_cublaslt import installed

from gemmtune.backends import cublaslt
from gemmtune.backends.cublaslt import BACKEND, launch, library
from gemmtune.backends.cublaslt.constants import DATA_TYPES, AlgorithmAttribute, PreferenceAttribute
from gemmtune.backends.cublaslt.gemm import gemm_of
from gemmtune.device import preset
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Epilogue, Layout, Precision, Problem
from gemmtune.problem.compositions import over_blocks
from gemmtune.problem.epilogue import Node
from gemmtune.problem.fused import bias_epilogue, factor_epilogue
from gemmtune.problem.scales import BLOCKS_OF_A, BLOCKS_OF_B
from gemmtune.settings import Settings

DEVICE = preset("sm90")
STREAM = 7


@pytest.fixture
def fake(monkeypatch):
    yield installed(monkeypatch, DEVICE, STREAM)
    library.handle.cache_clear()


def offers(problem, **settings):
    return BACKEND.enumerate(problem, DEVICE, Settings(**settings))


def kernel(problem):
    found = offers(problem)
    assert found.choices, found.refusals
    return found.choices[0].build()


def tensor(layout: Layout, seed: int) -> torch.Tensor:
    buffer = torch.randn(layout.offset + layout.span + 16, generator=torch.Generator().manual_seed(seed)).to(layout.dtype)
    start = layout.offset + (-buffer.data_ptr() // layout.dtype.itemsize) % (16 // layout.dtype.itemsize)
    return torch.as_strided(buffer, layout.size, layout.stride, start)


def check(problem: Problem, alpha: float = 1.0, beta: float = 0.0) -> None:
    """Run the first choice on CPU memory and compare with torch; memory between the elements of out stays as it was."""
    run = kernel(problem).run
    a, b, out = (tensor(x, i) for i, x in enumerate((problem.a, problem.b, problem.out)))
    inp = tensor(problem.inp, 3) if problem.inp is not None else None
    whole = torch.as_strided(out, (problem.out.span,), (1,), out.storage_offset())
    before = whole.clone()
    expected = alpha * (a.double() @ b.double())
    if inp is not None and beta != 0:
        expected = expected + beta * inp.double()
    run(out, *(((a, b), ()) if inp is None else ((a, b, inp), (alpha, beta))))
    torch.testing.assert_close(out.double(), expected, rtol=2e-2 if out.dtype == torch.float16 else 1e-4, atol=1e-2)
    gaps = torch.ones(problem.out.span, dtype=torch.bool)
    gaps.as_strided(problem.out.size, problem.out.stride).fill_(False)
    assert torch.equal(whole[gaps], before[gaps])


def matrix(rows, cols, order, *, dtype=torch.float32, pad=0, offset=0, batch=None, batch_stride=None) -> Layout:
    stride = (cols + pad, 1) if order == "n" else (1, rows + pad)
    if batch is None:
        return Layout(size=(rows, cols), stride=stride, dtype=dtype, offset=offset)
    each = (rows if order == "n" else cols) * max(stride) + pad if batch_stride is None else batch_stride
    return Layout(size=(batch, rows, cols), stride=(each, *stride), dtype=dtype, offset=offset)


@pytest.mark.parametrize("sizes", [(5, 7, 3), (1, 6, 4), (6, 1, 4), (1, 1, 5), (4, 3, 1)], ids=str)
@pytest.mark.parametrize("orders", ["nnn", "ntn", "tnn", "ttn", "nnt", "ntt", "tnt", "ttt"])
@pytest.mark.parametrize("pad", [0, 3])
def test_mm_orders(fake, sizes, orders, pad):
    m, n, k = sizes
    layouts = {
        "a": matrix(m, k, orders[0], pad=pad, offset=pad % 4),
        "b": matrix(k, n, orders[1], pad=2 * pad),
        "out": matrix(m, n, orders[2], pad=pad, offset=pad and 2),
    }
    check(Problem(op="mm", device_type="cuda", **layouts))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_mm_dtypes(fake, dtype):
    check(Problem.mm(6, 8, 16, dtype=dtype, device_type="cuda"))


@pytest.mark.parametrize("orders", ["nnn", "ntt", "tnn"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared-a"])
def test_bmm_batch_strides(fake, orders, shared):
    a = matrix(4, 6, orders[0], batch=3, batch_stride=0 if shared else None)
    b = matrix(6, 5, orders[1], batch=3, pad=2)
    check(Problem(op="bmm", a=a, b=b, out=matrix(4, 5, orders[2], batch=3, pad=1), device_type="cuda"))


@pytest.mark.parametrize(("bias", "alpha", "beta"), [("n", 1, 1), ("n", 1.5, 1), ("1n", 1, 1), ("mn", 1, 1), ("mn", 2.5, -0.75)])
def test_addmm_added_operand(fake, bias, alpha, beta):
    check(Problem.addmm(5, 8, 3, dtype=torch.float32, bias=bias, alpha=alpha, beta=beta, device_type="cuda"), alpha, beta)


def test_addmm_bias_of_a_column_major_result(fake):
    inp = Layout(size=(5, 1), stride=(1, 1), dtype=torch.float32)
    out = matrix(5, 8, "t")
    check(Problem(op="addmm", a=matrix(5, 3, "n"), b=matrix(3, 8, "n"), out=out, inp=inp, beta="one", device_type="cuda"), 1, 1)


def test_addmm_with_beta_zero_reads_no_added_operand(fake):
    problem = Problem.addmm(4, 4, 4, dtype=torch.float32, bias="m1", beta=0, device_type="cuda")
    out = torch.zeros(4, 4)
    a = torch.eye(4)
    kernel(problem).run(out, (a, a, torch.full((4, 1), torch.nan)), (1.0, 0.0))
    assert torch.equal(out, a)
    assert fake.launches[-1]["in_place"]


@pytest.mark.parametrize(("bias", "alpha", "beta"), [("n", 1, 1), ("mn", 0.5, 2)])
def test_baddbmm_added_operand(fake, bias, alpha, beta):
    check(Problem.baddbmm(3, 4, 8, 5, dtype=torch.float32, bias=bias, alpha=alpha, beta=beta, device_type="cuda"), alpha, beta)


INT8, INT32, E4M3, E5M2 = torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("sizes", [(5, 7, 3), (1, 6, 4), (6, 1, 4)], ids=str)
@pytest.mark.parametrize("orders", ["nnn", "ntn", "tnt", "ttn"])
def test_int_mm(fake, sizes, orders):
    m, n, k = sizes
    a, b = matrix(m, k, orders[0], dtype=INT8, pad=3), matrix(k, n, orders[1], dtype=INT8)
    problem = Problem(op="int_mm", a=a, b=b, out=matrix(m, n, orders[2], dtype=INT32, pad=1), device_type="cuda")
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randint(-128, 128, (layout.span,), dtype=INT8, generator=generator).as_strided(layout.size, layout.stride)
        for layout in (a, b)
    )
    out = torch.zeros(problem.out.span, dtype=INT32).as_strided(problem.out.size, problem.out.stride)
    choice = offers(problem).choices[0]
    choice.build().run(out, (x, y), ())
    assert torch.equal(out.long(), x.long() @ y.long())
    assert (choice.claims.accumulate, choice.claims.partials) == (INT32, INT32)


@pytest.mark.parametrize("order", ["n", "t"])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("scales", ["tensor", "row", "block_1x128", "block_128x128"])
def test_scaled_mm(fake, scales, dtypes, order):
    m, n, k = 130, 144, 400
    a, b = torch.randn(m, k).to(dtypes[0]), torch.randn(n, k).to(dtypes[1]).t()
    made = Problem.scaled_mm(m, n, k, scales=scales, device_type="cuda")
    scale_a, scale_b = (torch.rand(layout.size) + 0.5 for layout in made.scales)
    out = torch.zeros(m, n, dtype=torch.float16) if order == "n" else torch.zeros(n, m, dtype=torch.float16).t()
    problem = dataclasses.replace(made, a=Layout.of(a), b=Layout.of(b), out=Layout.of(out), fast_accum=True)
    if dtypes[0] == E5M2 and scales.startswith("block"):
        assert "expected float8_e4m3fn" in offers(problem).refusals[0].reason
        return
    choice = offers(problem).choices[0]
    choice.build().run(out, (a, b, scale_a, scale_b), ())
    whole_a = over_blocks(scale_a, (m, k), BLOCKS_OF_A, "a").double()
    whole_b = over_blocks(scale_b, (k, n), BLOCKS_OF_B, "b").double()
    expected = (a.double() * whole_a) @ (b.double() * whole_b)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-2)
    assert choice.claims.epilogue_input == torch.float32


def test_scaled_mm_with_a_bias(fake):
    m, n, k = 16, 32, 48
    a, b, one = torch.randn(m, k).to(E4M3), torch.randn(n, k).to(E4M3).t(), torch.full((), 0.5)
    bias, out = torch.randn(n).half(), torch.zeros(m, n, dtype=torch.float16)
    problem = dataclasses.replace(
        Problem.scaled_mm(m, n, k, out_dtype=torch.float16, device_type="cuda"), epilogue=bias_epilogue((n,), torch.float16)
    )
    for factor in (1, 2):  # the addresses are those of the call
        kernel(problem).run(out, (a, b, one, one, factor * bias), ())
        expected = 0.25 * (a.double() @ b.double()) + factor * bias.double()
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-2)


def test_scales_in_the_right_layout_are_not_copied(fake, monkeypatch):
    m, n, k = 128, 128, 512
    problem = Problem.scaled_mm(m, n, k, scales="block_128x128", device_type="cuda")
    by_columns = (torch.rand(4, m).t(), torch.rand(1, 4).t())
    layouts = [Layout.of(x) for x in by_columns]
    problem = dataclasses.replace(problem, out=matrix(m, n, "n", dtype=torch.float32), scale_a=layouts[0], scale_b=layouts[1])
    made = offers(problem).choices[0].build()
    told, tell = [], library.Descriptors.set_scales

    def spy(self, left, right):
        told.append((left, right))
        tell(self, left, right)

    monkeypatch.setattr(library.Descriptors, "set_scales", spy)
    made.run(torch.zeros(m, n), (torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3).t(), *by_columns), ())
    assert told == [(by_columns[1].data_ptr(), by_columns[0].data_ptr())], "cuBLASLt's A is b: out is row-major"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem.mixed_mm(4, 8, 16, device_type="cuda"), "mixed_mm is not an operation of this backend"),
        (Problem.scaled_mm(4, 8, 16, layout="nn", device_type="cuda"), "expected a row-major a and a column-major b"),
        (
            dataclasses.replace(Problem.scaled_mm(4, 8, 16, device_type="cuda"), epilogue=bias_epilogue((4, 1), torch.bfloat16)),
            "an epilogue other than a bias [N] of out's dtype",
        ),
        (
            dataclasses.replace(
                Problem.scaled_mm(4, 8, 16, device_type="cuda"), epilogue=bias_epilogue((8,), torch.bfloat16),
                out=matrix(4, 8, "t", dtype=torch.bfloat16),
            ),
            "a bias along the rows of out, which is column-major",
        ),
        (
            dataclasses.replace(
                Problem.int_mm(4, 8, 16, device_type="cuda"), epilogue=factor_epilogue((8,), torch.float32),
                out=matrix(4, 8, "n"),
            ),
            "an epilogue function",
        ),
        (Problem.addmm(4, 8, 3, dtype=torch.float32, bias="m1", device_type="cuda"), "expected a matrix laid out like out"),
        (Problem.addmm(4, 8, 3, dtype=torch.float32, bias="n", beta=0.5, device_type="cuda"), "a bias along its"),
        (Problem.addmm(4, 8, 3, dtype=torch.float64, bias="n", device_type="cuda"), "not float64"),
        (Problem.mm(4, 8, 0, device_type="cuda"), "a size is 0"),
        (Problem.mm(4, 0, 8, device_type="cuda"), "a size is 0"),
        (
            Problem(
                op="mm", a=Layout(size=(4, 6), stride=(12, 2), dtype=torch.float32), b=matrix(6, 4, "n"), out=matrix(4, 4, "n"),
                device_type="cuda",
            ),
            "a is neither row- nor column-major without overlap, got float32[4x6](12,2)",
        ),
        (
            Problem(
                op="mm", a=matrix(4, 6, "n"), b=Layout(size=(6, 4), stride=(0, 1), dtype=torch.float32), out=matrix(4, 4, "n"),
                device_type="cuda",
            ),
            "b is neither",
        ),
        (
            Problem(
                op="mm", a=matrix(4, 6, "n"), b=matrix(6, 4, "n"), out=Layout(size=(4, 4), stride=(8, 2), dtype=torch.float32),
                device_type="cuda",
            ),
            "out is neither",
        ),
        (
            Problem(
                op="mm", a=matrix(4, 6, "n"), b=matrix(6, 4, "n"), out=matrix(4, 4, "n"), device_type="cuda",
                epilogue=Epilogue(nodes=(Node(op="acc", args=(), dtype=torch.float32),)),
            ),
            "an epilogue function",
        ),
    ],
)  # fmt: skip
def test_refused_problem_tells_why(fake, problem, reason):
    with pytest.raises(InvalidProblemError) as error:
        gemm_of(problem)
    assert reason in str(error.value)
    (refusal,) = offers(problem).refusals
    assert refusal.name == "cublaslt"
    assert reason in refusal.reason


def test_choices_are_the_top_k(fake):
    problem = Problem.mm(16, 16, 16, device_type="cuda")
    fake.heuristic_count = 100
    assert len(offers(problem).choices) == 8
    assert len(offers(problem, cublaslt_top_k=3).choices) == 3
    assert offers(problem, cublaslt_top_k=0).refusals[0].reason == "cublaslt_top_k is 0"


def test_choice_describes_itself(fake):
    problem = Problem.mm(16, 16, 16, dtype=torch.float16, device_type="cuda", precision=Precision(reduced_partials=True))
    first, second, third = offers(problem).choices
    assert first.name == "cublaslt:algo66_tile20_splitk1_reduction0_swizzle0_custom0_stages0_inner0_cluster0"
    assert len({c.content_hash for c in (first, second, third)}) == 3
    assert [c.claims.splits for c in (first, second, third)] == [1, 2, 3]
    assert [c.claims.partials for c in (first, second, third)] == [torch.float32, torch.float32, torch.float16]
    assert third.info["workspace_bytes"] == 512
    assert [c.content_hash for c in offers(problem).choices] == [c.content_hash for c in (first, second, third)]


@pytest.mark.parametrize(("told", "splits"), [(0, 1), (1, 1), (4, 4), (-1, 16)])
def test_splits_are_an_upper_bound(told, splits):
    attributes = ((AlgorithmAttribute.SPLITK, told), (AlgorithmAttribute.REDUCTION, 0))
    assert library.Algorithm(opaque=bytes(64), attributes=attributes, workspace_bytes=0, waves=1.0).splits == splits


def test_choice_is_picklable(fake):
    problem = Problem.mm(5, 7, 3, dtype=torch.float32, device_type="cuda")
    choice = pickle.loads(pickle.dumps(offers(problem).choices[1]))
    assert choice == offers(problem).choices[1]
    out, a, b = torch.empty(5, 7), torch.randn(5, 3), torch.randn(7, 3).t()
    choice.build().run(out, (a, b), ())
    torch.testing.assert_close(out, a @ b)


def test_an_algorithm_serves_another_m_where_the_librarys_check_passes(fake):
    problem = Problem.mm(5, 7, 3, dtype=torch.float32, device_type="cuda")
    choice = offers(problem).choices[1]
    there = choice.at(Problem.mm(9, 7, 3, dtype=torch.float32, device_type="cuda"), DEVICE)
    assert isinstance(there, type(choice))
    assert (there.name, there.content_hash) == (choice.name, choice.content_hash)
    assert there.info["workspace_bytes"] == 256 + 9, "what the check says for that M"
    out, a, b = torch.empty(9, 7), torch.randn(9, 3), torch.randn(7, 3).t()
    there.build().run(out, (a, b), ())
    torch.testing.assert_close(out, a @ b)
    fake.check_fails = 15
    reason = choice.at(Problem.mm(11, 7, 3, dtype=torch.float32, device_type="cuda"), DEVICE)
    assert isinstance(reason, str)
    assert "cublasLtMatmulAlgoCheck" in reason


@pytest.mark.parametrize(
    ("dtype", "reduced", "schemes"),
    [(torch.bfloat16, False, 2), (torch.bfloat16, True, 7), (torch.float32, False, 7)],
)
def test_query_asks_for_allowed_reductions(fake, dtype, reduced, schemes):
    offers(Problem.mm(16, 16, 16, dtype=dtype, device_type="cuda", precision=Precision(reduced_partials=reduced)))
    assert fake.preferences[-1][PreferenceAttribute.REDUCTION_SCHEME_MASK] == schemes


def test_query_tells_the_alignment_of_each_operand(fake):
    out = matrix(8, 8, "n", dtype=torch.float16, offset=1)
    a, b = matrix(8, 8, "n", dtype=torch.float16, offset=4), matrix(8, 8, "n", dtype=torch.float16)
    offers(Problem(op="mm", a=a, b=b, out=out, device_type="cuda"))
    asked = fake.preferences[-1]
    assert asked[PreferenceAttribute.MIN_ALIGNMENT_A_BYTES] == 16, "cuBLASLt's A is b: out is row-major"
    assert asked[PreferenceAttribute.MIN_ALIGNMENT_B_BYTES] == 8
    assert asked[PreferenceAttribute.MIN_ALIGNMENT_D_BYTES] == 2


def test_query_tells_the_alignment_of_all_columns_of_an_added_matrix_and_the_result(fake):
    a, b, inp = (matrix(64, 64, "n", dtype=torch.float16) for _ in range(3))
    out = Layout(size=(64, 64), stride=(65, 1), dtype=torch.float16)
    offers(Problem(op="addmm", a=a, b=b, inp=inp, out=out, alpha="general", beta="general", device_type="cuda"))
    asked = fake.preferences[-1]
    assert asked[PreferenceAttribute.MIN_ALIGNMENT_C_BYTES] == asked[PreferenceAttribute.MIN_ALIGNMENT_D_BYTES] == 2
    assert asked[PreferenceAttribute.MIN_ALIGNMENT_A_BYTES] == 16


@pytest.mark.parametrize(("bias", "kept"), [("n", 1), ("mn", 3), (None, 3)])
def test_algorithms_that_divide_k_do_not_add_a_bias(fake, bias, kept):
    if bias is None:
        problem = Problem.mm(64, 64, 64, dtype=torch.float16, device_type="cuda")
    else:
        problem = Problem.addmm(64, 64, 64, dtype=torch.float16, bias=bias, device_type="cuda")
    found = offers(problem)
    assert len(found.choices) == kept
    assert all(choice.claims.splits == 1 for choice in found.choices) or kept > 1
    assert sum(refusal.count for refusal in found.refusals) == 3 - kept


def test_query_without_an_answer_is_a_refusal(fake):
    fake.heuristic_count = 0
    (refusal,) = offers(Problem.mm(16, 16, 16, device_type="cuda")).refusals
    assert refusal.reason == "cublasLtMatmulAlgoGetHeuristic: NOT_SUPPORTED (15)"


def test_failing_launch_names_the_status(fake):
    run = kernel(Problem.mm(4, 4, 4, dtype=torch.float32, device_type="cuda")).run
    fake.fail = 13
    with pytest.raises(RuntimeError, match=r"^cublasLtMatmul: EXECUTION_FAILED \(13\)$"):
        run(torch.empty(4, 4), (torch.empty(4, 4), torch.empty(4, 4)), ())


def test_workspace_is_one_for_each_stream_and_grows(fake, monkeypatch):
    _, second, third = offers(Problem.mm(4, 4, 4, dtype=torch.float32, device_type="cuda")).choices
    operands = (torch.empty(4, 4), (torch.ones(4, 4), torch.ones(4, 4)), ())
    streams = iter([1, 1, 1, 2, 1])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(streams))
    runs = [c.build().run for c in (second, third)]
    for run in (runs[0], runs[1], runs[0], runs[0], runs[1]):
        run(*operands)
    small, large, kept, other, again = (launch["scratch"] for launch in fake.launches)
    assert small != large
    assert kept == large == again
    assert other != large  # where the small one was, which is free again
    assert [launch["need"] for launch in fake.launches] == [256, 512, 256, 256, 512]


def test_captured_graph_has_its_own_workspace(fake, monkeypatch):
    _, choice, _ = offers(Problem.mm(4, 4, 4, dtype=torch.float32, device_type="cuda")).choices
    operands = (torch.empty(4, 4), (torch.ones(4, 4), torch.ones(4, 4)), ())
    run = choice.build().run
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(*operands)
    assert not launch._blocks


def test_descriptors_are_freed_with_the_kernel(fake):
    made = kernel(Problem.addmm(4, 4, 4, dtype=torch.float32, device_type="cuda"))
    assert fake.live
    del made
    gc.collect()
    assert not fake.live


def test_available_names_the_missing_part(monkeypatch):
    assert BACKEND.available(preset("avx512")).detail == "cuBLASLt serves NVIDIA GPUs, not cpu"
    assert not BACKEND.available(preset("gfx942")).ok
    monkeypatch.setattr(cublaslt, "installed_version", lambda: None)
    assert BACKEND.available(DEVICE).detail == "nvmath-python is not installed: pip install 'gemmtune[cublaslt]'"
    monkeypatch.setattr(cublaslt, "installed_version", lambda: "1.0.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    absent = BACKEND.available(DEVICE)
    assert not absent.ok
    assert absent.detail == "cuBLASLt's algorithms are queried on the device, and NVIDIA H100 is not present"
    (refusal,) = offers(Problem.mm(4, 4, 4, device_type="cuda")).refusals
    assert refusal.reason == absent.detail


def test_available_reports_a_library_that_does_not_load(fake):
    fake.get_version = lambda: (_ for _ in ()).throw(RuntimeError("CUDA driver is not found"))
    assert BACKEND.available(DEVICE).detail == "nvmath-python 1.0.0 does not load: RuntimeError: CUDA driver is not found"
    fake.get_version = lambda: 130100
    assert BACKEND.available(DEVICE).detail == "cuBLASLt 130100 through nvmath-python 1.0.0"


def test_import_leaves_nvmath_alone():
    assert "nvmath" not in sys.modules
    assert isinstance(library.installed_version(), str | None)


@needs("triton")
def test_data_types_have_the_numbers_of_cudas_header():
    header = importlib.resources.files("triton").joinpath("backends/nvidia/include/library_types.h").read_text()
    names = {
        torch.float32: "32F", torch.float64: "64F", torch.float16: "16F", torch.bfloat16: "16BF", torch.int8: "8I",
        torch.int32: "32I", torch.float8_e4m3fn: "8F_E4M3", torch.float8_e5m2: "8F_E5M2",
    }  # fmt: skip
    numbers = dict(re.findall(r"CUDA_R_(\w+) *= *(\d+)", header))
    assert {dtype: int(numbers[name]) for dtype, name in names.items()} == DATA_TYPES
