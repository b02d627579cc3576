"""torch.compile with our pass: a backend of Dynamo, and the switch that adds the pass to every use of Inductor."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options

from ...dispatch.wholes import forget_gathered
from .decisions import FixedPolicy, RewritePolicy
from .rewriting import RewriteProducts
from .store_policy import StorePolicy

OPTION = "post_grad_custom_post_pass"


def install(*, tune: bool = False, predict: bool = False, policy: RewritePolicy | None = None) -> None:
    """Install the pass as ``gemmtune.integration.compile.install`` does. A ``policy`` replaces that of the store."""
    chosen = policy or StorePolicy(tunes=tune, predicts=predict)
    setattr(inductor_config, OPTION, with_pass(getattr(inductor_config, OPTION), chosen))


def install_joins() -> None:
    """Install the pass as ``gemmtune.integration.compile.install_joins`` does."""
    if not isinstance(getattr(inductor_config, OPTION), RewriteProducts):
        install(policy=FixedPolicy("", reason="only batch-invariant layers are joined"))


def uninstall() -> None:
    """Remove the pass as ``gemmtune.integration.compile.uninstall`` does."""
    installed = getattr(inductor_config, OPTION)
    if isinstance(installed, RewriteProducts):
        setattr(inductor_config, OPTION, installed.others[0] if len(installed.others) == 1 else list(installed.others) or None)


def with_pass(installed: Any, policy: RewritePolicy) -> RewriteProducts:
    """Return our pass, after the installed passes. It replaces an earlier one of ours."""
    if isinstance(installed, RewriteProducts):
        return RewriteProducts(policy, installed.others)
    others = installed if isinstance(installed, (list, tuple)) else [] if installed is None else [installed]
    return RewriteProducts(policy, others)


def gemmtune(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile by Inductor with our pass: the backend of ``torch.compile(model, backend="gemmtune")``.

    ``mode`` and ``options`` are Inductor's.
    """
    chosen: dict[str, Any] = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    chosen = {name.replace("-", "_"): value for name, value in chosen.items()}
    installed = chosen.get(OPTION, getattr(inductor_config, OPTION))
    chosen[OPTION] = installed if isinstance(installed, RewriteProducts) else with_pass(installed, StorePolicy())
    from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415 - takes seconds, which installing the pass does not need

    compiled: Any = compile_fx(graph, example_inputs, config_patches=chosen)
    return compiled  # type: ignore[no-any-return]


def reset() -> None:
    """Drop the CUDA graphs of ``mode="reduce-overhead"``. Dynamo calls this at ``torch._dynamo.reset()``."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees  # noqa: PLC0415 - only where there is CUDA

        reset_cudagraph_trees()
    forget_gathered()


gemmtune.reset = reset  # type: ignore[attr-defined]
