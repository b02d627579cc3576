"""Diagnosis of a wrong grouped product: a wrong group, wrong offsets, wrong rows, or a bug of one group's product."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...numerics.expectation import Expectation
from ...numerics.grouped import expectation_of
from ...numerics.operands import Operands
from ...numerics.propagate import Approximate
from ...problem import Layout, Problem
from ...problem.grouped_compositions import spans
from ...problem.operations import OPERATIONS
from .evidence import Evidence, Seen
from .group_suspects import changes
from .match import Fit, Suspect, fitting
from .rounding import small_errors
from .signs import TILES, first_sign, last_sign, lines_in_words, place

Whole = Callable[[Problem, Expectation], Approximate | None]
"""Function that returns all elements of an expectation for a problem, or None if only samples are known."""
Named = tuple[str, tuple[str, ...]]
"""Diagnosis, and other bugs that would give the result."""
OfOne = Callable[[Evidence], Named]
MOST_MACS = 2**26
"""Maximum multiplications of a product whose suspects are tried."""


@dataclass(frozen=True, kw_only=True)
class GroupEvidence:
    """Evidence for a grouped product, with the reference that suspects go through and the offsets of earlier calls."""

    evidence: Evidence
    whole: Whole
    earlier_ends: tuple[tuple[int, ...], ...] = ()

    @property
    def problem(self) -> Problem:
        """Problem of the call."""
        return self.evidence.problem

    @property
    def total(self) -> int:
        """Rows or terms that are divided into groups."""
        return self.problem.k if self.problem.divides_terms else self.problem.m

    @functools.cached_property
    def pieces(self) -> list[tuple[int, int]]:
        """Beginning and end of each group."""
        assert self.evidence.operands.offs is not None
        return spans(self.evidence.operands.offs.tolist(), self.total)


class GroupView(Seen):
    """Elements of the result, on the CPU. Those that may be anything, behind the last group, are 0 everywhere."""

    allowance = torch.zeros((), dtype=torch.float64)

    def __init__(self, known: GroupEvidence) -> None:
        evidence = known.evidence
        self.known = known
        self.problem = evidence.problem
        tolerance = evidence.tolerance.cpu()
        self._free = tolerance.isinf()
        self.got, self.expected = (x.cpu().masked_fill(self._free, 0) for x in (evidence.got, evidence.expected))
        self.tolerance = tolerance.masked_fill(self._free, 0)
        self.bad = evidence.bad.cpu() & ~self._free

    def suspects(self) -> Iterator[Suspect]:
        """Yield the result of each change of operands, offsets or problem that a known bug amounts to."""
        known = self.known
        for change in changes(self.problem, known.evidence.operands, known.pieces, known.earlier_ends, known.total):
            problem = change.problem or self.problem
            other = expectation_of(problem, change.operands, change.pieces, name=change.text)
            whole = known.whole(problem, other)
            if whole is not None:
                value, error = whole.value.cpu(), whole.error.cpu()
                free = self._free | error.isinf()
                yield Suspect(change.text, value.masked_fill(free, 0), error=error.masked_fill(free, 0))


def diagnose_groups(known: GroupEvidence, diagnose: OfOne) -> Named:
    """Return the diagnosis of a wrong grouped product, and other bugs that would give it. ``diagnose`` is that of one product."""
    evidence = known.evidence
    unwritten = evidence.unwritten & evidence.bad
    if bool(unwritten.any()):
        where = place_in_groups(known, unwritten)
        return f"elements left unwritten in {where}" if where else "elements left unwritten", ()
    certain = first_sign(evidence)
    found: list[Fit] = []
    view = GroupView(known)
    if known.problem.flops <= 2 * MOST_MACS:
        found = list(fitting(view, GroupView.suspects))
    everywhere = [fit.suspect.text for fit in found if fit.everywhere and fit.certain]
    confined = [fit.suspect.text for fit in found if not fit.everywhere]
    where = place_in_groups(known, evidence.bad)
    text = certain or next(iter(everywhere), "")
    if not text and confined and where:
        text = f"{confined[0]} in {where}"
    also = [other for other in (*everywhere, *(fit.suspect.text for fit in found if not fit.certain)) if other != text]
    spoilt = bool((~evidence.got.isfinite() | ~evidence.bad).all())  # by operands that the elements do not depend on
    if not text and spoilt and not all(bool(x.double().isfinite().all()) for x in (evidence.operands.a, evidence.operands.b)):
        text = "what another group may read spoils this one"
    if not text:
        text, further = _of_one_group(known, diagnose)
        also += further
    text = text or last_sign(evidence) or (f"errors only in {where}" if where else "")
    text = text or small_errors(view, view.expected.abs())
    return text, tuple(dict.fromkeys(also))


def place_in_groups(known: GroupEvidence, mask: torch.Tensor) -> str:
    """Return the part of a mask (B, M, N) that is True, by groups if it follows these, else by rows and columns."""
    if known.problem.divides_terms:
        return place(mask).replace("batches", "groups").replace("batch", "group")
    rows = mask.any(-1)[0]
    if known.problem.weights is not None or bool(rows.all()) or not bool(rows.any()):
        return place(mask)
    relative = [(rows[begin:end].nonzero().flatten().tolist(), end - begin) for begin, end in known.pieces]
    wrong = [(lines, size) for lines, size in relative if lines]
    return _of_lines(wrong) or _of_groups(relative) or place(mask)


def _of_lines(wrong: Sequence[tuple[list[int], int]]) -> str:
    """Return the place within groups that the wrong rows of every group have, or an empty text."""
    if not wrong or all(len(lines) == size for lines, size in wrong):
        return ""
    if all(lines == [size - 1] for lines, size in wrong):
        return "the last row of groups"
    if all(lines == [0] for lines, _ in wrong):
        return "the first row of groups"
    if not all(lines == list(range(lines[0], size)) for lines, size in wrong):
        return ""
    starts = {lines[0] for lines, _ in wrong}
    if len(starts) == 1:
        return f"rows from {starts.pop()} on of groups"
    for tile in TILES:
        if all(lines[0] == size // tile * tile for lines, size in wrong):
            return f"rows of groups past a multiple of {tile}"
    return ""


def _of_groups(relative: Sequence[tuple[list[int], int]]) -> str:
    """Return the groups all of whose rows are wrong, or an empty text."""
    if any(lines and len(lines) < size for lines, size in relative):
        return ""
    return lines_in_words(torch.tensor([bool(lines) for lines, _ in relative]), "group", "groups", tail=False)


def _of_one_group(known: GroupEvidence, diagnose: OfOne) -> Named:
    """Return the diagnosis of the product of the group with the most errors, for groups whose result is just a product."""
    problem, evidence = known.problem, known.evidence
    if problem.gated or problem.weights is not None or problem.epilogue is not None:
        return "", ()
    bad = evidence.bad
    counts = [int(bad[group].sum() if problem.divides_terms else bad[0, b:e].sum()) for group, (b, e) in enumerate(known.pieces)]
    group = counts.index(max(counts))
    begin, end = known.pieces[group]
    if begin == end:
        return "", ()
    rows = slice(None) if problem.divides_terms else slice(begin, end)
    matrix = group if problem.divides_terms else 0

    def part(x: torch.Tensor) -> torch.Tensor:
        return x[matrix, rows][None]

    operands = _operands_of(problem, evidence.operands, group, begin, end)
    views: dict[str, Any] = {name: part(getattr(evidence, name)) for name in ("got", "expected", "bad", "unwritten")}
    tolerance = part(evidence.tolerance).nan_to_num(posinf=0.0)
    text, also = diagnose(Evidence(problem=_problem_of(problem, operands), operands=operands, tolerance=tolerance, **views))
    return (f"{text} in the product of a group" if text and not text.startswith("errors only") else ""), also


def _operands_of(problem: Problem, operands: Operands, group: int, begin: int, end: int) -> Operands:
    """Return contiguous operands of one group's product."""
    if problem.divides_terms:
        a, b = operands.a[:, begin:end], operands.b[begin:end]
    else:
        rows = slice(begin, end) if operands.rows is None else operands.rows[begin:end].long()
        a, b = operands.a[rows], operands.b[group]
    scale_a = None if operands.scale_a is None else operands.scale_a[begin:end].contiguous()
    scale_b = None if operands.scale_b is None else operands.scale_b[group].contiguous()
    a, b = a.contiguous(), b.contiguous()
    return dataclasses.replace(operands, a=a, b=b, scale_a=scale_a, scale_b=scale_b, offs=None, rows=None)


def _problem_of(problem: Problem, operands: Operands) -> Problem:
    """Return the problem of one group's product: that of the plain operation with such operands."""
    row = problem.operation
    plain = next(
        x
        for x in OPERATIONS.values()
        if not (x.grouped or x.sparse or x.batched or x.second or x.integers or x.scalars)
        and (x.widens_b, x.float8) == (row.widens_b, row.float8)
    )
    fields: dict[str, Any] = {role: Layout.of(x) for role, x in operands.named.items()}
    fields |= {name: getattr(problem, name) for name in ("device_type", "precision", "encoding")}
    out = Layout.contiguous((operands.a.shape[0], operands.b.shape[1]), problem.out.dtype)
    return Problem(op=plain.name, out=out, **fields)
