"""Program that prints the operations of CUTLASS's generator as JSON. The module path must contain ``cutlass_library``.

    python listing.py 90 bf16 13.0

It neither imports gemmtune nor is imported by it. The generator runs in its own process, because one process cannot load several
versions of its packages.
"""

import argparse
import json
import logging
import sys
from typing import Any


def _wgmma(kind: str) -> tuple[str, str]:
    return f"GenerateSM90_TensorOp_{kind}_WGMMA_gemm", f"GenerateSM90_TensorOp_{kind}_WGMMA_alignx_gemm"


GENERATORS: dict[str, dict[int, tuple[str, ...]]] = {
    "f16": {75: ("GenerateSM75_TensorOp_1688",), 80: ("GenerateSM80_TensorOp_16816",), 90: _wgmma("16b")},
    "bf16": {80: ("GenerateSM80_TensorOp_16816",), 90: _wgmma("16b")},
    "tf32": {80: ("GenerateSM80_TensorOp_1688",), 90: _wgmma("tf32")},
    "f32": {50: ("GenerateSM50_Simt",), 80: ("GenerateSM80_Simt_f32",)},
    "f64": {
        50: ("GenerateSM50_Simt",), 80: ("GenerateSM80_TensorOp_884", "GenerateSM80_Simt_f64"), 90: ("GenerateSM90_TensorOp_1684",),
    },
    "s8": {75: ("GenerateSM75_TensorOp_8816_TN",), 80: ("GenerateSM80_TensorOp_16832_TN",), 90: _wgmma("int8")},
}  # fmt: skip
"""Generator functions by the element of a and b, and by the compute capability that introduced them."""
LEVEL = "232"
"""Generator level, by digit: clusters of up to 2, all multiples of the instruction's tile, 16 to 256 instruction columns."""
LAYOUTS = {"RowMajor": "t", "ColumnMajor": "n"}
KINDS = ("Universal", "Universal3x")


def main(capability: int, element: str, cuda: str) -> None:
    """Print the operations with a and b of ``element`` as a list of mappings, sorted by name."""
    logging.disable(logging.CRITICAL)
    from cutlass_library import generator, library, manifest  # noqa: PLC0415 - of the version that PYTHONPATH has

    class Wanted(manifest.Manifest):  # type: ignore[misc]
        """Manifest of wanted operations only. It skips three of four operations, because naming them all takes a second."""

        def append(self, operation: Any) -> None:
            if operation.operation_kind == library.OperationKind.Gemm and _wanted(operation, capability, element):
                super().append(operation)

    made = Wanted(_arguments(capability, cuda))
    for introduced, names in GENERATORS[element].items():
        if introduced <= capability:
            for name in names:
                getattr(generator, name)(made, cuda)
    operations = [_plain(op, library) for op in made.operations_by_name.values()]
    # json.dump is ten times slower.
    sys.stdout.write(json.dumps(sorted(operations, key=lambda op: op["name"])))


def _arguments(capability: int, cuda: str) -> argparse.Namespace:
    architecture = f"{capability}a" if capability >= 90 else str(capability)
    return argparse.Namespace(
        operations="gemm", build_dir=".", curr_build_dir=".", architectures=architecture, kernels="all", ignore_kernels="",
        exclude_kernels="", filter_by_cc="True", cuda_version=cuda, kernel_filter_file=None, selected_kernel_list=None,
        interface_dir=None, disable_full_archs_compilation=True, instantiation_level=LEVEL, log_level="critical",
    )  # fmt: skip


def _wanted(op: Any, capability: int, element: str) -> bool:
    """Return True for plain real products with row- or column-major operands."""
    tile = op.tile_description
    operands = (op.A, op.B, op.C)
    return (
        op.gemm_kind.name in KINDS
        and tile.minimum_compute_capability <= capability <= tile.maximum_compute_capability
        and all(x.layout.name in LAYOUTS for x in operands)
        and op.A.element.name == op.B.element.name == element
        and all(x.complex_transform.name == "none" for x in operands[:2])
    )


def _plain(op: Any, library: Any) -> dict[str, Any]:
    tile, math = op.tile_description, op.tile_description.math_instruction
    modern = op.gemm_kind.name == "Universal3x"
    d = op.D if modern else op.C
    return {
        "name": op.procedural_name(),
        "modern": modern,
        "introduced": tile.minimum_compute_capability,
        "a": op.A.element.name, "b": op.B.element.name, "c": op.C.element.name, "d": d.element.name,
        "accumulator": math.element_accumulator.name,
        "layout_a": LAYOUTS[op.A.layout.name], "layout_b": LAYOUTS[op.B.layout.name], "layout_d": LAYOUTS[d.layout.name],
        "alignment_a": op.A.alignment, "alignment_b": op.B.alignment, "alignment_d": d.alignment,
        "tile": list(tile.threadblock_shape),
        "cluster": list(getattr(tile, "cluster_shape", (1, 1, 1))),
        "stages": tile.stages,
        "warps": list(tile.warp_count),
        "instruction": list(math.instruction_shape),
        "opcode": math.opcode_class.name,
        "math": math.math_operation.name,
        "kernel_schedule": library.KernelScheduleTag[op.kernel_schedule] if modern else "",
        "epilogue_schedule": library.EpilogueScheduleTag[op.epilogue_schedule] if modern else "",
        "scheduler": op.tile_scheduler.name if modern else "",
    }  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
