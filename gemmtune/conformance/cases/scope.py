"""The scope of a run: a GEMM's traits, a device and a level, narrowed by options. Cases are enumerated within a scope."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from ...declaration.labels import DTYPES, FLOAT8, FLOATS, OPS, ROWS
from ...declaration.layouts import KINDS, PLAIN
from ...declaration.traits import Traits
from .case import Case
from .forms import Form, forms_of
from .statement import problem_of


class Level(IntEnum):
    """Amount of testing: about 1, 5 and 30 minutes on a GPU."""

    SMOKE = 1
    FULL = 2
    EXHAUSTIVE = 3

    @classmethod
    def of(cls, text: str) -> "Level":
        """Return the level of a word such as ``smoke``."""
        return cls[text.upper()]


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Traits of a GEMM with the options of a run. Empty ``ops``, ``dtypes`` and ``layouts`` select everything declared."""

    traits: Traits
    device_type: str = "cpu"
    level: Level = Level.SMOKE
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()

    @functools.cached_property
    def tested_ops(self) -> tuple[str, ...]:
        """Operations to test, in the order of ``labels.OPS``."""
        declared = self.traits.ops or ("mm",)
        return tuple(op for op in OPS if op in declared and (not self.ops or op in self.ops))

    def tested_dtypes(self, op: str) -> tuple[str, ...]:
        """Return the input dtypes to test for one operation. Without declared dtypes these are its default ones."""
        declared = self.traits.dtypes
        row = ROWS[op]
        legal = tuple(name for name, dtype in DTYPES.items() if dtype in row.operands[0].dtypes)
        if row.integers or (row.float8 and declared is None):
            offered = legal
        elif row.float8:
            offered = tuple(name for name in declared or () if name in legal) or FLOAT8[:1]
        else:
            offered = declared if declared is not None else (*FLOATS, "int8")
        kept = [name for name in offered if name in legal and (not self.dtypes or name in self.dtypes)]
        return tuple(name for name in kept if name != "tf32" or self.device_type == "cuda")

    @functools.cached_property
    def tested_kinds(self) -> tuple[str, ...]:
        """Kinds of strides to test. Row-major is always among them."""
        declared = self.traits.layouts if self.traits.layouts is not None else tuple(KINDS)
        return tuple(k for k in KINDS if k == PLAIN or (k in declared and (not self.layouts or k in self.layouts)))

    @functools.cached_property
    def _tested(self) -> Mapping[str, tuple[str, ...]]:
        """Dtypes to test, for each operation."""
        return {op: self.tested_dtypes(op) for op in self.tested_ops}

    def allows(self, case: Case) -> bool:
        """Return True if the traits and options admit a case: its operation, dtype, strides, sizes, alignment and scalars."""
        traits = self.traits
        sizes = (case.m, case.n, case.k)
        if case.dtype not in self._tested.get(case.op, ()) or not case.kinds.issubset(self.tested_kinds):
            return False
        if any(s % by or s < least for s, by, least in zip(sizes, traits.multiples, traits.least, strict=True)):
            return False
        if any(k % traits.multiples[2] or k < traits.least[2] for k in case.summed):
            return False
        if case.sparsity is not None and traits.blocks is not None and case.sparsity.sides not in traits.blocks:
            return False
        if case.out and not traits.out:
            return False
        if case.k % case.step_of_k or Form.of(case) not in forms_of(case.op, traits):
            return False
        undeclared = [name for name in ("alpha", "beta") if getattr(case, name) != "one" and not getattr(traits, name)]
        if case.added and (case.bias not in traits.bias or undeclared):
            return False
        if traits.min_alignment <= case.b_dtype.itemsize:  # b is never wider than a
            return True
        problem = problem_of(case, self.device_type)
        layouts = [x for x in (problem.a, None if case.row.sparse else problem.b, problem.c, problem.d) if x is not None]
        return all(x.alignment * x.dtype.itemsize >= min(traits.min_alignment, 16) for x in layouts)

    def may_refuse(self, case: Case) -> bool:
        """Return True if an allowed case has something undeclared, which the GEMM may refuse with an error."""
        traits = self.traits
        declared = {PLAIN, "offset"} if traits.min_alignment > 1 else {PLAIN}
        undeclared = traits.dtypes is None or (traits.layouts is None and not case.kinds <= declared)
        undeclared = undeclared or (case.row.sparse and traits.blocks is None)
        return undeclared or (case.empty and not traits.empty)
