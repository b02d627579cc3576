"""The pytest plugin: the options of the conformance suite, and what our own tests need of pytest.

    pytest -p gemmtune.conformance.plugin --pyargs gemmtune.conformance --gemm-backend=mypkg.ops:matmul

It is no entry point: who merely has gemmtune installed sees nothing of it. Loaded without ``--gemm-backend`` it does one thing:
where there is no GPU, tests marked ``gpu`` are skipped with the reason, and are an error where ``-m gpu`` asks for them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..errors import GemmtuneError
from .option_table import OPTIONS as TABLE
from .options import RunOptions
from .suite import hookspecs
from .suite.session import ConformanceSession, MatrixSession, PytestTerminal
from .suite.stash import OPTIONS

_TYPES = {"integer": int, "seconds": float}


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--gemm-backend`` and every option of the table."""
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


def options_of(config: pytest.Config) -> RunOptions:
    """The options of a pytest run. Raises GemmtuneError where they mean nothing."""
    names = ("backend", *(option.name for option in TABLE))
    return RunOptions.of({name: config.getoption(f"gemm_{name}") for name in names})


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """What the plugin tells while a run goes on."""
    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    """Take part in the session if there is a GEMM to test; refuse ``-m gpu`` where there is none, before processes are started."""
    if config.getoption("markexpr") == "gpu" and not torch.cuda.is_available():
        raise pytest.UsageError("-m gpu: got no GPU (torch sees none), expected one; run without -m gpu on this machine")
    try:
        options = options_of(config)
    except GemmtuneError as error:
        raise pytest.UsageError(str(error)) from error
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
    """Skip the tests marked ``gpu`` on a machine without one, so that ``-m sm80`` runs anywhere."""
    reason = ""
    if not torch.cuda.is_available():
        reason = "needs a GPU; torch sees none"
    elif config.getoption("gemm_sm_compile_only"):
        reason = "runs kernels, and --gemm-sm-compile-only was given"
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
