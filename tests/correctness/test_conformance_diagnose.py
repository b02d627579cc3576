"""diagnose: names each known bug, made on purpose, and nothing else."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest
import torch
from broken_kernels import blocks, narrowed, rounding_blocks, split_k, to_tf32
from conformance_gemms import CPU, subject_of
from made_subjects import Product, apply_epilogue, diagnosis, judged, made
from mutants.gemm import MIXED, SCALED, Gemm, Weights

from gemmtune.conformance.bench.bench import Bench
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.diagnose import Evidence, diagnose
from gemmtune.conformance.diagnose.signs import place
from gemmtune.declaration.subject import NamespaceSubject, Subject
from gemmtune.numerics.buffers import storage_bits
from gemmtune.numerics.guards import poison_free_memory
from gemmtune.numerics.quantized import numbers
from gemmtune.numerics.reference import Region, reference
from gemmtune.problem import Layout, Problem


def over_k(low: int, high: int | None = None) -> Product:
    """Return a product over a part of K."""
    return lambda a, b: a[..., low:high] @ b[..., low:high, :]


def without(low: int, high: int) -> Product:
    """Return a product over all but a part of K."""
    return lambda a, b: a @ b - a[..., low:high] @ b[..., low:high, :]


def twice(low: int, high: int) -> Product:
    return lambda a, b: a @ b + a[..., low:high] @ b[..., low:high, :]


K_BUGS = {
    "last K block of 16 dropped": (over_k(0, -16), "integers:mm-bf16-64x48x96"),
    "last K block of 1 (K = 65 is 1 past a multiple of 64) dropped": (over_k(0, 64), "bound:mm-f32-33x40x65"),
    "last K block of 44 (K = 300 is 44 past a multiple of 128) dropped": (over_k(0, 256), "cancellation:mm-f16-40x48x300"),
    "last K block dropped": (over_k(0, -32), "one-hot-a:mm-f16-40x48x2000"),
    "first K block of 32 dropped": (over_k(32), "integers:bmm-f64-2x64x48x96"),
    "K block 32–63 dropped": (without(32, 64), "cancellation:mm-bf16-64x48x160"),
    "K split of 5 (20–39) dropped": (without(20, 40), "bound:mm-f32-64x48x100"),
    "element 11 of K dropped": (without(11, 12), "cancellation:mm-f32-64x48x100"),
    "first K block of 16 counted twice": (twice(0, 16), "bound:mm-f16-64x48x96"),
    "a K block of 32 dropped": (over_k(0, -32), "bound:addmm-f32-64x48x96-bias.mn-variant.ones"),
}


@pytest.mark.parametrize("text", K_BUGS)
def test_diagnose_names_parts_of_k(text: str) -> None:
    product, case_id = K_BUGS[text]
    assert diagnosis(made(product), case_id) == text


def cut_off(x: torch.Tensor) -> torch.Tensor:
    """Return the upper half of each float32, which is a bfloat16."""
    return (x.contiguous().view(torch.int32) & -(2**16)).view(torch.float32)


def last_by_the_first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product with the first matrix of a in place of the last one."""
    return torch.cat([a[:-1], a[:1]]) @ b


def test_diagnose_requires_all_matrices_of_a_batch_to_match() -> None:
    text = "first matrix of a used for every batch in the last batch"
    assert diagnosis(made(last_by_the_first), "cancellation:bmm-f32-17x33x40x65") == text


ROUNDING_BUGS = {
    "a read as bfloat16": (narrowed("a", torch.bfloat16), "one-hot-b:mm-f32-33x40x65"),
    "b read as bfloat16": (narrowed("b", torch.bfloat16), "bound:mm-f16-33x40x65"),
    "a and b read as float16": (lambda a, b: a.half().float() @ b.half().float(), "bound:mm-f32-33x40x65-variant.uniform"),
    "b read as float8_e5m2": (narrowed("b", torch.float8_e5m2), "one-hot-a:mm-bf16-33x40x65"),
    "a and b read as tf32, cut off": (lambda a, b: to_tf32(a) @ to_tf32(b), "bound:mm-f32-33x40x65"),
    "a and b read as float32": (lambda a, b: a.float().double() @ b.float().double(), "bound:mm-f64-33x40x65"),
    "float16 partial sums of 2 K splits": (split_k(torch.float16), "cancellation:mm-f16-33x40x128"),
    "bfloat16 partial sums of 4 K splits": (split_k(torch.bfloat16, 4), "bound:mm-bf16-64x96x256"),
    "accumulation in float16": (rounding_blocks(torch.float16), "bound:mm-f16-64x96x256"),
    "accumulation in bfloat16": (rounding_blocks(torch.bfloat16), "grade:mm-bf16-64x96x256"),
    "result rounded to bfloat16": (lambda a, b: (a @ b).bfloat16().float(), "bound:mm-f32-33x40x65"),
    "result cut off to bfloat16, not rounded": (lambda a, b: cut_off(a @ b), "bound:mm-bf16-33x40x65"),
    "subnormal numbers became 0": (lambda a, b: torch.where((a @ b).abs() < 2.0**-126, 0.0, a @ b), "subnormal:mm-f32-33x40x65"),
}


@pytest.mark.parametrize("text", ROUNDING_BUGS)
def test_diagnose_names_lost_precision(text: str) -> None:
    product, case_id = ROUNDING_BUGS[text]
    assert diagnosis(made(product), case_id) == text


@pytest.mark.parametrize("size", [16, 32, 64, 128, 8, 4, 1])
def test_diagnose_names_an_accumulator_that_is_rounded_after_any_block(size: int) -> None:
    narrow = made(rounding_blocks(torch.float16, size))
    assert diagnosis(narrow, "bound:mm-f16-64x96x256") == "accumulation in float16"
    if size <= 16:
        assert diagnosis(narrow, "width:mm-f16-33x40x96") == "overflow, as of accumulation in float16"


def test_diagnose_does_not_take_lost_cancellation_for_a_narrow_accumulator() -> None:
    assert diagnosis(made(over_k(0, 64)), "width:mm-f16-17x33x65") == "overflow to infinity in every 3rd row from 0"


def rounded_in_another_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a product with a float16 accumulator over blocks of 16, odd blocks first: an order that is not simulated."""
    parts = blocks(a, b)
    acc = torch.zeros_like(parts[0])
    for part in (*parts[1::2], *parts[::2]):
        acc = (acc + part).half().float()
    return acc


def test_diagnose_recognises_a_narrow_accumulator_by_the_size_of_its_errors() -> None:
    text = diagnosis(made(rounded_in_another_order), "bound:mm-f16-64x96x1000")
    assert text == "round-off as of accumulation in float16"


def test_diagnose_names_int8_read_as_unsigned() -> None:
    subject = made(read=lambda a, b: (a, b.view(torch.uint8).to(torch.int16)))
    assert diagnosis(subject, "integers:int_mm-i8-33x40x65") == "b read as unsigned integers"


def by_the_next_element(weights: Weights) -> torch.Tensor:
    """Return weights whose scales change one element early along K, in groups of 32."""
    scale = weights.scale
    assert scale is not None
    groups = ((torch.arange(weights.size[0]) + 1) // 32).clamp_max(len(scale) - 1)
    return numbers(weights.b, weights.encoding).float() * scale.float()[groups]


def in_the_dtype_of_a(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a, b.view(a.dtype)


QUANTIZED_BUGS = {
    "scale_b of the next block used for the last element of each along K": (
        Gemm(gemm_traits=MIXED, unpack=by_the_next_element), "scales:mixed_mm-f32-33x40x300-scales.group_32-weights.uint8"
    ),
    "bits of b taken for float8_e4m3fn": (
        Gemm(gemm_traits=SCALED, read=in_the_dtype_of_a), "bound:scaled_mm-e4m3-33x40x65-weights.float8_e5m2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", QUANTIZED_BUGS)
def test_diagnose_names_misread_quantized_operands(text: str) -> None:
    gemm, case_id = QUANTIZED_BUGS[text]
    assert diagnosis(NamespaceSubject("quantized", gemm, gemm.gemm_traits), case_id) == text


SCALAR_BUGS = {
    "the bias dropped": (lambda p, c, alpha, beta: alpha * p, "bias.n"),
    "C dropped": (lambda p, c, alpha, beta: alpha * p, "bias.mn"),
    "product missing, only the bias is there": (lambda p, c, alpha, beta: beta * c + 0 * p, "bias.n"),
    "alpha dropped": (lambda p, c, alpha, beta: p + beta * c, "bias.n"),
    "alpha applied twice": (lambda p, c, alpha, beta: alpha**2 * p + beta * c, "bias.n"),
    "beta dropped": (lambda p, c, alpha, beta: alpha * p + c, "bias.n"),
    "beta applied twice": (lambda p, c, alpha, beta: alpha * p + beta**2 * c, "bias.n"),
    "alpha and beta exchanged": (lambda p, c, alpha, beta: beta * p + alpha * c, "bias.n"),
    "alpha applied to C": (lambda p, c, alpha, beta: alpha * (p + beta * c), "bias.mn"),
    "the bias added 3 times, as if once for each of 3 K splits": (lambda p, c, alpha, beta: alpha * p + 3 * beta * c, "bias.n"),
    "the bias on the wrong axis": (lambda p, c, alpha, beta: alpha * p + beta * c.unsqueeze(-1), "bias.n"),
    "C transposed": (lambda p, c, alpha, beta: alpha * p + beta * c.mT, "bias.mn"),
    "first element of the bias used for all": (lambda p, c, alpha, beta: alpha * p + beta * c[0], "bias.n"),
    "product rounded to bfloat16 before alpha and beta": (
        lambda p, c, alpha, beta: alpha * p.bfloat16().float() + beta * c, "bias.n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", SCALAR_BUGS)
def test_diagnose_names_alpha_beta_and_the_added_operand(text: str) -> None:
    epilogue, bias = SCALAR_BUGS[text]
    dtype = "bf16" if "bfloat16" in text else "f32"
    case_id = f"bound:addmm-{dtype}-48x48x65-{bias}-alpha.general-beta.general"
    assert diagnosis(made(epilogue=epilogue), case_id) == text


def test_diagnose_names_an_ignored_sign_of_alpha() -> None:
    subject = made(epilogue=lambda p, c, alpha, beta: abs(alpha) * p + (beta * c if beta else 0))
    case_id = "alpha-beta:addmm-f32-48x48x65-alpha.general-beta.zero-variant.half"
    assert diagnosis(subject, case_id) == "sign of alpha ignored"


@pytest.mark.parametrize("missing", ["scale_a", "scale_b"])
def test_diagnose_names_a_missing_scale(missing: str) -> None:
    case_id = "bound:scaled_mm-e4m3-33x40x65-b.col-scales.row"
    assert not judged(made(), case_id).failures
    assert diagnosis(made(ignores=missing), case_id) == f"{missing} dropped"


def test_diagnose_names_a_k_split_added_late() -> None:
    def late(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack([a[..., :96] @ b[..., :96, :], a[..., 96:] @ b[..., 96:, :]])

    subject = made(late, lambda p, c, alpha, beta: apply_epilogue(p[0], c, alpha, beta) + p[1])
    text = diagnosis(subject, "bound:addmm-f32-48x40x128-alpha.general-beta.general")
    assert text == "last K block of 32 added after alpha and scales were applied"


def shifted(x: torch.Tensor, stride: tuple[int, ...] | None = None, back: int = 0) -> torch.Tensor:
    """Return an operand as a kernel with other strides or an earlier start reads it."""
    whole = storage_bits(x).view(x.dtype)
    return whole.as_strided(x.shape, stride or x.stride(), x.storage_offset() - back)


ADDRESS_BUGS = {
    "a transposed": (lambda a, b: (a.mT, b), "integers:mm-f32-48x40x48"),
    "b transposed": (lambda a, b: (a, b.mT), "bound:mm-f32-40x48x48"),
    "b @ a in place of a @ b": (lambda a, b: (b, a), "bound:mm-f32-48x48x48"),
    "a read as contiguous, strides ignored": (lambda a, b: (shifted(a, (40, 1)), b), "integers:mm-f32-33x40x40-a.col"),
    "b read as column-major without gaps": (lambda a, b: (a, shifted(b, (1, 65))), "one-hot-a:mm-f32-33x40x65"),
    "a read without the gap between its rows": (lambda a, b: (shifted(a, (65, 1)), b), "bound:mm-f32-33x40x65-a.row+8"),
    "b read without the gap between its columns": (lambda a, b: (a, shifted(b, (1, 65))), "bound:mm-f32-33x40x65-b.col+4"),
    "NaN, as if memory outside of the operands were read": (
        lambda a, b: (shifted(a, (a.stride(0), 1)), b), "bound:mm-f32-33x40x65-a.every2",
    ),
    "batch stride of b ignored, matrices read as neighbours": (
        lambda a, b: (a, shifted(b, (65 * 40, 40, 1))), "bound:bmm-f32-3x33x40x65-b.row~1",
    ),
    "first matrix of a used for every batch": (lambda a, b: (a[:1].expand(a.shape), b), "integers:bmm-f16-3x33x40x65"),
    "every row repeats the first": (lambda a, b: (a[:1].expand(a.shape), b), "cancellation:mm-f32-33x40x65"),
    "the first 16 columns repeat": (lambda a, b: (a, b[:, torch.arange(40) % 16]), "integers:mm-f32-33x40x65"),
    "first batch computed for every batch": (
        lambda a, b: (a[:1].expand(a.shape), b[:1].expand(b.shape)), "bound:bmm-f16-3x33x40x65",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", ADDRESS_BUGS)
def test_diagnose_names_wrong_addresses(text: str) -> None:
    read, case_id = ADDRESS_BUGS[text]
    assert diagnosis(made(read=read), case_id) == text


def test_diagnose_names_an_ignored_offset() -> None:
    subject = made(read=lambda a, b: (a, shifted(b, back=3)))
    assert diagnosis(subject, "bound:mm-f32-33x40x65-b.row@3") in (
        "storage offset of b ignored",
        "NaN, as if memory outside of the operands were read",
    )


def test_diagnose_names_a_transposed_result_and_one_with_other_strides() -> None:
    assert diagnosis(made(lambda a, b: (a @ b).mT), "bound:mm-f32-48x48x65") == "result transposed"

    def store(out: torch.Tensor, result: torch.Tensor) -> None:
        shifted(out, (40, 1)).copy_(result)

    assert diagnosis(made(store=store), "bound:mm-f32-33x40x65-out.row+8") == "out written as contiguous, strides ignored"


def repeated_last(dim: int) -> Product:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        acc = a @ b
        acc.select(dim, -1).copy_(acc.select(dim, -2))
        return acc

    return product


def zeroed(rows: slice, cols: slice) -> Product:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        acc = a @ b
        acc[..., rows, cols] = 0
        return acc

    return product


EVERY = slice(None)
EDGE_BUGS = {
    "last row repeats the one before it": (repeated_last(-2), "bound:mm-f32-33x40x65"),
    "last column repeats the one before it": (repeated_last(-1), "integers:mm-f32-33x40x65"),
    "zeros": (zeroed(EVERY, EVERY), "bound:mm-f32-33x40x65"),
    "zeros in the last row, past a multiple of 32": (zeroed(slice(32, None), EVERY), "bound:mm-f32-33x40x65"),
    "zeros in the last 15 of 127 columns, past a multiple of 16": (zeroed(EVERY, slice(112, None)), "bound:mm-f32-33x127x65"),
    "zeros in rows 16–31, columns 32–63": (zeroed(slice(16, 32), slice(32, 64)), "bound:mm-f32-64x128x65"),
    "zeros in every 4th row from 1": (zeroed(slice(1, None, 4), EVERY), "bound:mm-f32-64x40x65"),
    "zeros in every batch but the first, the last column": (
        lambda a, b: torch.cat([(a @ b)[:1], zeroed(EVERY, slice(-1, None))(a, b)[1:]]), "bound:bmm-f32-3x17x40x65",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", EDGE_BUGS)
def test_diagnose_locates_the_errors(text: str) -> None:
    product, case_id = EDGE_BUGS[text]
    assert diagnosis(made(product), case_id) == text


def test_diagnose_names_elements_left_unwritten() -> None:
    def store(out: torch.Tensor, result: torch.Tensor) -> None:
        out[..., :32, :].copy_(result[..., :32, :])

    text = diagnosis(made(store=store), "bound:mm-f32-33x40x65-out.row+8")
    assert text == "elements left unwritten in the last row, past a multiple of 32"


@pytest.mark.parametrize(
    ("allocate", "bug"), [(torch.empty, "elements left unwritten"), (torch.zeros, "zeros")], ids=["unwritten", "of zeros"]
)
def test_diagnose_does_not_depend_on_what_memory_held(
    allocate: Callable[..., torch.Tensor], bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh memory of the system holds zeros, so let the free memory hold these."""
    monkeypatch.setattr("gemmtune.conformance.bench.bench.poison_free_memory", lambda *x: poison_free_memory(*x[:2], 0))

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = allocate(a.shape[0], b.shape[1], dtype=a.dtype)
        out[:-1] = a[:-1] @ b
        return out

    assert diagnosis(subject_of(gemm), "bound:mm-f32-330x400x65") == f"{bug} in the last row"


def test_diagnose_names_reads_past_the_end_of_k() -> None:
    def past(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            storage_bits(a).view(a.dtype).as_strided((33, 48), a.stride(), a.storage_offset()),
            storage_bits(b).view(b.dtype).as_strided((48, 64), b.stride(), b.storage_offset()),
        )

    # The last columns of a row-major a come from its next row, which exists for all but the last row.
    text = diagnosis(made(read=past), "bound:mm-f32-33x64x40-b.col")
    assert text == "what lies past the end of K is read, to the next multiple of 16"


SPECIAL_BUGS = {
    "NaN swallowed in row 24": (lambda r: r.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), "nan:mm-f32-48x40x65"),
    "NaN swallowed in the last column": (lambda r: torch.where(r.isnan(), 1.0, r), "nan:mm-f32-48x40x65-variant.b.last"),
    "infinity became the largest finite number": (
        lambda r: r.clamp(-65504, 65504), "overflow:mm-f16-48x40x64",
    ),
    "infinity became NaN": (lambda r: r - r * 0, "overflow:mm-f32-48x40x64"),
}  # fmt: skip


@pytest.mark.parametrize("text", SPECIAL_BUGS)
def test_diagnose_names_special_numbers(text: str) -> None:
    change, case_id = SPECIAL_BUGS[text]
    subject = made(epilogue=lambda p, c, alpha, beta: change(apply_epilogue(p, c, alpha, beta)))
    assert diagnosis(subject, case_id) == text


@pytest.mark.parametrize("variant", ["", "-variant.infinite"])
def test_diagnose_names_a_c_read_with_beta_0(variant: str) -> None:
    subject = made(epilogue=lambda p, c, alpha, beta: alpha * p + beta * c)
    text = diagnosis(subject, f"beta-zero:addmm-f32-33x40x65-bias.mn-alpha.general-beta.zero{variant}")
    assert text == "C is read although beta is 0"


def test_diagnose_recognises_the_result_of_an_earlier_call() -> None:
    kept: list[torch.Tensor] = []

    def stale(acc: torch.Tensor, c: torch.Tensor | None, alpha: float, beta: float) -> torch.Tensor:
        kept.append(acc)
        return kept[0]

    bench = Bench(made(epilogue=stale), Case.parse("bound:mm-f32-33x40x65"), CPU)
    for _ in range(2):
        operands = bench.probes.random()
        bench.expect(bench.call(operands), operands)
    assert [failure.diagnosis for failure in bench.failures] == ["the result of an earlier call"]


def evidence_of(problem: Problem, spoil: torch.Tensor, subject: Subject | None = None) -> Evidence:
    """Return the evidence for a right result with ``spoil`` added to it."""
    bench = Bench(subject or made(), Case.parse(f"bound:mm-f32-{problem.m}x{problem.n}x{problem.k}"), CPU)
    operands = bench.probes.random()
    right = reference(operands, Region())
    tolerance = 1e-5 * right.magnitude
    return Evidence(
        problem=problem, operands=operands, got=right.value + spoil, expected=right.value, tolerance=tolerance, bad=spoil != 0,
        unwritten=torch.zeros_like(spoil, dtype=torch.bool),
    )  # fmt: skip


def test_diagnose_finds_where_32_bit_addresses_wrap() -> None:
    problem = Problem.mm(33, 40, 65, dtype=torch.float32, layout="nn", device_type="cpu")
    far = dataclasses.replace(problem, a=Layout(size=(33, 65), stride=(2**27, 1), dtype=torch.float32))
    noise = torch.randn(1, 33, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    spoil = torch.where(torch.arange(33)[:, None] >= 16, noise, 0.0)
    named = diagnose(evidence_of(far, spoil)).text
    assert named == "errors from row 16 on, where offsets in a pass 2^31 elements: 32-bit addresses"
    in_bytes = torch.where(torch.arange(33)[:, None] >= 4, noise, 0.0)
    named = diagnose(evidence_of(far, in_bytes)).text
    assert named == "errors from row 4 on, where offsets in a pass 2^31 bytes: 32-bit addresses"
    assert diagnose(evidence_of(problem, spoil)).text == "errors only in the last 17 of 33 rows"


def small_errors(scale: float) -> list[str]:
    """Return the texts that give the size of errors without a cause. Errors of 1000 are not small for these products."""
    sizes = range(6, 20) if scale <= 1 else ()
    return [f"small errors in most elements, up to 2^-{size} of the magnitude of their terms" for size in sizes]


@pytest.mark.parametrize("shape", [(33, 40, 65), (1, 1, 1), (1, 40, 300), (5, 1, 7), (64, 64, 64)])
def test_diagnose_names_nothing_for_random_errors(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    problem = Problem.mm(m, n, k, dtype=torch.float32, layout="nn", device_type="cpu")
    generator = torch.Generator().manual_seed(3)
    for scale in (1e-3, 1.0, 1e3):
        noise = scale * torch.randn(1, m, n, dtype=torch.float64, generator=generator)
        assert diagnose(evidence_of(problem, noise)).text in ("", *small_errors(scale))


def test_diagnose_names_nothing_with_too_little_evidence() -> None:
    assert diagnosis(made(over_k(0, -16)), "integers:mm-f32-1x1x40") == ""


def test_nothing_is_named_if_the_call_changed_its_operands() -> None:
    outcome = judged(made(read=lambda a, b: (a.mul_(2), b)), "bound:mm-f32-33x40x65")
    assert [(f.property_name, f.diagnosis) for f in outcome.failures] == [("inputs-unchanged", "")]
    outcome = judged(made(lambda a, b: 2 * (a @ b), read=lambda a, b: (a.mul_(2), b)), "bound:mm-f32-33x40x65")
    assert [(f.property_name, f.diagnosis) for f in outcome.failures] == [("inputs-unchanged", ""), ("bound", "")]


def test_diagnose_takes_less_than_a_second() -> None:
    started = time.process_time()
    judged(made(lambda a, b: a @ b + torch.randn(a.shape[-2], b.shape[-1])), "bound:mm-f32-300x400x2000")
    assert time.process_time() - started < 4  # with the reference, on two cores of a slow machine


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ((EVERY, EVERY, EVERY), ""),
        ((slice(1, 2), EVERY, EVERY), "batch 1"),
        ((EVERY, slice(64, 67), EVERY), "the last 3 of 67 rows, past a multiple of 64"),
        ((EVERY, slice(0, 1), slice(3, 4)), "the first row, column 3"),
        ((EVERY, slice(1, None), EVERY), "every row but the first"),
        ((EVERY, slice(0, 64), EVERY), "the first 64 of 67 rows"),
        ((EVERY, EVERY, slice(0, None, 3)), "every 3rd column from 0"),
    ],
)
def test_place_names_rows_and_columns(wrong: tuple[slice, slice, slice], text: str) -> None:
    bad = torch.zeros(3, 67, 40, dtype=torch.bool)
    bad[wrong] = True
    assert place(bad) == text


def test_place_recognises_the_same_part_of_every_tile_and_ignores_scattered_errors() -> None:
    bad = torch.zeros(1, 64, 40, dtype=torch.bool)
    bad[:, torch.arange(64) % 16 >= 12] = True
    assert place(bad) == "rows 12–15 of every 16"
    assert place(torch.eye(40, dtype=torch.bool).expand(1, 40, 40)) == ""
    assert place(torch.zeros(1, 4, 4, dtype=torch.bool)) == ""
