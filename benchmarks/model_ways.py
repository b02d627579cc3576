"""The ways to run a model that ``model.py`` compares: torch's, torchao's and ours.

Those that begin with ``sparse`` or end with it are of a model whose blocks were made zero: ``Blocks``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from model_steps import Scenario, body_of
from transformers import PreTrainedModel

import gemmtune

__all__ = ["WAYS", "Blocks", "Prepared", "prepare"]

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
    batch_invariant: bool = False
    """``optimize`` gets ``batch_invariant=True``."""
    pdl: bool = False
    """Inductor's kernels, too, begin while the kernel before them ends: ``triton.enable_pdl``, from SM90 on."""
    sparse: bool = False
    """Weights are sparse_bsr tensors, of the blocks that are not zero."""

    @property
    def again(self) -> bool:
        """It is compiled a second time, from the store: as torch.compile is by default."""
        return self.change is None and self.compile is DEFAULT


@dataclass(frozen=True, slots=True)
class Blocks:
    """The side of the blocks of a model's weights, and the share of them that is not zero. The head stays dense."""

    side: int
    density: float

    @classmethod
    def parse(cls, text: str) -> Blocks:
        """Of a text such as ``64:0.1``. Raises ValueError."""
        side, _, density = text.partition(":")
        return cls(int(side), float(density))

    def zero_others_(self, model: PreTrainedModel) -> None:
        """Make the blocks of the least norm zero, in dense weights."""
        self.sparsify_(model)
        for layer in _sparse_layers(model):
            layer.weight = torch.nn.Parameter(layer.weight.detach().to_dense(), requires_grad=False)

    def sparsify_(self, model: PreTrainedModel) -> None:
        """Make the weights sparse_bsr tensors."""
        gemmtune.sparsify_(body_of(model), block=self.side, density=self.density)


class BlockLinear(torch.nn.Module):
    """A linear layer by the operator, which torch.compile takes as one node."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        for name, part in (("crow", weight.crow_indices()), ("col", weight.col_indices()), ("values", weight.values())):
            self.register_buffer(name, part.clone())
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weightᵀ + bias."""
        return torch.ops.gemmtune.bsr_linear(x, self.crow, self.col, self.values, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model that is ready for its first call."""

    model: PreTrainedModel
    compile: Mapping[str, Any] | None
    tuning_s: float
    weights_bytes: int
    read_bytes: int | None
    """Bytes of the weights that a decoding step reads: all but the rows of an embedding. None for a mixture of experts."""
    copied: bool
    """The weights are a copy of the given model's."""


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


def _sparse_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight.layout == torch.sparse_bsr]


def _by_operator(model: PreTrainedModel) -> None:
    for layer in _sparse_layers(model):
        name = next(name for name, module in model.named_modules() if module is layer)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, BlockLinear(layer))


WAYS: Mapping[str, Way] = {
    "eager": Way(),
    "compile": Way(compile=DEFAULT),
    "compile+pdl": Way(compile=DEFAULT, pdl=True),
    "max-autotune": Way(compile=MAX_AUTOTUNE),
    "torchao-int4": Way(change=INT4, compile=DEFAULT),
    "torchao-int8": Way(change=_torchao("Int8WeightOnlyConfig"), compile=DEFAULT),
    "torchao-float8": Way(change=_torchao_float8, compile=DEFAULT),
    "optimize": Way(optimize=True),
    "optimize+compile": Way(optimize=True, compile=DEFAULT),
    "invariant+compile": Way(optimize=True, batch_invariant=True, compile=DEFAULT),
    "optimize+compile+pdl": Way(optimize=True, compile=DEFAULT, pdl=True),
    "int4+compile": Way(change=_ours("int4", group=128), optimize=True, compile=DEFAULT),
    "int4+compile+pdl": Way(change=_ours("int4", group=128), optimize=True, compile=DEFAULT, pdl=True),
    "int8+compile": Way(change=_ours("int8"), optimize=True, compile=DEFAULT),
    "int8+compile+pdl": Way(change=_ours("int8"), optimize=True, compile=DEFAULT, pdl=True),
    "float8+compile": Way(change=_ours("float8"), optimize=True, compile=DEFAULT),
    "torch-sparse": Way(sparse=True),
    "sparse-optimize": Way(sparse=True, optimize=True),
    "sparse+compile": Way(sparse=True, change=_by_operator, compile=DEFAULT),
}


def prepare(
    name: str, model: PreTrainedModel, scenario: Scenario, device: torch.device, blocks: Blocks | None, rows: int | None
) -> Prepared:
    """Return a model for this way: the given one where nothing of it is changed, else a copy.

    Tables are made for up to ``rows`` rows, by default for those of the scenario. Raises ValueError for a sparse way of a model
    whose ``blocks`` are not known.
    """
    way = WAYS[name]
    tuning_s = 0.0
    if way.sparse and blocks is None:
        raise ValueError(f"{name}: got no --sparse, expected the side of a block and the share that stays, such as 64:0.1")
    copied = way.change is not None or way.optimize or way.sparse
    if copied:  # optimize moves weights to where those of one input lie together
        model = copy.deepcopy(model)
    if way.sparse and blocks is not None:
        blocks.sparsify_(model)
    if way.change is not None:
        way.change(model)
    if way.optimize:
        begun = time.perf_counter()
        with torch.no_grad():
            m = None if rows is None else range(1, rows + 1)
            gemmtune.optimize(model, tune=scenario.arguments(model, device), m=m, batch_invariant=way.batch_invariant)
        tuning_s = time.perf_counter() - begun
    weights_bytes = sum(_bytes(held) for held in (*model.parameters(), *_of_blocks(model)))
    return Prepared(
        model=model,
        compile=way.compile,
        tuning_s=tuning_s,
        weights_bytes=weights_bytes,
        read_bytes=None if "num_experts_per_tok" in scenario.config else weights_bytes - _embedding_bytes(model),
        copied=copied,
    )


def _embedding_bytes(model: PreTrainedModel) -> int:
    """The memory of the embedding of a model of language, unless its head reads it too."""
    head = model.get_output_embeddings()
    if head is None or head.weight is model.get_input_embeddings().weight:
        return 0
    return _bytes(model.get_input_embeddings().weight)


def _of_blocks(model: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer for module in model.modules() if isinstance(module, BlockLinear) for buffer in module.buffers()]


def _bytes(parameter: torch.Tensor) -> int:
    """The memory of a parameter, which is that of its parts where several tensors make one."""
    if parameter.layout == torch.sparse_bsr:
        return parameter.values().nbytes + parameter.crow_indices().nbytes + parameter.col_indices().nbytes
    if not hasattr(parameter, "__tensor_flatten__"):
        return parameter.nbytes
    names, _ = parameter.__tensor_flatten__()
    return sum(_bytes(getattr(parameter, name)) for name in names)
