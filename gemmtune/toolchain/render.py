"""Rendering of kernel templates: Jinja source with hooks, some of whose text is known only at the end.

A template calls hooks such as ``{{ def_kernel("a", "b") }}``. What a hook prints may depend on what later hooks ask for (the
signature needs every stride that the body uses), so rendering has two steps: ``render`` leaves a placeholder for each deferred
hook, ``PartialRender.finalize`` replaces one. Finalizing a hook twice, or one that was never registered, is an error, and so is
asking for the text while a placeholder is left.

The language's own part (how an argument, a load or a store is written) is in the backend: see ``triton/source.py``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import jinja2

__all__ = [
    "HookError",
    "PartialRender",
    "driver_functions",
    "environment",
    "epilogue_functions",
    "load_template",
    "render",
    "template",
    "template_digest",
]


class HookError(RuntimeError):
    """A template's hooks were used in a way that would leave wrong text in the source."""


@functools.cache
def environment() -> jinja2.Environment:
    """The Jinja environment of every template: an undefined name is an error, never an empty string."""
    return jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)


@functools.cache
def load_template(package: str, file_name: str) -> str:
    """The text of a template that lies beside its backend, such as ``("gemmtune.backends.triton", "mm.py.jinja")``."""
    return resources.files(package).joinpath(file_name).read_text(encoding="utf-8")


@functools.cache
def template_digest(package: str, file_name: str) -> str:
    """The SHA-256 of a template's text, in hexadecimal."""
    return hashlib.sha256(load_template(package, file_name).encode()).hexdigest()


@functools.cache
def template(package: str, file_name: str) -> jinja2.Template:
    """The same, compiled once in a process."""
    return _compiled(load_template(package, file_name))


@functools.cache
def epilogue_functions(compute: str) -> str:
    """CUDA C++ of the functions that an epilogue may use, ``f_exp`` and so on, of and with values of the type ``compute``."""
    return template(__package__, "functions.cuh.jinja").render(compute=compute)


@functools.cache
def driver_functions() -> str:
    """CUDA C++ of the host that launches a kernel through the driver: ``driver_function``, ``prepare``, ``launch_prepared``."""
    return template(__package__, "driver.h.jinja").render()


@functools.cache
def _compiled(text: str) -> jinja2.Template:
    return environment().from_string(text)


class PartialRender:
    """The text of a template with a placeholder for each hook that is not finalized yet.

    The placeholders come from ``defer``, which the hooks call while the template is rendered.
    """

    def __init__(self) -> None:
        self._text = ""
        self._hooks: dict[str, Callable[[], str]] = {}
        self._finalized: set[str] = set()

    def defer(self, name: str, text: Callable[[], str]) -> str:
        """Register a hook and return its placeholder. Raises HookError for a name that is registered already."""
        if name in self._hooks:
            raise HookError(f"hook {name!r} is registered twice; a template calls it once")
        self._hooks[name] = text
        return _placeholder(name)

    def fill(self, text: str) -> None:
        """Give the rendered text, once, after the template was run."""
        self._text = text

    @property
    def pending(self) -> tuple[str, ...]:
        """Hooks that are registered and not finalized, in the order of registration."""
        return tuple(name for name in self._hooks if name not in self._finalized)

    def finalize(self, name: str) -> None:
        """Put in the text of one hook.

        Raises:
            HookError: the hook was never registered, was finalized before, or its placeholder is not in the text exactly once.
        """
        if name not in self._hooks:
            known = ", ".join(self._hooks) or "none"
            raise HookError(f"hook {name!r} was never registered; the registered ones are: {known}")
        if name in self._finalized:
            raise HookError(f"hook {name!r} was finalized before; each hook is finalized once")
        found = self._text.count(_placeholder(name))
        if found != 1:
            raise HookError(f"hook {name!r} stands {found} times in the rendered text, expected once")
        self._finalized.add(name)
        self._text = self._text.replace(_placeholder(name), self._hooks[name]())

    def finalize_all(self) -> str:
        """Finalize every pending hook in the order of registration and return the text."""
        for name in self.pending:
            self.finalize(name)
        return self.text

    @property
    def text(self) -> str:
        """The finished text. Raises HookError while a hook is pending."""
        if self.pending:
            raise HookError(f"hooks {', '.join(self.pending)} are not finalized; finalize them before the text is used")
        return self._text


def render(text: str, hooks: Mapping[str, Callable[..., Any]], values: Mapping[str, Any], partial: PartialRender) -> PartialRender:
    """Run a template over ``values`` and ``hooks``; what the hooks deferred stays pending in ``partial``.

    Raises:
        jinja2.UndefinedError: the template uses a name that is neither a value nor a hook.
        HookError: a name is both.
    """
    both = set(hooks) & set(values)
    if both:
        raise HookError(f"names are used for a hook and for a value: {', '.join(sorted(both))}")
    partial.fill(_compiled(text).render(**hooks, **values))
    return partial


def _placeholder(name: str) -> str:
    return f"<<hook:{name}>>"
