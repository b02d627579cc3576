"""Views of a QuantizedWeight as dequantized values: they can be read, and writes into them are refused."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import InvalidProblemError
from .asker import asker

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
aten = torch.ops.aten
_REMEDY = "dequantize() the weight, change the floats and quantize them again, or copy_ a whole QuantizedWeight into it"
_OF_MEMORY = (aten.record_stream,)
"""Functions that torch declares to write, and that change no number."""
_SHARING = (aten.set_, aten.set)
"""Functions that give the memory of a tensor that they read to another one."""
_UNDECLARED_VIEWS = (aten.unsafe_chunk, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.dequantize, aten.lift)
"""Functions whose results may share memory with their operand though torch declares new memory."""


def untraced(function: F) -> F:
    """Let a function run uncompiled between graphs of torch.compile, and return it: Dynamo cannot trace making a wrapper."""
    frames = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(*[frames._FrameAction.SKIP] * 2))
    return function


class HasNoMemory(Tensor):
    """A tensor whose numbers are not in memory of its own. Functions that hand out its memory for writing are refused.

    Each subclass names in ``_instead`` the call that returns a tensor with memory.
    """

    _instead: str

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if (dispatch := cls.__dict__.get("__torch_dispatch__")) is not None:
            untraced(dispatch.__func__)

    def share_memory_(self) -> NoReturn:
        """Raise InvalidProblemError."""
        raise InvalidProblemError(self._without_memory("share_memory_"))

    def numpy(self, *, force: bool = False) -> Any:  # noqa: ARG002
        """Raise InvalidProblemError."""
        raise InvalidProblemError(self._without_memory("numpy"))

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InvalidProblemError."""
        raise InvalidProblemError(self._without_memory("__dlpack__"))

    def storage(self) -> Any:
        """Raise InvalidProblemError, which libraries that save files show. torch.distributed asks for the size alone."""
        if asker():
            return super().storage()  # type: ignore[no-untyped-call]
        raise InvalidProblemError(self._without_memory("storage"))

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        """Raise AttributeError, by which other libraries learn that there is none."""
        raise AttributeError(self._without_memory("__cuda_array_interface__"))

    def _without_memory(self, name: str) -> str:
        got = f"a {type(self).__name__} of shape {list(self.shape)}"
        return f"{name}: got {got}, expected a tensor with memory of its own; {self._instead}"


class DequantizedView(HasNoMemory):
    """The dequantized values of a view of a QuantizedWeight, such as ``weight[3]``.

    Functions that read it return plain tensors, and its views are of its own kind. A function that would write into it raises
    InvalidProblemError: the values are a copy, and the write would not reach the weight.
    """

    plain: Tensor
    """The values, as a tensor that torch's functions read."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _instead = "give clone() of it, a copy of its values"

    def __new__(cls, plain: Tensor) -> "DequantizedView":
        if type(plain) is Tensor:  # it keeps the memory: some readers, such as safetensors, go past torch's functions
            self = Tensor._make_subclass(cls, plain)
        else:  # torch traces, and its own tensors are wrappers
            self = Tensor._make_wrapper_subclass(
                cls, plain.shape, plain.stride(), plain.storage_offset(), dtype=plain.dtype, device=plain.device
            )
        self.plain = plain
        return self

    @property
    def data(self) -> Tensor:
        """The values without their history in autograd. They cannot be replaced."""
        return super().data

    @data.setter
    def data(self, other: object) -> None:  # noqa: ARG002
        raise InvalidProblemError(f"data: got a view of a QuantizedWeight, expected a tensor of its own; {_REMEDY}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if (composed := func.decompose(*args, **kwargs)) is not NotImplemented:
            return composed  # inference mode passes composite functions on undecomposed
        check_unwritten(cls, func, args, kwargs)
        plain_args, plain_kwargs = tree_map_only(cls, lambda x: x.plain, (args, dict(kwargs)))
        if not is_view_of(cls, func, args):
            return func(*plain_args, **plain_kwargs)
        with counting_versions_as(args[0]):
            return read_only(func(*plain_args, **plain_kwargs))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], _: object, size: object, stride: object) -> "DequantizedView":
        return cls(parts["plain"])

    def _stable_hash_for_caching(self) -> str:
        """Return text that is the same in every process: torch keeps compiled graphs by it."""
        plain = self.plain
        return repr((type(self).__name__, tuple(plain.shape), plain.stride(), plain.dtype, str(plain.device)))

    def numpy(self, *, force: bool = False) -> Any:
        array = self.plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the values as numbers of Python."""
        return self.plain.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.plain.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __format__(self, spec: str) -> str:
        return format(self.plain, spec)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DequantizedView({self.plain!r})"


def read_only(result: Any) -> Any:
    """Make every tensor of a result, which is one or a list of them, a DequantizedView."""
    return tree_map_only(Tensor, DequantizedView, result)


def check_unwritten(cls: type[Tensor], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidProblemError if ``func`` writes into a tensor of this class, or makes a tensor share memory with one."""
    is_sharing = func.overloadpacket in _SHARING
    is_filling = func.namespace == "c10d" and func.overloadpacket.__name__.endswith("_")  # undeclared: the first argument
    if not (func._schema.is_mutable or is_sharing or is_filling) or func.overloadpacket in _OF_MEMORY:
        return
    given = args[0] if is_filling else (args, kwargs) if is_sharing else _written(func, args, kwargs)
    if any(isinstance(x, cls) for x in tree_leaves(given)):
        got, more = ("view of a QuantizedWeight", "; clone() copies a view") if cls is DequantizedView else (cls.__name__, "")
        raise InvalidProblemError(f"{func}: got a {got}, expected a tensor that can be changed in place; {_REMEDY}{more}")


def is_view_of(cls: type[Tensor], func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the result of ``func`` is a view of a tensor of this class."""
    # The viewed tensor is the first argument of every function of views.
    return (func.is_view or func.overloadpacket in _UNDECLARED_VIEWS) and isinstance(args[0], cls)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that ``func`` writes."""
    schema = func._schema.arguments
    given = dict(zip((x.name for x in schema), args, strict=False)) | dict(kwargs)
    return [given.get(x.name) for x in schema if x.alias_info is not None and x.alias_info.is_write]


def counting_versions_as(base: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a view of ``base`` counts versions exactly if ``base`` does, in inference mode as well."""
    return torch.inference_mode(base.is_inference()) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
