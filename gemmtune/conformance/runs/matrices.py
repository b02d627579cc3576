"""Architecture matrices of ``--sm``: gemmtune's kernels, compiled, checked, and run if a GPU here can."""

import torch

from ...architectures import MatrixReport, how_to_run, run_matrix
from ...device import detect
from ...selector.progress import Progress
from ...settings import Search
from ..cases.scope import Level
from ..options import RunOptions

SEARCH: dict[Level, Search] = {Level.SMOKE: "quick", Level.FULL: "default", Level.EXHAUSTIVE: "exhaustive"}


def matrix(options: RunOptions, sm: str, *, must_run: bool = False, progress: Progress | None = None) -> MatrixReport:
    """Compile, check and run the kernels of one architecture, such as ``80``. The level sets how many.

    With ``must_run`` it is a failure if they cannot run here. Raises UnavailableError without a compiler or the device.
    """
    arch, wanted = f"sm{sm}", options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = None if wanted == "cpu" else detect(wanted)
    runs = not options.sm_compile_only and (must_run or how_to_run(arch, gpu).mode is not None)
    return run_matrix(arch, search=SEARCH[Level.of(options.level)], device=gpu, run=runs, progress=progress)


def exit_status(reports: list[MatrixReport]) -> int:
    """Return the exit status: 0 all is right, 1 something failed, 2 nothing could be tested."""
    if not any(report.executed for report in reports):
        return 2
    return 1 if any(report.failures for report in reports) else 0
