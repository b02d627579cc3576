"""Tables of parameters for torch's kernel, from the measurements of a tuning."""

from collections.abc import Iterable

from ..backends.aten.blocks import learn
from ..backends.aten.metas import MetaTable
from ..choice import Status
from ..device import detect
from ..selector.result import ProblemResult


def measured_metas(results: Iterable[ProblemResult], *, device: str | None = None, table: MetaTable | None = None) -> MetaTable:
    """Return a table with the fastest parameters of torch's kernel for each tuned block-sparse problem.

    ``measured_metas(gemmtune.tune(problems)).dump("metas.json")`` writes a file for the setting ``meta_table``.

    Args:
        results: the result of ``gemmtune.tune``.
        device: the device of the measurements. The default is the current device of the problems' type.
        table: the table that gets the rows. The default is a new one.
    """
    table = MetaTable() if table is None else table
    for result in results:
        tried = [o for o in result.outcomes if o.status is Status.OK and o.time_us is not None and "SPLIT_N" in o.info]
        if tried:
            best = min(tried, key=lambda o: o.time_us or 0.0)
            learn(table, result.problem, detect(device or result.problem.device_type), best.info)
    return table
