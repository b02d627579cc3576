"""The sizes that the suite tries: at the edges of tiles, odd, and long along K."""

from __future__ import annotations

from .scope import Level, Scope

__all__ = ["EDGES", "fitting", "plain_pairs", "shapes"]

EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257)
"""One below, at and one above the sizes of tiles."""

_SHAPES: dict[Level, tuple[tuple[int, int, int], ...]] = {
    Level.SMOKE: ((1, 1, 1), (17, 33, 65), (64, 64, 64), (127, 96, 129), (128, 257, 40), (1, 256, 300), (48, 56, 1024)),
    Level.FULL: (
        (3, 7, 2),
        (16, 8, 16),
        (33, 129, 257),
        (255, 65, 63),
        (256, 256, 256),
        (8, 16, 4096),
        (300, 1, 77),
        (130, 514, 511),
    ),
    Level.EXHAUSTIVE: ((512, 640, 768), (1, 4096, 4096), (16, 1000, 5000), (1000, 1001, 999), (2, 3, 65536)),
}


def shapes(scope: Scope) -> list[tuple[int, int, int]]:
    """(M, N, K) of the scope's level and those below it, moved to what the traits allow."""
    wanted = [shape for level in Level if level <= scope.level for shape in _SHAPES[level]]
    return list(dict.fromkeys(fitting(scope, *shape) for shape in wanted))


def fitting(scope: Scope, m: int, n: int, k: int) -> tuple[int, int, int]:
    """The nearest sizes, not smaller, that the traits allow."""
    traits = scope.traits
    sizes = (-(-max(s, least) // by) * by for s, by, least in zip((m, n, k), traits.multiples, traits.least, strict=True))
    return tuple(sizes)  # type: ignore[return-value]


def plain_pairs(scope: Scope) -> tuple[tuple[str, str], ...]:
    """The pairs of plain row- and column-major strides of a and b that are tested, row-major alone where no other is allowed."""
    names = tuple(name for name in ("row", "col") if name in scope.tested_kinds)
    return tuple((a, b) for a in names for b in names)
