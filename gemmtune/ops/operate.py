"""Path of every public operation, from its arguments to a launch.

A plain call on plain tensors looks for a plan under a key, which it reads off the operands in about a microsecond. A plain call
without a plan is checked, planned and run. A call that torch has to see (transforms, modes, traces, the profiler, subclasses) goes
through the operator of the same name.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from ..dispatch.arguments import Call, autocast_done, call_of, is_autocast_on
from ..dispatch.call import attempted, by_torch, run
from ..dispatch.checks import check_call, is_frozen, road_of
from ..dispatch.keys import NOTHING, key_of, with_values
from ..dispatch.plan import Ready
from ..dispatch.prepack import PackedOperand
from ..dispatch.ready import generation, keep_ready, ready, ready_for_rows, served_rows
from ..dispatch.scalars import usual_classes
from ..dispatch.statement import meaning_of, noted, stated
from ..native.lookup import Above, keep, native, prepare
from ..operators.library import by_operator
from ..problem.fused import NAMES
from ..problem.operations import DENSE_OPS, SPARSE_OPS
from ..settings import current as current_settings
from ..settings import given as given_settings
from .autograd import Backward, differentiated

log = logging.getLogger("gemmtune")
Tensor = torch.Tensor
_BEFORE_OPERANDS = 8
is_traced_by_dynamo = torch.compiler.is_dynamo_compiling
is_compiling = torch.compiler.is_compiling
modes = torch._C._len_torch_dispatch_stack
function_mode = torch._C._is_torch_function_mode_enabled
is_tracing = torch._C._is_tracing


def operate(
    name: str,
    operands: tuple[Any, ...],
    out: Tensor | None,
    epilogue: Callable[..., Tensor] | None,
    epilogue_args: Sequence[Tensor],
    scalars: tuple[Any, ...] = (),
    options: tuple[Hashable, ...] = (),
    brought: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Do a call of the public function ``name``.

    ``operands`` are in the row's order, optional ones at the end left out if they are None. ``brought`` is the argument that
    becomes the first operand of the epilogue (``problem.fused``).
    """
    if not is_traced_by_dynamo() and (look_up := native.call) is not None:
        result: Tensor = look_up(name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype, *operands)
        return result
    return in_python(False, name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype, *operands)


def in_python(missing: bool, *arguments: Any, backward: Backward | None = None) -> Tensor:
    """Do what ``operate`` does without the native look-up. Operands come last.

    The native look-up gets the plan if it lacks one for the call (``missing``). ``backward`` has the products of the backward pass,
    which are ``DENSE`` by default.
    """
    name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype = arguments[:_BEFORE_OPERANDS]
    operands = arguments[_BEFORE_OPERANDS:]
    key = None
    if not (is_traced_by_dynamo() or modes() or function_mode() or profiler._is_profiler_enabled or is_tracing()):
        given = operands if brought is None else (*operands, brought)
        asked: Hashable = options if out_dtype is None else (options, out_dtype)
        if scalars:
            classes = usual_classes(*scalars)
            asked = (*classes, *options) if classes is not None else None
        if asked is not None:
            keyed, asked = with_values(given, asked) if name in SPARSE_OPS else (given, asked)
            if out is None and epilogue is None and epilogue_args is NOTHING:
                key = key_of(name, keyed, asked)
            else:
                key = _key_of_more(name, keyed, asked, out, epilogue, epilogue_args)
                given = given if key is None else (*given, *epilogue_args)
            number = generation.number
            found = ready.get(key) if key is not None else None
            entry = ready_for_rows(key) if found is None and key is not None else found
            if missing and entry is not None and not _served_rows(number, entry, arguments) and found is not None:
                keep(number, entry, arguments)
            if entry is not None:
                b = given[1]
                packed = b.__class__ is PackedOperand
                tensors = (given[0], b.for_choice(entry.plan.choice), *given[2:]) if packed and entry is entry.plan else given
                if out is None:
                    return entry.new(tensors, scalars)
                if entry.plan.apart(out, (given[0], b.tensor, *given[2:]) if packed else given):
                    return entry.plan.into(out, tensors, scalars)
    return _without_plan(missing, key, backward or DENSE, arguments)


def _without_plan(missing: bool, key: Hashable | None, backward: Backward, arguments: tuple[Any, ...]) -> Tensor:
    """Do a call of ``in_python`` that has no plan under its key."""
    name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype = arguments[:_BEFORE_OPERANDS]
    roles = (operand.role for operand in NAMES[name].operands)
    given = dict(zip(roles, arguments[_BEFORE_OPERANDS:], strict=False))
    call = call_of(
        name, given, scalars=scalars, options=options, brought=brought, out_dtype=out_dtype, out=out, epilogue=epilogue,
        epilogue_args=epilogue_args,
    )  # fmt: skip
    if is_compiling():
        kind = call.a.device.type
        if out is not None and is_autocast_on(kind):
            with torch.autocast(kind, enabled=False):
                return _in_a_graph(call)
        return _in_a_graph(call)
    number = generation.number
    result, made = _carry_out(key, call, backward)
    if missing and key is not None and made is not None:
        _served_rows(number, made, arguments)
    return result


def _in_a_graph(call: Call) -> Tensor:
    """Add a call to the graph of torch's compiler: an operation of torch if torch has it, otherwise an operator.

    The bits of torch's dense products depend on the batch. With ``batch_invariant`` an operator reads the settings in each run.
    """
    dense = call.operation.name in DENSE_OPS and not is_batch_invariant()
    return by_torch(call) if dense or call.operation.name in SPARSE_OPS else by_operator(call)


def is_batch_invariant() -> bool:
    """Return the setting. A graph has that of its first call."""
    return given_settings().batch_invariant


# The mark of torch.compiler.assume_constant_result, which would import the compiler. The setting is read once for a graph.
is_batch_invariant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _served_rows(number: int, entry: Ready, call: tuple[Any, ...]) -> bool:
    """Return True if the native look-up serves calls like this one with any M from now on, by a table and without a gradient."""
    shared = entry.plan.shared if entry is entry.plan else None
    return shared is not None and served_rows(number, shared, call)


def _key_of_more(
    name: str,
    given: tuple[Any, ...],
    asked: Hashable,
    out: Tensor | None,
    epilogue: Callable[..., Tensor] | None,
    epilogue_args: Sequence[Tensor],
) -> Hashable | None:
    """Return the key of a call with ``out`` or an epilogue."""
    meaning = None
    if epilogue is not None:
        meaning = meaning_of(epilogue)
        if meaning is None or epilogue_args.__class__ not in (tuple, list):
            return None
        asked = (asked, len(given), meaning)
        given = (*given, *epilogue_args)
    elif epilogue_args is not NOTHING and (epilogue_args.__class__ not in (tuple, list) or epilogue_args):
        return None
    if out is None:
        return key_of(name, given, asked)
    if isinstance(out, Tensor) and is_frozen(out):
        return None
    return key_of(name, (*given, out), (asked, "out"))


def _carry_out(key: Hashable | None, call: Call, backward: Backward) -> tuple[Tensor, Ready | None]:
    """Check and run a call without a plan under its key. Return the result and the new plan, None if there is none."""
    check_call(call)
    with autocast_done(call) as cast:
        road, reason = road_of(call)
        if road == "torch":
            log.debug("%s runs by torch: %s", call.name, reason)
            return attempted(by_torch, call, reason), None
        if road == "operator":
            return attempted(by_operator, call, reason), None
        # By a plan, which the next call finds under its key.
        problem = stated(call)
        with noted(lambda: problem):
            result, entry = differentiated(call, problem, backward) if call.wants_grad else run(call, problem)
        keep_ready(None if cast else key, entry)
    prepare(FOR_NATIVE, current_settings())
    return result, entry


DENSE = Backward.strided(operate)
"""Products of the backward pass of a call with strided operands."""
FOR_NATIVE = Above(in_python=in_python, meaning_of=meaning_of, packed_type=PackedOperand)
"""Arguments of ``native.lookup.prepare`` and ``load``."""
