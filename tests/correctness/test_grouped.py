"""Grouped products on the CPU: the four forms, offsets, gradients, what is refused, tuning, and what verification finds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from grouped_mutants import MUTANTS

import gemmtune
from gemmtune import settings
from gemmtune.backends.table import BACKENDS, load
from gemmtune.choice import Kernel, Status, Tensors
from gemmtune.device import detect, preset
from gemmtune.dispatch.ready import forget_plans
from gemmtune.numerics.grouped import awkward_ends
from gemmtune.problem import Problem, grouped_compositions
from gemmtune.problem.grouped_compositions import (
    combined,
    grouped_by_terms,
    grouped_product,
    masked_by_terms,
    masked_product,
    routed,
    scaled_grouped,
    spans,
    widened,
)
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

Tensor = torch.Tensor
CPU = torch.device("cpu")
G, M, N, K = 4, 19, 16, 24
ENDS = dict(awkward_ends(M, G)) | {"once": [5, 5, 11, M]}
EPS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def fresh(own_store: object) -> Iterator[None]:
    forget_plans()
    with settings.patch(backends=("aten",), verify=False, search="quick", tune="never"):
        yield


def numbers(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def offsets(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def rows_by_loop(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return torch.cat([a[begin:end] @ b[g] for g, (begin, end) in enumerate(spans(ends, a.shape[0]))])


def terms_by_loop(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return torch.stack([a[:, begin:end] @ b[begin:end] for begin, end in spans(ends, a.shape[1])])


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    allowed = EPS[got.dtype] * (1 + (float(want.detach().abs().max()) if want.numel() else 0.0))
    return bool(((got.double() - want.double()).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("name", ENDS)
def test_the_four_forms(name: str, dtype: torch.dtype) -> None:
    ends, offs = ENDS[name], offsets(ENDS[name])
    a, weights = numbers(M, K, dtype=dtype), numbers(G, N, K, dtype=dtype).mT
    for _ in range(2):  # the second call runs the plan of the first
        got = gemmtune.grouped_mm(a, weights, offs)
        assert got.shape == (M, N)
        assert close(got[: ends[-1]], rows_by_loop(a.double(), weights.double(), ends))
        columns = gemmtune.grouped_mm(weights.mT, a.t(), offs)
        assert columns.is_contiguous()
        assert close(columns[:, : ends[-1]], rows_by_loop(a.double(), weights.double(), ends).t())
        other = numbers(M, N, dtype=dtype)
        assert close(gemmtune.grouped_mm(a.t(), other, offs), terms_by_loop(a.t().double(), other.double(), ends))
    assert torch.equal(gemmtune.grouped_mm(weights.mT, weights), gemmtune.bmm(weights.mT, weights))


def test_offsets_that_changed_are_seen_and_out_is_returned() -> None:
    a, b, offs = numbers(M, K), numbers(G, K, N), offsets(ENDS["once"])
    wide = torch.full((M, 2 * N), torch.nan)
    for name in ENDS:
        offs.copy_(offsets(ENDS[name]))
        out = wide[:, ::2]
        assert gemmtune.grouped_mm(a, b, offs, out=out, epilogue=torch.relu) is out
        assert close(out[: ENDS[name][-1]], rows_by_loop(a, b, ENDS[name]).relu())
    bias, want = numbers(N), rows_by_loop(a, b, ENDS["even"])
    offs.copy_(offsets(ENDS["even"]))
    added = gemmtune.grouped_mm(b.mT, a.t(), offs, epilogue=lambda acc, x: acc + x, epilogue_args=(bias.unsqueeze(-1),))
    assert close(added, (want + bias).t())
    assert close(gemmtune.grouped_mm(b.mT, a.t(), offs, out=torch.empty(N, M)), want.t())
    assert close(gemmtune.grouped_mm(a, b, torch.stack([offs, offs], dim=1)[:, 0]), want)


@pytest.mark.parametrize("call", [gemmtune.grouped_mm, torch.ops.gemmtune.grouped_mm], ids=["function", "operator"])
def test_gradients_are_grouped_products_too(call: Callable[..., torch.Tensor]) -> None:
    ends, offs = ENDS["empty groups"], offsets(ENDS["empty groups"])
    given = [numbers(M, K), numbers(G, K, N)]
    ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    result, want = call(*ours, offs), rows_by_loop(*theirs, ends)
    g = numbers(M, N)
    found = torch.autograd.grad(result, ours, g, create_graph=True)
    expected = torch.autograd.grad(want, theirs, g, create_graph=True)
    assert all(close(x, y) for x, y in zip(found, expected, strict=True))
    twice = torch.autograd.grad(sum((x * x).sum() for x in found), ours)  # type: ignore[arg-type]
    again = torch.autograd.grad(sum((x * x).sum() for x in expected), theirs)  # type: ignore[arg-type]
    assert all(close(x, y) for x, y in zip(twice, again, strict=True))


def test_the_operator_knows_shapes_and_batches() -> None:
    a, b, offs = numbers(M, K), numbers(G, K, N), offsets(ENDS["once"])
    torch.library.opcheck(torch.ops.gemmtune.grouped_mm.default, (a, b, offs))
    torch.library.opcheck(torch.ops.gemmtune.grouped_k_mm.default, (a.t(), numbers(M, N), offs))
    batch = numbers(2, M, K)
    assert close(torch.vmap(lambda x: gemmtune.grouped_mm(x, b, offs))(batch)[1], rows_by_loop(batch[1], b, ENDS["once"]))


def test_offsets_that_are_no_offsets_touch_nothing_else() -> None:
    a, b = numbers(M, K), numbers(G, K, N)
    for ends in ([7, 3, 30, M], [-5, 2, 2, 100]):
        for x in (grouped_product(a, b, offsets(ends)), grouped_by_terms(a.t(), a, offsets(ends))):
            assert x.isfinite().all()


def test_the_composition_that_reads_no_offset_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = numbers(M, K), numbers(G, K, N)
    for ends in ENDS.values():
        assert close(masked_product(a, b, offsets(ends)), grouped_product(a, b, offsets(ends)))
        assert close(masked_by_terms(a.t(), a, offsets(ends)), grouped_by_terms(a.t(), a, offsets(ends)))
        narrow = (a.to(F8), b.to(F8), torch.rand(M, 1), torch.rand(G, 1, N), offsets(ends))
        want = scaled_grouped(*narrow)
        with monkeypatch.context() as patched:
            patched.setattr(grouped_compositions, "readable", lambda _: None)
            assert close(scaled_grouped(*narrow), want)


@pytest.mark.parametrize("encoding", ["", "int4", "uint4"])
def test_narrow_weights_have_scales_of_columns_or_of_parts_of_them(encoding: str) -> None:
    k, ends, offs = 64, ENDS["once"], offsets(ENDS["once"])
    a, low = numbers(M, k), 0 if encoding == "uint4" else -8
    weights = torch.randint(low, low + 16, (G, k, N), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    stored = torch.stack([gemmtune.pack_int4(w, encoding=encoding) for w in weights]) if encoding else weights  # type: ignore[arg-type]
    for parts in (1, 2):
        scale = torch.rand(G, parts, N) + 0.5
        want = rows_by_loop(a, weights * scale.repeat_interleave(k // parts, 1), ends)
        for _ in range(2):
            assert close(gemmtune.mixed_grouped_mm(a, stored, scale, offs, encoding=encoding), want)  # type: ignore[arg-type]
        strided = scale.mT.contiguous().mT
        got = gemmtune.mixed_grouped_mm(a, stored, strided, offs, encoding=encoding, epilogue=torch.relu)  # type: ignore[arg-type]
        assert close(got, want.relu())
    explained = gemmtune.explain("mixed_grouped_mm", a, stored, scale, offs, encoding=encoding)
    assert str(explained.problem).endswith(f"scale_b[32x1] {G} groups on cpu")


TOKENS, EACH = 9, 2


def experts(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, weights up and down, weights of tokens, their slots in the order of experts, and where experts end."""
    which = torch.randint(G - 1, (TOKENS, EACH), generator=torch.Generator().manual_seed(5))
    order = which.flatten().sort(stable=True)
    ends = torch.bincount(order.values, minlength=G).cumsum(0).int()
    x, up, down = numbers(TOKENS, K, dtype=dtype), numbers(G, 2 * N, K, dtype=dtype).mT, numbers(G, K, N, dtype=dtype).mT
    return x, up, down, torch.rand(TOKENS, EACH) + 0.5, order.indices, ends


def mixture(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
    rows = gemmtune.grouped_mm(x, up, ends, rows=slots // EACH, gated="silu")
    return gemmtune.grouped_mm(rows, down, ends, scatter=(slots, weights))


def mixture_by_loop(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
    rows = torch.zeros(TOKENS, K, dtype=x.dtype)
    for g, (begin, end) in enumerate(spans(ends.tolist(), len(slots))):
        for slot in slots[begin:end].tolist():
            gates, others = (x[slot // EACH] @ up[g]).chunk(2)
            y = (torch.nn.functional.silu(gates) * others) @ down[g]
            rows = rows.index_add(0, torch.tensor([slot // EACH]), (weights.flatten()[slot] * y).unsqueeze(0))
    return rows


def test_a_mixture_of_experts_is_two_calls() -> None:
    given = experts()
    want = mixture_by_loop(*given)
    for _ in range(2):
        assert close(mixture(*given), want)
    *most, slots, ends = given
    assert close(mixture(*most, slots.int(), ends), want)
    narrow = experts(torch.bfloat16)
    wide = [x.double() if x.is_floating_point() else x for x in narrow]
    assert close(mixture(*narrow), mixture_by_loop(*wide))
    behind = ends.clamp(max=11)  # rows behind the last expert count for nothing
    assert close(mixture(*most, slots, behind), mixture_by_loop(*most, slots, behind))
    relu = gemmtune.grouped_mm(given[0], given[1], ends, rows=slots // EACH, epilogue=torch.relu)
    assert close(relu, rows_by_loop(given[0][slots // EACH], given[1], ends.tolist()).relu())
    explained = gemmtune.explain("grouped_mm", given[0], given[1], ends, rows=slots // EACH, gated="silu")
    assert "18x16x24 float32 nt 4 groups rows of 9 gated by silu" in str(explained)


def test_a_mixture_of_experts_has_gradients() -> None:
    *floats, slots, ends = experts()
    ours, theirs = ([x.clone().requires_grad_() for x in floats] for _ in range(2))
    g = numbers(TOKENS, K)
    found = torch.autograd.grad(mixture(*ours, slots, ends), ours, g)
    expected = torch.autograd.grad(mixture_by_loop(*theirs, slots, ends), theirs, g)
    assert all(close(x, y) for x, y in zip(found, expected, strict=True))
    behind = ends.clamp(max=11)  # the gradient of a row that only rows behind the last expert pick is 0
    junk = [torch.full((TOKENS * EACH, K), float("nan")) for _ in range(9)]
    del junk  # memory that the next tensors get
    found = torch.autograd.grad(mixture(*ours, slots, behind), ours, g)
    expected = torch.autograd.grad(mixture_by_loop(*theirs, slots, behind), theirs, g)
    assert all(close(x, y) for x, y in zip(found, expected, strict=True))
    x, up = ours[:2]
    scaled = gemmtune.grouped_mm(x, up, ends, rows=slots // EACH, gated="gelu", epilogue=lambda acc: acc * 2)
    assert scaled.requires_grad


ROUTES: dict[str, Callable[..., Tensor]] = {
    "right": routed,
    "index off by one": lambda a, b, offs, rows, gated: routed(a, b, offs, (rows + 1) % len(a), gated),
    "rows as they are": lambda a, b, offs, rows, gated: routed(a[: len(rows)].repeat(3, 1)[: len(rows)], b, offs, None, gated),
    "index of the last row dropped": lambda a, b, offs, rows, gated: routed(a, b, offs, torch.cat([rows[:-1], rows[:1]]), gated),
    "gates and others exchanged": lambda a, b, offs, rows, gated: routed(a, b.roll(b.shape[-1] // 2, -1), offs, rows, gated),
    "gates and others take turns": lambda a, b, offs, rows, gated: routed(
        a, torch.cat([b[..., ::2], b[..., 1::2]], -1), offs, rows, gated
    ),
    "another function": lambda a, b, offs, rows, gated: routed(a, b, offs, rows, "gelu"),
    "no function": lambda a, b, offs, rows, gated: torch.mul(*routed(a, b, offs, rows).chunk(2, -1)),
}
SUMS: dict[str, Callable[..., Tensor]] = {
    "right": combined,
    "weights of the slot beside": lambda a, b, offs, slots, weights: combined(a, b, offs, slots, weights.flip(1)),
    "weights dropped": lambda a, b, offs, slots, weights: combined(a, b, offs, slots, torch.ones_like(weights)),
    "tokens and places exchanged": lambda a, b, offs, slots, weights: combined(
        a, b, offs, slots % weights.shape[1] * len(weights) + slots // weights.shape[1], weights
    ),
    "rows of no group are added": lambda a, b, offs, slots, weights: combined(
        a, b, torch.cat([offs[:-1], offs.new_full((1,), len(a))]), slots, weights
    ),
    "the last place dropped": lambda a, b, offs, slots, weights: combined(
        a, b, offs, slots, torch.cat([weights[:, :-1], 0 * weights[:, :1]], 1)
    ),
    "sums of 16 bits": lambda a, b, offs, slots, weights: combined(a, b, offs, slots, weights).bfloat16().float(),
}


F8 = torch.float8_e4m3fn
SCALES = {"rows": (1, 160), "parts of columns": (2, 160), "squares": (2, 2)}


@pytest.mark.parametrize("name", SCALES)
def test_8_bit_floats_have_scales_of_rows_or_blocks(name: str) -> None:
    (s, t), k, n, ends, offs = SCALES[name], 200, 160, ENDS["once"], offsets(ENDS["once"])
    a, b = numbers(M, k).to(F8), numbers(G, n, k).to(F8).mT
    scale_a, scale_b = torch.rand(M, s) + 0.5, torch.rand(G, s, t) + 0.5
    along_k, along_n = torch.arange(k) // 128 if s > 1 else torch.zeros(k).long(), torch.arange(n) // (128 if t == 2 else 1)
    wide_a, wide_b = a.double() * scale_a[:, along_k], b.double() * scale_b[:, along_k][:, :, along_n]
    want = rows_by_loop(wide_a, wide_b, ends)
    for _ in range(2):
        assert close(gemmtune.scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype=torch.float32), want)
    assert gemmtune.scaled_grouped_mm(a, b, scale_a, scale_b, offs).dtype == torch.bfloat16
    relu = gemmtune.scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype=torch.float32, epilogue=torch.relu)
    assert close(relu, want.relu())
    if name == "rows":  # as torch has them
        vectors = gemmtune.scaled_grouped_mm(a, b, scale_a[:, 0], scale_b[:, 0], offs, out_dtype=torch.float32)
        assert close(vectors, want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert close(gemmtune.scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype=torch.float32), want)


FLOAT8: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "right": lambda a, b: (a, b),
    "scales of the neighbour": lambda a, b: (a, b.roll(1, 0)),
    "scales of the row beside": lambda a, b: (a.roll(1, 0), b),
    "first scale of a row for all of it": lambda a, b: (a[:, :1].expand_as(a), b),
    "scales of the block beside": lambda a, b: (a, b.roll(1, 2)),
    "scales dropped": lambda a, b: (a, torch.ones_like(b)),
}


def test_scaled_grouped_mm_of_torch_is_offered_where_supported() -> None:
    for problem, arch, message in (
        (Problem.scaled_grouped_mm(16, 256, 256, device_type="cuda"), "sm90", None),
        (Problem.scaled_grouped_mm(16, 256, 256, device_type="cuda"), "sm80", "is tried on SM90 only"),
        (Problem.scaled_grouped_mm(16, 256, 256, scales="block_1x128", device_type="cuda"), "sm90", "one scale for each row"),
        (Problem.scaled_grouped_mm(16, 256, 256, layout="nn", device_type="cuda"), "sm90", "takes a row-major a and column-major"),
        (Problem.scaled_grouped_mm(16, 256, 256, out_dtype=torch.float16, device_type="cuda"), "sm90", "into bfloat16"),
    ):
        offers = load("aten").enumerate(problem, preset(arch), Settings())
        assert [c.name for c in offers.choices] == [f"aten:{'_scaled_grouped_mm' if message is None else 'grouped_composed'}"]
        assert (message or "") in (offers.refusals[0].reason if offers.refusals else "")


def times(a: tuple[int, ...], b: tuple[int, ...], offs: Any) -> Callable[[], Any]:
    return lambda: gemmtune.grouped_mm(numbers(*a), numbers(*b), offs)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no offsets": (times((M, K), (G, K, N), None), r"got a \[19, 24\], b \[4, 24, 16\] and no offs; expected a \[M, K\] with b"),
    "offsets of a batch": (times((G, M, K), (G, K, N), offsets([1] * G)), "which takes no offs"),
    "int64": (times((M, K), (G, K, N), torch.arange(G)), "dtype of offs: got torch.int64, expected int32"),
    "other groups": (times((M, K), (G, K, N), offsets([1, M])), r"offs \[2\]; expected a \[M, K\], b \[G, K, N\] and offs \[G\]"),
    "other terms": (times((M, K), (K + 1, N), offsets([1, M])), "shapes do not fit"),
    "no group": (times((M, K), (G, K, N), offsets([])), r"offs \[0\]; expected a \[M, K\], b \[G, K, N\] and offs \[G\]"),
    "a list": (times((M, K), (G, K, N), [1, 2, 3, M]), "offs must be a torch.Tensor, got list"),
    "scales": (
        lambda: gemmtune.mixed_grouped_mm(numbers(M, 64), torch.ones(G, 64, N).char(), torch.ones(G, 4, N), offsets([M] * G)),
        r"got scale_b \[4, 4, 16\], expected \[G, S, N\] with S one of 1, 2: one number for each column, or for each 32, 64, 128",
    ),
    "scales of 8-bit floats": (
        lambda: gemmtune.scaled_grouped_mm(
            numbers(M, 256).to(F8), numbers(G, 256, N).to(F8), torch.ones(M, 4), torch.ones(G, 4, N), offsets([M] * G)
        ),
        r"scale_a \[19, 4\] and scale_b \[4, 4, 16\], expected \[19, 1\] and \[4, 1, 16\] or \[19, 2\] and \[4, 2, 1\]",
    ),
    "a form without rows": (
        lambda: gemmtune.grouped_mm(numbers(M, K), numbers(K, N), offsets([M]), gated="silu"),
        r"rows, gated and scatter are for groups of rows, a \[M, K\] with b \[G, K, N\]",
    ),
    "another gate": (
        lambda: gemmtune.grouped_mm(numbers(M, K), numbers(G, K, N), offsets([M] * G), gated="relu"),  # type: ignore[arg-type]
        "gated: got 'relu', expected one of 'silu', 'gelu', 'gelu_tanh'",
    ),
    "odd columns": (
        lambda: gemmtune.grouped_mm(numbers(M, K), numbers(G, K, 5), offsets([M] * G), gated="silu"),
        "expected an even number of columns",
    ),
    "picked and added up": (
        lambda: gemmtune.grouped_mm(
            numbers(M, K), numbers(G, K, N), offsets([M] * G), rows=torch.arange(M), scatter=(torch.arange(M), torch.ones(M, 1))
        ),
        "got scatter with rows or gated",
    ),
    "slots": (
        lambda: gemmtune.grouped_mm(numbers(M, K), numbers(G, K, N), offsets([M] * G), scatter=(torch.arange(M), torch.ones(4, 2))),
        r"got slots \[19\] and weights \[4, 2\], expected a slot for each of 8 weights",
    ),
    "index of floats": (
        lambda: gemmtune.grouped_mm(numbers(M, K), numbers(G, K, N), offsets([M] * G), rows=torch.ones(M)),
        "dtype of rows: got torch.float32, expected one of int32, int64",
    ),
    "gradient": (
        lambda: gemmtune.mixed_grouped_mm(
            numbers(M, K).requires_grad_(), torch.ones(G, K, N).char(), torch.ones(G, 1, N), offsets([M] * G)
        ),
        "mixed_grouped_mm: a requires grad, but the operation has no gradient",
    ),
    "one dimension": (times((M,), (G, K, N), offsets([M] * G)), r"got a \[19\]"),
    "float64": (
        lambda: gemmtune.grouped_mm(numbers(M, K).double(), numbers(G, K, N).double(), offsets([M] * G)),
        "dtype of a: got torch.float64, expected one of float32, float16, bfloat16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_is_wrong(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(gemmtune.InvalidProblemError, match=message):
        call()


def test_empty_sizes() -> None:
    for m, k, n in ((0, 4, 3), (5, 0, 3), (5, 4, 0)):
        got = gemmtune.grouped_mm(torch.ones(m, k), torch.ones(2, k, n), offsets([1, m]))
        assert torch.equal(got, torch.full((m, n), float(k)))
    assert torch.equal(gemmtune.grouped_mm(torch.ones(3, 0), torch.ones(0, 2), offsets([0, 0])), torch.zeros(2, 3, 2))
    for m, k, n in itertools.product((0, 3), (0, 4), (0, 6)):
        a, b = (torch.ones(size, requires_grad=True) for size in ((m, k), (2, k, n)))
        slots = torch.arange(m), torch.ones(m, 1, requires_grad=True)
        for words in ({}, {"gated": "silu"}, {"rows": torch.arange(m)}, {"scatter": slots}):
            got = gemmtune.grouped_mm(a, b, offsets([0, m]), **words)
            assert got.shape == (m, n // 2 if "gated" in words else n)
            got.sum().backward()


def test_no_groups() -> None:
    no_offs = torch.empty(0, dtype=torch.int32)
    for left, right in (((M, K), (0, K, N)), ((M, K), (K, N)), ((0, M, K), (K, N))):
        a, b = numbers(*left).requires_grad_(), numbers(*right).requires_grad_()
        expected = torch.nn.functional.grouped_mm(a.detach(), b.detach(), offs=no_offs)
        for call in (gemmtune.grouped_mm, torch.compile(gemmtune.grouped_mm, backend="aot_eager", fullgraph=True)):
            got = call(a, b, no_offs)
            assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
            assert got.untyped_storage().nbytes() == got.nbytes
            assert not got.any()
            for x, gradient in zip((a, b), torch.autograd.grad(got, (a, b), torch.ones_like(got)), strict=True):
                assert torch.equal(gradient, torch.zeros_like(x))
        out = torch.ones_like(expected)
        assert gemmtune.grouped_mm(a.detach(), b.detach(), no_offs, out=out) is out
        assert not out.any()
    rows = numbers(M, K), torch.empty(0, K, N)
    assert gemmtune.grouped_mm(*rows, no_offs, gated="silu").shape == (M, N // 2)
    assert gemmtune.grouped_mm(*rows, no_offs, rows=torch.zeros(3, dtype=torch.int64), epilogue=torch.exp).eq(1).all()
    assert not gemmtune.grouped_mm(*rows, no_offs, scatter=(torch.arange(M), torch.ones(M, 1))).any()


def test_tuning_finds_a_right_choice_and_explain_knows_it() -> None:
    a, b, offs = numbers(M, K), numbers(G, N, K).mT, offsets(ENDS["once"])
    stated = Problem.grouped_mm(M, N, K, groups=G, dtype=torch.float32, device_type="cpu")
    with settings.patch(tune="on_miss", verify=True, tune_in_subprocess=False):
        assert close(gemmtune.grouped_mm(a, b, offs), rows_by_loop(a, b, ENDS["once"]))
        [found] = gemmtune.tune(stated, progress=False)
        assert found.source == "store"
        assert {o.status for o in found.outcomes} == {Status.OK}
        [columns] = gemmtune.tune("grouped_mm", b.mT, a.t(), offs, progress=False)
    assert gemmtune.explain("grouped_mm", a, b, offs).pick == found.pick
    assert gemmtune.explain(gemmtune.grouped_mm, b.mT, a.t(), offs).problem == columns.problem
    assert gemmtune.explain("grouped_mm", a.t(), a, offs=offs).problem.op == "grouped_k_mm"  # type: ignore[union-attr]


PROBLEMS = {
    "rows-bf16": Problem.grouped_mm(37, 24, 40, groups=5, device_type="cpu"),
    "rows-fp32-few": Problem.grouped_mm(3, 17, 33, groups=9, dtype=torch.float32, layout="tn", device_type="cpu"),
    "rows-one-group": Problem.grouped_mm(16, 24, 40, groups=1, dtype=torch.float16, layout="nn", device_type="cpu"),
    "rows-int8": Problem.mixed_grouped_mm(21, 24, 40, groups=4, device_type="cpu"),
    "rows-int4": Problem.mixed_grouped_mm(
        9, 24, 64, groups=3, encoding="int4", scales="group_32", dtype=torch.float16, layout="nn", device_type="cpu"
    ),
    "terms-fp16": Problem.grouped_k_mm(24, 16, 40, groups=5, dtype=torch.float16, device_type="cpu"),
    "terms-fp32": Problem.grouped_k_mm(7, 9, 33, groups=3, dtype=torch.float32, layout="nt", device_type="cpu"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_verification_accepts_torch(name: str) -> None:
    problem = PROBLEMS[name]
    assert Problem.from_json(problem.to_json()) == problem
    verifier = Verifier(problem, CPU)
    choices = load("aten").enumerate(problem, detect("cpu"), Settings()).choices
    found = {choice.name: verifier.check(choice, choice.build()) for choice in choices}
    assert {verdict.status for verdict in found.values()} == {Status.OK}, found
    assert [choice.baseline for choice in choices].count(True) == 1


NARROW: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "right": lambda b, scale: (b, scale),
    "scales of the neighbour": lambda b, scale: (b, scale.roll(1, 0)),
    "first scale of a column for all of it": lambda b, scale: (b, scale[:, :1].expand_as(scale)),
    "scales of the column beside": lambda b, scale: (b, scale.roll(1, 2)),
    "halves of bytes exchanged": lambda b, scale: (b >> 4 | b << 4, scale),
    "scales dropped": lambda b, scale: (b, torch.ones_like(scale)),
}


def copied(mutant: Callable[..., Tensor]) -> Callable[..., None]:
    def write(out: Tensor, *tensors: Tensor) -> None:
        out.copy_(mutant(*tensors))

    return write


F32: dict[str, Any] = {"dtype": torch.float32, "device_type": "cpu"}
MULTIPLIED = {
    "rows": Problem.grouped_mm(24, 12, 40, groups=5, **F32),
    "terms": Problem.grouped_k_mm(24, 12, 40, groups=5, **F32),
    "picked": Problem.routed_grouped_mm(24, 12, 40, groups=5, tokens=11, gated="silu", **F32),
    "added up": Problem.combined_grouped_mm(24, 12, 40, groups=5, tokens=8, **F32),
    "8-bit floats": Problem.scaled_grouped_mm(21, 136, 160, groups=4, scales="block_128x128", device_type="cpu"),
    "narrow": Problem.mixed_grouped_mm(21, 12, 64, groups=4, encoding="int4", scales="group_32", **F32),
}
WRONG: dict[tuple[str, str], Callable[..., None]] = {
    **MUTANTS,
    **{("picked", name): copied(functools.partial(mutant, gated="silu")) for name, mutant in ROUTES.items()},
    **{("added up", name): copied(mutant) for name, mutant in SUMS.items()},
    **{
        ("8-bit floats", name): copied(lambda a, b, x, y, offs, mutant=mutant: scaled_grouped(a, b, *mutant(x, y), offs))
        for name, mutant in FLOAT8.items()
    },
    **{
        ("narrow", name): copied(
            lambda a, b, x, offs, mutant=mutant: grouped_product(a, widened(*mutant(b, x), "int4", a.dtype), offs)
        )
        for name, mutant in NARROW.items()
    },
}


@pytest.mark.rotates(2)
@pytest.mark.parametrize("mutant", WRONG, ids=" ".join)
def test_verification_finds_what_is_wrong(mutant: tuple[str, str]) -> None:
    kind, name = mutant
    problem = MULTIPLIED[kind]
    [choice] = [c for c in load("aten").enumerate(problem, detect("cpu"), Settings()).choices if "composed" in c.name]

    def run(out: Tensor, tensors: Tensors, scalars: tuple[float, ...]) -> None:
        WRONG[mutant](out, *tensors)

    verdict = Verifier(problem, CPU).check(choice, Kernel(run=run))
    assert (verdict.status is Status.OK) == (name == "right"), verdict


def test_other_backends_refuse_what_is_not_theirs() -> None:
    makes = (Problem.grouped_mm, Problem.mixed_grouped_mm, Problem.grouped_k_mm, Problem.scaled_grouped_mm)
    makes += (Problem.routed_grouped_mm, Problem.combined_grouped_mm)
    for make, (arch, kind) in itertools.product(makes, (("sm90", "cuda"), ("gfx942", "cuda"), ("avx512", "cpu"))):
        problem = make(16, 256, 256, device_type=kind)
        for name in BACKENDS:
            offers = load(name).enumerate(problem, preset(arch), Settings())
            plain = problem.op in ("grouped_mm", "grouped_k_mm")
            by_index = problem.op in ("routed_grouped_mm", "combined_grouped_mm")
            ours = (name == "cuda" and arch == "sm90" and plain) or (name == "cpp" and kind == "cpu" and not by_index)
            assert bool(offers.choices) == (name in ("aten", "triton") or ours), (name, arch)


def test_torch_is_left_out_where_it_reads_offsets_on_the_host_or_asserts_what_they_are() -> None:
    for problem, arch, message in (
        (Problem.grouped_mm(16, 256, 256, device_type="cuda"), "sm90", None),
        (Problem.grouped_k_mm(256, 256, 64, device_type="cuda"), "sm90", None),
        (Problem.grouped_mm(16, 256, 256, device_type="cuda"), "sm80", "reads the offsets on the host"),
        (Problem.grouped_mm(16, 256, 256, dtype=torch.float16, device_type="cuda"), "sm90", "reads the offsets on the host"),
        (Problem.grouped_mm(16, 256, 256, layout="tt", device_type="cuda"), "sm90", "groups may begin at any address"),
        (Problem.grouped_k_mm(256, 256, 64, layout="nn", device_type="cuda"), "sm90", "groups may begin at any address"),
    ):
        offers = load("aten").enumerate(problem, preset(arch), Settings())
        assert [choice.name for choice in offers.choices] == [f"aten:{'_grouped_mm' if message is None else 'grouped_composed'}"]
        assert offers.choices[0].baseline
        assert (message is None) == (not offers.refusals)
        assert message is None or message in offers.refusals[0].reason


def test_a_table_of_every_number_of_rows_serves_calls() -> None:
    stated = Problem.grouped_mm(8, N, K, groups=G, dtype=torch.float32, device_type="cpu")
    with settings.patch(tune="on_miss", verify=True, tune_in_subprocess=False, rows="shared"):
        gemmtune.tune(stated, m=range(2, 9), progress=False)
        b, offs = numbers(G, N, K).mT, offsets([1, 1, 4, 7])
        assert close(gemmtune.grouped_mm(numbers(7, K), b, offs), rows_by_loop(numbers(7, K), b, [1, 1, 4, 7]))
        explained = gemmtune.explain("grouped_mm", numbers(5, K), b, offs)
    assert "(from the table of its range)" in str(explained)
