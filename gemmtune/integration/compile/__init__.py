"""torch.compile: GEMMs with the pointwise nodes behind them become our choices where these are faster.

``backend`` is what Dynamo calls; ``rewriting`` the pass, which goes node by node through ``products`` (which nodes are GEMMs),
``tails`` (what is behind them), ``joins`` (which may be one), a judge (``judging``, ``verdicts``, ``knowledge``, ``variants``) and
``planned`` and ``planned_join`` (what is called instead, which ``lowering`` teaches Inductor). ``experts`` changes what is around
grouped products. ``report`` keeps what was decided. ``library`` defines operators, and ``extern`` has what generated code imports.
``report``, ``extern`` and what they import need no module of Inductor; all else is imported when it is used.
"""

from __future__ import annotations

import importlib

__all__ = ["install", "uninstall"]


def install(*, tune: bool = False) -> None:
    """Let Inductor ask us about every GEMM that it compiles from now on, in ``torch.compile`` with whatever options.

    With ``tune`` what the store does not know is tuned while a graph compiles; else it is left to torch. Passes that are installed
    already stay and run first. Graphs that were compiled before stay as they are: ``torch._dynamo.reset()`` drops them.
    """
    importlib.import_module(".backend", __name__).install(tune=tune)


def uninstall() -> None:
    """Take back what ``install`` did."""
    importlib.import_module(".backend", __name__).uninstall()
