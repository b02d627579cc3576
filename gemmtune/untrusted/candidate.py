"""An untrusted GEMM: questions to its process, and what its conduct shows."""

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from ..declaration.labels import OPS
from ..declaration.subject import Gone
from ..errors import GemmtuneError
from ..foreign import parse_json, shown, visible
from ..workers.pipe import GarbledError
from . import clock
from .between import Between
from .clock import Reading
from .conduct import EVENTS, OF_OTHERS, Conduct, Finding, Record
from .memory import Memory, Placed
from .process import Fork, changes_of_first, end_first
from .standing import restore, standing
from .target import NOTHING, TORCH, Target
from .words import argument, base, flags_here, received, tensors_of

CALL_S, IMPORT_S = 30.0, 120.0
"""Time limits of a call, compilation included, and of an import."""
COMPILE_S = 300.0
"""Time limit of either while other programs work for it, as a compiler does."""
AS_BEFORE = {"alias": Conduct.ALIAS, "again": Conduct.AGAIN}
"""Words of an answer about the memory of a result."""
OTHERS = "priority, cores and scheduler of"
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
"""Signals by which a GEMM with a fault dies."""
KILLED = "SIGKILL"
"""Signal that the system sends where memory ends. One of them is not the GEMM's fault."""
MOST_RESULT_BYTES = 2**30
"""Size of a result above which none is read, unless a larger one is expected."""


class CandidateEnded(GemmtuneError, Gone):
    """Error of a process that died, hung or forged an answer. Its conduct is in the candidate's findings.

    ``kind`` and ``reason`` say how it ended.
    """

    def __init__(self, target: Target, kind: Conduct, reason: str) -> None:
        self.kind = kind
        self.reason = reason
        super().__init__(f"{target} {kind}: {reason}")


class Killed(CandidateEnded):
    """Error of a process that was killed once, perhaps by the system."""


class RemoteError(RuntimeError):
    """Error that a GEMM raised in its process."""


class Candidate:
    """GEMM in a process of its own. A process that has ended is replaced at the next question."""

    def __init__(
        self, target: Target, device: str = "cpu", *, sandbox: bool = False, timeout_s: float = CALL_S, is_twin: bool = False
    ) -> None:
        self.target = target
        self.is_twin = is_twin
        """True if torch's products round in another way in this process, and take longer."""
        self.device = torch.device(device)
        self.last = Reading()
        self.slowest_s = 0.0
        self.inputs: object = None
        """Sizes and dtypes of the inputs that a model names itself, as its process says."""
        self.place: int | None = None
        """Page at which the operands of the next calls begin, or None for any page."""
        self.profiling = self.in_graph = False
        """True if the operations of torch in the next calls are counted in ``ran``, or if times are those in a CUDA graph."""
        self.manner: Mapping[str, object] | None = None
        """Manner of the next calls if they are as programs make them."""
        self.ran: Mapping[str, int] = {}
        self._memory = Memory(self.device)
        self._of_first, self._timeout_s = {"gpu": self.device.type != "cpu", "sandbox": sandbox}, timeout_s
        self.fork: Fork | None = None
        """The process, while it runs."""
        self._record = Record()
        self._between, self._begun_s, self._killed = Between(), 0.0, False
        self._standing = standing()
        self._most_result = MOST_RESULT_BYTES

    # Conduct

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Conduct until now, by kind."""
        return self._record.findings

    def note(self, kind: Conduct, detail: str = "") -> None:
        """Add a finding. Equal details count once."""
        self._record.note(kind, detail)

    # Questions

    def opened(self) -> dict[str, Any]:
        """Return the functions and declarations of the GEMM. Start its process if there is none.

        Raises:
            RemoteError: it cannot be imported.
            CandidateEnded: its import ends or hangs.
        """
        if self.fork is not None and self.fork.ended() and (kind := self._kind_of(how := self.fork.how_ended())):
            self.note(kind, how.splitlines()[0])
        self.stop()
        self._between.begin()
        self.fork = Fork(self._memory.fd, **self._of_first, in_use=self.manner is not None)
        question = {
            "do": "open", "device": str(self.device), "bytes": self._memory.size, "handle": self._memory.handle(),
            "twin": self.is_twin, "ops": (*OPS, NOTHING) if self.target is TORCH else OPS,
            "target": asdict(self.target) | {"trained": self.manner is not None},
        }  # fmt: skip
        with clock.stopped():
            answer = self._ask(question, max(self._timeout_s, IMPORT_S))
        self.inputs = answer.get("inputs")
        self._between.opened(self.fork)
        self._standing = standing()
        return answer

    def reserve(self, operand_bytes: int, result_bytes: int) -> None:
        """Make room for calls of that size. A process with less memory is replaced at the next question.

        Raises:
            Impossible: there is no room.
        """
        memory = self._memory.grown(operand_bytes, result_bytes)
        self._most_result = max(MOST_RESULT_BYTES, result_bytes)
        if memory is not self._memory:
            self.stop()
            self._memory = memory

    def call(self, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the GEMM returns for these arguments. Tensors travel by memory, and changed inputs are copied back.

        Raises:
            RemoteError: it raised an error.
            CandidateEnded: its process ended, hung or forged an answer.
            Impossible: the arguments do not fit.
        """
        if self.fork is None or self.fork.ended():
            self.opened()
        tensors = [part for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) for part in tensors_of(x)]
        placed, end = self._memory.place(tensors, self.place)
        room = min(self._memory.size - end, self._most_result)
        question = {
            "do": "call", "function": function, "result": end, "room": room, "flags": flags_here(), "profiled": self.profiling,
            "in_graph": self.in_graph, "manner": self.manner, "same": secrets.randbelow(2) == 1,
            "args": [argument(x, placed) for x in args], "kwargs": {name: argument(x, placed) for name, x in kwargs.items()},
        }  # fmt: skip
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        try:
            answer = self._ask(question)
        except Killed:
            self.opened()
            answer = self._ask(question)
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor):
            if (written := placed.get(base(out))) is not None:
                written.own.copy_(written.copy)
            result: Any = out
        else:
            result = received(self._memory, answer, end, self._most_result)
        self._stop_clock(answer)
        self.slowest_s = max(self.slowest_s, self.last.wall_s)
        self._between.deliver(self.fork)
        self._put_back(placed.values(), base(out))
        for word, kind in AS_BEFORE.items() if isinstance(result, torch.Tensor) else ():
            if answer.get(word):
                self.note(kind)
        self.ran = ran if isinstance(ran := answer.get("ran"), dict) else {}
        return result

    def _put_back(self, operands: Iterable[Placed], out: int) -> None:
        """Note operands but ``out`` that the GEMM has changed, and put the numbers back."""
        for storage in operands:
            if storage.own.data_ptr() != out and storage.changed():
                self.note(Conduct.INPUTS)
                storage.own.copy_(storage.copy)
            if storage.overrun():
                self.note(Conduct.INPUTS, "it writes behind the end of one")

    def changes(self) -> list[str]:
        """Return how the priorities and cores of the process, and of its parent, were changed since the last call. Undo that."""
        return [f"from {before} to {now}" for before, now in self.fork.changes()] if self.fork and not self.fork.ended() else []

    def settle(self) -> None:
        """Judge what the process does and keeps while nobody asks it."""
        if self.fork is None or self.fork.ended():
            return
        self._between.rest(self.fork)
        state = self._ask({"do": "state"})
        changed, replaced, environment = (state.get(name) for name in ("changed", "replaced", "environment"))
        for name, values in changed.items() if isinstance(changed, dict) else ():
            self.note(Conduct.SETTINGS, f"{name} from {values[0]} to {values[1]}" if isinstance(values, list) else str(name))
        for kind, words in ((Conduct.REPLACED, replaced), (Conduct.ENVIRONMENT, environment)):
            for word in map(str, words if isinstance(words, list) else ()):
                self.note(Conduct.SETTINGS if kind is Conduct.ENVIRONMENT and OF_OTHERS.search(word) else kind, word)
        if (now := standing()) != self._standing:
            self.note(Conduct.REACHES, f"{OTHERS} the process that calls it, from {self._standing} to {now}")
            restore(self._standing)
        for kind, detail in self._between.found(self.fork):
            self.note(kind, detail)

    def leave(self) -> None:
        """Let the process end as a program that fails, and note if it says that nothing has failed."""
        if (fork := self.fork) is not None and not fork.ended():
            self._ask({"do": "end"})
            if fork.status() == 0:
                self.note(Conduct.SETTINGS, "the exit status of its process, which has failed, to 0")
            self.stop()

    def stop(self) -> None:
        """End the process. The next question starts another one."""
        if self.fork is not None:
            self.fork.close()
            self.fork = None
            self._memory.take_back()

    def close(self) -> None:
        """End the process for good, and the one that it comes from if it may have changed that: later ones would be its heirs."""
        for before, now in changes_of_first(**self._of_first):
            self.note(Conduct.REACHES, f"{OTHERS} its parent, from {before} to {now}")
        self.stop()
        if any(x.kind is Conduct.REACHES for x in self.findings):
            end_first(**self._of_first)

    # One question

    def _ask(self, question: Mapping[str, Any], limit_s: float = 0.0) -> dict[str, Any]:
        """Return the answer to a question. Raise CandidateEnded if none comes or it is no answer, RemoteError if it is an error."""
        fork, limit_s = self.fork, limit_s or self._timeout_s
        assert fork is not None
        nonce = secrets.token_hex(8)
        message = json.dumps(dict(question) | {"nonce": nonce}).encode()
        if fork.pending():
            self._end(Conduct.FORGED, "it answered before it was asked")
        self._between.ask(fork)
        self._begun_s = time.perf_counter()
        answer: dict[str, Any] | None = None
        try:
            fork.pipe.send(message, limit_s)
            self._await(fork, limit_s)
            answer = said if isinstance(said := parse_json(fork.pipe.receive(limit_s)), dict) else None
        except TimeoutError:
            self._end(Conduct.HUNG, f"no answer within {limit_s:g} s")
        except (GarbledError, ValueError, OverflowError) as error:
            self._end(Conduct.FORGED, str(error))
        except (EOFError, OSError):
            if kind := self._kind_of(how := fork.how_ended()):
                self._end(kind, how)
            self.stop()
            raise Killed(self.target, Conduct.ENDED, how) from None
        if answer is None or answer.get("nonce") != nonce:
            self._end(Conduct.FORGED, f"got {shown(said)}, expected an answer to the question")
        self._between.answer(fork)
        for event in answer.get("events") or ():
            if isinstance(event, list) and len(event) == 2 and event[0] in EVENTS:
                self.note(EVENTS[event[0]], str(event[1]))
        if answer.get("ok") is not True:
            raise RemoteError(visible(str(answer.get("error", "it failed"))))
        return answer

    def _await(self, fork: Fork, limit_s: float) -> None:
        """Wait for an answer. Raises TimeoutError if none comes in time, and nothing that the process has started works for it."""
        worked_s, deadline = 0.0, self._begun_s + COMPILE_S
        while not fork.answers(limit_s):
            before_s, worked_s = worked_s, fork.descendants_s()
            if worked_s <= before_s or time.perf_counter() > deadline:
                raise TimeoutError

    def _kind_of(self, how: str) -> Conduct | None:
        """Return the kind of an end, or None for the first time that the process was killed."""
        signal, known = how.partition("\n")[0], self._killed
        self._killed = known or signal.endswith(KILLED)
        return Conduct.CRASHED if signal.endswith(CRASHES) else Conduct.ENDED if known == self._killed else None

    def _end(self, kind: Conduct, detail: str) -> NoReturn:
        """Note why the process is of no more use, end it and raise CandidateEnded."""
        self.note(kind, detail.splitlines()[0] if detail else "")
        self.stop()
        raise CandidateEnded(self.target, kind, detail)

    def _stop_clock(self, answer: Mapping[str, Any]) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        wall_s, given_us = time.perf_counter() - self._begun_s, answer.get("device_us")
        self.last = Reading(wall_s=wall_s, cpu_s=self._between.latest_s, device_us=given_us if isinstance(given_us, float) else 0.0)
