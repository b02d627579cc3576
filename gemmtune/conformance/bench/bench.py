"""One case being run: calls the GEMM with watched memory, judges results, gathers failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ...choice import Claims
from ...numerics.bounds import Bound, accumulation_bound, exact_limit
from ...numerics.compare import Comparer, Finding
from ...numerics.guards import Checksum, Guards
from ...numerics.joined import joined, side_by_side
from ...numerics.operands import POISONS, Operands, storage_bits
from ...numerics.pick import Pick
from ...numerics.probes import Probes
from ...numerics.reference import Reference, extended_reference, reference, regions
from ...problem import Problem
from ...problem.dtypes import dtype_name
from ..cases.case import Case
from ..cases.statement import problem_of
from ..diagnose import Evidence, diagnose
from ..gemms.refusals import REFUSALS, Refused, is_fatal
from ..gemms.subject import Call, Subject
from .expected import Expected, Judged, exactly, within
from .heat import heat_map
from .outcome import Failure
from .poisoned import guarded_out, poison_free_memory

__all__ = ["WATCHED", "Bench"]

MOST_REMEMBERED = 2**20
"""Elements of a result that is kept, to be recognised if a later call returns it again."""
WATCHED = ("a", "b", "c", "d", "inp", "scale_a", "scale_b", "zero_b")
"""Inputs that a call must leave as they are, besides those of an epilogue."""


class Bench:
    """Everything that a check needs for one case. A check calls the GEMM and states what it expects; failures pile up here."""

    def __init__(self, subject: Subject, case: Case, device: torch.device) -> None:
        self.subject = subject
        self.case = case
        self.device = device
        self.problem, self.claims = _asked(subject, problem_of(case, device.type))
        self.probes = Probes(self.problem, device, seed=case.seed)
        self.extra = self.probes.extra()
        """The epilogue's operands, the same in every call."""
        self.generator = torch.Generator(device=device).manual_seed(case.seed)
        self.failures: list[Failure] = []
        self.error_over_bound: float | None = None
        self.grade: float | None = None
        self.choice = ""
        self._judged = Judged(problem=self.problem, claims=self.claims, extra=self.extra)
        self._comparer = Comparer(self.problem, self.claims, self.extra)
        self._calls = 0
        self._results: list[torch.Tensor] = []

    def sibling(self, **changes: object) -> Bench:
        """The bench of this case with some fields changed. Its failures are this one's."""
        other = Bench(self.subject, self.case.changed(**changes), self.device)
        other.failures = self.failures
        return other

    # Calling

    def call(self, operands: Operands, *, out: torch.Tensor | None = None, watch: bool = True, wait: bool = True) -> torch.Tensor:
        """The result of one call, which is judged as memory: shape, dtype, place, writes elsewhere, inputs left alone.

        ``out`` is given where the case says so, poisoned and between guard bands; a given one is used as it is.
        Without ``watch`` the inputs may change; without ``wait`` the device is not waited for.

        Raises:
            Refused: the GEMM raised an error.
        """
        payload = self.next_payload()
        guards: Guards | None = None
        sums = self._checksums(operands) if watch else {}
        kept: torch.Tensor | None = None
        if out is None and self.case.out:
            out, guards = guarded_out(self.problem.out, self.device, payload)
        elif out is None:
            kept = poison_free_memory(self.problem.out, self.device, payload)
        result = self.launch(Call(problem=self.problem, operands=operands, out=out), wait=wait)
        del kept
        tensor = self.received(result, out)
        for name, checksum in sums.items():
            if bool(checksum.changed()):
                self.fail(f"the call changed its input {name}", property_name="inputs-unchanged")
        if guards is not None:
            broken, where = guards.broken(payload).tolist()
            if broken:
                self.fail(guards.describe(int(where)), property_name="out-of-bounds")
        self._remember(tensor)
        return tensor

    def launch(self, call: Call, *, wait: bool = True) -> object:
        """The bare call, on the current stream. Raises Refused where the GEMM raises an error that leaves the device usable."""
        call = dataclasses.replace(call, operands=self.given(call.operands))
        try:
            result = self.subject(call)
            if wait and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except REFUSALS as error:
            if is_fatal(error):
                raise
            raise Refused(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}") from error
        if not self.choice:
            self.choice = self.subject.choice_of(call)
        return result

    def given(self, operands: Operands) -> Operands:
        """``operands`` with those of the epilogue, unless they have some."""
        return operands if operands.extra or not self.extra else dataclasses.replace(operands, extra=self.extra)

    def next_payload(self) -> int:
        """The bits with which out is poisoned next; never the same twice in a row."""
        self._calls += 1
        return POISONS[self.problem.out.dtype][self._calls % 2]

    def _checksums(self, operands: Operands) -> dict[str, Checksum]:
        tensors = {name: getattr(operands, name) for name in WATCHED}
        tensors |= {f"epilogue_args[{i}]": tensor for i, tensor in enumerate(self.given(operands).extra)}
        return {name: Checksum(tensor) for name, tensor in tensors.items() if tensor is not None and tensor.numel()}

    def received(self, result: object, out: torch.Tensor | None = None) -> torch.Tensor:
        """The result as a tensor; a placeholder of NaN or zero where it cannot be one, so that the check goes on."""
        layout = self.problem.out
        if out is not None:
            if isinstance(result, torch.Tensor) and result.data_ptr() != out.data_ptr():
                self.fail("out= was given, but the call returned another tensor", property_name="out")
            return out
        if not isinstance(result, torch.Tensor):
            self.fail(f"returned {type(result).__name__}, expected a tensor", property_name="result")
            return torch.zeros(layout.size, dtype=layout.dtype, device=self.device)
        got = (tuple(result.shape), result.dtype, result.device.type)
        expected = (layout.size, layout.dtype, self.device.type)
        if got != expected:
            shown = [f"{dtype_name(dtype)}{list(size)} on {where}" for size, dtype, where in (got, expected)]
            self.fail(f"returned {shown[0]}, expected {shown[1]}", property_name="result")
            return torch.zeros(layout.size, dtype=layout.dtype, device=self.device)
        return result

    # Judging

    def expect_pick(self, result: torch.Tensor, pick: Pick) -> bool:
        """Bit equality with an exact probe."""
        finding = self._finding()
        self._comparer.pick(result, pick, finding)
        return self._conclude(finding, result, pick.name, lambda: exactly(self._judged, pick))

    def expect_scaled_pick(self, result: torch.Tensor, pick: Pick) -> bool:
        """Within the bound of one product, for a probe with scales of any numbers."""
        finding = self._finding()
        bound = accumulation_bound(self.problem, self.claims, alpha=1, largest=pick.operands.beside_subnormal, terms=1)
        self._comparer.picked_within(result, pick, bound, finding)
        return self._conclude(finding, result, pick.name, lambda: exactly(self._judged, pick, bound))

    def expect(self, result: torch.Tensor, operands: Operands, *, name: str = "random data", exact: bool = False) -> bool:
        """Within the bound of the claimed arithmetic. ``exact``: integers, whose sums the claims hold exactly if small enough."""
        problem = self.problem
        shape = (problem.batch, problem.m, problem.n, problem.terms)
        references = [reference(operands, region) for region in regions(*shape, self.device)]
        if problem.dtype == torch.float64 and not exact:
            references.append(extended_reference(operands, *shape))
        finding = self._finding()
        for part in references:
            self._comparer.reference(result, part, self._bound(operands, part, exact=exact), finding)
        ratio = float(finding.ratio)
        self.error_over_bound = max(ratio, self.error_over_bound or 0.0)
        bound = self._bound(operands, references[0], exact=exact)
        return self._conclude(finding, result, name, lambda: within(self._judged, operands, references[0], bound))

    def expect_equal(
        self, result: torch.Tensor, expected: torch.Tensor, operands: Operands, *, name: str, known: bool = True
    ) -> bool:
        """The same numbers as ``expected`` (any NaN equals any NaN), which is right if ``known``, else just another result."""
        same = (result == expected) | (result.isnan() & expected.isnan())
        if bool(same.all()):
            return True
        value = expected.double().reshape(self._judged.shape)
        tolerance = torch.zeros_like(value)
        self.explain(result, Expected(name=name, operands=operands, value=value, tolerance=tolerance, known=known))
        return False

    def fail(self, message: str, *, property_name: str = "", **facts: object) -> None:
        """Note a failure of this case's property, or of another one that it came upon."""
        self.failures.append(Failure(property_name=property_name or self.case.property_name, message=message, **facts))  # type: ignore[arg-type]

    def require(self, condition: bool, message: str) -> None:
        """Fail with ``message`` unless ``condition``."""
        if not condition:
            self.fail(message)

    def _finding(self) -> Finding:
        return Finding(self.device, POISONS[self.problem.out.dtype][self._calls % 2])

    def _bound(self, operands: Operands, part: Reference, *, exact: bool) -> Bound:
        problem = self.problem
        bound = accumulation_bound(
            problem, self.claims, alpha=operands.alpha, largest=operands.beside_subnormal, extended=part.extended
        )
        if exact and part.magnitude.numel() and float(part.magnitude.max()) <= exact_limit(problem, self.claims):
            return dataclasses.replace(bound, relative=0.0, absolute=0.0)
        return bound

    def _conclude(self, finding: Finding, result: torch.Tensor, name: str, expected: Callable[[], Expected | None]) -> bool:
        bad = finding.bad_element(finding.state.tolist(), batched=self.problem.batched)
        if bad is None:
            return True
        full = expected()
        if full is not None:
            self.explain(result, dataclasses.replace(full, name=name))
            return False
        place = f"out[{', '.join(map(str, bad.index))}]"
        what = "was not written" if bad.unwritten else f"= {bad.got:.9g}, expected {bad.expected:.9g} within {bad.tolerance:.3g}"
        self.fail(f"{name}: {place} {what}", index=bad.index, got=bad.got, expected=bad.expected, tolerance=bad.tolerance)
        return False

    def explain(self, result: torch.Tensor, expected: Expected) -> None:
        """One failure with all that helps: first bad element, count, map, and which known bug gives this result."""
        got = result.double().reshape(self._judged.shape)
        bad = self._wrong(got, expected)
        if not bool(bad.any()):  # the comparison that led here knew more, such as a rounding of its own
            bad = got != expected.value
        count, first = int(bad.sum()), int(bad.flatten().to(torch.uint8).argmax())
        _, m, n = bad.shape
        batch, row, col = first // (m * n), first // n % m, first % n
        index = (batch, row, col) if self.problem.batched else (row, col)
        value, right, tolerance = (float(x[batch, row, col]) for x in (got, expected.value, expected.tolerance))
        unwritten = self._unwritten(result)
        changed = any(failure.property_name == "inputs-unchanged" for failure in self.failures)  # the expectation with them
        known = (expected.known and not changed) or bool((bad & unwritten).any())
        within = f" within {tolerance:.3g}" if tolerance > 0 else " exactly"
        what = "was not written" if bool(unwritten[batch, row, col]) else f"= {value:.9g}, expected {right:.9g}{within}"
        self.fail(
            f"{expected.name}: out[{', '.join(map(str, index))}] {what}; {count} of {bad.numel()} elements are wrong",
            diagnosis=self._diagnosis(got, expected, bad, unwritten) if known else "",
            index=index, got=value, expected=right, tolerance=tolerance, bad_elements=count, elements=bad.numel(),
            heat=heat_map(got, expected.value, expected.tolerance, batch),
        )  # fmt: skip
        self._forget(got)

    def _diagnosis(self, got: torch.Tensor, expected: Expected, bad: torch.Tensor, unwritten: torch.Tensor) -> str:
        return diagnose(
            Evidence(
                problem=joined(self.problem),
                operands=side_by_side(self.given(expected.operands)),
                got=got,
                expected=expected.value,
                tolerance=expected.tolerance,
                bad=bad,
                unwritten=unwritten,
                earlier=tuple(self._results[:-1]),
            )
        )

    @staticmethod
    def _wrong(got: torch.Tensor, expected: Expected) -> torch.Tensor:
        value = expected.value
        right = ((got - value).abs() <= expected.tolerance) | (got == value) | (got.isnan() & value.isnan())
        return ~right

    def _unwritten(self, result: torch.Tensor) -> torch.Tensor:
        """Elements that still have the bits of a poison, [B, M, N]."""
        bits = result.view(storage_bits(result).dtype).reshape(self._judged.shape)
        first, second = POISONS[self.problem.out.dtype]
        return (bits == first) | (bits == second)

    def _remember(self, result: torch.Tensor) -> None:
        if result.numel() <= MOST_REMEMBERED:
            self._results = [*self._results[-2:], result.to(torch.float64, copy=True).reshape(self._judged.shape)]

    def _forget(self, wrong: torch.Tensor) -> None:
        """A result that was wrong when it came is no sign of a stale one when it comes again."""
        self._results = [x for x in self._results if not bool(((x == wrong) | (x.isnan() & wrong.isnan())).all())]


def _asked(subject: Subject, problem: Problem) -> tuple[Problem, Claims]:
    """The problem and what is claimed for it. Where float32 is declared to be read as tf32, it is a tf32 problem to the probes."""
    if problem.op == "scaled_mm" and subject.traits.fast_accum:
        problem = dataclasses.replace(problem, fast_accum=True)
    claims = subject.claims(problem)
    if claims.input_mode == "tf32" and problem.dtype == torch.float32:
        problem = dataclasses.replace(problem, precision=dataclasses.replace(problem.precision, input_mode="tf32"))
    return problem, claims
