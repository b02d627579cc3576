"""Record of the M of calls that no table covers. One log line says how to make the table."""

import atexit
import logging
from dataclasses import dataclass, field
from typing import get_args

from ..operand_kinds import BiasShape
from ..problem import Problem
from ..problem.operations import DENSE_OPS
from ..problem.rows import RowClass, row_classes
from ..store.row import stored_problem
from ..store.store import Ranged, Store

log = logging.getLogger("gemmtune")

ASKED = "asked"
"""Kind of the stored record with the M of a class that calls have asked for."""
USUAL_ROWS = 8192
"""Largest M of the proposed table, unless a call asked for a larger one."""


@dataclass(slots=True)
class Asked:
    """Values of M of one class that calls have asked for, including the stored ones."""

    rows_class: RowClass
    machine: str
    store: Store
    rows: set[int] = field(default_factory=set)
    stored: int = 0

    def save(self) -> None:
        """Write new values to the store."""
        if len(self.rows) > self.stored:
            known = asked_rows(self.rows_class, self.machine, self.store)
            rows = sorted({*known, *self.rows})
            self.store.put_ranged(Ranged(key=self.rows_class.key, fingerprint=self.machine, kind=ASKED, value={"rows": rows}))
            self.stored = len(self.rows)


_asked: dict[tuple[RowClass, str, str], Asked] = {}


def asked_rows(rows_class: RowClass, machine: str, store: Store) -> list[int]:
    """Return the stored values of M of a class that calls have asked for without a table."""
    fact = store.ranged(rows_class.key, machine).get(ASKED)
    return [int(m) for m in fact.value.get("rows", ())] if fact is not None else []


def tuned_rows(rows_class: RowClass, machine: str, store: Store) -> dict[int, str]:
    """Return the M of a class that were tuned individually, with the keys of their problems."""
    p, found = rows_class.problem, {}
    fields = (f'"op":"{p.op}"', f'"n":{p.n},', f'"k":{p.k},')
    for key in store.keys(machine):
        if all(text in key for text in fields):
            problem = stored_problem(key)
            if problem is not None and rows_class in row_classes(problem):
                found[problem.m] = key
    return found


def note(rows_class: RowClass, m: int, machine: str, store: Store, what_runs: str) -> None:
    """Record an M. The first M of a class is logged with the kernel that runs. Writes become rarer as the values grow in number."""
    key = (rows_class, machine, str(store.path))
    asked = _asked.get(key)
    if asked is None:
        asked = _asked[key] = Asked(rows_class, machine, store)
        log.info(
            "%s: M = %d was not tuned, %s; for a table of every M: %s", rows_class, m, what_runs,
            command(rows_class, max(USUAL_ROWS, m)),
        )  # fmt: skip
    asked.rows.add(m)
    if len(asked.rows) & (len(asked.rows) - 1) == 0:
        asked.save()


def save_asked() -> None:
    """Write all recorded values to their stores."""
    for asked in list(_asked.values()):
        asked.save()


atexit.register(save_asked)


def command(rows_class: RowClass, most: int, *, batch_invariant: bool = False) -> str:
    """Return the shell command that makes the table, or the Python call if the options cannot describe the problem."""
    p = rows_class.problem
    batch = f"{p.batch}x" if p.batched else ""
    words = [f"gemmtune tune {batch}1..{most}x{p.n}x{p.k} --dtype {p.dtype_label} --layout {p.layout_letters}"]
    words += [f"--bias {bias}" for bias in (_bias_of(p),) if bias is not None]
    words += ["--prepacked"] * p.prepacked + [f"--device {p.device_type}"] + ["--batch-invariant"] * batch_invariant
    more = ", batch_invariant=True" if batch_invariant else ""
    return " ".join(words) if _plain(p) else f"gemmtune.tune({p.op!r}, <its operands>, m=range(1, {most + 1}){more})"


def _bias_of(p: Problem) -> BiasShape | None:
    if p.inp is None:
        return None
    make = Problem.baddbmm if p.batched else Problem.addmm
    sizes = (p.batch, p.m, p.n, p.k) if p.batched else (p.m, p.n, p.k)
    made = ((bias, make(*sizes, dtype=p.dtype, bias=bias, device_type=p.device_type)) for bias in get_args(BiasShape))
    return next((bias for bias, other in made if other.inp == p.inp), None)


def _plain(p: Problem) -> bool:
    """Return True if the options of ``command`` describe exactly this problem."""
    if p.layout_letters not in ("nn", "nt", "tn", "tt") or (p.alpha, p.beta) not in (("one", "zero"), ("one", "one")):
        return False
    bias = _bias_of(p)
    given = {"dtype": p.dtype, "layout": p.layout_letters, "device_type": p.device_type, "precision": p.precision}
    if p.op not in DENSE_OPS or (p.operation.operand("inp") is not None and bias is None):
        return False
    sizes = ((p.batch,) if p.operation.batched else ()) + (p.m, p.n, p.k)
    given |= {"bias": bias} if bias is not None else {}
    given |= {"prepacked": p.prepacked} if p.operation.prepacks else {}
    return bool(p == getattr(Problem, p.op)(*sizes, **given))
