"""Choices by name: the names of most families state the whole config, so that no enumeration is needed to find one again."""

from __future__ import annotations

import re

from ...choice import Choice
from ...device import DeviceInfo
from ...problem import Problem
from ...problem.rules import why_not_dense
from .arch import can_overlap
from .build import KernelChoice, TritonChoice
from .configs import GROUP_M, Config
from .legality import check_problem
from .mixed.words import OrderedChoice, WordsChoice, WordsConfig, ordered_problem
from .persistent import PersistentChoice, PersistentRunsChoice
from .runs import RunsChoice, RunsConfig
from .swap import SwappedChoice, transposed
from .vec import VectorChoice, WordsVectorChoice

_NAME = re.compile(
    r"triton:(?P<label>[a-z_]+)_(?P<block_m>\d+)x(?P<block_n>\d+)x(?P<block_k>\d+)_s(?P<stages>\d+)_w(?P<warps>\d+)"
    r"(?:_g(?P<group_m>\d+))?(?:_k(?P<split_k>\d+))?(?:_r(?P<runs>\d+))?(?P<variant>_group|_swap)?(?:_u(?P<steps>\d+))?(?P<pdl>_pdl)?(?P<swapped>_swap)?"
)
_FAMILIES: dict[str, type[KernelChoice]] = {
    "mm": TritonChoice,
    "mixed_mm": TritonChoice,
    "persistent": PersistentChoice,
    "vec": VectorChoice,
    "mixed_vec": WordsVectorChoice,
    "mixed_words": WordsChoice,
}
_IN_RUNS: dict[str, type[KernelChoice]] = {"runs": RunsChoice, "persistent": PersistentRunsChoice}
"""Classes by the label of a name that states a number of parts that programs sum in turn."""
"""Classes by the label of a name, without those that divide a problem into several."""


def choice_named(name: str, problem: Problem, device: DeviceInfo) -> Choice | None:
    """Return the choice with this name for a problem. None if it is illegal, or its family has no such names."""
    found = _NAME.fullmatch(name)
    families = _FAMILIES if found is None or found["runs"] is None else _IN_RUNS
    family = families.get(found["label"]) if found is not None else None
    if found is None or family is None or problem.groups or problem.sparsity is not None or problem.c is not None:
        return None
    fields = {key: int(found[key]) for key in ("block_m", "block_n", "block_k", "stages", "warps")}
    fields |= {"group_m": int(found["group_m"] or GROUP_M), "split_k": int(found["split_k"] or 1), "pdl": bool(found["pdl"])}
    try:
        made = _made(family, problem, device, fields, found)
    except ValueError:  # no such config, as in a table of another version
        return None
    return made if made is not None and made.name == name else None


def _made(
    family: type[KernelChoice], problem: Problem, device: DeviceInfo, fields: dict[str, int], found: re.Match[str]
) -> Choice | None:
    """Return the choice for the config of a name, or None if it is illegal."""
    config, where = Config(**fields), problem  # type: ignore[arg-type] # pdl is a bool
    if found["runs"] is not None:
        config = RunsConfig(**fields, runs=int(found["runs"]))  # type: ignore[arg-type]
    fragments = found["variant"] == "_group"
    swapped = family is TritonChoice and "_swap" in (found["variant"], found["swapped"])
    if config.pdl and not (device.type == "cuda" and can_overlap(device.capability)):
        return None
    if family is WordsChoice:
        swap = bool(found["variant"])  # fragments swap as well
        config = WordsConfig(**fields, swap=swap, fragments=fragments, steps=int(found["steps"] or 1))  # type: ignore[arg-type]
    if check_problem(problem, device) is not None or (swapped and why_not_dense(problem) is not None):
        return None
    if fragments:
        where = ordered_problem(problem)
    elif swapped:
        where = transposed(problem)
    if family.why_not(where, device, config) is not None:
        return None
    if fragments:
        assert isinstance(config, WordsConfig)
        return OrderedChoice.of(problem, device, config)
    made = family.of(where, device, config)
    return SwappedChoice.around(problem, made, {"swap_ab": True}) if swapped else made
