"""An operand that kernels may keep in the layout they like best."""

from __future__ import annotations

import threading

import torch

from ..choice import Choice
from ..errors import InvalidProblemError

__all__ = ["PackedOperand", "prepack"]


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
            made, copy = self._copies.get(name, (-1, self.tensor))
            if made != version:
                copy = choice.pack(self.tensor.detach())
                self._copies[name] = (version, copy)
        return copy

    def __repr__(self) -> str:
        return f"PackedOperand({list(self.shape)}, {self.dtype}, formats={sorted(self._copies)})"


def prepack(b: torch.Tensor) -> PackedOperand:
    """Let the kernels keep ``b`` in a layout of their own, so that packing is not part of each call.

    Args:
        b: [K, N], any strides: the right operand of mm and addmm, such as ``linear.weight.t()``. It is kept, not copied.

    Returns:
        An operand that ``gemmtune.mm`` and ``gemmtune.addmm`` take in place of ``b``. The memory of the packed copy comes on top of
        that of ``b``. In-place changes of ``b`` are noticed (by its version counter) and packed anew.

    Raises:
        InvalidProblemError: ``b`` is not a 2-D tensor.
    """
    if not isinstance(b, torch.Tensor) or b.dim() != 2:
        got = f"a {b.dim()}-D tensor" if isinstance(b, torch.Tensor) else type(b).__name__
        raise InvalidProblemError(f"prepack: b must be a 2-D tensor [K, N], got {got}")
    return PackedOperand(b)
