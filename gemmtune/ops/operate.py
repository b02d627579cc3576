"""The path of every public operation, from its arguments to a launch.

A plain call on plain tensors looks for a plan under a key that it can read off the operands in about a microsecond. A plain call
that has no plan yet is checked, planned, and run. Everything that torch has to see (its transforms, modes, traces, the profiler,
subclasses) goes through the operator of the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from ..dispatch.arguments import Call
from ..dispatch.call import attempted, cast_for_autocast, check_call, no_gradient, refuse_out, run
from ..dispatch.calls import call_of
from ..dispatch.checks import watched, why_composed, why_not_plain, why_unreadable
from ..dispatch.epilogues import meaning_of
from ..dispatch.fallback import by_torch
from ..dispatch.keys import NOTHING, key_of
from ..dispatch.native_rows import served_rows
from ..dispatch.plan import Ready
from ..dispatch.prepack import PackedOperand
from ..dispatch.ready import generation, keep_ready, ready, ready_for_rows
from ..native.lookup import Above, keep, native, prepare
from ..operators.library import by_operator
from ..problem.fields import scalar_class
from ..problem.fused import NAMES
from ..problem.operations import DENSE_OPS
from .autograd import differentiated

log = logging.getLogger("gemmtune")
Tensor = torch.Tensor
_NUMBERS = (int, float)
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
    return _in_python(False, name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype, *operands)


def _in_python(missing: bool, *arguments: Any) -> Tensor:
    """``operate`` without the native look-up, which is told of the plan if it only is ``missing`` there. Operands come last."""
    name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype = arguments[:_BEFORE_OPERANDS]
    operands = arguments[_BEFORE_OPERANDS:]
    key = None
    if not (is_traced_by_dynamo() or modes() or function_mode() or profiler._is_profiler_enabled or is_tracing()):
        given = operands if brought is None else (*operands, brought)
        asked: Hashable = options if out_dtype is None else (options, out_dtype)
        if scalars:
            known = scalars[0].__class__ in _NUMBERS and scalars[1].__class__ in _NUMBERS
            asked = (scalar_class(scalars[0]), scalar_class(scalars[1])) if known else None
        if asked is not None:
            if out is None and epilogue is None and epilogue_args is NOTHING:
                key = key_of(name, given, asked)
            else:
                key, given = _key_of_more(name, given, asked, out, epilogue, epilogue_args)
            number = generation.number
            found = ready.get(key) if key is not None else None
            entry = ready_for_rows(key) if found is None and key is not None else found
            if missing and entry is not None and not _served_rows(number, entry, arguments) and found is not None:
                keep(number, entry, arguments)
            if entry is not None:
                b = given[1]
                packed = b.__class__ is PackedOperand
                tensors = (given[0], b.for_choice(entry.plan.choice), *given[2:]) if packed else given
                if out is None:
                    return entry.new(tensors, scalars)
                if entry.plan.apart(out, (given[0], b.tensor, *given[2:]) if packed else given):
                    return entry.plan.into(out, tensors, scalars)
    roles = (operand.role for operand in NAMES[name].operands)
    call = call_of(
        name, dict(zip(roles, operands, strict=False)), scalars=scalars, options=options, brought=brought, out_dtype=out_dtype,
        out=out, epilogue=epilogue, epilogue_args=epilogue_args,
    )  # fmt: skip
    if is_compiling():
        kind = call.a.device.type
        if out is not None and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return _in_a_graph(call)
        return _in_a_graph(call)
    number = generation.number
    result, made = _considered(key, call)
    if missing and key is not None and made is not None:
        _served_rows(number, made, arguments)
    return result


def _in_a_graph(call: Call) -> Tensor:
    """What torch has is its own operation there, which its compiler knows; the rest is an operator in the graph."""
    return by_torch(call) if call.operation.name in DENSE_OPS else by_operator(call)


def _served_rows(number: int, entry: Ready, call: tuple[Any, ...]) -> bool:
    """Whether the native look-up serves calls like this one with any M from now on: those by a table, without a gradient."""
    shared = entry.plan.shared if entry is entry.plan else None
    return shared is not None and served_rows(number, shared, call)


def _key_of_more(
    name: str,
    given: tuple[Any, ...],
    asked: Hashable,
    out: Tensor | None,
    epilogue: Callable[..., Tensor] | None,
    epilogue_args: Sequence[Tensor],
) -> tuple[Hashable | None, tuple[Any, ...]]:
    """The key of a call with ``out`` or an epilogue, and all that it reads."""
    meaning = None
    if epilogue is not None:
        meaning = meaning_of(epilogue)
        if meaning is None or epilogue_args.__class__ not in (tuple, list):
            return None, given
        asked = (asked, len(given), meaning)
        given = (*given, *epilogue_args)
    elif epilogue_args is not NOTHING and epilogue_args != ():
        return None, given
    if out is None:
        return key_of(name, given, asked), given
    return key_of(name, (*given, out), (asked, "out")), given


def _considered(key: Hashable | None, call: Call) -> tuple[Tensor, Ready | None]:
    """Do a call without a plan at hand. Return its result, and the plan that was made for it if there is one."""
    # Check the arguments, once for whatever does the call.
    wanting = call.wants_grad
    if wanting and call.operation.gradient is None:
        raise no_gradient(call.name, wanting[0])
    if wanting:
        refuse_out(call)
    check_call(call)
    # Cast as autocast does.
    kind = call.a.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        if call.out is None:  # torch casts nothing where out= is given
            cast_for_autocast(call)
        # Without this, a product of float32 within a kernel would be cast once more.
        with torch.autocast(kind, enabled=False):
            return _routed(None, call)
    return _routed(key, call)


def _routed(key: Hashable | None, call: Call) -> tuple[Tensor, Ready | None]:
    """Have a checked call done by torch's composition, by the operator, or by a plan."""
    # Tensors that only torch's own operations know.
    tensors, floats = [x for _, x in call.inputs], not call.operation.quantized
    reason = why_composed(tensors, floats=floats)
    if reason is not None:
        log.debug("%s runs by torch: %s", call.name, reason)
        return attempted(by_torch, call, reason), None
    # Tensors without readable memory, and whoever watches torch's operators.
    reason = why_not_plain(tensors)
    if reason is None and call.out is not None and call.out.layout == torch.strided:
        reason = why_unreadable(call.out)
    if reason is not None or watched(tensors):
        return attempted(by_operator, call, reason or "a mode, a trace or the profiler is on"), None
    # All others: by a plan, which the next call finds.
    result, entry = differentiated(call, operate) if call.wants_grad else run(call)
    keep_ready(key, entry)
    prepare(FOR_NATIVE)
    return result, entry


FOR_NATIVE = Above(in_python=_in_python, meaning_of=meaning_of, packed_type=PackedOperand)
"""What ``native.lookup.prepare`` and ``load`` are given, whoever calls them."""
