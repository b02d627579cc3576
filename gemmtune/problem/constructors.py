"""Constructors of ``Problem`` for calls with contiguous operands."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self, TypedDict, TypeVar, Unpack, cast, get_args, get_type_hints

import torch

from ..errors import InvalidProblemError
from .contiguous import BiasShape, check_option, check_size, inp_layout, operand_layouts, scale_fields
from .dtypes import DType, as_dtype
from .fields import scalar_class
from .operation import Op
from .operations import OPERATIONS, Encoding
from .precision import Precision, precision_of
from .scales import Scales, WeightScales
from .sparsity import Imbalance, Sparsity, density_class, sides_of

T = TypeVar("T")
Make = TypeVar("Make", bound=Callable[..., Any])


class Where(TypedDict, total=False):
    """Options of every constructor. ``device_type`` is cuda if there is a GPU, otherwise cpu.

    ``layout`` has BLAS letters: ``nt`` is a row-major a and a b stored as N×K, like the weight of a Linear.
    """

    layout: str
    device_type: str | None


class Floats(Where, total=False):
    """Options of products of floats. A dtype is torch's or its name. ``precision`` defaults to torch's current flags."""

    dtype: DType
    precision: Precision | None


class Packable(Where, total=False):
    """Options of products with a weight that ``prepack`` takes."""

    prepacked: bool


class Packed(Floats, Packable, total=False):
    """Options of products of floats with a weight that ``prepack`` takes."""


class Scaled(Where, total=False):
    """Options of products of 8-bit floats. ``scales`` names the blocks of the scales. b has a's dtype by default."""

    dtype: DType
    dtype_b: DType | None
    out_dtype: DType
    scales: Scales
    fast_accum: bool


class Weights(Floats, total=False):
    """Options of products with a narrow b, uint8 with two numbers a byte with an ``encoding``, and scales of a's dtype."""

    encoding: Encoding
    scales: WeightScales
    scale_dtype: DType | None


class Blocks(Packed, total=False):
    """Options of block-sparse products. ``block`` is the side of a block, or (rows, columns).

    ``density`` is the share of blocks that exist, rounded to the nearest class. ``layout`` ``nt`` has a and out row-major, as
    nn.Linear has them. ``tt`` has both column-major: the transposes of x and the result of ``bsr_mm(bsr, x)``.
    """

    block: int | tuple[int, int]
    density: float
    imbalance: Imbalance
    wide_index: bool


def _of(
    cls: Callable[..., T], op: Op, sizes: tuple[int, ...], *,
    dtype: DType = torch.bfloat16, dtype_b: DType | None = None, out_dtype: DType | None = None, layout: str = "nt",
    device_type: str | None = None, precision: Precision | None = None, prepacked: bool = False, fast_accum: bool = False,
    encoding: Encoding = "", scales: str | None = None, scale_dtype: DType | None = None, zeros: bool = False, gated: str = "",
    block: int | tuple[int, int] = 64, density: float = 0.5, imbalance: Imbalance = "even", wide_index: bool = False,
    added: tuple[BiasShape, float, float] | None = None, symbols: Mapping[str, int] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> T:  # fmt: skip
    """Return the problem of an operation's row for ``sizes`` ([batch,] m, n, k), with contiguous operands.

    ``added`` is the shape of inp, alpha and beta. Sizes by symbol and further ``dtypes`` by role are for ``operand_layouts``.
    """
    row, dtype = OPERATIONS[op], as_dtype(dtype)
    for name, size in zip(("batch", "m", "n", "k")[-len(sizes) :], sizes, strict=True):
        check_size(name, size)
    known = dict(zip("BMNK"[-len(sizes) :], sizes, strict=True)) | dict(symbols or {})
    known["N"] *= 2 if gated else 1
    of_b = torch.uint8 if encoding else dtype_b or (None if row.widens_b else dtype)
    given = {role: as_dtype(x) for role, x in (("a", dtype), ("b", of_b), ("out", out_dtype)) if x is not None} | dict(dtypes or {})
    fields: dict[str, Any] = {"encoding": encoding, "fast_accum": fast_accum, "prepacked": prepacked, "gated": gated}
    if row.sparse:
        fields["sparsity"] = _sparsity(block, density, imbalance, wide_index)
    if scales is not None:
        scaled = scale_fields(row, known, scales, as_dtype(scale_dtype or dtype), zeros=zeros)
        if row.grouped and (scale := scaled["scale_b"]) is not None:
            known, given = known | {"S": scale.size[0], "T": scale.size[1]}, given | {"scale_b": scale.dtype}
        else:
            fields |= scaled
    if added is not None:
        (bias, alpha, beta), (*lead, m, n, _) = added, sizes
        inp = inp_layout(tuple(lead), m, n, bias, dtype)
        fields |= {"inp": inp, "alpha": scalar_class(alpha), "beta": scalar_class(beta)}
    fields |= operand_layouts(row.given(given, gated=gated), known, layout, given, encoded=bool(encoding))
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return cls(op=op, device_type=kind, precision=precision or precision_of(dtype, kind), **fields)


def _sparsity(block: int | tuple[int, int], density: float, imbalance: Imbalance, wide_index: bool) -> Sparsity:
    rows, cols = sides_of(block)
    if not 0 <= density <= 1:
        raise InvalidProblemError(f"density: got {density!r}, expected the share of blocks that exist, from 0 to 1")
    share = density_class(density)
    return Sparsity(block_n=rows, block_k=cols, density=share, imbalance=imbalance, wide_index=wide_index)


def _constructor(**defaults: Any) -> Callable[[Make], Make]:
    """Decorate a constructor: its signature shows its options, and it takes no others. ``defaults`` differ from ``_of``'s."""

    def decorated(make: Make) -> Make:
        *plain, options = inspect.signature(make).parameters.values()
        (kind,) = get_args(get_type_hints(make)[options.name])
        known = {name: x.default for name, x in inspect.signature(_of).parameters.items()} | defaults
        own = [
            options.replace(name=x, kind=options.KEYWORD_ONLY, default=known[x], annotation=y)
            for x, y in get_type_hints(kind).items()
        ]
        signature = inspect.Signature([*plain, *own])

        @functools.wraps(make)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given.keys() - signature.parameters.keys():
                raise TypeError(f"{make.__qualname__}() got an unexpected keyword argument {name!r}")
            for name, value in given.items():
                check_option(name, value)
            return make(*args, **{**defaults, **given})

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return cast(Make, checked)

    return decorated


class Constructors:
    """Base class with the constructors of ``Problem``."""

    __slots__ = ()

    @classmethod
    @_constructor()
    def mm(cls, m: int, n: int, k: int, **options: Unpack[Packed]) -> Self:
        """Return the problem out[M, N] = a[M, K] @ b[K, N] with contiguous operands."""
        return _of(cls, "mm", (m, n, k), **options)

    @classmethod
    @_constructor()
    def addmm(
        cls, m: int, n: int, k: int, *, bias: BiasShape = "n", alpha: float = 1, beta: float = 1, **options: Unpack[Packed]
    ) -> Self:
        """Return out[M, N] = alpha · a[M, K] @ b[K, N] + beta · inp, with inp of shape [N], [M, N], [M, 1], [1, N] or a scalar."""
        return _of(cls, "addmm", (m, n, k), added=(bias, alpha, beta), **options)

    @classmethod
    @_constructor()
    def bmm(cls, batch: int, m: int, n: int, k: int, **options: Unpack[Floats]) -> Self:
        """Return the problem out[B, M, N] = a[B, M, K] @ b[B, K, N]."""
        return _of(cls, "bmm", (batch, m, n, k), **options)

    @classmethod
    @_constructor()
    def baddbmm(
        cls, batch: int, m: int, n: int, k: int, *, bias: BiasShape = "mn", alpha: float = 1, beta: float = 1,
        **options: Unpack[Floats],
    ) -> Self:  # fmt: skip
        """Return out[B, M, N] = alpha · a[B, M, K] @ b[B, K, N] + beta · inp, with inp as in addmm (``mn`` means [B, M, N])."""
        return _of(cls, "baddbmm", (batch, m, n, k), added=(bias, alpha, beta), **options)

    @classmethod
    @_constructor()
    def mm_plus_mm(cls, m: int, n: int, k: int, k2: int | None = None, **options: Unpack[Floats]) -> Self:
        """Return out[M, N] = a[M, K] @ b[K, N] + c[M, K2] @ d[K2, N]. K2 defaults to K; ``layout`` applies to both products."""
        if k2 is not None:
            check_size("k2", k2)
        return _of(cls, "mm_plus_mm", (m, n, k), symbols={"K2": k if k2 is None else k2}, **options)

    @classmethod
    @_constructor()
    def int_mm(cls, m: int, n: int, k: int, **options: Unpack[Packable]) -> Self:
        """Return the problem out[M, N] = a[M, K] @ b[K, N] with int8 operands and an int32 result."""
        return _of(cls, "int_mm", (m, n, k), dtype=torch.int8, **options)

    @classmethod
    @_constructor(dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, scales="tensor")
    def scaled_mm(cls, m: int, n: int, k: int, *, prepacked: bool = False, **options: Unpack[Scaled]) -> Self:
        """Return out[M, N] = (scale_a · a[M, K]) @ (scale_b · b[K, N]); ``scales`` names the blocks of the contiguous scales."""
        return _of(cls, "scaled_mm", (m, n, k), prepacked=prepacked, **options)

    @classmethod
    @_constructor(dtype=torch.float16, scales="none")
    def mixed_mm(
        cls, m: int, n: int, k: int, *, dtype_b: DType = torch.int8, zeros: bool = False, prepacked: bool = False,
        **options: Unpack[Weights],
    ) -> Self:  # fmt: skip
        """Return the problem out[M, N] = a[M, K] @ ((b[K, N] − zero_b) · scale_b), with a result of a's dtype.

        ``zeros`` adds a zero_b with the shape and dtype of scale_b; that dtype defaults to a's. With an ``encoding``, b is
        uint8 [K/2, N].

        Raises:
            InvalidProblemError: ``zeros`` is set without scales.
        """
        return _of(cls, "mixed_mm", (m, n, k), dtype_b=dtype_b, zeros=zeros, prepacked=prepacked, **options)

    @classmethod
    @_constructor()
    def bsr_mm(cls, m: int, n: int, k: int, **options: Unpack[Blocks]) -> Self:
        """Return out[M, N] = a[M, K] @ b[K, N] for a block-sparse weight [N, K], of which b is the transpose. M counts tokens."""
        return _of(cls, "bsr_mm", (m, n, k), **options)

    @classmethod
    @_constructor()
    def bsr_addmm(
        cls, m: int, n: int, k: int, *, bias: BiasShape = "n", alpha: float = 1, beta: float = 1, **options: Unpack[Blocks]
    ) -> Self:
        """Return out[M, N] = alpha · a[M, K] @ b[K, N] + beta · inp, with b as in ``bsr_mm`` and inp as in ``addmm``."""
        return _of(cls, "bsr_addmm", (m, n, k), added=(bias, alpha, beta), **options)

    @classmethod
    @_constructor()
    def grouped_mm(cls, m: int, n: int, k: int, *, groups: int = 8, **options: Unpack[Floats]) -> Self:
        """Return out[M, N] = a[M, K] @ b[g] for each group of rows of a, with b [G, K, N]. M counts the rows of all groups.

        ``layout`` applies to a and to each matrix of b: ``nt`` stores b as [G, N, K], like the weights of experts.
        """
        return _of(cls, "grouped_mm", (m, n, k), symbols={"G": groups}, **options)

    @classmethod
    @_constructor(scales="column")
    def mixed_grouped_mm(cls, m: int, n: int, k: int, *, groups: int = 8, **options: Unpack[Weights]) -> Self:
        """Return ``grouped_mm`` with int8 weights b, or uint8 [G, K/2, N] with an ``encoding``, and scales of a's dtype."""
        return _of(cls, "mixed_grouped_mm", (m, n, k), symbols={"G": groups}, **options)

    @classmethod
    @_constructor()
    def routed_grouped_mm(
        cls, m: int, n: int, k: int, *, groups: int = 8, tokens: int | None = None, gated: str = "", **options: Unpack[Floats]
    ) -> Self:
        """Return ``grouped_mm`` of M rows that an index picks from an a with ``tokens`` rows (None: no index).

        out has N columns. If the product is ``gated``, b has 2 · N columns.
        """
        symbols, dtypes = ({}, {}) if tokens is None else ({"T": tokens}, {"rows": torch.int64})
        return _of(cls, "routed_grouped_mm", (m, n, k), symbols={"G": groups} | symbols, dtypes=dtypes, gated=gated, **options)

    @classmethod
    @_constructor()
    def combined_grouped_mm(
        cls, m: int, n: int, k: int, *, groups: int = 8, tokens: int | None = None, **options: Unpack[Floats]
    ) -> Self:
        """Return ``grouped_mm`` of M rows, weighted and added up to ``tokens`` rows of out (default M), M / tokens for each."""
        check_size("m", m)
        count = m if tokens is None else tokens
        if count < 1 or m % count:
            raise InvalidProblemError(f"tokens: got {count} for {m} rows, expected a number that divides them")
        symbols = {"G": groups, "T": count, "C": m // count}
        return _of(cls, "combined_grouped_mm", (m, n, k), symbols=symbols, dtypes={"slots": torch.int64}, **options)

    @classmethod
    @_constructor(dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, scales="row")
    def scaled_grouped_mm(cls, m: int, n: int, k: int, *, groups: int = 8, **options: Unpack[Scaled]) -> Self:
        """Return ``grouped_mm`` of 8-bit floats, with the scales of ``scaled_mm`` except ``tensor``."""
        return _of(cls, "scaled_grouped_mm", (m, n, k), symbols={"G": groups}, **options)

    @classmethod
    @_constructor(layout="tn")
    def grouped_k_mm(cls, m: int, n: int, k: int, *, groups: int = 8, **options: Unpack[Floats]) -> Self:
        """Return out[g] = a[:, g] @ b[g] for each group of the K terms: a [M, K], b [K, N], out [G, M, N]. K counts all groups.

        ``layout`` is ``tn`` for gradients of weights, where a is the transpose of rows.
        """
        return _of(cls, "grouped_k_mm", (m, n, k), symbols={"G": groups}, **options)
