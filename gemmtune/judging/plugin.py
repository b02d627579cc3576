"""The judge in pytest: ``pytest -p gemmtune.judging.plugin --judge=mypkg.ops:matmul`` adds a test for each GEMM that is named."""

from typing import Any

import pytest

from ..errors import GemmtuneError
from .levels import LEVELS
from .report import lines
from .verdict import judge


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the judge to pytest."""
    group = parser.getgroup("judge", "the judge of GEMMs")
    group.addoption(
        "--judge", action="append", default=[], metavar="TARGET", help="A GEMM to judge, as for gemmtune judge. It runs as you."
    )
    group.addoption("--judge-level", choices=tuple(LEVELS), default="normal", help="How much is tried.")
    group.addoption("--judge-device", metavar="DEVICE", help="cpu, cuda or cuda:N.")
    group.addoption("--judge-sandbox", action="store_true", help="Run it in bubblewrap.")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each target."""
    items += [JudgedItem.from_parent(session, name=target) for target in config.getoption("judge")]


class NotRightError(Exception):
    """Error of a GEMM that is not right and honest, or was not judged. Its text is the report."""


class JudgedItem(pytest.Item):
    """Test that judges one target."""

    def runtest(self) -> None:
        """Judge the target. Raises NotRightError unless all its GEMMs are right and honest."""
        option: Any = self.config.getoption
        try:
            judgement = judge(
                self.name, device=option("judge_device"), level=option("judge_level"), sandbox=option("judge_sandbox")
            )
        except GemmtuneError as error:
            raise NotRightError(f"NOT JUDGED: {error}") from error
        if judgement.exit_status:
            raise NotRightError("\n".join(lines(judgement)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the report instead of a traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, NotRightError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return where the test is: its target."""
        return self.name, None, f"judge {self.name}"
