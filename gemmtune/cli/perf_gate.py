"""``gemmtune perf-gate``: fail if a GEMM is slower than allowed.

Exit status: 0 nothing is slower, 1 a regression or a missing required baseline, 2 it could not be measured.
"""

from typing import Any

import click

from .. import settings
from ..declaration.named import importable
from ..errors import raised_as
from ..perf_gate.gate import problems_without_names, run_gate
from ..perf_gate.options import GateOptions
from ..perf_gate.result import renderables, warnings
from .asked import device_of, refuse_if_disabled, refuse_problem_options, settings_changes
from .output import LOG, CouldNotTest, is_quiet, note
from .printing import answer, watched
from .shapes import problems_of
from .spec import Spec

GATE_OPTIONS = (
    "device",
    "candidate",
    "reference",
    "baselines",
    "require_baseline",
    "strict",
    "update_baseline",
    "processes",
    "limit",
)
"""Options of the command that belong to the gate. The others are for settings and problems."""


def perf_gate(*, shapes: tuple[str, ...], shapes_file: str | None, json_file: str | None, **options: Any) -> None:
    """Check if a shape takes longer than allowed. ``options`` hold those for settings, the gate and problems."""
    refuse_if_disabled()
    with raised_as(CouldNotTest):
        given = {name: options.pop(name) for name in GATE_OPTIONS}
        given["reference"] = given["reference"] or ("baseline" if given["require_baseline"] else "torch")
        given["candidate"] = importable(given["candidate"])
        gate = GateOptions(**given)
        info = device_of(gate.device)
        with settings.patch(**settings_changes(options)), watched() as progress:
            spec = Spec(device_type=info.torch_device.type, **options)
            problems = problems_of(shapes, shapes_file, spec)
            if not problems:
                refuse_problem_options(options)
                problems = problems_without_names(gate)
            result = run_gate(problems, gate, tell=(lambda _: None) if is_quiet() else note, progress=progress)
    answer(json_file, result.to_json(), renderables(result))
    for line in warnings(result):
        LOG.warning(line)
    if result.exit_status:
        raise click.exceptions.Exit(result.exit_status)
