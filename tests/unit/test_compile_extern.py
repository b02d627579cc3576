"""The interface of cached graphs to gemmtune, and their keys."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.errors import InvalidProblemError
from gemmtune.integration.compile import extern, lowering, products
from gemmtune.integration.compile.decisions import FixedPolicy
from gemmtune.integration.compile.rewriting import RewriteProducts
from gemmtune.integration.compile.store_policy import StorePolicy

INTERFACE = (
    3,
    {
        "attend": "(*tensors, out, scale, splits, block, warps)",
        "planned": "(*tensors, out, problem, dynamic=False, alpha=1.0, beta=1.0)",
        "planned_join": "(*tensors, out, problem, widths, dynamic=False)",
        "ready": "(problem, index)",
        "ready_join": "(problem, widths, index)",
    },
)
"""The interface number, with its functions and their arguments."""
TEXT = (
    '{"a":{"dtype":"float32","offset":0,"size":[4,6],"stride":[6,1]},"alpha":"one","b":{"dtype":"float32","offset":0,"size":[6,5],'
    '"stride":[1,6]},"batch":1,"beta":"one","device_type":"cpu","epilogue":null,"inp":{"dtype":"float32","offset":0,"size":[5],'
    '"stride":[1]},"k":6,"m":4,"n":5,"op":"addmm","out":{"dtype":"float32","offset":0,"size":[4,5],"stride":[5,1]},'
    '"precision":{"input_mode":"ieee","reduced_partials":false},"prepacked":false}'
)
"""The text of a problem in code that was generated for this interface."""


def arguments(function: Any) -> str:
    parameters = [x.replace(annotation=x.empty) for x in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(parameters)).replace("*, ", "")


def test_a_changed_interface_needs_another_number() -> None:
    functions = {name: arguments(getattr(extern.functions(extern.INTERFACE, ""), name)) for name in extern.Functions.__slots__}
    assert (extern.INTERFACE, functions) == INTERFACE


def test_older_generated_code_runs() -> None:
    functions = extern.functions(INTERFACE[0], "")
    a, b, c, out = torch.randn(4, 6), torch.randn(5, 6).t(), torch.randn(5), torch.empty(4, 5)
    with settings.patch(tune="never", backends=("aten",)):
        functions.ready(TEXT, -1)
        functions.planned(a, b, c, problem=TEXT, dynamic=False, alpha=1.0, beta=1.0, out=out)
    torch.testing.assert_close(out, torch.addmm(c, a, b))


def test_no_launch_is_prepared_for_an_absent_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Mock()
    monkeypatch.setattr(extern, "ready_launch", ready)
    monkeypatch.setattr(extern, "ready_pieces", ready)
    functions = extern.functions(extern.INTERFACE, "")
    functions.ready(TEXT, torch.cuda.device_count())
    functions.ready_join(TEXT, [2, 3], torch.cuda.device_count())
    assert not ready.called


def test_the_key_of_a_graph_depends_on_settings_but_not_on_paths(tmp_path: Path) -> None:
    def token(**changed: Any) -> object:
        with settings.patch(cache_dir=str(tmp_path / "one"), **changed):
            return StorePolicy().token()

    usual = token()
    assert token(store_path=str(tmp_path / "two" / "store.sqlite"), log_file=str(tmp_path / "log")) == usual
    assert token(backends=("aten",)) != usual
    assert StorePolicy(tunes=True).token() != StorePolicy().token()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert token() != usual
    finally:
        torch.set_num_threads(threads)


def test_a_policy_with_a_function_keeps_graphs_out_of_the_cache() -> None:
    assert RewriteProducts(FixedPolicy("alone")).uuid() is not None
    assert RewriteProducts(FixedPolicy("alone", only=lambda product: True)).uuid() is None


def weight(kind: str = "int8", *, begin: int = 0, **options: Any) -> QuantizedWeight:
    whole = QuantizedWeight.quantize(torch.linspace(-1, 1, 64 * 64).reshape(64, 64), kind, **options)
    return whole.map_parts(lambda part: part[:, begin : begin + 32])


def test_quantized_weights_of_different_layouts_share_no_graphs() -> None:
    def key(x: QuantizedWeight) -> str:
        return x._stable_hash_for_caching()

    others = [
        weight("int4"), weight("uint4"), weight("uint8"), weight("float8_e4m3fn"), weight(scales="group_32"), weight(begin=32),
        weight(begin=1), weight(scale_dtype=torch.float16), weight().t(), weight().to(torch.bfloat16),
        weight().map_parts(torch.clone), weight().map_parts(lambda part: part.t().contiguous().t()),
    ]  # fmt: skip
    keys = [key(x) for x in (weight(), *others)]
    assert len(set(keys)) == len(keys)
    assert key(weight()) == keys[0]
    assert gemmtune.__version__ in keys[0]


@pytest.mark.parametrize(
    ("strides", "steps"),
    [
        ((4, 1), ["realized", "exact (4, 1)", "realized"]), ((1, 4), ["realized", "exact (1, 4)", "realized"]),
        ((0, 4, 1), ["exact (0, 4, 1)", "realized"]), ((torch.SymInt, 1), ["realized", f"exact {(torch.SymInt, 1)}", "realized"]),
        ((), ["realized"]),
    ],
)  # fmt: skip
def test_the_source_of_an_operand_is_in_memory_unless_it_is_expanded(
    strides: tuple[object, ...], steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    kernel = Mock()
    kernel.realize_input = lambda x: (done.append("realized"), x)[1]
    kernel.require_exact_strides = lambda x, strides: (done.append(f"exact {strides}"), x)[1]
    monkeypatch.setattr(lowering.ir, "ExternKernel", kernel)
    assert lowering._with_strides("x", strides) == "x"
    assert done == steps


@pytest.mark.parametrize(
    ("rank", "sizes", "wanted"),
    [(2, None, (2, 5)), (1, None, (2, 5)), (2, (2, 1), (4, 6)), (1, (1,), (6,)), (0, (), (6,)), (3, (1, 2, 1), (4, 6))],
)
def test_operands_of_an_epilogue_have_their_layout_or_are_expanded(rank: int, sizes: object, wanted: tuple[int, ...]) -> None:
    problem = gemmtune.Problem.mm(4, 6, 8, dtype=torch.float16, device_type="cpu")
    operand = Mock(node=Mock(meta={"val": torch.empty(21, dtype=torch.float32)[1:].view(4, 5)[:2]}), rank=rank, sizes=sizes)
    found = products._operand_layout(operand, problem)
    stride = (5, 1) if sizes is None else gemmtune.Layout.contiguous(wanted, torch.float32).stride
    assert found == gemmtune.Layout(size=wanted, stride=stride, dtype=torch.float32, offset=1)


def test_operands_of_an_epilogue_have_known_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_number", lambda _: None)
    with pytest.raises(InvalidProblemError, match="only known when it runs"):
        products._operand_layout(Mock(node=Mock(meta={"val": torch.empty(6)})), gemmtune.Problem.mm(4, 6, 8, device_type="cpu"))
