"""Common part of all kernels: launch parameters as C structs, and sources assembled from templates."""

import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch

from ...problem import Layout, Problem
from ...toolchain.cubin import FLAGS
from ...toolchain.record import OUT, Address, Aligned, Scalar, operand_at
from ...toolchain.render import epilogue_functions, template, template_digest
from ...toolchain.structs import MOST_OPERANDS, Strides, strides_of, struct_text
from ..cpp.printer import STORAGE_TYPES, print_epilogue
from .hopper import ARCH


def files_of(package: str, *names: str) -> tuple[tuple[str, str], ...]:
    """Return (package, file name) pairs for the named template parts of a package."""
    return tuple((package, f"{name}.cuh.jinja") for name in names)


COMMON = files_of(__package__, "barriers", "pointwise", "epilogue")
"""Parts of every kernel: barriers, clusters and PDL in PTX; element conversions; the epilogue."""
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""PTX type names by dtype."""
(PRODUCTS,) = files_of(__package__, "products")
"""Part with the fences, commits and waits of warp-group products (wgmma)."""
STAGED_PRODUCTS = files_of(__package__, "products", "tensor", "boxes")
"""Parts that copy boxes of operands into swizzled stages by TMA, and multiply from there."""
(TILES,) = files_of(__package__, "tiles")
"""Part that finds a group's tile on the device."""
STORE = files_of(__package__, "pairs", "store")
"""Parts that store sums in pairs, and the sums of a whole tile."""
TILE_SUMS = (*files_of(__package__, "exchange"), *STORE)
"""Parts that add up a tile's sums over the blocks of a cluster, and store them."""


def values_of(shape: Any, *names: str) -> dict[str, Any]:
    """Return the template values of a shape: its fields, name, threads, shared memory and the attributes in ``names``."""
    return asdict(shape) | {name: getattr(shape, name) for name in ("threads", "shared_bytes", *names)} | {"name": str(shape)}


class Operand(ctypes.Structure):
    """Operand in addition to a and b, with strides that broadcast it to the result."""

    _fields_ = [("data", ctypes.c_void_p), ("strides", Strides)]


class Scalars(ctypes.Structure):
    """Scalars alpha and beta of a call."""

    _fields_ = [("alpha", ctypes.c_float), ("beta", ctypes.c_float)]


class Epilogue(ctypes.Structure):
    """Operands and scalars that the epilogue reads."""

    _fields_ = [("x", Operand * MOST_OPERANDS), ("scalars", Scalars)]


class Work(ctypes.Structure):
    """Parameters common to all kernels. Families add sizes and more."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("out", ctypes.c_void_p), ("out_strides", Strides), ("epilogue", Epilogue))


W = TypeVar("W", bound=Work)


def structs_of(work: type[Work], types: Mapping[str, str]) -> str:
    """Return C++ definitions of ``work`` and the structs in it. ``types`` maps its pointers to C++ types."""
    common = [struct_text(one, {}) for one in (Strides, Operand, Scalars, Epilogue)]
    return "\n\n".join([*common, struct_text(work, types, name="Work")])


def work_of(made: type[W], out: Layout, operands: Sequence[Layout]) -> W:
    """Return parameters with the strides of the result and of the operands in addition to a and b."""
    work = made(out_strides=strides_of(out))
    for i, layout in enumerate(operands):
        work.epilogue.x[i].strides = strides_of(layout)
    return work


def addresses_of(count: int) -> tuple[Address, ...]:
    """Return the offsets in Work of the result's address and of ``count`` operand addresses in addition to a and b."""
    first = Work.epilogue.offset + Epilogue.x.offset + Operand.data.offset
    return (
        Address(offset=Work.out.offset, operand=OUT),
        *(Address(offset=first + i * ctypes.sizeof(Operand), operand=operand_at(i)) for i in range(count)),
    )


def scalars_of(problem: Problem) -> tuple[Scalar, ...]:
    """Return the offsets in Work of the scalars that only a call knows."""
    first = Work.epilogue.offset + Epilogue.scalars.offset
    general = (problem.alpha == "general", problem.inp_read is not None and problem.beta == "general")
    fields = (Scalars.alpha, Scalars.beta)
    return tuple(Scalar(offset=first + field.offset, number=i) for i, field in enumerate(fields) if general[i])


def aligned_out(field: Any, layout: Layout, elements: int) -> tuple[bool, tuple[Aligned, ...]]:
    """Return True if strides allow stores of ``elements`` neighbours in a row, and the alignment that the address then needs."""
    strides = strides_of(layout)
    whole = strides.col == 1 and strides.row % elements == 0 and strides.batch % elements == 0
    place = Aligned(offset=field.offset, operand=OUT, multiple_bytes=elements * layout.dtype.itemsize)
    return whole, (place,) if whole else ()


@dataclass(frozen=True, kw_only=True)
class KernelSource:
    """CUDA C++ source of one choice, as templates and their values.

    ``unit`` is the template of the translation unit, as (package, file). COMMON and ``files`` are its parts, and each part sees the
    text of the parts before it.

    ``values`` are plain data for all templates. They hold everything that the text depends on, and no launch parameter. ``kernel``
    is the main kernel, and ``helpers`` name the other kernels.
    """

    kernel: str
    helpers: tuple[str, ...] = ()
    unit: tuple[str, str]
    files: tuple[tuple[str, str], ...]
    values: Mapping[str, Any]

    @property
    def kernels(self) -> tuple[str, ...]:
        return (*self.helpers, self.kernel)

    @property
    def parts(self) -> dict[str, str]:
        parts: dict[str, str] = {}
        for package, name in (*COMMON, *self.files):
            parts[name.split(".")[0]] = template(package, name).render(self._given | parts)
        return parts

    def put_together(self, parts: Mapping[str, str]) -> str:
        return template(*self.unit).render({**self._given, **parts})

    @property
    def text(self) -> str:
        return self.put_together(self.parts)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that determines the cubin: templates, values, architecture, flags. Cheaper than rendering."""
        files = [template_digest(*file) for file in (self.unit, *COMMON, *self.files)]
        made_of = [*files, json.dumps(self._given, sort_keys=True), ARCH, *FLAGS]
        return hashlib.blake2b("\n".join(made_of).encode(), digest_size=16).hexdigest()

    @property
    def _given(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "most_operands": MOST_OPERANDS, **self.values}


def common_values(problem: Problem, work: type[Work], pointers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the template values that follow from the problem alone: types, the structs with ``work``, and the epilogue.

    ``pointers`` gives the C++ types of ``work``'s pointers other than the result. In the result, ``fused`` means that more than the
    bare sum is stored. ``first_operand`` counts the operands before the epilogue's, ``offsets_at`` those before the group offsets.
    Only the dtypes of operands matter here: their sizes do not change the text.
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
