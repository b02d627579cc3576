"""Modules with the names of vLLM's, and classes that behave as its own where our plugin meets them."""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from gemmtune import settings
from gemmtune.dispatch.ready import forget_plans
from gemmtune.integration.serving.tables import log_once
from gemmtune.integration.vllm.points import EMBEDDING, KERNELS, LINEAR, MOE

Tensor = torch.Tensor


class PlatformEnum(Enum):
    CUDA = 1
    CPU = 2
    XPU = 3


class Shape(NamedTuple):
    row: int
    col: int

    def is_per_tensor(self) -> bool:
        return self == (-1, -1)

    def is_per_token(self) -> bool:
        return self == (1, -1)

    def is_per_channel(self) -> bool:
        return self == (-1, 1)


@dataclass(frozen=True)
class Scale:
    group_shape: Shape
    static: bool = False


@dataclass(frozen=True)
class QuantKey:
    scale: Scale
    dtype: torch.dtype = torch.float8_e4m3fn


@dataclass
class MixedConfig:
    partition_weight_shape: tuple[int, int]
    weight_type: str
    group_size: int
    zero_points: bool
    act_type: torch.dtype = torch.bfloat16
    out_type: torch.dtype | None = None


@dataclass
class Int8Config:
    is_channelwise: bool = True
    is_static_input_scheme: bool = False
    input_symmetric: bool = True


@dataclass
class FP8Config:
    activation_quant_key: QuantKey
    weight_quant_key: QuantKey
    weight_shape: tuple[int, int]
    out_dtype: torch.dtype = torch.bfloat16


class MPLinearKernel(ABC):
    def __init__(self, c: Any, w_q_param_name: str, w_s_param_name: str, w_zp_param_name: str | None = None) -> None:
        self.config = c
        self.w_q_name, self.w_s_name, self.w_zp_name = w_q_param_name, w_s_param_name, w_zp_param_name

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int: ...

    @classmethod
    @abstractmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]: ...

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None: ...

    @abstractmethod
    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def _transform_param(self, layer: nn.Module, name: str | None, fn: Any) -> None:
        if name is not None and getattr(layer, name, None) is not None:
            new = fn(getattr(layer, name))
            delattr(layer, name)
            layer.register_parameter(name, nn.Parameter(new.data, requires_grad=False))

    def _get_weight_params(self, layer: nn.Module) -> tuple[Any, Any, Any]:
        return getattr(layer, self.w_q_name), getattr(layer, self.w_s_name), getattr(layer, self.w_zp_name or "", None)


class ScaledMMLinearKernel(ABC):
    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        assert self.can_implement(c)[0]
        assert self.is_supported()[0]
        self.config, self.layer_param_names = c, layer_param_names

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]: ...

    @classmethod
    @abstractmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]: ...


class Int8ScaledMMLinearKernel(ScaledMMLinearKernel):
    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None: ...

    @abstractmethod
    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor: ...


class FP8ScaledMMLinearKernel(ScaledMMLinearKernel):
    """Rounds the inputs by one scale or by one for each row, then asks for the product."""

    def process_weights_after_loading(self, layer: nn.Module) -> None: ...

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        w, w_s, *_ = (getattr(layer, name, None) for name in self.layer_param_names)
        rows = x.reshape(-1, x.shape[-1])
        one = self.config.activation_quant_key.scale.group_shape.is_per_tensor()
        most = rows.abs().amax() if one else rows.abs().amax(1, keepdim=True)
        scale = (most.float() / 448).reshape(() if one else (-1, 1))
        numbers = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        shape = [*x.shape[:-1], w.shape[1]]
        return self.apply_scaled_mm(
            A=numbers, B=w, out_dtype=self.config.out_dtype, As=scale, Bs=w_s, bias=bias, output_shape=shape
        )

    @abstractmethod
    def apply_scaled_mm(self, **_: Any) -> Tensor: ...


@dataclass
class BlockParameters:
    block_scale_attr: str = "weight_scale_inv"


class Fp8BlockScaledMMLinearKernel(ABC):
    """Rounds the inputs by blocks of 1x128, then asks for the product."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]: ...

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def _get_layer_params(self, layer: nn.Module, **_: Any) -> Any:
        return BlockParameters()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.processed_by_vllm = True

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        blocks = x.reshape(-1, x.shape[-1] // 128, 128).float()
        scale = blocks.abs().amax(2) / 448
        numbers = (blocks / scale.unsqueeze(2)).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
        result = self.apply_block_scaled_mm(numbers, layer.weight, scale, layer.weight_scale_inv)
        return (result if bias is None else result + bias).view(*x.shape[:-1], -1)

    @abstractmethod
    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor: ...


class Format(Enum):
    Standard = "standard"
    BatchedExperts = "batched_experts"


class Backend(Enum):
    FLASHINFER = "FLASHINFER"
    TRITON = "TRITON"
    OOT = "OOT"


@dataclass
class ExpertsConfig:
    """vLLM's description of a layer of experts, as far as we read it."""

    num_local_experts: int = 4
    experts_per_token: int = 2
    hidden_dim: int = 64
    intermediate_size_per_partition: int = 48
    is_act_and_mul: bool = True
    in_dtype: torch.dtype = torch.float32
    moe_backend: str = "auto"
    is_lora_enabled: bool = False


@dataclass
class ExpertsQuantization:
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    quant_dtype: torch.dtype = torch.float8_e4m3fn
    per_act_token_quant: bool = False
    block_shape: list[int] | None = None


class FusedMoEExpertsModular(ABC):
    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    @property
    def w1_bias(self) -> Tensor | None:
        return self.quant_config.w1_bias  # type: ignore[no-any-return]

    @property
    def w2_bias(self) -> Tensor | None:
        return self.quant_config.w2_bias  # type: ignore[no-any-return]

    @staticmethod
    @abstractmethod
    def activation_format() -> Any: ...

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool: ...

    @abstractmethod
    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, expert_tokens_meta: Any,
        activation: Any,
    ) -> Any: ...  # fmt: skip

    def activation(self, activation: Any, output: Tensor, input: Tensor) -> None:
        assert activation == "silu"
        gates, others = input.chunk(2, -1)
        output.copy_(functional.silu(gates) * others)

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> Any: ...

    @abstractmethod
    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: Any, global_num_experts: int, expert_map: Tensor | None, a1q_scale: Tensor | None, a2_scale: Tensor | None,
        workspace13: Tensor, workspace2: Tensor, expert_tokens_meta: Any, apply_router_weight_on_input: bool,
    ) -> None: ...  # fmt: skip


BASES = (
    MPLinearKernel, Int8ScaledMMLinearKernel, FP8ScaledMMLinearKernel, Fp8BlockScaledMMLinearKernel, FusedMoEExpertsModular,
)  # fmt: skip


def run_experts(
    made: Any, x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, expert_map: Tensor | None = None,
    scale: Tensor | None = None, dtype: torch.dtype = torch.float32, *, on_input: bool = False,
) -> Tensor:  # fmt: skip
    """Run experts as vLLM's modular kernel does."""
    (m, k), (groups, n, _) = x.shape, w1.shape
    *_, size = made.workspace_shapes(m, n, k, ids.shape[1], groups, groups, None, "silu")
    output = torch.full(size, torch.nan, dtype=dtype, device=x.device)
    made.apply(
        output=output, hidden_states=x, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids, activation="silu",
        global_num_experts=groups, expert_map=expert_map, a1q_scale=scale, a2_scale=None, workspace13=x.new_empty(0),
        workspace2=x.new_empty(0), expert_tokens_meta=None, apply_router_weight_on_input=on_input,
    )  # fmt: skip
    return output


def rounded(
    A: Tensor, A_scale: None, quant_dtype: torch.dtype, per_act_token_quant: bool, block_shape: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Round rows to float8, with a scale for each, or for each 128 columns of it."""
    parts = A.float().unflatten(1, (-1, 128 if block_shape else A.shape[1]))
    scales = parts.abs().amax(2) / 448
    return (parts / scales.unsqueeze(2)).clamp(-448, 448).to(quant_dtype).flatten(1), scales


class _Method:
    """A linear method: what vLLM's own does, it notes on the layer."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.processed_by_vllm = True

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        layer.applied_by_vllm = True
        return functional.linear(x, layer.weight, bias)


@dataclass
class Config:
    additional_config: Any = field(default_factory=dict)
    scheduler_config: Any = field(default_factory=lambda: types.SimpleNamespace(max_num_batched_tokens=64))


class StandIn:
    """Modules of a stand-in for vLLM, and what tests look at: linear methods, lists of kernels, and the configuration."""

    def __init__(self, device: str) -> None:
        self.config = Config()
        self.linear = type("UnquantizedLinearMethod", (_Method,), {k: v for k, v in vars(_Method).items() if callable(v)})
        self.embedding = type("UnquantizedEmbeddingMethod", (_Method,), {k: v for k, v in vars(_Method).items() if callable(v)})
        kind = PlatformEnum[device.upper()]
        self.lists: dict[str, dict[PlatformEnum, list[type]]] = {
            name: {kind: [type("TheirKernel", (), {})]}
            for name in ("_POSSIBLE_KERNELS", "_POSSIBLE_INT8_KERNELS", "_POSSIBLE_FP8_KERNELS", "_POSSIBLE_FP8_BLOCK_KERNELS")
        }
        platform = types.SimpleNamespace(_enum=kind, device_type=device)
        bases = {
            x.__name__: x for x in (MPLinearKernel, Int8ScaledMMLinearKernel, FP8ScaledMMLinearKernel, Fp8BlockScaledMMLinearKernel)
        }
        self.backend, self.theirs = Backend.FLASHINFER, type("TheirExperts", (), {"activation_format": lambda: Format.Standard})

        def select_unquantized_moe_backend(moe_config: Any) -> Any:
            return self.backend, self.theirs

        def select_fp8_moe_backend(config: Any, weight_key: Any, activation_key: Any, allow_vllm_cutlass: bool = False) -> Any:
            return self.backend, self.theirs

        self.experts_contents: dict[str, dict[str, Any]] = {
            f"{MOE}.oracle.unquantized": {"select_unquantized_moe_backend": select_unquantized_moe_backend},
            f"{MOE}.oracle.fp8": {"select_fp8_moe_backend": select_fp8_moe_backend},
            f"{MOE}.modular_kernel": {
                "FusedMoEExpertsModular": FusedMoEExpertsModular, "FusedMoEActivationFormat": Format,
            },
            f"{MOE}.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": lambda: "nothing"},
            f"{MOE}.utils": {"moe_kernel_quantize_input": rounded},
            f"{MOE}.method": {"select_unquantized_moe_backend": select_unquantized_moe_backend},
        }  # fmt: skip
        self.contents: dict[str, dict[str, Any]] = {
            "vllm": {"__version__": "0.0.stand.in"},
            LINEAR: {"UnquantizedLinearMethod": self.linear},
            EMBEDDING: {"UnquantizedEmbeddingMethod": self.embedding},
            KERNELS: {**bases, **self.lists},
            "vllm.platforms": {"current_platform": platform},
            "vllm.config": {"get_current_vllm_config_or_none": lambda: self.config},
            "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        }

    def kernel(self, name: str) -> Any:
        """Return the kernel that stands first in a list."""
        ((first, *_),) = self.lists[name].values()
        return first


def install(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn) -> None:
    """Let ``import vllm`` find the stand-in."""
    for name in [*sys.modules]:
        if name.split(".")[0] == "vllm":
            monkeypatch.delitem(sys.modules, name)
    for name, contents in {**stand_in.contents, **stand_in.experts_contents}.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        while parent and parent not in stand_in.contents and parent not in sys.modules:
            package = types.ModuleType(parent)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, parent, package)
            parent = parent.rpartition(".")[0]
        if name.count(".") == 1:
            monkeypatch.setattr(sys.modules["vllm"], child, module, raising=False)


class Packed(nn.Parameter):
    """A Parameter with the dimensions that vLLM's have."""

    def __new__(cls, data: Tensor, **_: int) -> Packed:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, _: Tensor, **dimensions: int) -> None:
        vars(self).update(dimensions)


@contextmanager
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Install a stand-in on a CPU, whose layers tables may serve."""
    made = StandIn("cpu")
    install(monkeypatch, made)
    log_once.cache_clear()
    with settings.patch(rows="shared", search="quick", backends=("aten", "cpp"), vllm="all"):
        yield made
    forget_plans()
