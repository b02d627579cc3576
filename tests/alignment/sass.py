"""What the compiler has made of products of warp groups, in a listing of a kernel's instructions."""

from __future__ import annotations

import re

__all__ = ["read_early"]

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
