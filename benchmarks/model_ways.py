"""The ways to run a model that ``model.py`` compares: torch's, torchao's and ours."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from model_steps import Scenario
from transformers import PreTrainedModel

import gemmtune

__all__ = ["WAYS", "Prepared", "prepare"]

Change = Callable[[PreTrainedModel], None]
DEFAULT: Mapping[str, Any] = {}
MAX_AUTOTUNE: Mapping[str, Any] = {"mode": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What is done to a copy of the model, the options of torch.compile (None: not compiled), whether ``gemmtune.optimize`` is
    called."""

    change: Change | None = None
    compile: Mapping[str, Any] | None = None
    optimize: bool = False

    @property
    def again(self) -> bool:
        """It is compiled a second time, from the store: as torch.compile is by default."""
        return self.change is None and self.compile is DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model that is ready for its first call."""

    model: PreTrainedModel
    compile: Mapping[str, Any] | None
    tuning_s: float
    weights_bytes: int


def _ours(dtype: str, **options: Any) -> Change:
    return lambda model: gemmtune.quantize_(model, dtype, skip=("lm_head",), **options)


def _torchao(name: str, **options: Any) -> Change:
    def change(model: PreTrainedModel) -> None:
        from torchao import quantization  # noqa: PLC0415 - a peer, which need not be installed

        config = getattr(quantization, name)(**options)
        quantization.quantize_(
            model, config, filter_fn=lambda module, path: isinstance(module, torch.nn.Linear) and not path.endswith("lm_head")
        )

    return change


def _torchao_float8(model: PreTrainedModel) -> None:
    from torchao.quantization import PerRow  # noqa: PLC0415 - a peer, which need not be installed

    _torchao("Float8DynamicActivationFloat8WeightConfig", granularity=PerRow())(model)


INT4 = _torchao("Int4WeightOnlyConfig", group_size=128, int4_packing_format="tile_packed_to_4d")

WAYS: Mapping[str, Way] = {
    "eager": Way(),
    "compile": Way(compile=DEFAULT),
    "max-autotune": Way(compile=MAX_AUTOTUNE),
    "torchao-int4": Way(change=INT4, compile=DEFAULT),
    "torchao-int8": Way(change=_torchao("Int8WeightOnlyConfig"), compile=DEFAULT),
    "torchao-float8": Way(change=_torchao_float8, compile=DEFAULT),
    "optimize": Way(optimize=True),
    "optimize+compile": Way(optimize=True, compile=DEFAULT),
    "int4+compile": Way(change=_ours("int4", group=128), optimize=True, compile=DEFAULT),
    "int8+compile": Way(change=_ours("int8"), optimize=True, compile=DEFAULT),
    "float8+compile": Way(change=_ours("float8"), optimize=True, compile=DEFAULT),
}


def prepare(name: str, model: PreTrainedModel, scenario: Scenario, device: torch.device) -> Prepared:
    """A model for this way: the given one where nothing of it is changed, else a copy."""
    way = WAYS[name]
    tuning_s = 0.0
    if way.change is not None or way.optimize:  # optimize moves weights to where those of one input lie together
        model = copy.deepcopy(model)
    if way.change is not None:
        way.change(model)
    if way.optimize:
        begun = time.perf_counter()
        with torch.no_grad():
            gemmtune.optimize(model, tune=scenario.arguments(model, device))
        tuning_s = time.perf_counter() - begun
    return Prepared(
        model=model,
        compile=way.compile,
        tuning_s=tuning_s,
        weights_bytes=sum(_bytes(parameter) for parameter in model.parameters()),
    )


def _bytes(parameter: torch.Tensor) -> int:
    """The memory of a parameter, which is that of its parts where several tensors make one."""
    if not hasattr(parameter, "__tensor_flatten__"):
        return parameter.nbytes
    names, _ = parameter.__tensor_flatten__()
    return sum(_bytes(getattr(parameter, name)) for name in names)
