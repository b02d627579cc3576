"""Source of a CK kernel, and the parameters of its launches."""

import ctypes
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...problem import Layout, Problem
from ...toolchain.codeobject import FLAGS
from ...toolchain.record import OUT, WORKSPACE, A, Address, B, Record, Scalar, operand_at
from ...toolchain.render import template, template_digest
from ...toolchain.structs import MOST_OPERANDS, struct_text
from ..cpp.printer import print_epilogue
from .configs import LDS_BUFFERS, Config, Transfer, prefetched
from .legality import Predicate

KERNEL = "gemmtune_ck"
COUNTERS_ALIGNMENT = 256
UNIT = (__package__, "gemm.hip.jinja")
MATH = ("gemmtune.backends.cpp", "math.jinja")
"""Template with the functions of an epilogue, which use no C library."""
WRITTEN = dict.fromkeys(("out", "partials", "counters"), "void*")
TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_OF_INSTANCE = ("threads", "waves_per_simd", "block_m", "block_n", "mfma", "scheduler", "version")


class Operand(ctypes.Structure):
    """Operand other than a and b, broadcast to the result."""

    _fields_ = [("data", ctypes.c_void_p), ("batch_stride", ctypes.c_longlong), ("stride", ctypes.c_int)]


class Work(ctypes.Structure):
    """Parameters of a kernel. Strides are between rows or columns, depending on which are contiguous."""

    _fields_ = [
        ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("out", ctypes.c_void_p), ("x", Operand * MOST_OPERANDS),
        ("a_batch_stride", ctypes.c_longlong), ("b_batch_stride", ctypes.c_longlong), ("out_batch_stride", ctypes.c_longlong),
        ("m", ctypes.c_int), ("n", ctypes.c_int), ("k", ctypes.c_int),
        ("a_stride", ctypes.c_int), ("b_stride", ctypes.c_int), ("out_stride", ctypes.c_int),
        ("alpha", ctypes.c_float), ("beta", ctypes.c_float),
        ("partials", ctypes.c_void_p), ("counters", ctypes.c_void_p), ("part_k", ctypes.c_int),
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KernelSource:
    """Source of a kernel: plain ``values`` fix the text, and ``toolkit`` names a copy of CK other than the installed one."""

    arch: str
    values: Mapping[str, Any]
    toolkit: str = ""

    @property
    def text(self) -> str:
        functions = template(*MATH).render(fused=True) if self.values["fused"] else ""
        structs = "\n\n".join(struct_text(one, WRITTEN if one is Work else {}) for one in (Operand, Work))
        return template(*UNIT).render({**self.values, "kernel": KERNEL, "functions": functions, "structs": structs})

    @cached_property
    def digest(self) -> str:
        """Hash of everything that determines the code object, cheaper than rendering."""
        files = [template_digest(*file) for file in (UNIT, MATH)]
        layout = [struct_text(one, {}) for one in (Operand, Work)]
        made_of = [*files, *layout, json.dumps(self.values, sort_keys=True), self.arch, self.toolkit, *FLAGS]
        return hashlib.blake2b("\n".join(made_of).encode(), digest_size=16).hexdigest()


def source_of(predicate: Predicate, config: Config, toolkit: str) -> KernelSource:
    """Return the source to compile. All sizes with the same path through the pipeline share it."""
    problem, instance = predicate.problem, config.instance
    reads = [
        {"index": i, "kind": read.kind, "type": TYPES[read.dtype], "vector": read.vector}
        for i, read in enumerate(predicate.reads(config))
    ]
    first = len(problem.scales) + (problem.inp_read is not None)
    names = [f"x{i}" for i in range(first, len(reads))]
    epilogue = problem.epilogue
    values = {
        "element": predicate.product.element,
        "factor": predicate.product.factor,
        "splits": config.split_k,
        "out_type": TYPES[problem.out.dtype],
        "alpha": problem.alpha,
        "beta": problem.beta if problem.inp_read is not None else "zero",
        "added": problem.inp_read is not None,
        "scales": len(problem.scales),
        "fused": epilogue is not None,
        "statements": print_epilogue(epilogue, "acc", names, "result") if epilogue else ["result = acc;"],
        "reads": reads,
        "loaded": [read for read in reads if read["kind"] != "one"],
        "a": _operand(predicate, 0, config.a),
        "b": _operand(predicate, 1, config.b),
        "store": _fields(config.store),
        "padding": config.padding if config.padding == "Default" else f"{config.padding}Padding",
        **{name: getattr(instance, name) for name in _OF_INSTANCE},
        "block_k": instance.block_k(config.itemsize),
        "repeats": list(instance.repeats),
        "buffers": LDS_BUFFERS.get(instance.version, 1),
        "lds_bytes": config.lds_bytes,
        "prefetched": prefetched(instance),
        "steps": config.path.steps,
        "loop_taken": config.path.loop,
        "tail": config.path.tail,
    }
    return KernelSource(arch=predicate.device.arch, values=values, toolkit=toolkit)


def _operand(predicate: Predicate, which: int, transfer: Transfer) -> dict[str, Any]:
    return _fields(transfer) | {"type": predicate.product.memory[which], "change": predicate.product.changes[which]}


def _fields(value: object) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}  # type: ignore[attr-defined]


def record_of(predicate: Predicate, config: Config) -> Record:
    """Return the launch parameters for the problem. Everything that depends on its sizes is here."""
    oriented, instance, work = predicate.oriented, config.instance, Work()
    work.m, work.n, work.k = oriented.sizes
    for name, layout, along_k in (("a", oriented.a, config.a.along_k), ("b", oriented.b, not config.b.along_k)):
        setattr(work, f"{name}_stride", _line(layout, rows=along_k))
        setattr(work, f"{name}_batch_stride", _batch(layout))
    work.out_stride, work.out_batch_stride = _line(oriented.out, rows=True), _batch(oriented.out)
    reads = predicate.reads(config)
    for i, read in enumerate(reads):
        work.x[i].stride, work.x[i].batch_stride = read.stride, read.batch_stride
    a, b = (B, A) if config.swap_ab else (A, B)
    first = Work.x.offset + Operand.data.offset
    stored = config.store.vector if config.split_k == 1 else 1  # parts are stored to the workspace, and added up element by element
    wide = ((a, config.a.vector, oriented.a), (b, config.b.vector, oriented.b), (OUT, stored, oriented.out))
    problem, depth = predicate.problem, instance.block_k(config.itemsize)
    tiles = -(-work.m // instance.block_m) * -(-work.n // instance.block_n)
    work.part_k = -(-work.k // depth) // config.split_k * depth
    counter_bytes = -(-4 * tiles * problem.batch // COUNTERS_ALIGNMENT) * COUNTERS_ALIGNMENT
    parts_bytes = 4 * config.split_k * problem.batch * work.m * work.n
    workspace = (
        Address(offset=Work.counters.offset, operand=WORKSPACE),
        Address(offset=Work.partials.offset, operand=WORKSPACE, more_bytes=counter_bytes),
    )
    return Record(
        kernel=KERNEL,
        grid=(tiles, config.split_k, problem.batch),
        cluster=1,
        threads=instance.threads,
        shared_bytes=0,
        pdl=False,
        parameters=bytes(work),
        addresses=(
            Address(offset=Work.a.offset, operand=a),
            Address(offset=Work.b.offset, operand=b),
            Address(offset=Work.out.offset, operand=OUT),
            *(workspace if config.split_k > 1 else ()),
            *(Address(offset=first + i * ctypes.sizeof(Operand), operand=operand_at(i)) for i in range(len(reads))),
        ),
        scalars=_scalars(problem),
        workspace_bytes=counter_bytes + parts_bytes if config.split_k > 1 else 0,
        alignment=tuple((operand, vector * layout.dtype.itemsize) for operand, vector, layout in wide if vector > 1),
    )


def _scalars(problem: Problem) -> tuple[Scalar, ...]:
    general = (problem.alpha == "general", problem.inp_read is not None and problem.beta == "general")
    fields = (Work.alpha, Work.beta)
    return tuple(Scalar(offset=fields[i].offset, number=i) for i in range(2) if general[i])


def _line(layout: Layout, *, rows: bool) -> int:
    """Return the distance between rows, or columns; a single row's or column's distance does not matter."""
    return int(layout.stride[-2 if rows else -1])


def _batch(layout: Layout) -> int:
    return layout.stride[0] if len(layout.stride) == 3 and layout.size[0] > 1 else 0
