"""Choices for one problem that are made of those for another one, with torch's own steps around them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ..choice import Choice, Claims
from ..problem import Problem


@dataclass(frozen=True, kw_only=True)
class AroundChoice(Choice):
    """``inner`` between torch's steps: what is compiled and loaded, and what it can be told at launch, are those of ``inner``."""

    step: ClassVar[str]
    """What the name and the log have beside those of ``inner``."""
    inner: Choice = field(repr=False)

    @classmethod
    def around(cls, problem: Problem, inner: Choice, *, baseline: bool = False) -> Self:
        """The choice that does ``problem`` by ``inner``."""
        return cls(
            name=f"{inner.name}+{cls.step}",
            backend=inner.backend,
            problem=problem,
            claims=cls.claimed(problem, inner),
            info={**inner.info, cls.step: True},
            baseline=baseline,
            inner=inner,
        )

    @staticmethod
    @abstractmethod
    def claimed(problem: Problem, inner: Choice) -> Claims:
        """The arithmetic of ``inner`` and of the steps around it."""

    @property
    def compile_key(self) -> str | None:
        """The inner choice has the same."""
        return self.inner.compile_key

    @property
    def compiled(self) -> bool:
        """The inner choice is."""
        return self.inner.compiled

    @property
    def obstacle(self) -> str | None:
        """What is in the way of the inner choice."""
        return self.inner.obstacle

    def compile(self) -> None:
        """Compile the inner choice."""
        self.inner.compile()

    def load(self) -> Any:
        """What the inner choice loads."""
        return self.inner.load()

    def launch_variants(self) -> Sequence[Choice]:
        """Steps around those of the inner choice."""
        return [self.around(self.problem, variant) for variant in self.inner.launch_variants()]
