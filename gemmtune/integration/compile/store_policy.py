"""The default policy: rewrite a GEMM if the store says that ours beats torch's GEMM followed by Inductor's kernel."""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch._inductor import config as inductor_config

from ... import settings as settings_module
from ...device import detect
from ...problem import Problem
from ...store.key import canonical, fingerprint
from ...store.store import open_store
from ...threads import in_a_thread
from ..measured import without_epilogue
from . import attention_times, estimated_joins
from .attention import Attention
from .attention_times import AttentionDecision
from .horizontal import HorizontalFusion
from .invariant_joins import fusion_has_the_bits
from .products import Product
from .report import Decision, GemmPair, WholeAndParts
from .stored_decisions import StoredDecisions


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """Decides by the times in the store. With ``tunes`` it tunes unknown GEMMs while the graph compiles.

    With ``predicts``, and under the setting ``tune="predict"``, joined GEMMs without times get a default table then.
    """

    tunes: bool = False
    predicts: bool = False

    def prepare(self, products: Iterable[Product], fusions: Iterable[HorizontalFusion]) -> None:
        """Tune all unknown problems of a graph together, so that one compiles while another is measured.

        A product with a dynamic M has the table of its weight, if there is one.
        """
        current = settings_module.current()
        if current.disable or current.batch_invariant:
            return
        if not self.tunes:
            self._predict(fusions if self.predicts or current.tune == "predict" else ())
            return
        wanted: dict[torch.device, tuple[dict[GemmPair, None], dict[WholeAndParts, None]]] = {}
        for product in products:
            if product.dynamic and StoredDecisions.here(product.gemm.meta["val"].device).decide_every_m(*_pair(product)):
                continue
            wanted.setdefault(product.gemm.meta["val"].device, ({}, {}))[0][_pair(product)] = None
        for fusion in fusions:
            if not fusion.dynamic:
                wanted[fusion.device][1][_parts(fusion)] = None
        for device, (pairs, wholes) in wanted.items():
            in_a_thread(functools.partial(StoredDecisions.here(device).measure, list(pairs), list(wholes)))

    def _predict(self, fusions: Iterable[HorizontalFusion]) -> None:
        """Make the default tables of joined GEMMs for all fusions of a graph together, which share kernels."""
        distinct = {(fusion.device, _parts(fusion), fusion.dynamic): fusion for fusion in fusions}.values()
        for device in dict.fromkeys(fusion.device for fusion in distinct):
            stored = StoredDecisions.here(device)
            unknown = [x for x in distinct if x.device == device and _measured(stored, x) is None]
            estimated_joins.make_tables(unknown, device)

    def decide_horizontal(self, fusion: HorizontalFusion) -> Decision:
        """Return ``joined`` if one product beats the separate ones by more than fused epilogues of these save.

        What was not measured is estimated. With ``batch_invariant`` the joined product must have the bits of the others.
        """
        if settings_module.current().batch_invariant:
            is_joined = not settings_module.current().disable and not fusion.dynamic and fusion_has_the_bits(fusion)
            reason = "batch_invariant: one product has the bits" if is_joined else "batch_invariant: each weight has its own table"
            return Decision(taken="joined" if is_joined else "", reason=reason)
        stored = StoredDecisions.here(fusion.device)
        if (measured := _measured(stored, fusion)) is not None:
            return measured
        if any(_fuses(stored, product) for product in fusion.products):
            return Decision(taken="", reason="not compared with one product of all columns, and an epilogue is fused")
        return estimated_joins.decide(stored, fusion.problem, [x.alone for x in fusion.products], dynamic=fusion.dynamic)

    def decide(self, product: Product) -> Decision:
        """Return the fastest measured variant: torch's GEMM, ours alone, or ours with the epilogue.

        With ``batch_invariant`` ours alone, whatever is faster. It raises NoValidChoicesError where no table serves it.
        """
        if settings_module.current().batch_invariant and not settings_module.current().disable:
            return Decision(taken="alone", reason="batch_invariant: the table of its weight")
        stored, pair = StoredDecisions.here(product.gemm.meta["val"].device), _pair(product)
        by_table = stored.decide_every_m(*pair) if product.dynamic else None
        if by_table is not None:
            return by_table
        decision = stored.decide(*pair)
        if not decision.taken and not product.torchs and stored.pick(product.alone) is not None:
            return Decision(taken="alone", reason="the stored pick, without the operator's look-up", times_us=decision.times_us)
        if product.before_reduction:
            return dataclasses.replace(decision, reason=f"{decision.reason}; the reduction behind it takes its epilogue")
        return decision

    def decide_attention(self, attention: Attention) -> AttentionDecision | None:
        """Return the measured decision.

        Without times, ours runs after a verification where heads share keys and Inductor makes a CUDA graph, in which a second
        launch costs the host nothing.
        """
        settings, device = settings_module.current(), detect(attention.values[0].device)
        if settings.disable or not attention_times.serves(device):
            return None
        store = open_store(settings)
        if self.tunes:
            in_a_thread(functools.partial(attention_times.measure, attention, device, settings.timing, store))
        by_rule = attention.shares_heads and inductor_config.triton.cudagraphs
        return in_a_thread(functools.partial(attention_times.decide, attention, device, settings.timing, store, by_rule=by_rule))

    def token(self) -> object:
        """Return the settings, the machine with its GPUs, a digest of the store, and ``tunes``.

        Paths are left out: they do not affect decisions, and may differ in another process. So is ``predicts``: a program without
        it takes the graphs of one that predicts.
        """
        settings = settings_module.current()
        devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        machines = [fingerprint(detect(device), settings.timing) for device in devices]
        chosen = dataclasses.replace(settings, cache_dir=None, store_path=None, log_file=None)
        return repr(chosen), canonical(machines), open_store(settings).digest(), self.tunes


def _measured(stored: StoredDecisions, fusion: HorizontalFusion) -> Decision | None:
    """Return the decision by measured times, None without. Times are of one M."""
    return None if fusion.dynamic else stored.decide_horizontal(*_parts(fusion))


def _fuses(stored: StoredDecisions, product: Product) -> bool:
    """Return True if the product alone would have its epilogue fused, which a joined one leaves to Inductor."""
    pair = _pair(product)
    by_table = stored.decide_every_m(*pair) if product.dynamic else None
    return pair[1] is not None and (by_table or stored.decide(*pair)).taken == "fused"


def _parts(fusion: HorizontalFusion) -> WholeAndParts:
    """Return the Problems of a fusion. An epilogue that two GEMMs share counts for the first of them only."""
    pairs: list[GemmPair] = []
    taken: set[fx.Node] = set()
    for product in fusion.products:
        last = None if product.match is None else product.match.last
        alone, fused = _pair(product)
        pairs.append((alone, None if last in taken else fused))
        taken |= {last} if last is not None else set()
    return fusion.problem, tuple(pairs)


def _pair(product: Product) -> GemmPair:
    """Return the Problems to compare. Before a reduction, which fuses the epilogue at no cost, only the GEMM alone counts."""
    return product.alone, None if product.before_reduction else product.fused


def tune_for_compile(problems: Iterable[Problem]) -> None:
    """Tune problems for compiled graphs, each with and without its epilogue, timed against torch's GEMM and Inductor's kernel."""
    pairs: dict[str, list[GemmPair]] = {}
    for problem in problems:
        pair = (problem, None) if problem.epilogue is None else (without_epilogue(problem), problem)
        pairs.setdefault(problem.device_type, []).append(pair)
    for device_type, compared in pairs.items():
        StoredDecisions.here(detect(device_type).torch_device).measure(compared)
