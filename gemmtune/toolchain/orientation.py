"""The orientation of a problem in a kernel: unchanged, or with its operands swapped, since out^T = b^T @ a^T."""

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
    """Further inputs, broadcast to out: inp if there is one, or the scales, followed by the operands of the epilogue."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.a.size[-2], self.b.size[-1], self.a.size[-1]


def orient(problem: Problem, *, swap_ab: bool) -> Oriented:
    """Return the layouts of the problem, or of its transpose if ``swap_ab`` is set. Scales pass ``why_not_scaled_sums``."""
    inp = problem.inp_read
    operands = problem.epilogue.operands if problem.epilogue else ()
    added = [x.expanded(problem.out.size) for x in (*((inp,) if inp is not None else ()), *problem.scales, *operands)]
    if not swap_ab:
        return Oriented(swap_ab=False, a=problem.a, b=problem.b, out=problem.out, added=tuple(added))
    return Oriented(
        swap_ab=True,
        a=problem.b.transposed,
        b=problem.a.transposed,
        out=problem.out.transposed,
        added=tuple(x.transposed for x in added),
    )


def why_not_scaled_sums(problem: Problem) -> str | None:
    """Return why the scales cannot multiply sums, or None. They have one value for each line along K, or one for all."""
    for name in ("scale_a", "scale_b"):
        if getattr(problem, name) is None:
            continue
        rows, cols = problem.scale_block(name)
        line, along_k, across, extent = ("row", cols, rows, problem.m) if name == "scale_a" else ("column", rows, cols, problem.n)
        if along_k < problem.k or 1 < across < extent:
            return f"{name} is for {rows}x{cols} elements, expected one per whole {line} or one for all, which scales sums"
    return None


def letter(layout: Layout) -> str | None:
    """Return CUTLASS's letter: ``t`` for row-major, ``n`` for column-major, None for neither. One row or column is either."""
    if layout.row_major:
        return "t"
    return "n" if layout.column_major else None
