"""The plugin for vLLM: its linear layers and experts run by our tables. vLLM finds ``register`` by the entry point
``vllm.general_plugins``."""

from ..serving.start import start
from .points import find_points


def register() -> None:
    """Let vLLM run our kernels. vLLM calls this in each of its processes, where it may run several times.

    One line in the log names what the installed vLLM lacks. vLLM then goes on unchanged.
    """
    start("vLLM", find_points, __name__)
