"""Table of ``benchmarks/results``: tokens a second of ``generate()``, as ``benchmarks/generate.py`` measures them."""

from __future__ import annotations

from collections.abc import Callable

from . import table
from .measured import RESULTS, results

HEAD = ["results", "model", "way to run it", "prompt, tokens", "tokens/s", "× transformers"]


def generation() -> str:
    """Return a row for each way and prompt, compared with transformers in the same process."""
    rows: list[list[str]] = []
    for path in sorted(RESULTS.glob("*/generate*.json")):
        content = results(path.parent.name, path.stem)
        model = f"{content['options']['model']}, {content['options']['layers']} layers"
        for way, found in content["ways"].items():
            for prompt, speed in found.get("tokens_per_s", {}).items():
                rows.append(
                    [
                        f"`{path.parent.name}/{path.stem}`",
                        model,
                        way,
                        prompt,
                        f"{speed:.0f}",
                        f"{found['over_first_way'][prompt]:.2f}",
                    ]
                )
    return table(HEAD, rows)


MAKERS: dict[str, Callable[[], str]] = {"measured-generation": generation}
"""Every made part by its name."""
