"""Calls by name: the signature of each public function, and the call that given arguments make."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ..dispatch.arguments import Call
from ..dispatch.calls import call_of
from ..problem.fused import BROUGHT, NAMES
from ..problem.operations import OPTIONS
from ..quantized.arguments import float8_parts, parts_of


def signature_of(name: str) -> inspect.Signature:
    """Return the parameters of the public function ``name``, by its row and its own argument."""
    row, own = NAMES[name], BROUGHT.get(name)
    optional = [operand.role for operand in row.operands if not operand.required]
    positional = [role for role in row.arguments if role not in optional]
    keywords: dict[str, object] = {**dict.fromkeys(optional), **dict.fromkeys(row.scalars, 1)}
    keywords |= {option: OPTIONS[option] for option in row.options}
    if own is not None:
        positional += [own.argument] * own.required
        keywords |= {} if own.required else {own.argument: None}
    if own is not None or row.names_result:
        keywords |= {"out_dtype": None}
    keywords |= {"out": None} if own is not None and own.required else {"out": None, "epilogue": None, "epilogue_args": ()}
    kind = inspect.Parameter
    return inspect.Signature(
        # A QuantizedWeight brings its scale along.
        [
            kind(role, kind.POSITIONAL_OR_KEYWORD, default=None if role == "scale_b" and not row.grouped else kind.empty)
            for role in positional
        ]
        + [kind(word, kind.KEYWORD_ONLY, default=value) for word, value in keywords.items()]
    )


def bound_call(name: str, operands: Sequence[object], arguments: Mapping[str, Any]) -> Call:
    """Return the call of the public function ``name`` with these arguments. Raises TypeError for unknown or missing ones."""
    row, own = NAMES[name], BROUGHT.get(name)
    bound = signature_of(name).bind(*operands, **arguments)
    bound.apply_defaults()
    given = bound.arguments
    if row.grouped:
        pass  # no grouped weight brings its scales
    elif "encoding" in row.options:
        parts = parts_of(name, given["b"], given["scale_b"], given["zero_b"], given["encoding"])
        given |= dict(zip(("b", "scale_b", "zero_b", "encoding"), parts, strict=True))
    elif row.operand("scale_b") is not None:
        given["b"], given["scale_b"] = float8_parts(name, given["b"], given["scale_b"])
    return call_of(
        name,
        given,
        scalars=[given[scalar] for scalar in row.scalars],
        options=[given[option] for option in row.options],
        brought=given[own.argument] if own is not None else None,
        **{word: given[word] for word in ("out_dtype", "out", "epilogue", "epilogue_args") if word in given},
    )
