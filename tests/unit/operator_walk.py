"""Operators of aten, called with a QuantizedWeight or a view of one in the place of each tensor.

Some operators end the process where their arguments do not fit, so each stretch of calls runs in a child of this process. Plain
floats in the same place say what is right: what they do to their operand and which results share its memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed.tensor  # the first call in a child would import it, in each child again
from operator_arguments import CHOICES, SIDE, Case, cases
from torch.utils._pytree import tree_leaves

from gemmtune import QuantizedWeight
from gemmtune.errors import InvalidProblemError
from gemmtune.quantized.views import DequantizedView

Tensor = torch.Tensor
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""Everything that torch raises where arguments do not fit."""
SHARING = ("set_", "set")
"""Operators that share the memory of an operand which their schema calls one that is read."""


@dataclass(slots=True, kw_only=True)
class Subject:
    """Weights in the place of a call, and the floats that stand for them in the call with plain tensors."""

    kind: str
    is_view: bool
    weights: list[QuantizedWeight]
    floats: list[Tensor]

    @classmethod
    def of(cls, kind: str, subject: str) -> Subject:
        return cls(kind=kind, is_view=subject == "view", weights=[], floats=[])

    def weight(self) -> Tensor:
        """Make one more weight."""
        with torch.inference_mode(False):  # a weight is made before
            made = quantized(self.kind).clone()
        self.weights.append(made)
        return made.narrow(0, 0, SIDE) if self.is_view else made

    def plain(self) -> Tensor:
        """Make the same as plain floats of the same strides."""
        with torch.inference_mode(False):
            made = quantized(self.kind).dequantize()
        self.floats.append(made)
        return made.narrow(0, 0, SIDE) if self.is_view else made


@functools.cache
def quantized(kind: str) -> QuantizedWeight:
    """Return the weight of which every call gets a clone."""
    return QuantizedWeight.quantize(VALUES, kind, scales="group_32")


VALUES = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(1)) + 0.25


def judged(case: Case, kind: str, subject: str) -> str:
    """Say what became of a call. The line begins with FAULT where a write vanished, or a read failed."""
    error = "never called"
    for choice in CHOICES:
        plain = Subject.of(kind, subject)
        try:
            args, kwargs = case.arguments(choice, plain.plain, VALUES.clone)
            before = [x.clone() for x in plain.floats]
            results = tree_leaves(case.operator(*args, **kwargs))
        except ERRORS as caught:
            error = f"{type(caught).__name__}: {str(caught).strip().partition(chr(10))[0]}"
            continue
        written = [not _same(x, y) for x, y in zip(before, plain.floats, strict=True)]
        shared = [isinstance(x, Tensor) and any(_share(x, y) for y in plain.floats) for x in results]
        return _judged(case, choice, Subject.of(kind, subject), written, shared, plain.floats)
    refused = _refused(case, Subject.of(kind, subject)) if case.is_written else True
    return f"uncalled: {error}" if refused else "FAULT: floats cannot be written, but a weight is not refused"


def _judged(case: Case, choice: int, subject: Subject, written: list[bool], shared: list[bool], floats: list[Tensor]) -> str:
    args, kwargs = case.arguments(choice, subject.weight, VALUES.clone)
    before = [_bits(x) for x in subject.weights]
    try:
        results = tree_leaves(case.operator(*args, **kwargs))
    except InvalidProblemError:
        unchanged = all(map(torch.equal, before, map(_bits, subject.weights)))
        rightly = case.is_written or any(written) or case.operator.overloadpacket.__name__ in SHARING
        return "refused" if unchanged and rightly else "FAULT: a read is refused" if unchanged else "FAULT: refused too late"
    except ERRORS as caught:
        return f"FAULT: floats can be read, a weight cannot: {type(caught).__name__}: {caught}"
    for x, y, was_written, bits in zip(subject.weights, floats, written, before, strict=True):
        if was_written and not torch.allclose(x.dequantize(), y):
            return "FAULT: a write vanishes"
        if not was_written and not torch.equal(bits, _bits(x)):
            return "FAULT: a read changes the weight"
    if any(written):
        return "written by a rule"
    views = [x for x, is_shared in zip(results, shared, strict=True) if is_shared]
    if any(not isinstance(x, (QuantizedWeight, DequantizedView)) or not _refuses_writes(x) for x in views):
        return "FAULT: a view of the weight is a temporary that can be written"
    return "view" if views else "read"


def _refuses_writes(view: Tensor) -> bool:
    try:
        view.zero_()
    except InvalidProblemError:
        return True
    return False


def _refused(case: Case, subject: Subject) -> bool:
    """A weight in a place that is written raises, whatever the other arguments are."""
    try:
        args, kwargs = case.arguments(0, subject.weight, VALUES.clone)
        case.operator(*args, **kwargs)
    except ERRORS:  # torch may find other arguments wrong first
        return True
    return not subject.weights


def _bits(weight: QuantizedWeight) -> Tensor:
    assert weight.scales is not None
    return torch.cat([x.reshape(-1).clone().view(torch.uint8) for x in (weight.tensor, weight.scales)])


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(torch.equal(x, y))


def _share(x: Tensor, y: Tensor) -> bool:
    dense = x.layout == torch.strided and not x.is_meta and torch._C._has_storage(x)
    dense = dense and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    return dense and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() != 0


def walk(kind: str, subject: str, mode: str, given: Sequence[Case]) -> Iterator[tuple[Case, str]]:
    """Judge cases in children of this process. One that ends its child is called so."""
    todo = list(given)
    while todo:
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with os.fdopen(sender, "w", buffering=1) as out, MODES[mode]():
                    for case in todo:
                        out.write(judged(case, kind, subject).replace("\n", " ") + "\n")
            finally:
                os._exit(0)  # without the parent's loop
        os.close(sender)
        with os.fdopen(receiver) as lines:
            done = [line.rstrip("\n") for line in lines]
        os.waitpid(child, 0)
        yield from zip(todo, done, strict=False)
        todo = todo[len(done) :]
        if todo:
            yield todo[0], "uncalled: it ends the process"
            del todo[0]


def found(kind: str, subject: str, mode: str, numbers: Sequence[int]) -> list[tuple[str, bool, str]]:
    """Return the text of each of these cases, if it is viewed, and its verdict. Runs in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    every = list(cases())
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        verdicts = list(walk(kind, subject, mode, [every[number] for number in numbers]))
    return [(str(case), case.is_viewed, verdict) for case, verdict in verdicts]
