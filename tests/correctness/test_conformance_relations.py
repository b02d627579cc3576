"""Properties that relate results or repeat a call, on right and on broken GEMMs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest
import torch
from conformance_gemms import (
    CPU,
    assert_conforms,
    assert_found,
    cases_of,
    failed,
    subject_of,
    texts,
    torch_subject,
)

from gemmtune.conformance.properties import metamorphic

Product = Callable[..., torch.Tensor]
METAMORPHIC = [p.name for p in metamorphic.PROPERTIES]


@pytest.mark.parametrize("name", [*METAMORPHIC, "determinism", "repeatability", "threads"])
def test_torch_conforms(name: str) -> None:
    assert_conforms(name, torch_subject(deterministic=True), every=2)


@pytest.mark.parametrize("name", [*METAMORPHIC, "repeatability"])
def test_a_plain_function_conforms(name: str) -> None:
    assert_conforms(name, subject_of(lambda a, b: a @ b), every=2)


def in_float16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total


@pytest.mark.parametrize("name", METAMORPHIC)
def test_a_declared_narrow_accumulator_conforms(name: str) -> None:
    assert_conforms(name, subject_of(in_float16, dtypes=("float16",), accumulate={"float16": "float16"}))


def cut(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


@pytest.mark.parametrize("name", METAMORPHIC)
def test_declared_tf32_conforms(name: str) -> None:
    assert_conforms(name, subject_of(lambda a, b: cut(a) @ cut(b), dtypes=("float32",), input_mode="tf32"))


def rows_numbered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b + torch.arange(a.shape[0], dtype=a.dtype).unsqueeze(-1)


def last_row_zero(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a @ b
    out[-1] = 0
    return out


def whole_blocks_only(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    k = a.shape[1] // 16 * 16
    return a[:, :k] @ b[:k]


def clamped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.clamp(-10, 10) @ b.clamp(-10, 10)


def in_bfloat16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.bfloat16().to(a.dtype) @ b.bfloat16().to(b.dtype)


@pytest.mark.parametrize(
    ("name", "function", "text"),
    [
        ("permutation", last_row_zero, "permutation: rows of a and columns of b in another order: out["),
        ("permutation", rows_numbered, "permutation: rows of a and columns of b in another order: out["),
        ("transpose", rows_numbered, "transpose: bᵀ @ aᵀ compared with the transposed a @ b: out["),
        ("transpose", last_row_zero, "transpose: bᵀ @ aᵀ compared with the transposed a @ b: out["),
        ("scaling", clamped, "scaling: a times 8: out["),
        ("scaling", clamped, "scaling: b times 4: out["),
        ("k-padding", whole_blocks_only, "k-padding: K padded from 31 to 32 with zeros, before: out["),
        ("identity", in_bfloat16, "identity: times the identity: out["),
    ],
)
def test_broken_relations(name: str, function: Product, text: str) -> None:
    assert_found(text, name, subject_of(function, dtypes=("float32",)))


def losing_a_part_at_times(every: int) -> Product:
    calls = itertools.count(1)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        half = a.shape[1] // 2
        first = a[:, :half] @ b[:half]
        return first if next(calls) % every == 0 else first + a[:, half:] @ b[half:]

    return product


def in_another_order_at_times() -> Product:
    calls = itertools.count(1)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.flip(-1) @ b.flip(-2) + 0.0 if next(calls) % 5 == 0 else one_by_one(a, b)

    return product


def one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total


def test_a_race_that_shows_on_some_runs_is_found() -> None:
    subject = subject_of(losing_a_part_at_times(19), dtypes=("float32",))
    assert_found("repeatability: call 19 of 24: P5 cancellation: out[", "repeatability", subject)


def test_differing_bits_are_found_if_determinism_is_declared() -> None:
    subject = subject_of(in_another_order_at_times(), dtypes=("float32",), deterministic=True)
    cases = [case for case in cases_of("determinism", subject) if case.k <= 96]
    assert "determinism: call 5 of 20: the bits of the first call: out[" in texts(failed(subject, cases[:3], CPU))


def one_scratch_for_all_threads() -> Product:
    scratch: dict[str, torch.Tensor] = {}
    calls = threading.Lock()

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with calls:
            scratch["product"] = a @ b
        time.sleep(0.001)
        return scratch["product"].clone()

    return product


def test_memory_shared_by_threads_is_found() -> None:
    subject = subject_of(one_scratch_for_all_threads(), dtypes=("float32",), threads=True)
    cases = [case for case in cases_of("threads", subject) if case.variant == ""][:2]
    found = texts(failed(subject, cases))
    assert "threads: thread " in found
    assert " of 4, call " in found


@pytest.mark.parametrize(
    ("name", "declared", "reason"),
    [
        ("determinism", {}, "deterministic is not declared"),
        ("threads", {}, "threads is not declared"),
        ("transpose", {"ops": ("addmm",)}, "every tested operation adds something to the product"),
    ],
)
def test_undeclared_properties_are_not_tested(name: str, declared: dict[str, object], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        cases_of(name, subject_of(torch.matmul, **declared))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [metamorphic.A_SCALE, metamorphic.B_SCALE])
def test_scaling_is_exact_between_the_ends_of_a_format(dtype: torch.dtype, factor: float) -> None:
    """A sum just below the smallest normal number rounds to it, and its multiple to less than the multiple of it."""
    info = torch.finfo(dtype)
    least, most = torch.tensor([info.smallest_normal, info.max / factor], dtype=dtype)
    above, beyond = (torch.nextafter(x, torch.tensor(float("inf"), dtype=dtype)) for x in (least, most))
    sizes = torch.stack([torch.zeros_like(least), least / 2, least, above, torch.ones_like(least), most, beyond])
    apart = [True, True, True, False, False, False, True]
    assert metamorphic._rounded_apart(sizes, factor).tolist() == apart
    assert metamorphic._rounded_apart(-sizes, factor).tolist() == apart
    step = above.double() - least.double()
    total = least.double() - step * 3 / 8
    assert total.to(dtype) == least
    assert (total * factor).to(dtype) < least * factor
