"""Parameters of torch's block-sparse kernels by shape: torch's table, and tables of the same form."""

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...errors import InvalidProblemError
from ...problem.dtypes import dtype_name

PARAMETERS: dict[str, tuple[str, ...]] = {
    "bsr_dense_addmm": ("GROUP_SIZE_ROW", "SPLIT_N", "num_stages", "num_warps"),
    "_int_bsr_dense_addmm": ("GROUP_SIZE_ROW", "SPLIT_N", "num_stages", "num_warps"),
    "scatter_mm": ("GROUP_SIZE", "SPLIT_N", "TILE_M", "TILE_N", "num_stages", "num_warps"),
}
"""Parameters of torch's operations, in the order of a row's values."""
LOOKED_UP = ("bsr_dense_addmm", "_int_bsr_dense_addmm")
"""Operations whose parameters can be adapted to another N."""
LEAST_TILE = 16


class Family(NamedTuple):
    """Common part of several rows: torch's operation, the GPU, the dtype of the operands, and the share of zeros."""

    op: str
    device: str
    dtype: str
    sparsity: float


class Shape(NamedTuple):
    """Product bsr [m, k] @ x [k, n] with blocks of block_m × block_k, and the classes of beta and alpha."""

    m: int
    k: int
    n: int
    block_m: int
    block_k: int
    beta_zero: bool = True
    beta_one: bool = False
    alpha_one: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Parameters by name, and how they were found: ``exact``, ``other GPU``, ``near density``, ``other N`` or ``default``."""

    parameters: Mapping[str, int]
    how: str


@dataclass(slots=True)
class MetaTable:
    """Rows of parameters in the form that torch uses for its kernels.

    table = gemmtune.sparse.import_torch_meta()
    table.update(Family("bsr_dense_addmm", "NVIDIA H200", "bfloat16", 0.5), Shape(4096, 4096, 512, 64, 64), (4, 8, 3, 4))
    """

    rows: dict[Family, dict[Shape, tuple[int, ...]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))

    def __repr__(self) -> str:
        return f"<MetaTable of {len(self)} rows: {', '.join(sorted({family.device for family in self.rows})) or 'of no device'}>"

    def update(self, family: Family, shape: Shape, values: tuple[int, ...]) -> None:
        """Add or replace a row. Raises InvalidProblemError for an unknown operation or a wrong number of values."""
        names = PARAMETERS.get(family.op)
        if names is None:
            raise InvalidProblemError(f"update: op: got {family.op!r}, expected one of {', '.join(PARAMETERS)}")
        if len(values) != len(names) or not all(isinstance(value, int) and value > 0 for value in values):
            raise InvalidProblemError(f"update: got {values}, expected a positive integer for each of {', '.join(names)}")
        self.rows.setdefault(Family(*family), {})[Shape(*shape)] = tuple(values)

    def lookup(self, family: Family, shape: Shape) -> Found:
        """Return the nearest known parameters of ``bsr_dense_addmm`` or ``_int_bsr_dense_addmm`` for a shape.

        First comes the shape itself with the same share of zeros, then with the nearest other share, on this GPU and then on
        others. Next comes the largest known n up to this one whose tile divides it, in the same order and with its split
        scaled. Last come torch's defaults.

        Raises:
            InvalidProblemError: the operation is not one of these two.
        """
        if family.op not in LOOKED_UP:
            raise InvalidProblemError(f"lookup: op: got {family.op!r}, expected one of {', '.join(LOOKED_UP)}")
        names = PARAMETERS[family.op]
        for near, known in self._nearest(family):
            if shape in known:
                how = "near density" if near.sparsity != family.sparsity else "exact" if near == family else "other GPU"
                return Found(parameters=dict(zip(names, known[shape], strict=True)), how=how)
        for _, known in self._nearest(family):
            others = sorted((s for s in known if s._replace(n=shape.n) == shape and s.n <= shape.n), key=lambda s: -s.n)
            for other in others:
                parameters = dict(zip(names, known[other], strict=True))
                tile = other.n // parameters["SPLIT_N"]
                if tile and shape.n % tile == 0:
                    return Found(parameters=parameters | {"SPLIT_N": shape.n // tile}, how="other N")
        default = {"GROUP_SIZE_ROW": 4, "SPLIT_N": max(shape.n // shape.block_m, 1), "num_stages": 1, "num_warps": 4}
        return Found(parameters=default, how="default")

    def _nearest(self, family: Family) -> Iterator[tuple[Family, dict[Shape, tuple[int, ...]]]]:
        """Yield the families of the operation and dtype with their rows: this GPU's first, then by distance in sparsity."""
        alike = [other for other in self.rows if (other.op, other.dtype) == (family.op, family.dtype)]
        for other in sorted(
            alike, key=lambda x: (x.device != family.device, abs(x.sparsity - family.sparsity), x.sparsity, x.device)
        ):
            yield other, self.rows[other]


def torch_table() -> MetaTable:
    """Return a table of torch's built-in rows, of which there are thousands, all for an A100."""
    data: Mapping[Any, Mapping[Any, Any]] = importlib.import_module("torch.sparse._triton_ops_meta")._operation_device_version_data
    table = MetaTable()
    for (op, device, (_, dtype, sparsity)), rows in data.items():
        if not isinstance(dtype, torch.dtype) or op not in PARAMETERS:
            continue  # rows of two dtypes, which torch's table could have but does not
        family = Family(op, device, dtype_name(dtype), float(sparsity))
        for key, values in rows.items():
            table.update(family, Shape(*key[:5], *map(bool, key[5:])), tuple(values))
    return table


_torch_rows = functools.cache(torch_table)


def starting_point(family: Family, shape: Shape) -> Mapping[str, int] | None:
    """Return the kernel's parameters from torch's table. None if its tile of tokens is no power of two of at least LEAST_TILE."""
    known = _torch_rows().lookup(family, shape).parameters
    tile, rest = divmod(shape.n, known["SPLIT_N"])
    return known if not rest and tile >= LEAST_TILE and tile & (tile - 1) == 0 else None
