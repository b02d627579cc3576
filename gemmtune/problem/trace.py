"""Conversion of a Python function to an epilogue graph, by symbolic tracing with torch.fx."""

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from ..errors import EpilogueError
from .dtypes import DTYPES
from .epilogue import Epilogue, Node, Ref
from .functions import CASTS, FUNCTIONS, GraphBuilder, usable_names
from .layout import Layout

_HOMES = (operator, torch, torch.nn.functional, torch.special)
"""Modules whose functions FUNCTIONS names. A function of the same name from another module is a different function."""
_AFTERWARDS = "or call the operation without epilogue= and apply the function to its result"


def trace(function: Callable[..., Any], acc_dtype: torch.dtype, operands: Sequence[torch.Tensor]) -> Epilogue:
    """Return the graph of ``function(acc, *operands)``.

    ``acc`` stands for the accumulator, a matrix (or a batch of matrices) of ``acc_dtype``. ``operands`` are the tensors of the
    call, of which only dtype and layout are read. The function may use the operators, torch functions, tensor methods and
    torch.nn.functional functions in ``FUNCTIONS``. It may also use modules made of them (``nn.GELU()``), and any Python numbers.
    The dtype of each node follows torch's promotion. Equal nodes are shared. Nodes that the result does not need are dropped.

    Raises:
        EpilogueError: the function is not such an expression. The message names the obstacle and a remedy.
    """
    name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
    for i, x in enumerate(operands):
        if x.dtype not in DTYPES and x.dtype != torch.bool:
            raise EpilogueError(
                f"epilogue_args[{i}]: got {x.dtype}, expected torch.bool or one of {', '.join(map(str, DTYPES))}; cast it first"
            )
    try:
        result, proxies = _record(function, len(operands))
        builder = GraphBuilder(acc_dtype, operands)
        value = _Interpreter(builder, operands).run(result.node, [p.node for p in proxies])
        if not isinstance(value, Ref):
            raise EpilogueError(f"the result is {value!r}, which is not computed from the accumulator")
    except EpilogueError as error:
        raise EpilogueError(f"epilogue {name}: {error}") from error.__cause__
    nodes = needed(builder.nodes, value)
    if nodes[0].op != "acc":
        raise EpilogueError(f"epilogue {name}: the result does not depend on the accumulator, the function's first argument")
    if nodes[-1].dtype == torch.bool:
        raise EpilogueError(f"epilogue {name}: the result is torch.bool; end the function in a cast, such as .to(torch.float32)")
    return Epilogue(nodes=nodes, operands=tuple(Layout.of(x) for x in operands))


class _Proxy(fx.Proxy):
    """Proxy that makes ``numpy.float32(2) * acc`` call ``acc``, where numpy would otherwise request an array."""

    __array_ufunc__ = None


class _Tracer(fx.Tracer):
    """Tracer that records calls only. Tensors from outside the function's arguments raise EpilogueError."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph(tracer_cls=_Tracer)
        self.root = torch.nn.Module()
        self.tensor_attrs = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            raise EpilogueError(
                f"it uses a tensor of shape {list(a.shape)} that is not among its arguments; "
                "pass it through epilogue_args=(...) and take it as a further argument, or make it a Python number with .item()"
            )
        return super().create_arg(a.item() if isinstance(a, np.generic) else a)


def _record(function: Callable[..., Any], n_operands: int) -> tuple[fx.Proxy, list[fx.Proxy]]:
    """Call the function with proxies. Return its result and the proxies."""
    tracer = _Tracer()
    proxies = [tracer.create_proxy("placeholder", f"x{i}", (), {}) for i in range(1 + n_operands)]
    _check_arity(function, proxies)
    try:
        result = function(*proxies)
    except EpilogueError:
        raise
    except fx.proxy.TraceError as error:
        raise EpilogueError(
            f"it decides or iterates on a value that is only known when the kernel runs ({error}); "
            f"use torch.where(condition, x, y) in place of if, {_AFTERWARDS}"
        ) from error
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise EpilogueError(
            f"it cannot be traced ({type(error).__name__}: {error}); use torch functions only, {_AFTERWARDS}"
        ) from error
    if isinstance(result, (tuple, list, dict)):
        raise EpilogueError(f"it returns a {type(result).__name__}, expected one tensor")
    if isinstance(result, torch.Tensor):
        tracer.create_arg(result)
    if not isinstance(result, fx.Proxy):
        raise EpilogueError(f"it returns {result!r}, expected a tensor computed from the accumulator, its first argument")
    return result, proxies


def _check_arity(function: Callable[..., Any], proxies: Sequence[fx.Proxy]) -> None:
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except ValueError:  # some functions written in C have none, so the call itself checks the arguments
        return
    except TypeError as error:
        raise EpilogueError(f"expected a function of the accumulator, got {type(function).__name__}") from error
    try:
        signature.bind(*proxies)
    except TypeError as error:
        raise EpilogueError(
            f"it takes {signature}, but is called with the accumulator and {len(proxies) - 1} epilogue_args ({error})"
        ) from error


class _Interpreter:
    """Converter of the recorded calls to nodes, in the order of the calls."""

    def __init__(self, builder: GraphBuilder, operands: Sequence[torch.Tensor]) -> None:
        self.builder = builder
        self.operands = operands
        self.values: dict[fx.Node, Any] = {}
        self.result: fx.Node | None = None

    def run(self, result: fx.Node, placeholders: Sequence[fx.Node]) -> Any:
        """Return the value of ``result``: a Ref, or a Python object if the function computed no tensor."""
        self.result = result
        self.values.update(zip(placeholders, [self.builder.acc, *self.builder.operands], strict=True))
        for node in result.graph.nodes:
            if node.op != "placeholder":
                self.values[node] = self._value(node)
        return self.values[result]

    def _value(self, node: fx.Node) -> Any:
        args, kwargs = self._resolved(node.args), self._resolved(node.kwargs)
        if node.op == "call_method" and isinstance(args[0], Ref):
            query = self._query(str(node.target), args[0], args[1:])
            if query is not None:
                return query
            return self._call(node, str(node.target), f"torch.Tensor.{node.target}", args, kwargs)
        if node.target is getattr and isinstance(args[0], Ref):
            query = self._query(args[1], args[0], ())
            if query is None:
                raise _unusable(f"torch.Tensor.{args[1]}")
            return query
        if not any(isinstance(self.values[n], Ref) for n in node.all_input_nodes):  # arithmetic on sizes and other plain numbers
            if node.op == "call_function" and callable(node.target):
                return node.target(*args, **kwargs)
            raise _unusable(str(node.target))
        name = getattr(node.target, "__name__", str(node.target))
        module = getattr(node.target, "__module__", None) or "torch"
        module = {"_operator": "operator", "torch._C._nn": "torch.nn.functional"}.get(module, module)
        known = any(getattr(home, name, None) is node.target for home in _HOMES) or name.startswith("special_")
        return self._call(node, name if known else "", f"{module}.{name}", args, kwargs)

    def _resolved(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda n: self.values[n])

    def _call(self, node: fx.Node, name: str, display: str, args: Any, kwargs: Any) -> Ref:
        in_place = name.endswith("_") and not name.endswith("__")
        function = FUNCTIONS.get(name[:-1] if in_place else name)
        if function is None:
            raise _unusable(display)
        if in_place or kwargs.get("inplace"):  # wrappers in torch.nn.functional pass it by keyword
            self._check_in_place(node, display, args[0] if args else None)
        kwargs = {k: v for k, v in kwargs.items() if k != "inplace"}
        if node.op == "call_method" and name == "where" and len(args) > 1:  # x.where(condition, other)
            args = (args[1], args[0], *args[2:])
        try:
            value = function(self.builder, *args, **kwargs)
        except EpilogueError:
            raise
        except (TypeError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise EpilogueError(f"{display} cannot be used so ({reason}); {_AFTERWARDS}") from error
        if in_place and self.builder.dtype(value) != self.builder.dtype(args[0]):
            return self.builder.cast(value, self.builder.dtype(args[0]))
        return value

    def _check_in_place(self, node: fx.Node, display: str, target: Any) -> None:
        """Raise EpilogueError if the overwritten value is visible elsewhere, so that in-place and out-of-place results differ."""
        if target in self.builder.operands:
            raise EpilogueError(
                f"{display} works in place on an operand, which would change the caller's tensor; use the other form"
            )
        source = node.args[0] if node.args else None
        while isinstance(source, fx.Node):
            if len(source.users) > 1 or source is self.result:
                raise EpilogueError(f"{display} works in place on a value that is used again; use the form that does not")
            alias = source.op == "call_method" and source.target in CASTS
            source = source.args[0] if alias else None

    def _query(self, name: str, value: Ref, args: Sequence[Any]) -> Any:
        """Return a property of a tensor other than its value, such as its dtype or sizes. None for any other name."""
        if name == "dtype":
            return self.builder.dtype(value)
        if name not in ("size", "shape", "dim", "ndim", "numel", "ndimension"):
            return None
        if value not in self.builder.operands:
            raise EpilogueError(
                f"it reads the {name} of a computed value, which is unknown during tracing; take sizes from the inputs of the "
                "call, as in n = b.size(1) before the call"
            )
        answer = getattr(self.operands[self.builder.operands.index(value)], name)
        return answer(*args) if callable(answer) else answer


def _unusable(display: str) -> EpilogueError:
    return EpilogueError(
        f"{display} is not a pointwise function that an epilogue can use; usable are {usable_names()}; {_AFTERWARDS}"
    )


def needed(nodes: Sequence[Node], result: Ref) -> tuple[Node, ...]:
    """Return the nodes that ``result`` needs, in order and renumbered, ``result`` last."""
    wanted: set[int] = set()
    waiting = [result.index]
    while waiting:
        index = waiting.pop()
        if index not in wanted:
            wanted.add(index)
            waiting += [a.index for a in nodes[index].args if isinstance(a, Ref)]
    order = sorted(wanted)
    renumbered = {old: Ref(new) for new, old in enumerate(order)}
    kept = [nodes[i] for i in order]
    return tuple(
        Node(op=n.op, args=tuple(renumbered[a.index] if isinstance(a, Ref) else a for a in n.args), dtype=n.dtype) for n in kept
    )
