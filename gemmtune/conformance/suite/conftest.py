"""Test generation: one test for each case, for each property with drawn cases, and for each architecture."""

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ..bench.outcome import Record
from ..cases.case import Case
from ..properties.property import Property
from ..properties.table import PROPERTIES
from ..runs.run import Run
from ..runs.sanitize import few_cases
from .stash import FOUND, OPTIONS, RUN, CaseFailed, Found, encoded, settle

FOLDER = Path(__file__).parent
SUITE = FOLDER / "test_conformance.py"
PLUGIN = "gemmtune.conformance.plugin"
MISSING_PLUGIN = (
    f"the conformance suite: its plugin is not loaded; expected pytest -p {PLUGIN} --pyargs gemmtune.conformance "
    "--gemm-backend=mypkg.ops:matmul, or gemmtune conformance mypkg.ops:matmul"
)
MISSING_GEMM = "the conformance suite: got no GEMM, expected --gemm-backend=package.module:function, for instance mypkg.ops:matmul"


class SuiteModule(pytest.Module):
    """The suite's module, whose tests do not depend on the names that a project gives its own."""

    def funcnamefilter(self, name: str) -> bool:
        """Return True for the name of a test."""
        return name.startswith("test_")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Collect the suite, whatever ``python_files`` a project has."""
    found = yield
    return [SuiteModule.from_parent(parent, path=file_path)] if file_path == SUITE else found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run, options = metafunc.config.stash.get(RUN, None), metafunc.config.stash.get(OPTIONS, None)
    if "gemm_case" in metafunc.fixturenames:
        cases = run.cases() if run is not None and not (run.options.repro and run.options.sanitize) else []
        _parametrize(metafunc, "gemm_case", cases, [case.id for case in cases])
    if "gemm_drawn" in metafunc.fixturenames:
        properties = run.drawn_properties() if run is not None else ()
        _parametrize(metafunc, "gemm_drawn", properties, [p.name for p in properties])
    if "gemm_sanitized" in metafunc.fixturenames:
        chosen = []
        if run is not None and run.options.sanitize:
            chosen = [tuple(run.cases() if run.options.repro else few_cases(run.scope))]
        _parametrize(metafunc, "gemm_sanitized", chosen, ["sanitizer" for _ in chosen])
    if "gemm_sm" in metafunc.fixturenames:
        asked = options.sm if options is not None else ()
        marks = [pytest.mark.gpu] if metafunc.config.getoption("markexpr") == "gpu" else []
        _parametrize(metafunc, "gemm_sm", [pytest.param(sm, marks=marks) for sm in asked], [f"sm{sm}" for sm in asked])


def _parametrize(metafunc: pytest.Metafunc, name: str, values: Sequence[Any], ids: list[str]) -> None:
    """Make a test for each value. An empty set of parameters may be an error in a project, so that no values give none."""
    if values:
        metafunc.parametrize(name, values, ids=ids)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests by property, or sampled cases first. Without the plugin or a GEMM, end the session with the reason."""
    if not config.pluginmanager.has_plugin(PLUGIN):
        pytest.exit(MISSING_PLUGIN, returncode=2)
    if OPTIONS not in config.stash:
        pytest.exit(MISSING_GEMM, returncode=2)
    # pytest makes one test of a function without parameters.
    items[:] = [item for item in items if item.path.parent != FOLDER or _property_of(item) is not None]
    if config.stash[OPTIONS].sampled:  # cases in sample order, then drawn cases
        items.sort(key=lambda item: "gemm_case" not in _parameters(item))
    else:
        order = {p.name: i for i, p in enumerate(PROPERTIES)}
        items.sort(key=lambda item: order.get(_property_of(item) or "", len(order)))


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _property_of(item: pytest.Item) -> str | None:
    """Return the property that a test checks, empty if it checks none, None if the test has no parameters."""
    for value in _parameters(item).values():
        if isinstance(value, Case):
            return value.property_name
        if isinstance(value, Property):
            return value.name
        if isinstance(value, (str, tuple)):
            return ""
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach a test's findings to its report, and replace the stack trace of a failed case by its message."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, CaseFailed):
        report.longrepr = str(call.excinfo.value)
    if call.when == "call":
        report.gemm_found = encoded(item.stash.get(FOUND, Found()))  # type: ignore[attr-defined]
    return report


@pytest.fixture
def gemm_run(request: pytest.FixtureRequest) -> Run:
    """Return the run that this test belongs to."""
    return request.config.stash[RUN]


@pytest.fixture
def gemm_settle(request: pytest.FixtureRequest) -> Callable[[list[Record]], None]:
    """Return the function that stores a test's records and ends the test accordingly."""

    def take(records: list[Record]) -> None:
        request.node.stash[FOUND] = Found(records=records)
        settle(request.config.stash[OPTIONS], records)

    return take
