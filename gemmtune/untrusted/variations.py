"""Numbers of the operands of timed calls: structure that operands in use have, and changes after which a kept result is wrong."""

import math
import random
from collections.abc import Sequence

import torch

from ..numerics.buffers import overlapping
from ..numerics.operands import Operands
from ..problem import Layout
from ..problem.dtypes import dtype_info
from .turns import Turns

BEGUN = ("diagonals", "pruned", "mirrored", "doubled")
"""Orders of a part of a matrix, as samples of it tell: equal numbers along diagonals, two zeros of four, symmetry, equal halves."""
SHARES = ("plain", "narrow") * 2 + ("special",) * 2 + ("structured",) * 4
"""Shares of operands without structure, with numbers of a narrower type or a special matrix, and of the others."""
NARROWER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}
"""Types of the numbers of wider operands, as of a program that widens its data for better sums."""
STRUCTURES = (
    "far", "tiny", "whole", "near", "positive", "positive", "outliers", "padded", "repeated", "decaying", "uneven", "opposed",
    "attention", "int4", "int8", "crowded", "crowded", *BEGUN,
)  # fmt: skip
"""Kinds of structure. Numbers of one sign are what benchmarks have, and near rows show in wide sums alone: they come more often.

far: a is tiny and b huge, or the reverse. tiny: both are. whole: both are large integers, whose products no integer of four bytes
holds. near: b is small, as a layer's weights are. positive: from 0 to 1. outliers: some columns of a are large, as in activations.
padded: the end of K is 0 in a. repeated: rows of a begin as others do, or all are one. decaying: columns of a get smaller along K,
or in any order. uneven: each row of a, column of b and matrix has another size. opposed: columns of a are the larger, the smaller
rows of b are. attention: rows of a, and mostly of b, are probabilities of 16 bits, mostly i + 1 of them in row i. int4, int8:
columns of b are multiples of a scale, as of quantized weights. crowded: rows of a, and columns of b, are one of a few, and each of
their numbers is a little off. Of ``BEGUN``: the first half of the rows of a, and columns of b, has an order that the rest has not.
"""
FAR, NEAR = 40, -5
"""Powers of two: one that numbers of 16 bits, and sums of such parts, do not hold, and one of the size of a layer's weights."""
WHOLE = (17, 20, 23)
"""Powers of two of large integers."""
DECAY, UNEVEN = 20, 12
"""Powers of two between the largest and the smallest columns of a, and between rows of a, columns of b or matrices."""
CROWDS, OFF = 4, (9, 20)
"""Most rows that others are near to, and negative powers of two of how near. Such a matrix has nearly a low rank."""
MOSTLY = 0.9
"""Share of attention whose rows see no later terms, and of that in which rows of b are probabilities too."""
SHARP, LEVELS = 4.0, {"int4": 7, "int8": 127}
"""Factor of the numbers of which a softmax makes probabilities, and the most multiples of a scale."""
LEAST_SPECIAL = 8
"""Least side of a matrix that is special at its edges, as a look at samples shows."""
SPECIALS = (
    "permutation a", "permutation b", "zero a", "zero b", "one a", "one b", "identity a", "identity b", "triangular a",
    "triangular b", "transpose", "batch", "symmetric",
)  # fmt: skip
"""Kinds of special matrices: zero, constant, an identity, lower triangular, the transpose of a, a batch of equal ones, symmetric.

A block differs, or a pair of numbers. In an identity they add up to nothing, so that sums and extremes stay. A permutation of it is
whole: its rows and its columns have the same sums. So are the identity "itself", a "diagonal" of any numbers, "signs", as of binary
weights, and a and b that are both symmetric. An "identity" may be both of them, as with an inverse.
"""
BLOCKS = (4, 4, 16, 2**20)
"""Divisors of the sides of a matrix, which are the sides of this block."""
CANCELLED = 0.8
"""Share of the columns in which a half of K takes away what the other half adds."""
OUTLIERS, LARGE, PADDED = 4, 2.0**6, 8
"""Most columns of a with outliers, as activations have, their factor, and part of K, as a divisor, that is padded by zeros."""
LITTLE = {8: (2.0**-10, 2.0**-6), 4: (2.0**-10, 2.0**-6), 2: (2.0**-8, 2.0**-6)}
"""Relative changes of numbers, by their bytes, after which a result that was kept for the earlier ones is wrong."""
NEARBY = ("ab 0", "a 1", "b 1")
"""Operands that are changed so, and the place of the change. A result may be kept for an equal b, and corrected for a near a.

Errors of such a correction show after a larger change only.
"""
MULTIPLES = (2.0, 0.5, -1.0)
RELATIONS = ("multiple a", "multiple b", "rolled a", "rolled b")
"""Relations of operands to those of the call before."""


def cancelling(operands: Operands, rng: random.Random) -> Operands:
    """Return operands of which half of K takes away from most columns what the other half adds, in an order that is drawn.

    What is left shows each rounding of the sums, in a wider type too.
    """
    a, b = operands.a, operands.b
    half, k = a.shape[-1] // 2, a.shape[-1]
    if not half or not a.dtype.is_floating_point or any(overlapping(Layout.of(x)) for x in (a, b)):
        return operands
    order = torch.tensor(rng.sample(range(k), k), device=a.device)
    one, other = order[:half], order[half : 2 * half]
    columns = torch.tensor([x for x in range(b.shape[-1]) if rng.random() < CANCELLED], dtype=torch.long, device=a.device)
    a[..., other] = a[..., one]
    kept = b[..., other, :]
    kept[..., columns] = -b[..., one, :][..., columns]
    b[..., other, :] = kept
    return operands


def special(kind: str, a: torch.Tensor, b: torch.Tensor, rng: random.Random) -> None:
    """Make a, b or both special, but for a block inside of each, if their sizes allow it."""
    name, _, which = kind.partition(" ")
    for x in {"a": (a,), "b": (b,), "": (b,) if name == "transpose" else (a, b)}[which]:
        rows, columns = x.shape[-2:]
        if min(rows, columns) < LEAST_SPECIAL:
            continue
        part = rng.choice(BLOCKS)
        high, wide = max(rows // part, 1), max(columns // part, 2)
        top, left = rng.randint(1, rows // 2), rng.randint(1, columns // 2)
        if name in ("identity", "transpose", "triangular"):  # the diagonal is whole
            top, left = rng.randint(1, rows // 4), rng.randint(columns // 2, columns * 3 // 4 - 1)
        inside = (..., slice(top, top + high), slice(left, left + wide))
        kept = x[inside].clone()
        if name == "identity":
            kept = kept[..., : wide // 2].clamp(-1, 1)
            kept = torch.cat([kept, -kept, torch.zeros_like(x[inside][..., : wide % 2])], -1)
        match name:
            case "transpose":
                x.copy_(a.mT)
            case "permutation" | "itself" | "identity":
                x.copy_(torch.eye(rows, columns, device=x.device)[rng.sample(range(rows), rows * (name == "permutation")) or ...])
            case "diagonal":
                x.tril_().triu_()
            case "signs":
                x.copy_(1 - 2 * torch.signbit(x).to(x.dtype))
            case "symmetric":
                x.copy_(x.tril() + x.tril(-1).mT)
            case "triangular":
                x.tril_()
            case "batch":
                x[1:] = x[:1].clone()
            case _:
                x.fill_(float(name == "one"))
        if name not in ("permutation", "itself", "diagonal", "signs", "symmetric"):  # these are whole
            x[inside] = kept


def structure(a: torch.Tensor, b: torch.Tensor, rng: random.Random, turns: Turns, sure: Sequence[str] = ()) -> None:
    """Give random floats one kind of structure, or none. a is (…, M, K), b is (…, K, N).

    If some special kinds are to be ``sure``, it is one of these if the sizes allow it. A + stands between one of a and one of b.
    """
    if not (a.dtype.is_floating_point and a.dtype.itemsize >= 2 and a.numel() and b.numel()):
        return
    seldom = [*["transpose"] * (a.shape == b.mT.shape), *["batch"] * (a.dim() > 2)]
    squares = [which for which, x in (("a", a), ("b", b)) if x.shape[-2] == x.shape[-1] > 1]
    seldom += [f"{name} {which}" for name in ("permutation", "itself", "diagonal", "signs") for which in squares]
    seldom += ["symmetric", "identity"] * (len(squares) == 2)
    picked = [kinds for joined in sure if (kinds := [x for x in joined.split("+") if x in seldom])]
    share = "special" if picked else turns.next(SHARES)
    if share == "special":
        kinds = rng.choice(picked) if picked else [turns.next(SPECIALS)]
        while kinds[0] in ("transpose", "batch", "symmetric") and kinds[0] not in seldom:
            kinds = [turns.next(SPECIALS)]
        for kind in kinds:
            special(kind, a, b, rng)
    elif share == "narrow":
        for x in (a, b):
            x.copy_(x.to(NARROWER.get(x.dtype, x.dtype)))
    elif share == "structured":
        impose(turns.next(STRUCTURES), a, b, rng)


def impose(kind: str, a: torch.Tensor, b: torch.Tensor, rng: random.Random) -> None:
    """Give floats a kind of structure, if their size and their dtype can have it."""
    k = a.shape[-1]
    match kind:
        case "positive":  # with no more bits than before
            a.abs_().remainder_(1)
            b.abs_().remainder_(1)
        case "outliers":
            a[..., [rng.randrange(k) for _ in range(OUTLIERS)]] *= LARGE
        case "padded" if k >= PADDED:
            a[..., k - k // PADDED :] = 0
        case "crowded" if a.dtype.itemsize > 2:
            draw = torch.Generator(device=a.device).manual_seed(rng.getrandbits(60))
            for x in (a, b.mT):
                off = 2.0 ** -rng.uniform(*OFF)
                picked = [rng.randrange(min(x.shape[-2], CROWDS)) for _ in range(x.shape[-2])]
                x.copy_(x[..., picked, :] * torch.empty_like(x).uniform_(1 - off, 1 + off, generator=draw))
        case "repeated" if a.shape[-2] > 1:
            rows, columns = rng.choice(((a.shape[-2] // 2, k // 2), (1, k)))
            a[..., :columns] = a[..., torch.arange(a.shape[-2], device=a.device) % rows, :columns]
        case _ if kind in BEGUN:
            begin(kind, a)
            begin(kind, b.mT)
        case _ if a.dtype in (torch.float32, torch.float64, torch.bfloat16):
            _rescale(kind, a, b, rng)


def begin(order: str, x: torch.Tensor) -> None:
    """Give the first half of the rows of a matrix an order."""
    half, columns = x.shape[-2] // 2, x.shape[-1]
    part = x[..., :half, :]
    side = min(half, columns)
    match order:
        case "diagonals":
            line = torch.cat([part[..., 1:, 0].flip(-1), part[..., :1, :].flatten(-2)], -1)  # the first column, then the first row
            for row in range(half):
                part[..., row, :] = line[..., half - 1 - row : half - 1 - row + columns]
        case "pruned":
            part[..., torch.arange(columns, device=x.device) % 4 >= 2] = 0
        case "mirrored":
            corner = part[..., :side, :side]
            corner.copy_(corner.tril() + corner.tril(-1).mT)
        case "doubled" if columns > 1:
            part[..., columns // 2 : columns // 2 * 2] = part[..., : columns // 2].clone()


def _rescale(kind: str, a: torch.Tensor, b: torch.Tensor, rng: random.Random) -> None:
    """Give floats of a wide type other magnitudes, or the numbers of a softmax or of quantized weights."""
    k = a.shape[-1]
    match kind:
        case "far":
            power = rng.choice((FAR, -FAR))
            a.mul_(2.0**power)
            b.mul_(2.0**-power)
        case "tiny":
            a.mul_(2.0**-FAR)
            b.mul_(2.0**-FAR)
        case "whole":
            for x in (a, b):
                x.mul_(2.0 ** rng.choice(WHOLE)).round_()
        case "near":
            b.mul_(2.0**NEAR)
        case "decaying":
            falling = torch.linspace(0, -DECAY, k, device=a.device)
            a.mul_(torch.exp2(falling[rng.choice((range(k), range(k - 1, -1, -1), rng.sample(range(k), k)))]).to(a.dtype))
        case "uneven":
            for x, size in ((a, (*a.shape[:-1], 1)), (b, (*b.shape[:-2], 1, b.shape[-1]))):
                powers = [rng.uniform(-UNEVEN, 0) for _ in range(math.prod(size))]
                x.mul_(torch.tensor(powers, device=x.device).exp2().reshape(size).to(x.dtype))
        case "opposed":
            scales = torch.tensor([rng.uniform(-UNEVEN, UNEVEN) for _ in range(k)], device=a.device).exp2()
            a.mul_(scales.to(a.dtype))
            b.div_(scales.to(b.dtype).unsqueeze(-1))
        case "attention":
            mask = torch.full(a.shape[-2:], -math.inf, device=a.device).triu(1) if rng.random() < MOSTLY else 0
            a.copy_((a.double() * SHARP + mask).softmax(-1).half())
            if rng.random() < MOSTLY:
                b.copy_((b.double() * SHARP).softmax(-1).half())
        case "int4" | "int8":
            scale = b.double().abs().amax(-2, keepdim=True).clamp(min=2.0**-FAR) / LEVELS[kind]
            b.copy_((b.double() / scale).round() * scale)


def alike(operands: Operands, seed: int) -> Operands | None:
    """Return operands with the same numbers in another order, at their edges as before, or None if they are too small.

    Their sums, their first and last numbers, their shapes and their addresses stay.
    """
    a, b = operands.a, operands.b
    if min(*a.shape[-2:], *b.shape[-2:]) < 4 or any(overlapping(Layout.of(x)) for x in (a, b)):
        return None
    generator = torch.Generator(device=a.device).manual_seed(seed)
    for x in (a, b):
        inner = x[..., 1:-1, 1:-1]
        order = torch.randperm(inner.numel(), generator=generator, device=x.device)
        inner.copy_(inner.flatten()[order].reshape(inner.shape))
    return operands


def one_changed(operands: Operands, rng: random.Random) -> Operands | None:
    """Return operands of which one number of a and of b is another one, at the same addresses. None if elements share memory."""
    if any(not x.numel() or overlapping(Layout.of(x)) for x in (operands.a, operands.b)):
        return None
    for x in (operands.a, operands.b):
        _change_one(x, rng)
    return operands


def related(operands: Operands, relation: str, rng: random.Random) -> Operands | None:
    """Return operands of which one is a multiple of itself, or has its rows or columns rolled, but for one number.

    A result that follows from the earlier one is wrong then. None if floats have a byte, or elements share memory.
    """
    name, _, which = relation.partition(" ")
    x = operands.a if which == "a" else operands.b
    is_integer = dtype_info(x.dtype).is_integer
    if not x.numel() or overlapping(Layout.of(x)) or (x.dtype.itemsize < 2 and not is_integer):
        return None
    if is_integer or name == "rolled":
        axis = rng.choice((-1, -2))
        x.copy_(x.roll(rng.randrange(x.shape[axis]), axis))
    else:
        x.mul_(rng.choice(MULTIPLES))
    _change_one(x, rng)
    return operands


def _change_one(x: torch.Tensor, rng: random.Random) -> None:
    place = tuple(map(rng.randrange, x.shape))
    old, most = float(x[place]), float(x.double().abs().max())
    x[place] = (0 if old else 1) if dtype_info(x.dtype).is_integer else (-most if old > 0 else most)


def nearby(operands: Operands, how: str) -> Operands | None:
    """Return operands of which each number of a, of b or of both is a little larger. None if they have a byte or share memory."""
    which, _, place = how.partition(" ")
    if any(x.dtype.itemsize < 2 or overlapping(Layout.of(x)) for x in (operands.a, operands.b)):
        return None
    for x in [{"a": operands.a, "b": operands.b}[name] for name in which]:
        x.mul_(1 + LITTLE[x.dtype.itemsize][int(place)])
    return operands
