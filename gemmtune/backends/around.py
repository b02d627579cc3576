"""Choices for one problem that consist of a choice for another problem and torch operations around it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ..choice import Choice, Claims
from ..problem import Problem


@dataclass(frozen=True, kw_only=True)
class AroundChoice(Choice):
    """``inner`` between torch operations. Compiled code, loaded code and launch parameters are those of ``inner``."""

    step: ClassVar[str]
    """Suffix of the name, and the flag in ``info``, that distinguish it from ``inner``."""
    inner: Choice = field(repr=False)

    @classmethod
    def around(cls, problem: Problem, inner: Choice, *, baseline: bool = False) -> Self:
        """Return the choice that solves ``problem`` with ``inner``."""
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
        """Return the claims of ``inner`` together with the steps around it."""

    @property
    def compile_key(self) -> str | None:
        return self.inner.compile_key

    @property
    def compiled(self) -> bool:
        return self.inner.compiled

    @property
    def obstacle(self) -> str | None:
        return self.inner.obstacle

    def compile(self) -> None:
        self.inner.compile()

    def compilation(self) -> Callable[[], object]:
        """Return the compilation of the inner choice."""
        return self.inner.compilation()

    def load(self) -> Any:
        return self.inner.load()

    def launch_variants(self) -> Sequence[Choice]:
        """Return the launch variants of the inner choice with the steps around them."""
        return [self.around(self.problem, variant) for variant in self.inner.launch_variants()]
