"""Launches as plain data: what the native look-up does by itself, without the Python function that does the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..choice import Prepared
from .driver import Driver
from .record import Record


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLaunch(Prepared):
    """What a record says, for the kernel ``function`` of a device's primary ``context``; it needs no workspace.

    ``skipped`` is the place of a tensor of the call that the record has no number for. ``owner`` keeps the kernel loaded.
    """

    record: Record
    driver: Driver
    function: int
    context: int
    skipped: int | None
    owner: object
