"""A seal on what answers rest on, checked after each call of a GEMM, and JSON that no GEMM replaces."""

from __future__ import annotations

import builtins
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_, itemgetter
from types import MappingProxyType
from typing import Any

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own


def sealed(spaces: Sequence[tuple[str, Mapping[str, Any], Sequence[str]]]) -> Callable[[], list[str]]:
    """Return a function that names what has been replaced since its last call, each once.

    Args:
        spaces: names of modules and classes, with their variables and the names of those that stay as they are now. A class must
            not get further ones.
    """
    kept = [(name, space, tuple(keys), itemgetter(*keys)(space), itemgetter(*keys), len(space)) for name, space, keys in spaces]
    named: set[str] = set()
    of_class = MappingProxyType

    def changed() -> list[str]:
        found = []
        for name, space, keys, values, get, size in kept:
            try:
                now = get(space)
            except KeyError:
                now = tuple(space.get(key) for key in keys)
            if not all(map(is_, now, values)):
                found += [f"{name}.{key}" for key, old, new in zip(keys, values, now, strict=True) if old is not new]
            elif type(space) is of_class and len(space) != size:
                found.append(f"a part of {name}")
        fresh = [name for name in found if name not in named]
        named.update(fresh)
        return fresh

    return changed


def encoder() -> Callable[[Mapping[str, Any]], bytes]:
    """Return an encoder of JSON in C, which no Python code changes."""

    def refuse(value: object) -> None:
        raise TypeError(f"got {type(value).__name__}, expected plain values")

    made: Any = json.encoder
    encode = made.c_make_encoder(None, refuse, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, True)
    return lambda value: "".join(encode(value, 0)).encode()


def checker(replaced: Callable[[], list[str]], note: Callable[[str, str], None]) -> Callable[[], None]:
    """Return a function that notes what has been replaced."""

    def check() -> None:
        for name in replaced():
            note("replaces", name)

    return check


def messages(fd: int) -> Iterator[dict[str, Any]]:
    """Yield the questions until the caller closes the pipe."""
    receive, loads, unpack = os.read, json.loads, struct.unpack

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = receive(fd, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    while True:
        try:
            yield loads(read(*unpack("!i", read(4))))
        except EOFError:
            return
