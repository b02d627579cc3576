"""Tune shapes and write the picks: what a fresh process does, run by ``fresh.py`` with the settings in its environment."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from entries import read_entries

import gemmtune


@click.command()
@click.option("--shapes", "path", required=True)
@click.option("--device", required=True)
@click.option("--names", default="")
@click.option("--json", "out", required=True)
def main(path: str, device: str, names: str, out: str) -> None:
    """Tune every shape of the file in this process and write what was picked and how long it took after the imports."""
    entries, _ = read_entries(path, device.split(":", maxsplit=1)[0], names)
    begun = time.perf_counter()
    results = gemmtune.tune([entry.problem for entry in entries], progress=False, device=device)
    seconds = time.perf_counter() - begun
    answer = {
        "seconds": seconds,
        "picks": {entry.name: result.pick for entry, result in zip(entries, results, strict=True)},
        "speedups": {entry.name: result.speedup_over_torch for entry, result in zip(entries, results, strict=True)},
        "disturbed": {entry.name: result.disturbed for entry, result in zip(entries, results, strict=True) if result.disturbed},
        "measured": [entry.name for entry, result in zip(entries, results, strict=True) if result.source == "measured"],
    }
    Path(out).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
