"""Arguments made up from the schema of an operator, and the operators of aten that take a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor
SIDE = 32
"""Rows and columns of every matrix that is made up: a square fits the most operators."""

BY_NAME: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("index", "indices", "target", "self_indices"), lambda: torch.zeros(SIDE, SIDE, dtype=torch.int64)),
    **dict.fromkeys(("mask", "condition"), lambda: torch.ones(SIDE, SIDE, dtype=torch.bool)),
    **dict.fromkeys(("size", "shape", "output_size", "arg_size"), lambda: [SIDE, SIDE]),
    **dict.fromkeys(("split_sizes", "split_size"), lambda: [SIDE // 2, SIDE // 2]),
    **dict.fromkeys(("start", "tensor_indices_or_sections"), lambda: torch.tensor(1)),
    "sizes": lambda: [SIDE, 1],
    "stride": lambda: [SIDE, 1],
    "pad": lambda: [0, 0],
}
"""Arguments whose type alone does not say what fits, where they are of the type that this makes."""

BY_TYPE: dict[str, tuple[Callable[[], Any], ...]] = {
    "int": (lambda: 0, lambda: 1),
    "SymInt": (lambda: 0, lambda: 1),
    "float": (lambda: 0.5,),
    "number": (lambda: 2,),
    "bool": (lambda: False,),
    "List[int]": (lambda: [0], lambda: [1, 0], lambda: [SIDE, SIDE]),
    "List[SymInt]": (lambda: [0], lambda: [1, 0], lambda: [SIDE, SIDE]),
    "List[float]": (lambda: [0.5, 0.5],),
    "List[number]": (lambda: [2, 2],),
    "List[bool]": (lambda: [False],),
    "str": (lambda: "none", lambda: "sum"),
    "Device": (lambda: torch.device("cpu"),),
}
"""Values of other types than tensors, by the name of the type in a schema; several are tried in turn."""


class Case(NamedTuple):
    """An operator, and the place of the tensor argument that becomes a weight."""

    operator: Any
    place: int

    def __str__(self) -> str:
        return f"{self.operator}[{self.operator._schema.arguments[self.place].name}]"

    @property
    def argument(self) -> Any:
        """The argument in the schema."""
        return self.operator._schema.arguments[self.place]

    @property
    def is_written(self) -> bool:
        """The schema says that the operator writes into the argument."""
        alias = self.argument.alias_info
        return alias is not None and alias.is_write

    @property
    def is_viewed(self) -> bool:
        """The schema says that the result is a view of the argument."""
        alias = self.argument.alias_info
        return alias is not None and not alias.is_write

    def arguments(self, choice: int, weight: Callable[[], Tensor], other: Callable[[], Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Make arguments: ``weight()`` in the place, ``other()`` for each other tensor. ``choice`` picks among what may fit."""
        given: list[Any] = []
        named: dict[str, Any] = {}
        for i, argument in enumerate(self.operator._schema.arguments):
            if i != self.place and argument.has_default_value() and not argument.is_out:
                if argument.kwarg_only:
                    continue
                if i > self.place and not any(not x.has_default_value() for x in self.operator._schema.arguments[i:]):
                    continue
            value = _made(argument, choice, weight if i == self.place else other, chosen=i == self.place)
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                given.append(value)
        return given, named


def _made(argument: Any, choice: int, tensor: Callable[[], Tensor], *, chosen: bool) -> Any:
    """Make the value of one argument."""
    kind = str(argument.type)
    optional = kind.startswith("Optional[")
    kind = kind[len("Optional[") : -1] if optional else kind
    special = None if chosen or argument.name not in BY_NAME else BY_NAME[argument.name]()
    if "Tensor" in kind:
        if optional and not chosen:
            return None
        made = special if isinstance(special, Tensor) else tensor()
        return made if kind == "Tensor" else [made, tensor()] if kind == "List[Tensor]" else [made]
    if optional or argument.has_default_value():
        return argument.default_value
    if isinstance(special, list) and kind.startswith("List["):
        return special
    options = BY_TYPE.get(kind, (lambda: None,))
    return options[choice % len(options)]()


NAMED = ("align_as", "align_tensors", "align_to", "refine_names", "rename", "rename_")
"""Operators of named tensors."""


def cases() -> Iterator[Case]:
    """Every place of a tensor in every operator of aten, but those of named tensors, which torch 2.13 no longer has."""
    for whole in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = whole.partition("::")
        packet, _, overload = name.partition(".")
        of_names = packet in NAMED or "name" in overload.lower()
        if namespace != "aten" or of_names:
            continue
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        for place, argument in enumerate(operator._schema.arguments):
            if "Tensor" in str(argument.type):
                yield Case(operator, place)


CHOICES = range(3)
