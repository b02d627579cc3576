"""Tables of parameters made of what a tuning has measured."""

from __future__ import annotations

from collections.abc import Iterable

from ..backends.aten.blocks import learn
from ..backends.aten.metas import MetaTable
from ..choice import Status
from ..device import detect
from ..selector.result import ProblemResult


def measured_metas(results: Iterable[ProblemResult], *, device: str | None = None, table: MetaTable | None = None) -> MetaTable:
    """A table with the fastest parameters of torch's kernel for each block-sparse problem that was tuned.

    table = measured_metas(gemmtune.tune(problems)); table.dump("metas.json"), which the setting ``meta_table`` may name.

    Args:
        results: as ``gemmtune.tune`` gives them.
        device: where they were measured; by default the current device of the problems' type.
        table: that to which rows are added, a new one by default.
    """
    table = MetaTable() if table is None else table
    for result in results:
        tried = [o for o in result.outcomes if o.status is Status.OK and o.time_us is not None and "SPLIT_N" in o.info]
        if tried:
            best = min(tried, key=lambda o: o.time_us or 0.0)
            learn(table, result.problem, detect(device or result.problem.device_type), best.info)
    return table
