"""Warnings name the user's line."""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path
from typing import Any

import gemmtune

OURS = """
import contextlib
import functools
import torch
from gemmtune.warning import warn

def plain():
    warn("text")

def deeper():
    plain()

@contextlib.contextmanager
def warning_block():
    warn("text")
    yield

def block():
    with warning_block():
        pass

class Cached:
    @functools.cached_property
    def value(self):
        warn("text")

def cached():
    Cached().value

decorated = torch.no_grad()(plain)

class Layer(torch.nn.Module):
    def forward(self):
        warn("text")

layer = Layer()
"""
"""A module of the package that warns in several ways, each with frames of others between."""


def ours() -> dict[str, Any]:
    made: dict[str, Any] = {"__name__": "gemmtune.ours"}
    exec(compile(OURS, "ours.py", "exec"), made)
    return made


def test_a_warning_names_the_users_line() -> None:
    made = ours()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for way in ("plain", "deeper", "block", "cached", "decorated", "layer"):
            made[way]()
        lines = {x.lineno for x in caught}
        thread = threading.Thread(target=made["plain"])
        thread.start()
        thread.join()
    assert [(x.filename, x.category) for x in caught[:-1]] == [(__file__, RuntimeWarning)] * 6
    assert len(lines) == 1
    assert Path(caught[-1].filename) == Path(threading.__file__), "a thread has no line of the user"


def test_a_warning_is_shown_once_for_each_line() -> None:
    made = ours()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            made["plain"]()
        made["deeper"]()
    assert [x.filename for x in caught] == [__file__] * 2


def test_no_number_of_frames_is_guessed() -> None:
    folder = Path(gemmtune.__file__).parent
    guesses = [path.name for path in folder.rglob("*.py") if re.search(r"stacklevel=(?!1\b)", path.read_text())]
    assert guesses == []
