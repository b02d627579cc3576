"""Recording the products of a run: which Problems it asks for, while everything runs as before."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..dispatch.arguments import Call
from ..dispatch.block_calls import turned
from ..dispatch.calls import call_of
from ..dispatch.checks import why_not_ours
from ..dispatch.grouped import form_of
from ..dispatch.statement import epilogue_of, problem_of
from ..errors import GemmtuneError, InvalidProblemError
from ..numerics.block_sparse import assembled
from ..operators.schema import NAMESPACE, OPERATORS
from ..operators.torch_products import TORCH_PRODUCTS, Statement, torch_product, with_dimensions
from ..ops.block_operators import BODIES
from ..problem import Problem
from ..problem.operations import OPERATIONS, OPTIONS
from .recording import Recording
from .sparsify import prepacked_problem

Tensor = torch.Tensor
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
_COMPOSITES = (torch.ops.aten.einsum.default, *(row.overload for row in TORCH_PRODUCTS if row.composite))
"""Operators that inference mode does not decompose into products."""


@contextmanager
def record(file: Path | str | None = None) -> Iterator[Recording]:
    """Note every product in a ``with`` block, torch's own and gemmtune's, and write them to ``file`` at its end.

        with gemmtune.record("shapes.json"):
            model(x).sum().backward()

    What runs, runs as before, with the same results; forward and backward passes are seen, in this thread and in the threads of
    its backward passes. Compiled functions run uncompiled within the block, so that each of their products is seen with its sizes;
    with which epilogues they would be fused is not recorded. Calls of ours with an epilogue, ``out`` or a prepacked operand are
    noted as they are stated, unless a gradient is wanted. torch's products with a sparse_bsr weight are noted as layers of
    ``optimize`` have them: of a prepacked weight. Processes that the block starts are not seen.

    Args:
        file: what ``gemmtune tune --recorded`` reads: each distinct Problem with its count, and histograms of M. Written also when
            the block ends by an error; not at all if it is None, if nothing was recorded, nor by processes that are forked within
            the block.

    Yields:
        The Recording, which fills up.

    Raises:
        InvalidProblemError: ``file`` is a folder, or its folder does not exist.
    """
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise InvalidProblemError(f"record: got {file}, but its folder does not exist; make it, or name another")
    if file is not None and Path(file).is_dir():
        raise InvalidProblemError(f"record: got {file}, which is a folder; name the file to write")
    recording = Recording()
    with ExitStack() as stack:
        if file is not None:
            stack.callback(_write, recording, file, os.getpid())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_Watch(recording))
        yield recording


def _write(recording: Recording, file: Path | str, process: int) -> None:
    """Write what this process has recorded. A fork of it would write its own part over the file, and a program that ended before
    its first product would write nothing over what an earlier run recorded."""
    if os.getpid() == process and recording.counts:
        recording.write(file)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the products that it sees below autograd."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._problems: dict[Hashable, Problem | None] = {}
        self._whole = False

    @contextmanager
    def note_call(self, problem: Callable[[], Problem | None]) -> Iterator[None]:
        """A block that does a call of ours, noted as it is stated without the recording, and not by its parts."""
        try:
            stated_whole = problem()
        except GemmtuneError:  # the call says so itself, or torch does it
            stated_whole = None
        if stated_whole is not None:
            self._recording.note(stated_whole)
        before, self._whole = self._whole, self._whole or stated_whole is not None
        try:
            yield
        finally:
            self._whole = before

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass does it first, and what that is made of comes here again
        if func in _COMPOSITES:
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace == NAMESPACE and (body := BODIES.get(func.overloadpacket.__name__)) is not None:
            with self:
                return body(*args, **kwargs)
        if not self._whole and (torch_product(func) is not None or _is_ours(func)):
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
        if _is_blocked(given):
            problem = _problem(func, given)  # which depends on where its blocks are
        else:
            key = (func, *((name, _look(value)) for name, value in given.items()))
            if key not in self._problems:
                self._problems[key] = _problem(func, given)
            problem = self._problems[key]
        if problem is not None:
            self._recording.note(problem)


def _look(value: Any) -> Hashable:
    """Everything that a Problem may depend on."""
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        return (value.shape, value.layout)
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15)
    return value if isinstance(value, Hashable) else repr(value)


def _problem(func: Any, given: Mapping[str, Any]) -> Problem | None:
    """The Problem of an operator's arguments; None where it is none of ours."""
    try:
        call = _own_call(func, given) if _is_ours(func) else _torchs_call(func, given)
        if call is None or isinstance(call, Problem):
            return call
        tensors = [x for _, x in call.inputs]
        if why_not_ours(tensors, floats=not call.operation.quantized) is not None:
            return None
        return problem_of(call, epilogue_of(call))
    except InvalidProblemError:
        return None  # torch has more products than we do: the call is its business


def _is_blocked(given: Mapping[str, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.layout in _BLOCKED for x in given.values())


def _of_blocks(found: Statement) -> Problem:
    """What torch's product with a block-sparse weight is: bsr @ x, or as ``linear`` has it, x @ bsrᵀ."""
    name, a, b, inp = found.op, found.operands["a"], found.operands["b"], found.operands.get("inp")
    scalars = (found.numbers.get("alpha", 1), found.numbers.get("beta", 1))
    if name in ("mm", "addmm") and (a.layout, b.layout) == (torch.sparse_bsr, torch.strided):
        return prepacked_problem(a, b, inp, scalars, by_rows=b.t().is_contiguous())
    if name in ("mm", "addmm") and (a.layout, b.layout) == (torch.strided, torch.sparse_bsc):
        # Made of parts: in inference mode torch transposes no weight that was made outside of it.
        weight = assembled(b.ccol_indices(), b.row_indices(), b.values().mT, (b.shape[1], b.shape[0]))
        return prepacked_problem(weight, a.t(), turned(inp), scalars, by_rows=True)
    raise InvalidProblemError(f"{name}: torch alone has it of {a.layout} and {b.layout}")


def _is_ours(func: Any) -> bool:
    """An operator of a row of the table whose operands are strided."""
    return func.namespace == NAMESPACE and func.overloadpacket.__name__ in OPERATORS


def _own_call(func: Any, given: Mapping[str, Any]) -> Call:
    operator = OPERATORS[func.overloadpacket.__name__]
    tensors = [given.get(name) for name in operator.tensors]
    return operator.call(tensors, {name: x for name, x in given.items() if name not in operator.tensors and name != "out"})


def _torchs_call(func: Any, given: Mapping[str, Any]) -> Call | Problem | None:
    """Return the call of ours that torch's product states, the Problem of a block-sparse product, or None if only torch has it."""
    row = torch_product(func)
    assert row is not None
    found = row.stated((), {name: value for name, value in given.items() if name != "out"})
    if isinstance(found, str):
        return None
    if _is_blocked(given):
        return _of_blocks(found)
    if found.op == "grouped_mm":
        a, b = found.operands["a"], found.operands["b"]
        form = form_of(found.op, a, b, found.operands.get("offs"))
        operands = dict(zip(("a", "b", "offs"), form.operands, strict=False))
        return call_of(form.op, operands) if found.out_dtype in (None, a.dtype) else None
    operation = OPERATIONS[found.op]
    return call_of(
        found.op,
        {role: with_dimensions(found.op, role, x) for role, x in found.operands.items()},
        scalars=[found.numbers.get(name, 1) for name in operation.scalars],
        options=[found.numbers.get(name, OPTIONS[name]) for name in operation.options],
        brought=found.bias,
        out_dtype=found.out_dtype,
    )
