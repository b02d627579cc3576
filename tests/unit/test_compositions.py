"""The operations by torch's own calls: which call serves which operands, on a GPU too, and what it makes of their scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gemmtune
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Problem, compositions, grouped_compositions
from gemmtune.problem.compositions import (
    _plain,
    dequantized,
    int_composed,
    int_product,
    over_blocks,
    scaled_product,
    sums_of_blocks,
)
from gemmtune.problem.grouped_compositions import _torch_takes, added_alike, added_by_token
from gemmtune.problem.scales import BLOCKS_OF_A, BLOCKS_OF_B, BLOCKS_OF_WEIGHTS

F32, F16, BF16, INT8, UINT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8
E4M3 = torch.float8_e4m3fn


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says to be on a GPU."""

    is_cuda = True


def on_cuda(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(OnCuda)


def integers(rows: int, cols: int, *, stride: tuple[int, int] | None = None, offset: int = 0, cuda: bool = False) -> torch.Tensor:
    memory = torch.randint(-128, 128, (offset + 4096,), dtype=INT8, generator=torch.Generator().manual_seed(rows))
    made = memory.as_strided((rows, cols), stride or (cols, 1), offset)
    return on_cuda(made) if cuda else made


@pytest.mark.parametrize(
    ("m", "n", "k", "cuda", "own"),
    [
        (17, 8, 16, True, True), (16, 8, 16, True, False), (17, 12, 16, True, False), (17, 8, 12, True, False),
        (1, 3, 5, False, True), (17, 8, 0, True, False), (2, 3, 0, False, False),
    ],
)  # fmt: skip
def test_torchs_product_of_integers_serves_where_it_is_right(
    m: int, n: int, k: int, cuda: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        called.append(True)
        return (a.double() @ b.double()).to(torch.int32)

    monkeypatch.setattr(torch, "_int_mm", product)
    a, b = integers(m, k, cuda=cuda), integers(k, n, cuda=cuda)
    got = int_product(a, b)
    assert bool(called) == own
    assert got.dtype == torch.int32
    assert torch.equal(got, (a.long() @ b.long()).int())


@pytest.mark.parametrize(
    ("size", "stride", "offset", "cpu", "cuda"),
    [
        # is it taken as it is: on a CPU, on CUDA
        ((4, 6), (6, 1), 0, True, True),
        ((4, 6), (6, 1), 16, True, True),
        ((4, 6), (6, 1), 8, True, False),
        ((4, 6), (1, 4), 0, True, True),
        ((6, 4), (1, 6), 0, True, False),
        ((2, 4), (1, 2), 16, True, False),
        ((4, 6), (8, 1), 0, False, False),
        ((4, 6), (1, 8), 0, False, False),
        ((4, 6), (0, 1), 0, False, False),
        ((1, 6), (1, 1), 0, False, False),
        ((1, 6), (6, 1), 0, True, True),
        ((4, 1), (1, 4), 0, False, False),
        ((4, 1), (1, 1), 0, True, True),
    ],
)
def test_operands_that_torchs_product_does_not_take_are_copied(
    size: tuple[int, int], stride: tuple[int, int], offset: int, cpu: bool, cuda: bool
) -> None:
    for taken, kind in ((cpu, False), (cuda, True)):
        x = integers(*size, stride=stride, offset=offset, cuda=kind)
        plain = _plain(x)
        assert (plain is x) == taken
        assert torch.equal(plain, x)
        assert taken or plain.stride() == (size[1], 1)


def test_a_scale_is_repeated_over_its_block() -> None:
    assert over_blocks(torch.tensor([[3.0]]), (4, 6), BLOCKS_OF_A, "scale_a").shape == ()
    rows = torch.tensor([[1.0], [2.0]])
    assert over_blocks(rows, (2, 300), BLOCKS_OF_A, "scale_a") is rows
    scale = torch.arange(6.0).view(2, 3)
    repeated = over_blocks(scale, (2, 300), BLOCKS_OF_A, "scale_a")
    assert repeated.shape == (2, 300)
    for col, block in ((0, 0), (127, 0), (128, 1), (255, 1), (256, 2), (299, 2)):
        assert repeated[:, col].tolist() == scale[:, block].tolist()
    square = over_blocks(scale, (140, 300), BLOCKS_OF_B, "scale_b")
    assert square.shape == (140, 300)
    assert [square[row, 299].item() for row in (0, 127, 128, 139)] == [2, 2, 5, 5]
    with pytest.raises(
        InvalidProblemError, match=r"scale_a: got shape \[2, 4\], which does not fit an operand of shape \[2, 300\]"
    ):
        over_blocks(torch.ones(2, 4), (2, 300), BLOCKS_OF_A, "scale_a")


def test_weights_are_computed_in_the_widest_dtype_and_rounded_at_the_end() -> None:
    b, third = torch.tensor([[1, -2], [7, 100]], dtype=INT8), 1 / 3
    assert dequantized(b, None, None, "", F16).dtype == F16
    for scale_dtype, wide in ((F32, F32), (F16, F16)):
        scale = torch.full((1, 2), third, dtype=scale_dtype)
        expected = (b.to(wide) * scale).to(F16)
        assert torch.equal(dequantized(b, scale, None, "", F16, legal=BLOCKS_OF_WEIGHTS), expected)
    scale, zero = torch.full((1, 2), third, dtype=F16), torch.full((1, 2), 0.1, dtype=F32)
    assert torch.equal(dequantized(b, scale, zero, "", F16), ((b.float() - zero) * scale.float()).half())
    packed = torch.tensor([[0x21], [0xF8]], dtype=UINT8)
    assert dequantized(packed, torch.ones(1, 1), None, "int4", F32).flatten().tolist() == [1, 2, -8, -1]


@pytest.mark.parametrize("k", [128, 300])
@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("scales", ["tensor", "row", "blocks", "square"])
def test_scaled_products_are_those_of_the_scaled_numbers(k: int, cuda: bool, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6")  # where products of float32 have no dtype of their own for the result
    generator = torch.Generator().manual_seed(k)
    m, n, blocks = 5, 6, -(-k // 128)
    a, b = (torch.randint(-4, 5, size, generator=generator).float().to(E4M3) for size in ((m, k), (k, n)))
    sizes = {
        "tensor": ((1, 1), (1, 1)),
        "row": ((m, 1), (1, n)),
        "blocks": ((m, blocks), (blocks, n)),
        "square": ((m, blocks), (blocks, 1)),
    }
    scale_a, scale_b = (torch.exp2(torch.randint(-2, 3, size, generator=generator).float()) for size in sizes[scales])
    full_a, full_b = (scale_a if scale_a.shape[1] == 1 else scale_a.repeat_interleave(128, 1)[:, :k]), scale_b
    full_b = scale_b if scale_b.shape[0] == 1 else scale_b.repeat_interleave(128, 0)[:k]
    expected = (a.double() * full_a) @ (b.double() * full_b)
    given = [on_cuda(x) if cuda else x for x in (a, b, scale_a, scale_b)]
    summed: list[bool] = []
    original = sums_of_blocks
    monkeypatch.setattr(compositions, "sums_of_blocks", lambda *args: summed.append(True) or original(*args))
    got = scaled_product(*given)
    assert got.dtype == F32
    assert torch.equal(got.double(), expected)
    assert bool(summed) == (cuda and (scales in ("blocks", "square")) and k > 128)


def test_a_scaled_product_over_nothing_is_0() -> None:
    got = scaled_product(torch.empty(2, 0).to(E4M3), torch.empty(0, 3).to(E4M3), torch.ones(1, 1), torch.ones(1, 1))
    assert torch.equal(got, torch.zeros(2, 3))


def test_outside_of_function_transforms_integers_go_to_torchs_product(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    original = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: called.append(True) or original(a, b))
    a, b = integers(17, 16), integers(16, 8)
    expected = (a.long() @ b.long()).int()
    assert torch.equal(int_composed(a, b), expected)
    assert called
    called.clear()
    assert torch.equal(torch.vmap(lambda x: int_composed(x, b))(a.unsqueeze(0))[0], expected)
    assert not called


@pytest.mark.parametrize(("available", "kind"), [(True, "cuda"), (False, "cpu")])
def test_problems_are_of_the_gpu_if_there_is_one(available: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert Problem.mm(4, 5, 6).device_type == kind
    assert Problem.mm(4, 5, 6, device_type="cpu").device_type == "cpu"


@pytest.mark.parametrize(
    ("dtype", "a_cols", "b_size", "takes"),
    [
        (BF16, 8, (4, 8, 16), True), (F32, 8, (4, 8, 16), False), (BF16, 7, (4, 7, 16), False), (BF16, 8, (4, 8, 12), False),
        (BF16, 8, (8, 16), True),
    ],
)  # fmt: skip
def test_grouped_products_go_to_torch_where_it_takes_both_matrices(
    dtype: torch.dtype, a_cols: int, b_size: tuple[int, ...], takes: bool
) -> None:
    a, b, offs = torch.ones(16, a_cols, dtype=dtype), torch.ones(b_size, dtype=dtype), torch.tensor([4, 16], dtype=torch.int32)
    assert _torch_takes(a, b, offs) == takes
    seen: list[bool] = []
    torch.vmap(lambda x: seen.append(_torch_takes(x, b, offs)) or x)(a.unsqueeze(0))
    assert seen == [False]


def test_offsets_are_read_where_torch_need_not_see_it() -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    offs, seen = torch.tensor([1, 3], dtype=torch.int32), []
    assert grouped_compositions.readable(offs) == [1, 3]
    with Watching():
        assert grouped_compositions.readable(offs) is None
    torch.func.vmap(lambda x: seen.append(grouped_compositions.readable(x)) or x)(offs.expand(2, 2))
    assert seen == [None]
    assert grouped_compositions.readable(offs.to("meta")) is None


def test_one_pass_gets_the_blocks_of_the_unpacked_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    made = gemmtune.QuantizedWeight.quantize(torch.randn(64, 40), "int4", scales="group_32")
    kernel = mock.Mock()
    monkeypatch.setattr(compositions, "load", lambda name: kernel)
    compositions._in_one_pass(made.tensor, made.scales, None, made.encoding, torch.float32, BLOCKS_OF_WEIGHTS)
    assert kernel.dequantize.call_args.args[-1] == ((32, 1), (32, 1))


@pytest.mark.parametrize("add", [added_by_token, added_alike])
def test_rows_of_a_token_are_weighted_and_added_up_in_the_order_of_its_slots(add: Callable[..., torch.Tensor]) -> None:
    product, weights = torch.randn(6, 4).bfloat16(), torch.tensor([[1.0, 0.5], [2.0, 4.0], [-1.0, 8.0]])
    product[5] = torch.nan  # behind the last group
    slots, offs = torch.tensor([3, 0, 5, 2, 1, 4]), torch.tensor([2, 5], dtype=torch.int32)
    rows = product.float().masked_fill(product.isnan(), 0)[slots.argsort()].view(3, 2, 4)
    want = rows[:, 0] * weights[:, :1] + rows[:, 1] * weights[:, 1:]
    assert torch.equal(add(product, offs, slots, weights), want.bfloat16())
