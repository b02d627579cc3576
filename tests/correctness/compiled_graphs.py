"""Small models to compile in tests, and a backend of torch.compile that rewrites graphs without generating code."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from gemmtune import settings
from gemmtune.integration.compile import rewriting
from gemmtune.integration.compile.decisions import FixedPolicy, RewritePolicy
from gemmtune.integration.compile.report import GemmDecision, Graph


class Mlp(nn.Module):
    """Two Linears with gelu in between."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A transformer block: RMSNorm, attention, residuals and SwiGLU."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rewriting_backend(policy: RewritePolicy) -> Callable[..., Any]:
    """Return a backend that decomposes and rewrites as Inductor with our pass does, and runs the graph without lowering."""

    def compiled(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        rewriting.RewriteProducts(policy)(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiled, bw_compiler=compiled, decompositions=select_decomp_table())


@contextlib.contextmanager
def decided() -> Iterator[list[GemmDecision]]:
    """Yield the decisions of the block. Rewritten products run by torch, without the store."""
    made: list[GemmDecision] = []
    keep = rewriting.keep

    def noted(graph: Graph) -> None:
        made.extend(graph.decisions)
        keep(graph)

    torch._dynamo.reset()
    try:
        no_cache = torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False)
        with settings.patch(tune="never", backends=("aten",)), no_cache[0], no_cache[1], patch.object(rewriting, "keep", noted):
            yield made
    finally:
        torch._dynamo.reset()


def outputs_and_gradients(model: Callable[..., Any], parameters: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result of a call, and the gradients of its input and of the parameters."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    found = torch.autograd.grad(y.float().square().mean(), [x, *parameters])
    return [y.detach(), *found]


def assert_as_good(got: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """Check that each error against float64 is at most twice that of eager torch plus four roundings."""
    for ours, theirs, truth in zip(got, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        scale = float(truth.abs().max())
        bound = 2 * float((theirs.double() - truth).abs().max()) + 4 * torch.finfo(ours.dtype).eps * scale
        assert float((ours.double() - truth).abs().max()) <= bound


def in_float64(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float64."""
    return copy.deepcopy(model).double()


__all__ = [
    "Block",
    "FixedPolicy",
    "Mlp",
    "assert_as_good",
    "decided",
    "in_float64",
    "outputs_and_gradients",
    "rewriting_backend",
]
