"""The verdict on a GEMM that nobody vouches for: values, speed and conduct."""

import dataclasses
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from ..conformance.bench.outcome import CaseStatus
from ..declaration.subject import Subject
from ..declaration.traits import Traits
from ..device import detect
from ..errors import CompileError, GemmtuneError, SubjectError
from ..foreign import shorter, visible
from ..timing.neighbours import Watch
from ..untrusted.candidate import CALL_S, Candidate, CandidateEnded, RemoteError
from ..untrusted.conduct import Conduct, Finding
from ..untrusted.shape import Shape, note_calls
from ..untrusted.subject import rival, subject_of
from ..untrusted.target import Target
from ..untrusted.twin import Elsewhere, tells
from .calls import timed_calls
from .levels import LEVELS, MOST_CALL_S, Level
from .sizes import of_inputs, source_in
from .speed import Speed, judge_speed
from .targets import compiled, targets_of
from .values import Values, judge_values

PRODUCTS = re.compile(
    r"^(aten|_?quantized|onednn|mkldnn(_prepacked)?|prepacked|inductor|sparse|static_runtime|_native|symm_mem|xnnpack|prims)::"
    r"(?!upsample|_upsample|.*_prepack$|.*(norm|powsum|linear_combination|cross|diagonal|vander)$)\w*("
    r"(?<![aouy])mm(?!a)|(?<![a-z])mv_?$|addmv|matmul|linear|conv(?!ert)|dot$|einsum|tensordot|inner|bilinear|embedding_bag|cdist|euclidean"
    r"|lstm|gru|rnn|attention|(?<!re)solve|lstsq|linalg_|cholesky|(?<![a-z])lu_|inverse|matrix_(exp|power)|geqrf|orgqr|ormqr|\bqr$|svd|cov$|corrcoef)"
    r"|^mkl::|^Llga|cublas|nvjet|xmma_gemm|cutlass_\d|(ampere|hopper|volta|turing)_\w*gemm"
)
"""Names of torch's operations, and of cuBLAS's kernels, that multiply matrices."""


class Standing(StrEnum):
    """Standing of a judged GEMM, in the order of their weight for a folder."""

    DISHONEST = "DISHONEST"
    WRONG = "WRONG"
    NOT_JUDGED = "NOT JUDGED"
    RIGHT = "RIGHT"

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 0 right and honest, 1 wrong or dishonest, 2 not judged."""
        return {Standing.RIGHT: 0, Standing.NOT_JUDGED: 2}.get(self, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on one GEMM."""

    target: str
    device: str
    values: Values = field(default_factory=Values)
    shapes: tuple[Shape, ...] = ()
    speed: Speed | None = None
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    """Reason for which it was not judged, or not timed."""
    busy: str = ""
    """Other work on the machine while calls were timed."""
    work: str = ""
    """Share of the calls in which torch multiplied."""
    given_up: str = ""
    """Other processes in which it did not work, and thus was not seen."""
    declared: str = ""
    """Declarations to which it was held, if they are not the usual ones."""
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return the standing, its reason and the speed on one line."""
        speed = f"; {self.speed.ratio:.2f}× torch ({self.speed.low:.2f} to {self.speed.high:.2f}, 95%)" if self.speed else ""
        text = f"{self.target} on {self.device}: {self.standing}" + (f": {self.why}" if self.why else "") + speed
        return visible(text).replace("\n", " ")

    @property
    def why(self) -> str:
        """Reason for the standing, in a few words on one line."""
        kinds = list(dict.fromkeys(str(finding.kind) for finding in self.findings if finding.dishonest))
        if self.values.bad:
            kinds.append(f"fails {len(self.values.bad)} of {len(self.values.executed)} cases")
        return "; ".join(kinds) or self.reason.partition("\n")[0]

    @property
    def standing(self) -> Standing:
        """Standing by conduct, then by values. Nothing that was not judged is right."""
        if any(finding.dishonest for finding in self.findings):
            wrong = {Conduct.WRONG, Conduct.SOMETIMES, Conduct.CRASHED, Conduct.HUNG, Conduct.FILES}
            return Standing.WRONG if {x.kind for x in self.findings if x.dishonest} <= wrong else Standing.DISHONEST
        if self.values.bad:
            return Standing.WRONG
        return Standing.RIGHT if self.calls or (self.values.executed and not self.reason) else Standing.NOT_JUDGED

    @property
    def calls(self) -> int:
        """Number of checked calls beside those of the suite."""
        return sum(shape.calls for shape in self.shapes)

    @property
    def deterministic(self) -> str:
        """Determinism that repeated calls showed, or ""."""
        equal = [same for shape in self.shapes for same in shape.equal]
        return f"equal bits in {sum(equal)} of {len(equal)} repeated calls" if equal else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Verdicts on all GEMMs of a target."""

    target: str
    level: str
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        """Return a line for each GEMM."""
        return "\n".join(map(str, self.verdicts))

    @property
    def exit_status(self) -> int:
        """Exit status of the gravest verdict, 2 without any."""
        order = list(Standing)
        return min((v.standing for v in self.verdicts), key=order.index, default=Standing.NOT_JUDGED).exit_status


def judge(
    target: str,
    *,
    device: str | None = None,
    level: str = "normal",
    declared: Mapping[str, Any] | None = None,
    sandbox: bool = False,
    timeout_s: float = CALL_S,
) -> Judgement:
    """Judge a GEMM, or each one of a folder. It runs as you do, in a process of its own, unless ``sandbox`` is given.

    Args:
        target: ``pkg.mod:function``, ``path.py:function``, ``path.cpp:symbol``, ``path.cu:symbol``, a file or a folder.
        device: cpu, cuda or cuda:N; by default cuda if there is a GPU.
        level: brief, normal or full.
        declared: declarations that override the GEMM's own.
        timeout_s: seconds for one call, compilation included.

    Raises:
        GemmtuneError: there is no such target, level or device, or no sandbox.
    """
    if level not in LEVELS:
        raise GemmtuneError(f"level: got {level!r}, expected one of {', '.join(LEVELS)}")
    if not 0 < timeout_s <= MOST_CALL_S:
        raise GemmtuneError(f"timeout_s: got {timeout_s!r}, expected seconds above 0, at most {MOST_CALL_S:g}")
    found = detect(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    Traits().changed(declared or {})
    where = "cpu" if found.type == "cpu" else str(found.torch_device)
    options = _Options(device=where, level=LEVELS[level], declared=declared or {}, sandbox=sandbox, timeout_s=timeout_s)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the checks leave the cores to the GEMM
    try:
        return Judgement(target=target, level=level, verdicts=tuple(_judged(one, options) for one in targets_of(target, where)))
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    device: str
    level: Level
    declared: Mapping[str, Any]
    sandbox: bool
    timeout_s: float


def _judged(target: Target | SubjectError, options: _Options) -> Verdict:
    begun = time.perf_counter()
    if isinstance(target, SubjectError):
        path, _, reason = str(target).partition(": ")
        return Verdict(target=path, device=options.device, reason=reason)
    verdict = Verdict(target=str(target), device=options.device)
    try:
        target = compiled(target)
    except (CompileError, SubjectError) as error:
        return dataclasses.replace(verdict, reason=str(error), seconds=time.perf_counter() - begun)
    source = source_in(target.roots)
    candidate = Candidate(target, options.device, sandbox=options.sandbox, timeout_s=options.timeout_s)
    try:
        verdict = _examined(verdict, candidate, options, source)
    except (CompileError, GemmtuneError) as error:
        verdict = dataclasses.replace(verdict, reason=str(error))
    except Exception as fault:  # noqa: BLE001 # those of the GEMM are raised in its own process
        traceback.print_exc()
        verdict = dataclasses.replace(verdict, reason=f"the judge failed by a fault of gemmtune, not of the GEMM: {fault!r}")
    finally:
        candidate.close()
    return dataclasses.replace(verdict, findings=candidate.findings, seconds=time.perf_counter() - begun)


def _examined(verdict: Verdict, candidate: Candidate, options: _Options, source: str) -> Verdict:
    """Return the verdict with values, calls and speed. The conduct is the candidate's."""
    level = options.level
    subject = subject_of(candidate, options.declared)
    verdict = dataclasses.replace(verdict, declared=_declared(subject.traits))
    values = judge_values(subject, candidate, level)
    verdict = dataclasses.replace(verdict, values=values)
    if not values.executed and of_inputs(candidate.inputs, candidate.device.type) is None:
        reasons = Counter(outcome.reason for outcome in values.outcomes)
        why = reasons.most_common(1)[0][0] if reasons else "no case of the suite fits its declarations"
        return dataclasses.replace(verdict, reason=f"it refused every case, most often with: {why}")
    if any(finding.kind is Conduct.HUNG for finding in candidate.findings):
        return dataclasses.replace(verdict, reason="not timed: it does not answer")
    watch = Watch(detect(options.device))
    sandbox, timeout_s, on_cpu = options.sandbox, options.timeout_s, options.device == "cpu"
    has_twin = on_cpu and not subject.traits.calls_torch and tells()
    elsewhere = Elsewhere(candidate, options.declared, has_twin=has_twin, sandbox=sandbox, timeout_s=timeout_s) if on_cpu else None
    try:
        taken, refused = [x.case for x in values.executed], [x.case for x in values.outcomes if x.status is CaseStatus.REFUSED]
        shapes = tuple(timed_calls(subject, candidate, rival(options.device), level, taken, source, elsewhere, refused))
    finally:
        if elsewhere is not None:
            elsewhere.close()
    verdict = dataclasses.replace(verdict, busy=watch.seen())
    note_calls(candidate, shapes)
    work = _work_of_torch(subject, candidate, shapes)
    try:
        candidate.settle()
        candidate.leave()
    except (CandidateEnded, RemoteError) as error:
        verdict = dataclasses.replace(verdict, reason=str(error))
    given_up = "; ".join(elsewhere.given_up) if elsewhere is not None else ""
    reason = verdict.reason or _untimed(subject.traits.ops or (), shapes)
    return dataclasses.replace(
        verdict, shapes=shapes, speed=judge_speed(candidate, shapes, verdict.busy), work=work, reason=reason, given_up=given_up
    )


def _untimed(operations: Iterable[str], shapes: Sequence[Shape]) -> str:
    """Return why no call was timed, or "" if one was."""
    if not shapes:
        return f"not timed: torch has no function for {', '.join(operations)}"
    refused = Counter(shape.refused.partition("\n")[0] for shape in shapes if shape.refused)
    if any(shape.pairs for shape in shapes) or not refused:
        return ""
    return f"not timed: it refused {sum(refused.values())} of {len(shapes)} shapes, most often with: {refused.most_common(1)[0][0]}"


def _declared(traits: Traits) -> str:
    usual = Traits().as_json()
    return ", ".join(
        f"{name}={shorter(str(value))}" for name, value in traits.as_json().items() if name != "ops" and value != usual[name]
    )


def _work_of_torch(subject: Subject, candidate: Candidate, shapes: tuple[Shape, ...]) -> str:
    """Return in how many of the profiled calls torch multiplied, and note it unless the GEMM declares that."""
    ran = [names for shape in shapes for names in shape.ran]
    seen = Counter(name for names in ran for name in names if PRODUCTS.search(name))
    if not seen:
        return f"its own: none of torch's products in {len(ran)} calls" if ran else ""
    name, times = seen.most_common(1)[0]
    text = f"{name.replace('aten::', 'torch.')} in {times} of {len(ran)} calls"
    if not subject.traits.calls_torch:
        candidate.note(Conduct.TORCH, text)
    return f"torch's: {text}"
