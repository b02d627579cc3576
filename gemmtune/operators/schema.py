"""The schema of each operator, and what of a call's arguments goes where."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..dispatch.arguments import Call, call_of
from ..problem.fused import BROUGHT, NAMES, Brought, Then
from ..problem.operation import Operation
from ..problem.operations import OPTIONS

NAMESPACE = "gemmtune"
_TYPES: dict[type, str] = {str: "str", bool: "bool"}
"""Schema types of options, by the type of their default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One public function as an operator: its tensors are positional, numbers and options are keywords.

    With ``may_tune=False`` it never tunes, also when a compiled graph runs it outside of the settings that it was traced under.
    Epilogues are Python functions, for which schemas have no type: a call with one is the operator followed by the function.
    """

    name: str
    row: Operation
    brought: Brought | None

    @property
    def qualified(self) -> str:
        """The name with its namespace, such as ``gemmtune::mm``."""
        return f"{NAMESPACE}::{self.name}"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensor arguments, in order."""
        return (*self.row.arguments, *([self.brought.argument] if self.brought is not None else []))

    @property
    def overload(self) -> Callable[..., Any]:
        """The overload in ``torch.ops`` that returns a new tensor."""
        return getattr(torch.ops.gemmtune, self.name).default  # type: ignore[no-any-return]

    @property
    def names_result(self) -> bool:
        """A call may name the dtype of the result."""
        return self.brought is not None or self.row.names_result

    def schema(self, *, out: bool) -> str:
        """The text of the schema: of the form that returns a new tensor, or of the one that writes into ``out``."""
        optional = {x.role for x in self.row.operands if not x.required}
        if self.brought is not None and not self.brought.required:
            optional.add(self.brought.argument)
        tensors = [f"Tensor? {name}=None" if name in optional else f"Tensor {name}" for name in self.tensors]
        words = [f"float {scalar}=1.0" for scalar in self.row.scalars]
        words += [f"{_TYPES[type(OPTIONS[x])]} {x}={_literal(OPTIONS[x])}" for x in self.row.options]
        words += ["ScalarType? out_dtype=None"] * self.names_result + ["bool may_tune=True"] + ["Tensor(a!) out"] * out
        arguments = ", ".join([*tensors, "*", *words])
        return f"{self.name}{'.out' if out else ''}({arguments}) -> {'()' if out else 'Tensor'}"

    def numbers(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Scalars and options by name, defaults included."""
        defaults = {**dict.fromkeys(self.row.scalars, 1), **{option: OPTIONS[option] for option in self.row.options}}
        return {name: words.get(name, default) for name, default in defaults.items()}

    def given(self, tensors: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """The tensors of a call of the operator by name, without those that are left out."""
        return {name: x for name, x in zip(self.tensors, tensors, strict=False) if x is not None}

    def call(self, tensors: Sequence[torch.Tensor | None], words: Mapping[str, Any], out: torch.Tensor | None = None) -> Call:
        """The call that the arguments of the operator state."""
        given, numbers = self.given(tensors), self.numbers(words)
        if not given["a"].is_floating_point() and not given["a"].is_complex():
            # torch takes no fractions as factors of integers, and a schema has no integers that may be fractions.
            numbers = {name: int(x) if isinstance(x, float) and x.is_integer() else x for name, x in numbers.items()}
        return call_of(
            self.name,
            given,
            scalars=[numbers[scalar] for scalar in self.row.scalars],
            options=[numbers[option] for option in self.row.options],
            brought=given.get(self.brought.argument) if self.brought is not None else None,
            out_dtype=words.get("out_dtype"),
            out=out,
        )

    def arguments(self, call: Call) -> tuple[list[torch.Tensor | None], dict[str, Any]]:
        """The arguments with which the operator does a call but for ``out`` and the caller's epilogue."""
        given = dict(call.operands)
        words: dict[str, Any] = dict(zip(self.row.scalars, map(float, call.scalars), strict=True)) | dict(call.options)
        if self.brought is not None:
            given |= dict(zip(call.extra_names, call.extra, strict=True))
        if self.names_result:
            words["out_dtype"] = call.out_dtype if callers_epilogue(call)[0] is None else torch.float32
        words = {word: value for word, value in words.items() if value is not None}
        return [given.get(name) for name in self.tensors], words


def callers_epilogue(call: Call) -> tuple[Callable[..., torch.Tensor] | None, tuple[torch.Tensor, ...]]:
    """The function that the caller gave and its operands, without what an argument such as a bias has become."""
    own = BROUGHT.get(call.name)
    if own is None or own.argument not in call.extra_names:
        return call.epilogue, call.extra
    return call.epilogue.function if isinstance(call.epilogue, Then) else None, call.extra[1:]


def _literal(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


OPERATORS = {name: Operator(name=name, row=row, brought=BROUGHT.get(name)) for name, row in NAMES.items() if not row.sparse}
"""The operators of products of strided tensors, by the name of the public function."""
