"""What all kernels have in common: the parameters that they are told, and how their texts are put together of templates."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from ...problem import Layout, Problem
from ...toolchain.cubin import FLAGS
from ...toolchain.record import OUT, Address, Aligned, Scalar, operand_at
from ...toolchain.render import epilogue_functions, template, template_digest
from ...toolchain.structs import MOST_OPERANDS, Strides, strides_of, struct_text
from ..cpp.printer import STORAGE_TYPES, print_epilogue
from .hopper import ARCH


def files_of(package: str, *names: str) -> tuple[tuple[str, str], ...]:
    """The parts of those names that lie in a package."""
    return tuple((package, f"{name}.cuh.jinja") for name in names)


COMMON = files_of(__package__, "barriers", "pointwise", "epilogue")
"""The parts of every kernel: PTX of barriers, clusters and overlapping launches; elements in memory; from a sum to the result."""
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""Dtypes as PTX writes them."""
(PRODUCTS,) = files_of(__package__, "products")
"""The part that says when products of warp groups begin and end."""
STAGED_PRODUCTS = files_of(__package__, "products", "tensor", "boxes")
"""The parts that multiply operands out of swizzled stages, into which boxes of them are copied."""
(TILES,) = files_of(__package__, "tiles")
"""The part that finds the tile of a group on the device."""
STORE = files_of(__package__, "pairs", "store")
"""The parts that store sums two at a time, and those of a tile."""
TILE_SUMS = (*files_of(__package__, "exchange"), *STORE)
"""The parts that add up the sums of a tile over the blocks of a cluster, and store them."""


def values_of(shape: Any, *names: str) -> dict[str, Any]:
    """What texts are given of a shape: its fields, its name, its threads and shared memory, and what else of it is named."""
    return asdict(shape) | {name: getattr(shape, name) for name in ("threads", "shared_bytes", *names)} | {"name": str(shape)}


class Operand(ctypes.Structure):
    """An operand beside a and b, as it is broadcast to the result."""

    _fields_ = [("data", ctypes.c_void_p), ("strides", Strides)]


class Scalars(ctypes.Structure):
    """The factors of a call."""

    _fields_ = [("alpha", ctypes.c_float), ("beta", ctypes.c_float)]


class Epilogue(ctypes.Structure):
    """What the epilogue reads."""

    _fields_ = [("x", Operand * MOST_OPERANDS), ("scalars", Scalars)]


class Work(ctypes.Structure):
    """What every kernel is told; families add sizes and more."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("out", ctypes.c_void_p), ("out_strides", Strides), ("epilogue", Epilogue))


def structs_of(work: type[Work], types: Mapping[str, str]) -> str:
    """C++: the structs of ``work`` and what it is made of; ``types`` has the types of its pointers."""
    common = [struct_text(one, {}) for one in (Strides, Operand, Scalars, Epilogue)]
    return "\n\n".join([*common, struct_text(work, types, name="Work")])


def fill_common(work: Work, out: Layout, operands: Sequence[Layout]) -> None:
    """Strides of the result and of the operands beside a and b."""
    work.out_strides = strides_of(out)
    for i, layout in enumerate(operands):
        work.epilogue.x[i].strides = strides_of(layout)


def addresses_of(count: int) -> tuple[Address, ...]:
    """The places in a Work of the addresses of the result and of ``count`` operands beside a and b."""
    first = Work.epilogue.offset + Epilogue.x.offset + Operand.data.offset
    return (
        Address(offset=Work.out.offset, operand=OUT),
        *(Address(offset=first + i * ctypes.sizeof(Operand), operand=operand_at(i)) for i in range(count)),
    )


def scalars_of(problem: Problem) -> tuple[Scalar, ...]:
    """The places in a Work of the scalars that are not known before a call."""
    first = Work.epilogue.offset + Epilogue.scalars.offset
    general = (problem.alpha == "general", problem.inp_read is not None and problem.beta == "general")
    fields = (Scalars.alpha, Scalars.beta)
    return tuple(Scalar(offset=first + field.offset, number=i) for i, field in enumerate(fields) if general[i])


def aligned_out(field: Any, layout: Layout, elements: int) -> tuple[bool, tuple[Aligned, ...]]:
    """Whether so many neighbours in a row of the result can be stored at once by its strides, and what that asks of its address.

    ``field`` of a Work says so to the kernel.
    """
    strides = strides_of(layout)
    whole = strides.col == 1 and strides.row % elements == 0 and strides.batch % elements == 0
    place = Aligned(offset=field.offset, operand=OUT, multiple_bytes=elements * layout.dtype.itemsize)
    return whole, (place,) if whole else ()


@dataclass(frozen=True, kw_only=True)
class KernelSource:
    """``unit`` is the translation unit, a template by package and name; COMMON and ``files`` are its parts, each of which is given
    the text of those before it.

    All are given ``values``, which are plain data: what the text depends on, and nothing that a launch can be told. ``helpers`` are
    the names of kernels beside ``kernel``, which multiplies.
    """

    kernel: str
    helpers: tuple[str, ...] = ()
    unit: tuple[str, str]
    files: tuple[tuple[str, str], ...]
    values: Mapping[str, Any]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of all kernels."""
        return (*self.helpers, self.kernel)

    @property
    def parts(self) -> dict[str, str]:
        """The text of each part by its name."""
        parts: dict[str, str] = {}
        for package, name in (*COMMON, *self.files):
            parts[name.split(".")[0]] = template(package, name).render(self._given | parts)
        return parts

    def put_together(self, parts: Mapping[str, str]) -> str:
        """The source whose parts these are."""
        return template(*self.unit).render({**self._given, **parts})

    @property
    def text(self) -> str:
        """The CUDA C++ source."""
        return self.put_together(self.parts)

    @cached_property
    def digest(self) -> str:
        """A hash over everything that makes the cubin: the templates and what they are given. Rendering takes longer."""
        files = [template_digest(*file) for file in (self.unit, *COMMON, *self.files)]
        made_of = [*files, json.dumps(self._given, sort_keys=True), ARCH, *FLAGS]
        return hashlib.blake2b("\n".join(made_of).encode(), digest_size=16).hexdigest()

    @property
    def _given(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "most_operands": MOST_OPERANDS, **self.values}


def common_values(problem: Problem, work: type[Work], pointers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the problem decides in every text: types, the structs with ``work``, and what becomes of a sum before it is stored.

    ``pointers``: the types of those that ``work`` has beside the result. ``fused``: more than the bare sum is stored.
    ``first_operand`` counts what the kernel reads before the epilogue's operands, and ``offsets_at`` before the ends of groups.
    Only the dtypes of operands matter: their sizes are in the problem, and change nothing.
    """
    inp, epilogue, out_type = problem.inp_read, problem.epilogue, STORAGE_TYPES[problem.out.dtype]
    extra = epilogue.operands if epilogue else ()
    operands = [STORAGE_TYPES[x.dtype] for x in (*((inp,) if inp is not None else ()), *extra)]
    names = [f"x{i}" for i in range(int(inp is not None), len(operands))]
    return {
        "structs": structs_of(work, {"out": f"{out_type}*"} | dict(pointers or {})),
        "element": ELEMENTS[problem.dtype],
        "out_type": out_type,
        "operands": operands,
        "first_operand": len(problem.scales) + (problem.offs is not None),
        "offsets_at": len(problem.scales),
        "fused": problem.alpha != "one" or bool(operands) or epilogue is not None,
        "alpha": problem.alpha,
        "beta": problem.beta if inp is not None else "zero",
        "added": inp is not None,
        "statements": print_epilogue(epilogue, "acc", names, "result") if epilogue else ["result = acc;"],
        "functions": epilogue_functions("float"),
    }
