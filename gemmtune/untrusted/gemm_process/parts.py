"""Functions of modules and classes, and what has taken their place: other functions, other bases, another class of a module."""

from __future__ import annotations

import builtins
import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, ClassMethodDescriptorType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

BOUND = (staticmethod, classmethod)
FOLDERS = {x.__name__: os.path.join(next(iter(x.__path__)), "") for x in (torch, np)}
"""Folders of the packages that change classes of their own."""


HEAD, AFTER_HEAD, METHOD = object.__basicsize__, ctypes.c_size_t * 5, ctypes.c_size_t * 3
"""Bytes at the begin of each object of Python, the words after these, and the first words of the entry of a method in C."""
DESCRIPTORS = (MethodDescriptorType, ClassMethodDescriptorType)


WORDS, HEAP_TYPE = ctypes.c_void_p * 40, 1 << 9
"""Words of a class in C, and the flag of the other ones."""
SLOTS = (*range(6, 21), 23, 24, 25, 27, 28, 34, 35, 37, 38, 39)
"""Places of addresses of functions among these words: all but flags, caches and dictionaries."""
PARTS = {12: 36, 13: 10, 14: 3}
"""Places of the addresses of further functions, for numbers, sequences and mappings, with their counts."""


class Part(NamedTuple):
    """Module or class, with its variables and the functions among these."""

    owner: Any
    name: str
    form: tuple[Any, ...]
    space: Mapping[str, Any]
    names: frozenset[str]
    functions: list[tuple[str, Any, object]]
    """Names, functions and their code."""

    def others(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield each function that is another one now: its full name, its name, and what it was and is."""
        get = self.space.get
        for name, value, code in self.functions:
            if (now := get(name)) is not value or _code(value) != code:
                yield f"{self.name}.{name}", name, value, now
        if len(self.space) != len(self.names):  # a new function of a class may hide an inherited one
            for name in self.space.keys() - self.names:
                if (value := _inherited(self.form, name)) is not None and not self._is_of_package(get(name)):
                    yield f"{self.name}.{name}", name, value, get(name)
        if (form := _form(self.owner)) != self.form:
            yield f"the class of {self.name}, or a slot of it", "", self.form, form

    def _is_of_package(self, function: Any) -> bool:
        """Return True for a function that the package of the class has added itself, when another module of it was imported."""
        folder = FOLDERS.get(self.name.partition(".")[0])
        code = getattr(getattr(function, "func", function), "__code__", None)  # partial functions have one inside
        return folder is not None and getattr(code, "co_filename", "").startswith(folder)


def parts_of(owners: Iterable[Any]) -> list[Part]:
    """Return modules and classes with their functions."""
    return [_part(x, vars(x)) for x in owners]


def _part(owner: Any, space: Mapping[str, Any]) -> Part:
    # Attributes that a module lacks may import others.
    name = f"{owner.__module__}.{owner.__name__}" if isinstance(owner, type) else str(space.get("__name__", ""))
    functions = [(key, x, _code(x)) for key, x in space.items() if _is_function(x)]
    return Part(owner=owner, name=name, form=_form(owner), space=space, names=frozenset(space), functions=functions)


def _is_function(value: Any) -> bool:
    return callable(value) or issubclass(type(value), BOUND)  # reading __class__ runs code of some objects


def _code(function: Any) -> object:
    """Return the code of a function, or the addresses of that of a function of C, which other code of C can replace."""
    kind = type(function)
    if kind is FunctionType:
        return function.__code__, *map(id, (function.__defaults__ or ()) + tuple((function.__kwdefaults__ or {}).values()))
    if kind in BOUND:
        return _code(function.__func__)
    if kind is BuiltinFunctionType:
        method, _self, _module, _references, called = AFTER_HEAD.from_address(id(function) + HEAD)
        return method, called, *METHOD.from_address(method)
    if kind in DESCRIPTORS:
        _type, _name, _full_name, method, called = AFTER_HEAD.from_address(id(function) + HEAD)
        return method, called, *METHOD.from_address(method)
    return tuple(AFTER_HEAD.from_address(id(function) + HEAD)[3:]) if kind is WrapperDescriptorType else None


def _form(owner: Any) -> tuple[Any, ...]:
    """Return the class of a module or of a class, the classes from which the latter inherits, and the slots of one in C."""
    if not isinstance(owner, type):
        return (type(owner),)
    return (type(owner), *owner.__mro__[1:], *(() if owner.__flags__ & HEAP_TYPE else _slots(owner)))


def _slots(owner: type) -> tuple[int | None, ...]:
    """Return the addresses of the functions that operators call for a class in C."""
    found = list(WORDS.from_address(id(owner)))
    of_parts = (x for place, count in PARTS.items() if found[place] for x in (ctypes.c_void_p * count).from_address(found[place]))
    return (*(found[place] for place in SLOTS), *of_parts)


def _inherited(form: tuple[Any, ...], name: str) -> Any:
    """Return the function of this name that a class of this form inherits, or None."""
    return next((found for base in form[1:] if isinstance(base, type) and _is_function(found := vars(base).get(name))), None)
