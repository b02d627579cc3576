"""The architecture matrix: every compiled choice for an architecture, checked on any machine, and run on a GPU that can.

``problems`` lists the problems, ``inspection`` compiles choices and checks resources and instructions, and ``running`` runs a
choice on a GPU of that architecture or a newer one. ``matrix`` combines them, and ``report`` prints the result.
"""

from .inspection import Inspection, compile_and_inspect, inspect_choices
from .matrix import ARCHITECTURES, MatrixReport, Ran, matrix_choices, run_matrix
from .problems import matrix_problems
from .running import Runner, Way, how_to_run

__all__ = [
    "ARCHITECTURES", "Inspection", "MatrixReport", "Ran", "Runner", "Way", "compile_and_inspect", "how_to_run", "inspect_choices",
    "matrix_choices", "matrix_problems", "run_matrix",
]  # fmt: skip
