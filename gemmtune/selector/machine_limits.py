"""Limits of the machine in the store: their measurement, marks of a busy machine, and times that they rule out."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..device import DeviceInfo
from ..problem import Problem
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import Store
from ..timing.limits import SURE, Limits, limit_names
from ..timing.neighbours import Watch
from .progress import Progress
from .remote import AnySession, open_session

LIMITS = "quiet limits"
"""Timing mode in the fingerprint under which the store keeps the limits of a machine."""
DISTURBED_LIMITS = "disturbed limits"
"""Timing mode for limits that were measured on a busy machine. A quiet measurement of the same name replaces them."""


@dataclass(slots=True)
class MachineLimits:
    """Limits of one machine during one tuning. ``measured`` are the names that this tuning has measured."""

    device: DeviceInfo
    settings: Settings
    store: Store
    measured: set[str] = field(default_factory=set)

    def known(self) -> Limits:
        """Return the limits in the store, the quiet ones first."""
        quiet, disturbed = (self.store.limits(fingerprint_text(self.device, mode)) for mode in (LIMITS, DISTURBED_LIMITS))
        return Limits(values=disturbed | quiet, disturbed=frozenset(disturbed.keys() - quiet.keys()))

    def ensure(self, problem: Problem, progress: Progress, *, again: bool = True) -> None:
        """Measure the limits that a problem needs and the store lacks; all with ``tune="force"``.

        ``again`` measures those from a busy machine too. Leave it out if nothing else is measured.
        """
        known, names = self.known(), set(limit_names(problem.dtype_label))
        wanted = names - (self.measured if self.settings.tune == "force" else known.values.keys())
        disturbed = names & known.disturbed - self.measured if again else set()
        if not wanted and disturbed and self.settings.busy != "accept" and not Watch(self.device).seen():
            wanted = disturbed
        if not wanted:
            return
        progress.stage("limits of this machine", 0, 1)
        with open_session(problem, self.device, self.settings) as session:
            self.measure(session, wanted)
        progress.stage("limits of this machine", 1, 1)

    def measure(self, session: AnySession, wanted: set[str]) -> None:
        """Measure limits of the session's problem now, and store them. Other work only lowers a limit, so the larger one stays."""
        known = self.known()
        found, why = session.limits({name: value for name, value in known.values.items() if name not in wanted})
        self.measured |= found.keys()
        if why:
            found = {name: max(value, known.values.get(name, value)) for name, value in found.items()}
        unmarked = known.values.keys() - known.disturbed if why else found.keys()
        self._keep(found, found.keys() - unmarked)

    def _keep(self, found: Mapping[str, float], disturbed: Collection[str]) -> None:
        for mode, marked in ((LIMITS, False), (DISTURBED_LIMITS, True)):
            values = {name: value for name, value in found.items() if (name in disturbed) == marked}
            self.store.put_limits(fingerprint_text(self.device, mode), values)

    def too_fast(self, session: AnySession, problem: Problem, times: Mapping[str, float], torch_us: float | None) -> dict[str, str]:
        """Return the reasons, by name, why times of verified choices cannot be right. Raise the limits that the others exceed.

        ``times`` are without torch's own operation, whose time ``torch_us`` is believed. Limits are measured if none are known
        and a choice is so much faster than torch that they could rule it out.
        """
        names = set(limit_names(problem.dtype_label))
        suspect = not torch_us or min(times.values(), default=torch_us) * SURE < torch_us
        if names - self.known().values.keys():
            if not suspect or not times:
                return {}
            self.measure(session, names)
        self._raise(problem, [torch_us] if torch_us else [])
        if self._beyond(problem, times) and names - self.measured:
            self.measure(session, names - self.measured)  # they may be from a slower hour
            self._raise(problem, [torch_us] if torch_us else [])
        beyond = self._beyond(problem, times)
        self._raise(problem, [time_us for name, time_us in times.items() if name not in beyond])
        known = self.known()
        limit = known.us(problem, self.device)
        facts = ", ".join(f"{name} {known.values[name]:.4g}" for name in sorted(names) if name in known.values)
        return {
            name: f"took {times[name]:.4g} µs, which no hardware with these limits can: at least {limit:.4g} µs by {facts}"
            for name in beyond
        }

    def _beyond(self, problem: Problem, times: Mapping[str, float]) -> list[str]:
        least_us = self.known().least_us(problem, self.device)
        return [name for name, time_us in times.items() if least_us is not None and time_us < least_us]

    def _raise(self, problem: Problem, times_us: list[float]) -> None:
        """Raise the limits that correct results in these times exceed. Each keeps its mark."""
        known = self.known()
        if times_us:
            self._keep(known.raised(problem, self.device, min(times_us)), known.disturbed)
