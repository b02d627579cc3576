"""Table of ``benchmarks/results``: steps with peft and Lightning, as ``benchmarks/finetune.py`` measures them."""

from __future__ import annotations

from collections.abc import Callable

from . import table
from .measured import RESULTS, results

HEAD = ["results", "program", "model", "ms a step", "× without gemmtune", "±", "weights, MB"]
MODELS = {"without": "plain", "optimize": "optimized", "int8": "int8, optimized", "int4": "int4, optimized"}


def finetune() -> str:
    """Return a row for each program and model, compared with the same program without gemmtune."""
    rows: list[list[str]] = []
    for path in sorted(RESULTS.glob("*/finetune*.json")):
        content = results(path.parent.name, path.stem)
        for program, ways in content["programs"].items():
            for way, found in ways.items():
                numbers = [f"{found['ms']:.1f}", f"{found['ratio']:.2f}", f"{found['ratio_margin']:.2f}"]
                weights = f"{content['weights_mb'][way]:.0f}"
                rows.append([f"`{path.parent.name}/{path.stem}`", program, MODELS[way], *numbers, weights])
    return table(HEAD, rows)


MAKERS: dict[str, Callable[[], str]] = {"measured-finetune": finetune}
"""Every made part by its name."""
