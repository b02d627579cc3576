"""Triton source from the templates of this folder: arguments, loads, epilogue and store."""

import functools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...problem import Epilogue
from ...toolchain.render import template
from ...toolchain.triton_kernels import Argument, Source
from .classes import SIGNATURE_DTYPES, IntClass, OperandClass
from .printer import PACKAGE, TRITON_DTYPES, cast, print_epilogue
from .products import product, scale_load
from .quantized import ScaleClass, ScaleName
from .spec import KernelSpec

FUNCTION = "gemmtune_mm"
SIGNATURE = "<<signature>>"
"""Placeholder for the signature, which is known only after the body is rendered."""
UNROLLED_REGISTERS = 128
"""Registers of a thread for partial sums read ahead while a program adds up splits."""
HOOKS = (
    "def_kernel", "size", "stride", "base", "step", "masks", "make_load", "make_vector", "store_output", "modification", "product",
    "part", "pointer", "of_columns", "runtime", "runtime_pointer",
)  # fmt: skip
"""Methods of ``Writer`` that templates call."""


class Writer:
    """Template hooks for one spec. Each hook declares the arguments that it uses; an argument is declared once."""

    def __init__(self, spec: KernelSpec, preamble: str, described: dict[str, tuple[int, int]], values: Mapping[str, Any]) -> None:
        self.spec = spec
        self.preamble = preamble
        self.described = described
        self.values = values
        given = {name: getattr(spec, name) for name in ("a", "b", "c", "d", "inp")}
        given |= {f"x{i}": operand for i, operand in enumerate(spec.extra)} | {"out": spec.out}
        self.operands: dict[str, OperandClass] = {name: operand for name, operand in given.items() if operand is not None}
        self._pointers: dict[str, Argument] = {}
        self._scalars: dict[str, Argument] = {}
        self._others: dict[str, Argument] = {}
        self.hooks = {name: getattr(self, name) for name in HOOKS}

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Arguments in order: pointers and scalars change at each call and come first; the others are bound once."""
        return (*self._pointers.values(), *self._scalars.values(), *self._others.values())

    def def_kernel(self, *names: str) -> str:
        """Declare the operands and return the signature's placeholder. ``names`` are the template's own; the epilogue's follow."""
        scales = self.spec.quantized.scales if self.spec.quantized is not None else ()
        for name in (*names, *(n for n in self.operands if n not in (*names, "out")), "out"):
            self._pointers[name] = self._operand(name)
            for scale in scales if name == names[-1] else ():
                kind = f"*{SIGNATURE_DTYPES[scale.dtype]}"
                self._pointers[scale.name] = Argument(name=f"{scale.name}_ptr", type=kind, source=("pointer", scale.name))
        return SIGNATURE

    def finished(self, text: str) -> str:
        """Return the rendered text with the signature filled in: every size and stride that the body uses."""
        assert text.count(SIGNATURE) == 1, "a template calls def_kernel once"
        return text.replace(SIGNATURE, self._signature())

    def _operand(self, name: str) -> Argument:
        operand = self.operands[name]
        kind = SIGNATURE_DTYPES[operand.dtype]
        if name in self.described:
            rows, cols = self.described[name]
            return Argument(name=f"{name}_desc", type=f"tensordesc<{kind}[{rows}, {cols}]>", source=("descriptor", name))
        return Argument(name=f"{name}_ptr", type=f"*{kind}", source=("pointer", name), divisor=operand.pointer_divisor)

    def _signature(self) -> str:
        imports = ["import triton", "import triton.language as tl"]
        if not self.spec.interpret:
            imports.append("from triton.language.extra import libdevice")
        if self.spec.dependent:
            imports.append("from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait")
        parameters = ", ".join(argument.name for argument in self.arguments)
        helper = [template(PACKAGE, "round_bfloat16.jinja").render()] if self.spec.interpret else []
        helper += [self.preamble] if self.preamble else []
        by_bits = self.spec.quantized is not None and self.spec.quantized.by_bits
        helper += [template(PACKAGE, "float8.jinja").render()] if by_bits else []
        return "\n".join([*imports, *helper, "", "", "@triton.jit", f"def {FUNCTION}({parameters}):"])

    def size(self, name: str | None, dim: int) -> str:
        """Return an expression for the size of an operand (None: the output) along (batch, row, column)."""
        which = {("a", 1): "m", ("a", 2): "k", ("b", 1): "k", ("b", 2): "n", ("out", 1): "m", ("out", 2): "n", ("c", 2): "k2"}
        letter = which[name or "out", dim]
        return self._int(f"size_{letter}", getattr(self.spec, letter), ("size", letter))

    def stride(self, name: str | None, dim: int) -> str:
        """Return an expression for the stride of an operand (None: the output) along (batch, row, column)."""
        name = name or "out"
        return self._int(f"stride_{name}_{'brc'[dim]}", self.operands[name].strides[dim], ("stride", name, dim))

    def _int(self, name: str, value: IntClass, source: tuple[Any, ...]) -> str:
        if value.constant is not None:
            return str(value.constant)
        self._others.setdefault(
            name, Argument(name=name, type="i64" if value.wide else "i32", source=source, divisor=value.divisor)
        )
        return name

    def runtime(self, name: str) -> str:
        """Declare an int32 that the launch chooses, and return its name. It changes the order of work, not the kernel."""
        divides = self.spec.block_k if name == "k_per_split" else 1
        self._others.setdefault(name, Argument(name=name, type="i32", source=("runtime", name), divisor=min(divides, 16)))
        return name

    def runtime_pointer(self, name: str, dtype: str, *, divisor: int = 16) -> str:
        """Declare a buffer or an unhooked tensor, whose address is a multiple of ``divisor``, and return its name."""
        short = {text: SIGNATURE_DTYPES[known] for known, text in TRITON_DTYPES.items()}
        argument = Argument(name=f"{name}_ptr", type=f"*{short[dtype]}", source=("pointer", name), divisor=divisor)
        return self._pointers.setdefault(name, argument).name

    def part(self, file_name: str) -> str:
        """Return the text of a template or of a shared part."""
        return template(PACKAGE, file_name).render(**self.hooks, **self.values).removesuffix("\n")

    def pointer(self, name: str) -> str:
        return self._pointers[name].name

    def of_columns(self, name: ScaleName, k: str) -> str:
        """Return a load of b's scale or zero point at row ``k``: a vector over columns, or a scalar if all share it."""
        scale = self.spec.quantized and self.spec.quantized.scale(name)
        assert scale
        return scale_load(self.scale_stride, scale, k, "cols", vector=(1,)).removesuffix("[None, :]")

    def scale_stride(self, scale: ScaleClass, dim: int) -> str:
        """Return an expression for the stride of a scale along its rows (0) or columns (1)."""
        return self._int(f"stride_{scale.name}_{'rc'[dim]}", scale.strides[dim], ("scale", scale.name, dim))

    def product(self, *, indent: int, swap: bool = False) -> str:
        """Return the statements that add a quantized product of blocks, or its transpose with ``swap``, to ``acc``."""
        return textwrap.indent("\n".join(product(self.spec, self.scale_stride, swap=swap)), " " * indent).lstrip()

    def _scalar(self, name: str) -> str:
        """Declare alpha or beta with the accumulator's type, and return its name."""
        kind = SIGNATURE_DTYPES[self.spec.accumulator]
        self._scalars.setdefault(name, Argument(name=name, type=kind, source=("scalar", name)))
        return name

    def _term(self, name: str, dim: int, index: str) -> str | None:
        """Return index · stride, in 64 bits if 32 may overflow; None if the term is always 0."""
        stride = self.stride(name, dim)
        if stride == "0":
            return None
        wide = f"({index}).to(tl.int64)" if self.operands[name].wide else index
        return wide if stride == "1" else f"{wide} * {stride}"

    def _terms(self, name: str, indices: Sequence[str]) -> list[str]:
        """Return the nonzero terms of (row index, column index)."""
        return [term for dim, index in enumerate(indices, start=1) if (term := self._term(name, dim, index))]

    def base(self, name: str, batch: str, dim: int, index: str) -> str:
        """Return the address of one matrix of the batch, moved by ``index`` steps along ``dim``."""
        terms = [self._matrix(name, batch)]
        if index != "0" and self.spec.split:
            stride = self.stride(name, dim)
            terms.append(index if stride == "1" else f"{index}.to(tl.int64) * {stride}")
        return " + ".join(terms)

    def step(self, name: str, dim: int, elements: int) -> str:
        """Return the increment that moves an address by ``elements`` along ``dim``."""
        stride = self.operands[name].strides[dim]
        return str(elements * stride.constant) if stride.constant is not None else f"{elements} * {self.stride(name, dim)}"

    def masks(self, *, rows: bool = False, cols: bool = False, ks: bool = False, kst: bool = False) -> str | None:
        """Return the mask of a load for the edges that need one, or None."""
        edges = (
            (rows, "(rows < M)[:, None]"),
            (cols, "(cols < N)[None, :]"),
            (ks, "(ks < k_end - k0)[None, :]"),
            (kst, "(b_ks < (k_end - k0) // 2)[:, None]" if self._packed else "(b_ks < k_end - k0)[:, None]"),
        )
        return " & ".join(text for wanted, text in edges if wanted) or None

    def make_load(self, name: str, indices: Sequence[str], mask: str | None, base: str | None = None, *, once: bool = False) -> str:
        """Return a load of (row index, column index) from one matrix, zero where the mask is false.

        Numbers that are read ``once`` leave the cache first, unless the matrices of a batch share them.
        """
        terms = self._terms(name, indices)
        address = " + ".join([base or self.pointer(name), *terms])
        # If the address does not depend on both indices, add a zero block to get the full shape.
        m, n, k = self.spec.block_m, self.spec.block_n, self.spec.block_k
        extent = f"{m}, {k}" if name in ("a", "c") else f"{k // 2 if self._packed else k}, {n}"
        shape = f" + tl.zeros(({extent}), dtype=tl.int32)" if len(terms) < len(indices) else ""
        return _load(f"{address}{shape}", mask, first=once and not (self.spec.batched and self.stride(name, 0) == "0"))

    def make_vector(self, name: str, dim: int, index: str, mask: str | None, *, base: str) -> str:
        """Return a load of block_k elements along one dimension, zero where the mask is false."""
        offset = self._term(name, dim, index) or f"tl.zeros(({self.spec.block_k},), dtype=tl.int32)"
        return _load(f"{base} + {offset}", mask)

    @property
    def _packed(self) -> bool:
        """True if each element of b holds two numbers."""
        return self.spec.quantized is not None and bool(self.spec.quantized.encoding)

    def store_output(
        self,
        indices: tuple[str, str, str],  # names of batch, rows and columns
        value: str,
        mask: str,
        *,
        indent: int,
        at: tuple[str, str] = ("", ""),  # first row and column, for an output with a descriptor
        places: str = "",  # output rows, if they differ from the rows of the product
    ) -> str:
        """Return the statements that apply alpha, beta and the epilogue, round once to the output dtype, and store."""
        batch, rows, cols = indices
        spec = self.spec
        acc = TRITON_DTYPES[spec.accumulator]
        lines = [f"{mask}_m = {rows} < M", f"{mask}_n = {cols} < N", f"{mask} = {mask}_m[:, None] & {mask}_n[None, :]"]
        if spec.quantized is not None:
            if spec.accumulator == torch.int32 and spec.epilogue is not None:
                # Use another name: this may be inside a branch, where a value keeps its type.
                lines.append(f"{value}_f32 = {value}.to(tl.float32)")
                value = f"{value}_f32"
            scales = spec.quantized.on_result
            lines += [f"{value} = {value} * {scale_load(self.scale_stride, scale, rows, cols)}" for scale in scales]
        if spec.alpha == "general":
            lines.append(f"{value} = {value} * {self._scalar('alpha')}")
        if spec.inp is not None:
            lines.append(f"inp = {self._epilogue_load('inp', batch, rows, cols, mask)}.to({acc})")
            lines.append(f"{value} = {value} + " + (f"{self._scalar('beta')} * inp" if spec.beta == "general" else "inp"))
        extra = [f"x{i}" for i in range(len(spec.extra))]
        lines += [f"{x} = {self._epilogue_load(x, batch, rows, cols, mask)}" for x in extra]
        if spec.epilogue is not None:
            lines += self.modification(spec.epilogue, "result", acc=value, **{x: x for x in extra}).splitlines()
            value = "result"
        result = cast(value, spec.out.dtype, interpret=spec.interpret)
        if "out" in self.described:
            lines.append(f"out_desc.store([{', '.join(at)}], {result})")
            return textwrap.indent("\n".join(lines), " " * indent).lstrip()
        terms = self._terms("out", (f"{places or rows}[:, None]", f"{cols}[None, :]"))
        lines.append(f"out_base = {self._matrix('out', batch)}")
        address = " + ".join(["out_base", *terms])
        shape = f" + tl.zeros(({spec.block_m}, {spec.block_n}), dtype=tl.int32)" if len(terms) < 2 else ""
        lines.append(f"tl.store({address}{shape}, {result}, mask={mask})")
        return textwrap.indent("\n".join(lines), " " * indent).lstrip()

    def modification(self, subgraph: Epilogue, output: str, **inputs: str) -> str:
        """Return the statements of an epilogue graph whose value goes to ``output``; ``acc``, ``x0``, … name its inputs."""
        operands = [inputs[f"x{i}"] for i in range(len(inputs) - 1)]
        return "\n".join(print_epilogue(subgraph, inputs["acc"], operands, output, interpret=self.spec.interpret))

    def _matrix(self, name: str, batch: str) -> str:
        """Return the address of one matrix of the batch."""
        along_batch = self.spec.batched and self.stride(name, 0) != "0"
        return self.pointer(name) + (f" + {batch} * {self.stride(name, 0)}" if along_batch else "")

    def _epilogue_load(self, name: str, batch: str, rows: str, cols: str, mask: str) -> str:
        """Return a load of an epilogue operand in its own shape: a scalar, a row, a column or a block."""
        terms = self._terms(name, (f"{rows}[:, None]", f"{cols}[None, :]"))
        masks = {1: f"{mask}_m[:, None]", 2: f"{mask}_n[None, :]"}
        along = [dim for dim in masks if self.stride(name, dim) != "0"]
        address = " + ".join([self._matrix(name, batch), *terms])
        return _load(address, mask if len(along) == 2 else masks[along[0]] if along else None, other="0")


def _load(address: str, mask: str | None, *, other: str = "0.0", first: bool = False) -> str:
    masked = f", mask={mask}, other={other}" if mask else ""
    return f"tl.load({address}{masked}" + (', eviction_policy="evict_first")' if first else ")")


@functools.lru_cache(maxsize=4096)
def render_source(
    spec: KernelSpec,
    template_name: str = "mm.py.jinja",
    *,
    values: tuple[tuple[str, Any], ...] = (),
    preamble: str = "",
    described: tuple[tuple[str, tuple[int, int]], ...] = (),
) -> Source:
    """Render the kernel of ``spec`` from a template of this folder. Pure: imports no Triton.

    ``values`` are additional names for the template. ``preamble`` is source text before the kernel. ``described`` lists the
    operands that are tensor descriptors instead of pointers, each with the block of one copy.
    """
    names: dict[str, Any] = {
        **{field: getattr(spec, field) for field in KernelSpec.__dataclass_fields__},
        "edge_m": spec.edge.m,
        "edge_n": spec.edge.n,
        "unroll": max(1, min(4, UNROLLED_REGISTERS * 32 * spec.warps // (spec.block_m * spec.block_n))),
        "acc": TRITON_DTYPES[spec.accumulator],
        # The interpreter computes in numpy, which has no bfloat16. Products of 16-bit floats are exact in float32.
        "upcast": spec.interpret and spec.a.dtype.itemsize == 2,
        "parts": False,
        "per_byte": 2 if spec.quantized is not None and spec.quantized.encoding else 1,
        **dict(values),
    }
    writer = Writer(spec, preamble, dict(described), names)
    return Source(text=writer.finished(writer.part(template_name)) + "\n", function=FUNCTION, arguments=writer.arguments)
