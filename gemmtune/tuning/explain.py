"""The reasons why a call runs its kernel."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from .. import settings as settings_module
from ..choice import Refusal, Status
from ..device import DeviceInfo, detect
from ..dispatch.ranges import RangePlan, range_plan_for
from ..errors import DISABLED, InvalidProblemError
from ..problem import Problem
from ..selector.candidates import Candidates, candidates_for
from ..selector.defaults import PREDICTED, RULED, SHIPPED, TIMED
from ..selector.pick import right
from ..selector.range_result import table_lines
from ..selector.result import AGAIN, Outcome, busy
from ..selector.segments import Table
from ..selector.table import refusal_lines, short_reason
from ..settings import Settings
from ..store.key import difference, fingerprint
from ..store.store import open_store
from ..timing.rounds import BUSY_MARK
from .named import Operand, Operation, stated


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The kernel of a call, and the reasons. Prints as text.

    ``pick`` is the name of the choice, or None if torch runs or the first call has to tune. ``origin`` explains it in words.
    ``outcomes`` are the stored measurements, fastest first. ``missing`` counts the offered choices without one. ``refusals`` are
    the choices that are not offered, with reasons. ``elsewhere`` says why measurements of this problem do not apply, such as
    another driver. ``table`` has the segments of M if there is a table for the operands. ``trials`` says which choices a tuning
    tries first, and if these sufficed.
    """

    problem: Problem | None
    pick: str | None
    origin: str
    outcomes: tuple[Outcome, ...] = ()
    missing: int = 0
    refusals: tuple[Refusal, ...] = ()
    elsewhere: tuple[str, ...] = ()
    table: Table | None = None
    trials: str = ""

    def __str__(self) -> str:
        lines = [f"{self.problem or 'this call'}: {self.pick or 'torch'} ({self.origin})"]
        if self.table is not None:
            lines += table_lines(self.table)
        lines += [self._line(o) for o in self.outcomes]
        reasons = dict.fromkeys(o.disturbed for o in self.outcomes if o.disturbed and o.time_us is not None)
        lines += [f"   measured {BUSY_MARK} ({reason}): {AGAIN}" for reason in reasons]
        if self.missing:
            noun = "offered choice is" if self.missing == 1 else "offered choices are"
            lines.append(f"   {self.missing} {noun} not measured yet")
        if self.trials:
            lines.append(f"   {self.trials}")
        if self.refusals:
            lines += [f"   refused: {len(self.refusals)}", *(f"   {line}" for line in refusal_lines(self.refusals))]
        lines += [f"   measured before, but not usable now: {text}" for text in self.elsewhere]
        return "\n".join(lines)

    def _line(self, o: Outcome) -> str:
        mark = "*" if o.name == self.pick else " "
        if o.time_us is None:
            return f" {mark} {o.name:44} {o.status}: {short_reason(o.reason)}"
        rough = "" if o.finalist else ", from a short measurement"
        return f" {mark} {o.name:44} {o.time_us:10.2f} µs{rough}{busy(o.disturbed)}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values of every field."""
        plain = dataclasses.asdict(dataclasses.replace(self, problem=None, table=None))
        problem = None if self.problem is None else {"text": str(self.problem)} | self.problem.to_json()
        return plain | {"problem": problem, "table": None if self.table is None else self.table.to_json()}


def explain(what: Problem | Operation, *operands: Operand, **arguments: Any) -> Explanation:
    """Explain a Problem or a call. ``integration/explain.py`` has the public function."""
    problem, device = (what, None) if isinstance(what, Problem) else stated("explain", what, operands, arguments)
    if isinstance(problem, str):
        return Explanation(problem=None, pick=None, origin=f"torch, because {problem}")
    if isinstance(what, Problem) and (operands or arguments):
        raise InvalidProblemError("explain: got operands beside a Problem, which has their layouts; expected the Problem alone")
    return explain_problem(problem, detect(device or problem.device_type))


def explain_problem(problem: Problem, device: DeviceInfo) -> Explanation:
    """Explain a problem on a device."""
    if problem.empty or problem.terms == 0:
        return Explanation(problem=problem, pick=None, origin="nothing to multiply")
    if 0 in problem.summed:
        return Explanation(problem=problem, pick=None, origin="torch, because one of the products has no terms")
    settings = settings_module.current()
    if settings.disable:
        return Explanation(problem=problem, pick=None, origin=f"torch, because {DISABLED}")
    store = open_store(settings)
    candidates = candidates_for(problem, device, settings).stored(store)
    known = list(candidates.known.values())
    outcomes = (*right(known), *(o for o in known if o.status is not Status.OK))
    here = fingerprint(device, settings.timing)
    others = [json.loads(text) for text in store.fingerprints(problem.key)]
    elsewhere = tuple("; ".join(difference(other, here)) for other in others if other != here)
    pick_name, origin = _pick(candidates, settings)
    sharing = settings.batch_invariant or (settings.rows == "shared" and settings.tune != "force")
    shared = range_plan_for(problem, device, settings) if sharing else None
    unsure = shared is None or (shared.by_rule and settings.tunes)
    if shared is not None and problem.m not in shared.tuned:
        name, text = _shared_pick(shared, problem)
        if not unsure:
            pick_name, origin = name, text
        elif pick_name is None:  # a call tunes, and a layer of ``optimize`` does not
            origin = f"{origin}; until then layers of optimize() run {text if name is None else f'{name}, {text}'}"
    return Explanation(
        problem=problem,
        pick=pick_name,
        origin=origin,
        outcomes=outcomes,
        missing=0 if candidates.only is not None else len(candidates.missing),
        refusals=tuple(candidates.offers.refusals),
        elsewhere=elsewhere,
        table=shared.table if shared is not None else None,
        trials=_trials(candidates),
    )


def _trials(candidates: Candidates) -> str:
    """Return which choices a tuning tries first, and how many it leaves out. Empty if it tries all, or has tried them."""
    trials, settled = candidates.trials, {o.name for o in candidates.known.values()}
    left_out = [c for c in candidates.offers.choices if trials is not None and c.name not in {*trials.first, *settled}]
    if trials is None or not left_out or candidates.only is not None:
        return ""
    favour = f"those that measurements of {trials.source} favour"
    others = "1 other" if len(left_out) == 1 else f"{len(left_out)} others"
    if not trials.suffice(candidates.known.values()):
        return f"a tuning first tries {favour}, and leaves out {others} if one is the fastest"
    return f"{others} left out, since one of {favour} is the fastest; search='exhaustive' tries all"


_DEFAULT_ORIGINS = {
    RULED: "by the rule for weights of few bits: verified here, not measured",
    PREDICTED: "predicted, verified here, not measured",
    TIMED: "by the rule for floats on a CPU: verified and timed against torch here, in short rounds",
    SHIPPED: "shipped: measured on another machine with this GPU, verified here",
}
"""Origins of default tables in words."""


def _shared_pick(shared: RangePlan, problem: Problem) -> tuple[str | None, str]:
    """Return the pick by measurements of other M (None for torch), and its origin."""
    found = shared.find(problem)
    if isinstance(found, str):
        invariant = shared.table is not None and shared.table.reduction
        return None, f"{'no choice: the call raises NoValidChoicesError' if invariant else 'torch'}, because {found}"
    if found.origin == "nearest":
        return found.choice.name, "of the nearest M that was tuned"
    if found.origin == "default":
        made_by = shared.table.origin.split(" ")[0] if shared.table is not None else ""
        return found.choice.name, _DEFAULT_ORIGINS.get(made_by, _DEFAULT_ORIGINS[RULED])
    within = shared.serves(problem.m)
    return found.choice.name, "from the table of its range" if within else "of the last segment of the table, which ends before"


def _pick(candidates: Candidates, settings: Settings) -> tuple[str | None, str]:
    """Return the pick (None for torch, or before the first tuning), and its origin."""
    if candidates.only is not None:
        return candidates.only.name, "the only choice"
    picked = candidates.picked
    if picked is not None and (candidates.complete or not settings.tunes):
        return picked.name, "from the store"
    if settings.tune == "never":
        return None, "the store knows no choice, and tune is 'never'"
    if settings.tune == "predict":
        return None, "the store knows no choice: a call predicts one where weights like this one were measured"
    if candidates.complete:
        return None, "no choice is left" if settings.fallback_to_aten else "no choice is left: the call raises NoValidChoicesError"
    return None, "not tuned yet: the first call tunes it"
