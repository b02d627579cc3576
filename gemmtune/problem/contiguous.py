"""Layouts of contiguous operands, named by BLAS letters."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import cast, get_args

import torch

from ..errors import InvalidProblemError
from ..foreign import shown
from ..operand_kinds import BiasShape as BiasShape
from .layout import Layout
from .operation import Operation
from .precision import Precision
from .scales import Scales, WeightScales, scale_layouts, weight_scale_layout

MOST = 2**31 - 1
"""The largest size of a dimension: the libraries count in 32 bits."""
MOST_ELEMENTS = 2**46
"""The limit on the elements of one operand, larger than an address space."""
_NAMES = {"B": "batch", "G": "groups", "T": "tokens"}
"""Names of sizes in messages, if they are not the symbol in lower case."""


def operand_layouts(
    row: Operation, sizes: Mapping[str, int], letters: str, dtypes: Mapping[str, torch.dtype], *, encoded: bool = False
) -> dict[str, Layout]:
    """Return the layouts of a row's matrices and of out, by role. Raises InvalidProblemError for illegal ``letters`` or sizes.

    ``sizes`` has the sizes by symbol, and ``dtypes`` the dtypes by role: a's, those of optional matrices that are given, and those
    that are not the row's first legal dtype. ``letters`` has one letter for a and c, and one for b and d: ``n`` is row-major, ``t``
    is stored transposed. An ``encoded`` b has two elements of K in each byte.
    """
    for symbol, extent in sizes.items():
        check_size(_NAMES.get(symbol, symbol.lower()), extent)
    if row.sparse and letters not in ("nt", "tt"):
        raise InvalidProblemError(f"layout: got {letters!r}, expected nt or tt: b is the transpose of a weight [N, K]")
    if len(letters) != 2 or set(letters) - {"n", "t"}:
        raise InvalidProblemError(f"layout: got {letters!r}, expected one of nn, nt, tn, tt")
    layouts = {}
    for operand in row.matrices:
        if operand.required or operand.role in dtypes:
            known = {**sizes, "1": 1, "K": -(-sizes["K"] // 2)} if encoded and operand.role == "b" else {**sizes, "1": 1}
            size = tuple(known[symbol] for symbol in row.symbols(operand))
            dtype = dtypes.get(operand.role) or (operand.dtypes or (dtypes["a"],))[0]
            letter = letters[operand.role in ("b", "d")] if operand.role in ("a", "b", "c", "d") else "n"
            layouts[operand.role] = _layout(size, dtype, transposed=letter == "t")
    size = tuple(row.extent(symbol, sizes) for symbol in row.out_symbols)
    dtype = dtypes.get("out") or row.result_dtype(dtypes["a"], epilogue=False)
    transposed = row.sparse and letters == "tt"
    return layouts | {"out": _layout(size, dtype, transposed=True) if transposed else Layout.contiguous(size, dtype)}


def scale_fields(
    row: Operation, sizes: Mapping[str, int], scales: str, dtype: torch.dtype, *, zeros: bool = False
) -> dict[str, Layout | None]:
    """Return one row's scales and zero points by role. Raises InvalidProblemError for illegal ``scales``, or zeros alone."""
    m, n, k = (sizes[symbol] for symbol in "MNK")
    if row.operand("scale_a") is not None:
        kinds, (scale_a, scale_b) = get_args(Scales), scale_layouts(m, n, k, cast(Scales, scales))
        return {"scale_a": scale_a, "scale_b": _of_groups(row, scales, scale_b, kinds)}
    kinds, scale = get_args(WeightScales), weight_scale_layout(n, k, cast(WeightScales, scales), dtype)
    if zeros and scale is None:
        raise InvalidProblemError(f"zeros: got no scales, expected one of {', '.join(kinds[1:])}")
    return {"scale_b": _of_groups(row, scales, scale, kinds), "zero_b": scale if zeros else None}


def _of_groups(row: Operation, scales: str, scale: Layout | None, kinds: Sequence[str]) -> Layout | None:
    """Return the scale of b. Raise InvalidProblemError if groups need one for each column or block, and it has none."""
    if row.grouped and (scale is None or len(scale.size) != 2):
        *others, last = [kind for kind in kinds if kind not in ("none", "tensor")]
        raise InvalidProblemError(f"scales: got {scales!r}, expected {', '.join(others)} or {last}")
    return scale


def bias_shapes(out: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that an operand added to a result of shape ``out`` may have, by name."""
    *_, m, n = out
    return {"n": (n,), "mn": out, "m1": (m, 1), "1n": (1, n), "scalar": ()}


def inp_layout(lead: tuple[int, ...], m: int, n: int, bias: BiasShape, dtype: torch.dtype) -> Layout:
    """Return the layout of the added operand: shape [N], [M, N] (after the batch), [M, 1], [1, N] or a scalar."""
    shapes = bias_shapes((*lead, m, n))
    if bias not in shapes:
        raise InvalidProblemError(f"bias: got {bias!r}, expected one of {', '.join(shapes)}")
    return Layout.contiguous(shapes[bias], dtype)


OPTION_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "dtype": ((torch.dtype, str), "a torch.dtype or its name"),
    **dict.fromkeys(("dtype_b", "out_dtype", "scale_dtype"), ((torch.dtype, str, type(None)), "a torch.dtype or its name")),
    **dict.fromkeys(("prepacked", "fast_accum", "zeros", "wide_index"), ((bool,), "True or False")),
    **dict.fromkeys(("scales", "encoding", "imbalance", "gated", "bias"), ((str,), "a name")),
    **dict.fromkeys(("alpha", "beta"), ((Real,), "a number")),
    "layout": ((str,), "two letters, such as 'nt'"),
    "tokens": ((int, type(None)), "an integer"),
    "device_type": ((str, type(None)), "'cuda' or 'cpu'"),
    "precision": ((Precision, type(None)), "a gemmtune.Precision"),
    "density": ((Real,), "the share of blocks that exist, from 0 to 1"),
}
"""Types of the options, with what a message expects. Values have checks of their own."""


def check_option(name: str, value: object) -> None:
    """Raise InvalidProblemError if an option of a constructor has a wrong type."""
    kinds, expected = OPTION_KINDS.get(name, ((object,), ""))
    if not isinstance(value, kinds):
        raise InvalidProblemError(f"{name}: got {shown(value)}, expected {expected}")


def check_size(name: str, size: object) -> None:
    """Raise InvalidProblemError unless ``size`` is an integer that a dimension of an operand can have."""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MOST:
        raise InvalidProblemError(f"{name}: got {size!r}, expected an integer from 0 to {MOST}")


def _layout(size: tuple[int, ...], dtype: torch.dtype, *, transposed: bool) -> Layout:
    if math.prod(size) > MOST_ELEMENTS:
        raise InvalidProblemError(f"sizes: got an operand of {size}, expected at most 2^46 elements; take smaller sizes")
    if not transposed:
        return Layout.contiguous(size, dtype)
    return Layout.contiguous((*size[:-2], size[-1], size[-2]), dtype).transposed
