"""Triton backend: enumerates the choices for a problem, and finds one by its name, which mostly states the whole config."""

import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...choice import Availability, Choice, Offers, Refusal
from ...device import DeviceInfo
from ...effort import EFFORT
from ...problem import Problem
from ...problem.rules import why_not_dense
from ...settings import Settings
from .arch import can_overlap
from .blocks.choice import block_offers
from .build import KernelChoice, TritonChoice
from .configs import GROUP_M, Config, Resources, pool, splits_for, tiles_of
from .grouped.offers import grouped_offers
from .hip import hip_pool, with_modes
from .legality import Predicate, check_problem
from .mixed.offers import with_recommendation, words_choices
from .mixed.words import OrderedChoice, WordsChoice, WordsConfig, ordered_problem
from .padding import padded_choices
from .parts import parts_choices
from .persistent import PersistentChoice, PersistentRunsChoice, persistent_choices
from .rank import select
from .runs import RunsChoice, RunsConfig
from .splits.decompose import decomposed_choices
from .sums import family_of, predicate_for
from .swap import SwappedChoice, swapped_choices, transposed
from .vec import VectorChoice, WordsVectorChoice, vector_choices, words_vector_choices

INTERPRETER_CONFIGS = (
    Config(block_m=16, block_n=16, block_k=16, stages=1, warps=1),
    Config(block_m=16, block_n=16, block_k=32, stages=1, warps=1),
    Config(block_m=32, block_n=16, block_k=32, stages=2, warps=4),
    Config(block_m=16, block_n=32, block_k=16, stages=1, warps=1, split_k=2),
    Config(block_m=64, block_n=64, block_k=64, stages=2, warps=4),
)
"""Configs for the interpreter, which ignores stages and warps. They only check values."""


NOTES = {
    "cpu": ", interpreter", "hip": "; its kernels were compiled and inspected, and never run on an AMD GPU"
}  # fmt: skip
"""Text after Triton's version in the availability detail, by device type."""


class TritonBackend:
    """Backend of the mm template and the other template families."""

    name = "triton"

    def available(self, device: DeviceInfo) -> Availability:
        """Return if Triton can run here: it must be installed, with the interpreter on for a CPU and off for a GPU."""
        if importlib.util.find_spec("triton") is None:
            return Availability(ok=False, detail="triton is not installed: pip install 'gemmtune[triton]'")
        import triton  # noqa: PLC0415 - heavy; imported only after it is known to be installed

        if device.type == "cpu" and not triton.knobs.runtime.interpret:
            return Availability(
                ok=False,
                detail=f"triton {triton.__version__} runs on a CPU only in its interpreter: set TRITON_INTERPRET=1 before the "
                "program starts, and name the backend in settings.backends",
            )
        if device.type != "cpu" and triton.knobs.runtime.interpret:
            return Availability(
                ok=False, detail=f"triton {triton.__version__} is in interpreter mode: unset TRITON_INTERPRET to use a GPU"
            )
        return Availability(ok=True, detail=f"triton {triton.__version__}{NOTES.get(device.type, '')}")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        """Return True for a GPU. The interpreter on a CPU only checks values."""
        return device.type != "cpu"

    def named(self, name: str, problem: Problem, device: DeviceInfo) -> Choice | None:
        return choice_named(name, problem, device)

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Return the legal configs of the search, best by the model first. Pure: works for any preset device."""
        reason = check_problem(problem, device)
        if reason is not None:
            return Offers(refusals=(Refusal(name=self.name, reason=reason),))
        if problem.sparsity is not None:
            return block_offers(problem, device, settings.search)
        if problem.groups:
            return grouped_offers(problem, device, settings.search)
        if device.type == "cpu":
            return self._interpreted(problem, device, settings)
        parts = parts_choices(problem, device, EFFORT[settings.search].configs["triton:parts"]) if settings.float32_by_parts else []
        if not parts and not chosen_configs(problem, device, settings.search):
            return Offers(refusals=(Refusal(name=self.name, reason=f"no config is legal for {problem} on {device.arch}"),))
        return Offers(choices=(*with_recommendation(problem, list(offered(problem, device, settings.search))), *parts))

    def _interpreted(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        predicate, family = predicate_for(problem, device), family_of(problem)
        choices: list[KernelChoice] = []
        refusals: list[Refusal] = []
        for config in INTERPRETER_CONFIGS:
            reason = predicate.check(config)
            if reason is None:
                choices.append(family.of(problem, device, config))
            else:
                refusals.append(Refusal(name=f"{self.name}:{config}", reason=reason))
        choices += parts_choices(problem, device, None) if settings.float32_by_parts else []
        return Offers(choices=tuple(choices), refusals=tuple(refusals))


def offered(problem: Problem, device: DeviceInfo, search: str) -> Iterator[Choice]:
    """Yield the choices for a GPU, family by family. Each family has its own predicate and ranking."""
    counts = EFFORT[search].configs
    weights: list[Choice] = [
        *words_choices(problem, device, counts["triton:words"]),
        *words_vector_choices(problem, device, counts["triton:words_vector"]),
    ]
    yield from weights
    others: list[Choice] = [
        *persistent_choices(problem, device, counts["triton:persistent"]),
        *swapped_choices(problem, device, counts["triton:swapped"]),
        *vector_choices(problem, device, counts["triton:vector"]),
    ]
    # Other families' kernels take places from the mm or sum template.
    most = counts["triton:mm"]
    configs = chosen_configs(problem, device, search)
    places = None if most is None else max(most - len(weights) - len(others), 0)
    yield from (family_of(problem).of(problem, device, config) for config in configs[:places])
    yield from others
    yield from decomposed_choices(problem, device, search, lambda divided: chosen_configs(divided, device, search))

    def on_copies(aligned: Problem) -> Sequence[KernelChoice]:
        direct = chosen_configs(aligned, device, search)[: counts["triton:padded"]]
        persistent = persistent_choices(aligned, device, counts["triton:padded_persistent"])
        return (*(TritonChoice.of(aligned, device, config) for config in direct), *persistent)

    yield from padded_choices(problem, device, on_copies)


@functools.lru_cache(maxsize=1024)
def chosen_configs(problem: Problem, device: DeviceInfo, search: str) -> tuple[Config, ...]:
    predicate, count = predicate_for(problem, device), EFFORT[search].configs["triton:mm"]
    chosen = select(predicate, legal_configs(predicate), count)
    if device.type == "hip":
        chosen = with_modes(chosen, count, lambda config: predicate.check(config) is None)
    return tuple(chosen)


def legal_configs(predicate: Predicate) -> list[tuple[Config, Resources]]:
    """Return every config of the pool that the legality predicate accepts, with its resources."""
    problem, legal = predicate.problem, []
    for config in hip_pool() if predicate.device.type == "hip" else pool():
        if predicate.check(config) is not None:
            continue
        need = predicate.resources(config)
        legal.append((config, need))
        for split_k in splits_for(tiles_of(problem, config), predicate.device.sm_count)[1:]:
            split = replace(config, split_k=split_k)
            if predicate.check_split(split) is None:
                legal.append((split, need))
    return legal


_NAME = re.compile(
    r"triton:(?P<label>[a-z_]+)_(?P<block_m>\d+)x(?P<block_n>\d+)x(?P<block_k>\d+)_s(?P<stages>\d+)_w(?P<warps>\d+)"
    r"(?:_g(?P<group_m>\d+))?(?:_k(?P<split_k>\d+))?(?:_r(?P<runs>\d+))?(?P<variant>_group|_swap)?(?:_u(?P<steps>\d+))?(?P<pdl>_pdl)?(?P<swapped>_swap)?"
)
_FAMILIES: dict[str, type[KernelChoice]] = {
    "mm": TritonChoice, "mixed_mm": TritonChoice, "persistent": PersistentChoice, "vec": VectorChoice,
    "mixed_vec": WordsVectorChoice, "mixed_words": WordsChoice,
}  # fmt: skip
"""Classes by the label of a name, without those that divide a problem into several."""
_IN_RUNS: dict[str, type[KernelChoice]] = {"runs": RunsChoice, "persistent": PersistentRunsChoice}
"""Classes by the label of a name that states a number of parts that programs sum in turn."""


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
