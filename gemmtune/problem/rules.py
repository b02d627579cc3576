"""Validation of a Problem against its operation's row in the table, with the offending values in each message."""

from collections.abc import Iterable, Sequence

import torch

from ..errors import InvalidProblemError
from .dtypes import FLOAT8_FNUZ, dtype_name
from .fields import ProblemFields
from .grouped_compositions import GATES
from .layout import Layout
from .operation import Operand, Operation
from .operations import DENSE_OPS, ENCODINGS, OPERATIONS, OPTIONS, ROLES
from .scales import GROUPS, SCALE_BLOCK, block_of, scale_shapes

DEVICE_TYPES = ("cpu", "cuda")
FLAGS = ("prepacked", "fast_accum")
MOST_GROUPS = 1024
"""The largest number of groups, torch's limit."""


def why_not(problem: ProblemFields, ops: Sequence[str]) -> str | None:
    """Return why a backend with the operations ``ops`` cannot serve the problem. None if the operation is among them."""
    if problem.op in ops:
        return None
    return f"{problem.op} is not an operation of this backend, which has {', '.join(ops)}"


def why_not_dense(problem: ProblemFields) -> str | None:
    """Return ``why_not`` for a backend of the dense operations."""
    return why_not(problem, DENSE_OPS)


def why_not_fnuz(problem: ProblemFields) -> str | None:
    """Return why a backend without AMD's 8-bit floats (fnuz) cannot serve the problem, or None."""
    own = next((x.dtype for x in (problem.a, problem.b) if x.dtype in FLOAT8_FNUZ), None)
    return None if own is None else f"{dtype_name(own)} is a float of AMD's gfx942, which this backend does not multiply here"


def check(problem: ProblemFields) -> None:
    """Raise InvalidProblemError unless the operands fit together and the operation has their dtypes."""
    row = OPERATIONS.get(problem.op)
    if row is None:
        raise InvalidProblemError(f"op: got {problem.op!r}, expected one of {', '.join(OPERATIONS)}")
    if problem.device_type not in DEVICE_TYPES:
        raise InvalidProblemError(f"device_type: got {problem.device_type!r}, expected one of {', '.join(DEVICE_TYPES)}")
    for name in FLAGS:
        if not isinstance(value := getattr(problem, name), bool):
            raise InvalidProblemError(f"{name}: got {value!r}, expected True or False")
    _check_presence(problem, row)
    row = row.given([role for role, _ in problem.operands], gated=problem.gated)
    _check_matrices(problem, row)
    _check_shapes(problem, row)
    _check_blocks(problem, row)
    _check_groups(problem, row)
    _check_routes(problem, row)
    for operand in row.operands:
        layout = getattr(problem, operand.role)
        if operand.blocks and layout is not None:
            _check_scale(problem, operand, layout)
    _check_added(problem, row)


def _check_presence(problem: ProblemFields, row: Operation) -> None:
    """Check that the problem has every required operand and no operand or option that the operation does not take."""
    op = row.name
    for role in ROLES:
        layout, operand = getattr(problem, role), row.operand(role)
        if layout is not None and operand is None:
            raise InvalidProblemError(f"{op}: takes no {role}, got shape {list(layout.size)}; {_takers(role)}")
        if layout is None and operand is not None and operand.required:
            dtypes = " or ".join(map(dtype_name, operand.dtypes))
            expected = f"a scale of {dtypes}" if operand.blocks else operand.described(batched=row.batched)
            raise InvalidProblemError(f"{op}: {role} is missing, expected {expected}")
    for name, absent in OPTIONS.items():
        if getattr(problem, name) != absent and name not in row.options:
            raise InvalidProblemError(f"{op}: takes no {name}, got {getattr(problem, name)!r}; {_takers(name)}")
    if problem.encoding not in ENCODINGS:
        raise InvalidProblemError(f"{op}: encoding: got {problem.encoding!r}, expected one of {', '.join(map(repr, ENCODINGS))}")
    if problem.zero_b is not None and problem.scale_b is None:
        raise InvalidProblemError(f"{op}: got zero_b without scale_b, expected both: b is read as (b - zero_b) * scale_b")
    if not row.scalars and (problem.alpha, problem.beta) != ("one", "zero"):
        got = f"alpha {problem.alpha} and beta {problem.beta}"
        raise InvalidProblemError(f"{op}: takes no alpha or beta, got {got}; give an epilogue that multiplies or adds")


def _takers(name: str) -> str:
    """Return the operations that take an operand or option of that name, for messages."""
    takers = [row.name for row in OPERATIONS.values() if name in row.options or row.operand(name) is not None]
    return f"{_listed(takers)} do" if len(takers) > 1 else f"{takers[0]} does"


def _check_matrices(problem: ProblemFields, row: Operation) -> None:
    """Check ranks and dtypes of the multiplied matrices and of out."""
    result = row.result_of(epilogue=problem.epilogue is not None)
    named = [(x.role, getattr(problem, x.role), _dtypes(problem, x), len(row.symbols(x))) for x in row.matrices]
    named.insert(2, ("out", problem.out, result.dtypes, len(row.out_symbols)))
    for name, layout, dtypes, dims in named:
        if dtypes and not (name == "b" and problem.encoding):
            _expect_dtype(f"{row.name}: dtype of {name}", layout.dtype, dtypes)
        if len(layout.size) != dims:
            raise InvalidProblemError(f"{row.name}: {name} must be a {dims}-D tensor, got shape {list(layout.size)}")
    if problem.encoding:
        _expect_dtype(f"{row.name}: dtype of b with encoding {problem.encoding}", problem.b.dtype, (torch.uint8,))
    for operand in row.operands:
        layout = getattr(problem, operand.role)
        if operand.like_a and not operand.dtypes and layout.dtype != problem.a.dtype:
            raise InvalidProblemError(
                f"{row.name}: a and {operand.role} must have the same dtype, got {problem.a.dtype} and {layout.dtype}; "
                "cast one of them"
            )


def _dtypes(problem: ProblemFields, operand: Operand) -> tuple[torch.dtype, ...]:
    """Return the legal dtypes of an operand; empty if it must have the dtype of a."""
    return operand.legal(problem.a.dtype) if operand.dtypes else ()


def _expect_dtype(what: str, dtype: torch.dtype, legal: Sequence[torch.dtype]) -> None:
    if dtype not in legal:
        expected = f"one of {', '.join(map(dtype_name, legal))}" if len(legal) > 1 else dtype_name(legal[0])
        raise InvalidProblemError(f"{what}: got {dtype}, expected {expected}")


def _check_shapes(problem: ProblemFields, row: Operation) -> None:
    """Check that equal symbols have equal sizes, that 1 is 1, and that all operands have the same batch."""
    known = {"1": 1}
    for operand in row.matrices:
        for symbol, size in zip(row.symbols(operand), _size(problem, operand.role), strict=True):
            if known.setdefault(symbol, size) != size:
                packed = " (two rows in each byte)" if problem.encoding else ""
                got = _listed(f"{x.role} {list(_size(problem, x.role))}{packed * (x.role == 'b')}" for x in row.matrices)
                wanted = _listed(x.described(batched=row.batched) for x in row.matrices)
                remedy = _packing_remedy(problem, row)
                raise InvalidProblemError(f"{row.name}: shapes do not fit, got {got}; expected {wanted}{remedy}")
    expected = tuple(row.extent(symbol, known) for symbol in row.out_symbols)
    if problem.out.size != expected:
        raise InvalidProblemError(f"{row.name}: out must have shape {list(expected)}, got {list(problem.out.size)}")


def _check_blocks(problem: ProblemFields, row: Operation) -> None:
    """Check that a block-sparse b has a class and consists of whole blocks."""
    if not row.sparse:
        return
    sparsity, b = problem.sparsity, problem.b
    if sparsity is None:
        raise InvalidProblemError(f"{row.name}: sparsity is missing, expected the class of the blocks of b")
    if b != Layout.contiguous(b.size[::-1], b.dtype).transposed:
        raise InvalidProblemError(
            f"{row.name}: got b {b}, expected the transpose of a contiguous matrix, which its blocks stand for"
        )
    k, n = b.size
    if n % sparsity.block_n or k % sparsity.block_k:
        raise InvalidProblemError(
            f"{row.name}: got a weight of {n}x{k}, expected whole blocks of {sparsity.block_n}x{sparsity.block_k}"
        )


def _dense(layout: Layout) -> bool:
    """Return True if a tensor is contiguous. The stride of a dimension of size 1 is arbitrary."""
    plain = Layout.contiguous(layout.size, layout.dtype).stride
    return all(n == 1 or given == expected for n, given, expected in zip(layout.size, layout.stride, plain, strict=True))


def _check_groups(problem: ProblemFields, row: Operation) -> None:
    """Check the number of groups, the contiguity of their offsets, and the shapes of their scales."""
    offs = problem.offs
    if offs is None:
        return
    if not 1 <= offs.size[0] <= MOST_GROUPS:
        raise InvalidProblemError(f"{row.name}: got offs of {offs.size[0]} groups, expected 1 to {MOST_GROUPS}")
    if not _dense(offs):
        raise InvalidProblemError(f"{row.name}: got offs {offs}, expected contiguous ones; give offs.contiguous()")
    scale, k = problem.scale_b, problem.a.size[-1]
    if scale is None:
        return
    if not _dense(scale):
        raise InvalidProblemError(f"{row.name}: got scale_b {scale}, expected a contiguous one; give scale_b.contiguous()")
    if problem.scale_a is not None:
        _check_float8_scales(problem, row, scale)
        return
    parts = dict.fromkeys((1, *(k // group for group in GROUPS if k % group == 0)))
    if scale.size[1] not in parts:
        raise InvalidProblemError(
            f"{row.name}: got scale_b {list(scale.size)}, expected [G, S, N] with S one of {', '.join(map(str, parts))}: one "
            f"number for each column, or for each {', '.join(map(str, GROUPS))} elements along K of it"
        )


def _check_routes(problem: ProblemFields, row: Operation) -> None:
    """Check the operands of routed products: rows that an index picks, gates, or adds up."""
    op, slots, weights = row.name, problem.slots, problem.weights
    if problem.gated not in ("", *GATES):
        raise InvalidProblemError(f"{op}: gated: got {problem.gated!r}, expected one of {', '.join(map(repr, GATES))}")
    if problem.gated and problem.b.size[-1] % 2:
        raise InvalidProblemError(f"{op}: got b {list(problem.b.size)}, expected an even number of columns, half of them gates")
    if problem.rows is not None and not _dense(problem.rows):
        raise InvalidProblemError(f"{op}: got rows {problem.rows}, expected contiguous ones; give rows.contiguous()")
    if weights is None or slots is None:
        return
    tokens, each = weights.size
    if slots.size[0] != tokens * each:
        raise InvalidProblemError(
            f"{op}: got slots {list(slots.size)} and weights {list(weights.size)}, expected a slot for each of "
            f"{tokens * each} weights: T · C"
        )
    if not _dense(slots) or not _dense(weights):
        raise InvalidProblemError(f"{op}: got slots {slots} and weights {weights}, expected contiguous ones")
    if problem.epilogue is not None:
        raise InvalidProblemError(f"{op}: takes no epilogue; apply the function to its result")


def _check_float8_scales(problem: ProblemFields, row: Operation, scale_b: Layout) -> None:
    """Check that scales of grouped 8-bit floats cover rows and columns, or SCALE_BLOCK elements along K of them."""
    k, n = problem.b.size[-2:]
    along_k, along_n = -(-k // SCALE_BLOCK), -(-n // SCALE_BLOCK)
    legal = {(1, n), (along_k, n), (along_k, along_n)}
    if scale_b.size[1:] not in legal:
        m, groups = problem.a.size[0], scale_b.size[0]
        pairs = [f"[{m}, {s}] and [{groups}, {s}, {t}]" for s, t in sorted(legal)]
        raise InvalidProblemError(
            f"{row.name}: got scale_a {list(problem.scale_a.size)} and scale_b {list(scale_b.size)}, expected "  # type: ignore[union-attr]
            f"{' or '.join(pairs)}: one number for each row and column, or for each {SCALE_BLOCK} elements along K of it, or "
            f"for each {SCALE_BLOCK}x{SCALE_BLOCK} of b"
        )


def _size(problem: ProblemFields, role: str) -> tuple[int, ...]:
    """Return the size of an operand in numbers instead of bytes."""
    size: tuple[int, ...] = getattr(problem, role).size
    return (*size[:-2], 2 * size[-2], size[-1]) if role == "b" and problem.encoding else size


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"


def _packing_remedy(problem: ProblemFields, row: Operation) -> str:
    """Return the remedy for shapes that do not fit because of the packing of b or a missing ``encoding``."""
    k, rows = problem.a.size[-1], problem.b.size[-2]
    if problem.encoding and k % 2:
        return ", and an even K; append a column of zeros to a and a row to the weight"
    if "encoding" in row.options and not problem.encoding and problem.b.dtype == torch.uint8 and 2 * rows == k:
        return "; if b has two numbers in each byte, give encoding 'int4' or 'uint4'"
    return ""


def _check_added(problem: ProblemFields, row: Operation) -> None:
    """Check that the added operand and the operands of the epilogue broadcast to out."""
    named = [("inp", problem.inp)] if problem.inp is not None else []
    named += [(f"epilogue_args[{i}]", x) for i, x in enumerate(problem.epilogue.operands if problem.epilogue else ())]
    for name, layout in named:
        try:
            layout.expanded(problem.out.size)
        except InvalidProblemError as error:
            raise InvalidProblemError(f"{row.name}: {name}: {error}") from None


def _check_scale(problem: ProblemFields, operand: Operand, scale: Layout) -> None:
    what = f"{problem.op}: {operand.role}"
    _expect_dtype(f"{problem.op}: dtype of {operand.role}", scale.dtype, operand.legal(problem.a.dtype))
    rows, cols = _size(problem, operand.of)
    if block_of(scale.size, (rows, cols), operand.blocks) is None:
        shapes = dict.fromkeys(str(list(shape)) for shape in scale_shapes((rows, cols), operand.blocks)[1:])
        raise InvalidProblemError(f"{what} must have one element or shape {' or '.join(shapes)}, got {list(scale.size)}")
