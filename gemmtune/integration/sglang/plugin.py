"""What ``register`` does in an SGLang that has the extension points."""

from typing import Any

from ... import settings
from ..serving.start import logger
from . import experts, linear, mixed, scaled
from .points import EXPERTS, MIXED, SCALED, Points

_registries = list[object]()
"""Registries that have our hooks."""


def install(points: Points) -> None:
    """Register our hooks, once. SGLang applies them when all plugins are loaded."""
    if points.registry in _registries:
        return
    _registries.append(points.registry)

    def loaded(original: Any, method: Any, layer: Any) -> None:
        if not mixed.convert(method, layer, points):
            original(method, layer)
            scaled.note(layer, points)

    quantized = [x for x in (*MIXED, *SCALED) if x in points.targets]
    for target in quantized:
        points.registry.register(f"{target}.process_weights_after_loading", loaded, points.around)
    for hooks in (linear.hooks, mixed.hooks, scaled.hooks, experts.hooks):
        for target, hook in hooks(points):
            points.registry.register(target, hook, points.around)
    log = logger(points.name)
    absent = [x for x in (*MIXED, *SCALED) if x not in quantized] + [EXPERTS] * (points.combined is None)
    if absent:
        log.info("gemmtune leaves layers of %s as they are, which this SGLang has otherwise or not at all", ", ".join(absent))
    log.info("gemmtune runs layers that have tables in %s", settings.current().store_file)
