"""Tables in the store: that of a class, and what tables of one product have in common."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterable

from ..choice import Choice
from ..device import DeviceInfo
from ..errors import InvalidProblemError, StoreError
from ..problem import Problem
from ..problem.rows import RowClass
from ..settings import Settings
from ..store.key import canonical, fingerprint_text
from ..store.store import Ranged, Store
from .candidates import choice_of, timings_of
from .offers import widest_offers_for
from .reduction_classes import class_of
from .segments import DEFAULT, FOR_GRAPHS, INVARIANT, TABLE, Segment, Table

log = logging.getLogger("gemmtune")

KINDS = (TABLE, INVARIANT, DEFAULT, FOR_GRAPHS)
"""Kinds of stored facts that are tables."""
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
        text = f"{rows_class}: {error}"
        log.log(logging.DEBUG if text in _said else logging.WARNING, "%s", text)
        _said.add(text)
        return None


_said: set[str] = set()
"""Messages about unusable tables. Each is a warning once."""


def segments_of(fact: Ranged) -> tuple[Segment, ...]:
    """Return the segments of a table. None of one that this version cannot read."""
    try:
        return Table.of(fact).segments
    except (StoreError, InvalidProblemError):
        return ()


def product_of(key: str) -> str:
    """Return the part of a class's key that is equal for tables of one product, however its rows lie in memory."""
    fields = json.loads(key)
    layouts = {name: (fields.get(name) or {}).get("dtype") for name in FOLLOWING}
    epilogue = fields.get("epilogue") and {**fields["epilogue"], "operands": [x["dtype"] for x in fields["epilogue"]["operands"]]}
    return canonical({**fields, **layouts, "m": 0, "epilogue": epilogue})


def stored_class(rows_class: RowClass, device: DeviceInfo, settings: Settings, store: Store, *, others: bool = False) -> str:
    """Return the reduction class of a product's stored tables, or "". ``others`` asks those of other strides or timing modes."""
    key, machines = rows_class.key, [fingerprint_text(device, timing) for timing in timings_of(settings)]
    product = product_of(key)
    for fact in store.every_ranged():
        asked = fact.fingerprint in machines and (not others or (fact.key, fact.fingerprint) != (key, machines[0]))
        if fact.kind == INVARIANT and asked and product_of(fact.key) == product:
            with contextlib.suppress(StoreError, InvalidProblemError):  # it is made anew when it is needed
                if name := _current_class(fact, device, settings, store):
                    return name
    return ""


def _current_class(fact: Ranged, device: DeviceInfo, settings: Settings, store: Store) -> str:
    """Return the class that the choices of a stored table declare now. Store it if an older version gave it another name.

    Choices of several classes, none with the stored name, leave the table without a class: it is tuned again.
    """
    table, rows_class = Table.of(fact), RowClass(problem=Problem.from_json(json.loads(fact.key)))
    problems = ((x, rows_class.at(x.sampled_m)) for x in table.segments)
    found = [choice_of(x.content_hash, x.backend, at, device, settings, name=x.name) for x, at in problems]
    declared = _declared(found)
    if not declared or table.reduction in declared:
        return table.reduction
    name = declared.pop() if len(declared) == 1 else ""
    if not name and table.reduction in _declared(
        widest_offers_for(rows_class.at(table.segments[0].sampled_m), device, settings).choices
    ):
        return table.reduction  # that of a reference which serves no interval
    store.put_ranged(dataclasses.replace(fact, value=fact.value | {"reduction": name}))
    if name:
        log.info("%s: the reduction class of its batch-invariant table was %r, and is %r now", rows_class, table.reduction, name)
    else:
        log.warning(
            "%s: its batch-invariant table is of the reduction class %r, which no choice declares any more: tune it again",
            rows_class, table.reduction,
        )  # fmt: skip
    return name


def _declared(choices: Iterable[Choice | None]) -> set[str]:
    """Return the names of the reduction classes that choices declare."""
    return {str(declares) for choice in choices if (declares := class_of(choice)) is not None}
