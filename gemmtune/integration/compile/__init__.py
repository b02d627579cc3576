"""torch.compile: GEMMs and the pointwise nodes behind them become our choices where these are faster.

- ``backend`` is what Dynamo calls, and ``rewriting`` is the pass, with its steps in order.
- ``products`` states the GEMMs of a graph as Problems. ``epilogues`` and ``swiglu`` match the nodes behind a GEMM, ``horizontal``
  finds GEMMs of one input with adjacent weights, and ``experts`` changes the nodes around grouped products.
- ``decisions`` defines the policies that decide. ``store_policy`` is the default, by the times in ``stored_decisions``, which come
  from ``variants`` of a graph. ``estimated_joins`` decides on joined products that nobody measured.
- ``planned`` and ``planned_horizontal`` are the products that a rewritten graph calls, with their operators. ``lowering`` teaches
  them to Inductor, and ``extern`` has the functions that generated code imports.
- ``report`` keeps the decisions for ``explain``.

``report``, ``extern`` and their imports need no module of Inductor. The other modules are imported when they are used.
"""

import importlib
import sys

__all__ = ["install", "install_joins", "uninstall"]


def install(*, tune: bool = False, predict: bool = False) -> None:
    """Add our pass to every later compilation by Inductor, including ``torch.compile`` with any options.

    With ``tune`` unknown GEMMs are tuned while a graph compiles. Without it they stay torch's. With ``predict`` GEMMs of one input
    with adjacent weights get a default table for all their columns, which is verified while a graph compiles. Passes that are
    already installed stay and run first. Graphs that are already compiled do not change: ``torch._dynamo.reset()`` drops them.
    """
    importlib.import_module(".backend", __name__).install(tune=tune, predict=predict)


def install_joins() -> None:
    """Add a pass for the batch-invariant layers of one input alone. An installed pass does that too, and stays."""
    importlib.import_module(".backend", __name__).install_joins()


def uninstall() -> None:
    """Remove our pass. Other passes stay."""
    if f"{__name__}.backend" in sys.modules:
        importlib.import_module(".backend", __name__).uninstall()
