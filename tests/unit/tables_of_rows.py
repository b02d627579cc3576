"""Tables of Ms that nobody had to measure: which choice serves which interval is said."""

from __future__ import annotations

from collections.abc import Sequence

from gemmtune import settings
from gemmtune.choice import Choice
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans
from gemmtune.problem import Problem
from gemmtune.problem.rows import row_classes
from gemmtune.selector.candidates import candidates_for
from gemmtune.selector.proof import kernels_of
from gemmtune.selector.ranges import kind_of
from gemmtune.selector.segments import Segment, Table
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Ranged, open_store

__all__ = ["put_table"]


def put_table(problem: Problem, parts: Sequence[tuple[int, int, str]]) -> list[Choice]:
    """Store a table for the problem's class: the choice whose name begins so serves ``lo`` to ``hi`` rows. Compiles what it needs,
    and returns the choices."""
    (rows_class,) = row_classes(problem)
    device, current = detect(problem.device_type), settings.current()
    segments, chosen = [], []
    for lo, hi, name in parts:
        sampled_m = rows_class.within(range(lo, hi + 1))[-1]
        offered = candidates_for(rows_class.at(sampled_m), device, current).offers.choices
        choice = next(c for c in offered if c.name.startswith(name))
        kernels = kernels_of(choice, range(lo, hi + 1), rows_class, device)
        for kernel in kernels:
            kernel.compile()
        starts = tuple(kernel.problem.m for kernel in kernels)
        segments.append(Segment.of(choice, lo, hi, sampled_m, kernels=starts))
        chosen.append(choice)
    reduction = str(chosen[0].claims.reduction) if current.batch_invariant else ""
    value = Table(segments=tuple(segments), reduction=reduction).to_json()
    machine = fingerprint_text(device, current.timing)
    open_store(current).put_ranged(Ranged(key=rows_class.key, fingerprint=machine, kind=kind_of(current), value=value))
    forget_plans()
    return chosen
