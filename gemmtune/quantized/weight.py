"""A weight of few bits, its scales and its zero points, as one tensor."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.jit import _trace

from ..dispatch.prepack import PackedOperand
from ..dispatch.wholes import replaced
from ..errors import InvalidProblemError
from ..problem.compositions import dequantized
from ..problem.dtypes import FLOAT8, dtype_name
from ..problem.grouped_compositions import widened
from ..problem.operations import Encoding
from ..problem.scales import Blocks
from ..version import __version__
from .functions import performed
from .parts import blocks_of, check_numbers, check_part, in_place, size_of, versions_of
from .rounding import Kind, rounded
from .sharding import GatheredByFsdp
from .views import untraced

Tensor = torch.Tensor
_NO_ADDRESS = 1 << 63
"""A bit that no address has: reading there fails, where that of the numbers would give them for floats."""


class QuantizedWeight(GatheredByFsdp):
    """The weight (numbers − zero_points) · scales of shape [K, N], which ``mixed_mm`` and ``scaled_mm`` take in place of ``b``.

    It is a tensor of ``dtype`` for torch. ``t()`` is the weight [N, K] of an ``nn.Linear``, which then runs ``mixed_mm`` or
    ``scaled_mm``. It can be copied, moved, saved, compiled, and be a Parameter. Others of torch's functions read the dequantized
    weight. A function that writes into it, or into a view of it, raises InvalidProblemError. ``copy_`` of a QuantizedWeight of the
    same kind is allowed.

    A weight of shape [G, K, N] has the weights of G experts. torch's grouped GEMMs with it run ``mixed_grouped_mm`` or
    ``scaled_grouped_mm``, and ``weight[i]`` is the weight [K, N] of one expert.

    Args:
        numbers: [K, N] int8, uint8, float8_e4m3fn or float8_e5m2, or with an ``encoding`` uint8 [K/2, N] as ``pack_int4`` makes it,
            any strides; or ``prepack`` of that. For experts [G, K, N] or uint8 [G, K/2, N].
        scales: float32, float16 or bfloat16: one element, [1, N], or [⌈K/g⌉, N] with a scale for each g = 32, 64 or 128 elements
            along K of a column; for 8-bit floats also [⌈K/128⌉, ⌈N/128⌉]. None means 1. For experts [G, 1, N], or for integers
            [G, K/g, N].
        zero_points: as ``scales``, for integers; needs scales. None means 0. Experts have none.
        encoding: ``int4`` (two's complement) or ``uint4`` for packed numbers.
        dtype: the dtype of the dequantized weight; by default that of the scales, or float32 without scales.
        requires_grad: for a QuantizedWeight as ``numbers`` alone: makes a Parameter of it, as a Parameter's type does elsewhere.

    Raises:
        InvalidProblemError: the parts do not fit together.
    """

    tensor: Tensor
    """The numbers as a tensor, also where they are prepacked."""
    packed: PackedOperand | None
    """The operand that ``prepack`` made of the numbers, or None."""
    scales: Tensor | None
    zero_points: Tensor | None
    encoding: Encoding
    _flat: tuple[list[str], tuple[Any, ...]]
    seen: tuple[int, ...]
    """Versions of the parts at the last function that torch did with the weight."""
    transposed: bool
    """The shape is [N, K], as that of an ``nn.Linear``'s weight; the parts are always those of [K, N]."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _instead = (
        "give its parts, or dequantize() of it; flatten_state_dict of gemmtune.integration.quantize makes plain tensors of a "
        "state_dict, and torch.save needs none"
    )

    def __new__(
        cls,
        numbers: Tensor | PackedOperand,
        scales: Tensor | None = None,
        zero_points: Tensor | None = None,
        encoding: Encoding = "",
        *,
        dtype: torch.dtype | None = None,
        requires_grad: bool | None = None,
    ) -> QuantizedWeight:
        if requires_grad is not None:
            if not isinstance(numbers, QuantizedWeight) or scales is not None or zero_points is not None or encoding or dtype:
                raise InvalidProblemError(
                    f"QuantizedWeight: requires_grad: got {requires_grad} with parts of a weight, expected a QuantizedWeight; "
                    "make the weight, and give it to nn.Parameter"
                )
            parameter: Any = torch.nn.Parameter(numbers, requires_grad)
            return parameter  # type: ignore[no-any-return]
        packed = numbers if isinstance(numbers, PackedOperand) else None
        tensor = packed.tensor if packed is not None else numbers
        check_numbers(tensor, encoding)
        assert isinstance(tensor, Tensor)
        if zero_points is not None and (scales is None or tensor.dtype in FLOAT8):
            raise InvalidProblemError(
                "QuantizedWeight: got zero_points without scales or for 8-bit floats, expected integers with both"
            )
        for name, part in (("scales", scales), ("zero_points", zero_points)):
            if part is not None:
                check_part(name, part, tensor, encoding)
        if scales is None and tensor.dim() == 3:
            raise InvalidProblemError("QuantizedWeight: scales: got None for experts, expected a tensor [G, 1, N]")
        given = dtype or (torch.float32 if scales is None else scales.dtype)
        return cls._of(tensor, scales, zero_points, encoding, given, packed=packed)

    @classmethod
    @untraced
    def _of(
        cls,
        tensor: Tensor,
        scales: Tensor | None,
        zero_points: Tensor | None,
        encoding: Encoding,
        dtype: torch.dtype,
        *,
        transposed: bool = False,
        packed: PackedOperand | None = None,
    ) -> QuantizedWeight:
        """Make a weight of parts that are known to fit together."""
        (k, n), row_major = size_of(tensor, encoding), tensor.stride(-1) == 1
        size, stride = ((k, n), (n, 1) if row_major else (1, k))
        if transposed:
            size, stride = size[::-1], stride[::-1]
        experts, apart = tensor.shape[:-2], (k * n,) * (tensor.dim() - 2)
        self: QuantizedWeight = Tensor._make_wrapper_subclass(
            cls, (*experts, *size), strides=(*apart, *stride), dtype=dtype, device=tensor.device
        )
        self._hold(tensor, scales, zero_points, packed, encoding, transposed)
        return self

    def _hold(
        self,
        tensor: Tensor,
        scales: Tensor | None,
        zero_points: Tensor | None,
        packed: PackedOperand | None,
        encoding: Encoding,
        transposed: bool,
    ) -> None:
        """Take over parts. A compiled graph asks for their names at each call, and captures their addresses in CUDA graphs."""
        self.tensor, self.scales, self.zero_points, self.packed = tensor, scales, zero_points, packed
        self.encoding, self.transposed = encoding, transposed
        names = [name for name in ("tensor", "scales", "zero_points") if getattr(self, name) is not None]
        self._flat = names, (encoding, self.dtype, transposed)
        for name in names:
            replaced(in_place(getattr(self, name)))
        self.seen = versions_of(self.parts)

    @classmethod
    def quantize(
        cls, weight: Tensor, kind: Kind = "int8", *, scales: str = "column", scale_dtype: torch.dtype | None = None
    ) -> QuantizedWeight:
        """Round a weight to the nearest of few numbers.

        Args:
            weight: [K, N] of a float dtype, all finite, such as ``linear.weight.t()``; K even for four bits. The numbers are
                row- or column-major as it is. Or [G, K, N] for experts, K a multiple of the elements that share a scale.
            kind: signed integers are around zero; unsigned ones have zero points; 8-bit floats have neither.
            scales: the part with a scale of its own: ``tensor``, ``column``, ``group_32``, ``group_64`` or ``group_128`` elements
                along K of a column, or for 8-bit floats ``block_128x128``.
            scale_dtype: the dtype of scales and zero points; by default that of ``weight``, and float32 for 8-bit floats, which
                ``scaled_mm`` expects.

        Returns:
            A weight with the dtype of ``weight``.

        Raises:
            InvalidProblemError: the weight, the kind or the block is not one of these.
        """
        parts = rounded(weight, kind, scales, scale_dtype)
        return cls(*parts, dtype=weight.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if (
            getattr(_trace, "_trace_module_map", None) is not None
        ):  # TorchScript would read the weight's memory, of which there is none
            raise InvalidProblemError(
                "torch.jit.trace: got a QuantizedWeight, which TorchScript cannot hold; use torch.export.export(model, inputs), or "
                "dequantize_(model) of gemmtune.integration.quantize before"
            )
        return performed(cls, func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return self._flat

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], context: tuple[Any, ...], outer_size: object, outer_stride: object
    ) -> QuantizedWeight:
        encoding, dtype, transposed = context
        scales, zero_points = parts.get("scales"), parts.get("zero_points")
        return cls._of(parts["tensor"], scales, zero_points, encoding, dtype, transposed=transposed)

    def _stable_hash_for_caching(self) -> str:
        """Return text for torch's caches of compiled graphs, the same in every process.

        The memory of the parts counts, because graphs fuse neighbours and read aligned memory. The version counts too: it decides
        how operations with the weight are done.
        """
        looks: list[object] = [__version__, self.encoding, self.dtype, self.transposed, self.requires_grad, self.is_inference()]
        for x in (self.tensor, self.scales, self.zero_points):
            place = () if x is None else (x.storage_offset(), x.untyped_storage().nbytes(), x.dtype, str(x.device))
            looks.append(x if x is None else (tuple(x.shape), x.stride(), *place))
        return repr((type(self).__name__, *looks))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # torch's own __reduce_ex__ saves 8-bit floats so that pickle cannot load them, and marks of tensors.
        tensor = self.tensor.view(torch.uint8) if self.tensor.dtype in FLOAT8 else self.tensor.detach()
        scales, zero_points = (None if x is None else x.detach() for x in (self.scales, self.zero_points))
        parts = (tensor, self.tensor.dtype, scales, zero_points, self.encoding)
        return _saved, (*parts, self.dtype, self.transposed, self.packed is not None, isinstance(self, torch.nn.Parameter))

    @property
    def data(self) -> Tensor:
        """The weight without its history in autograd. Assigning a QuantizedWeight replaces it; other tensors are refused."""
        return super().data

    @data.setter
    def data(self, other: object) -> None:
        if not isinstance(other, QuantizedWeight):
            got = f"a tensor of {other.dtype}" if isinstance(other, Tensor) else type(other).__name__
            raise InvalidProblemError(
                f"data: got {got} for {self!r}, expected a QuantizedWeight; change floats before quantize_, and quantize then"
            )
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._hold(other.tensor, other.scales, other.zero_points, other.packed, other.encoding, other.transposed)

    def data_ptr(self) -> int:
        """Return a number, no address, by which libraries find weights that share memory; to torch 0, for there is no storage."""
        is_torch = sys._getframe(1).f_globals["__name__"].startswith("torch.")
        return 0 if is_torch or self.is_meta else self.tensor.data_ptr() | _NO_ADDRESS

    def _use_count(self) -> int:
        # Module.to replaces the weight by torch.utils.swap_tensors, which refuses a larger count: a gradient might be summed up in
        # the replaced tensor. Without a gradient every other holder, such as a graph until backward, keeps the old weight.
        return int(super()._use_count()) if self.requires_grad else 1  # type: ignore[misc]

    @property
    def numbers(self) -> Tensor | PackedOperand:
        """The numbers as they were given: a tensor, or the operand that ``prepack`` made of one."""
        return self.tensor if self.packed is None else self.packed

    @property
    def parts(self) -> list[Tensor]:
        """The numbers, and the scales and zero points if there are any."""
        return [x for x in (self.tensor, self.scales, self.zero_points) if x is not None]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all parts, without packed copies."""
        return sum(x.nbytes for x in self.parts)

    @property
    def blocks(self) -> Blocks:
        """Legal blocks of the weight for one scale."""
        return blocks_of(self.tensor)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the floats of the weight in ``dtype``, by default its own."""
        dtype = dtype or self.dtype
        if self.dim() == 3:
            assert self.scales is not None
            result = widened(self.tensor, self.scales, self.encoding, dtype)
        else:
            result = dequantized(self.tensor, self.scales, self.zero_points, self.encoding, dtype, legal=self.blocks)
        return result.mT if self.transposed else result

    def map_parts(self, function: Any, dtype: torch.dtype | None = None, *, transposed: bool | None = None) -> QuantizedWeight:
        """Apply ``function`` to each part and make a weight of the results; prepacked numbers stay prepacked."""
        tensor = function(self.tensor)
        scales, zero_points = (None if x is None else function(x) for x in (self.scales, self.zero_points))
        packed = None if self.packed is None else self.packed if tensor is self.tensor else PackedOperand(tensor)
        transposed = self.transposed if transposed is None else transposed
        return self._of(tensor, scales, zero_points, self.encoding, dtype or self.dtype, transposed=transposed, packed=packed)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        kind = self.encoding or dtype_name(self.tensor.dtype)
        scales = "no scales" if self.scales is None else f"scales {list(self.scales.shape)} {dtype_name(self.scales.dtype)}"
        zeros = "" if self.zero_points is None else ", zero points"
        prepacked = "" if self.packed is None else ", prepacked"
        return f"QuantizedWeight({list(self.shape)} {kind}, {scales}{zeros}{prepacked}, {self.device})"


def _saved(
    tensor: Tensor, numbers_dtype: torch.dtype, scales: Tensor | None, zero_points: Tensor | None, encoding: Encoding,
    dtype: torch.dtype, transposed: bool, prepacked: bool, parameter: bool,
) -> Tensor:  # fmt: skip
    """Make the weight of its saved parts."""
    numbers = tensor.view(numbers_dtype)
    weight = QuantizedWeight(PackedOperand(numbers) if prepacked else numbers, scales, zero_points, encoding, dtype=dtype)
    result: Tensor = weight.mT if transposed else weight
    return torch.nn.Parameter(result, requires_grad=False) if parameter else result


torch.serialization.add_safe_globals([_saved])
