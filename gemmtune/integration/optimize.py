"""``optimize`` lets the layers of a model run stored picks. Parameters, storages, hooks and types do not change."""

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from .. import settings
from ..device import detect
from ..dispatch.checks import why_composed
from ..errors import InvalidProblemError
from ..problem.rows import RowClass
from ..quantized.weight import QuantizedWeight
from ..selector.progress import Progress, progress_for
from ..selector.segments import rows_of
from ..tuning.tune import tune as run_tuning
from ..warning import warn
from . import compile as compile_pass
from .adjacent import lay_out, same_inputs
from .background import ROWS, Job, in_background, tuning_in_background
from .defaults import joinable, verify_defaults
from .experts import has_matrices
from .forwards import own_forward, put_back
from .invariant import collecting, tune_layers
from .invariant_joined import joined_problems
from .measured import in_models, prepare_tuning, tune_products, tune_tables
from .modules import check_model, compile_again, is_linear, is_optimized, may_be_in_graphs, optimized, restored
from .record import record
from .sparsify import sparse_problems
from .weights import classes_of, tables_and_singles

M = TypeVar("M", bound=nn.Module)
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Optimized models. The pass of torch.compile is installed while there are any."""


def optimize(
    model: M,
    *,
    tune: Any = None,
    m: range | tuple[int, int] | None = None,
    progress: bool = True,
    batch_invariant: bool = False,
) -> M:
    """Let the layers of a model run stored picks, in place, wherever these are faster than torch. ``restore`` undoes it.

    The forward of every ``nn.Linear``, including block-sparse ones, and of HF's Conv1D looks up the pick. Parameters,
    ``state_dict``, hooks and types do not change. Later compilations by ``torch.compile`` include our pass. Only ``tune`` and ``m``
    tune. Elsewhere a problem without a pick runs by torch or a default kernel, which is verified now (and timed if it is a float
    one on a CPU). Weights that may have the same input move next to each other on a GPU, so that compiled graphs can join them.

    Args:
        model: any module.
        tune: example inputs, as a tensor, a tuple of positional arguments or a mapping of keyword arguments. The model runs on
            them, each weight gets a table of its numbers of rows, and weights with the same input move next to each other on
            any device. Graphs that this process compiles later tune their unknown GEMMs, as after ``install(tune=True)``.
            ``"background"`` serves at once, and makes the tables while this process is idle: see ``tuning_in_background``.
        m: the numbers of rows of the tables, as ``range(1, 8193)`` or (1, 8192): tokens of a batch or a prompt, not sequences.
            Without ``tune`` all linear layers get tables, and the model does not run.
        progress: show the progress of the tuning on standard error.
        batch_invariant: run every layer, and experts of transformers and their routers, by the batch-invariant tables of their
            weights, and never by torch, like the setting of that name. Without a table they raise NoValidChoicesError. A warning
            names modules with other matrices. They stay so in later calls, until ``restore``.

    Returns:
        The model. If the call fails or is interrupted, its layers keep the forwards that they had.

    Raises:
        InvalidProblemError: not a module, no example inputs, ``m`` is no range of rows, no table can serve it, or with
            ``batch_invariant`` a block-sparse weight or one of another library, or experts for which only ``m`` is given.
    """
    check_model("optimize", model, "; for functions there is gemmtune.use()")
    current = settings.current()
    invariant = (batch_invariant or current.batch_invariant) and not current.disable
    rows, later = None if m is None else _rows(m), in_background(tune, batch_invariant=invariant)
    if invariant:
        return _invariant(model, tune, rows, progress)
    return _by_picks(model, tune, rows, progress, later=later)


def _by_picks(model: M, tune: Any, rows: range | None, progress: bool, *, later: bool) -> M:
    """Tune what is asked for, now or ``later``, and give every layer a forward that looks up its pick."""
    example, moved = None if later else tune, False
    classes = _classes(model) if later or (rows is not None and example is None) else []
    with _all_or_none(model):
        if not settings.current().disable:
            if example is not None:
                _tune(model, example, rows, progress)
            else:
                moved = lay_out(model, joinable(model))
                if rows is not None and not later:  # without a run of the model
                    device = detect(classes[0].problem.device_type)
                    chosen = in_models(settings.current(), device)
                    prepare_tuning(device, chosen)
                    tune_tables(dict.fromkeys(classes, ()), device, chosen, progress_for() if progress else Progress(), rows)
            verify_defaults(model, progress=progress)
        # Give each layer our forward, and torch.compile our pass.
        again = may_be_in_graphs(model) and (tune is not None or rows is not None or moved)
        optimized(model)
        try:
            compile_pass.install(tune=example is not None, predict=True)
        except FileNotFoundError as error:  # Inductor needs a temporary folder to be imported, and layers do not need Inductor
            warn(f"optimize: {error}; torch.compile needs one, so graphs run torch's GEMMs: free space there, or set TMPDIR")
        if again:
            compile_again()
    _models.add(model)
    if later and not settings.current().disable:
        device = detect(classes[0].problem.device_type)
        chosen, asked = in_models(settings.current(), device), rows or ROWS[device.type]
        jobs = [Job(rows_class=x, rows=asked, device=device, settings=chosen) for x in classes]
        tuning_in_background().add(jobs, model)
    return model


def _invariant(model: M, example: Any, rows: range | None, progress: bool) -> M:
    """Give every layer a batch-invariant forward. Tables are made for the products of example inputs, or for all layers."""
    _check_weights(model)
    if rows is not None and example is None and any(map(has_matrices, model.modules())):
        raise InvalidProblemError(
            "optimize: batch_invariant: got m without example inputs for a model with experts, expected tune=inputs too: their run "
            "shows how many experts a token has"
        )
    classes = _classes(model) if rows is not None and example is None else []
    with _all_or_none(model):
        again = may_be_in_graphs(model) and (example is not None or rows is not None)
        optimized(model, batch_invariant=True)
        if example is not None:
            with torch.no_grad(), _state_kept(model), same_inputs(model) as groups, collecting() as problems:
                _run(model, example)
            lay_out(model, groups)
            tune_layers(problems, rows, progress=progress, joined=joined_problems(groups))
        elif rows is not None:
            tune_layers([(rows_class.problem, 1) for rows_class in classes], rows, progress=progress)
        if again:
            compile_again()
        compile_pass.install_joins()
    _models.add(model)
    if others := [name or "the model" for name, x in model.named_modules() if not is_optimized(x) and _has_matrix(x)]:
        more = f" and {len(others) - 3} more" if others[3:] else ""
        warn(
            f"optimize: batch_invariant: got modules with other matrices ({', '.join(others[:3])}{more}), expected linear layers "
            "and experts of transformers: the bits of other products still depend on the batch. Call gemmtune.mm, bmm or "
            "grouped_mm there, under the setting batch_invariant"
        )
    return model


def _check_weights(model: nn.Module) -> None:
    """Raise InvalidProblemError for a layer whose weight has no batch-invariant product. A shard is whole when its module runs."""
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")  # a weight that a parametrization computes changes state when it is read
        if weight is None or isinstance(weight, QuantizedWeight):
            continue
        got, what = "", "make it dense"
        if weight.layout in (torch.sparse_bsr, torch.sparse_bsc):
            got = "a block-sparse weight"
        elif is_linear(module) and type(weight).__name__ != "DTensor" and why_composed([weight], floats=False) is not None:
            got, what = (
                f"a weight of another library's class {type(weight).__name__}",
                "convert it, as gemmtune.integration.formats does",
            )
        if got:
            raise InvalidProblemError(
                f"optimize: batch_invariant: got {got} in {name or 'the model'}, expected dense or quantized ones of gemmtune; "
                f"{what}, or leave batch_invariant out"
            )


def _has_matrix(module: nn.Module) -> bool:
    """Return True for Parameters that a product may read, other than those of embeddings and positions."""
    own = (x for x in module._parameters.values() if x is not None and x.dim() > 1 and x.shape[0] > 1)
    return not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and any(True for _ in own)


@contextmanager
def _all_or_none(model: nn.Module) -> Iterator[None]:
    """Give each layer the forward that it had before the block if that fails."""
    before = {module: own_forward(module) for module in model.modules()}
    try:
        yield
    except BaseException:
        for module in model.modules():
            if is_optimized(module) and own_forward(module) is not (forward := before.get(module)):
                put_back(module, forward)
        raise


def restore(model: M) -> M:
    """Undo ``optimize``: give every layer torch's forward, and remove the pass with the last model. Return the model.

    Weights keep their places in memory, each with a separate storage. Tables that only this model wants are not made any more in
    the background.
    """
    check_model("restore", model)
    restored(model)
    tuning_in_background().leave(model.modules())
    for module in model.modules():  # the model may be in another one since, such as that of torch.compile or of peft
        _models.discard(module)
    if not _models:
        compile_pass.uninstall()
    return model


def _rows(m: object) -> range:
    """Return the range of rows. Raise InvalidProblemError for another value, or if the settings use no tables."""
    try:
        rows = rows_of(m)
    except InvalidProblemError as error:
        raise InvalidProblemError(f"optimize: {error}") from error
    if settings.current().rows != "shared":
        raise InvalidProblemError(
            f"optimize: m: got {m!r} with the setting rows={settings.current().rows!r}, which uses no table; set rows='shared', or "
            "leave out m"
        )
    return rows


def _classes(model: nn.Module) -> list[RowClass]:
    """Return the classes of all linear layers. Raise InvalidProblemError if there are none."""
    classes = classes_of(model)
    if not classes:
        raise InvalidProblemError(
            f"optimize: got a {type(model).__name__} without a layer that has a table, expected an nn.Linear or HF's Conv1D with a "
            "dense or quantized weight in memory: call optimize before fully_shard or an offload; tune others with tune=inputs"
        )
    return classes


def _tune(model: nn.Module, example: Any, rows: range | None, progress: bool) -> None:
    """Tune the products of the model on example inputs, with the weights of layers with the same input moved together."""
    # Start the tuning processes, which import while the model runs.
    device = detect(next((x.device.type for x in model.parameters()), "cpu"))
    prepare_tuning(device, settings.current())
    # Move the weights of layers with the same input together. torch lacks sparse products of some dtypes.
    optimized(model, sparse_only=True)
    with torch.no_grad(), _state_kept(model), same_inputs(model) as groups, sparse_problems(model) as of_blocks:
        _run(model, example)
    lay_out(model, groups)
    # Tune every product of a run.
    with torch.no_grad(), _state_kept(model), record() as recording:
        _run(model, example)
    chosen = in_models(settings.current(), device)
    tables, singles = tables_and_singles(model, recording.problems())
    shown = progress_for() if progress else Progress()
    tune_tables(tables, device, chosen, shown, rows)
    tune_products(singles, device, chosen, shown)
    if of_blocks:
        run_tuning(of_blocks, progress=progress)


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Restore at the end the buffers of modules in training mode, such as running statistics, and the random number generators.

    Modules of ``fully_shard`` have shards again, which optimizers take. After a forward without gradients the outermost has none.
    """
    training = (x for module in model.modules() if module.training for x in module.buffers(recurse=False))
    buffers = [(x, x.clone()) for x in training if not x.is_inference()]
    devices = sorted({x.device.index for x in model.parameters() if x.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # an unchanged buffer may be expanded, and cannot be copied into
                    buffer.copy_(before)
            sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
            for module in model.modules():
                if isinstance(module, sharded):
                    module.reshard()


def _run(model: nn.Module, example: Any) -> None:
    """Call the model on example inputs. Raise InvalidProblemError for inputs of another type."""
    if isinstance(example, torch.Tensor):
        model(example)
    elif isinstance(example, Mapping):
        model(**example)
    elif isinstance(example, (tuple, list)):
        model(*example)
    else:
        got = type(example).__name__
        raise InvalidProblemError(
            f"optimize: tune: got {got}, expected a tensor, a tuple of arguments, a mapping of keyword arguments, or 'background'"
        )
