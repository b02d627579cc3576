"""The plugin for SGLang: its linear layers and experts run by our tables. SGLang finds ``register`` by the entry point
``sglang.srt.plugins``."""

from ..serving.start import start
from .points import find_points


def register() -> None:
    """Register our hooks. SGLang calls this in each of its processes, and applies the hooks afterwards.

    One line in the log names what the installed SGLang lacks. SGLang then goes on unchanged.
    """
    start("SGLang", find_points, __name__)
