"""Block-sparse weights in a model: their creation for a trial, and the forward of layers that have them."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import settings
from ..dispatch.checks import is_dense
from ..dispatch.prepack import PackedOperand
from ..dispatch.statement import noted, problem_of
from ..errors import InvalidProblemError
from ..numerics.block_sparse import by_blocks, sparse_of
from ..problem import Problem
from ..problem.sparsity import Sparsity, sides_of
from ..sparse.calls import block_call
from ..sparse.products import linear
from .eager import plain_here
from .replaced import replacing

M = TypeVar("M", bound=nn.Module)
is_compiling = torch.compiler.is_compiling


def sparsify_(model: M, *, block: int | tuple[int, int] = 64, density: float = 0.5) -> M:
    """Make the weights of every ``nn.Linear`` block-sparse, in place, keeping the blocks with the largest norm.

    Use it to measure the speed of such a model. Its accuracy needs training. Layers whose weights do not consist of whole blocks
    stay dense. Layers that share a weight still share it. If one layer fails, or the call is interrupted, all stay dense.
    ``optimize`` lets sparse layers run our choices, also in dtypes for which torch has no sparse product.

    Args:
        model: any module.
        block: the side of a block, or (rows, columns).
        density: the fraction of each weight's blocks to keep.

    Returns:
        The model.

    Raises:
        InvalidProblemError: not a module, a density outside 0 … 1, or no layer with such blocks.
    """
    if not isinstance(model, nn.Module):
        raise InvalidProblemError(f"sparsify_: got {type(model).__name__}, expected an nn.Module")
    if not 0 <= density <= 1:
        raise InvalidProblemError(f"sparsify_: density: got {density!r}, expected the share of blocks that stay, from 0 to 1")
    rows, cols = sides_of(block)
    kind = Sparsity(block_n=rows, block_k=cols, density=1.0)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and _has_blocks(m._parameters.get("weight"), kind)]
    if not layers:
        raise InvalidProblemError(f"sparsify_: got a model with no layer whose weight consists of whole blocks of {rows}x{cols}")
    made: dict[Tensor, nn.Parameter] = {}
    with replacing() as replace:
        for layer in layers:
            dense = layer.weight
            if dense not in made:
                made[dense] = nn.Parameter(_largest(dense.detach(), kind, density), requires_grad=dense.requires_grad)
            replace(layer, "weight", made[dense])
    return model


def _largest(weight: Tensor, kind: Sparsity, density: float) -> Tensor:
    """Return the sparse_bsr tensor of this fraction of the blocks, the ones with the largest norm."""
    norms = by_blocks(weight.float(), kind).square().sum(dim=(2, 3))
    kept = torch.zeros(norms.numel(), dtype=torch.bool, device=weight.device)
    kept[norms.flatten().topk(round(density * norms.numel())).indices] = True
    return sparse_of(weight, kept.view_as(norms), kind)


def _has_blocks(weight: Tensor | None, kind: Sparsity) -> bool:
    """Return True if a dense float weight consists of whole blocks."""
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided or not weight.is_floating_point():
        return False
    return not weight.shape[0] % kind.block_n and not weight.shape[1] % kind.block_k


_packed: weakref.WeakKeyDictionary[nn.Module, PackedOperand] = weakref.WeakKeyDictionary()
"""Weights of layers as operands that keep packed copies. A copy of a layer has none: they belong to this process and weight."""


def sparse_linear(module: nn.Linear, input: Tensor) -> Tensor:
    """Run the forward of an ``nn.Linear`` with a block-sparse weight, by the stored pick or by torch. Never tunes.

    Other inputs than dense tensors and compiled graphs get torch's own sparse product. Under a mode, a transform or autocast it is
    the dense product, which all of these support.
    """
    weight, bias = module.weight, module.bias
    if is_compiling() or weight.layout is not torch.sparse_bsr or not is_dense(input) or input.dim() == 0:
        return functional.linear(input, weight, bias)
    if not plain_here():
        with noted(lambda: _problem_of(module, input)):
            return functional.linear(input, weight.to_dense(), bias)
    packed = _packed.get(module)
    if packed is None or packed.tensor is not weight:
        packed = _packed[module] = PackedOperand(weight)
    with settings.use(settings.current().never_tuning):
        return linear(input, packed, bias)


def is_sparse(module: nn.Module) -> bool:
    """Return True for a linear layer with a block-sparse weight."""
    weight = module._parameters.get("weight")
    linear_layer = getattr(type(module), "forward", None) is nn.Linear.forward
    return linear_layer and weight is not None and weight.layout is torch.sparse_bsr


@contextmanager
def sparse_problems(model: nn.Module) -> Iterator[list[Problem]]:
    """Yield the distinct problems of the block-sparse layers that run in the block. The list fills up at its end."""
    found: dict[Problem, None] = {}
    listed: list[Problem] = []

    def note_call(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor):
            found[_problem_of(module, x)] = None

    hooks = [m.register_forward_pre_hook(note_call, with_kwargs=True) for m in model.modules() if is_sparse(m)]
    try:
        yield listed
        listed += found
    finally:
        for hook in hooks:
            hook.remove()


def _problem_of(module: Any, x: Tensor) -> Problem:
    """Return the problem of a layer's forward for an input."""
    rows, bias = x.detach().reshape(-1, x.shape[-1]), module.bias
    return prepacked_problem(module.weight.detach(), rows.t(), None if bias is None else bias.detach().unsqueeze(-1), by_rows=True)


def prepacked_problem(
    weight: Tensor, x: Tensor, inp: Tensor | None, scalars: Sequence[float] = (1.0, 1.0), *, by_rows: bool
) -> Problem:
    """Return the Problem of alpha · weight @ x + beta · inp for a prepacked weight, with tokens in rows if ``by_rows``."""
    name, numbers = ("bsr_mm", ()) if inp is None else ("bsr_addmm", scalars)
    out = x.new_empty((x.shape[1], weight.shape[0])).t() if by_rows else None
    return problem_of(block_call(name, PackedOperand(weight), x, inp, scalars=numbers, out=out), None)
