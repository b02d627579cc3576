"""A problem as a kernel sees it: as it is, or with its operands swapped, since out^T = b^T @ a^T."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Layout, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Oriented:
    """Layouts of d[M, N] = a[M, K] @ b[K, N] in the kernel's own terms; 2-D, or 3-D with a batch dimension first."""

    swap_ab: bool
    a: Layout
    b: Layout
    out: Layout
    added: tuple[Layout, ...]
    """What is read beside a and b: inp where there is one, or the scales; then the operands of the epilogue. All are broadcast to
    out but scales of blocks and groups."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N, K. Of two operands, one may have two elements in a byte, and half the size along K."""
        return self.a.size[-2], self.b.size[-1], max(self.a.size[-1], self.b.size[-2])


def orient(problem: Problem, *, swap_ab: bool) -> Oriented:
    """The problem, or its transpose."""
    inp = problem.inp_read
    added = [inp.expanded(problem.out.size)] if inp is not None else []
    as_they_are = block_scaled(problem) or scales_weights(problem)
    added += list(problem.scales) if as_they_are else [x.expanded(problem.out.size) for x in problem.scales]
    added += [x.expanded(problem.out.size) for x in (problem.epilogue.operands if problem.epilogue else ())]
    if not swap_ab:
        return Oriented(swap_ab=False, a=problem.a, b=problem.b, out=problem.out, added=tuple(added))
    return Oriented(
        swap_ab=True,
        a=problem.b.transposed,
        b=problem.a.transposed,
        out=problem.out.transposed,
        added=tuple(x.transposed for x in added),
    )


def block_scaled(problem: Problem) -> bool:
    """Scales of both operands change along K."""
    if not problem.float8:
        return False
    return max(problem.scale_block("scale_a")[1], problem.scale_block("scale_b")[0]) < problem.k


def scales_weights(problem: Problem) -> bool:
    """Weights have to be scaled before they are multiplied: scales change along K, or zero points are subtracted."""
    if not problem.widens_b or problem.scale_b is None:
        return False
    return problem.zero_b is not None or problem.scale_block("scale_b")[0] < problem.k


def letter(layout: Layout) -> str | None:
    """CUTLASS's letter: ``t`` for row-major, ``n`` for column-major, None for neither. A single row or column is either."""
    if layout.row_major:
        return "t"
    return "n" if layout.column_major else None
