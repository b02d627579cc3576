"""Problems and choices of the cuda families for all kinds of tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from gemmtune.backends.cuda.backend import FAMILIES
from gemmtune.backends.cuda.bsr import configs as bsr
from gemmtune.backends.cuda.bsr_skinny import family as bsr_skinny
from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.cuda.cluster import configs as cluster
from gemmtune.backends.cuda.family import Family
from gemmtune.backends.cuda.gemv import family as gemv
from gemmtune.backends.cuda.grouped import configs as grouped
from gemmtune.backends.cuda.narrow import family as narrow
from gemmtune.backends.cuda.parts import configs as parts
from gemmtune.backends.cuda.skinny import family as skinny
from gemmtune.backends.cuda.stream import configs as stream
from gemmtune.backends.cuda.wgmma import configs as wgmma
from gemmtune.backends.cuda.wgmma_stream import family as wgmma_stream
from gemmtune.device import DeviceInfo, preset
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace

SM90 = preset("sm90")
F16, BF16, F32, F64, UINT8 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8
INT4: dict[str, Any] = {"encoding": "int4"}
UINT4: dict[str, Any] = {"encoding": "uint4"}
FAMILY: dict[str, Family[Any]] = {family.name: family for family in FAMILIES}
WEIGHTS: list[dict[str, Any]] = [
    {},
    {"scales": "column"},
    INT4 | {"scales": "group_128"},
    UINT4 | {"scales": "group_32", "zeros": True},
    {"dtype": BF16, "scales": "group_64"},
]


def mm(m: int = 128, n: int = 128, k: int = 8192, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.mm(m, n, k, dtype=dtype, layout=layout, device_type="cuda")


def addmm(m: int, n: int, k: int, layout: str = "nt", dtype: torch.dtype = F16, bias: str = "n") -> Problem:
    return Problem.addmm(m, n, k, dtype=dtype, layout=layout, bias=bias, alpha=2, beta=0.5, device_type="cuda")


def bmm(batch: int, m: int, n: int, k: int, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.bmm(batch, m, n, k, dtype=dtype, layout=layout, device_type="cuda")


def mixed(m: int = 16, n: int = 1024, k: int = 2048, **fields: Any) -> Problem:
    return Problem.mixed_mm(m, n, k, device_type="cuda", **fields)


def mixed_groups(m: int = 2048, n: int = 1024, k: int = 2048, groups: int = 8, **fields: Any) -> Problem:
    return Problem.mixed_grouped_mm(m, n, k, groups=groups, device_type="cuda", **fields)


def blocked(m: int = 512, n: int = 1024, k: int = 1024, block: Any = 16, density: float = 0.1, **fields: Any) -> Problem:
    """Return the product of m tokens and a prepacked block-sparse weight."""
    fields = {"prepacked": True, "device_type": "cuda"} | fields
    return Problem.bsr_mm(m, n, k, block=block, density=density, **fields)


def gated(problem: Problem) -> Problem:
    """Return silu(product) · x, with a matrix x in the operands' type."""
    x = torch.empty(problem.m, problem.n, dtype=problem.dtype)
    return dataclasses.replace(problem, epilogue=trace(lambda acc, x: torch.nn.functional.silu(acc) * x, F32, [x]))


def biased(problem: Problem) -> Problem:
    """Return 2 · product + x, with a float32 vector x and a float32 result."""
    epilogue = trace(lambda acc, x: acc * 2 + x, F32, [torch.empty(problem.n)])
    return dataclasses.replace(problem, epilogue=epilogue, out=dataclasses.replace(problem.out, dtype=F32))


def by_columns(problem: Problem) -> Problem:
    """Return the same problem with a column-major result."""
    return dataclasses.replace(problem, out=dataclasses.replace(problem.out, stride=(1, problem.m)))


def cluster_shape(text: str) -> cluster.Shape:
    return next(shape for shape in (*cluster.SHAPES, *cluster.MIDDLE, *cluster.ONE_RUN) if str(shape) == text)


def gemv_shape(block_n: int, stages: int, warps: int) -> gemv.Shape:
    return gemv.Shape(block_n=block_n, stages=stages, warps=warps)


def grouped_shape(block_n: int, stages: int, **more: int) -> grouped.Shape:
    return grouped.Shape(block_n=block_n, stages=stages, **more)


def narrow_shape(block_m: int, block_n: int, stages: int, block_k: int = 128, warps_m: int = 1) -> narrow.Shape:
    return narrow.Shape(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps_m=warps_m)


def parts_shape(block_m: int, block_n: int, stages: int, cluster_k: int = 1, **more: Any) -> parts.Shape:
    return parts.Shape(block_m=block_m, block_n=block_n, stages=stages, cluster_k=cluster_k, **more)


def skinny_shape(block_m: int, block_n: int, stages: int, warps_n: int, warps_k: int) -> skinny.Shape:
    return skinny.Shape(block_m=block_m, block_n=block_n, stages=stages, warps_n=warps_n, warps_k=warps_k)


def wgmma_shape(block_m: int, warp_groups: int, col_tiles: int, line_bytes: int, stages: int, **more: int) -> wgmma.Shape:
    sizes = {"block_m": block_m, "warp_groups": warp_groups, "col_tiles": col_tiles, "line_bytes": line_bytes, "stages": stages}
    return wgmma.Shape(**sizes, **more)


def stream_shape(block_m: int, warp_groups: int, col_tiles: int, line_bytes: int, stages: int) -> wgmma_stream.Shape:
    sizes = {"block_m": block_m, "warp_groups": warp_groups, "col_tiles": col_tiles, "line_bytes": line_bytes, "stages": stages}
    return wgmma_stream.Shape(**sizes)


def dense_shape(block_m: int, block_n: int, cluster_m: int = 1, cluster_n: int = 1) -> stream.Shape:
    return stream.Shape(block_m=block_m, block_n=block_n, cluster_m=cluster_m, cluster_n=cluster_n)


def config(shape: Any, **told: Any) -> Any:
    """Return a config of the shape's family."""
    types: dict[Any, Any] = {
        bsr.Shape: bsr.Config,
        bsr_skinny.Shape: bsr_skinny.Config,
        cluster.Shape: cluster.Config,
        gemv.Shape: gemv.Config,
        grouped.Shape: grouped.Config,
        narrow.Shape: narrow.Config,
        parts.Shape: parts.Config,
        skinny.Shape: skinny.Config,
        stream.Shape: stream.Config,
        wgmma.Shape: wgmma.Config,
        wgmma_stream.Shape: wgmma_stream.Config,
    }
    return types[type(shape)](shape=shape, **told)


def family_of(shape: Any) -> Family[Any]:
    return FAMILY[type(shape).__module__.split(".")[-2]]


def choice(problem: Problem, shape: Any, device: DeviceInfo = SM90, **told: Any) -> CudaChoice:
    """Return the choice of a config, which must be legal."""
    family, chosen = family_of(shape), config(shape, **told)
    assert family.why_not(problem, device) is None
    assert family.why_not_config(problem, device, chosen) is None
    return CudaChoice.of(family, chosen, problem, device)


def legal_choices(problem: Problem, shape: Any, ways: Iterable[dict[str, Any]], device: DeviceInfo = SM90) -> list[CudaChoice]:
    """Return the legal launch variants, at least one."""
    family = family_of(shape)
    assert family.why_not(problem, device) is None
    configs = [config(shape, **told) for told in ways]
    found = [CudaChoice.of(family, one, problem, device) for one in configs if not family.why_not_config(problem, device, one)]
    assert found, [family.why_not_config(problem, device, one) for one in configs]
    return found
