"""The parts of a kernel's text that every family has."""

from __future__ import annotations

import functools

import torch

from ...toolchain.render import driver_functions, epilogue_functions, template

__all__ = ["ELEMENTS", "MAP_TYPES", "common_parts"]

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""Of operands that are multiplied, as PTX writes them."""
MAP_TYPES = {
    torch.bfloat16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    torch.float16: "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    torch.float32: "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
}
"""Of what TMA copies."""


@functools.cache
def common_parts(*, fused: bool = True) -> dict[str, str]:
    """CUDA C++ by the part's name; ``fused``: with the functions that an epilogue may use.

    ``barriers``: PTX of barriers, clusters and overlapping launches; ``pointwise``: elements in memory; of the host, ``driver``:
    the kernel for the driver, and ``calls``: descriptions of operands for TMA, launches of clusters. ``products``: PTX of when
    products of warp groups begin and end; ``warp_groups`` has it, and products out of swizzled shared memory, for kernels that
    have it after their constants.
    """
    functions, products = epilogue_functions("float"), template(__package__, "products.cuh.jinja").render()
    return {
        "barriers": template(__package__, "barriers.cuh.jinja").render(),
        "pointwise": template(__package__, "pointwise.cuh.jinja").render(fused=fused, functions=functions),
        "products": products,
        "warp_groups": template(__package__, "warp_groups.cuh.jinja").render(products=products),
        "driver": driver_functions(),
        "calls": template(__package__, "calls.h.jinja").render(),
    }
