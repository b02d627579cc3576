"""gemmtune in a model: its layers run stored picks. Parameters, their storages, hooks and types stay what they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from .. import settings
from ..device import detect
from ..errors import InvalidProblemError
from ..selector.progress import Progress, progress_for
from ..tuning.tune import tune as run_tuning
from . import compile as compile_pass
from .adjacent import lay_out, same_inputs
from .measured import in_models, prepare_tuning, tune_products
from .modules import check_model, optimized, restored
from .record import record
from .sparsify import sparse_problems

M = TypeVar("M", bound=nn.Module)
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Optimized models, for which the pass of torch.compile is installed."""


def optimize(model: M, *, tune: Any = None, progress: bool = True) -> M:
    """Let the layers of a model run by stored picks, in place, wherever these are faster than torch.

    The forward of every ``nn.Linear``, block-sparse ones too, and of HF's Conv1D, asks for the pick. Parameters, ``state_dict``,
    hooks and types stay, and ``restore`` undoes it. A problem without a pick costs what it costs in torch: only ``tune`` tunes.
    Graphs that ``torch.compile`` makes from now on have our pass.

    Args:
        model: any module.
        tune: example inputs: a tensor, a tuple of positional or a mapping of keyword arguments. The model runs on them, and every
            product that it asks for is tuned. Products that ``torch.compile`` fuses or joins are tuned while it compiles.
            Before that, weights of layers that read the same input move next to each other, so that one product can replace
            several. Each Parameter keeps a storage of its own, of exactly its bytes: saved files, tied weights and sharding are
            those of a model that is not optimized. Weights whose memory another tensor has too stay apart, such as those of a
            ``state_dict`` that you hold. On a CPU the memory of such weights is freed with the last of them, and torch cannot
            resize their storages. One group of weights exists twice while it moves.
            Running statistics and random numbers, which a forward in training mode changes, are restored afterwards.
        progress: show the progress of that tuning on standard error.

    Returns:
        The model.

    Raises:
        InvalidProblemError: not a module, or no example inputs.
    """
    check_model("optimize", model, "; for functions there is gemmtune.use()")
    if tune is not None:
        device = detect(next((x.device.type for x in model.parameters()), "cpu"))
        prepare_tuning(device, settings.current())
        optimized(model, sparse_only=True)  # torch has no sparse product of some dtypes
        with torch.no_grad(), _state_kept(model), same_inputs(model) as groups, sparse_problems(model) as of_blocks:
            _run(model, tune)
        lay_out(model, groups)
        with torch.no_grad(), _state_kept(model), record() as recording:
            _run(model, tune)
        chosen = in_models(settings.current(), device)
        tune_products(recording.problems(), device, chosen, progress_for() if progress else Progress())
        if of_blocks:
            run_tuning(of_blocks, progress=progress)
    optimized(model)
    _models.add(model)
    compile_pass.install(tune=tune is not None)
    return model


def restore(model: M) -> M:
    """Undo ``optimize``: give every layer torch's forward, and remove the pass with the last model. Return the model.

    Weights stay where they lie, each in a storage of its own.
    """
    check_model("restore", model)
    restored(model)
    _models.discard(model)
    if not _models:
        compile_pass.uninstall()
    return model


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Restore, at the end, buffers of modules in training mode, such as running statistics, and the state of random numbers."""
    training = (x for module in model.modules() if module.training for x in module.buffers(recurse=False))
    buffers = [(x, x.clone()) for x in training if not x.is_inference()]
    devices = sorted({x.device.index for x in model.parameters() if x.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # an unchanged buffer may be expanded, and takes no copy
                    buffer.copy_(before)


def _run(model: nn.Module, example: Any) -> None:
    if isinstance(example, torch.Tensor):
        model(example)
    elif isinstance(example, Mapping):
        model(**example)
    elif isinstance(example, (tuple, list)):
        model(*example)
    else:
        got = type(example).__name__
        raise InvalidProblemError(
            f"optimize: tune: got {got}, expected a tensor, a tuple of arguments or a mapping of keyword arguments"
        )
