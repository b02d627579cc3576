"""Layers that we run, as part of the key of vLLM's compiled graphs."""

from typing import Any

from ..serving.tables import log_once
from .points import Points

KEY = "gemmtune"
"""Entry of vLLM's ``additional_config`` with the layers that we run. It is part of the key of vLLM's compiled graphs."""


def note(points: Points, layer: str) -> bool:
    """Make a layer that we run part of the key of vLLM's compiled graphs. Return False where vLLM has no place for it."""
    config: Any = getattr(points.config(), "additional_config", None)
    if not isinstance(config, dict):
        reason = "its additional_config is no dict, so the key of its compiled graphs cannot have the layer"
        log_once(points.name, f"vLLM runs {layer}: {reason}")
        return False
    config[KEY] = sorted({*config.get(KEY, ()), layer})
    return True
