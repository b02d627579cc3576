"""The run of one case: calls the GEMM with watched memory, judges results, collects failures."""

import dataclasses
import functools

import torch

from ...declaration.subject import Call, Impossible, Refused, Subject, is_fatal
from ...numerics.buffers import POISONS, is_poison
from ...numerics.compare import BadElement, is_right, same_numbers
from ...numerics.expectation import Expectation, OneHotExpectation, referenced
from ...numerics.grouped import GroupedProbes
from ...numerics.grouped_expectation import GroupedExpectation
from ...numerics.guards import Watch, guarded_out, poison_free_memory
from ...numerics.joined import joined, side_by_side
from ...numerics.judging import Judge
from ...numerics.one_hot import OneHotProbe
from ...numerics.operands import Operands
from ...numerics.probes import Probes
from ...numerics.propagate import Approximate
from ...problem import Problem
from ...problem.dtypes import dtype_name
from ..cases.case import Case
from ..cases.statement import problem_of
from ..diagnose import Diagnosis, Evidence, GroupEvidence, diagnose, diagnose_grouped
from ..diagnose.match import ADDED_TO_OUT, INPUT_RETURNED, WRONG_DTYPE
from .outcome import Expected, Failure, NoResult, error_text, heat_map
from .repeat import Repeated

MOST_REMEMBERED = 2**20
"""Maximum elements of a result that is kept to recognise it if a later call returns it again."""
MOST_EXPLAINED = 2**28
"""Maximum elements of a wrong result that is diagnosed. float64 copies of larger ones take too much memory."""


class Bench:
    """Environment of one case. A check calls the GEMM through it and states expectations, and it collects the failures.

    With ``examine``, a wrong result is diagnosed and mapped. That takes several times as long as detecting it.
    """

    def __init__(self, subject: Subject, case: Case, device: torch.device, *, examine: bool = True) -> None:
        self.subject = subject
        self.examine = examine
        self.case = case
        self.device = device
        problem = problem_of(case, device.type)
        if problem.float8 and subject.traits.fast_accum:
            problem = dataclasses.replace(problem, fast_accum=True)
        self.claims = subject.claims(problem)
        if self.claims.input_mode == "tf32" and problem.dtype == torch.float32:
            problem = dataclasses.replace(problem, precision=dataclasses.replace(problem.precision, input_mode="tf32"))
        self.problem = problem
        self.extra = () if self.problem.groups else self.probes.extra()
        """Operands of the epilogue, the same in every call."""
        self.generator = torch.Generator(device=device).manual_seed(case.seed)
        self.failures: list[Failure] = []
        self.error_over_bound: float | None = None
        self.grade: float | None = None
        self.choice = ""
        self._judge = Judge(self.problem, self.claims, self.extra)
        self._payload = POISONS[self.problem.out.dtype][0]
        self._results: list[torch.Tensor] = []
        self._ends: list[tuple[int, ...]] = []
        self._latest: tuple[torch.Tensor | None, bool] = (None, False)
        """Result of the latest call, and True if that was the first call of the problem in this process."""

    @functools.cached_property
    def probes(self) -> Probes:
        """Operands for one product."""
        return Probes(self.problem, self.device, seed=self.case.seed)

    @functools.cached_property
    def groups(self) -> GroupedProbes:
        """Operands for a product of each group."""
        return GroupedProbes(self.problem, self.device, seed=self.case.seed)

    def sibling(self, **changes: object) -> "Bench":
        """Return the bench of this case with some fields changed. It records its failures here."""
        other = Bench(self.subject, self.case.changed(**changes), self.device, examine=self.examine)
        other.failures = self.failures
        return other

    def call(self, operands: Operands, *, out: torch.Tensor | None = None, watch: bool = True, wait: bool = True) -> torch.Tensor:
        """Call the GEMM once and return the result, after checking shape, dtype, memory, stray writes and unchanged inputs.

        If the case has an ``out``, one is passed that is poisoned and lies between guard bands. A given ``out`` is used as it is.
        Without ``watch`` the inputs may change. Without ``wait`` the device is not synchronised.

        Raises Refused if the GEMM raises an error, and NoResult if the returned value cannot be judged.
        """
        payload, guards, kept = self.next_payload(), None, None
        epilogue = {f"epilogue_args[{i}]": tensor for i, tensor in enumerate(self.given(operands).extra)}
        inputs = Watch(operands.named | epilogue) if watch else Watch()
        if out is None and self.case.out:
            out, guards = guarded_out(self.problem.out, self.device, payload)
        elif out is None:
            kept = poison_free_memory(self.problem.out, self.device, payload)
        if wait and operands.offs is not None:  # reading them waits for the device
            self._ends = [*self._ends[-2:], tuple(operands.offs.tolist())]
        first = self.problem not in self.subject.called
        result = self.launch(operands, out, wait=wait)
        del kept
        tensor = self.received(result, out)
        self._latest = tensor, first
        if out is None and (name := inputs.holder(tensor)):
            self.fail(f"the result lies in the memory of the input {name}", property_name="result", diagnosis=INPUT_RETURNED)
        for name, changed in zip(inputs.names, inputs.changed(), strict=True):
            if bool(changed):
                self.fail(f"the call changed its input {name}", property_name="inputs-unchanged")
        if guards is not None:
            broken, where = guards.broken(payload).tolist()
            if broken:
                self.fail(guards.describe(int(where)), property_name="out-of-bounds")
        if tensor.numel() <= MOST_REMEMBERED:
            self._results = [*self._results[-2:], self._wide(tensor)]
        return tensor

    def forget_results(self) -> None:
        """Forget earlier results, so that none of them explains the next result. It may be older than they are."""
        self._results = []

    def launch(self, operands: Operands, out: torch.Tensor | None = None, *, wait: bool = True) -> object:
        """Call the GEMM on the current stream, unwatched. Raises Refused for an error that leaves the device usable."""
        x = self.given(operands)
        call = Call(problem=self.problem, tensors=x.tensors, scalars=x.scalars, out=out)
        try:
            result = self.subject(call)
            if wait and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            if isinstance(error, Impossible) or is_fatal(error):
                raise
            raise Refused(error_text(error)) from error
        self.subject.called.add(self.problem)
        if not self.choice:
            self.choice = self.subject.choice_of(call)
        return result

    def given(self, operands: Operands) -> Operands:
        """Return ``operands`` with the epilogue's operands, unless they have some already."""
        return operands if operands.extra or not self.extra else dataclasses.replace(operands, extra=self.extra)

    def next_payload(self) -> int:
        """Return the poison bits for the next out. Consecutive calls use different bits."""
        first, second = POISONS[self.problem.out.dtype]
        self._payload = second if self._payload == first else first
        return self._payload

    def received(self, result: object, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result as a tensor. Raises NoResult if it is no dense tensor or has the wrong shape, dtype or device."""
        layout = self.problem.out
        if out is not None:
            if isinstance(result, torch.Tensor) and result.data_ptr() != out.data_ptr():
                message = "out= was given, but the call returned another tensor"
                self.fail(message, property_name="out", diagnosis="another tensor than out is returned")
            return out
        if not isinstance(result, torch.Tensor):
            message = f"returned {type(result).__name__}, expected a tensor"
            self.fail(message, property_name="result", diagnosis="a result that is no tensor")
            raise NoResult
        if result.layout != torch.strided:
            message = f"returned a tensor of the layout {result.layout}, expected a dense tensor (torch.strided)"
            self.fail(message, property_name="result", diagnosis="a result that is no dense tensor")
            raise NoResult
        got = f"{dtype_name(result.dtype)}{list(result.shape)} on {result.device.type}"
        expected = f"{dtype_name(layout.dtype)}{list(layout.size)} on {self.device.type}"
        if got != expected:
            diagnosis = WRONG_DTYPE if result.dtype != layout.dtype else "a result of the wrong shape or device"
            self.fail(f"returned {got}, expected {expected}", property_name="result", diagnosis=diagnosis)
            raise NoResult
        return result

    def expect_one_hot(self, result: torch.Tensor, probe: OneHotProbe, *, scaled: bool = False) -> bool:
        """Compare with an exact probe, bit by bit. With ``scaled`` (scales of any numbers), allow the bound of one product."""
        return self._held(result, OneHotExpectation.of(probe, scaled=scaled))[0]

    def expect_that(self, result: torch.Tensor, expectation: Expectation) -> bool:
        """Compare with an expectation that no known bug can explain."""
        return self._held(result, expectation, known=False)[0]

    def expect(self, result: torch.Tensor, operands: Operands, *, name: str = "random data", exact: bool = False) -> bool:
        """Judge by the bound of the claimed arithmetic. ``exact``: integers, whose sums are exact as far as the claims say."""
        right, ratio = self._held(result, referenced(self.problem, operands, name=name, integers=exact))
        self.error_over_bound = max(ratio, self.error_over_bound or 0.0)
        return right

    def _held(self, result: torch.Tensor, expectation: Expectation, *, known: bool = True) -> tuple[bool, float]:
        """Return (True if ``result`` meets the expectation, the largest error over its bound). Record a failure otherwise."""
        finding = self._judge.find(result, expectation, self._payload)
        bad, ratio = finding.bad_element(finding.state.tolist(), batched=self.problem.batched), float(finding.ratio)
        if bad is None:
            return True, ratio
        whole = self._judge.whole(expectation) if result.numel() <= MOST_EXPLAINED else None
        if whole is not None:
            known = known or isinstance(expectation, GroupedExpectation)
            self.explain(result, Expected(name=expectation.name, operands=expectation.operands, right=whole, known=known))
        else:
            origin = expectation.origin(bad.index, batched=self.problem.batched)
            self.fail(f"{expectation.name}: {bad.text(origin)}", **bad.facts)
        return False, ratio

    def expect_equal(
        self, result: torch.Tensor, expected: torch.Tensor, operands: Operands, *, name: str, known: bool = True
    ) -> bool:
        """Compare with another result. Any NaN equals any NaN. ``known``: ``expected`` is right, not just another result."""
        if same_numbers(result, expected):
            return True
        right = Approximate.exactly(self._wide(expected))
        self.explain(result, Expected(name=name, operands=operands, right=right, known=known))
        return False

    def fail(self, message: str, *, property_name: str = "", **facts: object) -> None:
        """Record a failure of this case's property, or of another one that the case happened to violate."""
        self.failures.append(Failure(property_name=property_name or self.case.property_name, message=message, **facts))  # type: ignore[arg-type]

    def explain(self, result: torch.Tensor, expected: Expected) -> None:
        """Record one failure with all details: first bad element, count, map, and the known bug that gives this result."""
        got = self._wide(result)
        value, tolerance = expected.right.value, expected.right.error
        bad = ~is_right(got, expected.right, self.problem.out.dtype)
        if self.claims.skips_zeros:
            bad &= ~value.isnan()
        if not bool(bad.any()):  # a grade judges all elements together
            bad = got != value
        count = int(bad.sum())
        place = tuple(int(i) for i in torch.unravel_index(bad.flatten().to(torch.uint8).argmax(), bad.shape))
        repeated = Repeated(call=self._call_again, operands=self.given(expected.operands), right=expected.right, bad=bad)
        again, unwritten = result is self._latest[0], is_poison(result).reshape(bad.shape)
        if self.examine and again and not self.case.out and not bool((bad & unwritten).any()):
            unwritten = repeated.left_unwritten()
        element = BadElement(
            index=place[-result.dim() :], got=float(got[place]), expected=float(value[place]), tolerance=float(tolerance[place]),
            unwritten=bool(unwritten[place]),
        )  # fmt: skip
        message = f"{expected.name}: {element.text()}; {count} of {bad.numel()} elements are wrong"
        if not self.examine:
            self.fail(message, **element.facts, examined=False)
            return
        differs = self._differs(repeated, got, unwritten) if again else None
        named = differs or self._diagnosis(got, expected, bad, unwritten)
        self.fail(
            message + ("; called again, some of them are right" if differs and differs.text != ADDED_TO_OUT else ""),
            diagnosis=named.text, also=named.also, **element.facts,
            bad_elements=count, elements=bad.numel(), heat=heat_map(got, value, tolerance, place[0]),
        )  # fmt: skip
        # Forget this result: if it comes again, it is no stale one.
        self._results = [x for x in self._results if not same_numbers(x, got)]

    def _differs(self, repeated: Repeated, got: torch.Tensor, unwritten: torch.Tensor) -> Diagnosis | None:
        """Return a diagnosis if another call of the latest problem is right at wrong elements."""
        if not bool((repeated.bad & unwritten).any()):
            stale = any(same_numbers(x, got) for x in self._results[:-1])
            return repeated.diagnosis(first=self._latest[1], stale=stale)
        if not self.case.out or not bool((repeated.right.value[repeated.bad] != 0).any()):
            return None
        zeros, _ = guarded_out(self.problem.out, self.device, self.next_payload())
        return Diagnosis(ADDED_TO_OUT) if repeated.adds_to(zeros.zero_()) else None

    def _call_again(self, given: Operands, out: torch.Tensor | None) -> torch.Tensor | None:
        """Return the result of another call, or None if it has none. Record nothing."""
        noted, results, ends, latest = len(self.failures), self._results, self._ends, self._latest
        try:
            return self.call(given, out=out, watch=False)
        except (Refused, NoResult):
            return None
        finally:
            del self.failures[noted:]
            self._results, self._ends, self._latest = results, ends, latest

    def _diagnosis(self, got: torch.Tensor, expected: Expected, bad: torch.Tensor, unwritten: torch.Tensor) -> Diagnosis:
        changed = any(failure.property_name == "inputs-unchanged" for failure in self.failures)  # it falsifies the expectation
        if (changed or not expected.known) and not bool((bad & unwritten).any()):
            return Diagnosis("")
        evidence = Evidence(
            problem=joined(self.problem), operands=side_by_side(self.given(expected.operands)), got=got,
            expected=expected.right.value, tolerance=expected.right.error, bad=bad, unwritten=unwritten,
            earlier=tuple(self._results[:-1]),
        )  # fmt: skip
        if not self.problem.groups:
            return diagnose(evidence)

        def whole(problem: Problem, expectation: Expectation) -> Approximate | None:
            return Judge(problem, self.claims, self.extra).whole(expectation)

        return diagnose_grouped(GroupEvidence(evidence=evidence, whole=whole, earlier_ends=tuple(self._ends[:-1])))

    def _wide(self, result: torch.Tensor) -> torch.Tensor:
        """Return a copy in float64 (B, M, N)."""
        return result.to(torch.float64, copy=True).reshape(self.problem.batch, *self.problem.out.size[-2:])
