"""Files of torch's TunableOp: as lists of shapes (``tunableop_untuned0.csv``, ``tunableop_results0.csv``), and made of a store.

A line is ``GemmTunableOp_BFloat16_TN,tn_N_M_K_ld_…``: torch calls BLAS with columns, so its first operand is our b. ``T`` there is
a b stored as N×K, like the weight of a Linear. The choice and the time of a results file are ignored.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import UnavailableError
from ..problem import Problem
from ..problem.dtypes import dtype_name
from ..report.known import known_by_date
from ..store.row import Row

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
    return [_entry(line) for line in lines if line and not line.startswith(VALIDATOR)]


VALIDATOR = "Validator,"
"""Beginning of a line with a version that TunableOp compares with its own."""
_NAMES = {name: word for word, name in DTYPES.items() if name != "tf32"}


def results_of(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a file of results with torch's own solution, ``Default``, and its time for each mm and bmm on a GPU.

    TunableOp reads it and does not tune these products any more. Of the solutions that it knows on AMD, those of rocBLAS and
    hipBLASLt, a store has none. The first lines name the versions of this machine, which TunableOp compares.

    Raises UnavailableError without a GPU here whose versions the file could name.
    """
    if not torch.cuda.is_available():
        raise UnavailableError("tunableop: got a machine without a GPU, expected the one that will read the file: export it there")
    versions: Any = torch.cuda.tunable.get_validators()  # pairs, which torch's annotation denies
    lines = [f"{VALIDATOR}{name},{value}" for name, value in versions]
    times: dict[str, float] = {}
    for known in known_by_date(rows):
        time_us = next((row.time_us for row in known.rows if row.baseline and row.time_us), None)
        if known.problem is not None and time_us is not None and (signature := signature_of(known.problem)):
            times[signature] = time_us / 1e3
    return [*lines, *(f"{signature},Default,{time_ms:.6g}" for signature, time_ms in times.items())]


def signature_of(problem: Problem) -> str:
    """Return the two fields by which TunableOp finds a product, "" for one that it does not have or whose operands have gaps."""
    if problem.op not in ("mm", "bmm") or problem.device_type != "cuda" or problem.epilogue is not None:
        return ""
    word, layouts = _NAMES.get(dtype_name(problem.dtype)), _layouts_of(problem)
    if word is None or layouts is None or problem.out.dtype != problem.dtype:
        return ""
    a, b = layouts
    m, n, k = problem.m, problem.n, problem.k
    kind, batch = ("GemmStridedBatched", f"_B_{problem.batch}") if problem.op == "bmm" else ("Gemm", "")
    sides = f"{n if b == 'n' else k}_{k if a == 'n' else m}_{n}"
    return f"{kind}TunableOp_{word}_{b.upper()}{a.upper()},{b}{a}_{n}_{m}_{k}{batch}_ld_{sides}"


def _layouts_of(problem: Problem) -> tuple[str, str] | None:
    """Return ``n`` or ``t`` for a and b as torch reads them, None for operands with gaps or a result that is not contiguous."""
    letters = []
    for x in (problem.a, problem.b, problem.out):
        rows, columns = x.size[-2:]
        whole = not x.size[:-2] or x.stride[0] == rows * columns
        row = x.stride[-1] == 1 and x.stride[-2] == columns
        column = x.stride[-2] == 1 and x.stride[-1] == rows
        if not whole or not (row or column):
            return None
        letters.append("n" if row else "t")
    a, b, out = letters
    return (a, b) if out == "n" else None


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
