"""The orientation of a problem in a kernel: unchanged, or with its operands swapped, since out^T = b^T @ a^T."""

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
    """Further inputs: inp if there is one, or the scales, followed by the operands of the epilogue. All are broadcast to out
    except scales of blocks and groups."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K. An operand with two elements in a byte has half the size along K."""
        return self.a.size[-2], self.b.size[-1], max(self.a.size[-1], self.b.size[-2])


def orient(problem: Problem, *, swap_ab: bool) -> Oriented:
    """Return the layouts of the problem, or of its transpose if ``swap_ab`` is set."""
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
    """Return True if the scales of both operands change along K."""
    if not problem.float8:
        return False
    return max(problem.scale_block("scale_a")[1], problem.scale_block("scale_b")[0]) < problem.k


def scales_weights(problem: Problem) -> bool:
    """Return True if weights must be scaled before multiplication: scales change along K, or zero points are subtracted."""
    if not problem.widens_b or problem.scale_b is None:
        return False
    return problem.zero_b is not None or problem.scale_block("scale_b")[0] < problem.k


def letter(layout: Layout) -> str | None:
    """Return CUTLASS's letter: ``t`` for row-major, ``n`` for column-major, None for neither. One row or column is either."""
    if layout.row_major:
        return "t"
    return "n" if layout.column_major else None
