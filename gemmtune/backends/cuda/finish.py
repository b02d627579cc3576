"""What becomes of a sum before it is stored: scalars, inp and the graph of an epilogue, as text of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...problem import Epilogue, Problem
from ...problem.problem import ScalarClass
from ...toolchain.launch import MOST_OPERANDS
from ...toolchain.render import template
from ..cpp.printer import STORAGE_TYPES, print_epilogue

__all__ = ["Finish", "finish_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """epilogue(alpha · sum + beta · inp, operands): everything that its text depends on."""

    alpha: ScalarClass = "one"
    beta: ScalarClass = "zero"
    added: bool = False
    """inp is read."""
    epilogue: Epilogue | None = None
    """The graph; of its operands only the dtypes matter."""
    operands: tuple[torch.dtype, ...] = ()
    """Of inp, where it is read, and of the epilogue's operands."""

    @property
    def fused(self) -> bool:
        """More than the bare sum is stored."""
        return self.alpha != "one" or bool(self.operands) or self.epilogue is not None

    @property
    def text(self) -> str:
        """CUDA C++: ``struct Scalars``, ``struct Reads``, and ``finished``, of one sum. It comes after the part ``pointwise``."""
        return template(__package__, "finished.cuh.jinja").render(
            operands=[STORAGE_TYPES[dtype] for dtype in self.operands],
            fused=self.fused,
            most_operands=MOST_OPERANDS,
            alpha=self.alpha,
            beta=self.beta,
            added=self.added,
            statements=self._statements(),
        )

    def _statements(self) -> list[str]:
        if self.epilogue is None:
            return ["result = acc;"]
        names = [f"x{i}" for i in range(int(self.added), len(self.operands))]
        return print_epilogue(self.epilogue, "acc", names, "result")


def finish_of(problem: Problem) -> Finish:
    """What ``problem`` asks for."""
    inp, epilogue = problem.inp_read, problem.epilogue
    extra = epilogue.operands if epilogue else ()
    return Finish(
        alpha=problem.alpha,
        beta=problem.beta if inp is not None else "zero",
        added=inp is not None,
        epilogue=epilogue,
        operands=tuple(x.dtype for x in (*((inp,) if inp is not None else ()), *extra)),
    )
