"""The hooks of the Triton templates: how arguments, loads, epilogue and store are written, and which arguments a kernel takes."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...problem import Epilogue
from ..render import PartialRender, load_template, render
from .printer import ROUND_BFLOAT16, TRITON_DTYPES, cast, print_epilogue
from .spec import IntClass, KernelSpec, OperandClass

__all__ = ["Argument", "Source", "render_source"]

PACKAGE = "gemmtune.templates.triton"
TEMPLATE = "mm.py.jinja"
UNROLLED_REGISTERS = 128
"""Partial sums that a thread reads ahead while it adds up splits."""
SIGNATURE_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
"""torch dtype to its name in a kernel signature."""

Kind = Literal["pointer", "size", "stride", "scalar", "runtime"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a kernel.

    ``source`` says where its value comes from at launch: ``("pointer", "a")``, ``("size", 1)``: M, ``("stride", "b", 2)``,
    ``("scalar", "alpha")``, ``("runtime", "group_m")``. ``divisor`` is what the value (of a pointer: the address) divides by.
    """

    name: str
    type: str
    source: tuple[Any, ...]
    divisor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A rendered kernel: the text of its module, the name of the function in it, and its arguments in order."""

    text: str
    function: str
    arguments: tuple[Argument, ...]


@functools.lru_cache(maxsize=4096)
def render_source(spec: KernelSpec) -> Source:
    """The kernel of ``spec`` as Triton source. Pure: no Triton is imported."""
    writer = _Writer(spec)
    partial = writer.partial
    values = {
        "block_m": spec.block_m,
        "block_n": spec.block_n,
        "block_k": spec.block_k,
        "even_k": spec.even_k,
        "edge_m": spec.edge.m,
        "edge_n": spec.edge.n,
        "batched": spec.batched,
        "split": spec.split,
        "alpha": spec.alpha,
        "unroll": max(1, min(4, UNROLLED_REGISTERS * 32 * spec.warps // (spec.block_m * spec.block_n))),
        "acc": TRITON_DTYPES[spec.accumulator],
        "input_precision": spec.input_precision,
        # numpy, on which the interpreter computes, has no bfloat16; products of 16-bit floats are exact in float32.
        "upcast": spec.interpret and spec.a.dtype.itemsize == 2,
    }
    render(load_template(PACKAGE, TEMPLATE), writer.hooks, values, partial)
    text = partial.finalize_all()
    return Source(text=text, function=writer.function, arguments=writer.arguments)


class _Writer:
    """The hooks over one spec. Arguments are collected as hooks ask for them; each is declared once however often it is used."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.partial = PartialRender()
        self.function = "gemmtune_mm"
        self.operands: dict[str, OperandClass] = {"a": spec.a, "b": spec.b}
        if spec.inp is not None:
            self.operands["inp"] = spec.inp
        self.operands |= {f"x{i}": operand for i, operand in enumerate(spec.extra)}
        self.operands["out"] = spec.out
        self._pointers: dict[str, Argument] = {}
        self._scalars: dict[str, Argument] = {}
        self._others: dict[str, Argument] = {}
        self.hooks: dict[str, Callable[..., Any]] = {
            "def_kernel": self.def_kernel,
            "size": self.size,
            "stride": self.stride,
            "base": self.base,
            "step": self.step,
            "masks": self.masks,
            "make_load": self.make_load,
            "store_output": self.store_output,
            "modification": self.modification,
            "runtime": self.runtime,
            "runtime_pointer": self.runtime_pointer,
        }

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Pointers and scalars first: they change from call to call, the rest is bound once."""
        return (*self._pointers.values(), *self._scalars.values(), *self._others.values())

    def def_kernel(self, *names: str) -> str:
        """The imports and the signature, put in last. ``names`` are the template's own operands, the epilogue's follow them."""
        for name in (*names, *(n for n in self.operands if n not in (*names, "out")), "out"):
            operand = self.operands[name]
            self._pointers[name] = Argument(
                name=f"{name}_ptr",
                type=f"*{SIGNATURE_DTYPES[operand.dtype]}",
                source=("pointer", name),
                divisor=operand.pointer_divisor,
            )
        return self.partial.defer("def_kernel", self._signature)

    def _signature(self) -> str:
        imports = ["import triton", "import triton.language as tl"]
        if not self.spec.interpret:
            imports.append("from triton.language.extra import libdevice")
        parameters = ", ".join(argument.name for argument in self.arguments)
        helper = [ROUND_BFLOAT16] if self.spec.interpret else []
        return "\n".join([*imports, *helper, "", "", "@triton.jit", f"def {self.function}({parameters}):"])

    def size(self, name: str | None, dim: int) -> str:
        """The size of an operand (None is the output) along (batch, row, column) as an expression."""
        which = {("a", 1): "m", ("a", 2): "k", ("b", 1): "k", ("b", 2): "n", ("out", 1): "m", ("out", 2): "n"}
        letter = which[name or "out", dim]
        return self._int(f"size_{letter}", getattr(self.spec, letter), ("size", letter))

    def stride(self, name: str | None, dim: int) -> str:
        """The stride of an operand (None is the output) along (batch, row, column) as an expression."""
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
        """An int32 that the launch chooses: it changes the order of the work, not the kernel."""
        divides = self.spec.block_k if name == "k_per_split" else 1
        self._others.setdefault(name, Argument(name=name, type="i32", source=("runtime", name), divisor=min(divides, 16)))
        return name

    def runtime_pointer(self, name: str, dtype: str) -> str:
        """A buffer that the launch provides."""
        short = {"tl.float32": "fp32", "tl.float64": "fp64", "tl.int32": "i32"}[dtype]
        argument = Argument(name=f"{name}_ptr", type=f"*{short}", source=("pointer", name), divisor=16)
        return self._pointers.setdefault(name, argument).name

    def _scalar(self, name: str) -> str:
        """alpha or beta, of the accumulator's type."""
        kind = SIGNATURE_DTYPES[self.spec.accumulator]
        self._scalars.setdefault(name, Argument(name=name, type=kind, source=("scalar", name)))
        return name

    def _term(self, name: str, dim: int, index: str) -> str | None:
        """index · stride, None where it is always 0; in 64 bits where 32 would not do."""
        stride = self.stride(name, dim)
        if stride == "0":
            return None
        wide = f"({index}).to(tl.int64)" if self.operands[name].wide else index
        return wide if stride == "1" else f"{wide} * {stride}"

    def base(self, name: str, batch: str, dim: int, index: str) -> str:
        """The address of the first element of one matrix of the batch, ``index`` steps along ``dim``."""
        terms = [self._pointers[name].name]
        if self.spec.batched and self.stride(name, 0) != "0":
            terms.append(f"{batch} * {self.stride(name, 0)}")
        if index != "0" and self.spec.split:
            stride = self.stride(name, dim)
            terms.append(index if stride == "1" else f"{index}.to(tl.int64) * {stride}")
        return " + ".join(terms)

    def step(self, name: str, dim: int, elements: int) -> str:
        """What to add to an address to go ``elements`` further along ``dim``."""
        stride = self.operands[name].strides[dim]
        return str(elements * stride.constant) if stride.constant is not None else f"{elements} * {self.stride(name, dim)}"

    def masks(self, *, rows: bool = False, cols: bool = False, ks: bool = False, kst: bool = False) -> str | None:
        """The mask of a load from the edges that it has to respect, None for none."""
        parts = [
            text
            for wanted, text in (
                (rows, "(rows < M)[:, None]"),
                (cols, "(cols < N)[None, :]"),
                (ks, "(ks < k_end - k0)[None, :]"),
                (kst, "(ks < k_end - k0)[:, None]"),
            )
            if wanted
        ]
        return " & ".join(parts) or None

    def make_load(self, name: str, indices: Sequence[str], mask: str | None, base: str | None = None) -> str:
        """A load of (row index, column index) from one matrix, zero where the mask is false."""
        terms = [t for dim, index in enumerate(indices, start=1) if (t := self._term(name, dim, index))]
        address = " + ".join([base or self._pointers[name].name, *terms])
        shape = f" + tl.zeros(({', '.join(self._extent(name))}), dtype=tl.int32)" if len(terms) < len(indices) else ""
        return f"tl.load({address}{shape}, mask={mask}, other=0.0)" if mask else f"tl.load({address}{shape})"

    def _extent(self, name: str) -> tuple[str, str]:
        """The shape of a block of a or b, for a load whose address does not depend on both indices."""
        m, n, k = str(self.spec.block_m), str(self.spec.block_n), str(self.spec.block_k)
        return (m, k) if name == "a" else (k, n)

    def store_output(self, indices: tuple[str, str, str], value: str, mask: str, *, indent: int) -> str:
        """alpha, beta, epilogue, one rounding to the output dtype, and the store. ``indices`` name batch, rows and columns."""
        batch, rows, cols = indices
        spec = self.spec
        acc = TRITON_DTYPES[spec.accumulator]
        lines = [f"{mask}_m = {rows} < M", f"{mask}_n = {cols} < N", f"{mask} = {mask}_m[:, None] & {mask}_n[None, :]"]
        if spec.alpha == "general":
            lines.append(f"{value} = {value} * {self._scalar('alpha')}")
        if spec.inp is not None:
            lines.append(f"inp = {self._epilogue_load('inp', batch, rows, cols, mask)}.to({acc})")
            lines.append(f"{value} = {value} + " + (f"{self._scalar('beta')} * inp" if spec.beta == "general" else "inp"))
        inputs = {}
        for i in range(len(spec.extra)):
            lines.append(f"x{i} = {self._epilogue_load(f'x{i}', batch, rows, cols, mask)}")
            inputs[f"x{i}"] = f"x{i}"
        if spec.epilogue is not None:
            lines += self.modification(spec.epilogue, "result", acc=value, **inputs).splitlines()
            value = "result"
        terms = [t for dim, i in ((1, f"{rows}[:, None]"), (2, f"{cols}[None, :]")) if (t := self._term("out", dim, i))]
        lines.append(f"out_base = {self._matrix('out', batch)}")
        address = " + ".join(["out_base", *terms])
        shape = f" + tl.zeros(({spec.block_m}, {spec.block_n}), dtype=tl.int32)" if len(terms) < 2 else ""
        result = cast(value, spec.out.dtype, interpret=spec.interpret)
        lines.append(f"tl.store({address}{shape}, {result}, mask={mask})")
        return textwrap.indent("\n".join(lines), " " * indent).lstrip()

    def modification(self, subgraph: Epilogue, output: str, **inputs: str) -> str:
        """The statements of an epilogue graph, its value left in ``output``. ``acc`` and ``x0``, ``x1``, … name the inputs."""
        operands = [inputs[f"x{i}"] for i in range(len(inputs) - 1)]
        return "\n".join(print_epilogue(subgraph, inputs["acc"], operands, output, interpret=self.spec.interpret))

    def _matrix(self, name: str, batch: str) -> str:
        pointer = self._pointers[name].name
        if not self.spec.batched or self.stride(name, 0) == "0":
            return pointer
        return f"{pointer} + {batch} * {self.stride(name, 0)}"

    def _epilogue_load(self, name: str, batch: str, rows: str, cols: str, mask: str) -> str:
        """A load of an operand of the epilogue, only as large as it is: a scalar, a row, a column or a block."""
        row, col = (self._term(name, 1, f"{rows}[:, None]"), self._term(name, 2, f"{cols}[None, :]"))
        base = self._matrix(name, batch)
        if row and col:
            return f"tl.load({base} + {row} + {col}, mask={mask}, other=0)"
        if row:
            return f"tl.load({base} + {row}, mask={mask}_m[:, None], other=0)"
        if col:
            return f"tl.load({base} + {col}, mask={mask}_n[None, :], other=0)"
        return f"tl.load({base})"
