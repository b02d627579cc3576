"""What became of the GEMMs of compiled graphs: one decision each, kept for ``explain``."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...problem import Problem

_CAPACITY = 1024
_graphs: deque[Graph] = deque(maxlen=_CAPACITY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What became of one GEMM.

    ``taken`` is ``fused`` (with the pointwise nodes behind it), ``alone``, ``joined`` (one product with others of the same input),
    or empty where torch's node stayed; ``reason`` says why. ``pick`` is the choice that runs. ``times_us`` are those that decided,
    by variant. ``alone`` is the GEMM's Problem, ``fused`` that with its tail, ``joined`` that of all columns, where there are such.
    """

    shape: str
    taken: str
    reason: str
    pick: str | None = None
    times_us: tuple[tuple[str, float], ...] = ()
    alone: Problem | None = None
    fused: Problem | None = None
    joined: Problem | None = None

    @property
    def problem(self) -> Problem | None:
        """The Problem that runs, or would."""
        return {"fused": self.fused, "joined": self.joined}.get(self.taken, self.alone)

    def __str__(self) -> str:
        epilogue = self.fused.epilogue if self.fused else None
        text = f"{self.alone.op} {self.shape} {self.alone.dtype_label} {self.alone.layout_letters}" if self.alone else self.shape
        gated = self.fused.gated if self.fused else ""
        behind = f" then {epilogue}" if epilogue else f" gated by {gated}" if gated else ""
        alone = f"{self.pick}, the tail is Inductor's" if epilogue else f"{self.pick}"
        joined = f"joined to {self.joined.n if self.joined else ''} columns, {alone}"
        verdict = {"fused": f"fused, {self.pick}", "alone": alone, "joined": joined}.get(self.taken, "left to torch")
        times = ", ".join(f"{name} {time_us:.1f} µs" for name, time_us in self.times_us)
        return f"{text}{behind}: {verdict}; {self.reason}" + (f" ({times})" if times else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The decisions for one graph that Inductor compiled.

    ``compile_id`` is Dynamo's own object for the compilation of the frame, None outside of one. Its text comes again after a reset.
    """

    compile_id: object
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledExplanation:
    """The GEMMs of a compiled function, graph by graph. Prints as text."""

    graphs: tuple[Graph, ...]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Those of all graphs."""
        return tuple(d for graph in self.graphs for d in graph.decisions)

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "no graph was compiled with gemmtune's pass: call it once after gemmtune.integration.compile.install(). Graphs out "
                "of Inductor's cache on disk are as they were decided when they were compiled, which is not told again."
            )
        lines = []
        for number, graph in enumerate(self.graphs):
            taken = sum(bool(d.taken) for d in graph.decisions)
            lines.append(f"graph {number}: {taken} of {len(graph.decisions)} GEMMs")
            lines += [f"   {decision}" for decision in graph.decisions]
        return "\n".join(lines)


def keep(graph: Graph) -> None:
    """Remember what became of a graph."""
    _graphs.append(graph)


def is_compiled(what: object) -> bool:
    """Whether torch.compile made it: a function, a module, or a module compiled in place."""
    marks = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")
    return any(getattr(what, mark, None) is not None for mark in marks)


def explain_compiled(compiled: Any) -> CompiledExplanation:
    """What became of each GEMM of a compiled function or module: what it was fused with, what runs, or why it was left.

    Only graphs that were compiled in this process are known, not those out of a cache on disk.
    """
    entries_of = torch._dynamo.eval_frame._debug_get_cache_entry_list
    entries = [entry for code in _codes(compiled) for entry in entries_of(code)]
    ids = {id(entry.compile_id) for entry in _of_its_own(compiled, entries)}
    return CompiledExplanation(graphs=tuple(graph for graph in _graphs if id(graph.compile_id) in ids))


def _of_its_own(compiled: Any, entries: Sequence[Any]) -> Sequence[Any]:
    """Those entries that its own ``torch.compile`` made: the modules of a class share its code, and so its entries, as functions do
    that were defined by one statement.

    Dynamo tells them apart by their backends, of which equal ones serve each other's modules.
    """
    backend = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    if backend is None:  # a function, or a module compiled in place, which has one: the backend is what that closes over
        function = getattr(compiled, "_compiled_call_impl", None) or compiled
        backend = inspect.getclosurevars(function).nonlocals.get("callback") if inspect.isfunction(function) else None
    if not hasattr(backend, "_torchdynamo_orig_backend"):
        return entries
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    same = [entry for entry in entries if entry.backend is backend]
    return same or [entry for entry in entries if entry.backend == backend]


def _codes(compiled: Any) -> Iterator[Any]:
    """Code objects whose frames Dynamo may have compiled for it: its own, and those of its modules."""
    inner = getattr(compiled, "_orig_mod", None) or getattr(compiled, "_torchdynamo_orig_callable", compiled)
    owner = inner if isinstance(inner, torch.nn.Module) else getattr(inner, "__self__", None)
    # Dynamo compiles a function of its own around a module of torch.nn: all such modules share its code.
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
