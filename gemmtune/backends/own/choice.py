"""User-supplied GEMM as a choice."""

import dataclasses
import hashlib
from dataclasses import dataclass, field

from ...declaration.called import CalledChoice
from ...declaration.legality import why_not
from ...declaration.subject import Subject
from ...declaration.traits import DECLARED
from ...device import DeviceInfo
from ...errors import UnavailableError
from ...problem import Problem
from .targets import Loaded, loaded

NAME = "own"
UNDECLARED = "undeclared"
"""Key of ``info`` for a GEMM that declares nothing."""


@dataclass(frozen=True, kw_only=True)
class OwnChoice(CalledChoice):
    """GEMM for one problem. It is passed to other processes by its target's name and imported where it runs."""

    target: str
    digest: str = field(repr=False)
    folder: str = field(repr=False)

    @classmethod
    def of(cls, source: Loaded, subject: Subject, problem: Problem, *, deterministic: bool = True) -> "OwnChoice":
        """Return the choice for a covered problem. An undeclared GEMM counts as ``deterministic`` if it has to be."""
        claims = subject.traits.claims(problem)
        if claims.reduction is not None:
            own = claims.reduction.own.replace(DECLARED, source.target)
            claims = dataclasses.replace(claims, reduction=dataclasses.replace(claims.reduction, own=own))
        return cls(
            name=f"{NAME}:{source.target}",
            backend=NAME,
            problem=problem,
            claims=dataclasses.replace(claims, deterministic=claims.deterministic and (deterministic or not source.undeclared)),
            info=({"version": source.version} if source.version else {}) | ({UNDECLARED: True} if source.undeclared else {}),
            target=source.target,
            digest=source.digest,
            folder=source.folder,
        )

    @property
    def content_hash(self) -> str:
        """Hash of the name and the digest of sources, version and declarations, and of what is assumed instead of them."""
        assumed = f"\0{self.claims.deterministic}" if self.undeclared else ""
        return hashlib.sha256(f"{self.name}\0{self.digest}{assumed}".encode()).hexdigest()

    @property
    def undeclared(self) -> bool:
        return bool(self.info.get(UNDECLARED))

    def why_unordered(self, allowing: str) -> str:
        """Explain that determinism is not declared, although the GEMM may well be deterministic."""
        return f"got no deterministic, expected deterministic=True: declare it if equal inputs give equal bits, else set {allowing}"

    def at(self, problem: Problem, device: DeviceInfo) -> "OwnChoice | str":
        source = loaded(self.target, self.folder)
        if not isinstance(source.found, Subject):
            return f"{self.target} is no longer a GEMM"
        deterministic = self.claims.deterministic
        return why_not(source.found.traits, problem, device) or self.of(source, source.found, problem, deterministic=deterministic)

    @property
    def batch_invariant(self) -> bool:
        """Declared batch invariance. A declared reduction promises it too."""
        source = loaded(self.target, self.folder)
        return isinstance(source.found, Subject) and bool(source.found.traits.batch_invariant or source.found.traits.reduction)

    def load(self) -> Subject:
        """Import the GEMM. Raises SubjectError or TraitsError if that fails, UnavailableError if it is not the offered one."""
        here = loaded(self.target, self.folder)
        if here.digest != self.digest or not isinstance(here.found, Subject):
            raise UnavailableError(
                f"{self.target}: got another source or version than the one that was offered, because it has changed or another "
                "package has its name here; start the program again"
            )
        return here.found
