"""Rendering of kernel templates: Jinja sources next to their backends."""

import functools
import hashlib
from importlib import resources

import jinja2


@functools.cache
def environment() -> jinja2.Environment:
    """Return the Jinja environment of all templates. An undefined name raises an error instead of giving an empty string."""
    return jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)


@functools.cache
def load_template(package: str, file_name: str) -> str:
    """Return the text of a template next to its backend, such as ``("gemmtune.backends.triton", "mm.py.jinja")``."""
    return resources.files(package).joinpath(file_name).read_text(encoding="utf-8")


@functools.cache
def template_digest(package: str, file_name: str) -> str:
    return hashlib.sha256(load_template(package, file_name).encode()).hexdigest()


@functools.cache
def template(package: str, file_name: str) -> jinja2.Template:
    return environment().from_string(load_template(package, file_name))


@functools.cache
def epilogue_functions(compute: str) -> str:
    """Return the CUDA C++ functions that an epilogue may use, such as ``f_exp``, for values of the type ``compute``."""
    return template(__package__, "functions.cuh.jinja").render(compute=compute)
