"""One case being run: calls the GEMM with watched memory, judges results, gathers failures."""

from __future__ import annotations

import dataclasses
import functools

import torch

from ...choice import Claims
from ...declaration.subject import Call, Impossible, Refused, Subject, is_fatal
from ...numerics.buffers import POISONS, is_poison
from ...numerics.compare import BadElement, is_right
from ...numerics.expectation import Expectation, OneHotExpectation, referenced
from ...numerics.grouped import GroupedProbes
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
from ..diagnose import DIFFERS, FIRST_CALL, WRONG_DTYPE, Diagnosis, Evidence, diagnose
from .outcome import Failure, heat_map, told

MOST_REMEMBERED = 2**20
"""Elements of a result that is kept, to be recognised if a later call returns it again."""
CALLED_AGAIN = 3
"""How often a call that was wrong is made again, to see whether it always is."""
MOST_EXPLAINED = 2**28
"""Elements of a wrong result: of a larger one float64 copies take too much memory, and only one bad element is told."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """All elements of the right result, float64 [B, M, N], with the operands that it came from."""

    name: str
    operands: Operands
    right: Approximate
    known: bool = True
    """Not known, ``right`` may be wrong itself: then no bug can be named that would explain the result."""


class NoResult(Exception):
    """The call returned nothing that could be judged further. The failure is noted already."""


class Bench:
    """Everything that a check needs for one case. A check calls the GEMM and states what it expects; failures pile up here.

    With ``examine`` a wrong result is diagnosed and mapped, which takes several times as long as to find that it is wrong.
    """

    def __init__(self, subject: Subject, case: Case, device: torch.device, *, examine: bool = True) -> None:
        self.subject = subject
        self.examine = examine
        self.case = case
        self.device = device
        self.problem, self.claims = _asked(subject, problem_of(case, device.type))
        self.extra = () if self.problem.groups else self.probes.extra()
        """The epilogue's operands, the same in every call."""
        self.generator = torch.Generator(device=device).manual_seed(case.seed)
        self.failures: list[Failure] = []
        self.error_over_bound: float | None = None
        self.grade: float | None = None
        self.choice = ""
        self._judge = Judge(self.problem, self.claims, self.extra)
        self._calls = 0
        self._results: list[torch.Tensor] = []
        self._latest: tuple[torch.Tensor | None, bool] = (None, False)
        """The result of the latest call, and whether that was the first call of the problem in this process."""

    @functools.cached_property
    def probes(self) -> Probes:
        """Operands for one product."""
        return Probes(self.problem, self.device, seed=self.case.seed)

    @functools.cached_property
    def groups(self) -> GroupedProbes:
        """Operands for a product of each group."""
        return GroupedProbes(self.problem, self.device, seed=self.case.seed)

    def sibling(self, **changes: object) -> Bench:
        """The bench of this case with some fields changed. Its failures are this one's."""
        other = Bench(self.subject, self.case.changed(**changes), self.device, examine=self.examine)
        other.failures = self.failures
        return other

    def call(self, operands: Operands, *, out: torch.Tensor | None = None, watch: bool = True, wait: bool = True) -> torch.Tensor:
        """The result of one call, which is judged as memory: shape, dtype, place, writes elsewhere, inputs left alone.

        ``out`` is given where the case says so, poisoned and between guard bands; a given one is used as it is.
        Without ``watch`` the inputs may change; without ``wait`` the device is not waited for.

        Raises:
            Refused: the GEMM raised an error.
            NoResult: what it returned cannot be judged.
        """
        payload, guards, kept = self.next_payload(), None, None
        epilogue = {f"epilogue_args[{i}]": tensor for i, tensor in enumerate(self.given(operands).extra)}
        inputs = Watch(operands.named | epilogue) if watch else Watch()
        if out is None and self.case.out:
            out, guards = guarded_out(self.problem.out, self.device, payload)
        elif out is None:
            kept = poison_free_memory(self.problem.out, self.device, payload)
        first = self.problem not in self.subject.called
        result = self.launch(operands, out, wait=wait)
        del kept
        tensor = self.received(result, out)
        self._latest = tensor, first
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
        """Earlier results do not explain what is judged next, which may be older than they are."""
        self._results = []

    def launch(self, operands: Operands, out: torch.Tensor | None = None, *, wait: bool = True) -> object:
        """The bare call, on the current stream. Raises Refused where the GEMM raises an error that leaves the device usable."""
        x = self.given(operands)
        call = Call(problem=self.problem, tensors=x.tensors, scalars=x.scalars, out=out)
        try:
            result = self.subject(call)
            if wait and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            if isinstance(error, Impossible) or is_fatal(error):
                raise
            raise Refused(told(error)) from error
        self.subject.called.add(self.problem)
        if not self.choice:
            self.choice = self.subject.choice_of(call)
        return result

    def given(self, operands: Operands) -> Operands:
        """``operands`` with those of the epilogue, unless they have some."""
        return operands if operands.extra or not self.extra else dataclasses.replace(operands, extra=self.extra)

    def next_payload(self) -> int:
        """The bits with which out is poisoned next; never the same twice in a row."""
        self._calls += 1
        return self._payload

    @property
    def _payload(self) -> int:
        return POISONS[self.problem.out.dtype][self._calls % 2]

    def received(self, result: object, out: torch.Tensor | None = None) -> torch.Tensor:
        """The result as a tensor. Raises NoResult where it is none of the right size, dtype and device."""
        layout = self.problem.out
        if out is not None:
            if isinstance(result, torch.Tensor) and result.data_ptr() != out.data_ptr():
                self.fail("out= was given, but the call returned another tensor", property_name="out")
            return out
        if not isinstance(result, torch.Tensor):
            self.fail(f"returned {type(result).__name__}, expected a tensor", property_name="result")
            raise NoResult
        got = f"{dtype_name(result.dtype)}{list(result.shape)} on {result.device.type}"
        expected = f"{dtype_name(layout.dtype)}{list(layout.size)} on {self.device.type}"
        if got != expected:
            diagnosis = WRONG_DTYPE if result.dtype != layout.dtype else "a result of the wrong shape or device"
            self.fail(f"returned {got}, expected {expected}", property_name="result", diagnosis=diagnosis)
            raise NoResult
        return result

    def expect_one_hot(self, result: torch.Tensor, probe: OneHotProbe, *, scaled: bool = False) -> bool:
        """Bit equality with an exact probe; ``scaled``: within the bound of one product, for one with scales of any numbers."""
        return self._held(result, OneHotExpectation.of(probe, scaled=scaled))[0]

    def expect_that(self, result: torch.Tensor, expectation: Expectation) -> bool:
        """What an expectation says that no known bug explains."""
        return self._held(result, expectation, known=False)[0]

    def expect(self, result: torch.Tensor, operands: Operands, *, name: str = "random data", exact: bool = False) -> bool:
        """Judge by the bound of the claimed arithmetic. ``exact``: integers, whose sums the claims hold exactly if small enough."""
        right, ratio = self._held(result, referenced(self.problem, operands, name=name, integers=exact))
        self.error_over_bound = max(ratio, self.error_over_bound or 0.0)
        return right

    def _held(self, result: torch.Tensor, expectation: Expectation, *, known: bool = True) -> tuple[bool, float]:
        """(whether ``result`` is what it must be, the largest error over its bound); a failure more if it is not."""
        finding = self._judge.find(result, expectation, self._payload)
        bad, ratio = finding.bad_element(finding.state.tolist(), batched=self.problem.batched), float(finding.ratio)
        if bad is None:
            return True, ratio
        whole = self._judge.whole(expectation) if result.numel() <= MOST_EXPLAINED else None
        if whole is not None:
            self.explain(result, Expected(name=expectation.name, operands=expectation.operands, right=whole, known=known))
        else:
            origin = expectation.origin(bad.index, batched=self.problem.batched)
            self.fail(f"{expectation.name}: {bad.text(origin)}", **bad.facts)
        return False, ratio

    def expect_equal(
        self, result: torch.Tensor, expected: torch.Tensor, operands: Operands, *, name: str, known: bool = True
    ) -> bool:
        """The same numbers as ``expected`` (any NaN equals any NaN), which is right if ``known``, else just another result."""
        same = (result == expected) | (result.isnan() & expected.isnan())
        if bool(same.all()):
            return True
        right = Approximate.exactly(self._wide(expected))
        self.explain(result, Expected(name=name, operands=operands, right=right, known=known))
        return False

    def fail(self, message: str, *, property_name: str = "", **facts: object) -> None:
        """Note a failure of this case's property, or of another one that it came upon."""
        self.failures.append(Failure(property_name=property_name or self.case.property_name, message=message, **facts))  # type: ignore[arg-type]

    def explain(self, result: torch.Tensor, expected: Expected) -> None:
        """One failure with all that helps: first bad element, count, map, and which known bug gives this result."""
        got = self._wide(result)
        value, tolerance = expected.right.value, expected.right.error
        bad = ~is_right(got, expected.right, self.problem.out.dtype)
        if self.claims.skips_zeros:
            bad &= ~value.isnan()
        if not bool(bad.any()):  # a grade is of all elements together
            bad = got != value
        count = int(bad.sum())
        place = tuple(int(i) for i in torch.unravel_index(bad.flatten().to(torch.uint8).argmax(), bad.shape))
        unwritten = is_poison(result).reshape(bad.shape)
        element = BadElement(
            index=place if self.problem.batched else place[1:],
            got=float(got[place]),
            expected=float(value[place]),
            tolerance=float(tolerance[place]),
            unwritten=bool(unwritten[place]),
        )
        message = f"{expected.name}: {element.text()}; {count} of {bad.numel()} elements are wrong"
        if not self.examine:
            self.fail(message, **element.facts, examined=False)
            return
        left = bool((bad & unwritten).any())
        again = self._again(result, expected, bad) if not left else None
        named = again or self._diagnosis(got, expected, bad, unwritten, left=left)
        self.fail(
            message + ("; called again, some of them are right" if again else ""),
            diagnosis=named.text, also=named.also, **element.facts,
            bad_elements=count, elements=bad.numel(), heat=heat_map(got, value, tolerance, place[0]),
        )  # fmt: skip
        # A result that was wrong when it came is no sign of a stale one when it comes again.
        self._results = [x for x in self._results if not bool(((x == got) | (x.isnan() & got.isnan())).all())]

    def _again(self, result: torch.Tensor, expected: Expected, bad: torch.Tensor) -> Diagnosis | None:
        """What it is called if the latest call, of which ``result`` is, is right where it was wrong when it is made again."""
        latest, first = self._latest
        if result is not latest:
            return None
        noted, results, operands = len(self.failures), self._results, self.given(expected.operands)
        try:
            for _ in range(CALLED_AGAIN):
                other = self.call(operands, watch=False)
                if bool((bad & is_right(self._wide(other), expected.right, self.problem.out.dtype)).any()):
                    return Diagnosis(FIRST_CALL, (DIFFERS,)) if first else Diagnosis(DIFFERS)
        except (Refused, NoResult):
            return Diagnosis(DIFFERS)
        finally:
            del self.failures[noted:]
            self._results = results
        return None

    def _diagnosis(
        self, got: torch.Tensor, expected: Expected, bad: torch.Tensor, unwritten: torch.Tensor, *, left: bool
    ) -> Diagnosis:
        changed = any(failure.property_name == "inputs-unchanged" for failure in self.failures)  # the expectation with them
        if self.problem.groups or (not left and (changed or not expected.known)):
            return Diagnosis("elements left unwritten" if left else "")
        return diagnose(
            Evidence(
                problem=joined(self.problem), operands=side_by_side(self.given(expected.operands)), got=got,
                expected=expected.right.value, tolerance=expected.right.error, bad=bad, unwritten=unwritten,
                earlier=tuple(self._results[:-1]),
            )
        )  # fmt: skip

    def _wide(self, result: torch.Tensor) -> torch.Tensor:
        """A copy in float64 [B, M, N]."""
        return result.to(torch.float64, copy=True).reshape(self.problem.batch, self.problem.m, self.problem.n)


def _asked(subject: Subject, problem: Problem) -> tuple[Problem, Claims]:
    """The problem and what is claimed for it. Where float32 is declared to be read as tf32, it is a tf32 problem to the probes."""
    if problem.float8 and subject.traits.fast_accum:
        problem = dataclasses.replace(problem, fast_accum=True)
    claims = subject.claims(problem)
    if claims.input_mode == "tf32" and problem.dtype == torch.float32:
        problem = dataclasses.replace(problem, precision=dataclasses.replace(problem.precision, input_mode="tf32"))
    return problem, claims
