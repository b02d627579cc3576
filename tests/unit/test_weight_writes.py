"""Each way to write into a QuantizedWeight or a part of one is refused, or changes the weight. None is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.errors import InvalidProblemError

ROWS = torch.tensor([0, 1])


@pytest.fixture(autouse=True)
def never(own_store):
    with settings.patch(tune="never"):
        yield


def of_kind(kind: str, *, experts: bool, prepacked: bool) -> QuantizedWeight:
    """A weight laid out as that of an ``nn.Linear``, or of experts: [16, 64] or [4, 16, 64]."""
    values = torch.rand(*((4,) if experts else ()), 16, 64, generator=torch.Generator().manual_seed(1)) + 0.25
    weight = QuantizedWeight.quantize(values.mT, kind, scales="column" if kind.startswith("f") else "group_32")
    return (gemmtune.prepack(weight, op="mixed_mm") if prepacked else weight).mT


def fill_mask(w):
    w[torch.ones(w.shape[0], dtype=torch.bool)] = 0


def add_to_row(w):
    w[0] += 1


def add_to_weight(w):
    w += 1


def fill_chain(w):
    w[0].reshape(-1)[1:].unsqueeze(0).mT.zero_()


def multiply_into(w):
    out = w if w.dim() == 2 else w.flatten(0, 1)
    gemmtune.mm(torch.ones(len(out), 8), torch.ones(8, out.shape[1]), out=out)


def optimized(make, **options):
    def step(w):
        parameter = nn.Parameter(w[0])
        parameter.grad = torch.ones(parameter.shape)
        make([parameter], lr=1.0, **options).step()

    return step


FORMS = {
    "int": lambda w: w.__setitem__(0, 0),
    "slice": lambda w: w.__setitem__(slice(0, 4), 0),
    "slice of columns": lambda w: w.__setitem__((slice(None), 1), 0),
    "ellipsis": lambda w: w.__setitem__(..., 0),
    "None": lambda w: w.__setitem__(None, 0),
    "mask": fill_mask,
    "tensor": lambda w: w.__setitem__(ROWS, 0),
    "list": lambda w: w.__setitem__([0, 1], 0),
    "select": lambda w: w.select(-1, 0).zero_(),
    "narrow": lambda w: w.narrow(0, 0, 2).zero_(),
    "split": lambda w: w.split(1)[0].zero_(),
    "split of sizes": lambda w: w.split([1, w.shape[0] - 1])[0].zero_(),
    "unsafe_split": lambda w: w.unsafe_split(1)[0].zero_(),
    "chunk": lambda w: w.chunk(2)[0].zero_(),
    "unsafe_chunk": lambda w: w.unsafe_chunk(2)[0].zero_(),
    "tensor_split": lambda w: w.tensor_split(2)[0].zero_(),
    "hsplit": lambda w: w.hsplit(2)[0].zero_(),
    "unbind": lambda w: w.unbind()[0].zero_(),
    "iteration": lambda w: next(iter(w)).zero_(),
    "unsqueeze": lambda w: w.unsqueeze(0).zero_(),
    "squeeze": lambda w: w.squeeze().zero_(),
    "view": lambda w: w.view(w.shape[0], -1, 2).zero_(),
    "view_as": lambda w: w.view_as(torch.empty(w.shape)).zero_(),
    "view of a dtype": lambda w: w.view(torch.int32).zero_(),
    "reshape": lambda w: w.reshape(-1).zero_(),
    "flatten": lambda w: w.flatten().zero_(),
    "ravel": lambda w: w.ravel().zero_(),
    "unflatten": lambda w: w.unflatten(0, (1, -1)).zero_(),
    "expand": lambda w: w.expand(2, *w.shape)[0].zero_(),
    "broadcast_to": lambda w: torch.broadcast_to(w, (1, *w.shape)).zero_(),
    "diagonal": lambda w: w.diagonal().zero_(),
    "fill_diagonal_": lambda w: w.select(0, 0).view(8, 8).fill_diagonal_(0) if w.dim() == 2 else w[0].fill_diagonal_(0),
    "as_strided": lambda w: w.as_strided((2, 2), (1, 1)).zero_(),
    "transpose": lambda w: w.transpose(0, -1).zero_(),
    "movedim": lambda w: w.movedim(0, -1).zero_(),
    "swapaxes": lambda w: w.swapaxes(0, -1).zero_(),
    "permute": lambda w: w.permute(*reversed(range(w.dim()))).zero_(),
    "mT": lambda w: w.mT.zero_(),
    "unfold": lambda w: w.unfold(0, 2, 1).zero_(),
    "real": lambda w: w.real.zero_(),
    "contiguous": lambda w: w.contiguous().zero_() if w.is_contiguous() else w.zero_(),
    "to": lambda w: w.to(w.dtype).zero_(),
    "alias": lambda w: torch.ops.aten.alias(w).zero_(),
    "lift_fresh": lambda w: torch.ops.aten.lift_fresh(w).zero_(),
    "detach": lambda w: w.detach()[0].zero_(),
    "data": lambda w: w.data[0].zero_(),
    "data of a view": lambda w: w[:2].data.zero_(),
    "detached view": lambda w: w[:2].detach().zero_(),
    "chain": fill_chain,
    "out=": lambda w: torch.add(torch.ones(w[:1].shape), 1, out=w[:1]),
    "out= of the weight": lambda w: torch.add(torch.ones(w.shape), 1, out=w),
    "out= of gemmtune": multiply_into,
    "foreach": lambda w: torch._foreach_zero_(list(w.unbind())),
    "foreach copy": lambda w: torch._foreach_copy_([w[:1], w[1:2]], [torch.zeros(w[:1].shape)] * 2),
    "copy of floats": lambda w: w[0].copy_(torch.zeros(w[0].shape)),
    "copy between views": lambda w: w[:1].copy_(w[1:2]),
    "set_": lambda w: w.set_(torch.zeros(w.shape)),
    "set_ of a view": lambda w: w[:1].set_(torch.zeros(w.shape)),
    "set_ of another": lambda w: torch.zeros(1).set_(w).zero_(),
    "set_ of another to a view": lambda w: torch.zeros(1).set_(w[:1]).zero_(),
    "data =": lambda w: setattr(w, "data", torch.zeros(w.shape)),
    "data = of a view": lambda w: setattr(w[:1], "data", torch.zeros(w[:1].shape)),
    "resize_": lambda w: w.resize_(1),
    "init": lambda w: nn.init.zeros_(w[:1]),
    "init normal": lambda w: nn.init.normal_(w[:2]),
    "index_put_": lambda w: w.index_put_((ROWS,), torch.tensor(0.0)),
    "index_fill_": lambda w: w[:2].index_fill_(0, ROWS, 0),
    "masked_fill_": lambda w: w.masked_fill_(torch.ones(w.shape, dtype=torch.bool), 0),
    "scatter_": lambda w: w.scatter_(0, torch.zeros(w.shape, dtype=torch.int64), 0),
    "clamp_": lambda w: w[:2].clamp_(0, 0),
    "w += 1": add_to_weight,
    "w[0] += 1": add_to_row,
    "functional_call": lambda w: torch.func.functional_call(Filling(), {"weight": w}, ()),
    "functionalize": lambda w: torch.func.functionalize(lambda x: x[0].zero_())(w),
    "vmap": lambda w: torch.vmap(lambda x: x[:1].zero_())(w),
    "SGD": optimized(torch.optim.SGD),
    "SGD, foreach": optimized(torch.optim.SGD, foreach=True),
    "AdamW, fused": optimized(torch.optim.AdamW, fused=True),
    "share_memory_": lambda w: w.share_memory_(),
    "share_memory_ of a view": lambda w: w[:1].share_memory_(),
    "dlpack": lambda w: torch.from_dlpack(w).zero_(),
    "dlpack of a view": lambda w: torch.from_dlpack(w[:1]).zero_(),
    "numpy": lambda w: w.numpy().fill(0),
}
"""Forms of Python that write into a weight, or into a part of it."""

REMEDIES = ("dequantize()", "clone()", "quantize then", "give a plain tensor", "same kind")


class Filling(nn.Module):
    """A module whose forward writes into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self) -> None:
        self.weight[0].zero_()


def lost_writes(weight: QuantizedWeight, pick, mode) -> list[str]:
    """The forms that are neither refused with a remedy nor seen in the weight."""
    lost = []
    before = weight.dequantize().clone()
    for name, write in FORMS.items():
        try:
            with mode():
                write(pick(weight))
        except InvalidProblemError as error:
            if not any(remedy in str(error) for remedy in REMEDIES):
                lost.append(f"{name}: no remedy in {error}")
        except RuntimeError as error:
            if not _plain_raises(write, pick(weight), mode):
                lost.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if torch.equal(weight.dequantize(), before) and _plain_changes(write, pick(weight), mode):
                lost.append(f"{name}: lost")
        if not torch.equal(weight.dequantize(), before):
            lost.append(f"{name}: it writes; say so in the test")
            before = weight.dequantize().clone()
    return lost


def _floats(weight: QuantizedWeight) -> torch.Tensor:
    return torch.empty_strided(weight.shape, weight.stride()).copy_(weight.dequantize())


def _plain_raises(write, weight: QuantizedWeight, mode) -> bool:
    try:
        with mode():
            write(_floats(weight))
    except RuntimeError:
        return True
    return False


def _plain_changes(write, weight: QuantizedWeight, mode) -> bool:
    plain = _floats(weight)
    before = plain.clone()
    with mode():
        write(plain)
    return not torch.equal(plain, before)


KINDS = [("int8", False, False), ("int8", False, True), ("int4", False, False), ("float8_e4m3fn", False, False),
         ("int8", True, False), ("int4", True, False), ("float8_e4m3fn", True, False)]  # fmt: skip


@pytest.mark.rotates(9)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(("kind", "experts", "prepacked"), KINDS)
def test_no_write_is_lost(kind, experts, prepacked, mode):
    weight = of_kind(kind, experts=experts, prepacked=prepacked)
    picks = {"itself": lambda w: w, "data": lambda w: w.data, "mT": lambda w: w.mT, "detach": lambda w: w.detach()}
    lost = [f"{name}: {line}" for name, pick in picks.items() for line in lost_writes(weight, pick, mode)]
    assert not lost, "\n".join(lost)


def test_lost_writes_are_found(monkeypatch):
    monkeypatch.setattr("gemmtune.quantized.functions.read_only", lambda result: result)
    lost = lost_writes(of_kind("int8", experts=False, prepacked=False), lambda w: w, torch.no_grad)
    assert {"int: lost", "select: lost", "data: lost", "init: lost", "w[0] += 1: lost", "foreach: lost"} <= set(lost)


def test_what_the_message_says():
    weight = of_kind("int8", experts=False, prepacked=False)
    remedy = "dequantize() the weight, change the floats and quantize them again, or copy_ a whole QuantizedWeight into it"
    with pytest.raises(InvalidProblemError) as caught:
        weight.zero_()
    assert (
        str(caught.value) == f"aten.zero_.default: got a QuantizedWeight, expected a tensor that can be changed in place; {remedy}"
    )
    with pytest.raises(InvalidProblemError) as caught:
        weight[0] = 0
    assert str(caught.value).startswith("aten.fill_.Tensor: got a view of a QuantizedWeight, expected a tensor that can be changed")
    assert str(caught.value).endswith(f"in place; {remedy}; clone() copies a view")


def test_the_remedy_works():
    weight = of_kind("int8", experts=False, prepacked=True)
    floats = weight.dequantize()
    floats[3] = 0
    weight.copy_(gemmtune.prepack(QuantizedWeight.quantize(floats.mT, "int8", scales="group_32"), op="mixed_mm").mT)
    assert not weight[3].any()
    assert torch.allclose(weight.dequantize(), floats, atol=0.01)


def test_writes_that_are_done():
    experts = of_kind("int8", experts=True, prepacked=False)
    experts[1].copy_(experts[2])
    assert torch.equal(experts.dequantize()[1], experts.dequantize()[2])
    before = experts.dequantize()
    experts.scales.mul_(2)
    assert torch.equal(experts.dequantize(), 2 * before)


PRODUCTS = {
    "linear": nn.functional.linear,
    "parameter": lambda x, w: nn.functional.linear(x, nn.Parameter(w, requires_grad=False)),
    "matmul": lambda x, w: x @ w.mT,
    "mixed_mm": lambda x, w: gemmtune.mixed_mm(x, w.mT),
    "expert": lambda x, w: x @ w.mT.map_parts(lambda part: part[None])[0],
    "compiled": torch.compile(nn.functional.linear, backend="aot_eager"),
}


def change(w, part):
    with torch.no_grad():
        w.copy_(of_kind("uint4", experts=False, prepacked=False)) if part == "all" else getattr(w, part).mul_(2)


@pytest.mark.parametrize("part", ["tensor", "scales", "zero_points", "all"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_weight_that_changes_between_the_passes_is_seen(name, part):
    w, x = of_kind("uint4", experts=False, prepacked=False), torch.ones(2, 64, requires_grad=True)
    early = PRODUCTS[name](x, w)
    change(w, part)
    late = PRODUCTS[name](x, w)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|a part that changed in place"):
        early.sum().backward()
    late.sum().backward()
    torch.testing.assert_close(x.grad, w.dequantize().sum(0).expand(2, -1))


def test_an_operand_whose_scales_change_between_the_passes_is_seen():
    x, offs = torch.ones(2, 64, requires_grad=True), torch.tensor([1, 1, 2, 2], dtype=torch.int32)
    products = {False: torch.mm, True: lambda x, b: torch.ops.gemmtune.grouped_mm(x, b, offs)}
    for experts, product in products.items():
        b = of_kind("int8", experts=experts, prepacked=False).mT
        result = product(x, b)
        b.scales.mul_(2)
        with pytest.raises(RuntimeError, match="part that changed in place, expected the weight of the forward pass; change"):
            result.sum().backward()
