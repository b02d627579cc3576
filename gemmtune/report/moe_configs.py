"""Configs of vLLM's and SGLang's Triton kernel for experts: a file for each layer, with a config for each number of tokens."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..problem import Problem
from ..store.row import Row
from .known import Known, known_by_date

Config = tuple[int, ...]
_FIELDS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
_FAMILIES = ("grouped", "grouped_combined")
"""Templates whose tiles are of rows of one expert, as those of that kernel."""
_OTHER_KERNELS = ("_swap", "+routed")
"""Parts of the names of choices that are no such kernel: swapped operands, and steps of torch around a product."""
Layer = tuple[str, int, int]
"""The device's name, the number of experts, and the columns between the two products."""


def moe_configs(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Return the content of each file by its name.

    A file of a layer needs stored products with ``rows``, the first of the layer, in bfloat16 or float16. The kernel runs both
    products with one config. Where the second, with ``scatter``, is stored for as many tokens too, the config has the least sum of
    both times, else the least time of the first. Tiles, warps and stages are those of our kernel; how it loads operands, and that
    a program computes several tiles, has no field in the file.
    """
    first: dict[tuple[Layer, int], dict[Config, float]] = {}
    second: dict[tuple[Layer, int], dict[Config, float]] = {}
    versions: dict[str, str] = {}
    for known in known_by_date(rows):
        problem = known.problem
        if problem is None or problem.op not in ("routed_grouped_mm", "combined_grouped_mm") or problem.device_type != "cuda":
            continue
        if problem.dtype not in (torch.bfloat16, torch.float16):
            continue
        machine = json.loads(known.fingerprint)
        found = first if problem.op == "routed_grouped_mm" else second
        name = str(machine.get("device", "")).replace(" ", "_")
        columns = problem.k if found is second else problem.n if problem.gated else problem.n // 2
        tokens = problem.weights.size[0] if problem.weights is not None else problem.a.size[0]
        found[(name, problem.groups, columns), tokens] = _times(known, problem)
        versions[name] = str(machine.get("triton", ""))
    files: dict[str, dict[str, Any]] = {}
    for (layer, tokens), times in sorted(first.items()):
        config = _best(times, second.get((layer, tokens), {}))
        if config is not None:
            device, experts, columns = layer
            file = files.setdefault(f"E={experts},N={columns},device_name={_device_word(device)}.json", {})
            file.setdefault("triton_version", versions[device])
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


def _device_word(name: str) -> str:
    """Return the word of a device in names of files. All devices with an H200 share one."""
    return "NVIDIA_H200" if "H200" in name.split("_") else name
