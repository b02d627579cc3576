"""One case of the suite: the call of a GEMM and the property that judges its result. A value whose id describes it fully."""

import dataclasses
import re
from dataclasses import dataclass

import torch

from ...declaration import labels
from ...declaration.labels import DTYPES, PLAIN_BLOCKS, ROWS, SCALES_OF, SHORT_DTYPES, WEIGHTS, sparsity_of_text, weights_of
from ...declaration.layouts import PLAIN, OperandLayout, kinds_of_texts
from ...errors import CaseError
from ...foreign import shown
from ...problem.operation import Operation
from ...problem.rules import MOST_GROUPS
from ...problem.sparsity import Sparsity

PLAIN_GROUPS = 4
"""Groups of a case that gives no number."""
SCALARS = ("zero", "one", "general")
YES_NO = ("no", "yes")
_ALWAYS = ("property_name", "op", "dtype", "m", "n", "k", "batch")
"""Fields at the start of every id."""
_LONG_DTYPES = {short: name for name, short in SHORT_DTYPES.items()}
_SIZES = re.compile(r"(?:(\d{1,18})x)?(\d{1,18})x(\d{1,18})x(\d{1,18})")
_PROPERTY, _VARIANT = re.compile(r"[a-z][a-z0-9-]*"), re.compile(r"[A-Za-z0-9_.+]+")
_LEGAL: dict[str, tuple[str, ...]] = {
    "op": labels.OPS, "dtype": tuple(DTYPES), "bias": labels.BIASES, "alpha": SCALARS, "beta": SCALARS, "scales": labels.SCALES,
    "scale_dtype": ("", *labels.NARROW_FLOATS), "zeros": YES_NO, "result": ("", *labels.NARROW_FLOATS),
    "gated": ("", *labels.GATES), "index": ("", *labels.INDEX_DTYPES),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Specification of one call, with a seed and without tensors.

    ``variant`` is anything else that the property distinguishes, such as the fill of the operands. Layouts are texts of
    ``OperandLayout``. ``inp`` is the layout of the added operand (with the shape ``bias``), of scales and of zero points.
    """

    property_name: str
    op: str = "mm"
    dtype: str = "float32"
    m: int
    n: int
    k: int
    batch: int = 1
    a: str = PLAIN
    b: str = PLAIN
    out: str = ""
    """Strides of the ``out`` argument. Empty: the call allocates its result."""
    inp: str = PLAIN
    bias: str = "n"
    alpha: str = "one"
    beta: str = "one"
    scales: str = "tensor"
    """Granularity of one scale, a word of ``labels.SCALES_OF``."""
    scale_dtype: str = ""
    """Dtype of scales, and of the weights of rows that are added up. Empty: that of a if the operation allows it, else float32."""
    weights: str = ""
    """Dtype of the elements of b. Empty: int8 if b is widened, else the dtype of a. b of 8-bit floats may be the other one."""
    zeros: str = "no"
    """Presence of zero points, ``yes`` or ``no``."""
    result: str = ""
    """Dtype of the result, for operations whose calls may name it. Empty: the default of the operation."""
    k2: str = ""
    """K of c @ d of mm_plus_mm, with c laid out as b and d as a. Empty: K of the first product, with c laid out as a and d as b."""
    blocks: str = ""
    """Class of a block-sparse weight, as ``labels.sparsity_of_text`` reads it. Empty: 16x16 blocks, half of them present."""
    groups: str = ""
    """Number of groups of a grouped product. Empty: 4."""
    tokens: str = ""
    """Number of rows of a, of which an index picks M. Empty: a has M rows and no index."""
    each: str = ""
    """Number of rows of the product that are weighted and added up to each of the M rows of the result. Empty: 1."""
    gated: str = ""
    """Function of gates, for operations whose columns may be gated."""
    index: str = ""
    """Dtype of the index operands. Empty: int64."""
    variant: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, legal in _LEGAL.items():
            _check_word(name, getattr(self, name), legal)
        _check_word("weights", self.weights, ("", *weights_of(self.op)))
        if not _PROPERTY.fullmatch(self.property_name):
            raise CaseError(f"property: got {self.property_name!r}, expected lower-case words joined by hyphens")
        if self.variant and not _VARIANT.fullmatch(self.variant):
            raise CaseError(f"variant: got {self.variant!r}, expected letters, digits and _ . +")
        if self.k2 and (self.row.second != "K2" or not self.k2.isdecimal()):
            raise CaseError(f"k2: got {self.k2!r} for {self.op}, expected a whole number, and the operation mm_plus_mm")
        if self.blocks and not self.row.sparse:
            raise CaseError(f"blocks: got {self.blocks!r} for {self.op}, expected nothing: its operands are dense")
        if self.groups and not (self.row.grouped and self.groups.isdecimal() and 1 <= int(self.groups) <= MOST_GROUPS):
            raise CaseError(f"groups: got {self.groups!r} for {self.op}, expected 1 to {MOST_GROUPS}, and a grouped operation")
        self._check_routes()
        if (sparsity := self.sparsity) is not None and (self.n % sparsity.block_n or self.k % sparsity.block_k):
            raise CaseError(f"blocks: got {sparsity} for N = {self.n}, K = {self.k}, expected blocks that divide them")
        for text in (self.a, self.b, self.inp, *([self.out] if self.out else [])):
            OperandLayout.parse(text)
        if self.op in SCALES_OF and self.scales not in SCALES_OF[self.op]:
            raise CaseError(f"scales: got {self.scales!r}, expected for {self.op} one of {', '.join(SCALES_OF[self.op])}")

    def _check_routes(self) -> None:
        """Raise CaseError for a field of routes whose operand or option the operation lacks."""
        row = self.row
        for name, role in (("tokens", "rows"), ("each", "weights")):
            value = getattr(self, name)
            if value and (row.operand(role) is None or not value.isdecimal() or not int(value)):
                raise CaseError(f"{name}: got {value!r} for {self.op}, expected 1 or more, and an operation with {role}")
        if self.gated and "gated" not in row.options:
            raise CaseError(f"gated: got {self.gated!r} for {self.op}, expected nothing: its columns are not gated")
        if self.index and not self.index_roles:
            raise CaseError(f"index: got {self.index!r} for {self.op}, expected nothing: no index picks or places its rows")

    @property
    def id(self) -> str:
        """The case as one word, such as ``bound:mm-bf16-127x64x33-a.col+4@1-seed.7``. Fields with their default are omitted."""
        sizes = "x".join(map(str, ((self.batch,) if self.batched else ()) + (self.m, self.n, self.k)))
        parts = [self.op, SHORT_DTYPES[self.dtype], sizes]
        parts += [f"{name}.{value}" for name, default in _OPTIONAL.items() if (value := getattr(self, name)) != default]
        return f"{self.property_name}:{'-'.join(parts)}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Return the case of an id. Raises CaseError, with the reason, if ``text`` is no id."""
        name, _, rest = text.partition(":")
        parts = rest.split("-")
        sizes = _SIZES.fullmatch(parts[2]) if len(parts) >= 3 else None
        if sizes is None or parts[1] not in _LONG_DTYPES:
            raise CaseError(
                f"case id: got {shown(text)}, expected property:op-dtype-[Bx]MxNxK[-name.value]... "
                "such as bound:mm-bf16-127x64x33-seed.7"
            )
        batch, m, n, k = sizes.groups()
        values: dict[str, str] = dict(part.partition(".")[::2] for part in parts[3:])
        unknown = sorted(set(values) - set(_OPTIONAL))
        if unknown or not re.fullmatch(r"\d{1,18}", values.get("seed", "0")):
            raise CaseError(f"case id: got {shown(unknown or values['seed'])} in {shown(text)}, expected {', '.join(_OPTIONAL)}")
        seed = int(values.pop("seed", "0"))
        return cls(
            property_name=name, op=parts[0], dtype=_LONG_DTYPES[parts[1]], batch=int(batch or 1), m=int(m), n=int(n), k=int(k),
            seed=seed, **values,
        )  # fmt: skip

    def changed(self, **fields: object) -> "Case":
        """Return this case with some fields replaced."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    @property
    def row(self) -> Operation:
        """Row of the operation in the table of operations."""
        return ROWS[self.op]

    @property
    def sparsity(self) -> Sparsity | None:
        """Class of a block-sparse weight, or None if b is dense."""
        return sparsity_of_text(self.blocks or PLAIN_BLOCKS) if self.row.sparse else None

    @property
    def batched(self) -> bool:
        """True if the operands are 3-D."""
        return self.row.batched

    @property
    def summed(self) -> tuple[int, ...]:
        """Length of the summed dimension, for each product."""
        second = self.row.second
        return (self.k, *([1] if second == "1" else [int(self.k2 or self.k)] if second else []))

    @property
    def empty(self) -> bool:
        """True if any size is 0."""
        return 0 in (self.m, self.n, *self.summed, self.batch)

    @property
    def added(self) -> bool:
        """True if there is an added operand."""
        return self.row.operand("inp") is not None

    @property
    def index_roles(self) -> tuple[str, ...]:
        """Roles of the index operands that pick or place rows."""
        return tuple(operand.role for operand in self.row.operands if operand.indexes)

    @property
    def extents(self) -> dict[str, int]:
        """Sizes by the symbols of the row. K counts numbers, also of a packed b."""
        each = int(self.each or 1)
        return {
            "1": 1, "B": self.batch, "M": self.m * each, "N": self.n * (2 if self.gated else 1), "K": self.k, "K2": self.summed[-1],
            "G": int(self.groups or PLAIN_GROUPS), "T": int(self.tokens or self.m), "C": each,
        }  # fmt: skip

    @property
    def least_bytes(self) -> int:
        """Bytes that a, b and the result have at least. Strided and narrow operands may be smaller than they look: they count 0."""
        a = self.m * self.k if self.a == PLAIN and not self.tokens else 0
        b = self.k * self.n if self.b == PLAIN and not (self.row.sparse or self.row.widens_b) else 0
        return self.batch * (self.m * self.n + (a + b) * DTYPES[self.dtype].itemsize)

    @property
    def packed(self) -> bool:
        """True if b packs two numbers into each byte, so that K must be even."""
        return self.row.widens_b and bool(WEIGHTS[self.weights or "int8"][1])

    @property
    def step_of_k(self) -> int:
        """Number that divides K: the terms that share a scale of a group's matrix, or two that share a byte."""
        word, _, terms = self.scales.partition("group_")
        return int(terms) if self.row.grouped and not word and terms else 2 if self.packed else 1

    @property
    def b_dtype(self) -> torch.dtype:
        """Dtype of the tensor b."""
        if self.row.widens_b:
            return WEIGHTS[self.weights or "int8"][0]
        return DTYPES[self.weights or self.dtype]

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of strides of a, b, and the added operand or scales."""
        return kinds_of_texts(self.a, self.b, *([self.inp] if self.added or self.op in SCALES_OF else []))


_OPTIONAL = {f.name: f.default for f in dataclasses.fields(Case)[len(_ALWAYS) :]}
"""Fields that an id may have, in its order, and their defaults."""


def _check_word(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise CaseError(f"{name}: got {value!r}, expected one of {', '.join(legal)}")
