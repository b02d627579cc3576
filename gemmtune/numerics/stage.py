"""Memory in which the operands of many calls lie one after another, for layouts with large gaps."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..problem import Layout, Problem
from .buffers import distinct, element_bits, placed
from .guards import Watch
from .operands import Operands
from .slots import copy_elements, tight


class Stage:
    """A buffer for each operand with large gaps, which holds the elements of one call at a time and NaN between them.

    Operands of ``tight_problem`` are copied into it on the current stream, so after the kernels that read the previous ones.
    The copied operands stay as they are: references and later calls read them.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._held = {role: placed(layout, device, None) for role, layout in problem.operands if tight(layout) != layout}
        self._sources: dict[str, torch.Tensor] = {}
        self._clear()
        self._gaps = Watch(self._held)

    def place(self, operands: Operands) -> Operands:
        """Return the operands in the problem's layouts, valid until the next call of this method."""
        given = {role: getattr(operands, role) for role in self._held}
        self._sources = {role: x for role, x in given.items() if x.stride() != self._held[role].stride()}
        for role, source in self._sources.items():
            copy_elements(self._held[role], source)
        here: dict[str, Any] = {role: self._held[role] for role in self._sources}
        return dataclasses.replace(operands, **here)

    def of_its_own(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the operand that was placed last, in a buffer that no later call gets, or ``tensor`` if it is not on the stage."""
        if role not in self._sources:
            return tensor
        made = placed(Layout.of(tensor), tensor.device, None)
        copy_elements(made, tensor)
        return made

    def changed(self) -> dict[str, torch.Tensor]:
        """Return a boolean on the device for each operand placed last: True if one of its elements has changed."""
        held = {role: distinct(self._held[role]) for role in self._sources}
        return {role: (element_bits(held[role]) != element_bits(distinct(x))).any() for role, x in self._sources.items()}

    def gaps_changed(self) -> dict[str, torch.Tensor]:
        """Return a flag on the device for each buffer: True if memory around or between elements changed. The elements are lost."""
        self._clear()
        return dict(zip(self._gaps.names, self._gaps.changed(), strict=True))

    def _clear(self) -> None:
        for held in self._held.values():
            element_bits(distinct(held)).zero_()
