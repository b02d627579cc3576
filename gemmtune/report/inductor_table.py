"""Tables of Inductor's look-up of templates (``torch._inductor.config.lookup_table``) from stored measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..choice import Status
from ..problem import Problem
from ..store.row import Row
from .known import Known, known_by_date

_FLOATS = ("float32", "float16", "bfloat16")
Entry = dict[str, Any]


def inductor_table(rows: Iterable[Row]) -> dict[str, list[Entry]]:
    """Return one entry for each plain mm and bmm on a GPU, by the key that Inductor computes for a graph's product.

    The entry is the faster of two: torch's own operation, or Inductor's template with the tile, warps and stages of our fastest
    kernel that has no split-K and no swapped operands. Picks of other kinds have no template in Inductor. The latest measurement
    counts where several machines or versions have one.
    """
    table: dict[str, list[Entry]] = {}
    for known in known_by_date(rows):
        problem = known.problem
        if problem is not None and _is_plain(problem) and (entry := _entry(known, problem)) is not None:
            table[key_of(problem)] = [entry]
    return table


def key_of(problem: Problem) -> str:
    """Return the key without a device: (dtype, sizes, strides) of each operand, and the operation."""
    operands = ((x.dtype, list(x.size), list(x.stride)) for x in (problem.a, problem.b))
    return f"{tuple(operands)}+{problem.op}"


def _is_plain(problem: Problem) -> bool:
    """Return True for a product of two float operands of one dtype, without an epilogue, on a GPU."""
    if problem.op not in ("mm", "bmm") or problem.device_type != "cuda" or problem.epilogue is not None:
        return False
    dtypes = {str(x.dtype).removeprefix("torch.") for x in (problem.a, problem.b, problem.out)}
    return len(dtypes) == 1 and dtypes <= set(_FLOATS)


def _entry(known: Known, problem: Problem) -> Entry | None:
    times: list[tuple[float, Entry]] = []
    for row in known.rows:
        if row.status is Status.OK and row.time_us is not None:
            if row.baseline:
                times.append((row.time_us, {"template_id": f"aten::{problem.op}"}))
            elif _is_template(row.info):
                times.append((row.time_us, _template(problem, row.info)))
    return min(times, key=lambda x: x[0])[1] if times else None


def _is_template(info: Mapping[str, Any]) -> bool:
    return info.get("template") == "mm" and info.get("splits", 1) == 1 and not info.get("swap_ab")


def _template(problem: Problem, info: Mapping[str, Any]) -> Entry:
    """Return all parameters of Inductor's template, with those that it derives from others: torch 2.11 adds none."""
    block_m, block_n, block_k = info["tile"]
    return {
        "template_id": f"triton::{problem.op}",
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": info["group_m"],
        "num_warps": info["warps"],
        "num_stages": info["stages"],
        "EVEN_K": problem.k % block_k == 0,
        "ACC_TYPE": "tl.float32",
        "USE_FAST_ACCUM": False,
    }
