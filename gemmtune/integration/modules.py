"""The forwards that ``optimize`` gives to ``nn.Linear`` and HF's Conv1D: the stored pick if it beats torch, otherwise torch.

A forward is a method of the module, stored in its ``__dict__``. The module's type, Parameters and hooks stay. It is a method, as
torch.compile skips the guards of unchanged modules only if they have nothing but tensors, modules and methods.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Hashable
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import settings
from ..bounded import Bounded
from ..dispatch.checks import is_dense
from ..dispatch.plan import Plan
from ..dispatch.ready import generation, served_rows
from ..errors import InvalidProblemError
from ..native.lookup import keep_layer, native, prepare
from ..ops.operate import FOR_NATIVE
from ..problem.compositions import mixed_composed, with_usual_strides
from ..quantized.products import linear_by_parts, served_by_parts
from ..quantized.rounding import SCALE_DTYPES
from ..quantized.weight import QuantizedWeight
from ..toolchain.driver import find_driver
from .eager import Bound, bound_for, plain_here, scalars_of
from .experts import has_matrices, invariant_experts, invariant_router, routers_of
from .forwards import give, is_its_class, own_forward, put_back
from .invariant import invariant_conv1d, invariant_linear
from .picks import table_for
from .sparsify import is_sparse, sparse_linear
from .swap import swaps

is_compiling = torch.compiler.is_compiling
BY_PARTS = find_spec("torch._functorch._aot_autograd.subclass_codegen") is None
"""True for a torch that takes subclasses of tensors apart by Python code for any, and not by code made for each graph."""
_CONV1D = "transformers.pytorch_utils"
"""The module of HF's Conv1D. Only a program with such layers has imported it."""


class Picks:
    """Cache of a layer's picks, by the properties of its input."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found = Bounded[Hashable, Bound | None]()

    def get(self, key: Hashable) -> "Bound | Picks | None":
        """Return the pick that was found for the key: None for torch, and these picks themselves if none was looked up."""
        return self.found.get(key, self)

    def find(self, key: Hashable, op: str, tensors: tuple[Tensor, ...], options: tuple[Hashable, ...] = ()) -> Bound | None:
        """Look up the pick, and keep the result, which is None if torch is faster."""
        found = self.found[key] = bound_for(op, tensors, options)
        prepare(FOR_NATIVE, settings.current())
        return found


_picks: weakref.WeakKeyDictionary[nn.Module, Picks] = weakref.WeakKeyDictionary()
"""Picks of layers. A copy of a layer begins without any: they belong to this process and its weight."""
_tuned = "0"
"""Number of tunings of models, as a text, whose value graphs of torch.compile guard. A number would become a symbol."""
_given: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Layers that got our forward, even if they have torch's again."""


def compile_again() -> None:
    """Let graphs with optimized layers compile again at their next call, since they hold the picks of their compilation."""
    global _tuned  # noqa: PLW0603 - torch.compile guards a global that the forwards read
    _tuned = str(int(_tuned) + 1)


def may_be_in_graphs(model: nn.Module) -> bool:
    """Return True if a layer of the model has or had our forward: graphs may hold its picks, which no other model's do."""
    return any(module in _given or is_optimized(module) for module in model.modules())


def _picks_of(module: nn.Module) -> Picks:
    picks = _picks.get(module)
    return _picks.setdefault(module, Picks()) if picks is None else picks


def linear(module: nn.Linear, input: Tensor) -> Tensor:
    """Run the forward of an ``nn.Linear``."""
    if is_compiling() and _tuned:
        read = module.weight  # once: a parametrization such as spectral_norm computes it, and changes state
        if BY_PARTS and isinstance(read, QuantizedWeight) and served_by_parts(input, read):
            return linear_by_parts(input, read, module.bias)
        return functional.linear(input, read, module.bias)
    if swaps.pending:
        swaps.apply()
    own = module._parameters
    weight, bias = (own["weight"], own["bias"]) if "weight" in own and "bias" in own else (module.weight, module.bias)
    if native.layer is None:
        return _linear(_picks_of(module), input, weight, bias)[0]
    found = native.layer(input, weight, bias)
    if found is not None and found is not False:
        return found  # type: ignore[no-any-return]
    number, picks = generation.number, _picks_of(module)
    result, bound = _linear(picks, input, weight, bias)
    if found is False and bound is not picks and not _rows_served(number, input, weight, bias):
        keep_layer(number, *_native_of(bound), (input, weight, bias))
    return result


def _rows_served(number: int, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return True if the native look-up now serves every number of rows, by the table of the weight."""
    if weight is None:
        return False
    op, tensors = _stated(input, weight.t(), bias)
    shared = table_for(op, tensors, scalars_of(op))
    return shared is not None and shared.serves(tensors[0].shape[0]) and served_rows(number, shared, (input, weight, bias))


def _stated(x: Tensor, b: Tensor, bias: Tensor | None) -> tuple[str, tuple[Tensor, ...]]:
    """Return the operation of a layer, and its operands with the rows of x as a matrix."""
    rows = x.flatten(0, -2)
    return ("mm", (rows, b)) if bias is None else ("addmm", (rows, b, bias))


def _linear(picks: Picks, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Bound | Picks | None]:
    """Return the product, and the pick that ran: None for torch, ``picks`` itself if no pick was looked up."""
    result, bound = _by_pick(picks, input, weight, bias, transposed=True)
    if result is not None:
        return result, bound
    return functional.linear(with_usual_strides(input) if is_dense(input) else input, weight, bias), bound  # type: ignore[arg-type]


def _by_pick(
    picks: Picks, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, transposed: bool
) -> tuple[Tensor | None, Bound | Picks | None]:
    """Return the product by the pick, or None for torch, and the pick as in ``_linear``. With ``transposed`` the weight is bᵀ."""
    if not is_dense(x) or not x.is_contiguous() or x.dim() < 2 or weight is None or weight.dim() != 2:
        return None, picks
    if not isinstance(weight, QuantizedWeight) and not is_dense(weight):  # a class of another library may have no transpose
        return None, picks
    if x.dim() > 2 and bias is not None and bias.dim() > 1:  # it broadcasts to the batch, not to its rows
        return None, picks
    key: tuple[Hashable, ...] = (x.shape, x.dtype, x.get_device(), settings.token(), generation.number)
    if isinstance(weight, QuantizedWeight):
        key = (*key, weight.encoding)
        return _quantized_product(key, picks, picks.get(key), x, weight, bias), picks
    bound = picks.get(key)
    if bound is None:
        return None, None
    if not plain_here() or (isinstance(bound, Bound) and bound.elsewhere):
        return None, picks
    op, tensors = _stated(x, weight.t() if transposed else weight, bias)
    if not isinstance(bound, Bound) or not bound.fits(tensors):
        bound = picks.find(key, op, tensors)  # none was looked up, or one for a weight of another layout
    result = None if bound is None else bound.run(op, tensors)
    return result if result is None or x.dim() == 2 else result.view(*x.shape[:-1], result.shape[1]), bound


def _native_of(bound: Bound | Picks | None) -> tuple[Plan | None, int]:
    """Return what the native look-up keeps for a layer: its plan or None for torch, and a driver function or 0.

    With the driver's function, which reports a capture, the pick runs in CUDA graphs only. A pick that the native look-up launches
    itself costs the host less than torch, and also runs outside of graphs.
    """
    if not isinstance(bound, Bound):
        return None, 0
    pick = bound.pick
    if pick.in_graph_only and pick.plan.kernel.prepared is None and torch.version.hip is None:
        return None, find_driver().capture_info
    return pick.plan, 0


def conv1d(module: Any, x: Tensor) -> Tensor:
    """Run the forward of HF's Conv1D: x @ weight + bias."""
    if is_compiling() and _tuned:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    if swaps.pending:
        swaps.apply()
    own = module._parameters
    weight, bias = (own["weight"], own["bias"]) if "weight" in own and "bias" in own else (module.weight, module.bias)
    result, _ = _by_pick(_picks_of(module), x, weight, bias, transposed=False)
    return type(module).forward(module, x) if result is None else result


def _scripted_linear(self: Any, input: Tensor) -> Tensor:
    """Return what torch.jit.script compiles in place of ``linear``, which TorchScript cannot read: torch's product."""
    return functional.linear(input, self.weight, self.bias)


def _scripted_conv1d(self: Any, x: Tensor) -> Tensor:
    """Return what torch.jit.script compiles in place of ``conv1d``."""
    return x.matmul(self.weight).add(self.bias)


_SCRIPTED: dict[Any, Callable[..., Tensor]] = {linear: _scripted_linear, sparse_linear: _scripted_linear, conv1d: _scripted_conv1d}
for _forward, _scripted in _SCRIPTED.items():
    _forward.__wrapped__ = _scripted  # TorchScript reads the source of this one

_INVARIANT: dict[Any, Callable[..., Tensor]] = {linear: invariant_linear, conv1d: invariant_conv1d}
"""Forwards to their batch-invariant ones."""
FORWARDS = (linear, conv1d, sparse_linear, invariant_experts, invariant_router, *_INVARIANT.values())
for _forward in FORWARDS:
    _forward.__name__ = "forward"  # the name by which pickle finds a method again: that of the module's class


def _quantized_product(
    key: Hashable, picks: Picks, bound: Bound | Picks | None, x: Tensor, weight: QuantizedWeight, bias: Tensor | None
) -> Tensor | None:
    """Return x @ weightᵀ + bias by the pick for mixed_mm, else by torch's product with the dequantized weight.

    The operator would compute the same. Its host time is several times that of the product. Return None for a call that needs it.
    """
    if not plain_here() or weight.tensor.dtype.is_floating_point or not weight.transposed or x.dtype not in SCALE_DTYPES:
        return None
    tensors = tuple(part for part in (x.flatten(0, -2), weight.tensor, weight.scales, weight.zero_points) if part is not None)
    found = picks.find(key, "mixed_mm", tensors, (weight.encoding,)) if bound is picks else bound
    if torch.is_grad_enabled() and any(part.requires_grad for part in (*tensors, *([] if bias is None else [bias]))):
        return None
    result = found.run("mixed_mm", tensors) if isinstance(found, Bound) else None
    if result is None and x.device != weight.device:
        return None
    if result is None:
        result = mixed_composed(tensors[0], weight.tensor, weight.scales, weight.zero_points, weight.encoding)
    result = result if bias is None else result.add_(bias)
    return result if x.dim() == 2 else result.view(*x.shape[:-1], result.shape[1])


def check_model(name: str, model: object, instead: str = "") -> None:
    """Raise InvalidProblemError if ``model`` is not an nn.Module. The message ends with ``instead``."""
    if not isinstance(model, nn.Module):
        raise InvalidProblemError(f"{name}: got {type(model).__name__}, expected an nn.Module{instead}")


def optimized(model: nn.Module, *, sparse_only: bool = False, batch_invariant: bool = False) -> int:
    """Give every supported layer our forward, and return the number of layers that have it.

    With ``sparse_only`` only layers with block-sparse weights count. With ``batch_invariant`` layers get the forwards of
    ``invariant``, and experts and their routers too. A layer with another forward, in its class or in the object, does not change.
    """
    count, routers = 0, routers_of(model) if batch_invariant else ()
    for module in model.modules():
        forward: Any = (
            sparse_linear if is_sparse(module) else linear if is_linear(module) else conv1d if is_conv1d(module) else None
        )
        free = own_forward(module) is None or _is_ours(module) or is_its_class(module)
        if batch_invariant and free and (invariant := _invariant_of(module, forward, routers)) is not None:
            give(module, invariant)
        elif forward is not None and free and not is_optimized(module) and (forward is sparse_linear or not sparse_only):
            give(module, forward)
        if is_optimized(module):
            _given.add(module)
            count += 1
    return count


def _invariant_of(module: nn.Module, forward: Any, routers: Collection[nn.Module]) -> Callable[..., Any] | None:
    """Return the batch-invariant forward of a module whose other forward of ours is ``forward``, or None."""
    if forward is None and has_matrices(module):
        return invariant_experts
    return invariant_router if module in routers else _INVARIANT.get(forward)


def restored(model: nn.Module) -> None:
    """Remove our forwards."""
    for module in model.modules():
        if _is_ours(module):
            put_back(module, None)
            _picks.pop(module, None)


def is_optimized(module: nn.Module) -> bool:
    """Return True if the forward of this module is ours. False for a shallow copy of such a module."""
    return _is_ours(module) and own_forward(module).__self__ is module


def _is_ours(module: nn.Module) -> bool:
    forward = own_forward(module)
    return isinstance(forward, MethodType) and forward.__func__ in FORWARDS


def is_linear(module: nn.Module) -> bool:
    """Return True if the module's class has the forward of ``nn.Linear``."""
    return getattr(type(module), "forward", None) is nn.Linear.forward


def is_conv1d(module: nn.Module) -> bool:
    """Return True if the module's class has the forward of HF's Conv1D."""
    kind = getattr(sys.modules.get(_CONV1D), "Conv1D", None)
    return kind is not None and getattr(type(module), "forward", None) is kind.forward
