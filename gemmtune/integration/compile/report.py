"""Decisions on the GEMMs of compiled graphs, kept for ``explain``."""

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...problem import Problem

Taken = Literal["", "alone", "fused", "joined"]
"""How a GEMM is rewritten. Empty if torch's node stays."""
GemmPair = tuple[Problem, Problem | None]
"""A GEMM alone, and with the epilogue that may be fused into it."""
WholeAndParts = tuple[Problem, tuple[GemmPair, ...]]
"""A product of all columns, and its separate products. An epilogue that two of them share belongs to the first."""
_CAPACITY = 1024
_graphs: "deque[Graph]" = deque(maxlen=_CAPACITY)
"""The graphs that were compiled last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Rewrite of a GEMM, and its reasons.

    ``taken`` is ``fused`` (with its epilogue), ``alone``, ``joined`` (horizontally fused with GEMMs of the same input), or empty if
    torch's node stays. ``times_us`` are the times behind the decision, by variant: measured, unless the reason says otherwise.
    """

    taken: Taken
    reason: str
    times_us: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmDecision(Decision):
    """The decision on one GEMM of a graph, or on attention of one query.

    ``pick`` is the name of the choice that runs. ``alone`` is the GEMM's Problem, ``fused`` the Problem with its epilogue, and
    ``joined`` the Problem of a horizontal fusion. Attention has none of these.
    """

    shape: str
    pick: str | None = None
    alone: Problem | None = None
    fused: Problem | None = None
    joined: Problem | None = None
    attention: bool = False

    @property
    def problem(self) -> Problem | None:
        """The Problem that runs, or would run if it were faster than torch."""
        return {"fused": self.fused, "joined": self.joined}.get(self.taken, self.alone)

    def __str__(self) -> str:
        epilogue = self.fused.epilogue if self.fused else None
        text = f"{self.alone.op} {self.shape} {self.alone.dtype_label} {self.alone.layout_letters}" if self.alone else self.shape
        gated = self.fused.gated if self.fused else ""
        behind = f" then {epilogue}" if epilogue else f" gated by {gated}" if gated else ""
        alone = f"{self.pick}, the epilogue is Inductor's" if epilogue else f"{self.pick}"
        joined = f"joined to {self.joined.n} columns, {alone}" if self.joined else f"joined, {self.pick}"
        outcome = {"fused": f"fused, {self.pick}", "alone": alone, "joined": joined}.get(self.taken, "left to torch")
        times = ", ".join(f"{name} {time_us:.1f} µs" for name, time_us in self.times_us)
        return f"{text}{behind}: {outcome}; {self.reason}" + (f" ({times})" if times else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The decisions for one graph that Inductor compiled.

    ``compile_id`` is Dynamo's own object for the compilation of the frame, or None outside of one. Its text repeats after a reset.
    """

    compile_id: object
    decisions: tuple[GemmDecision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledExplanation:
    """The GEMMs of a compiled function, graph by graph. Prints as text."""

    graphs: tuple[Graph, ...]

    @property
    def decisions(self) -> tuple[GemmDecision, ...]:
        """The decisions of all graphs."""
        return tuple(d for graph in self.graphs for d in graph.decisions)

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "no graph was compiled with gemmtune's pass: call it once after gemmtune.integration.compile.install(). Graphs "
                "from Inductor's cache on disk keep the decisions of their compilation, which are not reported again."
            )
        lines = []
        for number, graph in enumerate(self.graphs):
            kinds = {
                "GEMMs": [d for d in graph.decisions if not d.attention],
                "attentions": [d for d in graph.decisions if d.attention],
            }
            counts = (f"{sum(bool(d.taken) for d in found)} of {len(found)} {word}" for word, found in kinds.items() if found)
            lines.append(f"graph {number}: {', '.join(counts)}")
            lines += [f"   {decision}" for decision in graph.decisions]
        return "\n".join(lines)


def keep(graph: Graph) -> None:
    """Keep the decisions of a graph for ``explain``."""
    _graphs.append(graph)


def is_compiled(what: object) -> bool:
    """Return True if torch.compile made it: a function, a module, or a module compiled in place."""
    marks = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")
    return any(getattr(what, mark, None) is not None for mark in marks)


def explain_compiled(compiled: Any) -> CompiledExplanation:
    """Return the decision on each GEMM of a compiled function or module: what it is fused with, and what runs or why torch's stays.

    Only graphs that this process compiled are known, not graphs from a cache on disk.
    """
    entries_of = torch._dynamo.eval_frame._debug_get_cache_entry_list
    entries = [entry for code in _codes(compiled) for entry in entries_of(code)]
    ids = {id(entry.compile_id) for entry in _of_its_own(compiled, entries)}
    return CompiledExplanation(graphs=tuple(graph for graph in _graphs if id(graph.compile_id) in ids))


def _of_its_own(compiled: Any, entries: Sequence[Any]) -> Sequence[Any]:
    """Return the cache entries that this call of ``torch.compile`` made.

    Modules of one class share their code and so its entries, and functions that one statement defines do too. Dynamo distinguishes
    the entries by their backends. Equal backends serve each other's modules.
    """
    backend = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    if backend is None:  # a function or a module compiled in place: its closure has the backend
        function = getattr(compiled, "_compiled_call_impl", None) or compiled
        backend = inspect.getclosurevars(function).nonlocals.get("callback") if inspect.isfunction(function) else None
    if not hasattr(backend, "_torchdynamo_orig_backend"):
        return entries
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    same = [entry for entry in entries if entry.backend is backend]
    return same or [entry for entry in entries if entry.backend == backend]


def _codes(compiled: Any) -> Iterator[Any]:
    """Yield the code objects whose frames Dynamo may have compiled: its own and those of its modules."""
    inner = getattr(compiled, "_orig_mod", None) or getattr(compiled, "_torchdynamo_orig_callable", compiled)
    owner = inner if isinstance(inner, torch.nn.Module) else getattr(inner, "__self__", None)
    # Around a module of torch.nn Dynamo compiles a function of its own, whose code all such modules share.
    around = getattr(getattr(compiled, "forward", None), "_torchdynamo_orig_callable", None)
    functions = [inner, around, getattr(inner, "__func__", None)]
    if isinstance(owner, torch.nn.Module):
        functions += [type(module).forward for module in owner.modules()]
    while functions:
        function = functions.pop()
        if (code := getattr(function, "__code__", None)) is not None:
            yield code
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            functions.append(wrapped)
