"""Block-sparse products of torch: its sparse product, its Triton kernel with our parameters, and batched products of blocks."""

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from ...choice import Choice, Claims, Kernel, RunNew, Scalars, Tensors
from ...device import DeviceInfo
from ...numerics.block_sparse import parts, rows_of
from ...problem import Problem
from ...problem.dtypes import dtype_name
from .dense import copied, with_epilogue
from .metas import Family, Shape, starting_point

Tensor = torch.Tensor
NAME = "aten"
LEAST_BLOCK = 16
"""Least block side, a power of two, and unit of the token count for torch's kernel."""
METAS = ((64, 3, 4), (16, 3, 4), (128, 4, 8))
"""(tokens of a tile, stages, warps) that are tried with torch's kernel in addition to a table's."""
GROUP = 4


@dataclass(frozen=True, kw_only=True)
class BlocksChoice(Choice):
    """One of torch's implementations: ``way`` is ``mm``, ``triton`` with the parameters ``meta``, or ``batched``."""

    way: str
    meta: tuple[tuple[str, int], ...] = field(default=(), repr=False)

    @property
    def content_hash(self) -> str:
        """Hash of the call. The machine's fingerprint covers torch's implementation."""
        text = json.dumps([NAME, self.name, dict(self.meta), self.problem.epilogue is not None])
        return hashlib.sha256(text.encode()).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        """Return the same implementation for ``problem``, with tiles of the same number of tokens, or why it is illegal."""
        if not self.meta:
            return replace(self, problem=problem)
        meta = dict(self.meta)
        tile = self.problem.m // meta["SPLIT_N"]
        if problem.m % tile:
            return f"{self.name} takes multiples of {tile} tokens, got {problem.m}"
        meta |= {"SPLIT_N": problem.m // tile}
        reason = why_not_triton(problem) or device.why_no_smem(_shared_bytes(problem, meta))
        return reason or _choice(problem, "triton", self.claims, meta=meta)

    def bind(self, loaded: Any) -> Kernel:  # noqa: ARG002 - nothing is loaded
        make: dict[str, Callable[[Problem], RunNew]] = {"mm": _by_mm, "batched": _batched, "triton": self._by_triton}
        return with_epilogue(copied(make[self.way](self.problem)), self.problem)

    def _by_triton(self, problem: Problem) -> RunNew:
        function = importlib.import_module("torch.sparse._triton_ops").bsr_dense_addmm
        meta, size, added = dict(self.meta), problem.out.size, problem.inp is not None

        def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:
            a, weight, *inp = tensors
            out = a.new_empty(size[::-1])
            alpha, beta = scalars if added else (1.0, 0.0)
            source = inp[0].expand(size).t() if added else out
            result: Tensor = function(source, weight, a.t(), beta=beta, alpha=alpha, out=out, meta=dict(meta))
            return _as_out(result, problem)

        return run_new


def choices(problem: Problem, device: DeviceInfo) -> list[BlocksChoice]:
    """Return torch's sparse implementations. The first is the baseline of a torch user, if it supports the dtype."""
    found = [_choice(problem, "mm", _claims(problem, rounds=device.type != "cpu"), baseline=True)] if has_sparse_mm(problem) else []
    if device.type == "cpu" and not problem.integers:
        found.append(_choice(problem, "batched", _claims(problem)))
    if device.type != "cpu" and why_not_triton(problem) is None:
        found += [_choice(problem, "triton", _claims(problem), meta=meta) for meta in _metas(problem, device)]
    return found


def _metas(problem: Problem, device: DeviceInfo) -> list[Mapping[str, int]]:
    """Return parameters of torch's kernel without duplicates: those of torch's table, then ours."""
    tokens, listed = problem.m, starting_point(*row_of(problem, device))
    metas = [listed] if listed is not None else []
    for tile, stages, warps in METAS:
        meta = {"GROUP_SIZE_ROW": GROUP, "SPLIT_N": tokens // tile, "num_stages": stages, "num_warps": warps}
        if tokens % tile == 0 and meta not in metas:
            metas.append(meta)
    return [meta for meta in metas if _shared_bytes(problem, meta) <= device.smem_per_block_bytes]


def row_of(problem: Problem, device: DeviceInfo) -> tuple[Family, Shape]:
    """Return the problem's family and shape in a table of parameters."""
    sparsity, beta = problem.blocks, problem.beta
    family = Family("bsr_dense_addmm", device.name, dtype_name(problem.dtype), round(1 - sparsity.density, 2))
    sides, one = (sparsity.block_n, sparsity.block_k), problem.alpha == "one"
    return family, Shape(problem.n, problem.k, problem.m, *sides, beta == "zero", beta == "one", one)


def _shared_bytes(problem: Problem, meta: Mapping[str, int]) -> int:
    """Return the bytes of shared memory that torch's kernel uses for a block and its tokens, for all stages but one."""
    sparsity = problem.blocks
    elements = sparsity.block_k * (sparsity.block_n + problem.m // meta["SPLIT_N"])
    return elements * problem.dtype.itemsize * max(meta["num_stages"] - 1, 1)


def has_sparse_mm(problem: Problem) -> bool:
    """Return True if torch multiplies such a sparse_bsr tensor: square blocks, on a CPU with MKL and float32 or float64."""
    sparsity = problem.sparsity
    if sparsity is None or sparsity.block_n != sparsity.block_k:
        return False
    if problem.device_type == "cpu":
        return problem.dtype in (torch.float32, torch.float64) and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return problem.dtype in (torch.float32, torch.float16, torch.bfloat16)


def why_not_triton(problem: Problem) -> str | None:
    """Return why torch's kernel does not support the problem, or None."""
    sparsity = problem.blocks
    if problem.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"torch's kernel takes float32, float16 and bfloat16, got {problem.dtype}"
    if any(side < LEAST_BLOCK or side & (side - 1) for side in (sparsity.block_n, sparsity.block_k)):
        return f"torch's kernel takes blocks of powers of two from {LEAST_BLOCK} on, got {sparsity.block_n}x{sparsity.block_k}"
    if problem.m % LEAST_BLOCK:
        return f"torch's kernel takes multiples of {LEAST_BLOCK} tokens, got {problem.m}"
    return None


def _claims(problem: Problem, *, rounds: bool = False) -> Claims:
    """Return the claims: partial sums in the accumulator's dtype, or, with ``rounds``, in a's, as torch's fallback on a GPU has."""
    sparsity, accumulate = problem.blocks, problem.accumulator
    eager = problem.dtype if rounds or problem.device_type != "cpu" else accumulate
    return Claims(
        accumulate=accumulate,
        partials=problem.dtype if rounds else accumulate,
        epilogue_input=accumulate if problem.epilogue is None else eager,
        splits=max(problem.k // sparsity.block_k, 1),
        input_mode=problem.precision.input_mode,
        flush_subnormals=rounds and problem.precision.input_mode == "tf32",
        skips_absent=True,
    )


def _choice(
    problem: Problem, way: str, claims: Claims, *, baseline: bool = False, meta: Mapping[str, int] = MappingProxyType({})
) -> BlocksChoice:
    values = tuple(sorted(meta.items()))
    group = f"_g{meta['GROUP_SIZE_ROW']}" if meta and meta["GROUP_SIZE_ROW"] != GROUP else ""
    label = f"_{problem.m // meta['SPLIT_N']}_s{meta['num_stages']}_w{meta['num_warps']}{group}" if meta else ""
    eager = "+eager" if problem.epilogue is not None else ""
    return BlocksChoice(
        name=f"{NAME}:bsr_{way}{label}{eager}",
        backend=NAME,
        problem=problem,
        claims=claims,
        info={"template": f"bsr_{way}", **meta},
        baseline=baseline,
        way=way,
        meta=values,
    )


def _by_mm(problem: Problem) -> RunNew:
    """Return torch.mm of the sparse tensor and the transpose of a, followed by the addition."""

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:
        a, weight, *added = tensors
        return _as_out(_added(torch.mm(weight, a.t()).t(), added, scalars).t(), problem)

    return run_new


def _batched(problem: Problem) -> RunNew:
    """Return a product for each block, summed by block rows, all in the accumulator's dtype."""
    sparsity, dtype = problem.blocks, problem.accumulator
    m, n, k = problem.m, problem.n, problem.k
    block_n, block_k = sparsity.block_n, sparsity.block_k

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:
        a, weight, *added = tensors
        values, crow, col = parts(weight)
        columns = a.reshape(m, k // block_k, block_k).transpose(0, 1).index_select(0, col)
        products = torch.bmm(columns.to(dtype), values.to(dtype).mT)
        sums = products.new_zeros((n // block_n, m, block_n)).index_add_(0, rows_of(crow), products)
        result = sums.transpose(0, 1).reshape(m, n)
        return _as_out(_added(result, [x.to(dtype) for x in added], scalars).t(), problem)

    return run_new


def _added(result: Tensor, added: Sequence[Tensor], scalars: Scalars) -> Tensor:
    """Return alpha · result + beta · added, without reading an operand that is multiplied by zero."""
    if not added:
        return result
    alpha, beta = scalars
    result = torch.zeros_like(result) if alpha == 0 else result if alpha == 1 else result * alpha
    return result.add(added[0], alpha=beta) if beta != 0 else result


def _as_out(result: Tensor, problem: Problem) -> Tensor:
    """Return a result [N, M] transposed to out's layout and dtype, or only transposed if an epilogue follows."""
    result = result.t()
    if problem.epilogue is not None:
        return result
    return result.to(problem.out.dtype).contiguous()
