"""An operand that kernels may keep in the layout they like best."""

import logging
from collections.abc import Sequence
from weakref import ref

import torch

from .. import forks
from ..choice import Choice
from ..numerics.block_sparse import parts
from .freshness import Stamp, is_uncounted

log = logging.getLogger("gemmtune")


class PackedOperand:
    """The weight of a GEMM, with room for packed copies. Made by ``prepack``; the operations take it in place of ``b`` or ``bsr``.

    ``tensor`` is the operand as given. A packed copy is made when the first kernel needs its format. It is made again after
    each change of ``tensor`` that ``freshness`` notices. After any other change call ``refresh()``.

    Args:
        tensor: the operand.
        sources: the tensors whose changes count, if ``tensor`` is an alias of them whose version does not count their changes.
    """

    __slots__ = ("__weakref__", "_copies", "_lock", "_sources", "tensor")

    def __init__(self, tensor: torch.Tensor, sources: Sequence[torch.Tensor] | None = None) -> None:
        self.tensor = tensor
        self._sources = None if sources is None else tuple(ref(x) for x in sources)
        self._copies: dict[str, tuple[Stamp, torch.Tensor]] = {}
        self._lock = forks.lock()
        if is_uncounted(tensor):
            log.warning(
                "prepack: torch counts no changes of an inference tensor, so it is packed again for each call; "
                "clone() it outside of torch.inference_mode() first"
            )

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
        with self._lock:
            stamp, copy = self._copies.get(name, (None, None))
            watched = self._watched()
            if copy is None or stamp is None or not stamp.holds(watched):
                stamp = Stamp.of(watched)
                packed = choice.pack(self.tensor.detach())
                if self.tensor.is_cuda:
                    if torch.cuda.is_current_stream_capturing():
                        return packed  # made anew by each replay: only then it has its numbers
                    packed = _in_place_of(copy, packed)
                self._copies[name] = (stamp, packed)
                copy = packed
        return copy

    def _watched(self) -> Sequence[torch.Tensor]:
        if self._sources is None:
            return parts(self.tensor)
        return [x for source in self._sources if (x := source()) is not None]

    def refresh(self) -> None:
        """Make the next calls pack the operand again.

        Use it after changes that neither torch nor gemmtune notices, such as ``tensor.data.copy_(…)`` on a GPU. A captured CUDA
        graph keeps using the memory of the copies. The next call outside of it writes the new numbers there.
        """
        with self._lock:
            self._copies = {name: (Stamp((), 0), copy) for name, (_, copy) in self._copies.items()}

    def __reduce__(self) -> "tuple[type[PackedOperand], tuple[torch.Tensor]]":
        """Copies of it, and what is saved, are made of the operand alone: packed copies belong to kernels of this process."""
        return (PackedOperand, (self.tensor,))

    def __repr__(self) -> str:
        return f"PackedOperand({list(self.shape)}, {self.dtype}, formats={sorted(self._copies)})"


torch.serialization.add_safe_globals([PackedOperand])  # what it is made of is a tensor alone, and making one runs nothing


def _in_place_of(old: torch.Tensor | None, packed: torch.Tensor) -> torch.Tensor:
    """The packed copy ready for every stream, in the memory of an older one if there is one, which a CUDA graph may read."""
    if old is not None and [(x.shape, x.dtype) for x in parts(old)] == [(x.shape, x.dtype) for x in parts(packed)]:
        for there, fresh in zip(parts(old), parts(packed), strict=True):
            there.copy_(fresh)
        packed = old
    torch.cuda.current_stream(packed.device).synchronize()
    return packed
