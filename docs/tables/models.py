"""Tables of whole models, which ``benchmarks/model.py`` measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import shell, table
from .measured import RESULTS, device

FOLDER = RESULTS / "nvidia-h200"
FLOORS = RESULTS / "nvidia-h100"
"""Folder of the decoding steps that are compared with the time of reading their weights once."""


def files(folder: Path = FOLDER) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and content of each result; a file of several models counts as one for each."""
    for path in sorted(folder.glob("model*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        parts = [content] if "environment" in content else list(content.values())
        yield from ((path.stem, part) for part in parts if isinstance(part, dict) and "scenarios" in part)


def steps() -> str:
    """Return one row for each way of each step."""
    rows = []
    for name, content in files():
        for scenario in content["scenarios"]:
            model = scenario.get("model") or content["options"]["model"]
            base = (scenario["ways"].get("compile") or {}).get("ms")
            for way, found in scenario["ways"].items():
                if not found.get("ms"):
                    continue
                over = f"{base / found['ms']:.3f}" if base else ""
                first = f"{found['first_call_s']:.1f}" if found.get("first_call_s") else ""
                gigabytes = f"{found['weights_gb']:.2f}" if found.get("weights_gb") else ""
                rows.append([f"`{name}`", model, scenario["name"], way, f"{found['ms']:.3f}", over, first, gigabytes])
    return table(["file", "model", "step", "way to run it", "ms", "× torch.compile", "first call, s", "weights, GB"], rows)


def floors() -> str:
    """Return one row for each way of each decoding step whose share of the floor is known."""
    rows = []
    for _, content in files(FLOORS):
        for scenario in content["scenarios"]:
            ways = {way: found for way, found in scenario["ways"].items() if found.get("of_floor")}
            for way, found in ways.items():
                ratios = [f"{ways[base]['ms'] / found['ms']:.3f}" if base in ways else "" for base in ("compile", "max-autotune")]
                numbers = [f"{found['ms']:.3f}", *ratios, f"{found['of_floor']:.2f}", f"{found['tokens_per_s']:.0f}"]
                memory = f"{found['memory_gb']:.2f}" if found.get("memory_gb") else ""
                kernels = [str(found["launches"]), f"{found['busy_us']:.0f}"]
                costs = [f"{found['tuning_s']:.0f}", f"{found['first_call_s']:.0f}", memory]
                model = f"{content['options']['model']}, {content['options']['layers']} layers"
                rows.append([model, scenario["name"], way, *numbers, *kernels, *costs])
    head = ["model", "step", "way to run it", "ms"]
    ratio = ["× torch.compile", "× max-autotune", "floor ÷ time", "tokens/s"]
    cost = ["kernels", "GPU busy, µs", "tuning, s", "first call, s", "memory, GB"]
    split = len(head) + len(ratio)
    fast, spent = [row[:split] for row in rows], [row[:3] + row[split:] for row in rows]
    return f"{table([*head, *ratio], fast)}\n{table([*head[:3], *cost], spent)}"


def commands() -> str:
    """Return the command of each file whose options are known."""
    lines = []
    for name, content in (*files(), *(found for found in files(FLOORS) if _has_floor(found[1]))):
        options = content.get("options") or {}
        if "ways" not in options:
            continue
        model = options.get("model") or content["scenarios"][0]["model"]
        words = f"--model {model} --dtype {options['dtype']}"
        words += f" --layers {options['layers']}" if "layers" in options else ""
        words += "".join(f" --{key} {','.join(map(str, options[key]))}" for key in ("batch", "prefill") if options.get(key))
        words += f" --ways {','.join(options['ways'])}"
        words += " --sparse 64:0.1" if options.get("sparse", "None") != "None" else ""
        lines.append(f"# {name}, {device(content)}\n" + shell(f"python benchmarks/model.py {words}"))
    return "```sh\n" + "\n".join(lines) + "\n```\n"


def _has_floor(content: dict[str, Any]) -> bool:
    return any(found.get("of_floor") for scenario in content["scenarios"] for found in scenario["ways"].values())


MAKERS: dict[str, Callable[[], str]] = {"model-steps": steps, "model-floors": floors, "model-commands": commands}
