"""What fresh processes do: answer from a store, or tune cold and pick the same again."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

__all__ = ["repeated_picks", "second_run"]


def second_run(path: str, device: str, names: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Answer every shape in a fresh process from the store that ``environment`` names.

    ``seconds`` is the work after the imports; ``measured`` names the shapes that the store did not answer.
    """
    answer = _answer(path, device, names, environment)
    return {"seconds": answer["seconds"], "measured": answer["measured"]}


def repeated_picks(
    path: str, device: str, names: str, environment: Mapping[str, str], count: int, keep: Callable[[dict[str, Any]], None] = id
) -> dict[str, Any]:
    """Tune cold in ``count`` fresh processes, one after the other, and see how often each shape's commonest pick was picked.

    The compiled kernels are shared; each process has a store of its own. ``speedups`` are those over torch, in each process;
    ``disturbed`` counts the processes that found the machine busy. ``keep`` gets what is known after each process, since a run of
    many may be cut short.
    """
    picks: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    speedups: dict[str, list[float | None]] = collections.defaultdict(list)
    disturbed: collections.Counter[str] = collections.Counter()
    for i in range(count):
        with tempfile.TemporaryDirectory() as folder:
            answer = _answer(path, device, names, {**environment, "GEMMTUNE_STORE_PATH": f"{folder}/store.sqlite"})
        click.echo(f"process {i + 1} of {count}: {answer['seconds']:.1f} s")
        for name, pick in answer["picks"].items():
            picks[name][str(pick)] += 1
            speedups[name].append(answer["speedups"][name])
        disturbed.update(list(answer["disturbed"]))
        told = _told(i + 1, picks, speedups, disturbed)
        keep(told)
    return told


def _told(
    count: int,
    picks: Mapping[str, collections.Counter[str]],
    speedups: Mapping[str, list[float | None]],
    disturbed: collections.Counter[str],
) -> dict[str, Any]:
    shares = {name: counts.most_common(1)[0][1] / count for name, counts in picks.items()}
    return {
        "processes": count,
        "same_pick": sum(shares.values()) / len(shares),
        "shapes": {
            name: {
                "share": shares[name],
                "picks": dict(counts),
                "speedups": speedups[name],
                "disturbed": disturbed[name],
            }
            for name, counts in picks.items()
        },
    }


def _answer(path: str, device: str, names: str, environment: Mapping[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        script = Path(__file__).with_name("answer.py")
        command = [sys.executable, str(script), "--shapes", path, "--device", device, "--names", names, "--json", str(out)]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"a fresh process failed with status {done.returncode}:\n{done.stderr}")
        answer: dict[str, Any] = json.loads(out.read_text())
    return answer
