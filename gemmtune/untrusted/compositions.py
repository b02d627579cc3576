"""Operands with several kinds of structure at once: each matrix goes through steps that are drawn.

A kernel may look for any structure, and trust more than it has looked at. One kind alone does not reach a branch for rows that
are positive *and* have one as their maximum. Steps that the source has words for, such as ``amax``, are drawn more often.
"""

import random
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

Step = Callable[[torch.Tensor, random.Random], torch.Tensor]
NAMED = 8
"""Weight of a step that the source has a word for. That of the others is 1."""
STEPS = (1, 1, 1, 2, 2, 3)
"""Numbers of steps."""
WHICH = ("a", "b", "both", "both", "each", "related")
"""Operands that get structure: one alone, both by the same steps, each by its own, or b as a relation of a."""
SPOILED, NEARLY = ("", "", "", "one", "pair", "block", "rows", "all"), (1e-3, 1e-5, 1e-6, 1e-9)
"""Changes in the end, which a look at sums, at samples or by a tolerance may not see, and how much all numbers change.

They are one number, two of one sum, a block, or many rows, which become others, or all of them a little.
"""
FEW, SHARP, UNEVEN, OUTLIER = 0.2, 4.0, 12.0, 2.0**6
"""Share of rows that are drawn, factor before a softmax, powers of two between rows, factor of large columns."""
LEAST_DIVISOR = 2.0**-7
"""Least number by whose square skewed numbers are divided, of which few are large."""
MOST, MOST_SUM = 2.0**18, 2.0**15
"""Largest magnitude, and largest sum of products in float16."""


def _drawn(size: int, rng: random.Random) -> torch.Tensor:
    return torch.tensor([rng.random() < FEW for _ in range(size)])


def _places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[-1])


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().argmax(-1, keepdim=True)


def _single(x: torch.Tensor, _: random.Random) -> torch.Tensor:
    return torch.zeros_like(x).scatter(-1, place := _largest(x), x.gather(-1, place))


def _uneven(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return x * torch.tensor([2 ** -rng.uniform(0, UNEVEN) for _ in range(x.shape[-2])]).unsqueeze(-1)


def _skewed(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    return x / torch.empty_like(x).uniform_(LEAST_DIVISOR, 1, generator=generator).square()


def _periodic(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return x[..., _places(x) % max(x.shape[-1] // rng.choice((2, 4)), 1)]


def _runs(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return x[..., _places(x) // (run := rng.choice((2, 3, 4))) * run]


def _equal_matrices(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return x if x.dim() < 3 else x[sorted(rng.choices(range(len(x)), k=len(x)))]


def _diagonals(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    rows, columns = x.shape[-2:]
    places = _places(x) + rng.choice((1, -1)) * torch.arange(rows).unsqueeze(-1)
    return x[..., :1, :].expand_as(x).gather(-1, (places % columns).expand_as(x))


def _blocks(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    number = rng.choice((2, 4, 8))
    rows, columns = (torch.arange(size) * number // size for size in x.shape[-2:])
    return torch.where(rows.unsqueeze(-1) == columns, x, 0)


def _permutation(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    identity = torch.eye(*x.shape[-2:], dtype=x.dtype)
    return identity[rng.sample(range(x.shape[-2]), x.shape[-2])].expand_as(x)


def _symmetric(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return x.tril() + rng.choice((1, -1)) * x.tril(-1).mT if x.shape[-2] == x.shape[-1] else x


def _levels(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    scale = x.abs().amax() / rng.choice((1, 7, 127))
    return (x / scale).round() * scale


def _band(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    below, above = rng.choice(((0, 0), (1, 1), (0, 1), (2, 2), (0, MANY), (MANY, 0)))
    return x.tril(above).triu(-below)


MANY = 2**20
"""More diagonals than a matrix has."""
OF_ROWS: Mapping[str, tuple[str, Step]] = MappingProxyType({
    "largest is 1": ("max|peak", lambda x, _: x / x.gather(-1, _largest(x))),
    "largest is 0": ("max|causal", lambda x, _: x - x.amax(-1, keepdim=True)),
    "sum is 1": ("sum|prob|stoch|mean", lambda x, _: x.abs() / x.abs().sum(-1, keepdim=True)),
    "softmax": ("softmax|attention|prob|exp", lambda x, _: (SHARP * x).softmax(-1)),
    "length is 1": ("norm|unit|sqrt|cosine|orth|gram|inv", lambda x, _: x / x.norm(dim=-1, keepdim=True)),
    "sum is 0": ("mean|sum|cent", lambda x, _: x - x.mean(-1, keepdim=True)),
    "one number": ("nonzero|hot|!= ?0|select|gather|argmax|sparse", _single),
    "constant": ("stride|expand|broadcast|equal|unique|const|same", lambda x, _: x[..., :1].expand_as(x)),
    "sorted": ("sort|diff|monoton", lambda x, _: x.sort(-1).values),
    "sums until there": ("cumsum|diff|prefix|scan|monoton", lambda x, _: x.cumsum(-1) / x.shape[-1]),
    "mirrored": ("flip|palin|mirror|::-1", lambda x, _: torch.where(_places(x) < x.shape[-1] // 2, x.flip(-1), x)),
    "periodic": ("repeat|tile|period|chunk|split|// ?2|half|equal", _periodic),
    "runs": ("interleave|repeat|tile|pair|unique|equal|::2|group", _runs),
    "alternating": ("sign|neg|hadamard|walsh|fft", lambda x, _: x.abs() * (1 - 2 * (_places(x) % 2))),
    "padded": ("pad|trim|any|nonzero", lambda x, _: torch.where(_places(x) < x.shape[-1] * 3 // 4, x, 0)),
    "some zero": ("any|dead|mask|sparse|nonzero|skip", lambda x, rng: x * ~_drawn(x.shape[-2], rng).unsqueeze(-1)),
    "some equal": ("unique|repeat|equal|dup", lambda x, rng: torch.where(_drawn(x.shape[-2], rng).unsqueeze(-1), x[..., :1, :], x)),
    "uneven": ("scale|abs|max|norm|log", _uneven),
    "outliers": ("clip|clamp|outlier|max|scale", lambda x, rng: torch.where(_drawn(x.shape[-1], rng), x * OUTLIER, x)),
})  # fmt: skip
"""Steps by name, with words of a source. Each is one of the columns too."""
OF_ALL: Mapping[str, tuple[str, Step]] = MappingProxyType({
    "positive": ("abs|relu|sqrt|[<>]=? ?0|min", lambda x, _: x.abs()),
    "negative": ("abs|relu|[<>]=? ?0|max", lambda x, _: -x.abs()),
    "signs": ("sign|abs|binar|xnor|popcount|== ?1|hadamard", lambda x, _: 1 - 2 * (x < 0).double()),
    "ones": ("mask|bool|binar|bit|== ?1|popcount|max|min", lambda x, _: (x > 0).double()),
    "skewed": ("mean|max|std|norm|scale|median|quantile|sum|clip|round|int", _skewed),
    "whole": ("round|floor|trunc|int|long", lambda x, _: (2 * x).round()),
    "bfloat16": ("bfloat16|half|float16|round", lambda x, _: x.bfloat16().double()),
    "float16": ("half|float16|round", lambda x, _: x.half().double()),
    "powers of two": ("log|exp|frexp|shift|pow", lambda x, _: torch.copysign(x.abs().clamp(2**-UNEVEN).log2().round().exp2(), x)),
    "levels": ("round|scale|quant|int8|int4|clip|clamp", _levels),
    "at most 1": ("clip|clamp|max|abs", lambda x, _: x.clamp(-1, 1)),
    "fractions": ("min|max|clamp|mask|prob|unit", lambda x, _: x - x.floor()),
    "sparse": ("sparse|nonzero|!= ?0|any|density|csr|coo", lambda x, rng: x * (x.abs() > x.abs().quantile(rng.choice((0.5, 0.9))))),
    "constant": ("const|equal|unique|full|same|item|std|var", lambda x, _: x[..., :1, :1].expand_as(x)),
    "zero": ("zero|any|nonzero|count", lambda x, _: torch.zeros_like(x)),
    "tiny": ("eps|thresh|tol|max|scale|< ?1e|abs", lambda x, _: x * 2**-UNEVEN),
    "first row": ("rank|outer|svd|stride|expand", lambda x, _: x[..., :, :1] * x[..., :1, :]),
    "symmetric": ("symm|\\.t\\b|mt\\b|transpose|eigh|skew|equal|adjoint|conj", _symmetric),
    "band": ("tri|diag|band|causal|mask|eye", _band),
    "diagonals": ("toeplitz|circulant|roll|fft|conv|hankel|diag", _diagonals),
    "blocks": ("block|diag|sparse|chunk", _blocks),
    "equal matrices": ("batch|group|head|unique|equal|repeat|expand", _equal_matrices),
    "permutation": ("perm|eye|ident|argmax|hot|select|gather|index", _permutation),
})  # fmt: skip
"""Steps of a whole matrix, with words of a source."""


def _of_columns(step: Step) -> Step:
    return lambda x, rng: step(x.mT, rng).mT


ALL: Mapping[str, tuple[str, Step]] = MappingProxyType(
    {**OF_ALL}
    | {f"{name} in rows": step for name, step in OF_ROWS.items()}
    | {f"{name} in columns": (words, _of_columns(step)) for name, (words, step) in OF_ROWS.items()}
)


class Compositions:
    """Maker of structure.

    Args:
        rng: known to nobody else.
        source: text of the GEMM.
    """

    def __init__(self, rng: random.Random, source: str = "") -> None:
        self._rng = rng
        self._weights = [NAMED if re.search(words, source, re.IGNORECASE) else 1 for words, _ in ALL.values()]

    def impose(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Give a (…, M, K) and b (…, K, N) structure in place. Integers are rounded and kept within their range."""
        which, steps = self._rng.choice(WHICH), self._steps()
        if which != "b":
            _write(a, self._composed(a, steps))
        if which == "related" and self._relate(a, b):
            return
        if which != "a":
            _write(b, self._composed(b, self._steps() if which == "each" else steps))

    def _steps(self) -> list[Step]:
        return [step for _, step in self._rng.choices(list(ALL.values()), self._weights, k=self._rng.choice(STEPS))]

    def _composed(self, x: torch.Tensor, steps: list[Step]) -> torch.Tensor:
        wide, terms = x.double().cpu(), max(x.shape[-2:])
        most = MOST if x.dtype != torch.float16 else min((MOST_SUM / terms) ** 0.5, MOST)
        for step in steps:
            wide = step(wide, self._rng).nan_to_num(0.0, 0.0, 0.0)
        return self._spoiled(wide.clamp(-most, most).clone())

    def _relate(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Make b the transpose of a, or a itself, or the negative of one, if the shapes allow it. Return True if they do."""
        related = [x for x in (a, a.mT) if x.shape == b.shape]
        if related:
            sign = self._rng.choice((1, 1, -1)) if a.dtype.is_signed else 1
            _write(b, self._spoiled(sign * self._rng.choice(related).double().cpu()))
        return bool(related)

    def _spoiled(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[-2:]
        row, column = self._rng.randrange(rows), self._rng.randrange(columns)
        other = torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(self._rng.getrandbits(60)))
        match self._rng.choice(SPOILED):
            case "one":
                x[..., row, column] = other[..., row, column]
            case "pair":
                change = other[..., row, column]
                x[..., row, column] += change
                x[..., row, (column + 1) % columns] -= change
            case "block":
                inside = (..., slice(row, row + max(rows // 4, 1)), slice(column, column + max(columns // 4, 1)))
                x[inside] = other[inside]
            case "all":
                x *= 1 + self._rng.choice(NEARLY) * other
            case "rows":
                x[..., row:, :] = other[..., row:, :]
        return x


def _write(x: torch.Tensor, values: torch.Tensor) -> None:
    if not x.dtype.is_floating_point:
        range_ = torch.iinfo(x.dtype)
        values = values.round().clamp(range_.min, range_.max)
    x.copy_(values)
