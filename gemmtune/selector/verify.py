"""Proving a choice right before it is timed: exact probes, an error bound on random data, guard bands, untouched inputs."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..choice import Choice, Claims, Kernel, Status
from ..errors import ErrorFromChoice
from ..numerics.bounds import accumulation_bound, exact_limit
from ..numerics.compare import BadElement, Comparer, Finding
from ..numerics.guards import Checksum, Guards
from ..numerics.operands import POISONS, Operands, allocate, poison
from ..numerics.pick import Pick
from ..numerics.probes import Probes
from ..numerics.reference import Reference, extended_reference, reference, regions
from ..problem import Problem

__all__ = ["Verdict", "Verifier"]

OUT_GUARD_ROWS = 256
"""Rows of out that fit into the guard band after it: the tallest tile of any template."""
MOST_OUT_GUARD_BYTES = 2**24
SEPARATE_PROBES_MACS = 2**33
"""On a CPU with more multiplications, where each call takes long, a and b share a one-hot probe, and ``run_new`` takes a turn of
``run``'s; else both have probes of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a choice is right. ``error_over_bound`` is the largest error on random data as a fraction of what is allowed."""

    status: Status
    error_over_bound: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class _Case(ABC):
    """One call of the kernel and how its result is judged."""

    name: str
    operands: Operands

    @abstractmethod
    def judge(self, out: torch.Tensor, comparer: Comparer, claims: Claims, finding: Finding) -> None:
        """Compare ``out`` with what is right for these claims."""


@dataclass(frozen=True, kw_only=True)
class _PickCase(_Case):
    pick: Pick

    def judge(self, out: torch.Tensor, comparer: Comparer, claims: Claims, finding: Finding) -> None:  # noqa: ARG002 - exact
        comparer.pick(out, self.pick, finding)


@dataclass(frozen=True, kw_only=True)
class _ScaledPickCase(_PickCase):
    """A pick of single products, each of which is rounded a few times."""

    problem: Problem
    largest: Callable[[], float]

    def judge(self, out: torch.Tensor, comparer: Comparer, claims: Claims, finding: Finding) -> None:
        bound = accumulation_bound(self.problem, claims, alpha=1, largest=self.largest, terms=1)
        comparer.picked_within(out, self.pick, bound, finding)


@dataclass(frozen=True, kw_only=True)
class _BoundCase(_Case):
    """Compares with references. ``integers``: with S small enough for the claims, no error is allowed before the epilogue."""

    problem: Problem
    references: tuple[Reference, ...]
    largest: Callable[[], float]
    integers: bool = False

    def judge(self, out: torch.Tensor, comparer: Comparer, claims: Claims, finding: Finding) -> None:
        for part in self.references:
            bound = accumulation_bound(
                self.problem, claims, alpha=self.operands.alpha, largest=self.largest, extended=part.extended
            )
            if self.integers and part.magnitude.numel() and float(part.magnitude.max()) <= exact_limit(self.problem, claims):
                bound = dataclasses.replace(bound, relative=0.0, absolute=0.0)
            comparer.reference(out, part, bound, finding)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What became of one call, still on the device; ``guards`` is that of ``Guards.broken``."""

    case: _Case
    finding: Finding
    guards: torch.Tensor


class Verifier:
    """Verifies choices of one problem on one device. Probes and references are made once and shared by all choices."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem = problem
        self._device = device
        itemsize, row = problem.out.dtype.itemsize, max((*problem.out.stride[-2:], problem.n))
        guard_bytes = min(OUT_GUARD_ROWS * row * itemsize, MOST_OUT_GUARD_BYTES)
        self._out = allocate(problem.out, device, guard_bytes=guard_bytes)
        self._guards = Guards(self._out)
        self._expensive = device.type == "cpu" and problem.flops > 2 * SEPARATE_PROBES_MACS
        self._reset()

    def _reset(self) -> None:
        """Make all operands anew: at the start, and after a choice that wrote into them."""
        self._packed: tuple[str, dict[int, torch.Tensor]] = ("", {})
        self._by_limit: dict[int, list[_Case]] = {}
        self._checksums: dict[str, Checksum] = {}
        if self._problem.empty:
            return
        self._probes = Probes(self._problem, self._device)
        self._extra = self._probes.extra()
        self._watch("epilogue_args", *self._extra)
        self._cases = self._shared_cases()

    def check(self, choice: Choice, kernel: Kernel) -> Verdict:
        """Run the kernel on every probe and on random data. What it raises is not caught; the device is waited for at the end."""
        if self._problem.empty:
            return Verdict(status=Status.OK, error_over_bound=0.0)
        claims = choice.claims
        comparer = Comparer(self._problem, claims, self._extra)
        cases = self._cases_for(claims)
        calls: list[_Call] = []
        for number, case in enumerate(cases):
            if self._expensive and kernel.run_new is not None and case is cases[-1]:
                break  # the same numbers through run_new, below
            calls.append(self._call(number, case, choice, kernel.run, comparer))
            if self._device.type == "cpu" and (calls[-1].finding.state[0] or calls[-1].guards[0]):
                return self._verdict(calls)
        if kernel.run_new is not None:
            calls.append(self._call_new(cases[-1], choice, kernel.run_new, comparer))
        return self._verdict(calls)

    def _call(self, number: int, case: _Case, choice: Choice, run: Callable[..., None], comparer: Comparer) -> _Call:
        payload = POISONS[self._out.dtype][number % 2]
        poison(self._out, payload)
        x = case.operands
        run(self._out, x.a, self._b(case, choice), x.inp, x.alpha, x.beta, (*x.leading, *self._extra))
        finding = Finding(self._device, payload)
        case.judge(self._out, comparer, choice.claims, finding)
        return _Call(case=case, finding=finding, guards=self._guards.broken(payload))

    def _call_new(self, case: _Case, choice: Choice, run_new: Callable[..., torch.Tensor], comparer: Comparer) -> _Call:
        x = case.operands
        result = run_new(x.a, self._b(case, choice), x.inp, x.alpha, x.beta, (*x.leading, *self._extra))
        got, expected = ((tuple(t.shape), t.dtype) for t in (result, self._out))
        if got != expected:
            reason = f"run_new gave {got[1]} of shape {got[0]}, expected {expected[1]} of shape {expected[0]}"
            raise ErrorFromChoice(choice.name, str(self._problem), reason)
        finding = Finding(self._device, POISONS[self._out.dtype][0])
        case.judge(result, comparer, choice.claims, finding)
        return _Call(case=case, finding=finding, guards=torch.zeros(2, dtype=torch.float64, device=self._device))

    def _b(self, case: _Case, choice: Choice) -> torch.Tensor:
        """b, packed if the choice wants it so; kept for the next choice with the same format."""
        name = choice.packed_format
        if name is None:
            return case.operands.b
        if self._packed[0] != name:
            self._packed = (name, {})
            self._checksums = {key: value for key, value in self._checksums.items() if not key.startswith("packed b")}
        cache = self._packed[1]
        if id(case) not in cache:
            cache[id(case)] = choice.pack(case.operands.b)
            self._watch(f"packed b of {case.name}", cache[id(case)])
        return cache[id(case)]

    def _verdict(self, calls: list[_Call]) -> Verdict:
        names = list(self._checksums)
        changed = [self._checksums[name].changed() for name in names]
        parts = [torch.cat([call.finding.state, call.finding.ratio.reshape(1), call.guards]) for call in calls]
        numbers = torch.cat([*parts, *(flag.double().reshape(1) for flag in changed)]).tolist()  # the one wait for the device
        width = (len(numbers) - len(names)) // len(calls)
        modified = [name for name, flag in zip(names, numbers[width * len(calls) :], strict=True) if flag]
        if modified:
            self._reset()
        ratio, reasons = 0.0, [f"the call changed its input: {name}" for name in modified[:1]]
        for i, call in enumerate(calls):
            *state, call_ratio, broken, where = numbers[i * width : (i + 1) * width]
            bad = call.finding.bad_element(state, batched=self._problem.batched)
            if broken:
                reasons.append(f"{call.case.name}: {self._guards.describe(int(where))}")
            if bad is not None:
                reasons.append(f"{call.case.name}: {self._describe(bad, call.case)}")
            if not isinstance(call.case, _PickCase):
                ratio = max(ratio, call_ratio)
        if reasons:
            return Verdict(status=Status.WRONG_RESULT, error_over_bound=ratio, reason=reasons[0])
        return Verdict(status=Status.OK, error_over_bound=ratio)

    def _describe(self, bad: BadElement, case: _Case) -> str:
        place = f"out[{', '.join(map(str, bad.index))}]"
        if bad.unwritten:
            return f"{place} was not written"
        text = f"{place} = {bad.got:.9g}, expected {bad.expected:.9g}"
        if isinstance(case, _PickCase):
            text += case.pick.origin(bad.index, batched=self._problem.batched)
        if bad.tolerance > 0:
            text += f" within {bad.tolerance:.3g}"
        if bad.got != bad.got and bad.expected == bad.expected and case.operands.inp is not None and self._problem.beta == "zero":
            text += "; inp is NaN, but must not be read with beta 0"
        return text

    def _cases_for(self, claims: Claims) -> list[_Case]:
        if not (self._probes.free_a and self._probes.free_b):
            return self._cases
        limit = exact_limit(self._problem, claims)
        if limit not in self._by_limit:
            picks = [self._probes.cancel(limit)]
            if self._probes.can_measure_width and not self._expensive:
                picks.append(self._probes.width(limit))
            self._by_limit[limit] = [self._pick_case(pick) for pick in picks]
        return [*self._by_limit[limit], *self._cases]

    def _pick_case(self, pick: Pick) -> _Case:
        self._watch_operands(pick.name, pick.operands)
        return _PickCase(name=pick.name, operands=pick.operands, pick=pick)

    def _scaled_pick_case(self, pick: Pick) -> _Case:
        self._watch_operands(pick.name, pick.operands)
        return _ScaledPickCase(
            name=pick.name,
            operands=pick.operands,
            pick=pick,
            problem=self._problem,
            largest=functools.cache(pick.operands.largest),
        )

    def _shared_cases(self) -> list[_Case]:
        """The probes that suit every choice; random data last."""
        problem, probes = self._problem, self._probes
        random = probes.random()
        cases: list[_Case] = []
        if self._expensive and probes.can_pick_both:
            cases.append(self._pick_case(probes.both(random)))
        else:
            if probes.free_a:
                cases.append(self._pick_case(probes.rows_of_b(probes.every_weight(random.right))))
            if probes.free_b:
                cases.append(self._pick_case(probes.cols_of_a(random.left)))
            if probes.free_a and problem.scales:
                cases.append(self._scaled_pick_case(probes.scaled_rows(random.b)))
            if probes.has_nan and probes.free_a and problem.m < 2 and problem.n < 2 and problem.alpha != "zero":
                cases.append(self._pick_case(probes.rows_of_b(random.right, nan=True)))
        if not (probes.free_a and probes.free_b):
            cases.append(self._bound_case("P1 integers", probes.integers(), integers=True))
        cases.append(self._bound_case("random", random))
        return cases

    def _bound_case(self, name: str, operands: Operands, *, integers: bool = False) -> _Case:
        problem = self._problem
        self._watch_operands(name, operands)
        shape = (problem.batch, problem.m, problem.n, problem.terms)
        references = [reference(operands, region) for region in regions(*shape, self._device)]
        if problem.dtype == torch.float64 and not integers:
            references.append(extended_reference(operands, *shape))
        return _BoundCase(
            name=name,
            operands=operands,
            problem=problem,
            references=tuple(references),
            largest=functools.cache(operands.largest),
            integers=integers,
        )

    def _watch_operands(self, name: str, operands: Operands) -> None:
        for operand in ("a", "b", "c", "d", "inp", "scale_a", "scale_b", "zero_b"):
            tensor = getattr(operands, operand)
            if tensor is not None and not any(checksum.watches(tensor) for checksum in self._checksums.values()):
                self._watch(f"{operand} of {name}", tensor)

    def _watch(self, name: str, *tensors: torch.Tensor) -> None:
        for i, tensor in enumerate(tensors):
            self._checksums[f"{name}[{i}]" if name == "epilogue_args" else name] = Checksum(tensor)
