"""Whether a GEMM of a graph becomes ours: where the store says that this beats torch's GEMM followed by Inductor's own kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from ... import settings as settings_module
from ...device import detect
from ...problem import Problem
from ...store.key import canonical, fingerprint
from ...store.store import open_store
from ..measured import without_epilogue
from .joins import Join
from .judging import Verdict
from .knowledge import Compared, Joined, Knowledge
from .products import Product
from .threads import in_a_thread


@dataclass(frozen=True, slots=True)
class StoreJudge:
    """Goes by what the store knows. With ``tunes`` a GEMM that it does not know is tuned while the graph compiles."""

    tunes: bool = False

    def prepare(self, products: Iterable[Product], joins: Iterable[Join]) -> None:
        """Tune what the store does not know of a graph, all of it at once: then one problem compiles while another is measured."""
        if not self.tunes:
            return
        asked: dict[torch.device, tuple[dict[Compared, None], dict[Joined, None]]] = {}
        for product in products:
            asked.setdefault(product.gemm.meta["val"].device, ({}, {}))[0][_compared(product)] = None
        for join in joins:
            asked[join.products[0].gemm.meta["val"].device][1][_parts(join)] = None
        for device, (compared, joined) in asked.items():
            in_a_thread(functools.partial(Knowledge.here(device).measure, list(compared), list(joined)))

    def joined(self, join: Join) -> Verdict:
        """One product, where it was measured to beat the single ones, and by more than what a fused tail of these saves."""
        return Knowledge.here(join.products[0].gemm.meta["val"].device).join_verdict(*_parts(join))

    def verdict(self, product: Product) -> Verdict:
        """The fastest of torch's, ours alone and ours with the tail, as far as they were measured."""
        known = Knowledge.here(product.gemm.meta["val"].device)
        by_table = known.of_every_m(*_compared(product)) if product.dynamic else None
        if by_table is not None:
            return by_table
        verdict = known.verdict(*_compared(product))
        if not verdict.taken and not product.torchs and known.knows(product.alone):
            return Verdict(taken="alone", reason="the stored pick, without the operator's look-up", times_us=verdict.times_us)
        if product.before_reduction:
            return dataclasses.replace(verdict, reason=f"{verdict.reason}; the reduction behind it takes its tail")
        return verdict

    def token(self) -> object:
        """Return the settings, the machine with each of its GPUs, the contents of the store and whether this tunes.

        The place of a file decides nothing, and another process may keep it elsewhere.
        """
        settings = settings_module.current()
        devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        machines = [fingerprint(detect(device), settings.timing) for device in devices]
        chosen = dataclasses.replace(settings, cache_dir=None, store_path=None, log_file=None)
        return repr(chosen), canonical(machines), open_store(settings).digest(), self.tunes


def _parts(join: Join) -> Joined:
    pairs: list[Compared] = []
    taken: set[fx.Node] = set()
    for product in join.products:
        last = None if product.tail is None else product.tail.last
        alone, fused = _compared(product)
        pairs.append((alone, None if last in taken else fused))
        taken |= {last} if last is not None else set()
    return join.problem, tuple(pairs)


def _compared(product: Product) -> Compared:
    """Inductor takes the tail into a reduction behind it for nothing: there the GEMMs alone compare."""
    return product.alone, None if product.before_reduction else product.fused


def tune_for_compile(problems: Iterable[Problem]) -> None:
    """Tune problems for compiled graphs.

    Each is tuned with and without its epilogue, and both are timed against torch's GEMM followed by Inductor's kernel.
    """
    asked: dict[str, list[Compared]] = {}
    for problem in problems:
        pair = (problem, None) if problem.epilogue is None else (without_epilogue(problem), problem)
        asked.setdefault(problem.device_type, []).append(pair)
    for device_type, compared in asked.items():
        Knowledge.here(detect(device_type).torch_device).measure(compared)
