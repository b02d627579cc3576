"""``record()``: count the Problems of a run, without changing what runs."""

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..dispatch.arguments import Call, call_of, transposed_operand
from ..dispatch.checks import TRACED_TYPES, why_not_ours
from ..dispatch.grouped import form_of
from ..dispatch.statement import epilogue_of, problem_of
from ..errors import GemmtuneError, InvalidProblemError
from ..numerics.block_sparse import assembled
from ..operators.schema import NAMESPACE, OPERATORS
from ..operators.torch_products import TORCH_PRODUCTS, Statement, torch_product, with_dimensions
from ..problem import Problem
from ..problem.operations import OPERATIONS, OPTIONS
from ..sparse.operators import BODIES
from .recording import Recording
from .sparsify import prepacked_problem

Tensor = torch.Tensor
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
_COMPOSITES = (torch.ops.aten.einsum.default, *(row.overload for row in TORCH_PRODUCTS if row.composite))
"""Operators that inference mode does not decompose into products."""


@contextmanager
def record(file: Path | str | None = None) -> Iterator[Recording]:
    """Count every product in a ``with`` block, torch's and gemmtune's, and write them to ``file`` at its end.

        with gemmtune.record("shapes.json"):
            model(x).sum().backward()

    The program runs unchanged, with the same results. The recording covers forward and backward passes of this thread, including
    the threads of its backward passes, but no other processes. Compiled functions run uncompiled in the block, so that each product
    has its sizes. The epilogues that compilation would fuse are not recorded. A gemmtune call with an epilogue, ``out`` or a
    prepacked operand counts as a whole, unless it needs a gradient. torch's products with a sparse_bsr weight count with a
    prepacked weight, as layers of ``optimize`` run them.

    Args:
        file: the file for ``gemmtune tune --recorded``: each distinct Problem with its count, and histograms of M. It is also
            written if the block ends with an exception. It is not written if it is None or nothing was recorded, nor by a process
            that the block forks.

    Yields:
        The Recording, which fills up as the block runs.

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
    """Write the recording of this process, not a fork, unless it is empty: either would overwrite that of another."""
    if os.getpid() == process and recording.counts:
        recording.write(file)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the products that run below autograd."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._problems: dict[Hashable, Problem | None] = {}
        self._whole = False

    @contextmanager
    def note_call(self, problem: Callable[[], Problem | None]) -> Iterator[None]:
        """Count a gemmtune call as a whole, as it would run without the recording, and not the parts that run in the block."""
        try:
            stated_whole = problem()
        except GemmtuneError:  # the call itself raises, or torch runs it
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
        if any(issubclass(kind, TRACED_TYPES) for kind in types):
            return func(*args, **kwargs)  # such a type returns NotImplemented as long as another mode is active
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # the subclass runs first, and its inner operations come here
        if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
            return func(*args, **kwargs)  # only torch has products of nested tensors of plain type
        if func in _COMPOSITES:
            with self:  # by torch's kernel: ``decompose`` may find a Python function with other strides and errors
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if func.namespace == NAMESPACE and (body := BODIES.get(func.overloadpacket.__name__)) is not None:
            with self:
                return body(*args, **kwargs)
        if not self._whole and (torch_product(func) is not None or _is_ours(func)):
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
        if _is_blocked(given):
            problem = _problem(func, given)  # it depends on the positions of the blocks
        else:
            key = (func, *((name, _look(value)) for name, value in given.items()))
            if key not in self._problems:
                self._problems[key] = _problem(func, given)
            problem = self._problems[key]
        if problem is not None:
            self._recording.note(problem)


def _look(value: Any) -> Hashable:
    """Return all properties of an argument on which a Problem may depend."""
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        return (value.shape, value.layout)
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15)
    return value if isinstance(value, Hashable) else repr(value)


def _problem(func: Any, given: Mapping[str, Any]) -> Problem | None:
    """Return the Problem of an operator's arguments, or None if only torch has it."""
    try:
        call = _own_call(func, given) if _is_ours(func) else _torchs_call(func, given)
        if call is None or isinstance(call, Problem):
            return call
        tensors = [x for _, x in call.inputs]
        if why_not_ours(tensors, floats=call.operation.floats) is not None:
            return None
        return problem_of(call, epilogue_of(call))
    except InvalidProblemError:
        return None  # a product that only torch has


def _is_blocked(given: Mapping[str, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.layout in _BLOCKED for x in given.values())


def _of_blocks(found: Statement) -> Problem:
    """Return the Problem of torch's product with a block-sparse weight: bsr @ x, or x @ bsrᵀ from ``linear``."""
    name, a, b, inp = found.op, found.operands["a"], found.operands["b"], found.operands.get("inp")
    scalars = (found.numbers.get("alpha", 1), found.numbers.get("beta", 1))
    if name in ("mm", "addmm") and (a.layout, b.layout) == (torch.sparse_bsr, torch.strided):
        return prepacked_problem(a, b, inp, scalars, by_rows=b.t().is_contiguous())
    if name in ("mm", "addmm") and (a.layout, b.layout) == (torch.strided, torch.sparse_bsc):
        # Assemble bsr from its parts: in inference mode torch cannot transpose a weight from outside it.
        weight = assembled(b.ccol_indices(), b.row_indices(), b.values().mT, (b.shape[1], b.shape[0]))
        return prepacked_problem(weight, a.t(), transposed_operand(inp), scalars, by_rows=True)
    raise InvalidProblemError(f"{name}: torch alone has products of {a.layout} and {b.layout}")


def _is_ours(func: Any) -> bool:
    """Return True for an operator of gemmtune with strided operands."""
    return func.namespace == NAMESPACE and func.overloadpacket.__name__ in OPERATORS


def _own_call(func: Any, given: Mapping[str, Any]) -> Call:
    """Return the call of one of gemmtune's operators."""
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
