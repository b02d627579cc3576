"""Recording the products of a run: which Problems it asks for, while everything runs as before."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..dispatch.arguments import Call, transposed_operand
from ..dispatch.calls import call_of
from ..dispatch.checks import why_not_ours
from ..dispatch.grouped import form_of
from ..dispatch.statement import epilogue_of, problem_of
from ..errors import GemmtuneError, InvalidProblemError
from ..numerics.block_sparse import assembled
from ..operators.schema import NAMESPACE, OPERATORS
from ..problem import Problem
from ..sparse.operators import BODIES
from .recording import Recording
from .scaled_groups import SCALES, stated
from .scaled_groups import TARGETS as SCALED_GROUPS
from .sparsify import prepacked_problem

Tensor = torch.Tensor
aten = torch.ops.aten
_OPERATIONS: dict[Any, str] = {
    aten.mm: "mm", aten.bmm: "bmm", aten.addmm: "addmm", aten.baddbmm: "baddbmm", aten.addmm_: "addmm",
    aten.baddbmm_: "baddbmm", aten._int_mm: "int_mm", aten._scaled_mm: "scaled_mm", aten._grouped_mm: "grouped_mm",
    **{target.overloadpacket: "scaled_grouped_mm" for target in SCALED_GROUPS},
}  # fmt: skip
"""torch's products, and the operations that they are."""
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
_COMPOSED = (aten.linear.default, aten.matmul.default, aten.einsum.default)
"""What inference mode hands on whole, and is made of products."""


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
        if func in _COMPOSED:
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace == NAMESPACE and (body := BODIES.get(func.overloadpacket.__name__)) is not None:
            with self:
                return body(*args, **kwargs)
        if not self._whole and (func.overloadpacket in _OPERATIONS or _is_ours(func)):
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
        if _is_blocked(given):
            problem = _problem(func, given)  # which depends on where its blocks are
        else:
            key = (func, *(_look(value) for value in given.values()))
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
        if _is_blocked(given):
            return _of_blocks(_OPERATIONS[func.overloadpacket], given)
        call = _own_call(func, given) if _is_ours(func) else _call(_OPERATIONS[func.overloadpacket], given)
        tensors = [x for _, x in call.inputs]
        if why_not_ours(tensors, floats=call.operation.floats) is not None:
            return None
        return problem_of(call, epilogue_of(call))
    except InvalidProblemError:
        return None  # torch has more products than we do: the call is its business


def _is_blocked(given: Mapping[str, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.layout in _BLOCKED for x in given.values())


def _of_blocks(name: str, given: Mapping[str, Any]) -> Problem:
    """What torch's product with a block-sparse weight is: bsr @ x, or as ``linear`` has it, x @ bsrᵀ."""
    a, b = (given[x] for x in _factors(given))
    scalars = (given.get("alpha", 1), given.get("beta", 1))
    inp = given["self"] if name == "addmm" else None
    if name in ("mm", "addmm") and (a.layout, b.layout) == (torch.sparse_bsr, torch.strided):
        return prepacked_problem(a, b, inp, scalars, by_rows=b.t().is_contiguous())
    if name in ("mm", "addmm") and (a.layout, b.layout) == (torch.strided, torch.sparse_bsc):
        # Made of parts: in inference mode torch transposes no weight that was made outside of it.
        weight = assembled(b.ccol_indices(), b.row_indices(), b.values().mT, (b.shape[1], b.shape[0]))
        return prepacked_problem(weight, a.t(), transposed_operand(inp), scalars, by_rows=True)
    raise InvalidProblemError(f"{name}: torch alone has it of {a.layout} and {b.layout}")


def _factors(given: Mapping[str, Any]) -> tuple[str, str]:
    return ("mat1", "mat2") if "mat1" in given else ("batch1", "batch2") if "batch1" in given else ("self", "mat2")


def _is_ours(func: Any) -> bool:
    """An operator of a row of the table whose operands are strided."""
    return func.namespace == NAMESPACE and func.overloadpacket.__name__ in OPERATORS


def _own_call(func: Any, given: Mapping[str, Any]) -> Call:
    operator = OPERATORS[func.overloadpacket.__name__]
    tensors = [given.get(name) for name in operator.tensors]
    return operator.call(tensors, {name: x for name, x in given.items() if name not in operator.tensors and name != "out"})


def _call(name: str, given: Mapping[str, Any]) -> Call:
    if name == "scaled_grouped_mm":
        return _scaled_grouped(given)
    a, b = _factors(given)
    operands = {"a": given[a], "b": given[b]}
    if name in ("addmm", "baddbmm"):
        return call_of(name, operands | {"inp": given["self"]}, scalars=(given.get("alpha", 1), given.get("beta", 1)))
    if name == "grouped_mm":
        if given.get("bias") is not None or given.get("out_dtype") not in (None, given["self"].dtype):
            raise InvalidProblemError("grouped_mm: torch alone has a bias and other dtypes")
        form = form_of(name, given["self"], given["mat2"], given.get("offs"))
        return call_of(form.op, dict(zip(("a", "b", "offs"), form.operands, strict=False)))
    if name == "scaled_mm":
        return call_of(
            name, operands | {"scale_a": given["scale_a"], "scale_b": given["scale_b"]}, brought=given.get("bias"),
            options=(bool(given.get("use_fast_accum", False)),), out_dtype=given.get("out_dtype"),
        )  # fmt: skip
    return call_of(name, operands)


def _scaled_grouped(given: Mapping[str, Any]) -> Call:
    found = stated({name: value for name, value in given.items() if value is not None and value is not False and value != []})
    if isinstance(found, str) or any(x.dim() != dims for x, dims in ((found[0]["a"], 2), (found[0]["b"], 3))):
        raise InvalidProblemError("scaled_grouped_mm: torch alone has its bias, its other scales and its other forms")
    operands, numbers = found
    operands |= {name: operands[name].unsqueeze(1) for name in SCALES}
    return call_of("scaled_grouped_mm", operands, options=(numbers["fast_accum"],), out_dtype=numbers["out_dtype"])
