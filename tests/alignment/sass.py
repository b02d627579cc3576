"""What the compiler has made of products of warp groups, in a listing of a kernel's instructions."""

from __future__ import annotations

import re

__all__ = ["read_early", "touched_on_their_way"]

PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\S* R(\d+),")
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def read_early(code: str) -> list[str]:
    """What is done with sums between the last product of warp groups and the wait for all products.

    Instructions are taken in the order of the listing; registers that any product adds to are sums.
    """
    lines = [line.strip() for line in re.sub(r"/\*.*?\*/", "", code).splitlines()]
    products = [(i, found) for i, line in enumerate(lines) if (found := PRODUCT.search(line))]
    last = products[-1][0]
    end = next(i for i, line in enumerate(lines) if i > last and WAIT in line)
    sums = {register for _, found in products for register in range(int(found[2]), int(found[2]) + int(found[1]) // 2)}
    return [line for line in lines[last + 1 : end] if any(int(x) in sums for x in re.findall(r"\bR(\d+)", line))]


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
