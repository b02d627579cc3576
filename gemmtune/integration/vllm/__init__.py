"""The plugin for vLLM: its linear layers run by our tables. vLLM finds ``register`` by the entry point ``vllm.general_plugins``."""

import logging
from importlib import import_module

from ... import settings
from .points import Points, find_points

log = logging.getLogger("vllm.gemmtune")
"""A child of vLLM's logger, so that its lines have the level and the format that the user chose there."""


def register() -> None:
    """Let vLLM run our kernels. vLLM calls this in each of its processes, where it may run several times.

    One line in the log names what the installed vLLM lacks. vLLM then goes on unchanged.
    """
    chosen = settings.current()
    if chosen.vllm == "0" or chosen.disable:
        log.info("gemmtune leaves vLLM as it is, because %s is set", "GEMMTUNE_DISABLE" if chosen.disable else "GEMMTUNE_VLLM=0")
        return
    found = find_points()
    if not isinstance(found, Points):
        log.warning("gemmtune leaves vLLM %s as it is, because it lacks %s", found.version, ", ".join(found.names))
        return
    import_module(".plugin", __package__).install(found)  # torch and our operators
