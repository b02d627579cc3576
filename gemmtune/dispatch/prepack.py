"""An operand that kernels may keep in the layout they like best."""

from __future__ import annotations

import threading

import torch

from ..choice import Choice
from ..numerics.block_sparse import parts


class PackedOperand:
    """The weight of a GEMM, with room for packed copies. Made by ``prepack``; the operations take it in place of ``b`` or ``bsr``.

    ``tensor`` is the operand as given. A packed copy is made when the first kernel asks for its format, and made again after
    ``tensor`` was modified in place. ``version`` counts its changes up where it is made of tensors that tell of them instead.
    """

    __slots__ = ("_copies", "_lock", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version: tuple[int, ...] | None = None
        self._copies: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}
        self._lock = threading.Lock()

    @property
    def shape(self) -> torch.Size:
        """The operand's shape, [K, N]."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the operand."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """The device on which the operand lives."""
        return self.tensor.device

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copies, which come on top of the operand itself."""
        return sum(part.nbytes for _, copy in self._copies.values() for part in parts(copy))

    def for_choice(self, choice: Choice) -> torch.Tensor:
        """The operand as this choice wants it."""
        name = choice.packed_format
        if name is None:
            return self.tensor
        version = version_of(self.tensor) if self.version is None else self.version
        with self._lock:
            made, copy = self._copies.get(name, ((), None))
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


torch.serialization.add_safe_globals([PackedOperand])  # what it is made of is a tensor alone, and making one runs nothing


def version_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """What in-place changes count up: of a block-sparse tensor the versions of its values and indices."""
    return tuple([0 if part.is_inference() else part._version for part in parts(tensor)])


def _in_place_of(old: torch.Tensor | None, packed: torch.Tensor) -> torch.Tensor:
    """The packed copy ready for every stream, in the memory of an older one if there is one, which a CUDA graph may read."""
    if old is not None and [(x.shape, x.dtype) for x in parts(old)] == [(x.shape, x.dtype) for x in parts(packed)]:
        for there, fresh in zip(parts(old), parts(packed), strict=True):
            there.copy_(fresh)
        packed = old
    torch.cuda.current_stream(packed.device).synchronize()
    return packed
