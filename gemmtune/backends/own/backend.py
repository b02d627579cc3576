"""The own backend: offers declared GEMMs and the choices of whole backends of other packages."""

from ...choice import Availability, Backend, Choice, Offers, Refusal
from ...declaration.legality import why_not
from ...declaration.subject import Subject
from ...device import DeviceInfo
from ...errors import GemmtuneError
from ...problem import Problem
from ...settings import Settings, current
from ...warning import warn_once
from .choice import NAME, OwnChoice
from .targets import GROUP, Loaded, installed_targets, loaded, targets_of

NOTHING = f"nothing is brought along: set extra_choices, or install a package with the entry point {GROUP}"


class OwnBackend:
    """Backend of user-supplied GEMMs, each offered by its declaration."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:  # noqa: ARG002 - each target declares its devices
        """Return the availability: ok if there are targets, with their names and versions."""
        targets = targets_of(current())
        if not targets:
            return Availability(ok=False, detail=NOTHING)
        return Availability(ok=True, detail=", ".join(_described(target) for target in targets))

    def serves_by_default(self, device: DeviceInfo) -> bool:  # noqa: ARG002 - each target declares its devices
        """Return True if installed packages supply targets. Those of ``extra_choices`` always take part."""
        return bool(installed_targets())

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Return the targets whose declarations cover the problem. One that cannot be imported is left out with a warning."""
        found = [_offers_of(target, problem, device, settings) for target in targets_of(settings)]
        found = found or [Offers(refusals=(Refusal(name=NAME, reason=NOTHING),))]
        return Offers(
            choices=tuple(choice for offers in found for choice in offers.choices),
            refusals=tuple(refusal for offers in found for refusal in offers.refusals),
        )


def _offers_of(target: str, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
    name = f"{NAME}:{target}"
    try:
        source = loaded(target)
    except GemmtuneError as error:
        warn_once(f"{name} is left out: {error}")
        return Offers(refusals=(Refusal(name=name, reason=str(error)),))
    if not isinstance(source.found, Subject):
        return _of_a_backend(source.found, name, problem, device, settings)
    reason = why_not(source.found.traits, problem, device)
    if reason is None and source.undeclared and device.type != "cpu" and settings.timing == "eager":
        reason = "it declares no streams and capturable, which CUDA graphs show and timing='eager' does not"
    if reason is not None:
        return Offers(refusals=(Refusal(name=name, reason=reason),))
    return Offers(choices=(OwnChoice.of(source, source.found, problem, deterministic=settings.deterministic),))


def _of_a_backend(backend: Backend, name: str, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
    """Return the offers of another package's backend. Its errors cost its choices only."""
    try:
        seen = backend.available(device)
        if not seen.ok:
            return Offers(refusals=(Refusal(name=name, reason=seen.detail),))
        offers = backend.enumerate(problem, device, settings)
        choices = tuple(offers.choices)
        for choice in choices:
            _check(choice, backend.name)
        return Offers(choices=choices, refusals=tuple(offers.refusals))
    except Exception as error:  # noqa: BLE001 - any exception of another package's code is reported with its type
        reason = f"its backend failed to offer choices: {type(error).__name__}: {error}"
        warn_once(f"{name} is left out: {reason}")
        return Offers(refusals=(Refusal(name=name, reason=reason),))


def _check(choice: Choice, backend: str) -> None:
    """Raise ValueError for a choice that could be mistaken for one of another backend or of torch."""
    if not choice.name.startswith(f"{backend}:") or choice.backend != backend or choice.baseline or not choice.content_hash:
        raise ValueError(
            f"got the choice {choice.name!r} of the backend {choice.backend!r}, baseline={choice.baseline}, expected a name that "
            f"begins with {backend + ':'!r}, that backend, no baseline and a content hash"
        )


def _described(target: str) -> str:
    try:
        source: Loaded = loaded(target)
    except GemmtuneError as error:
        return f"{target} (left out: {error})"
    return f"{target} {source.version}".rstrip()


BACKEND = OwnBackend()
