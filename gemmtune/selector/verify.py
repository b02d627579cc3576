"""Verification before timing: exact probes, an error bound on random data, guard bands, untouched inputs, by numerics.judging."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..choice import Choice, Claims, Kernel, Status, Tensors
from ..errors import ErrorFromChoice
from ..numerics import block_sparse
from ..numerics.aliasing import in_one_buffer, is_product_with_itself
from ..numerics.bounds import exact_limit
from ..numerics.buffers import POISONS, poison
from ..numerics.compare import BadElement, Finding
from ..numerics.expectation import Expectation, OneHotExpectation, referenced
from ..numerics.grouped import GroupedProbes, grouped_expectations
from ..numerics.guards import Watch, guarded_out, poison_free_memory
from ..numerics.judging import Judge
from ..numerics.one_hot import OneHotProbe
from ..numerics.probes import Probes
from ..numerics.slots import Stage, tight_problem
from ..problem import Problem
from .samples import Sample

SEPARATE_PROBES_MACS = 2**33
"""Multiplications above which a CPU saves calls: a and b share a one-hot probe, and ``run_new`` replaces a call of ``run``. Below
it, a and b have separate probes."""

MOST_SHARED_MACS = 2**30
"""Maximum multiplications for which a product that may have one tensor as a and b is tried in that form. It needs one more
reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The result of one call, still on the device, with ``Guards.broken``, and a flag per operand on the stage that ``changed``."""

    expectation: Expectation
    finding: Finding
    guards: torch.Tensor
    changed: Mapping[str, torch.Tensor]


def with_extra(expectation: Expectation, extra: tuple[torch.Tensor, ...]) -> Expectation:
    """Return the expectation with operands for the epilogue."""
    return dataclasses.replace(expectation, operands=dataclasses.replace(expectation.operands, extra=extra))


def random_expectation(problem: Problem, device: torch.device) -> Expectation:
    """Return an expectation of random data, with the epilogue's operands, without the probes of a ``Verifier``."""
    probes = Probes(problem, device)
    made: Expectation
    if problem.groups:
        made = GroupedProbes(problem, device).random()
    else:
        made = referenced(problem, probes.random(), name="random")
    return with_extra(made, probes.extra())


class Verifier:
    """Verifier of choices for one problem, which share probes and references, and a stage for operands with large gaps."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem = problem
        self._drawn = tight_problem(problem)
        self._device = device
        self._out, self._guards = guarded_out(problem.out, device, POISONS[problem.out.dtype][0])
        self._expensive = device.type == "cpu" and problem.flops > 2 * SEPARATE_PROBES_MACS
        self._reset()

    def _reset(self) -> None:
        """Make all operands: at the start, and again after a choice has written into them."""
        self._packed: tuple[str, dict[int, torch.Tensor]] = ("", {})
        self._by_limit: dict[int, list[Expectation]] = {}
        self._inputs = Watch()
        if self._problem.empty:
            return
        self._stage = Stage(self._problem, self._device)
        self._probes = Probes(self._drawn, self._device)
        self._extra = self._probes.extra()
        for i, tensor in enumerate(self._extra):
            self._inputs.add(f"epilogue_args[{i}]", tensor)
        self._shared = [self._watched(expectation) for expectation in self._made_once()]

    @property
    def random(self) -> Expectation:
        """The expectation of random data, with the epilogue's operands."""
        return with_extra(self._shared[-1], self._extra)

    def check(self, choice: Choice, kernel: Kernel) -> Sample:
        """Run the kernel on every probe and on random data. Propagate its exceptions; synchronize with the device at the end."""
        if self._problem.empty:
            return Sample(status=Status.OK, error_over_bound=0.0)
        judge = Judge(self._problem, choice.claims, self._extra)
        expectations = self._expectations(choice.claims)
        calls: list[_Call] = []
        for number, expectation in enumerate(expectations):
            if self._expensive and kernel.run_new is not None and expectation is expectations[-1]:
                break  # run_new takes these operands below
            call = self._call(number, expectation, choice, kernel, judge)
            calls.append(call)
            if self._device.type == "cpu" and (call.finding.state[0] or call.guards[0]):
                return self._verification(calls)
        if kernel.run_new is not None:
            calls.append(self._call_new(expectations[-1], choice, kernel, judge))
        return self._verification(calls)

    def _call(self, number: int, expectation: Expectation, choice: Choice, kernel: Kernel, judge: Judge) -> _Call:
        payload = POISONS[self._out.dtype][number % 2]
        poison(self._out, payload)
        kernel.run(self._out, self._tensors(expectation, choice), expectation.operands.scalars)
        finding = judge.find(self._out, expectation, payload)
        guards, changed = self._guards.broken(payload), self._stage.changed()
        return _Call(expectation=expectation, finding=finding, guards=guards, changed=changed)

    def _call_new(self, expectation: Expectation, choice: Choice, kernel: Kernel, judge: Judge) -> _Call:
        assert kernel.run_new is not None
        payload = POISONS[self._out.dtype][0]
        tensors = self._tensors(expectation, choice)
        kept = poison_free_memory(self._problem.out, self._device, payload)
        result = kernel.run_new(tensors, expectation.operands.scalars)
        del kept
        if not choice.own_results:
            self._check_memory(choice, result, kernel.run_new(tensors, expectation.operands.scalars), tensors)
        got, expected = ((tuple(t.shape), t.dtype) for t in (result, self._out))
        if got != expected:
            reason = f"run_new gave {got[1]} of shape {got[0]}, expected {expected[1]} of shape {expected[0]}"
            raise ErrorFromChoice(choice.name, str(self._problem), reason)
        finding = judge.find(result, expectation, payload)
        guards, changed = torch.zeros(2, dtype=torch.float64, device=self._device), self._stage.changed()
        return _Call(expectation=expectation, finding=finding, guards=guards, changed=changed)

    def _check_memory(self, choice: Choice, result: torch.Tensor, again: torch.Tensor, tensors: Tensors) -> None:
        """Raise ErrorFromChoice if a result shares memory with the next call's result or with an operand."""
        read = [x for tensor in tensors for x in block_sparse.parts(tensor)]
        memory = [x.untyped_storage().data_ptr() for x in (result, again, *read)]
        if memory[0] in memory[1:]:
            whose = "an operand" if memory[0] in memory[2:] else "the next call's result"
            reason = f"returned memory that is also {whose}, expected a separate result from each call"
            raise ErrorFromChoice(choice.name, str(self._problem), reason)

    def _tensors(self, expectation: Expectation, choice: Choice) -> Tensors:
        """Return the tensors for the kernel. Every call has the same epilogue operands."""
        a, b, *rest = self._stage.place(dataclasses.replace(expectation.operands, extra=self._extra)).tensors
        return (a, self._packed_b(b, expectation, choice), *rest)

    def _packed_b(self, b: torch.Tensor, expectation: Expectation, choice: Choice) -> torch.Tensor:
        """Return b, packed if the choice needs it. The packed b is kept for the next choice with the same format."""
        name = choice.packed_format
        if name is None:
            return b
        if self._packed[0] != name:
            self._packed = (name, {})
            self._inputs.forget("packed b")
        cache = self._packed[1]
        if id(expectation) not in cache:
            cache[id(expectation)] = choice.pack(self._stage.of_its_own("b", b))
            self._inputs.add(f"packed b of {expectation.name}", cache[id(expectation)])
        return cache[id(expectation)]

    def _verification(self, calls: list[_Call]) -> Sample:
        flags = [(f"{role} of {call.expectation.name}", flag) for call in calls for role, flag in call.changed.items()]
        flags += [*self._stage.gaps_changed().items(), *zip(self._inputs.names, self._inputs.changed(), strict=True)]
        names, changed = [name for name, _ in flags], [flag for _, flag in flags]
        parts = [torch.cat([call.finding.state, call.finding.ratio.reshape(1), call.guards]) for call in calls]
        numbers = torch.cat([*parts, *(flag.double().reshape(1) for flag in changed)]).tolist()  # the only synchronization
        width = (len(numbers) - len(names)) // len(calls)
        modified = [name for name, flag in zip(names, numbers[width * len(calls) :], strict=True) if flag]
        if modified:
            self._reset()
        # Collect the reasons: changed inputs, broken guards, wrong elements.
        ratio, reasons = 0.0, [f"the call changed its input: {name}" for name in modified[:1]]
        for i, call in enumerate(calls):
            *state, call_ratio, broken, where = numbers[i * width : (i + 1) * width]
            expectation = call.expectation
            bad = call.finding.bad_element(state, batched=len(self._problem.out.size) == 3)
            if broken:
                reasons.append(f"{expectation.name}: {self._guards.describe(int(where))}")
            if bad is not None:
                reasons.append(f"{expectation.name}: {self._describe(bad, expectation)}")
            if not isinstance(expectation, OneHotExpectation):
                ratio = max(ratio, call_ratio)
        if reasons:
            return Sample(status=Status.WRONG_RESULT, error_over_bound=ratio, reason=reasons[0])
        return Sample(status=Status.OK, error_over_bound=ratio)

    def _describe(self, bad: BadElement, expectation: Expectation) -> str:
        text = bad.text(expectation.origin(bad.index, batched=self._problem.batched))
        unread = expectation.operands.inp is not None and self._problem.beta == "zero"
        if unread and not bad.unwritten and bad.got != bad.got and bad.expected == bad.expected:
            text += "; inp is NaN, but must not be read with beta 0"
        return text

    def _expectations(self, claims: Claims) -> list[Expectation]:
        """Return probes whose sums are exact by the claims, then those that suit every choice."""
        probes = self._probes
        if self._problem.groups or not (probes.free_a and probes.free_b):
            return self._shared
        limit = exact_limit(self._problem, claims)
        if limit not in self._by_limit:
            known = [probes.cancel(limit)]
            if probes.can_measure_width and not self._expensive:
                known.append(probes.width(limit))
            self._by_limit[limit] = [self._watched(OneHotExpectation.of(probe)) for probe in known]
        return [*self._by_limit[limit], *self._shared]

    def _made_once(self) -> list[Expectation]:
        """Return the expectations that suit every choice, random data last."""
        problem, probes = self._problem, self._probes
        if problem.groups:
            return grouped_expectations(self._drawn, self._device)
        random = probes.random()
        # One-hot probes: exact results that show each element of a and b.
        known: list[OneHotProbe] = []
        if self._expensive and probes.can_pick_both:
            known.append(probes.both(random))
        else:
            if probes.free_a:
                known.append(probes.rows_of_b(probes.every_weight(random.right)))
            if probes.free_b:
                known.append(probes.cols_of_a(random.left))
            known += probes.special_in_few_lines(random)
        made: list[Expectation] = [OneHotExpectation.of(probe) for probe in known]
        if probes.free_a and problem.scales and not (self._expensive and probes.can_pick_both):
            made.append(OneHotExpectation.of(probes.rows_of_b(random.b, scaled=True), scaled=True))
        if not (probes.free_a and probes.free_b):
            made.append(referenced(problem, probes.integers(), name="P1 integers", integers=True))
        if is_product_with_itself(problem) and problem.flops <= 2 * MOST_SHARED_MACS:
            made.append(referenced(problem, in_one_buffer(problem, probes.integers()), name="b is a", integers=True))
        # Block patterns of a block-sparse b, then random data.
        patterns = probes.patterns()
        for name in list(patterns)[: 1 if self._expensive else None]:
            made.append(referenced(problem, patterns[name], name=name))
        absent = probes.absent()
        made += [absent] if absent is not None else []
        made.append(referenced(problem, random, name="random"))
        return made

    def _watched(self, expectation: Expectation) -> Expectation:
        for name, tensor in expectation.operands.named.items():
            self._inputs.add(f"{name} of {expectation.name}", tensor)
        return expectation
