"""Checks of the result of a timed call, cheap enough for every call: exact probes, Freivalds' products, rows in full, and accuracy.

Freivalds: for random signs x, out @ x is compared with a @ (b @ x), at a fraction of a product's cost. An error in any element
shows. Rows in full show the error of each element. The root mean square of these errors shows a narrower accumulator or operand,
which the bound of the worst case allows.
"""

import dataclasses
import math
import random

import torch

from ..choice import Claims
from ..numerics.bounds import accumulation_bound, exact_limit
from ..numerics.buffers import overlapping
from ..numerics.expectation import Expectation, OneHotExpectation, Referenced
from ..numerics.judging import Judge
from ..numerics.operands import Operands
from ..numerics.probes import Probes
from ..numerics.reference import Region, as_batches, reference
from ..problem import Layout, Problem
from ..problem.dtypes import dtype_info
from .compositions import Compositions
from .mean_errors import LARGE, Trouble, expected, rough
from .turns import Turns
from .variations import impose, structure

WHOLE_MACS = 2**18
"""Multiplications up to which all of a result is compared with a reference."""
ROWS = 6
SURELY = {
    2: ("transpose", "batch"), 3: ("symmetric",), 4: ("permutation a", "permutation b"), 5: ("itself a+signs b",),
    6: ("signs a+itself b",), 7: ("diagonal a", "diagonal b"), 8: ("identity",),
}  # fmt: skip
"""Operands of a problem, counted from 1, that are special, by kinds that few sizes allow: of these sizes few are drawn."""
FIRST = ("whole", "zero", "")
"""Structure of the first operands: a GEMM may test itself with these, or look at them, and trust what it found for all others."""
FAR_AT = 2
"""Operands of bfloat16, counted from 1, whose numbers float16 does not hold: few shapes have this type."""
SCALARS, NEAR_ONE = (0.25, 4.0), (5, 10)
"""Range of alpha and beta, and negative powers of two by which others are less than one, as those of moving averages are."""
UNWRITTEN = -1
"""Bits of an element that the GEMM did not write, which are those of ``untrusted.memory.POISON``."""
NO_BITS = 2**40
"""Bits of no element. torch's bfloat16 NaN has the bits of the poison, so that a written one looks the same."""
OF_SIGNS = 8.0
"""Multiple of the mean error, times the root of the columns, that a row added up with random signs may have."""
OF_OWN = 2.0**-51
"""Error of our own sums in float64, as a share of the sum of magnitudes. It shows where rows of float64 are long."""
MIXED = 2.0**-24
"""Least sum of magnitudes, relative to that of the largest numbers. Strassen's wider sums have errors where it is less."""


class Checker:
    """Maker of operands for one problem and judge of its results.

    Args:
        seed: known to nobody else.
        turns: draws that further problems go on with.
        compositions: structure of composed operands.
    """

    def __init__(
        self, problem: Problem, claims: Claims, device: torch.device, seed: int, turns: Turns | None = None,
        compositions: Compositions | None = None,
    ) -> None:  # fmt: skip
        self.problem = problem
        self._claims = claims
        self._probes = Probes(problem, device, seed=seed)
        self._extra = self._probes.extra()
        self._judge = Judge(problem, claims, self._extra)
        self._random, self._drawn = random.Random(seed), 0
        squares = {"a": self._probes.free_a and problem.m == problem.k, "b": self._probes.free_b and problem.k == problem.n}
        self._identity, self._identities = "", iter([name for name, is_square in squares.items() if is_square])
        self.turns, self._compositions = turns or Turns(self._random), compositions or Compositions(self._random)
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def plain(self) -> Operands:
        """Draw operands of random numbers."""
        return self.given(self._scaled(self._probes.random()))

    def fresh(self, *, in_turn: bool = True) -> Operands:
        """Draw operands of random numbers, of which some have the structure that operands in use have.

        Those ``in_turn`` may be special by their number.
        """
        operands = self.plain()
        if self._is_free(operands):
            self._drawn += in_turn
            a, b = operands.a, operands.b
            if in_turn and self._drawn == FAR_AT and a.dtype == torch.bfloat16 and a.shape != b.mT.shape:
                impose("far", a, b, self._random)
            else:
                structure(a, b, self._random, self.turns, SURELY.get(self._drawn, ()) if in_turn else ())
        return operands

    def composed(self) -> Operands:
        """Draw operands with several kinds of structure, if each number may be another one."""
        operands = self.plain()
        if self._is_free(operands):
            self._compositions.impose(operands.a, operands.b)
        return operands

    def first(self) -> Operands:
        """Draw the first operands of a shape, which are small integers for some. For others b is zero."""
        operands, kind = self.fresh(), self.turns.next(FIRST)
        if kind and self._is_free(operands) and operands.a.is_floating_point() and operands.a.element_size() > 1:
            operands.a.round_()
            operands.b.round_() if kind == "whole" else operands.b.zero_()
        return operands

    def _is_free(self, operands: Operands) -> bool:
        """Return True if each number of a and b may be another one."""
        problem = self.problem
        plain = not (problem.scales or problem.encoding or problem.widens_b or problem.sparsity is not None)
        return plain and not any(overlapping(Layout.of(x)) for x in (operands.a, operands.b))

    def given(self, operands: Operands) -> Operands:
        """Return operands with those of the epilogue, which are the same in every call."""
        return dataclasses.replace(operands, extra=self._extra)

    def _scaled(self, operands: Operands) -> Operands:
        """Return operands with other alpha and beta, of all bits of float32, where these may be any numbers."""
        draws, problem = self._random, self.problem

        def drawn(scalar: str, value: float) -> float:
            any_number = scalar == "general" and problem.dtype.is_floating_point
            numbers = draws.uniform(*SCALARS), 1 - 2.0 ** -draws.uniform(*NEAR_ONE)
            return torch.tensor(draws.choice(numbers)).item() if any_number else value

        alpha, beta = drawn(problem.alpha, operands.alpha), drawn(problem.beta, operands.beta)
        return dataclasses.replace(operands, alpha=alpha, beta=beta)

    def exact(self) -> OneHotExpectation | None:
        """Draw operands whose result is known bit by bit, or return None if the problem has none."""
        probes, makers = self._probes, []
        limit = exact_limit(self.problem, self._claims)
        if probes.free_a and probes.free_b:
            makers.append(lambda: probes.cancel(limit))
        if probes.can_measure_width:
            makers.append(lambda: probes.width(limit))
        special = not self._claims.skips_zeros
        if self._claims.input_mode == "ieee" and not self.problem.widens_b:
            if probes.free_a:
                makers.append(lambda: probes.rows_of_b(probes.random().right, special=special, in_turn=self._identity == "a"))
            if probes.free_b:
                makers.append(lambda: probes.cols_of_a(probes.random().left, special=special, in_turn=self._identity == "b"))
            self._identity = next(self._identities, "")
            if self._identity:
                return OneHotExpectation.of(makers[-2 if self._identity == "a" and probes.free_b else -1]())
        return OneHotExpectation.of(self._random.choice(makers)()) if makers else None

    def trouble(
        self, result: object, operands: Operands, expectation: Expectation | None = None, *, composed: bool = False
    ) -> Trouble | None:
        """Return what is wrong with a result, by an exact expectation or by products. None: nothing.

        Mean errors of ``composed`` operands mean nothing: equal terms are all rounded in the same direction.
        """
        layout = self.problem.out
        if not isinstance(result, torch.Tensor):
            return Trouble(text=f"returned {type(result).__name__}, expected a tensor")
        if result.shape != layout.size or result.dtype != layout.dtype:
            return Trouble(text=f"returned {result.dtype} {list(result.shape)}, expected {layout.dtype} {list(layout.size)}")
        if expectation is not None:
            return self._found(result, expectation)
        known = reference(operands, self._region())
        known = dataclasses.replace(known, magnitude=known.magnitude.clamp(min=self._least_magnitude(operands)))
        named = Referenced(name="random data", operands=operands, references=(known,))
        found = self._found(result, named) or self._freivalds(result, operands)
        if composed:
            return None if found is None or found.rough else found
        return found or rough(self.problem, self._claims, result, known, operands)

    def _found(self, result: torch.Tensor, expectation: Expectation) -> Trouble | None:
        finding = self._judge.find(result, expectation, UNWRITTEN if result.dtype != torch.bfloat16 else NO_BITS)
        bad = finding.bad_element(finding.state.tolist(), batched=self.problem.batched)
        return None if bad is None else Trouble(text=f"{expectation.name}: {bad.text()}")

    def _least_magnitude(self, operands: Operands) -> float:
        """Return the sum of magnitudes to assume where numbers are small or 0. It is 0 if no wider type can have the errors."""
        a, b = operands.left, operands.right
        narrow = all(x.is_floating_point() and 2 <= x.dtype.itemsize < 8 for x in (a, b))
        if not narrow or not (a.numel() and b.numel()):
            return 0.0
        largest = float(a.abs().max().double() * b.abs().max().double()) * abs(operands.alpha)
        return MIXED * self.problem.k * largest if math.isfinite(largest) else 0.0

    def _region(self) -> Region:
        problem = self.problem
        if problem.batch * problem.m * problem.n * problem.k <= WHOLE_MACS or problem.m <= ROWS:
            return Region()
        picked = sorted({0, problem.m - 1, *self._random.sample(range(problem.m), ROWS - 2)})
        return Region(rows=torch.tensor(picked, device=self._probes.device))

    def _freivalds(self, result: torch.Tensor, operands: Operands) -> Trouble | None:
        problem = self.problem
        if problem.epilogue is not None or problem.scales or problem.encoding:
            return None
        out, a, b = (as_batches(x).double() for x in (result, operands.left, operands.right))
        x = torch.randint(0, 2, (problem.n,), generator=self._generator, device=out.device).double() * 2 - 1
        x = x.unsqueeze(-1)
        right, most = a @ (b @ x) * operands.alpha, a.abs() @ b.abs().sum(-1, keepdim=True) * abs(operands.alpha)
        if operands.inp is not None:
            added = as_batches(operands.inp.expand(problem.out.size)).double() * operands.beta
            right, most = right + added @ x, most + added.abs().sum(-1, keepdim=True)
        most = most.clamp(min=problem.n * self._least_magnitude(operands))
        bound = accumulation_bound(problem, self._claims, alpha=operands.alpha, largest=operands.beside_subnormal)
        info = dtype_info(problem.out.dtype)
        tiny = problem.n * (bound.absolute + info.smallest_normal)
        allowed = bound.relative * most + tiny + info.unit_roundoff * (out.abs().sum(-1, keepdim=True) + bound.relative * most)
        off = (out @ x - right).abs()
        is_rough = False
        if not bool((bad := ~(off <= allowed)).any()) and (mean := expected(problem, self._claims)) is not None:
            root = out.square().mean(-1, keepdim=True).sqrt()
            typical = mean.rounding * root + mean.sums * torch.maximum(most / problem.n, root * mean.growth)
            allowed = OF_SIGNS * math.sqrt(problem.n) * typical + tiny + OF_OWN * most
            bad, size = (off > allowed) & most.isfinite(), torch.maximum(right.abs(), math.sqrt(problem.n) * root)
            is_rough = not bool((bad & (off > LARGE * size)).any())
        if not bool(bad.any()):
            return None
        batch, row = divmod(int(bad.flatten().to(torch.uint8).argmax()), problem.m)
        where = f"row {row}" + (f" of matrix {batch}" if problem.batched else "")
        error, most_error = float(off[batch, row, 0]), float(allowed[batch, row, 0])
        text = f"random signs: the sum over {where} is off by {error:.3g}, expected at most {most_error:.3g}"
        return Trouble(text=text, rough=is_rough)


def is_constant(result: object) -> bool:
    """Return True if a result tells nothing about its operands: its finite numbers are all the same, or there are none."""
    if not isinstance(result, torch.Tensor):
        return True
    known = (wide := result.double())[wide.isfinite()]
    return bool((known == known[:1]).all())
