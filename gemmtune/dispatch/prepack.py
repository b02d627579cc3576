"""An operand that kernels may keep in the layout they like best."""

from __future__ import annotations

import threading

import torch

from ..choice import Choice
from ..errors import InvalidProblemError
from ..problem.dtypes import DTYPES, FLOAT8, dtype_name

__all__ = ["PackedOperand", "prepack"]

_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "mm": tuple(DTYPES),
    "addmm": tuple(DTYPES),
    "int_mm": (torch.int8,),
    "int_mm_mul": (torch.int8,),
    "mixed_mm": (torch.int8, torch.uint8, *FLOAT8),
    "scaled_mm": FLOAT8,
}
"""The operations that take a prepacked operand, and the dtypes that it may have."""


class PackedOperand:
    """The right operand of a GEMM, with room for packed copies. Made by ``prepack``; the operations take it in place of ``b``.

    ``tensor`` is the operand as given. A packed copy is made when the first kernel asks for its format, and made again after
    ``tensor`` was modified in place.
    """

    __slots__ = ("_copies", "_lock", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._copies: dict[str, tuple[int, torch.Tensor]] = {}
        self._lock = threading.Lock()

    @property
    def shape(self) -> torch.Size:
        """[K, N]"""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the operand."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """Where the operand lives."""
        return self.tensor.device

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copies, which come on top of the operand itself."""
        return sum(copy.nbytes for _, copy in self._copies.values())

    def for_choice(self, choice: Choice) -> torch.Tensor:
        """The operand as this choice wants it."""
        name = choice.packed_format
        if name is None:
            return self.tensor
        version = 0 if self.tensor.is_inference() else self.tensor._version
        with self._lock:
            made, copy = self._copies.get(name, (-1, None))
            if copy is None or made != version:
                packed = choice.pack(self.tensor.detach())
                if self.tensor.is_cuda:
                    if torch.cuda.is_current_stream_capturing():
                        return packed  # made anew by each replay: only then it has its numbers
                    packed = _in_place_of(copy, packed)
                self._copies[name] = (version, packed)
                copy = packed
        return copy

    def __reduce__(self) -> tuple[type[PackedOperand], tuple[torch.Tensor]]:
        """Copies of it, and what is saved, are made of the operand alone: packed copies belong to kernels of this process."""
        return (PackedOperand, (self.tensor,))

    def __repr__(self) -> str:
        return f"PackedOperand({list(self.shape)}, {self.dtype}, formats={sorted(self._copies)})"


def _in_place_of(old: torch.Tensor | None, packed: torch.Tensor) -> torch.Tensor:
    """The packed copy ready for every stream, in the memory of an older one if there is one, which a CUDA graph may read."""
    if old is not None and (old.shape, old.dtype) == (packed.shape, packed.dtype):
        packed = old.copy_(packed)
    torch.cuda.current_stream(packed.device).synchronize()
    return packed


def prepack(b: torch.Tensor, *, op: str | None = None) -> PackedOperand:
    """Let the kernels keep ``b`` in a layout of their own, so that packing is not part of each call.

    Args:
        b: [K, N], any strides: the right operand of a product, such as ``linear.weight.t()``; or packed weights of four bits,
            [K/2, N], for ``mixed_mm`` with an encoding. It is kept, not copied.
        op: the operation that it is for, such as ``"mixed_mm"``: then its dtype is checked here, and not in the first call.

    Returns:
        An operand that mm, addmm, int_mm, int_mm_mul, mixed_mm and scaled_mm take in place of ``b``. The memory of a packed copy,
        where a kernel wants one, comes on top of that of ``b``. In-place changes of ``b`` are noticed (by its version counter) and
        packed anew.

    Raises:
        InvalidProblemError: ``b`` is not a 2-D tensor, or not of a dtype that ``op`` takes.
    """
    if not isinstance(b, torch.Tensor) or b.dim() != 2:
        got = f"a {b.dim()}-D tensor" if isinstance(b, torch.Tensor) else type(b).__name__
        raise InvalidProblemError(f"prepack: b must be a 2-D tensor [K, N], got {got}")
    if op is not None and op not in _DTYPES:
        raise InvalidProblemError(f"prepack: op: got {op!r}, expected one of {', '.join(_DTYPES)}, or None")
    if op is not None and b.dtype not in _DTYPES[op]:
        expected = ", ".join(map(dtype_name, _DTYPES[op]))
        raise InvalidProblemError(f"prepack: dtype of b: got {b.dtype}, expected for {op} one of {expected}")
    return PackedOperand(b)
