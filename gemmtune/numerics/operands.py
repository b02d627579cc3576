"""Operands of a problem: their values, scales and scalars."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import GemmtuneError
from ..problem import Layout, Problem
from ..problem.dtypes import dtype_info
from ..problem.operations import ROLES, Encoding
from ..problem.problem import ScalarClass
from .block_sparse import assembled, random_mask
from .buffers import allocate, flat, held_size, placed, storage_bits

ALPHA, BETA = 1.25, -0.75
"""Values of alpha and beta in random operands of class ``general``: exact in every dtype, not 0 or 1, and unequal."""

SCALES = (0.5, 2.0)
"""Range of random scales. Scales of integer weights are smaller, see ``weight_unit``."""
ZEROS = (0, 7)
"""Range of random zero points, which every encoding holds."""
Lines = slice | torch.Tensor | None
"""Some rows or columns. None means all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Arguments of one kernel call: out = epilogue(alpha · a @ b + c @ d + beta · inp, *extra).

    For the quantized operations a and b represent a · scale_a and (b − zero_b) · scale_b, for the scales that are given.
    With an ``encoding`` b has two numbers in each byte (see ``Problem``).
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    inp: torch.Tensor | None
    extra: tuple[torch.Tensor, ...]
    alpha: float
    beta: float
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    zero_b: torch.Tensor | None = None
    encoding: Encoding = ""
    c: torch.Tensor | None = None
    d: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    """Block-sparse weight [N, K] that a kernel gets instead of b: a sparse_bsr tensor, or the form into which a choice
    packed it.

    b is the matrix that it represents. Operands for timing alone allocate no memory for b.
    """
    offs: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    """Ends of the groups of a grouped product."""

    @property
    def scales(self) -> tuple[torch.Tensor, ...]:
        """Given operands among scale_a, scale_b and zero_b, in the order of ``Problem.scales``."""
        return tuple(x for x in (self.scale_a, self.scale_b, self.zero_b) if x is not None)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Given operands by role, in the order of ``Problem.operands``, without those of the epilogue."""
        given = {role: x for role in ROLES if (x := getattr(self, role)) is not None}
        return given if self.weight is None else given | {"b": self.weight}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that ``Run`` takes: ``named`` without the names, then the epilogue's operands."""
        return (*self.named.values(), *self.extra)

    @property
    def scalars(self) -> tuple[float, ...]:
        """Scalars that ``Run`` takes: alpha and beta if inp is added, else none."""
        return () if self.inp is None else (self.alpha, self.beta)

    @property
    def left(self) -> torch.Tensor:
        """a, or [a c] if there are two products, so that their sum is ``left @ right``."""
        return self.a if self.c is None else torch.cat([self.a, self.c], dim=-1)

    @property
    def right(self) -> torch.Tensor:
        """b, or [b; d] if there are two products."""
        return self.b if self.d is None else torch.cat([self.b, self.d], dim=-2)

    def copied(self, most_bytes: int) -> "Iterator[Operands]":
        """Yield these operands at other addresses, with the same strides, alignment and memory around them, if they are small."""
        named = self.named
        if self.weight is None and sum(x.untyped_storage().nbytes() for x in named.values()) <= most_bytes:
            copies: dict[str, Any] = {
                name: storage_bits(x).clone().view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
                for name, x in named.items()
            }
            yield dataclasses.replace(self, **copies)

    def beside_subnormal(self, *, below: float = 1.0) -> float:
        """Return max|a| + max|b|, where each counts only if the other operand has subnormal numbers, which may be read as
        0.

        Waits for the device. ``below`` times the smallest normal number is the limit below which a number counts as
        subnormal.

        A zero point counts as part of b, c as part of a, d as part of b. Weights that are multiplied by a scale may be
        subnormal, because scales have no lower limit.
        """
        scales_weights = self.scale_b is not None and self.scale_a is None
        total = _most(self.a, self.c) if scales_weights or _has_subnormal(self.b, self.d, below=below) else 0.0
        return total + (_most(self.b, self.d) + _most(self.zero_b) if _has_subnormal(self.a, self.c, below=below) else 0.0)


def _most(*tensors: torch.Tensor | None) -> float:
    return max((float(_wide(x).abs().max()) for x in tensors if x is not None and x.numel()), default=0.0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype that has a maximum, because torch has none for 8-bit floats."""
    return x.float() if x.element_size() == 1 else x


def _has_subnormal(*tensors: torch.Tensor | None, below: float) -> bool:
    def within(x: torch.Tensor) -> bool:
        magnitude, limit = _wide(x).abs(), below * dtype_info(x.dtype).smallest_normal
        if float(magnitude.min()) >= limit:  # most operands have no zeros either
            return False
        return bool(((magnitude > 0) & (magnitude < limit)).any())

    return any(within(x) for x in tensors if x is not None and x.numel())


def fill_random(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a tensor and its padding with standard normal numbers, integers of the whole range, or random booleans."""
    memory = flat(tensor)
    if memory.numel() == 0:
        return
    if tensor.dtype == torch.bool:  # a mask that an epilogue reads
        memory.random_(0, 2, generator=generator)
    elif dtype_info(tensor.dtype).is_integer:
        bounds = torch.iinfo(tensor.dtype)
        memory.random_(bounds.min, bounds.max + 1, generator=generator)
    elif tensor.element_size() == 1 or (tensor.device.type == "cpu" and tensor.element_size() == 2):
        # torch cannot draw 8-bit floats, and draws 16-bit ones one by one on a CPU
        memory.copy_(torch.empty(memory.numel(), device=memory.device).normal_(generator=generator))
    else:
        memory.normal_(generator=generator)


def scalar_value(scalar: ScalarClass, general: float) -> float:
    """Return 0 or 1 for the classes "zero" and "one", and ``general`` for the class of that name."""
    return {"zero": 0.0, "one": 1.0, "general": general}[scalar]


def weight_unit(problem: Problem) -> float:
    """Return the power of two that multiplies random scales of b, so that integer weights come out near 1 too."""
    if not problem.widens_b:
        return 1.0
    return 0.25 if problem.encoding else 2.0**-6 if dtype_info(problem.b.dtype).is_integer else 1.0


def random_scale(layout: Layout, generator: torch.Generator, device: torch.device, *, unit: float = 1.0) -> torch.Tensor:
    """Draw scales of any value in the range SCALES, times ``unit``, in a buffer of the layout."""
    low, high = SCALES
    values = torch.empty(held_size(layout), device=device).uniform_(low * unit, high * unit, generator=generator)
    return placed(layout, device, values)


def random_zero(
    layout: Layout, generator: torch.Generator, device: torch.device, low: int, high: int, *, step: float = 1.0
) -> torch.Tensor:
    """Draw zero points from ``low`` to ``high``, multiples of ``step`` (a power of two up to 1), in a buffer of the layout."""
    first, last = int(low / step), int(high / step)
    values = torch.randint(first, last + 1, held_size(layout), generator=generator, dtype=torch.int32, device=device)
    return placed(layout, device, values * step)


def scale_factor(operands: Operands, rows: Lines = None, cols: Lines = None) -> torch.Tensor | None:
    """Return scale_a · scale_b for these rows and columns, float64 [rows or 1, cols or 1], exact; None without scales.

    Raises GemmtuneError if the scales change along K, so that they cannot become a factor of the result.
    """
    if operands.scale_a is None or operands.scale_b is None:
        return None
    if operands.scale_a.shape[1:2].numel() > 1 or operands.scale_b.shape[:1].numel() > 1:
        shapes = " and ".join(str(list(x.shape)) for x in operands.scales)
        raise GemmtuneError(f"scales: got shapes {shapes}, expected none that changes along K")
    return _lines(operands.scale_a, rows).unsqueeze(-1) * _lines(operands.scale_b, cols)


def _lines(scale: torch.Tensor, lines: Lines) -> torch.Tensor:
    values = scale.double().flatten()
    return values if lines is None or values.numel() == 1 else values[lines]


def _random_weight(problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """Draw a random block-sparse weight of the problem's class without making the dense one."""
    sparsity, (k, n) = problem.blocks, problem.b.size
    mask = random_mask((n, k), sparsity, generator)
    col = mask.nonzero(as_tuple=True)[1]
    values = allocate(Layout.contiguous((len(col), sparsity.block_n, sparsity.block_k), problem.b.dtype), generator.device)
    fill_random(values, generator)
    index = torch.int64 if sparsity.wide_index else torch.int32
    crow = torch.nn.functional.pad(mask.sum(dim=1).cumsum(0), (1, 0))
    return assembled(crow.to(index), col.to(index), values, (n, k))


def routed(problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """Draw group offsets as a balanced router gives them: rows or terms go to random groups with equal probability."""
    assert problem.offs is not None
    total = problem.k if problem.divides_terms else problem.m
    which = torch.randint(problem.groups, (total,), generator=generator, device=generator.device)
    counts = torch.bincount(which, minlength=problem.groups)
    return placed(problem.offs, generator.device, counts.cumsum(0))


def drawn_routes(problem: Problem, generator: torch.Generator, *, exact: bool = False) -> Mapping[str, torch.Tensor]:
    """Draw the routing operands by role: any rows of a, slots in any order, and weights, powers of two if ``exact``."""
    device, found = generator.device, {}
    if problem.rows is not None:
        tokens = problem.a.size[0]
        picked = torch.randint(tokens, problem.rows.size, generator=generator, device=device)
        picked[:1], picked[-1:] = tokens - 1, 0
        found["rows"] = placed(problem.rows, device, picked)
    if problem.slots is not None and problem.weights is not None:
        found["slots"] = placed(problem.slots, device, torch.randperm(problem.m, generator=generator, device=device))
        if exact:
            powers = torch.randint(0, 2, problem.weights.size, generator=generator, device=device)
            found["weights"] = placed(problem.weights, device, torch.exp2(powers.double()))
        else:
            found["weights"] = random_scale(problem.weights, generator, device)
    return found


def random_operands(problem: Problem, device: torch.device, *, seed: int) -> Operands:
    """Draw operands with the problem's layouts and standard normal values on ``device``.

    The numbers come from a separate generator, so torch's global state is unchanged. ``inp`` is random even if beta is
    zero. Integers cover the whole range of their dtype, and packed ones that of their encoding. Scales come from
    ``random_scale``.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def filled(layout: Layout) -> torch.Tensor:
        tensor = allocate(layout, device)
        fill_random(tensor, generator)
        return tensor

    def scale(layout: Layout | None, unit: float = 1.0) -> torch.Tensor | None:
        return None if layout is None else random_scale(layout, generator, device, unit=unit)

    weight = None if problem.sparsity is None else _random_weight(problem, generator)
    return Operands(
        a=filled(problem.a),
        b=filled(problem.b) if weight is None else torch.zeros((), dtype=weight.dtype, device=device).expand(problem.b.size),
        weight=weight,
        inp=filled(problem.inp) if problem.inp is not None else None,
        extra=tuple(filled(layout) for layout in (problem.epilogue.operands if problem.epilogue else ())),
        out=allocate(problem.out, device),
        alpha=scalar_value(problem.alpha, ALPHA),
        beta=scalar_value(problem.beta, BETA),
        scale_a=scale(problem.scale_a),
        scale_b=scale(problem.scale_b, weight_unit(problem)),
        zero_b=None if problem.zero_b is None else random_zero(problem.zero_b, generator, device, *ZEROS),
        encoding=problem.encoding,
        c=None if problem.c is None else filled(problem.c),
        d=None if problem.d is None else filled(problem.d),
        offs=None if problem.offs is None else routed(problem, generator),
        **drawn_routes(problem, generator),
    )
