"""Judge of results: the selector's verification and the conformance suite apply the same criteria to every GEMM.

The judge reports findings and the caller decides what follows. A caller poisons out with ``guards.guarded_out``, or with
``guards.poison_free_memory`` if the GEMM allocates its result. It records checksums of the inputs with ``guards.Watch`` and
makes the call. Then ``Judge.find`` compares the result with an ``Expectation``, and the guards and checksums report on
memory. Nothing here waits for the device unless its docstring says so.
"""

from collections.abc import Iterator, Sequence

import torch

from ..problem import Problem
from ..problem.dtypes import dtype_info
from .bounds import Claims, epilogue_input, underflow
from .buffers import element_bits
from .compare import Chunk, Finding, is_right
from .expectation import Expectation, Part
from .propagate import Approximate, propagate, rounded
from .reference import as_batches

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
"""Number of elements compared at a time: about 20 float64 temporaries of that size exist at once."""


class Judge:
    """Comparison of results of one problem with expected values, under the arithmetic that a GEMM claims."""

    def __init__(self, problem: Problem, claims: Claims, extra: Sequence[torch.Tensor] = ()) -> None:
        self._problem = problem
        self._claims = claims
        self._extra = [as_batches(x.expand(problem.out.size)) for x in extra]

    def find(self, out: torch.Tensor, expectation: Expectation, payload: int = 0) -> Finding:
        """Return what is wrong with ``out``, which had the bits ``payload`` before the call."""
        finding = Finding(out.device, payload)
        for part in expectation.parts(self._problem, self._claims):
            self._compare(out, part, finding)
        return finding

    def whole(self, expectation: Expectation) -> Approximate | None:
        """Return all elements of the expected result with their error, float64 [B, M, N], or None if only samples are known."""
        part = next(expectation.parts(self._problem, self._claims))
        if part.region.rows is not None or part.region.cols is not None:
            return None
        problem = self._problem
        everything = slice(0, problem.batch), slice(0, problem.out.size[-2])
        if part.equal is not None:
            value = part.equal(*everything).double()
            expected = Approximate(value=value, error=torch.zeros((), dtype=value.dtype, device=value.device))
        else:
            expected = self._stored(part.sums(*everything), self._extra)
        size = (problem.batch, *problem.out.size[-2:])
        return Approximate(value=expected.value.expand(size), error=expected.error.expand(size))

    def _compare(self, out: torch.Tensor, part: Part, finding: Finding) -> None:
        region = part.region
        matrix, bits = region.of(as_batches(out)), region.of(as_batches(element_bits(out)))
        extra = [region.of(x) for x in self._extra]
        for batches, rows in _blocks(matrix.shape, out.device):
            got, held = matrix[batches, rows], bits[batches, rows]
            batch, height, width = got.shape
            chunk = Chunk(batch=batches.start, row=rows.start, region=region, shape=(batch, height, width))
            if part.equal is not None:
                expected = part.equal(batches, rows)
                got = got.to(expected.dtype)
                bad = got != expected
                if bad.device.type != "cpu" or bool(bad.any()):
                    bad &= ~(expected.isnan() & (got.isnan() | self._claims.skips_zeros))
                finding.add(chunk, bad, held, got, expected, torch.zeros_like(finding.ratio))
            else:
                stored = self._stored(part.sums(batches, rows), [x[batches, rows] for x in extra])
                self._bounded(got.double(), stored, chunk, held, finding)

    def _bounded(self, got: torch.Tensor, expected: Approximate, chunk: Chunk, bits: torch.Tensor, finding: Finding) -> None:
        value, error = expected.value, expected.error
        difference = (got - value).abs()
        ratio = torch.where((error > 0) & error.isfinite() & difference.isfinite(), difference / error, 0.0)
        if ratio.numel():
            finding.ratio = torch.maximum(finding.ratio, ratio.max())
        if got.device.type == "cpu" and bool((difference <= error).all()):
            return  # only NaN, infinities and errors need the check below
        bad = ~is_right(got, expected, self._problem.out.dtype)
        finding.add(chunk, bad & ~value.isnan() if self._claims.skips_zeros else bad, bits, got, value, error)

    def _stored(self, acc: Approximate, extra: Sequence[torch.Tensor]) -> Approximate:
        """Return f(acc) as stored in out; without an epilogue acc + u·|R| + η plus a small multiple of acc's error."""
        problem, flush = self._problem, self._claims.flush_subnormals
        info = dtype_info(problem.out.dtype)
        if problem.epilogue is None:
            own = info.unit_roundoff * (acc.value.abs() + acc.error) + underflow(info.dtype, flush=flush)
            return Approximate(value=acc.value, error=acc.error + own)
        result = propagate(
            problem.epilogue,
            acc,
            extra,
            precision=epilogue_input(problem, self._claims),
            flush=flush,
            reference_is_float64=problem.accumulator == torch.float64,
        )
        if problem.epilogue.result_dtype == info.dtype:
            return result
        return rounded(result, info.dtype, flush=flush)


def _blocks(shape: Sequence[int], device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield (batches, rows) of blocks of at most CHUNK_ELEMENTS: several whole matrices, or some rows of one."""
    batch, m, n = shape
    limit = CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "cuda"]
    if m * n <= limit:
        step = max(1, limit // max(m * n, 1))
        yield from ((slice(i, min(i + step, batch)), slice(0, m)) for i in range(0, batch, step))
        return
    step = max(1, limit // n)
    for i in range(batch):
        yield from ((slice(i, i + 1), slice(row, min(row + step, m))) for row in range(0, m, step))
