"""The GEMM under test: how it is found by name and called by one of two conventions.

A **function** is called as ``f(a, b)``, with 3-D operands for bmm and int8 ones for int_mm. It gets ``out=``, ``alpha=``, ``beta=``
and ``bias=`` if its traits declare them. A **namespace** (a module, an object) has one function for each operation, with torch's
signature: ``mm(a, b)``, ``addmm(inp, a, b, *, beta, alpha)``, and so on.
The other operations have gemmtune's signatures in both conventions: ``int_mm_mul(a, b, scale)``,
``mixed_mm(a, b, *, scale_b, zero_b, encoding)`` with those of the last three that exist,
``scaled_mm(a, b, *, scale_a, scale_b, out_dtype)``, ``mm_plus_mm(a, b, c, d)``, ``bsr_mm(bsr, x)`` for torch's sparse_bsr tensors,
``grouped_mm(a, b, *, offs)`` for groups of rows and, if ``grouped_k_mm`` is declared or found too, for groups of terms.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..choice import Claims, Kernel, Scalars, Tensors
from ..errors import ErrorFromChoice, SubjectError
from ..problem import Problem
from ..problem.flags import precision_scope
from ..problem.fused import BROUGHT
from .found import found_at
from .labels import OPS, ROWS
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


Caller = Callable[[Tensors, Scalars, torch.Tensor | None], object]
"""Function ``caller(tensors, scalars, out)`` that calls a GEMM for one problem and returns its result."""


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
        """Return the context of the calls of a case. For float32 it sets torch's precision to the problem's."""
        return precision_scope(problem) if problem.dtype == torch.float32 else contextlib.nullcontext()

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
"""Operations that an undeclared function computes if it has their name. addmm is not among them: only functions of a namespace have
torch's order of arguments."""


class FunctionSubject(_Wrapped):
    """One function for every declared operation. Without declared operations, its name or else mm is the operation."""

    def __init__(self, name: str, function: Callable[..., object], traits: Traits) -> None:
        named = getattr(function, "__name__", "")
        super().__init__(name, traits.changed({"ops": [named if named in NAMED_OPS else "mm"]}) if traits.ops is None else traits)
        self._function = function

    def caller(self, problem: Problem) -> Caller:
        """Return the caller for a problem, which passes the added operand as a keyword."""
        return _caller(self._function, problem, self.traits, self.traits.bias_name)


class NamespaceSubject(_Wrapped):
    """A namespace with a function of torch's signature for each operation."""

    def __init__(self, name: str, namespace: object, traits: Traits) -> None:
        had = [op for op in OPS if callable(getattr(namespace, op, None))]
        if traits.ops is not None and (missing := [op for op in traits.ops if op not in had]):
            raise SubjectError(f"{name}: declares {', '.join(missing)}, but has only {', '.join(had) or 'none of the operations'}")
        super().__init__(name, traits if traits.ops is not None else traits.changed({"ops": had}))
        self._functions: dict[str, Callable[..., object]] = {op: getattr(namespace, op) for op in had}

    def caller(self, problem: Problem) -> Caller:
        """Return the caller for a problem, which passes the added operand first."""
        return _caller(self._functions[FUSED[problem.op] if problem.epilogue else problem.op], problem, self.traits, None)


_MULTIPLIED = ("a", "b", "c", "d")


def _caller(function: Callable[..., object], problem: Problem, traits: Traits, added: str | None) -> Caller:
    """Return a caller that passes factors and the operands of an epilogue by position, and the rest as keywords.

    ``added`` is the keyword of the added operand. None: it comes first, as in torch.
    """
    if problem.sparsity is not None:
        return _sparse_caller(function, traits, added)
    places = {role: place for place, (role, _) in enumerate(problem.operands)}
    first = () if added is not None or "inp" not in places else (places["inp"],)
    by_position = (*first, *(places[role] for role in _MULTIPLIED if role in places))
    by_name = {role: place for role, place in places.items() if role not in (*_MULTIPLIED, "inp")}
    if added is not None and "inp" in places:
        by_name[added] = places["inp"]
    scalars_taken = tuple((i, name) for i, name in enumerate(("alpha", "beta")) if getattr(traits, name))
    fixed: dict[str, Any] = {"encoding": problem.encoding} if problem.encoding else {}
    if problem.float8:
        fixed["out_dtype"] = problem.out.dtype
    operands = len(places)

    def call(tensors: Tensors, scalars: Scalars, out: torch.Tensor | None) -> object:
        keywords = dict(fixed)
        for name, place in by_name.items():
            keywords[name] = tensors[place]
        if out is not None:
            keywords["out"] = out
        if scalars:
            for i, name in scalars_taken:
                keywords[name] = scalars[i]
        return function(*[tensors[place] for place in by_position], *tensors[operands:], **keywords)

    return call


def _sparse_caller(function: Callable[..., object], traits: Traits, added: str | None) -> Caller:
    """Return a caller of bsr @ x, the transpose of the problem: x = aᵀ, bsr is the weight, inp and out are transposed."""
    scalars_taken = tuple((i, name) for i, name in enumerate(("alpha", "beta")) if getattr(traits, name))

    def call(tensors: Tensors, scalars: Scalars, out: torch.Tensor | None) -> object:
        a, weight, *inp = tensors
        keywords: dict[str, Any] = {name: scalars[i] for i, name in scalars_taken} if scalars else {}
        given = [weight, a.t()]
        if inp and added is not None:
            keywords[added] = _transposed(inp[0])
        elif inp:
            given.insert(0, _transposed(inp[0]))
        if out is not None:
            keywords["out"] = out.t()
        result = function(*given, **keywords)
        return result.t() if isinstance(result, torch.Tensor) and result.dim() == 2 else result

    return call


def _transposed(inp: torch.Tensor) -> torch.Tensor:
    """Return ``inp``, which broadcasts to a matrix, in a form that broadcasts to the transposed matrix."""
    return inp.unsqueeze(-1) if inp.dim() == 1 else inp.t() if inp.dim() == 2 else inp


def load(spec: SubjectSpec) -> Subject:
    """Import the GEMM of a spec. Modules are searched in the working folder too, as with ``python -m``.

    Raises:
        SubjectError: no such module or attribute, or nothing callable.
        TraitsError: the declarations are illegal.
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
    traits = Traits.of(own if own is not None else {}).changed(declared)
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


_STICKY = (
    "illegal memory access",
    "unspecified launch failure",
    "device-side assert",
    "misaligned address",
    "illegal instruction",
)


class Refused(Exception):
    """The GEMM raised an error, of any type, instead of computing."""


class Impossible(Exception):
    """A resource of the case is missing, such as memory or the kernel to test. That is no fault of the GEMM."""


def is_fatal(error: BaseException) -> bool:
    """Return True if a GPU error has made the device unusable for this process, so that later results mean nothing."""
    if isinstance(error, ErrorFromChoice):
        return False
    text = str(error)
    accelerator = getattr(torch, "AcceleratorError", ())
    return any(words in text for words in _STICKY) or (isinstance(error, accelerator) and "out of memory" not in text)
