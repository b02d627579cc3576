"""The table of everything that the suite asserts."""

from ...errors import CaseError
from . import blocks, calls, edges, groups, large, memory, metamorphic, scalars, special, strides, values
from .property import Property

_MODULES = (values, edges, scalars, special, strides, memory, blocks, groups, metamorphic, calls, large)
PROPERTIES: tuple[Property, ...] = tuple(row for module in _MODULES for row in module.PROPERTIES)
"""All properties, in the order of reports."""


def property_named(name: str) -> Property:
    """Return the property of that name. Raises CaseError, listing the known ones, if there is none."""
    for candidate in PROPERTIES:
        if candidate.name == name:
            return candidate
    raise CaseError(f"property: got {name!r}, expected one of {', '.join(p.name for p in PROPERTIES)}")
