"""torch's own products with block-sparse weights, as its callers have them: nothing is copied behind them into another layout."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from reference import Reference

from gemmtune.backends.aten import blocks
from gemmtune.backends.table import load
from gemmtune.choice import Choice, Kernel, Scalars, Tensors
from gemmtune.device import DeviceInfo
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.settings import current
from gemmtune.timing.timer import Timer

__all__ = ["sparse_best", "sparse_default", "sparse_torch"]

Meta = Mapping[str, int]
TILES, STAGES_WARPS = (16, 32, 64, 128, 256), ((1, 4), (3, 4), (4, 8))
"""Of torch's kernel: columns of x of a tile; pipeline stages and warps. Each combination is compiled anew."""
CLOSE = 0.03
"""How far a result may be off, as a fraction of the largest number, to count as right: with some stages it was not."""
ROUNDS = 3


def sparse_torch(problem: Problem, device: DeviceInfo) -> Reference:
    """torch.mm of the sparse_bsr tensor, whatever torch does it by. Its result [rows of the weight, tokens] is left as it is."""

    def run_new(tensors: Tensors, _scalars: Scalars) -> torch.Tensor:
        a, weight, *_ = tensors
        return torch.mm(weight, a.t()).t()

    return _tried(Reference(choice=_of_sparse(problem, device), kernel=_kernel(run_new), tuning_s=0.0), problem, device)


def sparse_default(problem: Problem, device: DeviceInfo) -> Reference:
    """torch's Triton kernel with the parameters that torch comes to: of its table, which is an A100's, or its defaults."""
    _check(problem)
    reference = Reference(choice=_of_sparse(problem, device), kernel=_by_triton(None), tuning_s=0.0)
    return _tried(reference, problem, device)


def sparse_best(problem: Problem, device: DeviceInfo) -> Reference:
    """torch's Triton kernel with the fastest of some parameters that give right results, measured now."""
    _check(problem)
    begun = time.perf_counter()
    choice, operands = _of_sparse(problem, device), random_operands(problem, device.torch_device, seed=1)
    assert operands.weight is not None
    expected = operands.a.float() @ operands.weight.to_dense().float().t()
    timer = Timer(problem, device, "graph")
    measured: list[tuple[float, str, Kernel]] = []
    failed: list[str] = []
    for meta in _metas(problem):
        kernel = _by_triton(meta)
        try:
            assert kernel.run_new is not None
            error = (kernel.run_new(operands.tensors, ()).float() - expected).abs().max()
            if float(error) > CLOSE * float(expected.abs().max()):
                failed.append(f"{meta}: off by {float(error):.3g}")
                continue
            contender = timer.contender(choice, kernel)
            times = []
            for _ in range(ROUNDS):
                contender.begin()
                times.append(contender.result_us())
        except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result of the comparison
            failed.append(f"{meta}: {type(error).__name__}")
            continue
        measured.append((min(times), str(meta), kernel))
    if not measured:
        raise RuntimeError(f"torch-best: none of the parameters gives a right result: {'; '.join(failed)[:500]}")
    _, _, kernel = min(measured, key=lambda x: x[:2])
    return Reference(choice=choice, kernel=kernel, tuning_s=time.perf_counter() - begun)


def torchs_kernel() -> Callable[..., torch.Tensor]:
    """torch's product by its Triton kernel, imported when it is wanted.

    Raises:
        RuntimeError: there is no GPU, without which it does not run.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch's block-sparse kernel needs a GPU")
    function: Callable[..., torch.Tensor] = importlib.import_module("torch.sparse._triton_ops").bsr_dense_addmm
    return function


def _tried(reference: Reference, problem: Problem, device: DeviceInfo) -> Reference:
    """The reference, once it has run as it will be measured: on a GPU captured in a graph.

    Raises:
        RuntimeError: it does not.
    """
    try:
        contender = Timer(problem, device, "graph").contender(reference.choice, reference.kernel)
        contender.begin()
        contender.result_us()
    except Exception as error:
        raise RuntimeError(f"torch's sparse product cannot be measured: {type(error).__name__}: {error}") from error
    return reference


def _check(problem: Problem) -> None:
    if problem.op != "bsr_mm":
        raise RuntimeError(f"torch's block-sparse kernel: got {problem.op}, expected bsr_mm")
    if (reason := blocks.why_not_triton(problem)) is not None:
        raise RuntimeError(reason)


def _metas(problem: Problem) -> Iterator[Meta | None]:
    """What torch comes to, then each combination whose tiles divide the tokens, larger tiles than all tokens left out."""
    yield None
    tokens = problem.m
    tiles = [tile for tile in TILES if tokens % tile == 0] or [blocks.LEAST_BLOCK]
    for tile, (stages, warps) in itertools.product(tiles[-3:], STAGES_WARPS):
        yield {"GROUP_SIZE_ROW": blocks.GROUP, "SPLIT_N": tokens // tile, "num_stages": stages, "num_warps": warps}


def _by_triton(meta: Meta | None) -> Kernel:
    function = torchs_kernel()

    def run_new(tensors: Tensors, _scalars: Scalars) -> torch.Tensor:
        a, weight, *_ = tensors
        out = a.new_empty(weight.shape[0], a.shape[0])
        more: dict[str, Any] = {} if meta is None else {"meta": dict(meta)}
        return function(out, weight, a.t(), beta=0, out=out, **more).t()

    return _kernel(run_new)


def _kernel(run_new: Callable[[Tensors, Scalars], torch.Tensor]) -> Kernel:
    def run(_out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        run_new(tensors, scalars)

    return Kernel(run=run, run_new=run_new)


def _of_sparse(problem: Problem, device: DeviceInfo) -> Choice:
    """A choice that takes the weight as torch has it, which tells the measurement so."""
    found = load("aten").enumerate(problem, device, current()).choices
    return next(choice for choice in found if choice.packed_format is None)
