"""Tensor descriptors: description of layouts, creation, and the function of each Triton version that takes them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemmtune.backends.triton import descriptors
from gemmtune.backends.triton.descriptors import Description, describable, encoder
from gemmtune.backends.triton.launch import Launcher, takes_encoded
from gemmtune.backends.triton.persistent import why_not_persistent
from gemmtune.device import preset
from gemmtune.problem import Layout, Problem

pytest.importorskip("triton", reason="the launchers are Triton's")

import triton
from triton.backends.nvidia import driver


def _layout(size: tuple[int, int], stride: tuple[int, int], offset: int = 0) -> Layout:
    return Layout(size=size, stride=stride, dtype=torch.float16, offset=offset)


DESCRIBABLE = {
    "rows": (_layout((70, 79), (80, 1)), (70, 79), (80, 1)),
    "columns": (_layout((79, 70), (1, 80)), (70, 79), (80, 1)),
    "one-row": (_layout((1, 79), (79, 1)), (1, 79), (80, 1)),
    "one-column": (_layout((79, 1), (1, 79)), (1, 79), (80, 1)),
}


@pytest.mark.parametrize("name", DESCRIBABLE)
def test_a_description_has_the_contiguous_lines(name: str) -> None:
    layout, shape, strides = DESCRIBABLE[name]
    assert describable(layout)
    description = Description.of(layout, (16, 32))
    assert (description.shape, description.strides, description.block) == (shape, strides, (16, 32))


@pytest.mark.parametrize(
    "layout",
    [
        _layout((70, 79), (79, 1)),
        _layout((70, 79), (80, 1), offset=2),
        _layout((70, 79), (160, 2)),
        _layout((70, 79), (0, 1)),
        _layout((70, 79), (72, 1)),
        _layout((70, 79), (8, 8)),
    ],
    ids=str,
)
def test_rejects_indescribable_layouts(layout: Layout) -> None:
    assert not describable(layout)


def _two(arg: Any, metadata: Any) -> list[Any]:
    return [(arg.base.data_ptr(), metadata, arg.padding, arg.round_f32_to_tf32), *arg.shape, *arg.strides]


def _three(arg: Any, metadata: Any, base_args: Any) -> list[Any]:
    return _two(arg, metadata)


@pytest.mark.parametrize("make", [_two, _three], ids=["3.6-3.7", "3.8-3.9"])
def test_each_address_is_encoded_once(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    encode = encoder(Description.of(_layout((70, 79), (80, 1)), (16, 32)), "meta")
    first = encode(1024)
    assert first == ((1024, "meta", "zero", False), 70, 79, 80, 1)
    assert encode(2048) is not first
    assert encode(1024) is first


def test_tritons_encoder_gets_address_sizes_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    record = _Recorder()
    utils = SimpleNamespace(fill_tma_descriptor=record, fill_tma_descriptor_tiled=record)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    metadata = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [16, 32], "fp4_padded": False}
    assert list(encoder(Description.of(_layout((70, 79), (80, 1)), (16, 32)), metadata)(1024)) == [None, 70, 79, 80, 1]
    ((address, swizzle, itemsize, _, block, shape, strides, padding),) = record.calls
    assert (address, swizzle, itemsize, block, padding) == (1024, 3, 2, [16, 32], 0)
    assert (tuple(shape), tuple(strides)) == ((70, 79), (80, 1))


def test_addresses_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "make_tensordesc_arg", _two)
    monkeypatch.setattr(descriptors, "MOST_KNOWN", 2)
    encode = encoder(Description.of(_layout((70, 79), (80, 1)), (16, 32)), None)
    first = encode(16)
    encode(32)
    assert encode(16) is first
    encode(48)
    assert encode(16) == first
    assert encode(16) is not first


def _wrapped(below: Any) -> Any:
    """Wrap a kernel's function like Triton does if one argument is a descriptor."""
    return driver.wrap_handle_tensordesc(below, {"0": "tensordesc<bf16[16, 16]>"}, [{}])


FOUND: dict[str, tuple[Any, bool, Any]] = {
    "below-a-closure": (_wrapped(print), False, print),
    "something-else-below-it": (_wrapped(_two), False, None),
    "no-closure": (print, False, None),
    "one-for-all-kernels": (_wrapped(_two), True, len),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_function_that_takes_encoded_descriptors(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function, packed, expected = FOUND[name]
    active = SimpleNamespace(utils=SimpleNamespace(launch=len))
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    call = Launcher(function=function, grid=(1, 1, 1), middle=("middle",), packed=packed)
    found = takes_encoded(SimpleNamespace(run="launcher"), call)
    assert found == (None if expected is None else replace(call, function=expected))


def test_an_unknown_version_takes_tritons_descriptors() -> None:
    call = Launcher(function=print, grid=(1, 1, 1), middle=(), packed=False)
    assert takes_encoded(SimpleNamespace(run=print), call) is None


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


def test_rejects_problems_that_the_template_does_not_serve() -> None:
    sm90 = preset("sm90")
    unaligned = Problem.mm(512, 512, 1001, layout="nt", device_type="cuda")
    assert "begin at multiples of 16 bytes" in (why_not_persistent(unaligned, sm90) or "")
    assert "no copy engine" in (why_not_persistent(Problem.mm(512, 512, 512, device_type="cuda"), preset("sm80")) or "")
    assert "a batch is not served" in (why_not_persistent(Problem.bmm(2, 512, 512, 512, device_type="cuda"), sm90) or "")
    assert "16-bit operands" in (why_not_persistent(Problem.mm(512, 512, 512, dtype=torch.float32, device_type="cuda"), sm90) or "")
    assert why_not_persistent(Problem.mm(512, 512, 512, device_type="cuda"), sm90) is None
