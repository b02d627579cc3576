"""Where a kernel spills: registers that go through memory in the loop that multiplies cost time, elsewhere hardly any."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["AMDGCN", "SASS", "Assembly", "spilled_share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """How to read one assembly language: regular expressions for a line.

    ``place`` finds what a branch may name (an address, a label) in its first group, ``instruction`` an instruction, ``target`` the
    place to which it branches.
    """

    place: re.Pattern[str]
    instruction: re.Pattern[str]
    target: re.Pattern[str]
    multiplies: re.Pattern[str]
    spills: re.Pattern[str]


SASS = Assembly(
    place=re.compile(r"^\s*/\*([0-9a-f]{4,})\*/"),
    instruction=re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+\S"),
    target=re.compile(r"\bBRA\b[^;]*?\b0x([0-9a-f]+)"),
    multiplies=re.compile(r"\b(?:[HDIQ]MMA|[HIQ]GMMA|UTC\w*MMA|[FDH]FMA2?)\b"),
    spills=re.compile(r"\b(?:LDL|STL)\b"),
)
"""What ``cuobjdump -sass`` prints."""

AMDGCN = Assembly(
    place=re.compile(r"^(\.\w+):"),
    instruction=re.compile(r"^\s+[a-z]\w+"),
    target=re.compile(r"^\s+s_c?branch\w*\s+(\.\w+)"),
    multiplies=re.compile(r"^\s+v_(?:mfma|fma|fmac|pk_fma)_"),
    spills=re.compile(r"^\s+scratch_(?:load|store)_"),
)
"""LLVM's assembly text for AMD GPUs."""


def spilled_share(text: str, assembly: Assembly) -> float:
    """Share of the instructions of a loop that multiplies which load or store spilled registers; the largest if there are
    several loops, that of the whole kernel if nothing multiplies in a loop."""
    lines = text.splitlines()
    loops = [lines[first : last + 1] for first, last in _loops(lines, assembly)]
    multiplying = [loop for loop in loops if any(assembly.multiplies.search(line) for line in loop)]
    return max(_share(loop, assembly) for loop in multiplying or [lines])


def _loops(lines: list[str], assembly: Assembly) -> Iterator[tuple[int, int]]:
    """First and last line of each loop: what a branch jumps back over."""
    places: dict[str, int] = {}
    for i, line in enumerate(lines):
        if place := assembly.place.match(line):
            places[place[1].lstrip("0")] = i
        target = assembly.target.search(line)
        if target and target[1].lstrip("0") in places:
            yield places[target[1].lstrip("0")], i


def _share(lines: list[str], assembly: Assembly) -> float:
    instructions = [line for line in lines if assembly.instruction.match(line)]
    return sum(bool(assembly.spills.search(line)) for line in instructions) / max(len(instructions), 1)
