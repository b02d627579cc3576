"""Sizes that a GEMM may treat in a way of their own: a model's inputs, numbers that its source names, sizes of benchmarks."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..conformance.cases.case import Case
from ..declaration.labels import DTYPES
from ..untrusted.turns import Turns

MOST_MACS, MOST_ON_CPU, MOST_ON_GPU = 2**36, 2**26, 2**28
"""Largest number of multiplications, and of elements of the result, of a model's own inputs. Drawn matrices have no more either."""
NUMBER = re.compile(r"(?<![\w.])(?:(?:1 ?<<|2 ?\*\*) ?)?\d{1,5}(?![\w.])")
"""Numbers, powers of two among them."""
COMPARED = re.compile(r"[=!<>]=|%|\bin\b|(?<!<)<(?!<)|(?<![->])>(?!>)")
"""Lines that compare something."""
SIZES, MORE = range(2, 2**15), 4
"""Numbers that may be sizes, and how often those count that the source compares with something."""
FIRST, NEIGHBOURS, MOST_TRIES = 2, 3, 8
BESIDE = 9, 40
"""Range of the other sides of a matrix of which one has a size that the source names."""
USUAL = 1100, 1500
"""Range of sides whose product with a third such side needs more than 31 bits."""
EQUAL, FEW = (256, 640), (2, 32)
"""Ranges of two equal sides of a shape, and of its third one."""
TILE, TAILS = 64, (("1", "2", "3", "any"), ("1", "any", "-1", "any"), ("any", "1", "-1", "any"))
"""Size of a tile, or a multiple of it, and elements of the last tile of M, N and K, which shapes have in turn."""
MOST_FILES, MOST_CHARS = 50, 2**20


def of_inputs(inputs: object, device_type: str) -> Case | None:
    """Return the product of a model's inputs. None if they are too large, or not two row-major matrices that can be multiplied."""
    match inputs:
        case [[[*batch, int(m), int(k)], str(dtype)], [[*others, int(rows), int(n)], str(other)]]:
            known = dtype == other and dtype in DTYPES and batch == others and rows == k and len(batch) < 2
        case _:
            return None
    count = batch[0] if batch else 1
    if not known or not isinstance(count, int) or min(count, m, n, k) < 1:
        return None
    if count * m * n * k > MOST_MACS or count * m * n > (MOST_ON_CPU if device_type == "cpu" else MOST_ON_GPU):
        return None
    return Case(property_name="bound", op="bmm" if batch else "mm", dtype=dtype, m=m, n=n, k=k, batch=count)


def dtype_of(inputs: object) -> tuple[str, ...]:
    """Return the dtype of a model's inputs, or none if they have several. It declares nothing: the model may refuse other sizes."""
    given = {x[1] for x in inputs if isinstance(x, list) and len(x) == 2} if isinstance(inputs, list) else set()
    return tuple(dtype for dtype in given if len(given) == 1 and dtype in DTYPES)


def with_tails(sides: Sequence[int], turns: Turns) -> list[int]:
    """Return M, N and K a little changed: a few elements more or less than whole tiles, if they have tiles."""
    if min(sides) <= 2 * TILE:
        return [*sides]
    tails = zip(sides, map(turns.next, TAILS), strict=True)
    return [size if tail == "any" else size // TILE * TILE + int(tail) for size, tail in tails]


def source_in(roots: Sequence[str]) -> str:
    """Return the text of the files of a GEMM.

    It is called before the GEMM is imported, which could replace its files by others that never end.
    """
    files = [file for root in map(Path, roots) for file in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    return "\n".join(map(_text, files[:MOST_FILES]))


def named_in(source: str) -> list[int]:
    """Return the numbers in the source of a GEMM that may be sizes, in the order of the text."""
    found: list[int] = []
    for line in source.splitlines():
        sizes = [size for text in NUMBER.findall(line) if (size := _value(text)) in SIZES]
        found += sizes * (MORE if COMPARED.search(line) else 1)
    return found


def _text(file: Path) -> str:
    """Return the begin of a file. "" if it cannot be read: the import of the GEMM will say so."""
    if not file.is_file():
        return ""
    try:
        with file.open(encoding="utf-8", errors="replace") as source:
            return source.read(MOST_CHARS)
    except OSError:
        return ""


def _value(text: str) -> int:
    """Return the value of a number, or of a power of two such as ``1 << 10``."""
    exponent = re.split(r"<<|\*\*", text)
    return int(text) if len(exponent) == 1 else 2 ** min(int(exponent[1]), 64)


def usual(macs: int, rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """Yield sizes as benchmarks have them, of at most ``macs`` multiplications: squares, few rows, multiples of 256, large ones.

    Few rows or columns have 10 million elements or more beside them: large operands may be treated in a way of their own.
    """
    side = TILE * rng.randint(11, 20) + rng.choice((1, 2, 3))
    multiples = (256 * rng.randint(3, 5), 256 * rng.randint(3, 5), 256 * rng.randint(3, 5))
    few, many, deep = rng.randint(1, 4), rng.randint(2500, 4000), TILE * rng.randint(64, 93)
    for m, n, k in ((1024, 1024, 1024), (few, many, deep), (many, few, deep), (side, side, side), multiples, (2048, 1024, 1024)):
        if _fits(m, n, k, macs):
            yield m, n, k


def extreme(macs: int, rng: random.Random) -> Iterator[tuple[int, int, int, int]]:
    """Yield batches with sizes of which one is far larger than the others, in an order that is drawn.

    A side, or a batch, may have more elements than 16 bits count, or a result more than a float32. Decoding has long sums, and a
    router of experts few columns. A long sum of several rows and columns may be split in parts that it is no multiple of.
    """
    few, more, long = rng.randint(1, 4), rng.randint(5, 12), rng.randint(2**16 + 1, 2**16 + 2**12)
    sides = [(1, few, 8 * more, 4096 * rng.randint(3, 7)), (1, 64 * rng.randint(80, 256), few, 24 * more)]
    sides += [(1, *x) for x in ((long, few, more), (few, long, more), (few, more, long))]
    sides += [(rng.randint(2**8 + 1, 2**11), few, more, 2 * few), (long, few, few + 1, 2)]
    sides += [(1, wide := rng.randint(2**12 + 1, 2**12 + 2**6), wide, 2)]
    sides += [(1, rng.randint(48, 72), rng.randint(48, 72), 4 * rng.randint(2**10, 3 * 2**10) + rng.randint(1, 3))]
    for batch, m, n, k in rng.sample(sides, len(sides)):
        if _fits(m, n, k, macs):
            yield batch, m, n, k


def past_32_bits(rng: random.Random) -> tuple[int, int, int]:
    """Return sizes of which each is usual, and whose multiplications a signed number of 32 bits does not count."""
    m, n = rng.randint(*USUAL), rng.randint(*USUAL)
    return m, n, 2**31 // (m * n) + rng.randint(1, TILE)


def thin_or_square(rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """Yield sizes with one side of 1, which may need no GEMM, then those with two equal sides, as weights of projections have."""
    side = rng.randint(*EQUAL)
    for m, n, k in ((1, rng.randint(*BESIDE), rng.randint(*BESIDE)), (rng.randint(*FEW), side, side)):
        yield from ((m, n, k), (n, k, m), (k, m, n))


def in_turns(numbers: Sequence[int], macs: int, rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """Yield the first sizes of a source that names ``numbers``, then its others and usual ones in turn."""
    of_source = drawn(numbers, macs, rng)
    yield from itertools.islice(of_source, FIRST)
    yield from (sides for pair in itertools.zip_longest(of_source, usual(macs, rng)) for sides in pair if sides is not None)


def drawn(numbers: Sequence[int], macs: int, rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """Yield M, N and K of at most ``macs`` multiplications: one number for all, or numbers that the source names together.

    Cubes of the numbers that stand most often, as those do that are compared with sizes, come first. No matrix has more than
    ``MOST_ON_CPU`` elements: one of 2 and 31337 would have four gigabytes.
    """
    seen: set[tuple[int, int, int]] = set()
    tries = 0
    for number, _ in Counter(x for x in numbers if x**3 <= macs).most_common(FIRST):
        seen.add(cube := (number, number, number))
        yield cube
    for number, _ in Counter(numbers).most_common(FIRST):  # as one side alone, K first: it is what blocks and loops divide
        one, other = rng.randint(*BESIDE), rng.randint(*BESIDE)
        yield from ((one, other, number), (one, number, other), (number, one, other))
    while numbers and tries < MOST_TRIES:
        at = rng.randrange(len(numbers))
        near = numbers[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1]
        following = [*numbers[at : at + 3], *near][:3]
        around = numbers[at] + rng.choice((0, 0, 1, -1, numbers[at]))
        ways = [[around] * 3, rng.sample(following, len(following)), [rng.choice(near) for _ in range(3)]]
        m, n, k = (*rng.choice(ways), numbers[at], numbers[at])[:3]
        tries += 1
        if (m, n, k) not in seen and _fits(m, n, k, macs):
            seen.add((m, n, k))
            tries = 0
            yield m, n, k


def _fits(m: int, n: int, k: int, macs: int) -> bool:
    """Return whether these are at most ``macs`` multiplications, and no matrix is too large for copies of it in float64."""
    return m * n * k <= macs and max(m * n, n * k, m * k) <= MOST_ON_CPU
