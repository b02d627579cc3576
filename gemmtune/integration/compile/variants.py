"""Ways to run a GEMM and its tail in a compiled graph, as choices that are timed against each other.

``untouched`` is torch's GEMM followed by Inductor's own kernel, ``alone`` our GEMM followed by Inductor's, ``fused`` our GEMM with
the tail in it. The first two are compiled by Inductor as it compiles them in a model.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from ... import settings as settings_module
from ...choice import Choice, Kernel, Scalars, Tensors
from ...dispatch.ready import plan_for
from ...operators.schema import OPERATORS
from ...problem import Layout, Problem
from ...problem.epilogue import evaluate
from ...problem.grouped_compositions import gated_columns
from ...problem.operations import DENSE_OPS
from .judging import Always
from .planned_join import gathered_roles
from .rewriting import RewriteProducts

BACKEND_NAME = "compiled"
Variant = Literal["untouched", "alone", "fused", "apart", "joined"]
_EXAMPLES = {"zero": 0.0, "one": 1.0, "general": 0.5}


@dataclass(frozen=True, kw_only=True)
class Way(Choice):
    """One of the ways to do ``problem`` in a compiled graph.

    ``runs`` are the content hashes of our choices that it runs, whose change makes its time worthless. ``overlapping``: kernels of
    Inductor begin while the one before ends.
    """

    variant: Variant
    runs: tuple[str, ...]
    overlapping: bool = False

    @property
    def content_hash(self) -> str:
        """A hash over the way and what it runs."""
        return hashlib.sha256(json.dumps([self.name, self.runs, self.overlapping]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class JoinedVariant(Way):
    """``problem`` as one product, or ``apart``: as the ``parts`` of which it consists, each by its own pick.

    The time of one product includes gathering the scales that it needs.
    """

    parts: tuple[Problem, ...]

    def bind(self, loaded: None) -> Kernel:  # noqa: ARG002 - nothing is loaded apart
        """The kernels. Apart, results go into memory of their own, as in a graph, and ``out`` is left as it is."""
        index = torch.cuda.current_device() if self.problem.device_type == "cuda" else -1
        with settings_module.patch(tune="never"):
            if self.variant == "joined":
                return self._gathering(plan_for(self.problem, index).kernel)
            kernels = [plan_for(part, index).kernel for part in self.parts]
        device = torch.device(self.problem.device_type)
        outs = [_example(part.out, device) for part in self.parts]
        ends = tuple(itertools.accumulate(part.n for part in self.parts))

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
            a, *wholes = tensors
            for kernel, own, end in zip(kernels, outs, ends, strict=True):
                kernel.run(own, (a, *(x[..., end - own.shape[1] : end] for x in wholes)), scalars)

        return Kernel(run=run)

    def _gathering(self, kernel: Kernel) -> Kernel:
        """Return the kernel behind the copies that a graph makes of scales, as ``planned_join`` does."""
        gathered, widths = gathered_roles(self.problem), [part.n for part in self.parts]
        if not gathered:
            return kernel
        roles = [role for role, _ in self.problem.operands]

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            pairs = zip(roles, tensors, strict=True)
            kernel.run(
                out, tuple(torch.cat(torch.split(x, widths, -1), -1) if role in gathered else x for role, x in pairs), scalars
            )

        return Kernel(run=run)


@dataclass(frozen=True, kw_only=True)
class CompiledVariant(Way):
    """One of the ways to do ``problem``, of which ``alone`` is the GEMM without the tail."""

    alone: Problem

    def bind(self, loaded: None) -> Kernel:  # noqa: ARG002 - nothing is loaded apart
        """The kernel, compiled now unless Inductor has it in its cache."""
        problem = self.problem
        index = torch.cuda.current_device() if problem.device_type == "cuda" else -1
        if self.variant == "fused":
            with settings_module.patch(tune="never"):
                return plan_for(problem, index).kernel
        compiled = self._compiled(into_out=index >= 0)

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
            if index >= 0:
                compiled([out, *tensors])
            else:
                out.copy_(compiled([*tensors])[0])

        def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:  # noqa: ARG001
            result: torch.Tensor = compiled([*tensors])[0]
            return result

        return Kernel(run=run, run_new=None if index >= 0 else run_new)

    def _compiled(self, *, into_out: bool) -> Any:
        """What Inductor makes of it, as a function of a list of tensors; with ``into_out`` the first is written into."""
        from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415 - seconds, of which installing the pass needs none
        from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

        problem, device = self.problem, torch.device(self.problem.device_type)
        count = len(problem.operands)

        def way(out: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
            result = self._gemm(tensors[:count])
            if problem.gated and not self.alone.gated:
                result = gated_columns(result, problem.gated)
            if problem.epilogue is not None:
                result = evaluate(problem.epilogue, result, tensors[count:])
            result = result.to(problem.out.dtype)
            return (result if out is None else out.copy_(result),)

        layouts = [layout for _, layout in problem.operands] + [*(problem.epilogue.operands if problem.epilogue else ())]
        with unset_fake_temporarily(), FakeTensorMode():
            inputs = [_example(layout, device) for layout in ([problem.out] if into_out else []) + layouts]
            function = way if into_out else functools.partial(way, None)
            graph = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
        graph_pass = RewriteProducts(Always("alone")) if self.variant == "alone" else None
        options = {
            "post_grad_custom_post_pass": graph_pass,
            "triton.cudagraphs": False,
            "triton.enable_pdl": self.overlapping,
        }
        with inductor_config.patch(options):
            return compile_fx_inner(graph, inputs, is_inference=True)

    def _gemm(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The GEMM as it stands in a graph: by torch's operations, or by the operator that only we have."""
        alone = self.alone
        row = alone.operation
        given = dict(zip((role for role, _ in alone.operands), tensors, strict=True))
        numbers: dict[str, Any] = {name: _EXAMPLES[getattr(alone, name)] for name in row.scalars}
        numbers |= {name: getattr(alone, name) for name in row.options}
        if self.variant == "untouched" or row.name in DENSE_OPS:
            result = row.compose(*(given.get(operand.role) for operand in row.operands), **numbers)
        else:
            operator = OPERATORS[row.name]
            numbers |= {"out_dtype": alone.out.dtype} if operator.names_result else {}
            result = operator.overload(*(given.get(name) for name in operator.tensors), **numbers)
        return result.to(alone.out.dtype)


def _example(layout: Layout, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=device)
