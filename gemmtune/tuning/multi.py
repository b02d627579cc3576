"""Several loaded kernels behind one callable. A table, the first call or the caller picks one for each M."""

import hashlib
import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch

from .. import settings as settings_module
from ..bounded import Bounded
from ..choice import Choice, Status
from ..device import DeviceInfo, detect, made_current
from ..dispatch.call import by_torch
from ..dispatch.checks import check_tensors, why_not_ours
from ..dispatch.host import host_us
from ..dispatch.keys import key_of
from ..dispatch.member import members_of
from ..dispatch.plan import Plan
from ..dispatch.ranges import RangePlan
from ..dispatch.statement import stated
from ..dispatch.strategies import fallback
from ..errors import DISABLED, InvalidProblemError, NoValidChoicesError, SettingsError
from ..problem import Problem
from ..problem.fused import NAMES
from ..problem.rows import RowClass, row_classes
from ..selector.candidates import Candidates
from ..selector.progress import Progress
from ..selector.ranges import tune_rows
from ..selector.segments import Segment, Table, merged, outside, rows_of
from ..selector.stored_tables import stored_table
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import Ranged, open_store
from .members import Forced, Wanted, candidates_of, held, in_worker, place_of, refuse_choices
from .named import Operand, Operation, bound_call, stated_problem

log = logging.getLogger("gemmtune")

Decide = Literal["ranges", "first_call"]


class Multi:
    """One operation that one of several kernels computes. Made by ``gemmtune.multi``.

    ``choices`` are the names of the kernels, in the order of ``force``. ``picked`` is the name of the kernel of the last call, None
    before the first. ``table`` maps M to kernels, and is None until something is decided.
    """

    def __init__(
        self,
        name: str,
        held: Sequence[Choice],
        rows_class: RowClass,
        device: DeviceInfo,
        settings: Settings,
        decide: Decide,
        rows: range,
        *,
        given: Settings | None,
        verify_forced: bool,
    ) -> None:
        if decide not in get_args(Decide):
            raise InvalidProblemError(f"multi: decide: got {decide!r}, expected ranges or first_call")
        self.name = name
        self.picked: str | None = None
        self.table: Table | None = None
        self._held = tuple(held)
        self._class = rows_class
        self._device = device
        self._settings = settings
        self._decide = decide
        self._rows = rows
        self._given = given
        self._forced: int | None = None
        self._alone = Forced(rows_class, device, settings, verify_forced)
        self._told: set[str] = set()
        self._frozen = False
        self._plan: RangePlan | None = None
        self._ready = Bounded[Hashable, Plan](65536)
        self.choices = tuple(choice.name for choice in self._held)
        self._kind = f"multi {hashlib.sha256(repr(sorted(self.choices)).encode()).hexdigest()[:16]}"

    def __repr__(self) -> str:
        picks = ", ".join(f"{x.lo}..{x.hi} {x.name}" for x in self.table.segments) if self.table is not None else "nothing"
        forced = f", forced to {self.choices[self._forced]}" if self._forced is not None else ""
        return f"<multi {self._class}: one of {', '.join(self.choices)}; decided: {picks}{forced}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the kernels that are loaded in this process."""
        return self.__dict__ | {"_plan": None, "_ready": Bounded()}

    def __call__(self, *operands: Any, **arguments: Any) -> torch.Tensor:
        """Compute the operation. The arguments are those of the public function of its name.

        Raises:
            InvalidProblemError: the operands differ from the problem's in more than M.
            NoValidChoicesError: no kernel, or not the forced one, is legal and correct for this M.
        """
        key = key_of(self.name, operands, ()) if not arguments and len(operands) > 1 else None
        if (plan := self._ready.get(key)) is not None:
            self.picked = plan.choice.name
            return plan.new(operands, (1.0, 1.0) if plan.problem.operation.scalars else ())
        return self._considered(key, operands, arguments)

    def _considered(self, key: Hashable | None, operands: Sequence[Any], arguments: dict[str, Any]) -> torch.Tensor:
        call = bound_call(self.name, operands, arguments)
        check_tensors(call)
        reason = why_not_ours([x for _, x in call.inputs], floats=call.operation.floats)
        if reason is None and call.wants_grad:
            reason = f"{call.wants_grad[0]} requires grad"
        if reason is not None:
            raise InvalidProblemError(
                f"multi: {reason}, expected plain tensors without a gradient; call gemmtune.{self.name} instead"
            )
        problem = stated(call)
        if problem.empty:
            self.picked = None
            return by_torch(call)
        if self._class not in row_classes(problem):
            raise InvalidProblemError(f"multi: got {problem}, expected a problem of {self._class}, for which it was made")
        with made_current(call.a.get_device()):
            plan = self.plan(problem)
            tensors = call.tensors_for(plan.choice)
            self.picked = plan.choice.name
            if call.out is not None:
                return plan.into(call.out, tensors, call.scalars)
            if key is not None and call.packed is None:
                self._ready[key] = plan
            return plan.new(tensors, call.scalars)

    def plan(self, problem: Problem) -> Plan:
        """Return the plan of a call. With ``decide="first_call"``, a new M is measured now."""
        index, settings = self._forced, self._given or settings_module.current()
        if settings.disable or not self._held:
            return fallback(problem, self._device, settings.by_torch)
        if index is None and (named := settings.multi_kernel) is not None:
            index = place_of(named, self.choices, "multi_kernel")
        if index is not None:
            range_plan = self._alone.plan(self._held[index], problem)
        else:
            known = self.table is not None and (self._frozen or self.table.index(problem.m) is not None)
            if not known and self._decide == "first_call":
                self.decide(range(problem.m, problem.m + 1))
            elif self.table is None:  # until now another one was named
                self.decide(self._rows)
            range_plan = self._plan = self._plan or self._planned(self.table)
        found = range_plan.find(problem)
        if isinstance(found, str):
            remedy = f"Make a multi with more choices, or call gemmtune.{self.name}, which has them all and torch."
            raise NoValidChoicesError(f"{problem} by one of {', '.join(self.choices)}", [("multi", "refused", found)], remedy)
        log.info("multi %s: %s runs %s", self._class, found.choice.name, problem)
        return Plan(problem=problem, choice=found.choice, kernel=found.kernel, origin=found.origin)

    def decide(self, rows: range) -> Table:
        """Measure and verify the kernels for these M, unless the store has them. Decisions for other M stay."""
        if (self._given or settings_module.current()).disable:
            raise SettingsError(f"decide: nothing is measured, because {DISABLED}")
        store = open_store(self._settings)
        machine = fingerprint_text(self._device, self._settings.timing)
        known = stored_table(self._class, machine, store, self._kind) if self._settings.tune != "force" else None
        result = tune_rows(
            self._class, rows, self._device, self._settings, Progress(), host_us=host_us(self._device, self._settings),
            source=self._candidates, kind=self._kind,
        )  # fmt: skip
        self.table, self._plan = result.table, None
        found = [(r.problem.m, o) for r in result.tuned_results for o in r.outcomes]
        if not found:  # the table is the store's
            sampled = {x.sampled_m for x in result.table.segments}
            found = [(m, o) for m in sampled for o in self._candidates(self._class.at(m)).stored(store).known.values()]
        for m, o in found:
            if o.status is not Status.OK and o.name not in self._told:  # one warning for each kernel
                self._told.add(o.name)
                log.warning("multi %s: %s is left out for M = %d: %s: %s", self._class, o.name, m, o.status, o.reason)
        if known is not None and result.source == "measured":
            there = (x for x, member in zip(known[0].segments, self._planned(known[0]).members, strict=True) if member.found)
            others = (part for x in there for part in outside(x, result.table))
            segments = merged(sorted((*others, *result.table.segments), key=lambda x: x.lo))
            disturbed = result.table.disturbed or known[0].disturbed
            self.table = Table(segments=segments, seed=result.table.seed, disturbed=disturbed)
            store.put_ranged(Ranged(key=self._class.key, fingerprint=machine, kind=self._kind, value=self.table.to_json()))
        self._ready.clear()
        return self.table

    def force(self, choice: str | int | None) -> "Multi":
        """Run one kernel from now on, given by name or index in ``choices``. None returns to the decisions. Return ``self``.

        Raises:
            InvalidProblemError: no kernel has that name or index.
        """
        self._forced = None if choice is None else place_of(choice, self.choices, "force")
        self._ready.clear()
        return self

    def freeze(self) -> "Multi":
        """Unload the kernels that no M uses, and decide nothing from now on. Return ``self``.

        Raises:
            InvalidProblemError: nothing is decided yet.
        """
        if self._forced is None and self.table is None:
            raise InvalidProblemError("freeze: got a multi that has decided nothing, expected one after decide(...) or a call")
        kept = {x.name for x in self.table.segments} if self.table is not None else set()
        forced = self.choices[self._forced] if self._forced is not None else None
        kept = {forced} if forced is not None else kept
        self._held = tuple(choice for choice in self._held if choice.name in kept)
        self.choices = tuple(choice.name for choice in self._held)
        self._forced = 0 if forced is not None else None
        self._frozen = True
        return self

    def _planned(self, table: Table | None) -> RangePlan:
        assert table is not None
        members = members_of(table, self._class, self._device, self._found)
        return RangePlan(self._class, members, table, frozenset())

    def _found(self, x: Segment, problem: Problem) -> Choice | None:
        return self._candidates(problem).choices.get(x.content_hash)

    def _candidates(self, problem: Problem) -> Candidates:
        members = [choice.at(problem, self._device) for choice in self._held]
        return candidates_of(members, problem, self._device, self._settings)


def multi(
    what: Problem | Operation,
    *operands: Operand,
    choices: Sequence[Wanted],
    m: range | tuple[int, int] | None = None,
    decide: Decide = "ranges",
    force: str | int | None = None,
    subprocess: bool | None = None,
    settings: Settings | None = None,
    device: str | None = None,
    **arguments: Any,
) -> Multi:
    """Return a callable that holds several loaded kernels. A measurement for each M, or the caller, decides which one runs.

        product = gemmtune.multi("mm", a, w, choices=["aten:mm", "cpp:…", my_function], m=range(1, 513))
        out = product(a, w)

    Args:
        what: a Problem, or an operation as for ``tune``, with the ``operands`` and ``arguments`` of a call. The call is not made.
        choices: names of choices as tables print them, and functions. The parameters of a function are some of the call's
            arguments: operands by role (a, b, inp, …), epilogue operands as x0, x1, …, alpha, beta, and ``out`` if it writes there.
            Other parameters keep their defaults. No name may occur twice.
        m: the range of M to decide. The default is the M of the problem.
        decide: ``ranges`` decides now, ``first_call`` at the first call of each M, unless the store has the decision.
        force: the kernel to run, by name or index, like the setting ``multi_kernel``. It is verified before its first run at each
            M, unless it is torch's own or the setting ``verify`` is off.
        subprocess: measure in a worker process. The default follows the settings if all functions can be imported there.

    Raises:
        InvalidProblemError: no choices, a name that does not exist or occurs twice, or a function's parameter that is no argument.
        NoValidChoicesError: no choice is correct.
    """
    refuse_choices(choices)
    problem, name, info = _asked(what, operands, arguments, device)
    chosen = settings or settings_module.current()
    measuring = replace(chosen, verify=True, batch_invariant=False, tune_in_subprocess=in_worker(choices, subprocess, chosen))
    rows = rows_of(m) if m is not None else range(problem.m, problem.m + 1)
    found = () if chosen.disable else held(choices, problem, rows, info, measuring)
    asked = row_classes(problem)[0], info, measuring, decide, rows
    made = Multi(name, found, *asked, given=settings, verify_forced=chosen.verify)
    if force is not None and found:
        made.force(force)
    elif decide == "ranges" and chosen.multi_kernel is None and found:
        made.decide(rows)
    return made


def _asked(
    what: Problem | Operation, operands: Sequence[Operand], arguments: dict[str, Any], device: str | None
) -> tuple[Problem, str, DeviceInfo]:
    """Return the problem, the name of the public function, and the device."""
    if isinstance(what, Problem):
        if what.epilogue is not None or what.empty:
            raise InvalidProblemError(
                f"multi: got {what}, expected a problem without an epilogue, or an operation with its operands"
            )
        return what, what.op, detect(device or what.device_type)
    problem, place = stated_problem("multi", what, operands, arguments)
    name = getattr(what, "__name__", what)
    assert isinstance(name, str)
    if NAMES[name].sparse:
        expected = ", ".join(other for other, row in NAMES.items() if not row.sparse)
        raise InvalidProblemError(f"multi: got {name}, whose weight is block-sparse, expected one of {expected}")
    return problem, name, detect(device or str(place))
