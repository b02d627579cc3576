"""The description of a GEMM as values, without computation or GPU access."""

from .epilogue import Epilogue
from .layout import Layout
from .precision import Precision, precision_of
from .problem import Problem

__all__ = ["Epilogue", "Layout", "Precision", "Problem", "precision_of"]
