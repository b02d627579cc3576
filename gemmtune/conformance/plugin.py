"""The pytest plugin: options of the conformance suite, and GPU handling for gemmtune's own tests.

    pytest -p gemmtune.conformance.plugin --pyargs gemmtune.conformance --gemm-backend=mypkg.ops:matmul

The plugin is no entry point, so installing gemmtune does not change pytest. Loaded without ``--gemm-backend``, it only handles
tests marked ``gpu``. On a machine without a GPU they are skipped with the reason, and ``-m gpu`` is a usage error.
"""

from typing import Any

import pytest
import torch

from ..errors import GemmtuneError
from .bench.outcome import Record
from .option_table import OPTIONS as TABLE
from .option_table import as_typed
from .options import RunOptions
from .report.summary import Summary
from .runs.run import Run
from .suite.session import ConformanceSession, MatrixSession, PytestTerminal
from .suite.stash import OPTIONS

_TYPES = {"integer": int, "seconds": float}


class Hooks:
    """Hooks that the plugin calls during a run. The command and the plugin's own terminal output implement them."""

    @pytest.hookspec(firstresult=True)
    def pytest_gemm_open(self, options: RunOptions) -> Run | None:
        """Return the run of these options if the caller has opened it already."""

    def pytest_gemm_begin(self, run: Run) -> None:
        """Called when the GEMM was found. Workers of pytest-xdist call no hook of this class."""

    def pytest_gemm_progress(self, records: list[Record], done: int, total: int) -> None:
        """Called when one more of ``total`` tests is done, with its records."""

    def pytest_gemm_end(self, summary: Summary) -> None:
        """Called at the end, after the reports were written."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gemm-backend`` and every option of the table to pytest."""
    group = parser.getgroup("gemm", "conformance of a GEMM")
    group.addoption(
        "--gemm-backend",
        dest="gemm_backend",
        metavar="MODULE:NAME",
        help="The GEMM to test (with --pyargs gemmtune.conformance): a function f(a, b), or a module or object with torch's names.",
    )
    for option in TABLE:
        arguments: dict[str, Any] = {"type": _TYPES.get(option.kind, str), "metavar": option.metavar}
        if option.kind == "flag":
            arguments = {"action": "store_true"}
        elif option.repeated:
            arguments = {"action": "append", "metavar": option.metavar}
        elif option.choices:
            arguments = {"choices": option.choices}
        group.addoption(option.pytest_spelling, dest=f"gemm_{option.name}", help=option.help, **arguments)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the hooks that the plugin calls during a run."""
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    """Register the session if there is a GEMM to test. Reject ``-m gpu`` without a GPU before any process starts."""
    if config.getoption("markexpr") == "gpu" and not torch.cuda.is_available():
        raise pytest.UsageError("-m gpu: got no GPU (torch sees none), expected one; run without -m gpu on this machine")
    try:
        options = RunOptions.of({name: config.getoption(f"gemm_{name}") for name in ("backend", *(x.name for x in TABLE))})
    except GemmtuneError as error:
        raise pytest.UsageError(as_typed(str(error), {x.name: x.pytest_spelling for x in TABLE})) from error
    if not options.active:
        return
    config.stash[OPTIONS] = options
    if options.sm:
        config.pluginmanager.register(MatrixSession(config, options), "gemm-session")
        return
    config.pluginmanager.register(ConformanceSession(config, options), "gemm-session")
    if not config.pluginmanager.is_blocked(PytestTerminal.NAME):
        config.pluginmanager.register(PytestTerminal(), PytestTerminal.NAME)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` if there is no GPU or only compilation was requested, so that ``-m sm80`` runs anywhere."""
    reason = ""
    if not torch.cuda.is_available():
        reason = "needs a GPU; torch sees none"
    elif config.getoption("gemm_sm_compile_only"):
        reason = "runs kernels, and --gemm-sm-compile-only was given"
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
