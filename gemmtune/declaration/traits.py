"""Declarations of a GEMM. The suite tests what is declared, and does not test what is not."""

import dataclasses
import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..choice import Claims
from ..errors import InvalidProblemError, TraitsError
from ..foreign import shorter
from ..numerics.reduction import Reduction, check_text
from ..numerics.routed import by_steps
from ..operand_kinds import full_dtype_name
from ..problem import Problem
from ..problem.dtypes import dtype_name
from .labels import BIASES, DTYPES, GATES, INDEX_DTYPES, NARROW_FLOATS, OPS, SCALES, SCALES_OF, WEIGHTS, is_sides, plain_scales
from .layouts import KINDS

ATTRIBUTE = "gemm_traits"
"""Attribute with the traits of a function: a ``Traits`` or a mapping with its field names, which needs no import of gemmtune."""

DECLARED = "declared"
"""Name of an epilogue in a declared reduction. Whoever has the GEMM's name puts that in its place."""

TORCH_SPLITS = 16
"""Assumed maximum number of split-K partial sums of torch's products, which cuBLAS does not report."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Declarations of one GEMM. Each default promises the least.

    Raises:
        TraitsError: an unknown name or an illegal value.
    """

    ops: tuple[str, ...] | None = None
    """Operations such as ``addmm``. None: the name of a function or else mm, and the functions of a namespace."""
    dtypes: tuple[str, ...] | None = None
    """Input dtypes such as ``bfloat16``. ``tf32`` is float32 under torch's tf32 setting. None: floats are tried, may be refused."""
    layouts: tuple[str, ...] | None = None
    """Kinds of strides for a, b and the added operand. None: each is tried, and all but row-major may be refused."""
    out: bool = False
    """Accepts ``out=``, a tensor of any strides, and writes the result there."""
    alpha: bool = False
    """Accepts ``alpha=`` (addmm, baddbmm)."""
    beta: bool = False
    """Accepts ``beta=`` (addmm, baddbmm)."""
    bias: tuple[str, ...] = ("n",)
    """Shapes of the added operand of addmm and baddbmm: n, mn, m1, 1n, scalar."""
    scales: tuple[str, ...] = ("tensor",)
    """Parts of an operand that share a scale: tensor, row, column, group_32, … For an operation without ``tensor``, that stands for
    its first one."""
    scale_dtypes: tuple[str, ...] = ()
    """Dtypes of scales accepted in addition to the usual one. That is float32 for int_mm_mul, and the dtype of a for quantized
    weights and for weights of rows that are added up."""
    weights: tuple[str, ...] = ("int8",)
    """Types of b of mixed_mm and mixed_grouped_mm: int8, uint8, int4 and uint4 (two in each byte), float8_e4m3fn, float8_e5m2."""
    zeros: bool = False
    """Accepts ``zero_b=`` (mixed_mm with scales)."""
    float8_pairs: bool = False
    """Accepts a and b of scaled_mm and scaled_grouped_mm in different 8-bit floats."""
    results: tuple[str, ...] = ("bfloat16",)
    """Dtypes of the result of scaled_mm and scaled_grouped_mm."""
    gates: tuple[str, ...] = ()
    """Functions of gates of routed_grouped_mm: silu, gelu, gelu_tanh."""
    index_dtypes: tuple[str, ...] = ("int64",)
    """Dtypes of the operands that pick rows of a, or place rows of the result: int64, int32."""
    blocks: tuple[str, ...] | None = None
    """Rows x columns of a block of bsr_mm and bsr_addmm, such as 32x32. None: several are tried and may be refused."""
    skips_absent: bool = False
    """NaN and infinities of the other operand do not show at places where a block-sparse weight has no block."""
    fast_accum: bool = False
    """Sums of 8-bit floats may stay in the narrow accumulator of the tensor cores (torch's ``use_fast_accum``)."""
    empty: bool = False
    """Accepts sizes of 0."""
    min_alignment: int = 1
    """Bytes that divide the addresses and row starts of a and b. If over 1, no such address may be refused."""
    multiples: tuple[int, int, int] = (1, 1, 1)
    """Numbers that divide M, N and K."""
    least: tuple[int, int, int] = (0, 0, 0)
    """Minimum M, N and K."""
    sms: tuple[int, ...] | None = None
    """Compute capabilities (90 for SM90) on which it runs. None: all."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    streams: bool = False
    """Works on torch's current stream, which may be any."""
    capturable: bool = False
    """Can be captured in a CUDA graph."""
    threads: bool = False
    """Can be called from several threads at once."""
    accumulate: Mapping[str, str] = field(default_factory=dict)
    """Dtype of the running sum by input dtype, if it is not float32 (float64 for float64, int32 for int8)."""
    partials: Mapping[str, str] = field(default_factory=dict)
    """Dtype of split-K partial sums by input dtype, if it is not that of the running sum. By default, one product of mm_plus_mm may
    be rounded to the input dtype."""
    splits: int = 1
    """Maximum number of split-K partial sums."""
    input_mode: str = "ieee"
    """Reading of float32 inputs: ieee, tf32 (rounded even without torch's tf32 setting), or parts (three bfloat16 parts, multiplied
    in six products)."""
    flush_subnormals: bool | None = None
    """Subnormal inputs and results may become 0. None: they may, and this is not tested."""
    skips_zeros: bool = False
    """Rows, columns and blocks of zeros may be skipped. A result with 0 · NaN or 0 · ∞ may then be anything."""
    deterministic: bool = False
    """Equal inputs give equal bits."""
    batch_invariant: bool = False
    """The bits of a row of the result do not depend on the other rows of a, nor on their number."""
    calls_torch: bool = False
    """torch's own products may do the work, with 16-bit partial sums where torch's flags allow them. `gemmtune judge` calls that
    dishonest otherwise."""
    reduction: str = ""
    """How K is summed, for every M: matrix or fma, then /1024 for partial sums of 1024 elements, added in rising order. @128 at
    the end means a float32 sum every 128 elements. A kernel is used in batch-invariant tables of that class. Empty: nothing is
    said."""
    same_bits: str = ""
    """Another GEMM, as package.module:function, that gives a row the same bits for every M."""
    bias_name: str = "bias"
    """Keyword of a function's added operand. A function without such a parameter gets it first, as torch's addmm."""

    def __post_init__(self) -> None:
        legal: dict[str, Iterable[str]] = {
            "ops": OPS, "dtypes": DTYPES, "layouts": KINDS, "bias": BIASES, "scales": SCALES, "scale_dtypes": NARROW_FLOATS,
            "weights": WEIGHTS, "results": NARROW_FLOATS, "devices": ("cpu", "cuda"), "gates": GATES, "index_dtypes": INDEX_DTYPES,
        }  # fmt: skip
        for name, words in legal.items():
            _check_words(name, getattr(self, name), tuple(words))
        _check_words("input_mode", (self.input_mode,), ("ieee", "parts", "tf32"))
        for name in ("reduction", "same_bits", "bias_name"):
            if not isinstance(getattr(self, name), str):
                raise TraitsError(f"{name}: got {getattr(self, name)!r}, expected a text")
        if self.reduction:
            try:
                check_text(self.reduction)
            except InvalidProblemError as error:
                raise TraitsError(str(error)) from None
        for name, one in (("blocks", "32x32"), ("sms", 90)):
            if not isinstance(value := getattr(self, name), tuple | None):
                raise TraitsError(f"{name}: got {value!r}, expected a list such as {[one]}")
        for number in self.sms or ():
            _check_integer("sms", number, 10)
        for text in self.blocks or ():
            if not isinstance(text, str) or not is_sides(text):
                raise TraitsError(f"blocks: got {text!r}, expected rows x columns of a block, such as 32x32")
        for name in ("accumulate", "partials"):
            table = getattr(self, name)
            if not isinstance(table, Mapping):
                raise TraitsError(f'{name}: got {table!r}, expected a table by input dtype such as {{"float16": "float16"}}')
            _check_words(f"{name} (input dtype)", tuple(table), tuple(DTYPES))
            _check_words(name, tuple(table.values()), tuple(DTYPES))
        for name, least in (("min_alignment", 1), ("splits", 1)):
            _check_integer(name, getattr(self, name), least)
        for name, least in (("multiples", 1), ("least", 0)):
            values = getattr(self, name)
            if not isinstance(values, tuple) or len(values) != 3:
                raise TraitsError(f"{name}: got {values!r}, expected three integers for M, N and K, such as [16, 16, 16]")
            for value in values:
                _check_integer(name, value, least)
        for trait in dataclasses.fields(self):
            value = getattr(self, trait.name)
            if not isinstance(value, bool) and (trait.type is bool or (trait.type == (bool | None) and value is not None)):
                raise TraitsError(f"{trait.name}: got {value!r}, expected true or false")

    @classmethod
    def of(cls, declared: "Traits | Mapping[str, Any]") -> "Traits":
        """Return traits from a mapping of names to plain values, as a file or an attribute has them. Lists become tuples."""
        if isinstance(declared, Traits):
            return declared
        return cls().changed(declared)

    @classmethod
    def from_file(cls, path: Path) -> dict[str, Any]:
        """Return the declarations of a TOML file, as ``changed`` takes them."""
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TraitsError(f"traits file: got {str(path)!r}, which does not exist") from None
        except (OSError, ValueError, RecursionError) as error:  # tomllib has no limit of nesting
            raise TraitsError(f"traits file {path}: got {error}, expected TOML such as: dtypes = ['float16']") from None

    def changed(self, declared: Mapping[str, Any]) -> "Traits":
        """Return these traits with some replaced by ``declared``, a mapping to plain values with lists for tuples."""
        if not isinstance(declared, Mapping):
            raise TraitsError(f"declarations: got {shorter(repr(declared))}, expected a mapping such as {{'dtypes': ['float16']}}")
        known = sorted(trait.name for trait in dataclasses.fields(self))
        unknown = sorted(str(name) for name in declared if name not in known)
        if unknown:
            near = [f" (did you mean {name}?)" for name in difflib.get_close_matches(unknown[0], known, 1)]
            got = f"{shorter(', '.join(unknown))}{''.join(near)}"
            raise TraitsError(f"declarations: got {got}, expected names out of {', '.join(known)}")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in declared.items()}
        values |= {name: _full_names(values[name]) for name in _OF_DTYPES & values.keys()}
        return dataclasses.replace(self, **values)

    def scales_of(self, op: str) -> tuple[str, ...]:
        """Return the declared granularities of scales of an operation. If it has no ``tensor``, that stands for its first one."""
        words = SCALES_OF.get(op, ())
        declared = {plain_scales(op) if word == "tensor" else word for word in self.scales}
        return tuple(word for word in words if word in declared)

    def claims(self, problem: Problem) -> Claims:
        """Return the arithmetic declared for a problem."""
        name = dtype_name(problem.dtype)
        accumulate = DTYPES[self.accumulate[name]] if name in self.accumulate else problem.accumulator
        single = problem.dtype == torch.float32
        input_mode = "tf32" if problem.precision.input_mode == "tf32" else self.input_mode
        two = problem.c is not None
        by_torch = self.calls_torch and problem.precision.reduced_partials
        splits = max(self.splits, TORCH_SPLITS) if by_torch else self.splits
        claims = Claims(
            accumulate=accumulate,
            partials=DTYPES[self.partials[name]] if name in self.partials else problem.dtype if two or by_torch else accumulate,
            epilogue_input=problem.epilogue_dtype if problem.epilogue else problem.accumulator,
            splits=2 * splits if two else splits,
            weights=problem.dtype if problem.widens_b and problem.scale_b is not None else None,
            input_mode=input_mode if single else "ieee",
            flush_subnormals=self.flush_subnormals is not False,
            deterministic=self.deterministic,
            reduction=Reduction.declared(self.reduction, problem, DECLARED) if self.reduction and not two else None,
            skips_zeros=self.skips_zeros,
            skips_absent=self.skips_absent,
        )
        return by_steps(problem, claims)

    def as_json(self) -> dict[str, Any]:
        """Return plain values by name, as ``changed`` takes them."""
        return {
            name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            for name, value in ((trait.name, getattr(self, trait.name)) for trait in dataclasses.fields(self))
        }


_OF_DTYPES = {"dtypes", "scale_dtypes", "weights", "results", "index_dtypes", "accumulate", "partials"}
"""Declarations of dtypes. Each may be torch's, or any name that ``full_dtype_name`` reads."""


def _full_names(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_full_names, value))
    if isinstance(value, Mapping):
        return {_full_names(key): _full_names(x) for key, x in value.items()}
    return full_dtype_name(str(value)) if isinstance(value, str | torch.dtype) else value


def gemm(**declared: Any) -> Callable[[F], F]:
    """Return a decorator that declares a function's traits: ``@gemm(dtypes=("float16",), out=True)``.

    The attribute has what is given alone, since calls show the rest (``backends.own.targets.ASSUMED``).
    """
    Traits.of(declared)

    def declare(function: F) -> F:
        setattr(function, ATTRIBUTE, dict(declared))
        return function

    return declare


def _check_words(name: str, words: tuple[str, ...] | None, legal: tuple[str, ...]) -> None:
    if isinstance(words, str) or (words is not None and not isinstance(words, tuple)):
        raise TraitsError(f"{name}: got {words!r}, expected a list of {', '.join(legal)}")
    wrong = [word for word in words or () if word not in legal]
    if wrong:
        raise TraitsError(f"{name}: got {', '.join(map(repr, wrong))}, expected {', '.join(legal)}")


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TraitsError(f"{name}: got {value!r}, expected an integer of at least {least}")
