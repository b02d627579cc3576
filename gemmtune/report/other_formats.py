"""Measurements in formats of other tools.

Inductor looks templates up in tables (``torch._inductor.config.lookup_table``). vLLM's and SGLang's Triton kernel for experts
reads a file for each layer, with a config for each number of tokens.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..choice import Status
from ..problem import Problem
from ..store.row import Row
from .known import Known, known_by_date

_FLOATS = ("float32", "float16", "bfloat16")
Entry = dict[str, Any]
Config = tuple[int, ...]
_FIELDS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
_FAMILIES = ("grouped", "grouped_combined")
"""Templates whose tiles are of rows of one expert, as those of that kernel."""
_OTHER_KERNELS = ("_swap", "+routed")
"""Parts of the names of choices that are no such kernel: swapped operands, and steps of torch around a product."""
_NOT_INDUCTORS = ("swap_ab", "padded", "pdl")
MOST_CONFIGS = 3
"""Most configs of Inductor's template for one product: each costs a graph that is compiled about half a second."""
Layer = tuple[str, int, int]
"""The device's name, the number of experts, and the columns between the two products."""


def inductor_table(rows: Iterable[Row]) -> dict[str, list[Entry]]:
    """Return the entries for each plain mm and bmm on a GPU, by the key that Inductor computes for a graph's product.

    torch's own operation is the first. Inductor's template follows with the tile, warps and stages of up to ``MOST_CONFIGS`` of our
    kernels that beat it, the fastest first. No tile is larger than the product: Inductor's template reads rows and columns again
    to fill it, where ours reads nothing. A graph that is compiled measures the entries and takes the fastest; a tie is torch's.
    A single entry is taken unmeasured. The latest measurement counts where several machines or versions have one.
    """
    table: dict[str, list[Entry]] = {}
    for known in known_by_date(rows):
        problem = known.problem
        if problem is not None and _is_plain(problem) and (entries := _entries(known, problem)):
            table[key_of(problem)] = entries
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


def _entries(known: Known, problem: Problem) -> list[Entry]:
    """Return torch's operation and the templates whose kernels beat it. Without a correct choice there is none."""
    timed = [(row.time_us, row) for row in known.rows if row.status is Status.OK and row.time_us is not None]
    torch_us = min((us for us, row in timed if row.baseline), default=math.inf)
    entries: list[Entry] = []
    for us, row in sorted(timed, key=lambda x: x[0]):
        if us < torch_us and _is_templates(row.info, problem) and (entry := _template(problem, row.info)) not in entries:
            entries.append(entry)
    return [{"template_id": f"aten::{problem.op}"}, *entries[:MOST_CONFIGS]] if timed else []


def _is_templates(info: Mapping[str, Any], problem: Problem) -> bool:
    """Return True for a kernel of the mm template that reads and is launched as Inductor's own.

    Inductor's has no split-K, no swapped or padded operands, and no launch that overlaps the previous kernel.
    """
    if info.get("template") != "mm" or info.get("splits", 1) != 1 or any(info.get(word) for word in _NOT_INDUCTORS):
        return False
    block_m, block_n, _ = info["tile"]
    return bool(block_m <= problem.m and block_n <= problem.n)


def _template(problem: Problem, info: Mapping[str, Any]) -> Entry:
    """Return all parameters of Inductor's template, with those that it derives from others: torch 2.11 adds none."""
    block_m, block_n, block_k = info["tile"]
    return {
        "template_id": f"triton::{problem.op}", "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k,
        "GROUP_M": info["group_m"], "num_warps": info["warps"], "num_stages": info["stages"],
        "EVEN_K": problem.k % block_k == 0, "ACC_TYPE": "tl.float32", "USE_FAST_ACCUM": False,
    }  # fmt: skip


def moe_configs(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Return the content of each file by its name.

    A file of a layer needs stored products with ``rows``, the first of the layer, in bfloat16 or float16. The kernel runs both
    products with one config. Where the second, with ``scatter``, is stored for as many tokens too, the config has the least sum of
    both times, else the least time of the first. Tiles, warps and stages are those of our kernel; how it loads operands, and that
    a program computes several tiles, has no field in the file.
    """
    first: dict[tuple[Layer, int], dict[Config, float]] = {}
    second: dict[tuple[Layer, int], dict[Config, float]] = {}
    for known in known_by_date(rows):
        problem = known.problem
        if problem is None or problem.op not in ("routed_grouped_mm", "combined_grouped_mm") or problem.device_type != "cuda":
            continue
        if problem.dtype not in (torch.bfloat16, torch.float16):
            continue
        found = first if problem.op == "routed_grouped_mm" else second
        name = str(json.loads(known.fingerprint).get("device", "")).replace(" ", "_")
        columns = problem.k if found is second else problem.n if problem.gated else problem.n // 2
        tokens = problem.weights.size[0] if problem.weights is not None else problem.a.size[0]
        found[(name, problem.groups, columns), tokens] = _times(known, problem)
    files: dict[str, dict[str, Any]] = {}
    for (layer, tokens), times in sorted(first.items()):
        config = _best(times, second.get((layer, tokens), {}))
        if config is not None:
            device, experts, columns = layer
            word = "NVIDIA_H200" if "H200" in device.split("_") else device  # all devices with an H200 share one
            file = files.setdefault(f"E={experts},N={columns},device_name={word}.json", {})
            file[str(tokens)] = dict(zip(_FIELDS, config, strict=True))
    return files


def _times(known: Known, problem: Problem) -> dict[Config, float]:
    """Return the least time of each config. A gated tile has as many gates as results."""
    times: dict[Config, float] = {}
    for row in known.rows:
        info = row.info
        if row.time_us is None or info.get("template") not in _FAMILIES or any(word in row.name for word in _OTHER_KERNELS):
            continue
        block_m, block_n, block_k = info["tile"]
        config = (block_m, block_n * (2 if problem.gated else 1), block_k, info["group_m"], info["warps"], info["stages"])
        times[config] = min(row.time_us, times.get(config, row.time_us))
    return times


def _best(first: Mapping[Config, float], second: Mapping[Config, float]) -> Config | None:
    both = {config: time_us + second[config] for config, time_us in first.items() if config in second}
    return min(both or first, key=(both or first).__getitem__, default=None)
