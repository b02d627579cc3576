"""The GEMM under test: how it is found by name and called by one of two conventions.

A **function** is called as ``f(a, b)``, with 3-D operands for bmm and int8 ones for int_mm. It gets ``out=``, ``alpha=``, ``beta=``
and ``bias=`` if its traits declare them. Without a parameter ``bias``, the added operand comes first, as in torch.
A **namespace** (a module, an object) has one function for each operation, with torch's signature: ``mm(a, b)``,
``addmm(inp, a, b, *, beta, alpha)``, and so on.
The other operations have gemmtune's signatures in both conventions: ``int_mm_mul(a, b, scale)``,
``mixed_mm(a, b, *, scale_b, zero_b, encoding)`` with those of the last three that exist,
``scaled_mm(a, b, *, scale_a, scale_b, out_dtype)``, ``mm_plus_mm(a, b, c, d)``, ``bsr_mm(bsr, x)`` for torch's sparse_bsr tensors,
``grouped_mm(a, b, *, offs)`` for groups of rows and ``mixed_grouped_mm`` and ``scaled_grouped_mm`` with their scales. If they are
declared, ``grouped_mm`` also serves ``grouped_k_mm`` (groups of terms), ``routed_grouped_mm`` (``rows=``, ``gated=``) and
``combined_grouped_mm`` (``scatter=``). The row of an operation names its function and the keywords.
"""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..choice import Claims, Kernel, Scalars, Tensors
from ..errors import ErrorFromChoice, SubjectError, TraitsError
from ..problem import Problem
from ..problem.flags import precision_scope
from ..problem.fused import BROUGHT
from .calling import Caller, caller_of, check_keywords, takes, takes_two
from .labels import OPS, ROWS
from .named import found_at
from .traits import ATTRIBUTE, Traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments of one call, as ``choice.Run`` passes them to a kernel. ``out`` is None if the GEMM allocates the result."""

    problem: Problem
    tensors: Tensors
    scalars: Scalars = ()
    out: torch.Tensor | None = None

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """Operands by role."""
        return {role: tensor for (role, _), tensor in zip(self.problem.operands, self.tensors, strict=False)}

    def by(self, kernel: Kernel) -> torch.Tensor:
        """Return the result of a choice's kernel for this call."""
        if self.out is None and kernel.run_new is not None:
            return kernel.run_new(self.tensors, self.scalars)
        layout = self.problem.out
        out = self.out if self.out is not None else torch.empty(layout.size, dtype=layout.dtype, device=self.tensors[0].device)
        kernel.run(out, self.tensors, self.scalars)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectSpec:
    """Location of a GEMM: ``package.module:name``, or a module alone. ``declared`` overrides the GEMM's own declarations."""

    target: str
    declared: Mapping[str, Any] = field(default_factory=dict, hash=False)
    traits_file: str = ""


class Subject(ABC):
    """A GEMM under test. Our own GEMMs subclass this. Foreign functions and namespaces are wrapped."""

    name: str
    traits: Traits

    @functools.cached_property
    def called(self) -> set[Problem]:
        """Problems for which the GEMM has been called in this process."""
        return set()

    @abstractmethod
    def __call__(self, call: Call) -> object:
        """Run the GEMM once on the current stream and return its result."""

    def caller(self, problem: Problem) -> Caller:
        """Return a function for the calls of one problem, with minimum work for each call."""
        return lambda tensors, scalars, out: self(Call(problem=problem, tensors=tensors, scalars=scalars, out=out))

    def conditions(self, problem: Problem) -> contextlib.AbstractContextManager[None]:
        """Return the context of the calls of a case, in which torch's precision flags are the problem's.

        A GEMM that calls torch then computes what the problem asks for. By default torch may keep 16-bit partial sums.
        """
        return precision_scope(problem)

    def claims(self, problem: Problem) -> Claims:
        """Return the arithmetic claims by which a result for ``problem`` is judged."""
        return self.traits.claims(problem)

    def choice_of(self, call: Call) -> str:  # noqa: ARG002 - subclasses that choose a kernel use it
        """Return the name of what ran, for subjects that choose among several kernels."""
        return ""


class _Wrapped(Subject):
    def __init__(self, name: str, traits: Traits) -> None:
        self.name = name
        self.traits = traits

    def __call__(self, call: Call) -> object:
        return self.caller(call.problem)(call.tensors, call.scalars, call.out)


FUSED = {own.op: name for name, own in BROUGHT.items() if own.required}
"""Operations to the names of their functions with a built-in epilogue."""
NAMED_OPS = tuple(op for op in OPS if ROWS[op].operand("inp") is None)
"""Operations that an undeclared function computes if it has their name."""


class FunctionSubject(_Wrapped):
    """One function for every declared operation. Without declared operations, its name or else mm is the operation.

    A function named addmm that takes two matrices alone is an mm.
    """

    def __init__(self, name: str, function: Callable[..., object], traits: Traits) -> None:
        op = getattr(function, "__name__", "")
        op = op if op in NAMED_OPS or (op in OPS and not takes_two(function)) else "mm"
        super().__init__(name, traits.changed({"ops": [op]}) if traits.ops is None else traits)
        self._function = function
        check_keywords(self.name, function, self.traits)

    def caller(self, problem: Problem) -> Caller:
        """Return the caller for a problem. The added operand is a keyword, or comes first for a function of torch's order."""
        return caller_of(self._function, problem, self.traits, self.traits.bias_name if self._names_bias else None)

    @functools.cached_property
    def _names_bias(self) -> bool:
        """False if the function has no parameter for the added operand's keyword, and thus torch's order of arguments."""
        return takes(self._function, self.traits.bias_name)


class NamespaceSubject(_Wrapped):
    """A namespace with a function of torch's signature for each operation."""

    def __init__(self, name: str, namespace: object, traits: Traits) -> None:
        had = _found_in(namespace, traits.ops or ())
        if traits.ops is not None and (missing := [op for op in traits.ops if op not in had]):
            raise SubjectError(f"{name}: declares {', '.join(missing)}, but has only {', '.join(had) or 'none of the operations'}")
        super().__init__(name, traits if traits.ops is not None else traits.changed({"ops": had}))
        self._functions = {op: _function(namespace, op) for op in had}

    def caller(self, problem: Problem) -> Caller:
        """Return the caller for a problem, which passes the added operand first."""
        return caller_of(self._functions[FUSED[problem.op] if problem.epilogue else problem.op], problem, self.traits, None)


def _found_in(namespace: object, declared: Collection[str]) -> list[str]:
    """Return the operations of a namespace: those of its functions' names, and others that it or a function declares."""
    found: list[str] = []
    for op in OPS:
        function = _function(namespace, op)
        own = getattr(function, ATTRIBUTE, None)
        named = callable(getattr(namespace, op, None)) or op in declared
        if callable(function) and (named or (own is not None and op in (Traits.of(own).ops or ()))):
            found.append(op)
    return found


def _function(namespace: object, op: str) -> Callable[..., object]:
    """Return the function of a namespace for an operation: that of its name, else the public one. It may be None."""
    return getattr(namespace, op, None) or getattr(namespace, ROWS[op].function or op, None)  # type: ignore[return-value]


def load(spec: SubjectSpec) -> Subject:
    """Import the GEMM of a spec. Modules are searched in the working folder too, as with ``python -m``.

    Raises SubjectError if there is no such module or attribute, or nothing callable, and TraitsError for illegal declarations.
    """
    return wrapped(spec, found_at(spec.target))


def wrapped(spec: SubjectSpec, found: object) -> Subject:
    """Return the object at the target of a spec as a subject. Raises the same errors as ``load``."""
    own = getattr(found, ATTRIBUTE, None)
    declared = (Traits.from_file(Path(spec.traits_file)) if spec.traits_file else {}) | dict(spec.declared)
    if isinstance(found, Subject):
        found.traits = found.traits.changed(declared)
        return found
    if isinstance(found, type):
        _refuse_class_of_methods(spec.target, found)
    try:
        traits = Traits.of(own if own is not None else {}).changed(declared)
    except TraitsError as error:
        raise TraitsError(f"{spec.target}: {error}") from None
    if any(callable(getattr(found, op, None)) for op in OPS):
        return NamespaceSubject(spec.target, found, traits)
    if callable(found):
        return FunctionSubject(spec.target, found, traits)
    raise SubjectError(
        f"{spec.target}: got {type(found).__name__}, expected a function f(a, b), or a module or object with functions named "
        f"{', '.join(OPS)}"
    )


def _refuse_class_of_methods(target: str, found: type) -> None:
    """Raise SubjectError for a class whose functions are methods, which need an object."""
    functions = [function for op in OPS if callable(function := getattr(found, op, None))]
    code = [getattr(function, "__code__", None) for function in functions]
    if not functions or any(x is not None and x.co_varnames[:1] == ("self",) for x in code):
        raise SubjectError(f"{target}: got a class, expected an object of it; name one, as in gemm = {found.__name__}()")


_STICKY = ("illegal memory access", "unspecified launch failure", "device-side assert", "misaligned address", "illegal instruction")


class Refused(Exception):
    """The GEMM raised an error, of any type, instead of computing."""


class Gone(Exception):
    """The process in which the GEMM runs has ended."""


class Impossible(Exception):
    """A resource of the case is missing, such as memory or the kernel to test. That is no fault of the GEMM."""


def is_fatal(error: BaseException) -> bool:
    """Return True if a GPU error has made the device unusable for this process, so that later results mean nothing."""
    if isinstance(error, ErrorFromChoice | Gone):
        return isinstance(error, Gone)
    text = str(error)
    accelerator = getattr(torch, "AcceleratorError", ())
    return any(words in text for words in _STICKY) or (isinstance(error, accelerator) and "out of memory" not in text)
