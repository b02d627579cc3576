"""The parts of a kernel's text that every family has."""

from __future__ import annotations

import functools

from ..render import driver_functions, epilogue_functions, template

__all__ = ["common_parts"]


@functools.cache
def common_parts(*, fused: bool = True) -> dict[str, str]:
    """CUDA C++ by the part's name; ``fused``: with the functions that an epilogue may use.

    ``barriers``: PTX of barriers, clusters and overlapping launches; ``pointwise``: elements in memory; of the host, ``driver``:
    launches, and ``maps``: descriptions of operands for TMA.
    """
    functions = epilogue_functions("float")
    return {
        "barriers": template(__package__, "barriers.cuh.jinja").render(),
        "pointwise": template(__package__, "pointwise.cuh.jinja").render(fused=fused, functions=functions),
        "driver": driver_functions(),
        "maps": template(__package__, "maps.h.jinja").render(),
    }
