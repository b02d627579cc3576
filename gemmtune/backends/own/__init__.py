"""The own backend: GEMMs of the user and of installed packages, offered by the declaration that the conformance suite uses.

``mylib.ops:matmul`` in the setting ``extra_choices``, or in an entry point of the group ``gemmtune.backends``, is offered as
the choice ``own:mylib.ops:matmul`` for the problems that its ``gemm_traits`` cover. An object with the methods of
``choice.Backend`` is a whole backend and enumerates choices as ours do.
"""

from .backend import BACKEND

__all__ = ["BACKEND"]
