"""The rooms (folders and modules of the package) that a first call enters, from its arguments to its launch.

Rooms that a call enters one after the other are neighbours. A pair of neighbours is a return if it leads into a room that the call
had left before. Each other pair leads to a new room, so that there are as many as further rooms.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import FrameType

import torch

import gemmtune

MOST_RETURNS = 16
"""One more than there are, for what a busy machine makes of a call."""


def rooms_of_a_first_call() -> list[str]:
    """Return the rooms in order. The import system's calls of our hook are no steps."""
    root, rooms = f"{Path(gemmtune.__file__).parent}{os.sep}", list[str]()

    def entered(frame: FrameType, event: str, _: object) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and path.startswith(root) and name not in ("<module>", "find_spec"):
            room = path.removeprefix(root).split(os.sep)[0].removesuffix(".py")
            rooms.extend([room] if rooms[-1:] != [room] else [])

    a, b, mm = torch.zeros(8, 16), torch.zeros(16, 4), gemmtune.mm  # which imports the operations
    with gemmtune.settings.patch(tune="force", backends=("aten",), native=False):
        sys.setprofile(entered)
        mm(a, b)
        sys.setprofile(None)
    return rooms


def test_a_first_call_goes_forward(tmp_path: Path) -> None:
    environment = {**os.environ, "GEMMTUNE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    rooms = json.loads(done.stdout)
    assert rooms[0] == "ops"
    assert {"dispatch", "selector", "workers", "store"} <= set(rooms)
    neighbours = {frozenset(pair) for pair in itertools.pairwise(rooms)}
    pairs = ", ".join(sorted("-".join(sorted(pair)) for pair in neighbours))
    assert len(neighbours) - len(set(rooms)) + 1 <= MOST_RETURNS, f"more returns than before; neighbours: {pairs}"


if __name__ == "__main__":
    print(json.dumps(rooms_of_a_first_call()))
