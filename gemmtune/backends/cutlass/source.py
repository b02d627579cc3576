"""Source of an operation's kernel: one translation unit with a plain C entry point."""

import dataclasses
import functools
import hashlib
from dataclasses import dataclass

import torch

from ...problem import Epilogue
from ...problem.problem import ScalarClass
from ...toolchain.render import epilogue_functions, template, template_digest
from ..cpp.printer import print_epilogue
from .configs import OPERAND_ELEMENTS
from .launch import launch_text
from .operation import Operation

CPP_ELEMENTS = {
    "f16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t", "tf32": "cutlass::tfloat32_t", "f32": "float", "f64": "double",
    "s8": "int8_t", "u8": "uint8_t", "s32": "int32_t", "e4m3": "cutlass::float_e4m3_t", "e5m2": "cutlass::float_e5m2_t",
}  # fmt: skip
LAYOUTS = {"t": "cutlass::layout::RowMajor", "n": "cutlass::layout::ColumnMajor"}
SCHEDULERS = {"Default": "cutlass::gemm::PersistentScheduler", "StreamK": "cutlass::gemm::kernel::detail::StreamK", "": ""}
STREAM_K = "stream_k.cuh.jinja"
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-shared", "-Xcompiler", "-fPIC", "-w")


def flags(operation: Operation, capability: int) -> tuple[str, ...]:
    """Return nvcc's flags. 3.x operations target only their own architecture. The others include PTX for newer GPUs."""
    if operation.modern:
        architecture = f"{operation.introduced}a"
        return (*FLAGS, "-DCUTLASS_ENABLE_GDC_FOR_SM90", f"-gencode=arch=compute_{architecture},code=sm_{architecture}")
    return (*FLAGS, f"-gencode=arch=compute_{capability},code=[sm_{capability},compute_{capability}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Inputs of the source text. Sizes, strides, scalars and the launch variant are arguments of the kernel."""

    operation: Operation
    alpha: ScalarClass
    beta: ScalarClass
    added: bool
    """True if inp is read."""
    epilogue: Epilogue | None
    """Epilogue graph. Only the dtypes of its operands matter."""
    operands: tuple[torch.dtype, ...]
    """Dtypes of inp, if it is read, or of the scales, and of the epilogue's operands."""
    scales: int = 0
    """Number of leading operands that scale sums."""

    @property
    def fused(self) -> bool:
        """True if more than the bare product is stored."""
        return self.alpha != "one" or bool(self.operands) or self.epilogue is not None

    @property
    def compute(self) -> str:
        if self.operation.accumulator == "s32" and not self.fused:
            return "int32_t"
        return "double" if self.operation.accumulator == "f64" else "float"

    @property
    def pointwise(self) -> str:
        """Part of the text that computes the epilogue of one element."""
        epilogue = self.epilogue
        names = [f"x{i}[i]" for i in range(self.added + self.scales, len(self.operands))]
        return template(__package__, "pointwise.cuh.jinja").render(
            functions=epilogue_functions(self.compute),
            alpha=self.alpha,
            beta=self.beta,
            added=self.added,
            scales=self.scales,
            operands=len(self.operands),
            statements=print_epilogue(epilogue, "acc", names, "results[i]") if epilogue else ["results[i] = acc;"],
        )

    @property
    def text(self) -> str:
        return _render(self)

    @property
    def digest(self) -> str:
        return _digest(self)


@functools.lru_cache(maxsize=4096)
def _digest(source: Source) -> str:
    operation = source.operation
    name = "gemm3x.cu.jinja" if operation.modern else "gemm2x.cu.jinja"
    files = (name, "pointwise.cuh.jinja", "driver.h.jinja", *((STREAM_K,) if operation.stream_k else ()))
    made_of = [template_digest(__package__, file) for file in files]
    return hashlib.blake2b(
        f"{made_of} {source} {source.pointwise} {launch_text(len(source.operands))}".encode(), digest_size=16
    ).hexdigest()


@functools.lru_cache(maxsize=1024)
def _render(source: Source) -> str:
    operation = source.operation
    values = dataclasses.asdict(operation) | {
        "compute": source.compute,
        "operands": [OPERAND_ELEMENTS[dtype] for dtype in source.operands],
        "stream_k_scheduler": _text(STREAM_K) if operation.stream_k else "",
        "launch": launch_text(len(source.operands)),
        "driver": _text("driver.h.jinja"),
        "pointwise": source.pointwise if source.fused else "",
        "fused": source.fused,
        **{f"element_{side}": CPP_ELEMENTS[getattr(operation, side)] for side in "abd"},
        **{f"layout_{side}": LAYOUTS[getattr(operation, f"layout_{side}")] for side in "abd"},
        "accumulator": CPP_ELEMENTS[operation.accumulator],
        "scheduler": SCHEDULERS[operation.scheduler],
        "stream_k": operation.stream_k,
    }
    return template(__package__, "gemm3x.cu.jinja" if operation.modern else "gemm2x.cu.jinja").render(values)


def _text(name: str) -> str:
    return template(__package__, name).render()
