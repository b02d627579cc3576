"""Verification and measurement of the choices for one problem on one device, in this process."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..choice import Choice, Kernel, Status
from ..device import DeviceInfo
from ..effort import CPU_ROUNDS, EFFORT
from ..numerics.expectation import Expectation
from ..numerics.some_rows import some_rows
from ..problem import Problem
from ..problem.rows import RowClass, with_groups
from ..settings import Settings, use
from ..timing.contenders import Call, KernelContender
from ..timing.limits import measure_limits
from ..timing.neighbours import Watch
from ..timing.rounds import play
from ..timing.timer import Timer, collection_paused, conditions, device_to_itself
from .observed import contradiction
from .recheck import AFTER, recheck_all
from .samples import HOPELESS, SLOWER, Ranking, Sample, failure_of, scaled_first_samples, short_measurement
from .some_rows import RowBits, RowsVerifier
from .verify import Verifier, random_expectation

log = logging.getLogger("gemmtune")
FEW_GROUPS = 4
"""Groups with which a CPU checks numbers of rows that are not tuned."""


class Session(AbstractContextManager["Session"]):
    """Verifier and timer of the choices for one problem. As a context manager, it frees the operands on exit.

    It restores the caller's random number generators and precision flags. ``dead`` is True if the GPU context is corrupted: nothing
    can run in this process any more. ``root`` is the process whose children are not other work on the machine, by default this one.
    """

    def __init__(
        self, problem: Problem, device: DeviceInfo, settings: Settings, host_us: float = 0.0, root: int | None = None
    ) -> None:
        self.dead = False
        self._host_us = host_us
        self._root = root
        self._watch = Watch(device, root)
        self._problem = problem
        self._device = device
        self._settings = settings
        self._kernels: dict[str, Kernel] = {}
        self._loaded: dict[str, Any] = {}
        self._part: tuple[Problem, Timer] | None = None
        self._timed: dict[str, KernelContender] = {}
        self._random: tuple[Problem, Expectation] | None = None
        self._row_bits: tuple[Choice, RowBits] | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the operands, the references and the kernels."""
        self._kernels.clear()
        self._loaded.clear()
        self._timed.clear()
        self._random = self._row_bits = self._part = None
        for name in ("_verifier", "_rows_verifier", "_timer"):
            self.__dict__.pop(name, None)
        if self._device.type != "cpu" and not self.dead:
            torch.cuda.empty_cache()  # the private pools of the graphs, which no other code can use

    def examine(self, choice: Choice, best_us: float | None) -> Sample:
        """Build, verify and briefly measure a choice. The sample's status records every failure of the choice.

        With ``best_us``, the time of the best choice so far, the measurement of a clearly slower choice ends early.
        """
        sample = self.prove(choice)
        if sample.status is not Status.OK:
            return sample
        try:
            with self._in_force():
                kernel = self._kernels[choice.name]
                with device_to_itself(self._settings, self._device), collection_paused():
                    time_us = short_measurement(self._time(choice.problem).contender(choice, kernel), best_us)
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything; the type is recorded
            failure = self._failure(error, choice)
            return dataclasses.replace(sample, status=failure.status, reason=failure.reason)
        return dataclasses.replace(sample, time_us=time_us)

    def prove(self, choice: Choice) -> Sample:
        """Build a choice and verify it, unless the settings disable verification. Do not time it."""
        try:
            with self._in_force():
                kernel = self._kernels[choice.name] = choice.build()
                if not self._settings.verify:
                    return Sample(status=Status.OK)
                verified = self._verifier.check(choice, kernel)
                if verified.status is Status.OK and choice.undeclared:
                    found = contradiction(choice, kernel, self._device.torch_device)
                    if found:
                        return Sample(status=Status.REFUSED, reason=f"undeclared: {found}")
                return verified
        except Exception as error:  # noqa: BLE001 - as in ``examine``
            return self._failure(error, choice)

    def prove_rows(self, choice: Choice) -> Sample:
        """Build and verify a choice for the session's problem with the same number of rows or fewer. Do not time it."""
        try:
            with self._in_force():
                return self._rows_verifier.check(choice, choice.build()) if not choice.problem.groups else self._grouped(choice)
        except Exception as error:  # noqa: BLE001 - as in ``examine``
            return self._failure(error)

    @functools.cached_property
    def _rows_verifier(self) -> RowsVerifier:
        return RowsVerifier(self._problem, self._device.torch_device)

    def _grouped(self, choice: Choice) -> Sample:
        """Check a grouped product with its own operands: the group of a row depends on the number of rows.

        A CPU takes as many rows of few groups, where the operands of all groups would take minutes.
        """
        problem = choice.problem
        if self._device.type == "cpu" and problem.groups > FEW_GROUPS and not problem.divides_terms:
            fewer = choice.at(with_groups(problem, FEW_GROUPS), self._device)
            choice = fewer if isinstance(fewer, Choice) and fewer.compile_key == choice.compile_key else choice
        return Verifier(choice.problem, self._device.torch_device).check(choice, choice.build())

    def same_rows(self, whole: Choice, parts: Sequence[Choice]) -> Sample:
        """Check that ``parts``, choices with as many rows or fewer, give rows the bits that ``whole`` gives them among all rows."""
        try:
            with self._in_force():
                reason = self._bits(whole).difference(parts)
        except Exception as error:  # noqa: BLE001 - as in ``examine``
            return self._failure(error)
        return Sample(status=Status.OK) if reason is None else Sample(status=Status.WRONG_RESULT, reason=reason)

    def equal_rows(self, whole: Choice, choice: Choice, rows_class: RowClass, rows: Sequence[int]) -> list[int]:
        """Return those of ``rows`` for which a choice gives the bits of ``whole``."""
        samples = ((m, choice.at(rows_class.at(m), self._device)) for m in rows)
        return [m for m, at in samples if isinstance(at, Choice) and self.same_rows(whole, [at]).status is Status.OK]

    def _bits(self, whole: Choice) -> RowBits:
        """Return the comparison with one choice. The latest is kept."""
        if self._row_bits is None or self._row_bits[0] != whole:
            self._row_bits = None  # frees its operands before the next ones are made
            self._row_bits = whole, RowBits(whole, self._device.torch_device, self._kernel)
        return self._row_bits[1]

    def rank(self, choices: Sequence[Choice], rounds_s: float | None = None) -> Ranking:
        """Return comparable times: interleaved rounds in alternating order, at sustained clocks, for one problem of up to all rows.

        ``rounds_s`` is the duration of the rounds, by default that of the search effort. If it is given, choices that are clearly
        slower in the first sample keep its time.
        """
        failures: dict[str, Sample] = {}
        self._timed.clear()

        def failed(name: str, error: Exception) -> None:
            failures[name] = self._failure(error)
            log.warning("%s failed in the final rounds and is left out of them: %s", name, failures[name].reason)
            if self.dead:
                raise error

        with self._in_force(), device_to_itself(self._settings, self._device), collection_paused():
            made, first_us = self._first_samples(choices, failed)
            keep = {c.name for c in choices if c.baseline}
            on_cpu, short = self._device.type == "cpu", rounds_s is not None
            near_us = (HOPELESS if on_cpu else SLOWER) * min(first_us.values(), default=0.0)
            slower = {name for name in made if first_us[name] > near_us} - keep if short else set[str]()
            contenders = {name: x for name, x in made.items() if name not in slower}
            rounds_s = EFFORT[self._settings.search].rounds_s if rounds_s is None else rounds_s
            # A GPU runs its first tens of milliseconds at boost clocks, which rank kernels differently from sustained clocks.
            warm_up_s = 0.0 if on_cpu else min(0.2, rounds_s / 2)
            budget_s = CPU_ROUNDS * rounds_s if on_cpu else rounds_s
            times = play(contenders, budget_s=budget_s, warm_up_s=warm_up_s, keep=keep, failed=failed, host_us=self._host_us)
            times |= scaled_first_samples(times, first_us, slower)
            self._timed = made
            return Ranking(times=times, seen="" if short else self._seen(), failures=failures)

    def _first_samples(
        self, choices: Sequence[Choice], failed: Callable[[str, Exception], None]
    ) -> tuple[dict[str, KernelContender], dict[str, float]]:
        """Return a contender and a first sample of each choice that does not fail. The sample captures the graph, which may."""
        contenders: dict[str, KernelContender] = {}
        first_us: dict[str, float] = {}
        for choice in choices:
            try:
                contender = self._time(choice.problem).contender(choice, self._kernel(choice))
                first_us[choice.name] = contender.rough_us if self._device.type == "cpu" else contender.sample_us()
                contenders[choice.name] = contender
            except Exception as error:  # noqa: BLE001 - a kernel may raise anything; it fails alone
                failed(choice.name, error)
        return contenders, first_us

    def recheck(self, choices: Sequence[Choice]) -> dict[str, Sample]:
        """Return the choices, by name, that fail when what was timed is repeated with other values in the same memory."""
        if not choices or not self._settings.verify:
            return {}
        with self._in_force():
            try:
                timer, expectation = self._time(choices[0].problem), self._expected(choices[0].problem)
                found = recheck_all(choices, self._repeats, timer, expectation)
            except Exception as error:
                failure = self._failure(error)
                if self.dead or failure.status is not Status.OUT_OF_RESOURCES:
                    raise
                log.warning("%s was not checked after the timing: %s", self._problem, failure.reason)
                return {}
            return {name: x if isinstance(x, Sample) else self._failure_after(x) for name, x in found.items()}

    def _repeats(self, choice: Choice) -> Sequence[Call]:
        """Return the calls that repeat what was timed."""
        contender = self._timed.get(choice.name) or self._time(choice.problem).contender(choice, self._kernel(choice))
        return contender.repeats()

    def _expected(self, problem: Problem) -> Expectation:
        """Return random operands and their result, for fewer rows too. All rows share one expectation, unless there are groups."""
        whole = problem if problem.groups else self._problem
        if self._random is None or self._random[0] != whole:
            made = whole == self._problem and "_verifier" in self.__dict__
            self._random = whole, self._verifier.random if made else random_expectation(whole, self._device.torch_device)
        expectation = self._random[1]
        if problem.m == whole.m:
            return expectation
        return dataclasses.replace(expectation.of_first_rows(problem.m), operands=some_rows(expectation.operands, problem, 0))

    def limits(self, known: Mapping[str, float]) -> tuple[dict[str, float], str]:
        """Return the limits of the machine that the problem needs and ``known`` lacks (see limits.py), and what disturbed them."""
        with self._in_force(), device_to_itself(self._settings, self._device):
            watch = Watch(self._device, self._root)
            return measure_limits(self._device, self._problem.dtype_label, known), watch.seen()

    def _seen(self) -> str:
        """Return the other work on the machine since the last question."""
        seen, self._watch = self._watch.seen(), Watch(self._device, self._root)
        return seen

    @contextlib.contextmanager
    def _in_force(self) -> Iterator[None]:
        """Apply the session's settings and the conditions of measurement. A GEMM that calls this library tunes nothing in turn."""
        with use(dataclasses.replace(self._settings, tune="never")), conditions(self._problem, self._device):
            yield

    @functools.cached_property
    def _verifier(self) -> Verifier:
        return Verifier(self._problem, self._device.torch_device)

    @functools.cached_property
    def _timer(self) -> Timer:
        return self._made_for(self._problem)

    def _time(self, problem: Problem) -> Timer:
        """Return the timer for the session's problem, or the one kept for fewer rows. Groups need their own operands for each M."""
        if problem.m == self._problem.m:
            return self._timer
        if self._part is None or self._part[0] != problem:
            self._part = problem, self._made_for(problem) if problem.groups else self._timer.at(problem)
        return self._part[1]

    def _made_for(self, problem: Problem) -> Timer:
        return Timer(problem, self._device, self._settings.timing, host_us=self._host_us)

    def _kernel(self, choice: Choice) -> Kernel:
        """Return the verified kernel, or one for fewer rows. A module that both share is loaded once."""
        if choice.problem.m == self._problem.m and choice.name in self._kernels:
            return self._kernels[choice.name]
        key = choice.compile_key
        if key is None:
            return choice.build()
        if key not in self._loaded:
            self._loaded[key] = choice.load()
        return choice.bind(self._loaded[key])

    def _failure_after(self, error: Exception) -> Sample:
        found = self._failure(error)
        return dataclasses.replace(found, reason=f"{AFTER}: {found.reason}")

    def _failure(self, error: Exception, choice: Choice | None = None) -> Sample:
        """Return the status and the reason of an error. One of a choice that declares nothing says what it does not take."""
        status, reason = failure_of(error)
        if status is Status.RUNTIME_ERROR and choice is not None and choice.undeclared:
            status, reason = Status.REFUSED, f"not for this problem: {reason}"
        if self._device.type == "cpu":
            return Sample(status=status, reason=reason)
        try:  # after some errors, such as an illegal address, every later call in the process fails too
            torch.cuda.synchronize(self._device.torch_device)
        except RuntimeError:
            self.dead = True
            return Sample(status=Status.CRASHED, reason=f"{reason} (the GPU context is lost)")
        return Sample(status=status, reason=reason)
