"""``gemmtune fleet``: tune many shapes, or the weights of models, on many devices at once."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import click
from rich.text import Text

from .. import settings
from ..dispatch.asked import USUAL_ROWS
from ..fleet.dealer import Task, makespan
from ..fleet.estimate import STORED_S, Estimator
from ..fleet.host import devices_of
from ..fleet.job import Job
from ..fleet.models import models_of, problems_of
from ..fleet.result import FleetResult, duration
from ..fleet.rosters import devices_for, run_fleet
from ..fleet.run import tasks_for
from ..fleet.seat import Device, JobFunction
from ..integration.measured import in_models
from ..operand_kinds import ModelDtype
from ..problem import Problem
from ..selector.text_table import TextTable, counted
from ..settings import Settings
from ..store.store import open_store
from ..tuning.tune import retry_of, run_job
from .asked import refuse_if_disabled, settings_changes
from .busy import busy_work, devices_here
from .files import STDOUT
from .output import write_json
from .printing import answer, kept_in_store, show, watched
from .shapes import parse_rows, problems_and_ranges
from .spec import Spec

DRY_ROWS = 12
"""Jobs that a dry run shows, the longest ones."""


def fleet(
    *,
    shapes: tuple[str, ...],
    shapes_file: str | None,
    recorded: str | None,
    models: str | None,
    dtypes: str,
    m_range: str | None,
    devices: str | None,
    ray: str | None,
    dry_run: bool,
    force: bool,
    again: bool,
    json_file: str | None,
    **options: Any,
) -> int:
    """Tune on many devices, or with ``dry_run`` show what that takes. ``options`` hold those for settings and for problems."""
    refuse_if_disabled()
    kind = device_type(devices, ray)
    changes = settings_changes(options) | {"tune": "force" if force or settings.current().tune == "force" else "on_miss"}
    jobs: list[Job] = []
    if shapes or shapes_file is not None or recorded is not None:
        jobs += jobs_of(*problems_and_ranges(Spec(device_type=kind, **options), shapes, shapes_file, recorded, m_range))
    if models is not None:
        rows = parse_rows(m_range or f"1..{USUAL_ROWS}")
        jobs += Job.tables(problems_of(list(models_of(_words(models)).values()), _dtypes(dtypes), kind), rows)
    elif again and not jobs and m_range is None:
        jobs += jobs_of(*busy_work(devices_here(devices, ray), changes, options))
    elif not jobs:
        raise click.UsageError("got nothing to tune, expected shapes such as 16x4096x4096, --shapes, --recorded or --models")
    if (recorded is not None or models is not None) and changes.get("timing") is None:
        changes["timing"] = timing_in_models(devices, ray, kind)
    function = functools.partial(run_job, retry=retry_of(again=again))
    with settings.patch(**changes) as chosen:
        if dry_run:
            _show_dry_run(jobs, devices_for(jobs, function, chosen, devices=devices, ray=ray), chosen, json_file)
            return 0
        result = run_watched(jobs, function, chosen, devices, ray, keep=False)
    answer(json_file, result.to_json(), map(Text, summary_lines(result, chosen)))
    return 1 if result.failures else 0


def device_type(devices: str | None, ray: str | None) -> str:
    """Return the type of the devices that the options name. Raises click.UsageError unless one of them is given."""
    if devices is None and ray is None:
        raise click.UsageError("got neither --devices nor --ray, expected one: --devices all, --devices 0,1, or --ray auto")
    return "cpu" if devices is not None and devices.strip() == "cpu" else "cuda"


def jobs_of(problems: Sequence[Problem], ranges: Sequence[tuple[Problem, range]]) -> list[Job]:
    """Return the jobs of single problems and of problems that represent a range of M."""
    return [*Job.alone(problems), *dict.fromkeys(job for problem, rows in ranges for job in Job.tables([problem], rows))]


def run_watched(
    jobs: Sequence[Job], function: JobFunction, chosen: Settings, devices: str | None, ray: str | None, *, keep: bool
) -> FleetResult:
    """Run jobs and show their progress."""
    with watched(kept=kept_in_store(chosen)) as progress:
        return run_fleet(jobs, function, chosen, progress, devices=devices, ray=ray, keep=keep)


def summary_lines(result: FleetResult, chosen: Settings) -> Iterator[str]:
    """Yield the lines at the end of a fleet."""
    stored = len(result.done) - result.measured - len(result.failures)
    yield (
        f"{counted(len(result.done), 'job')} on {counted(len(result.devices), 'device')} in {duration(result.seconds)}: "
        f"{result.measured} measured, {stored} from the store, {result.dealt_again} dealt again, {len(result.failures)} failed"
    )
    yield from (f"failed: {one.task.job}: {one.reason}" for one in result.failures)
    yield from (f"left the fleet: {name}: {reason}" for name, reason in result.left.items())
    yield from result.disagreements
    yield f"store: {chosen.store_file}"


def _show_dry_run(jobs: Sequence[Job], devices: Mapping[str, Device], chosen: Settings, json_file: str | None) -> None:
    store = open_store(chosen)
    by_kind = {device.fingerprint: device for device in devices.values()}
    tasks = {kind: tasks_for(jobs, device, chosen, store) for kind, device in by_kind.items()}
    counts = Counter(device.fingerprint for device in devices.values())
    seconds = max(makespan([task.expected_s for task in tasks[kind]], [0.0] * counts[kind]) for kind in tasks)
    if json_file != STDOUT:
        for kind, device in by_kind.items():
            stored = sum(task.expected_s == STORED_S for task in tasks[kind])
            show([Text(f"{counts[kind]} × {device.info.name} ({device.info.arch}): {counted(len(jobs), 'job')}, {stored} stored")])
            show([_table(tasks[kind])])
            hidden = len(jobs) - DRY_ROWS
            if hidden > 0:
                show([Text(f"… and {counted(hidden, 'shorter job')}")])
            show([Text(f"expected durations: {Estimator(device.info, chosen, store).source}")])
        show([Text(f"about {duration(seconds)} on {counted(len(devices), 'device')}", style="bold")])
    listed = [
        {"job": str(x.job), "expected_s": x.expected_s, "stored": x.expected_s == STORED_S, "device": by_kind[kind].info.name}
        for kind, found in tasks.items()
        for x in found
    ]
    write_json(json_file, {"devices": list(devices), "seconds": seconds, "jobs": listed})


def _table(tasks: Sequence[Task]) -> TextTable:
    table = TextTable(texts=("job",), numbers=("expected",), last="")
    for task in sorted(tasks, key=lambda task: -task.expected_s)[:DRY_ROWS]:
        table.add_row(Text(str(task.job)), "stored" if task.expected_s == STORED_S else duration(task.expected_s))
    return table


def timing_in_models(devices: str | None, ray: str | None, kind: str) -> str:
    """Return the timing of products of models. A head of a cluster need not have the GPU, and takes the usual one."""
    now = settings.current()
    if ray is None:
        return in_models(now, devices_of(devices or "all")[0]).timing
    return "spaced" if kind != "cpu" and now.timing == "graph" else now.timing


def _dtypes(text: str) -> list[ModelDtype]:
    found = _words(text)
    for word in found:
        if word not in get_args(ModelDtype):
            raise click.UsageError(f"--dtypes: got {word!r}, expected some of {', '.join(get_args(ModelDtype))}")
    return cast(list[ModelDtype], found)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
