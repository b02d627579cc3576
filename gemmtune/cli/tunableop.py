"""Files of torch's TunableOp as lists of shapes: ``tunableop_untuned0.csv`` and ``tunableop_results0.csv``.

A line is ``GemmTunableOp_BFloat16_TN,tn_N_M_K_ld_…``: torch calls BLAS with columns, so its first operand is our b. ``T`` there is
a b stored as N×K, like the weight of a Linear. The choice and the time of a results file are ignored.
"""

from __future__ import annotations

import re
from typing import Any

DTYPES = {"float": "float32", "tf32": "tf32", "double": "float64", "BFloat16": "bfloat16", "Half": "float16"}
FLOAT8 = "Float8_e[0-9]m[0-9][a-z]*"
LINE = re.compile(
    rf"(?P<kind>Gemm|GemmAndBias|GemmStridedBatched|ScaledGemm)TunableOp_(?P<dtypes>({FLOAT8}|[^_,]+)(_({FLOAT8}|[^_,]+))*?)"
    r"_(?P<b>[NT])(?P<a>[NT]),[nt]{2}_(?P<n>\d+)_(?P<m>\d+)_(?P<k>\d+)(_B_(?P<batch>\d+))?"
    r"_ld_(?P<ld_b>\d+)_(?P<ld_a>\d+)_(?P<ld_out>\d+)(_rw_(?P<rows>[01])_bias_(?P<bias>[^,]+))?(,.*)?"
)


def is_tunableop(text: str) -> bool:
    """Return True for the text of a TunableOp file."""
    return re.match(r"Validator,|\w*TunableOp_", text) is not None


def entries_of(text: str) -> list[tuple[dict[str, Any], str]]:
    """Return an entry of a file of shapes for each line with a product, and why it cannot be tuned, "" if it can."""
    lines = dict.fromkeys(line.strip() for line in text.splitlines())
    return [_entry(line) for line in lines if line and not line.startswith("Validator,")]


def _entry(line: str) -> tuple[dict[str, Any], str]:
    found = LINE.fullmatch(line)
    if found is None:
        return {"name": line}, "got a line of another form, expected GemmTunableOp_DTYPE_TN,tn_N_M_K_ld_LDB_LDA_LDC"
    m, n, k = (int(found[name]) for name in "mnk")
    entry: dict[str, Any] = {"name": line.partition(",")[0], "op": "mm", "m": m, "n": n, "k": k}
    entry["layout"] = (found["a"] + found["b"]).lower()
    dtypes = re.findall(rf"{FLOAT8}|[^_]+", found["dtypes"])
    unknown = [name for name in dtypes if name not in DTYPES and not re.fullmatch(FLOAT8, name)]
    if unknown:
        return entry, f"{unknown[0]} is no dtype of gemmtune"
    entry["dtype"] = _dtype(dtypes[0])
    dense = (n if found["b"] == "N" else k, k if found["a"] == "N" else m, n)
    strides = tuple(int(found[name]) for name in ("ld_b", "ld_a", "ld_out"))
    if strides != dense:
        return entry, f"leading dimensions {strides} are those of a part of a larger matrix, expected {dense}: record the program"
    if found["kind"] == "GemmStridedBatched":
        entry |= {"op": "bmm", "batch": int(found["batch"] or 1)}
    elif found["kind"] == "GemmAndBias":
        entry |= {"op": "addmm", "bias": "n"}
    elif found["kind"] == "ScaledGemm":
        dtype_b, dtype_a, out = map(_dtype, dtypes)
        entry |= {"op": "scaled_mm", "dtype": dtype_a, "dtype_b": dtype_b, "out_dtype": out}
        entry |= {"scales": "row" if found["rows"] == "1" else "tensor"} | ({"bias": "n"} if found["bias"] != "None" else {})
    return entry, ""


def _dtype(name: str) -> str:
    return DTYPES.get(name, name.lower())
