"""What the compiler has made of products of warp groups, in a listing of a kernel's instructions."""

from __future__ import annotations

import re

__all__ = ["read_early", "touched_on_their_way"]

PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\S* R(\d+),")
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def read_early(code: str) -> list[str]:
    """What is done with sums between the last product of warp groups and the wait for all products, for each such wait.

    Instructions are taken in the order of the listing; registers that any product before that wait adds to are sums.
    """
    found: list[str] = []
    sums: set[int] = set()
    since: list[str] = []
    for line in (line.strip() for line in re.sub(r"/\*.*?\*/", "", code).splitlines()):
        if product := PRODUCT.search(line):
            sums |= set(range(int(product[2]), int(product[2]) + int(product[1]) // 2))
            since = []
        elif WAIT in line:
            found += [line for line in since if any(int(x) in sums for x in re.findall(r"\bR(\d+)", line))]
            sums, since = set(), []
        elif sums:
            since.append(line)
    return found


def touched_on_their_way(code: str) -> list[str]:
    """What is done with sums, or with registers that are multiplied, while their products are on their way.

    Instructions are taken in the order of the listing. The last product of a group is marked; a wait leaves the youngest groups.
    """
    found: list[str] = []
    groups: list[set[int]] = []
    own: set[int] = set()
    for line in (line.strip() for line in re.sub(r"/\*.*?\*/", "", code).splitlines()):
        if product := PRODUCT.search(line):
            sums, *factors = (int(x) for x in re.findall(r"\bR(\d+)", line))
            own |= set(range(sums, sums + int(product[1]) // 2))
            own |= {x + i for x in factors if x != sums for i in range(4)}
            if "gsb0" in line:
                groups, own = [*groups, own], set()
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d+)", line):
            groups = groups[max(len(groups) - int(wait[1], 16), 0) :]
        elif any(int(x) in group for x in re.findall(r"\bR(\d+)", line) for group in (*groups, own)):
            found.append(line)
    return found
