"""The ck backend: instances of Composable Kernel for a problem, ranked before anything is compiled."""

from ...choice import ONLY_COMPILED, Availability, Offers, Refusal
from ...device import DeviceInfo
from ...effort import EFFORT
from ...errors import UnavailableError
from ...filters import why_not_named
from ...problem import Problem
from ...settings import Settings, current
from ...toolchain.codeobject import find_hip_compiler
from .choice import NAME, CkChoice, name_of
from .configs import Config
from .legality import Predicate, check_problem
from .products import MFMA_K
from .rank import estimate_us, select
from .toolkit import find_toolkit

NOT_RUN = "its kernels were compiled and inspected, and never run on an AMD GPU"
"""Notice shown wherever the backend appears."""


class CkBackend:
    """Backend for AMD GPUs of CDNA 2 and 3."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:
        """Return if the backend can run on an AMD GPU. Without headers or a compiler, only kernels compiled before are used."""
        try:
            detail = f"Composable Kernel {find_toolkit(current().ck_dir).version}, {find_hip_compiler()}"
        except UnavailableError as error:
            detail = f"{ONLY_COMPILED}: {error}"
        if device.type != "hip" or device.arch not in MFMA_K:
            text = f"works on AMD GPUs of {' and '.join(MFMA_K)}, not on {device.arch}; here: {detail}"
            return Availability(ok=False, detail=f"{text}; {NOT_RUN}")
        return Availability(ok=True, detail=f"{detail}; {NOT_RUN}")

    def serves_by_default(self, device: DeviceInfo) -> bool:  # noqa: ARG002 - no device
        """Return False: it serves only if named. Nobody has run its kernels yet, and each takes up to a minute to compile."""
        return False

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Return the likeliest legal instances, and counts of the others by reason. Needs neither CK nor a compiler nor a GPU."""
        if (reason := check_problem(problem, device)) is not None:
            return Offers(refusals=(Refusal(name=NAME, reason=reason),))
        predicate = Predicate(problem, device)
        legal, refusals = Refusal.apart((predicate.config(*x) for x in predicate.candidates()), NAME, "instances")
        allowed, left_out = _allowed(legal, predicate, settings)
        timed = [(estimate_us(config, problem, predicate.product.element, device), config) for config in allowed]
        chosen = select(timed, EFFORT[settings.search].configs[NAME])
        choices = tuple(CkChoice.of(config, predicate, settings.ck_dir) for config in chosen)
        return Offers(choices=choices, refusals=(*refusals, *left_out))


def _allowed(legal: list[Config], predicate: Predicate, settings: Settings) -> tuple[list[Config], list[Refusal]]:
    """Return the configs whose names pass the settings' regexes, and one refusal per reason for the others.

    The regexes apply before the ranking. If no config remains, all are returned: the selector refuses them, and warns.
    """
    named = (why_not_named(name_of(predicate, config), NAME, settings) or config for config in legal)
    allowed, refusals = Refusal.apart(named, NAME, "instances")
    return (allowed, refusals) if allowed else (legal, [])
