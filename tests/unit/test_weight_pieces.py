"""Pieces of a QuantizedWeight are its dequantized pieces, joined they are the weight again, and torch alone sees floats."""

from __future__ import annotations

import itertools
from types import FunctionType

import pytest
import torch
from torch._ops import OpOverload

from gemmtune import QuantizedWeight
from gemmtune.errors import InvalidProblemError
from gemmtune.quantized.asker import asker
from gemmtune.quantized.pieces import joined, padded, piece, split, zeros
from gemmtune.quantized.sharding import sharded
from gemmtune.quantized.views import DequantizedView

aten = torch.ops.aten
KINDS = ("int8", "uint8", "int4", "uint4", "float8_e4m3fn")
SCALES = ("tensor", "column", "group_32", "group_64", "group_128", "block_128x128")


def made(kind: str, scales: str, *, transposed: bool, experts: bool = False, n: int = 256, k: int = 256) -> QuantizedWeight:
    values = torch.randn(*((4,) if experts else ()), n, k, generator=torch.Generator().manual_seed(1))
    weight = QuantizedWeight.quantize(values.mT if transposed else values.mT.contiguous(), kind, scales=scales)
    return weight.mT if transposed else weight


def weights():
    """Yield a weight of each kind, scale and layout, with a name."""
    for kind, scales, transposed, experts in itertools.product(KINDS, SCALES, (False, True), (False, True)):
        try:
            weight = made(kind, scales, transposed=transposed, experts=experts)
        except InvalidProblemError:
            continue  # such a weight does not exist
        yield f"{kind} {scales} {'[G, N, K]' if transposed else '[G, K, N]'} experts={experts}", weight


def same(x: QuantizedWeight, y: QuantizedWeight) -> bool:
    """Return True for equal parts."""
    pairs = zip(x.parts, y.parts, strict=True)
    return x.shape == y.shape and x.stride() == y.stride() and all(torch.equal(a.float(), b.float()) for a, b in pairs)


def test_pieces_and_joins_of_every_kind():
    for name, weight in weights():
        dense = weight.dequantize()
        for dim in range(weight.dim()):
            half = weight.shape[dim] // 2
            pieces = split(weight, dim, [half, half])
            assert pieces is not None, (name, dim)
            for i, x in enumerate(pieces):
                assert torch.equal(x.dequantize(), dense.narrow(dim, i * half, half)), (name, dim, i)
            again = joined([x.clone() for x in pieces], dim)
            assert again is not None, (name, dim)
            assert torch.equal(again.dequantize(), dense), (name, dim)
            assert weight.dim() == 3 or again.tensor.stride() == weight.tensor.stride(), (name, dim)
            longer = padded(pieces[0], dim, half).dequantize()
            assert torch.equal(longer.narrow(dim, 0, half), dense.narrow(dim, 0, half)), (name, dim)
            assert longer.shape == weight.shape
            assert zeros(pieces[0], weight.shape).shape == weight.shape


def test_what_fsdp_gathers_is_the_weight_again():
    for name, weight in weights():
        if not weight.is_contiguous():
            continue
        shards = split(weight, 0, [len(weight) // 2] * 2)
        assert shards is not None, name
        sent = [shard.fsdp_pre_all_gather(None, None, None, None, None)[0] for shard in shards]
        gathered = [torch.cat(parts) for parts in zip(*sent, strict=True)]
        found = shards[1].fsdp_post_all_gather(gathered, None, weight.dtype)
        assert found is not None
        assert same(found[0], weight), name
        for part in found[1]:
            part.view(torch.uint8).zero_()
        assert shards[1].fsdp_post_all_gather(gathered, None, weight.dtype, out=found[0]) is None
        assert same(found[0], weight), name


def test_groups_that_a_boundary_cuts_get_smaller():
    weight = made("int4", "group_128", transposed=True, k=384)
    for boundary, groups in ((128, 3), (192, 6), (224, 12)):
        pieces = split(weight, 1, [boundary, 384 - boundary])
        assert pieces is not None
        assert sum(x.scales.shape[0] for x in pieces) == groups
        assert torch.equal(torch.cat([x.dequantize() for x in pieces], 1), weight.dequantize())
    assert split(weight, 1, [48, 336]) is None
    assert piece(weight, 1, 64, 128) is None
    assert piece(made("int4", "column", transposed=False), 0, 3, 6) is None, "a byte has two numbers"


def of_module(name: str, call):
    """Return the function as if the module of this name had it."""
    return FunctionType(call.__code__, {**call.__globals__, "__name__": name}, closure=call.__closure__)


def asked(name: str, call, *args):
    """Call a function as the module of this name does."""
    return of_module(name, call)(*args)


def test_only_torch_distributed_gets_quantized_pieces():
    weight = made("int8", "column", transposed=True)
    fsdp, tensor = "torch.distributed.fsdp._fully_shard._fsdp_common", "torch.distributed.tensor.placement_types"
    for name, kind in ((tensor, QuantizedWeight), (fsdp, QuantizedWeight), ("model", DequantizedView),
                       ("torch.distributed.tensor._dispatch", DequantizedView)):  # fmt: skip
        assert {type(x) for x in asked(name, lambda: torch.chunk(weight, 2))} == {kind}
        assert type(asked(name, lambda: weight.narrow(0, 0, 4))) is kind
    for make in (lambda: weight.new_zeros(weight.shape), lambda: torch.empty_like(weight)):
        assert type(asked("model", make)) is torch.Tensor
        assert type(asked(tensor, make)) is QuantizedWeight
    for between, found in (("torch.functional", tensor), ("torch.nn.modules.module", ""), ("model", "")):
        inner = of_module(between, lambda: asker())
        assert asked(tensor, lambda inner: inner(), inner) == found


REFUSED = {
    "fully_shard: columns": ("fsdp._fully_shard._x", lambda w: w.chunk(2, 1), r"ignored_params=\{weight\}"),
    "fully_shard: unequal rows": ("fsdp._fully_shard._x", lambda w: w.chunk(3), r"ignored_params=\{weight\}"),
    "fully_shard: a rank without rows": ("fsdp._fully_shard._x", lambda w: w.new_empty(0), r"ignored_params=\{weight\}"),
    "FullyShardedDataParallel": ("fsdp._flat_param", lambda w: w.as_strided((4,), (1,)), "fully_shard, or leave .* ignored_states"),
    "a cut group": ("tensor.placement_types", lambda w: w.chunk(7, 1), "shard dimension 0 .* groups of 32"),
    "every second row": ("tensor.placement_types", lambda w: w[::2], "shard dimension 0"),
    "floats": ("checkpoint.planner", lambda w: w.sum(), r"give its parts, or dequantize\(\) of it"),
    "copied floats": ("_state_dict_utils", lambda w: w.copy_(torch.zeros(w.shape)), "without broadcast_from_rank0"),
    "other weights": (
        "tensor.placement_types", lambda w: torch.cat([w, made("uint8", "column", transposed=True)]), "shard dimension 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_remedy(case):
    module, call, remedy = REFUSED[case]
    weight = made("int4", "group_32", transposed=True)
    message = rf"got QuantizedWeight\(\[256, 256\] int4.* from torch\.distributed\.{module}, expected .*{remedy}"
    with pytest.raises(InvalidProblemError, match=message):
        asked(f"torch.distributed.{module}", call, weight)


def test_functions_without_a_rule_are_refused():
    weight = made("int8", "column", transposed=True)
    assert isinstance(aten.sum.default, OpOverload)
    with pytest.raises(InvalidProblemError, match=r"aten\.sum\.default: got QuantizedWeight"):
        sharded(QuantizedWeight, aten.sum.default, (weight,), {})
