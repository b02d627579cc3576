"""Members of a ``multi``: choices by name, and functions of the caller."""

import dataclasses
import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..backends.table import load
from ..choice import Choice, Claims, Kernel, Offers, Scalars, Status, Tensors
from ..declaration.called import CalledChoice
from ..declaration.calling import Caller
from ..declaration.subject import Call, Subject
from ..declaration.traits import Traits
from ..device import DeviceInfo
from ..dispatch.host import host_us
from ..dispatch.member import Member
from ..dispatch.ranges import RangePlan
from ..errors import InvalidProblemError, NoValidChoicesError
from ..problem import Problem
from ..problem.rows import RowClass, row_classes
from ..selector.candidates import Candidates, candidates_for, row_of
from ..selector.measure import examine_alone
from ..selector.offers import offers_for, widest_offers_for
from ..selector.segments import MOST_ROWS, Segment, Table
from ..settings import Settings
from ..store.store import open_store

Wanted = str | Callable[..., Any]
"""Name of a choice, or a function whose parameters are some of the problem's arguments."""


@dataclass(frozen=True, kw_only=True)
class FunctionChoice(CalledChoice):
    """A function of the caller as a choice. It is called with the arguments that it has parameters for, and returns the result.

    With a parameter ``out`` it writes the result there. Verification holds it to the arithmetic of torch's own operation.
    """

    function: Callable[..., Any] = field(repr=False)

    @classmethod
    def of(cls, function: Callable[..., Any], problem: Problem, device: DeviceInfo) -> "FunctionChoice":
        """Return the choice of a function for a problem.

        Raises:
            InvalidProblemError: a required parameter that is no argument of the problem, or parameters that cannot be read.
        """
        known, name = arguments_of(problem), name_of(function)
        asked = [x.name for x in _parameters(function) if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
        if strange := [x for x in asked if x not in (*known, "out")]:
            raise InvalidProblemError(
                f"multi: {name} has the parameters {', '.join(strange)}, expected some of {', '.join(known)}, out for {problem}"
            )
        return cls(name=f"function:{name}", backend="function", problem=problem, claims=_claims(problem, device), function=function)

    @property
    def content_hash(self) -> str:
        code = getattr(self.function, "__code__", None)
        text = f"{getattr(self.function, '__module__', '')} {self.name} {code.co_code.hex() + repr(code.co_names) if code else ''}"
        constants = repr(code.co_consts) if code and not any(inspect.iscode(x) for x in code.co_consts) else ""
        defaults = [x.default for x in _parameters(self.function) if isinstance(x.default, (int, float, str))]
        return hashlib.sha256((text + constants + repr(defaults)).encode()).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        return dataclasses.replace(self, problem=problem, claims=_claims(problem, device))

    def load(self) -> Subject:
        return _Function(self.function)

    def bind(self, loaded: Subject) -> Kernel:
        """Return the kernel of the calls. Each result is copied, because a function may return the same memory again."""
        return Kernel(run=super().bind(loaded).run)


class _Function(Subject):
    """Function of the caller's. A call passes the arguments that the function has parameters for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name, self._function = name_of(function), function
        self.traits = Traits(out=any(x.name == "out" for x in _parameters(function)), threads=True)

    def __call__(self, call: Call) -> object:
        return self.caller(call.problem)(call.tensors, call.scalars, call.out)

    def caller(self, problem: Problem) -> Caller:
        names, function = arguments_of(problem), self._function
        parameters = [x for x in _parameters(function) if x.name in (*names, "out")]
        by_place = [x.name for x in parameters if x.kind is x.POSITIONAL_ONLY]
        by_name = [x.name for x in parameters if x.kind is not x.POSITIONAL_ONLY]

        def call(tensors: Tensors, scalars: Scalars, out: torch.Tensor | None) -> object:
            values: dict[str, Any] = dict(zip(names, (*tensors, *scalars), strict=False), out=out)
            return function(*[values[x] for x in by_place], **{x: values[x] for x in by_name})

        return call


def name_of(wanted: Wanted) -> str:
    """Return the name of a choice or of a function, or the type of another callable object."""
    return wanted if isinstance(wanted, str) else str(getattr(wanted, "__qualname__", type(wanted).__qualname__))


def importable(function: Callable[..., Any]) -> bool:
    """Return True if another process can import the function by its module and name."""
    found: Any = sys.modules.get(function.__module__) if function.__module__ != "__main__" else None
    for name in name_of(function).split("."):
        found = getattr(found, name, None)
    return found is function


def arguments_of(problem: Problem) -> tuple[str, ...]:
    """Return the argument names of a problem's calls: operands by role, epilogue operands as x0, x1, …, and scalars."""
    extra = problem.epilogue.operands if problem.epilogue is not None else ()
    return (*(role for role, _ in problem.operands), *(f"x{i}" for i in range(len(extra))), *problem.operation.scalars)


def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InvalidProblemError(
            f"multi: got {name_of(function)}, whose parameters Python cannot read ({error}); call it in a function that names them"
        ) from error


def _claims(problem: Problem, device: DeviceInfo) -> Claims:
    offered = load("aten").enumerate(problem, device, Settings()).choices
    return next(choice.claims for choice in offered if choice.baseline)


def members_for(wanted: Sequence[Wanted], problem: Problem, device: DeviceInfo, settings: Settings) -> list[Choice | str]:
    """Return for each of ``wanted`` its choice for the problem, or the reason why there is none."""
    by_name: dict[str, Choice] = {}
    if any(isinstance(x, str) for x in wanted):
        offered = (*widest_offers_for(problem, device, settings).choices, *offers_for(problem, device, settings).choices)
        by_name = {choice.name: choice for choice in offered}
    return [
        by_name.get(x, f"{x} is not among the choices for {problem}")
        if isinstance(x, str)
        else FunctionChoice.of(x, problem, device)
        for x in wanted
    ]


def candidates_of(members: Sequence[Choice | str], problem: Problem, device: DeviceInfo, settings: Settings) -> Candidates:
    """Return the members that exist as candidates without measurements."""
    offers = Offers(choices=tuple(x for x in members if isinstance(x, Choice)))
    return Candidates(
        problem=problem,
        device=device,
        settings=settings,
        offers=offers,
        choices={choice.content_hash: choice for choice in offers.choices},
        known={},
        host_us=host_us(device, settings),
        closed=True,
    )


def refuse_choices(choices: Sequence[Wanted]) -> None:
    """Raise InvalidProblemError unless this is a list of choices with different names."""
    if not choices or isinstance(choices, str):
        raise InvalidProblemError(
            f"multi: choices: got {choices!r}, expected at least one name of a choice, or a function, in a list"
        )
    for x in choices:
        if not (isinstance(x, str) or callable(x)):
            raise InvalidProblemError(f"multi: choices: got {x!r}, expected names of choices, and functions")
    names = [name_of(x) for x in choices]
    for name in names:
        if names.count(name) > 1:
            raise InvalidProblemError(
                f"multi: choices: got {name} twice, expected a name of its own for each; that of a function is its __qualname__"
            )


def in_worker(choices: Sequence[Wanted], subprocess: bool | None, settings: Settings) -> bool:
    """Return True if the choices are measured in a worker process, as ``subprocess`` or else the settings say."""
    local = [x for x in choices if not isinstance(x, str) and not importable(x)]
    if subprocess and local:
        raise InvalidProblemError(
            f"multi: got {name_of(local[0])} and subprocess=True, expected functions that a worker process can import: "
            "define it at the top of a module, or leave subprocess out"
        )
    return (settings.tune_in_subprocess and not local) if subprocess is None else subprocess


def held(wanted: Sequence[Wanted], problem: Problem, rows: range, device: DeviceInfo, settings: Settings) -> list[Choice]:
    """Return the choices by name, made for the problem or for an end of the range. Few serve every M."""
    found, rows_class = members_for(wanted, problem, device, settings), row_classes(problem)[0]
    for other in (rows_class.at(m) for m in (rows[0], rows[-1]) if rows_class.has(m)):
        if any(isinstance(x, str) for x in found):
            more = members_for(wanted, other, device, settings)
            found = [y if isinstance(x, str) else x for x, y in zip(found, more, strict=True)]
    missing = [x for x in found if isinstance(x, str)]
    if missing:
        known = ", ".join(c.name for c in candidates_for(problem, device, settings).offers.choices)
        raise InvalidProblemError(f"multi: {'; '.join(missing)}, expected names out of {known}")
    return [x for x in found if isinstance(x, Choice)]


def place_of(choice: str | int, names: Sequence[str], asker: str) -> int:
    """Return the index of a member, given by name or index. Raises InvalidProblemError of the ``asker``."""
    if isinstance(choice, str) and choice in names:
        return names.index(choice)
    if isinstance(choice, int) and not isinstance(choice, bool) and 0 <= choice < len(names):
        return choice
    expected = ", ".join(f"{i}: {name}" for i, name in enumerate(names))
    raise InvalidProblemError(f"{asker}: got {choice!r}, expected a name or a place out of {expected}")


REMEDY = "Mend it, force another one (force=, GEMMTUNE_MULTI_KERNEL), or none: then the fastest of those that are right runs."


@dataclass(slots=True)
class Forced:
    """Plans by which one kernel of a ``multi`` serves every M. They are made when it is first forced.

    With ``verify``, a kernel that is not torch's own is verified, by the store or else here.
    """

    rows_class: RowClass
    device: DeviceInfo
    settings: Settings
    verify: bool
    plans: dict[str, RangePlan] = field(default_factory=dict)
    proved: set[tuple[str, Problem]] = field(default_factory=set)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.rows_class, self.device, self.settings, self.verify))

    def plan(self, choice: Choice, problem: Problem) -> RangePlan:
        """Return a kernel's plan, verified for this problem if legal. Raises NoValidChoicesError if it is wrong or cannot run."""
        at = choice.at(problem, self.device)
        if self.verify and isinstance(at, Choice) and not at.baseline and (at.name, problem) not in self.proved:
            self._prove(at)
            self.proved.add((at.name, problem))
        if choice.name not in self.plans:
            whole = Segment.of(choice, 1, MOST_ROWS, choice.problem.m)
            member = Member(self.rows_class, whole.sampled_m, self.device, lambda _: choice)
            self.plans[choice.name] = RangePlan(self.rows_class, [member], Table(segments=(whole,)), frozenset())
        return self.plans[choice.name]

    def _prove(self, choice: Choice) -> None:
        problem, store = choice.problem, open_store(self.settings)
        candidates = candidates_of([choice], problem, self.device, self.settings).stored(store)
        found = candidates.known.get(choice.content_hash)
        if found is None:
            found = examine_alone(candidates, choice)
            store.put([row_of(found, problem, candidates.fingerprint)])
        if found.status is not Status.OK:
            left_out = [(choice.name, str(found.status), found.reason)]
            raise NoValidChoicesError(f"{problem} by the one that is forced", left_out, REMEDY)
