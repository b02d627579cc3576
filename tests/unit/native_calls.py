"""Calls as the native look-up is given them, and what Python's table has for the same."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from gemmtune import settings
from gemmtune.dispatch.keys import NOTHING, key_of
from gemmtune.dispatch.ready import forget_plans, ready
from gemmtune.dispatch.scalars import usual_classes
from gemmtune.native import lookup
from gemmtune.native.lookup import native
from gemmtune.ops import operate as path

__all__ = ["Arguments", "arguments", "found", "in_place", "known_to_python"]

Arguments = tuple[Any, ...]


@contextlib.contextmanager
def in_place(**patch: Any) -> Iterator[None]:
    """The look-up is in use, with these settings and nothing kept before or behind."""
    native.begun = False
    lookup.load(path.FOR_NATIVE)
    forget_plans()
    try:
        with settings.patch(**patch):
            yield
    finally:
        native.call, native.layer, native.begun = None, None, True
        forget_plans()


def arguments(
    name: str,
    *operands: Any,
    out: Any = None,
    epilogue: Any = None,
    epilogue_args: Any = NOTHING,
    scalars: tuple[Any, ...] = (),
    options: tuple[Hashable, ...] = (),
    brought: Any = None,
    out_dtype: Any = None,
) -> Arguments:
    """The arguments of ``look_up``."""
    return (name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype, *operands)


def found(call: Arguments) -> Any:
    """The entry that the native look-up runs; False: no call like it was kept; None: Python looks closer."""
    return native.module.found(*call)


def known_to_python(call: Arguments) -> Any:
    """The entry that Python's table has; None for none."""
    name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype, *operands = call
    given = tuple(operands)
    given = given if brought is None else (*given, brought)
    asked: Any = options if out_dtype is None else (options, out_dtype)
    if scalars:
        asked = usual_classes(*scalars)
    if out is None and epilogue is None and epilogue_args is NOTHING:
        key = key_of(name, given, asked)
    else:
        key = path._key_of_more(name, given, asked, out, epilogue, epilogue_args)
    return None if key is None else ready.get(key)


def run(call: Arguments) -> torch.Tensor:
    """The call, as a public function makes it."""
    name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype, *operands = call
    return path.operate(name, tuple(operands), out, epilogue, epilogue_args, scalars, options, brought, out_dtype)
