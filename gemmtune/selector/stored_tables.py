"""Tables in the store: that of a class, and what tables of one product have in common."""

import contextlib
import json
import logging

from ..device import DeviceInfo
from ..errors import InvalidProblemError, StoreError
from ..problem.rows import RowClass
from ..settings import Settings
from ..store.key import canonical, fingerprint_text
from ..store.store import Store
from .candidates import timings_of
from .segments import INVARIANT, TABLE, Table

log = logging.getLogger("gemmtune")

FOLLOWING = ("a", "inp", "out", "scale_a")
"""Operands of a product that have rows of the batch."""


def stored_table(rows_class: RowClass, machine: str, store: Store, kind: str = TABLE) -> tuple[Table, str] | None:
    """Return the stored table of a class and the time of its measurement. None if there is none, or none that is usable."""
    fact = store.ranged(rows_class.key, machine).get(kind)
    if fact is None:
        return None
    try:
        return Table.of(fact), fact.measured_at
    except (StoreError, InvalidProblemError) as error:
        log.warning("%s: %s", rows_class, error)
        return None


def product_of(key: str) -> str:
    """Return the part of a class's key that is equal for tables of one product, however its rows lie in memory."""
    fields = json.loads(key)
    layouts = {name: (fields.get(name) or {}).get("dtype") for name in FOLLOWING}
    epilogue = fields.get("epilogue") and {**fields["epilogue"], "operands": [x["dtype"] for x in fields["epilogue"]["operands"]]}
    return canonical({**fields, **layouts, "m": 0, "epilogue": epilogue})


def stored_class(rows_class: RowClass, device: DeviceInfo, settings: Settings, store: Store, *, others: bool = False) -> str:
    """Return the reduction class of a product's stored tables, or "". ``others`` asks those of other strides or timing modes."""
    key, machines = rows_class.key, [fingerprint_text(device, timing) for timing in timings_of(settings)]
    for fact in store.every_ranged():
        asked = fact.fingerprint in machines and (not others or (fact.key, fact.fingerprint) != (key, machines[0]))
        if fact.kind == INVARIANT and asked and product_of(fact.key) == product_of(key):
            with contextlib.suppress(StoreError, InvalidProblemError):  # it is made anew when it is needed
                return Table.of(fact).reduction
    return ""
