"""Parts of a QuantizedWeight: the legal numbers, and the scales and zero points that fit them."""

from collections.abc import Iterable

import torch

from ..errors import InvalidProblemError
from ..problem.dtypes import FLOAT8, dtype_name
from ..problem.operations import ENCODINGS
from ..problem.scales import BLOCKS_OF_B, BLOCKS_OF_WEIGHTS, GROUPS, Blocks, block_of, scale_shapes
from .rounding import SCALE_DTYPES

Tensor = torch.Tensor
STATIC = "_dynamo_static_input_type"
"""Attribute by which ``torch._dynamo.mark_static_address`` marks a tensor. That import would take a second."""


def in_place(part: Tensor) -> Tensor:
    """Mark a part of a weight, which CUDA graphs then read in its own memory, and return it. Graphs would copy it otherwise."""
    if type(part) is Tensor:
        setattr(part, STATIC, "unguarded")
    return part


def versions_of(parts: Iterable[Tensor]) -> tuple[int, ...]:
    """Return how often each part was changed in place. Inference tensors do not count it."""
    return tuple(0 if x.is_inference() else x._version for x in parts)


def size_of(tensor: Tensor, encoding: str) -> tuple[int, int]:
    """Return K and N of numbers, which may be packed two to a byte along K."""
    rows, cols = tensor.shape[-2:]
    return (rows * 2 if encoding else rows, cols)


def blocks_of(tensor: Tensor) -> Blocks:
    """Return the blocks of numbers that one scale may serve."""
    return tuple(dict.fromkeys((*BLOCKS_OF_WEIGHTS, *BLOCKS_OF_B))) if tensor.dtype in FLOAT8 else BLOCKS_OF_WEIGHTS


def check_part(name: str, part: object, tensor: Tensor, encoding: str) -> None:
    """Raise InvalidProblemError for scales or zero points that do not fit the numbers."""
    if not isinstance(part, Tensor) or part.dtype not in SCALE_DTYPES:
        got = part.dtype if isinstance(part, Tensor) else type(part).__name__
        raise InvalidProblemError(f"QuantizedWeight: {name}: got {got}, expected a tensor of float32, float16 or bfloat16")
    if part.device != tensor.device:
        raise InvalidProblemError(f"QuantizedWeight: {name}: got one on {part.device}, expected {tensor.device}; move one of them")
    size, blocks = size_of(tensor, encoding), blocks_of(tensor)
    if tensor.dim() == 3:
        _check_part_of_experts(name, part, tensor, size)
    elif block_of(tuple(part.shape), size, blocks) is None:
        legal = " or ".join(str(list(shape)) for shape in dict.fromkeys(scale_shapes(size, blocks)))
        raise InvalidProblemError(
            f"QuantizedWeight: {name}: got shape {list(part.shape)} for a weight {list(size)}, expected {legal}"
        )


def _check_part_of_experts(name: str, part: Tensor, tensor: Tensor, size: tuple[int, int]) -> None:
    """Raise InvalidProblemError for a part that ``mixed_grouped_mm`` and ``scaled_grouped_mm`` do not take."""
    if name == "zero_points":
        raise InvalidProblemError("QuantizedWeight: zero_points: got some for experts, expected None: grouped products have none")
    (k, n), groups = size, tensor.shape[0]
    along_k = (1,) if tensor.dtype in FLOAT8 else (1, *(k // g for g in GROUPS if k % g == 0))
    shapes = list(dict.fromkeys((groups, s, n) for s in along_k))
    if tuple(part.shape) not in shapes:
        legal = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidProblemError(
            f"QuantizedWeight: {name}: got shape {list(part.shape)} for experts {[groups, k, n]}, expected {legal}"
        )


def check_numbers(numbers: object, encoding: str) -> None:
    """Raise InvalidProblemError for numbers of a dtype or an encoding that no weight has."""
    if encoding not in ENCODINGS:
        expected = ", ".join(map(repr, ENCODINGS))
        raise InvalidProblemError(f"QuantizedWeight: encoding: got {encoding!r}, expected one of {expected}")
    legal = (torch.uint8,) if encoding else (torch.int8, torch.uint8, *FLOAT8)
    if not isinstance(numbers, Tensor) or numbers.dim() not in (2, 3) or numbers.dtype not in legal:
        got = f"{numbers.dtype} of shape {list(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
        names = ", ".join(map(dtype_name, legal))
        raise InvalidProblemError(
            f"QuantizedWeight: numbers: got {got}, expected a 2-D tensor of {names}, or prepack of one, or 3-D for experts"
        )
