"""What can be wrong with the operands of a call, and what makes a call torch's business."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad, profiler

from ..errors import InvalidProblemError
from ..problem.dtypes import DTYPES
from .arguments import Call

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
TRACED_TYPES = (FakeTensor, FunctionalTensor)
"""Types by which torch traces. They have no memory of their own."""
_KNOWN_TYPES = (*_PLAIN_TYPES, *TRACED_TYPES)
"""Types for which every operator can be called."""

Road = Literal["torch", "operator", "plan"]


def check_call(call: Call) -> None:
    """Check the arguments of a call, whoever runs it. Raises InvalidProblemError for mixed devices or a missing gradient."""
    wanting = call.wants_grad
    if wanting and call.operation.gradient is None:
        raise no_gradient(call.name, wanting[0])
    if wanting and call.out is not None:
        raise InvalidProblemError(
            f"{call.name}: a call with out= is not differentiable, but an input requires grad; leave out out=, "
            "or use torch.no_grad()"
        )
    check_tensors(call)
    if call.out is not None and is_frozen(call.out):
        raise InvalidProblemError(
            f"{call.name}: out: got an inference tensor outside of torch.inference_mode(), expected one that torch can write; "
            "clone() it, or call in inference mode"
        )


def is_frozen(x: torch.Tensor) -> bool:
    """Return True for an inference tensor outside of inference mode, which nothing may write."""
    return x.is_inference() and not torch.is_inference_mode_enabled()


def no_gradient(name: str, argument: str) -> InvalidProblemError:
    """Return the error for an argument that requires a gradient of an operation without one."""
    return InvalidProblemError(
        f"{name}: {argument} requires grad, but the operation has no gradient; detach it, or use torch.no_grad()"
    )


def check_tensors(call: Call) -> None:
    """Raise InvalidProblemError unless all arguments are tensors on one device."""
    check_operands(call.name, [*call.inputs, *([("out", call.out)] if call.out is not None else [])])


def road_of(call: Call) -> tuple[Road, str]:
    """Return who runs a checked call, and why: torch's composition, the operator that torch's modes see, or a plan."""
    tensors, row = [x for _, x in call.inputs], call.operation
    # Tensors that torch's own operations alone support. No operator takes a sparse tensor.
    reason = (why_not_ours if row.sparse else why_composed)(tensors, floats=row.floats)
    if reason is not None:
        return "torch", reason
    # Tensors without readable memory, and modes that see torch's operators.
    reason = why_not_plain(tensors)
    if reason is None and call.out is not None and call.out.layout == torch.strided:
        reason = why_unreadable(call.out)
    if not row.sparse and (reason is not None or watched(tensors)):
        return "operator", reason or "a mode, a trace or the profiler is on"
    return "plan", ""


def is_dense(x: Any) -> TypeGuard[torch.Tensor]:
    """Return True for a plain dense tensor. Only these have a shape, strides and an address that can be read without an error."""
    return x.__class__ in _PLAIN_TYPES and x.layout is torch.strided and not x.is_nested


def check_operands(op: str, named: Sequence[tuple[str, object]]) -> None:
    """Raises InvalidProblemError unless all are tensors on one device (0-D tensors may be on the CPU, as torch allows)."""
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            remedy = "; a number is part of the function, as in lambda x: 2.5 * x" if name.startswith("epilogue_args") else ""
            raise InvalidProblemError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}{remedy}")
        if value.is_nested:
            raise InvalidProblemError(f"{op}: {name}: got a nested tensor, expected a plain one; pad it, or multiply its parts")
        if value.is_quantized:
            raise InvalidProblemError(
                f"{op}: {name}: got a tensor of {value.dtype}, expected one of plain numbers; give x.dequantize(), or x.int_repr() "
                "to mixed_mm with its scale"
            )
        if is_dense(value) and _lacks_memory(value):
            raise InvalidProblemError(
                f"{op}: {name}: got a tensor {list(value.shape)} with a storage of {value.untyped_storage().nbytes()} bytes, "
                "expected its numbers in memory; a sharded parameter has them in its module's forward"
            )
    tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
    device = tensors[0][1].device
    for name, tensor in tensors:
        if tensor.device != device and not (tensor.dim() == 0 and tensor.device.type == "cpu"):
            raise InvalidProblemError(
                f"{op}: all operands must be on one device, got {tensors[0][0]} on {device} and {name} on {tensor.device}; "
                "move one of them"
            )


def _lacks_memory(x: torch.Tensor) -> bool:
    """Return True if a plain tensor has more elements than its storage holds, as after ``resize_`` of the storage."""
    if x.is_meta or not x.numel() or _has_no_storage(x):
        return False
    return x.untyped_storage().nbytes() < x.storage_offset() * x.element_size() + _span_bytes(x)


def check_extra(op: str, named: Iterable[tuple[str, torch.Tensor]], size: Sequence[int]) -> None:
    """Raises InvalidProblemError unless every operand of the epilogue broadcasts to the result."""
    for name, x in named:
        shape = (1,) * (len(size) - x.dim()) + tuple(x.shape)
        if len(shape) != len(size) or any(given not in (1, wanted) for given, wanted in zip(shape, size, strict=True)):
            raise InvalidProblemError(
                f"{op}: {name}: got an operand of shape {tuple(x.shape)}, expected one that broadcasts to {tuple(size)}"
            )


def why_composed(tensors: Sequence[torch.Tensor], *, floats: bool = True) -> str | None:
    """Return why torch's own operations must do a call, as for subclasses of Tensor with a dispatch of their own, or None.

    Tensors of torch's tracing know all operations. Torch has products of other dtypes than our ``floats``.
    """
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    for x in tensors:
        if type(x) not in _KNOWN_TYPES and _dispatches(x):
            return f"{type(x).__name__} is a subclass of Tensor with a dispatch of its own"
        if x.layout != torch.strided:
            return f"the layout is {x.layout}"
        if x.device.type not in ("cpu", "cuda", "meta"):
            return f"the device is {x.device}"
    if floats and tensors[0].dtype not in DTYPES:
        return f"the dtype is {tensors[0].dtype}"
    return None


def _dispatches(x: torch.Tensor) -> bool:
    """Return whether the class of a tensor has a dispatch of its own: its numbers need not be in its memory."""
    return type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def why_not_ours(tensors: Sequence[torch.Tensor], *, floats: bool = True) -> str | None:
    """The reason for which no choice of ours can do a call on these tensors at once; None if one can."""
    return why_composed(tensors, floats=floats) or why_not_plain(tensors)


def why_not_plain(tensors: Sequence[torch.Tensor]) -> str | None:
    """Return the reason for which the memory of tensors that ``why_composed`` lets pass cannot be read at once; None if it can."""
    for x in tensors:
        if type(x) not in _PLAIN_TYPES:
            return f"{type(x).__name__} is a subclass of Tensor"
        if x.device.type == "meta":
            return "the device is meta"
        if why_unreadable(x) is not None:
            return why_unreadable(x)
    return None


def why_unreadable(x: torch.Tensor) -> str | None:
    """The reason for which the memory of a dense tensor has not its numbers; None if it has."""
    if x.is_neg() or x.is_conj():
        return "a view is lazily negated or conjugated"
    return "a torch.func transform is active" if _has_no_storage(x) else None


def _has_no_storage(x: torch.Tensor) -> bool:
    # torch.autograd.grad(is_grads_batched=True) has batches that are not those of torch.func, but have no storage either.
    return not torch._C._has_storage(x) or torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x)


def watched(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if torch has to see a call as one of its operators: a mode, a trace or the profiler is on."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._has_torch_function(tuple(tensors))
        or profiler._is_profiler_enabled
        or torch._C._is_tracing()
    )


def check_out(
    op: str,
    out: torch.Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    inputs: Sequence[tuple[str, torch.Tensor]],
) -> None:
    """Raises InvalidProblemError unless ``out`` can take the result: right shape, dtype and device, and no memory that is read."""
    if not isinstance(out, torch.Tensor):
        raise InvalidProblemError(f"{op}: out must be a torch.Tensor, got {type(out).__name__}")
    if out.layout != torch.strided or _dispatches(out):
        raise InvalidProblemError(
            f"{op}: out must be a dense tensor with memory, got {type(out).__name__} of layout {out.layout}; give a plain tensor"
        )
    if tuple(out.shape) != tuple(size):
        raise InvalidProblemError(f"{op}: out must have shape {list(size)}, got {list(out.shape)}")
    if out.dtype != dtype:
        raise InvalidProblemError(f"{op}: out must have dtype {dtype}, got {out.dtype}")
    if out.device != device:
        raise InvalidProblemError(f"{op}: out must be on {device}, got {out.device}")
    if _overlaps_itself(out):
        raise InvalidProblemError(
            f"{op}: several elements of out share memory (strides {out.stride()}); give a tensor without overlap"
        )
    for name, tensor in inputs:
        if overlaps(out, tensor):
            raise InvalidProblemError(f"{op}: out shares memory with {name}; give an out of its own")


def overlaps(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if an element of ``x`` and one of ``y`` share memory. Exact, also for interleaved views of one buffer."""
    if x.device != y.device or not x.numel() or not y.numel():
        return False
    (x_low, x_high), (y_low, y_high) = _byte_range(x), _byte_range(y)
    if x_high <= y_low or y_high <= x_low:
        return False
    if x.is_contiguous() and y.is_contiguous():
        return True
    low = min(x_low, y_low)
    touched = torch.zeros(max(x_high, y_high) - low, dtype=torch.bool, device=x.device)
    _bytes_of(touched, x, x_low - low).fill_(True)
    return bool(_bytes_of(touched, y, y_low - low).any())


def apart(x: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of ``x``, in memory of its own: a kernel that is bound to those reads it as it would read ``x``."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride())


def _byte_range(x: torch.Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + _span_bytes(x)


def _span_bytes(x: torch.Tensor) -> int:
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _bytes_of(window: torch.Tensor, x: torch.Tensor, offset: int) -> torch.Tensor:
    """The bytes of ``x`` as a view of a window of memory with one element for each byte."""
    width = x.element_size()
    return window.as_strided((*x.shape, width), (*(s * width for s in x.stride()), 1), offset)


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Return True if elements of ``x`` share memory: exact for views by indexing, where each stride steps over all below it."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
