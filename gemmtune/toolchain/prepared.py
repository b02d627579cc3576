"""Launches as plain data: what the native look-up does by itself, without the Python function that does the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..choice import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFunction(Prepared):
    """A C function of a shared object of the cpp backend, at the address ``function``, with its plan at the address ``plan``.

    ``plain``: it is ``gemmtune_product``, else ``gemmtune_gemm``. ``swapped``: it is given b before a. ``added``: the third tensor
    is inp. ``owner`` keeps code and plan in memory.
    """

    function: int
    plan: int
    plain: bool
    swapped: bool
    added: bool
    owner: object


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOperation(Prepared):
    """An operation of torch on the tensors and scalars of a call. ``inp`` says how it gets inp: as a ``vector`` of N, expanded to
    the ``matrix``, or as it is given."""

    operation: Literal["mm", "bmm", "addmm", "baddbmm"]
    inp: Literal["given", "vector", "matrix"] = "given"
