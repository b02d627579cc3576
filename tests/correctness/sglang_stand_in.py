"""Modules with the names of SGLang's, and classes that behave as its own where our plugin meets them."""

from __future__ import annotations

import functools
import pkgutil
import sys
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from vllm_models import in_words
from vllm_stand_in import Packed

from gemmtune import settings
from gemmtune.dispatch.ready import forget_plans
from gemmtune.integration.serving.tables import log_once
from gemmtune.integration.sglang.points import COMBINED, DENSE, EXPERTS, MIXED, PRODUCTS, SCALED
from gemmtune.integration.sglang.scaled import SERVED

Tensor = torch.Tensor
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


def registry() -> type:
    """Return a registry of hooks without any."""

    class HookRegistry:
        hooks: list[tuple[str, Callable[..., Any]]] = []  # noqa: RUF012 - as in SGLang, the class itself has them

        @classmethod
        def register(
            cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER, *, source: Any = None
        ) -> None:
            assert hook_type is HookType.AROUND
            cls.hooks.append((target, hook))

        @classmethod
        def apply_hooks(cls) -> None:
            for target, hook in cls.hooks:
                path, name = target.rsplit(".", 1)
                owner = pkgutil.resolve_name(path)
                setattr(owner, name, cls.around(getattr(owner, name), hook))

        @staticmethod
        def around(original: Any, hook: Any) -> Any:
            @functools.wraps(original)
            def wrapper(*arguments: Any, **keywords: Any) -> Any:
                return hook(original, *arguments, **keywords)

            return wrapper

    return HookRegistry


def linear_method(name: str, run: Callable[[Any, Any, Tensor], Tensor]) -> type:
    """Return a linear method. What SGLang's own does, it notes on the layer."""

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        layer.processed_by_sglang = True
        if layer.weight is not None and layer.weight.dtype in (torch.int8, torch.float8_e4m3fn):
            layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        layer.applied_by_sglang = True
        result = run(self, layer, x)
        return result if bias is None else result + bias

    return type(name, (), {"apply": apply, "process_weights_after_loading": process_weights_after_loading})


class Standard(Enum):
    """A format of records, or a backend of experts."""

    STANDARD = "standard"
    OTHER = "other"

    def is_triton(self) -> bool:
        return self is Standard.STANDARD


TopK = namedtuple("TopK", "topk_weights topk_ids router_logits format", defaults=(None, Standard.STANDARD))
"""The experts of each token, and their weights."""
Dispatched = namedtuple("Dispatched", "hidden_states topk_output hidden_states_scale format", defaults=(None, Standard.STANDARD))
"""Rows of tokens and their experts, as SGLang gives them to a method of experts."""
Combined = namedtuple("Combined", "hidden_states")
"""A result of experts."""


class ExpertsMethod:
    """A method of experts. What SGLang's own does, it notes on the layer."""

    def __init__(self) -> None:
        self.runner = types.SimpleNamespace(runner_backend=Standard.STANDARD)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.processed_by_sglang = True

    def apply(self, layer: Any, dispatch_output: Any) -> Combined:
        layer.applied_by_sglang = True
        return Combined(dispatch_output.hidden_states)


def experts_layer(experts: int, hidden: int, inner: int, copies: int, **options: Any) -> nn.Module:
    """Return a layer of experts in SGLang's parameters."""
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(torch.randn(experts, 2 * inner, hidden) / hidden**0.5, requires_grad=False)
    layer.w2_weight = nn.Parameter(torch.randn(experts, hidden, inner) / inner**0.5, requires_grad=False)
    usual = {"activation": "silu", "is_gated": True, "no_combine": False, "apply_router_weight_on_input": False}
    nones = dict.fromkeys(("routed_scaling_factor", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit"))
    layer.moe_runner_config = types.SimpleNamespace(**usual, **nones, top_k=copies)
    vars(layer.moe_runner_config).update(options)
    return layer


def product_of(original: list[str], name: str) -> Any:
    """Return SGLang's function for a scaled product, which adds its name to a list when it runs."""

    def scaled_mm(
        mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        original.append(name)
        result = (mat_a.float() @ mat_b.float()) * scales_a.view(-1, 1) * scales_b.view(1, -1)
        return (result if bias is None else result + bias).to(out_dtype)

    return scaled_mm


class StandIn:
    """Modules of a stand-in for SGLang, and what tests look at: its registry, its arguments, and its products that ran."""

    def __init__(self, device: str, *, grouped: bool = True) -> None:
        self.registry: Any = registry()
        self.invariant = False
        self.products: list[str] = []
        self.args = types.SimpleNamespace(
            enable_deterministic_inference=False, chunked_prefill_size=64, max_prefill_tokens=32, attn_dp_size=1
        )
        self.args.deterministic = self.args
        self.contents: dict[str, dict[str, Any]] = {
            "sglang": {"__version__": "0.0.stand.in"},
            "sglang.srt.plugins.hook_registry": {"HookRegistry": self.registry, "HookType": HookType},
            "sglang.srt.utils": {"is_cuda": lambda: device == "cuda"},
            "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: self.invariant},
        }
        if grouped:
            self.contents["sglang.srt.runtime_context"] = {f"get_{x}": lambda: self.args for x in ("exec", "schedule", "parallel")}
        else:
            self.contents["sglang.srt.server_args"] = {"get_global_server_args": lambda: self.args}
        for target in (DENSE, *MIXED, *SCALED):
            module, name = target.rsplit(".", 1)
            run = self._dense if target == DENSE else self._scaled
            self.contents.setdefault(module, {})[name] = linear_method(name, run)
        methods = {name: x for name, x in vars(ExpertsMethod).items() if callable(x)}
        for target, point in ((EXPERTS, type("UnquantizedFusedMoEMethod", (), methods)), (COMBINED, Combined)):
            module, name = target.rsplit(".", 1)
            self.contents.setdefault(module, {})[name] = point
        for target in PRODUCTS:
            module, name = target.rsplit(".", 1)
            self.contents.setdefault(module, {})[name] = product_of(self.products, name)

    @staticmethod
    def _dense(_: Any, layer: Any, x: Tensor) -> Tensor:
        return functional.linear(x, layer.weight)

    @staticmethod
    def _scaled(_: Any, layer: Any, x: Tensor) -> Tensor:
        """Round the inputs by rows, and call the product as its module has it."""
        most = 127 if layer.weight.dtype == torch.int8 else 448
        scale = x.float().abs().amax(1, keepdim=True) / most
        numbers = (x.float() / scale).round() if most == 127 else x.float() / scale
        product = pkgutil.resolve_name(PRODUCTS[most == 127])
        return product(numbers.to(layer.weight.dtype), layer.weight, scale, layer.weight_scale, out_dtype=x.dtype)  # type: ignore[no-any-return]

    def method(self, target: str) -> Any:
        """Return a linear method."""
        module, name = target.rsplit(".", 1)
        return self.contents[module][name]()


def install(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn) -> None:
    """Let ``import sglang`` find the stand-in."""
    for name in [*sys.modules]:
        if name.split(".")[0] == "sglang":
            monkeypatch.delitem(sys.modules, name)
    names = {".".join(whole.split(".")[: i + 1]) for whole in stand_in.contents for i in range(whole.count(".") + 1)}
    for name in sorted(names):  # parents first
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(stand_in.contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


@contextmanager
def on(device: str, monkeypatch: pytest.MonkeyPatch, *, grouped: bool = True) -> Iterator[StandIn]:
    """Install a stand-in for SGLang on a device, whose layers all tables may serve."""
    made = StandIn(device, grouped=grouped)
    install(monkeypatch, made)
    log_once.cache_clear()
    SERVED.clear()
    with settings.patch(rows="shared", sglang="all"):
        yield made
    SERVED.clear()
    forget_plans()


def awq_layer(k: int, n: int, group: int, *, seed: int = 0, device: str = "cpu") -> tuple[nn.Module, Any, Tensor]:
    """Return a layer of AWQ in SGLang's parameters, the configuration of its method, and its weight [K, N]."""
    draw = torch.Generator().manual_seed(seed)
    numbers, zeros = torch.randint(0, 16, (k, n), generator=draw), torch.randint(4, 12, (k // group, n), generator=draw)
    scales = ((torch.rand(k // group, n, generator=draw) + 0.5) / 16).bfloat16()
    layer = nn.Module()
    layer.qweight = Packed(in_words(numbers, AWQ_ORDER).to(device), input_dim=0, output_dim=1, packed_dim=1)
    layer.qzeros = Packed(in_words(zeros, AWQ_ORDER).to(device), input_dim=0, output_dim=1, packed_dim=1)
    layer.scales = Packed(scales.to(device), input_dim=0, output_dim=1)
    layer.weight = None
    config = types.SimpleNamespace(weight_bits=4, group_size=group, zero_point=True)
    weight = (numbers - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)
    return layer, config, weight.to(device)


def scaled_layer(weight: Tensor, dtype: torch.dtype, params_dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a layer of float8 or int8 with a scale for each column of a weight [N, K]."""
    most = 127 if dtype == torch.int8 else 448
    scale = weight.abs().amax(1, keepdim=True) / most
    numbers = (weight / scale).round() if most == 127 else weight / scale
    layer = nn.Module()
    layer.weight = nn.Parameter(numbers.to(dtype), requires_grad=False)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    layer.params_dtype = params_dtype
    return layer
