"""Rendering of kernel templates, Jinja source that lies beside its backend."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources

import jinja2


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
    return environment().from_string(load_template(package, file_name))


@functools.cache
def epilogue_functions(compute: str) -> str:
    """CUDA C++ of the functions that an epilogue may use, ``f_exp`` and so on, of and with values of the type ``compute``."""
    return template(__package__, "functions.cuh.jinja").render(compute=compute)
