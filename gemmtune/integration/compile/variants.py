"""Variants of a GEMM and its epilogue in a compiled graph, as choices that are timed against each other.

- ``untouched``: torch's GEMM, then Inductor's kernel for the epilogue. Inductor compiles this and ``alone`` as it does in a model.
- ``alone``: our GEMM, then Inductor's kernel. ``fused``: our GEMM with the epilogue in it.
- ``joined``: one product of adjacent weights. ``apart``: the separate products.
"""

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
from .decisions import FixedPolicy
from .rewriting import RewriteProducts

BACKEND_NAME = "compiled"
VariantName = Literal["untouched", "alone", "fused", "apart", "joined"]
_EXAMPLES = {"zero": 0.0, "one": 1.0, "general": 0.5}
"""A scalar of each class."""


@dataclass(frozen=True, kw_only=True)
class GraphVariant(Choice):
    """A variant of ``problem`` in a compiled graph.

    ``runs`` are the content hashes of our choices that it runs. A stored time counts only as long as they are the same.
    ``overlapping`` means that Inductor's kernels begin while the previous kernel ends.
    """

    variant: VariantName
    runs: tuple[str, ...]
    overlapping: bool = False

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(json.dumps([self.name, self.runs, self.overlapping]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class HorizontalVariant(GraphVariant):
    """``problem`` as one product (``joined``), or as its separate ``parts`` by their own picks (``apart``)."""

    parts: tuple[Problem, ...]

    def bind(self, loaded: None) -> Kernel:  # noqa: ARG002 - there is nothing to load
        """Return the kernel. ``apart`` writes into separate memory, as in a graph, and does not touch ``out``."""
        index = torch.cuda.current_device() if self.problem.device_type == "cuda" else -1
        with settings_module.use(settings_module.current().never_tuning):
            if self.variant == "joined":
                return plan_for(self.problem, index).kernel
            kernels = [plan_for(part, index).kernel for part in self.parts]
        device = torch.device(self.problem.device_type)
        outs = [_example(part.out, device) for part in self.parts]
        ends = tuple(itertools.accumulate(part.n for part in self.parts))

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
            a, *wholes = tensors
            for kernel, own, end in zip(kernels, outs, ends, strict=True):
                kernel.run(own, (a, *(x[..., end - own.shape[1] : end] for x in wholes)), scalars)

        return Kernel(run=run)


@dataclass(frozen=True, kw_only=True)
class CompiledVariant(GraphVariant):
    """A variant of ``problem``. ``alone`` is its GEMM without the epilogue."""

    alone: Problem

    def bind(self, loaded: None) -> Kernel:  # noqa: ARG002 - there is nothing to load
        problem = self.problem
        index = torch.cuda.current_device() if problem.device_type == "cuda" else -1
        if self.variant == "fused":
            with settings_module.use(settings_module.current().never_tuning):
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
        """Return Inductor's function of a list of tensors. With ``into_out`` it writes into the first of them."""
        from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415 - seconds, of which installing the pass needs none
        from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

        problem, device = self.problem, torch.device(self.problem.device_type)
        count = len(problem.operands)

        def variant(out: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
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
            function = variant if into_out else functools.partial(variant, None)
            graph = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
        graph_pass = RewriteProducts(FixedPolicy("alone")) if self.variant == "alone" else None
        options = {"post_grad_custom_post_pass": graph_pass, "triton.cudagraphs": False, "triton.enable_pdl": self.overlapping}
        with inductor_config.patch(options):
            return compile_fx_inner(graph, inputs, is_inference=True)

    def _gemm(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the GEMM as it stands in a graph: torch's operations, or gemmtune's operator where torch has none."""
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
