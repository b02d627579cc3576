"""The own backend: GEMMs of the user's and of installed packages, by the declaration that the conformance suite tests them by.

``mylib.ops:matmul`` of the setting ``extra_choices``, or of an entry point of the group ``gemmtune.backends``, is offered as the
choice ``own:mylib.ops:matmul`` for the problems that its ``gemm_traits`` cover. An object with the methods of ``choice.Backend`` is
a whole backend: it is asked for choices as ours are.
"""

from .backend import BACKEND

__all__ = ["BACKEND"]
