"""Values of this package as plain JSON values, so that equal values have equal texts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .dtypes import dtype_name
from .epilogue import Ref

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """Dataclasses as mappings, tuples as lists, dtypes by name, references to a graph's nodes as ``%3``; all else as it is."""
    match value:
        case torch.dtype():
            return dtype_name(value)
        case Ref():
            return f"%{value.index}"
        case tuple():
            return [plain(v) for v in value]
        case _ if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        case _:
            return value
