"""Tables of whole models, which ``benchmarks/model.py`` measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from . import shell, table
from .measured import RESULTS, device

FOLDER = RESULTS / "nvidia-h200"


def files() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and content of each result; a file of several models counts as one for each."""
    for path in sorted(FOLDER.glob("model*.json")):
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
    return table(["file", "model", "step", "way", "ms", "× torch.compile", "first call, s", "weights, GB"], rows)


def commands() -> str:
    """Return the command of each file whose options are known."""
    lines = []
    for name, content in files():
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


MAKERS: dict[str, Callable[[], str]] = {"model-steps": steps, "model-commands": commands}
