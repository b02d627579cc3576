"""Sources of CUTLASS 2.x operations: text, compilation with nvcc, refusals and, on a GPU, results.

An ordinary run compiles one family of a sample, a different one for each commit. ``pytest -m sm75`` and ``-m sm80`` compile all of
an architecture.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import jinja2
import pytest
import torch
from rotation import takes

from gemmtune.backends.cutlass.build import compile_source
from gemmtune.backends.cutlass.launch import Launch, Library, load
from gemmtune.backends.cutlass.operation import ELEMENTS, Operation
from gemmtune.backends.cutlass.source import Source
from gemmtune.backends.cutlass.toolkit import find_toolkit
from gemmtune.errors import CompileError, UnavailableError
from gemmtune.problem.trace import trace
from gemmtune.toolchain.nvcc import find_compiler
from gemmtune.toolchain.structs import Strides

pytestmark = pytest.mark.rotates(8)

MISALIGNED, BAD_LAYOUT, BAD_PROBLEM, NOT_SUPPORTED = 1, 3, 4, 5
"""Values of cutlass::Status."""
ADDRESS = 0x1000


def _missing() -> str | None:
    try:
        find_toolkit(None)
        find_compiler()
    except UnavailableError as error:
        return str(error)
    return None


compiles = pytest.mark.skipif(_missing() is not None, reason=f"compiles CUTLASS: {_missing()}")


def operation(introduced: int, elements: str, layouts: str, alignments: tuple[int, int, int], **fields: object) -> Operation:
    """Return an operation with ``elements`` of a, b, accumulator and d. ``fields`` replace tensor cores and 128×128 tiles."""
    a, b, accumulator, d = elements.split()
    values = {"tile": (128, 128, 32), "warps": (2, 2, 1), "stages": 3 if introduced >= 80 else 2, "opcode": "TensorOp"}
    return Operation(
        name=f"{a}_{b}_{d}_{layouts}_align{alignments[0]}", modern=False, introduced=introduced, a=a, b=b, c=d, d=d,
        accumulator=accumulator, layout_a=layouts[0], layout_b=layouts[1], layout_d=layouts[2],
        alignment_a=alignments[0], alignment_b=alignments[1], alignment_d=alignments[2], cluster=(1, 1, 1),
        kernel_schedule="", epilogue_schedule="", scheduler="",
        **{**values, "math": "multiply_add", **fields},
    )  # type: ignore[arg-type]  # fmt: skip


SIMT = {"opcode": "Simt", "instruction": (1, 1, 1), "warps": (4, 2, 1), "tile": (128, 128, 8)}
INT8 = {"math": "multiply_add_saturate", "tile": (128, 128, 64)}
MIXED = {"math": "multiply_add_mixed_input_upcast", "tile": (128, 128, 64), "stages": 4, "instruction": (16, 8, 16)}
FAMILIES: dict[str, tuple[str, Operation]] = {
    "simt-f32": ("sm75", operation(50, "f32 f32 f32 f32", "nnn", (1, 1, 1), **SIMT)),
    "simt-f64": ("sm75", operation(50, "f64 f64 f64 f64", "tnn", (1, 1, 1), **{**SIMT, "tile": (64, 64, 8), "warps": (2, 1, 1)})),
    "f16-turing": ("sm75", operation(75, "f16 f16 f32 f16", "ntn", (8, 8, 8), instruction=(16, 8, 8))),
    "f16-turing-align1": ("sm75", operation(75, "f16 f16 f32 f16", "tnn", (1, 1, 1), instruction=(16, 8, 8))),
    "f16-turing-warps-along-k": (
        "sm75", operation(75, "f16 f16 f32 f32", "ttn", (8, 8, 4), instruction=(16, 8, 8), tile=(64, 128, 64), warps=(1, 2, 2)),
    ),
    "s8-turing": ("sm75", operation(75, "s8 s8 s32 s32", "tnn", (16, 16, 8), instruction=(8, 8, 16), **INT8)),
    "s8-turing-to-bf16": ("sm75", operation(75, "s8 s8 s32 bf16", "tnn", (16, 16, 8), instruction=(8, 8, 16), **INT8)),
    "simt-f32-stages": ("sm80", operation(80, "f32 f32 f32 f32", "ttn", (1, 1, 1), **{**SIMT, "stages": 4})),
    "f16": ("sm80", operation(80, "f16 f16 f32 f16", "nnn", (8, 8, 8), instruction=(16, 8, 16))),
    "f16-rows": (
        "sm80", operation(80, "f16 f16 f32 f16", "ntt", (8, 8, 8), instruction=(16, 8, 16), tile=(64, 256, 32), warps=(1, 4, 1)),
    ),
    "f16-128-columns-of-a-warp": (
        "sm80", operation(80, "f16 f16 f32 f16", "ntt", (8, 8, 8), instruction=(16, 8, 16), tile=(64, 256, 32), warps=(2, 2, 1)),
    ),
    "bf16-align2": ("sm80", operation(80, "bf16 bf16 f32 bf16", "ttn", (2, 2, 2), instruction=(16, 8, 16))),
    "bf16-align4-to-f32": ("sm80", operation(80, "bf16 bf16 f32 f32", "tnn", (4, 4, 4), instruction=(16, 8, 16))),
    "tf32": ("sm80", operation(80, "tf32 tf32 f32 f32", "nnn", (4, 4, 4), instruction=(16, 8, 8), tile=(128, 64, 16))),
    "tf32-align1": ("sm80", operation(80, "tf32 tf32 f32 f32", "ntn", (1, 1, 1), instruction=(16, 8, 8), tile=(128, 64, 16))),
    "f64": ("sm80", operation(80, "f64 f64 f64 f64", "ttn", (1, 1, 1), instruction=(8, 8, 4), tile=(64, 64, 16), stages=4)),
    "s8": ("sm80", operation(80, "s8 s8 s32 s32", "tnn", (16, 16, 8), instruction=(16, 8, 32), **INT8)),
    "s8-to-f16": ("sm80", operation(80, "s8 s8 s32 f16", "tnn", (16, 16, 8), instruction=(16, 8, 32), **INT8)),
    "f16-s8": ("sm80", operation(80, "f16 s8 f32 f16", "tnn", (8, 16, 8), **MIXED)),
    "s8-bf16": ("sm80", operation(80, "s8 bf16 f32 bf16", "tnn", (16, 8, 8), **MIXED)),
}  # fmt: skip
SAMPLED = ("f16-turing-align1-fused", "s8-plain")
FUSED = takes("CUTLASS 2.x fused")
"""Flag for compiling the first kernel. The refusals below need the second one anyway."""


def source(name: str) -> Source:
    """Return the bare product for ``…-plain``, and relu(alpha·a@b + beta·inp + x1·x2) for ``…-fused``.

    x1 is float32, x2 bfloat16.
    """
    family, way = name.rsplit("-", 1)
    made_for = FAMILIES[family][1]
    if way == "plain":
        return Source(operation=made_for, alpha="one", beta="zero", added=False, epilogue=None, operands=())
    compute = torch.float64 if made_for.accumulator == "f64" else torch.float32
    dtypes = (ELEMENTS[made_for.d], torch.float32, torch.bfloat16)
    shaped = [torch.empty(2, 2, dtype=dtype) for dtype in dtypes[1:]]
    epilogue = trace(lambda acc, x, y: torch.relu(acc + x * y), compute, shaped)
    return Source(operation=made_for, alpha="general", beta="general", added=True, epilogue=epilogue, operands=dtypes)


KERNELS = [f"{name}-{way}" for name, (_, op) in FAMILIES.items() for way in ("plain", "fused") if (op.d, way) != ("s32", "fused")]


def library(name: str) -> Library:
    """Compile for the oldest supported GPU of the operation. Newer GPUs run its PTX."""
    capability = max(75, FAMILIES[name.rsplit("-", 1)[0]][1].introduced)
    return load(compile_source(source(name), find_toolkit(None), capability, name))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Return the sample, the other kernels under a marker for GPUs, and all of an architecture whose marker is selected."""
    if "kernel" not in metafunc.fixturenames:
        return
    if "batch" in metafunc.fixturenames:
        marks = {
            kernel: (pytest.mark.gpu, pytest.mark.slow) if kernel in SAMPLED else (pytest.mark.cutlass_build,) for kernel in KERNELS
        }
        metafunc.parametrize("kernel", [pytest.param(kernel, marks=marks[kernel]) for kernel in KERNELS])
        return
    asked, sampled = str(metafunc.config.getoption("markexpr")), SAMPLED[:1] if FUSED else SAMPLED[1:]
    archs = {kernel: FAMILIES[kernel.rsplit("-", 1)[0]][0] for kernel in KERNELS}
    params = [pytest.param(k, marks=getattr(pytest.mark, arch)) for k, arch in archs.items() if k in sampled or arch in asked]
    metafunc.parametrize("kernel", params)


@pytest.mark.turn(4, 8)
@pytest.mark.slow
@compiles
def test_source_compiles_to_three_entry_points_without_workspace(kernel: str) -> None:
    assert library(kernel).workspace_bytes(None) == 0


def test_column_major_results_use_swapped_product() -> None:
    columns, rows = source("bf16-align2-plain").text, source("f16-rows-plain").text
    assert "using LayoutA = typename cutlass::layout::LayoutTranspose<cutlass::layout::RowMajor>::type;" in columns
    assert "std::swap(launch.a, launch.b);" in columns
    assert "using LayoutA = cutlass::layout::ColumnMajor;" in rows
    assert "std::swap" not in rows


def test_bare_product_has_no_functor_and_no_visitor() -> None:
    plain, fused = source("f16-plain").text, source("f16-fused").text
    assert "struct Pointwise" not in plain
    assert "epilogue_with_visitor_callbacks.h" not in plain
    assert "struct Pointwise" in fused
    assert "Operand<cutlass::half_t> x0;" in fused
    assert "Operand<cutlass::bfloat16_t> x2;" in fused


def test_unknown_math_operation_raises() -> None:
    made_for = dataclasses.replace(FAMILIES["f16"][1], math="xor_popc")
    broken = dataclasses.replace(source("f16-plain"), operation=made_for)
    with pytest.raises(jinja2.UndefinedError, match="'dict object' has no attribute 'xor_popc'"):
        len(broken.text)


@compiles
@pytest.mark.parametrize("alpha", ["general"] if takes("a refusal of nvcc") else [])
def test_compiler_error_raises_compile_error_with_its_text(alpha: str) -> None:
    fused = dataclasses.replace(source("s8-plain"), alpha=alpha)
    with pytest.raises(CompileError, match=r"(?s)int_mm_mul did not compile:.*an int32 result has no epilogue: a float would"):
        compile_source(fused, find_toolkit(None), 80, "int_mm_mul")


def launch_of(m: int = 128, n: int = 128, k: int = 64, **changes: object) -> Launch:
    """Return a launch with packed row-major a, column-major b and out. ``a`` is an address, ``a_strides`` are 3 numbers, …"""
    launch = Launch()
    strides = {"a_strides": (k, 1, m * k), "b_strides": (1, k, n * k), "out_strides": (1, m, m * n)}
    fields = {"m": m, "n": n, "k": k, "batch": 1, "swizzle": 1, "a": ADDRESS, "b": ADDRESS, "out": ADDRESS, **strides, **changes}
    for field, value in fields.items():
        setattr(launch, field, Strides(*value) if isinstance(value, tuple) else value)
    return launch


def check(name: str, launch: Launch) -> int:
    return int(library(name).check(ctypes.addressof(launch)))


@pytest.mark.turn(2, 8)
@compiles
@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"k": 0}, BAD_PROBLEM),
        ({"batch": 0}, BAD_PROBLEM),
        ({"m": 2**30, "n": 2**30}, BAD_PROBLEM),
        ({"k": 131072}, NOT_SUPPORTED),
        ({"k": 63}, MISALIGNED),
        ({"m": 130}, MISALIGNED),
        ({"a": ADDRESS + 8}, MISALIGNED),
        ({"b": ADDRESS + 1}, MISALIGNED),
        ({"out": ADDRESS + 4}, MISALIGNED),
        ({"a_strides": (72, 1, 0)}, MISALIGNED),
        ({"batch": 2, "b_strides": (1, 64, 64 * 128 + 8)}, MISALIGNED),
        ({"out_strides": (1, 130, 0)}, MISALIGNED),
        ({"a_strides": (64, 2, 0)}, BAD_LAYOUT),
        ({"out_strides": (128, 1, 0)}, BAD_LAYOUT),
    ],
)
def test_refuses_unsupported_launch(changes: dict[str, object], status: int) -> None:
    assert check("s8-plain", launch_of(**changes)) == status  # type: ignore[arg-type]


@pytest.mark.turn(6, 8)
@compiles
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("s8-plain", {}),
        ("s8-plain", {"m": 12, "n": 7, "k": 131056}),
        ("s8-plain", {"batch": 100_000, "a_strides": (0, 1, 0), "out_strides": (1, 136, 4)}),
        ("s8-plain", {"n": 1, "b_strides": (1, 3, 5)}),
        # Only if the test above compiles it.
        *([("f16-turing-align1-fused", {"m": 1, "n": 3, "k": 5, "a": ADDRESS + 2, "a_strides": (7, 1, 0)})] if FUSED else ()),
    ],
)
def test_legal_launch_fails_only_without_device(name: str, changes: dict[str, object]) -> None:
    assert check(name, launch_of(**changes)) not in (MISALIGNED, BAD_LAYOUT, BAD_PROBLEM, NOT_SUPPORTED)  # type: ignore[arg-type]


POISON = 192


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return -1, 0 and 1, which every kernel multiplies and sums exactly."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-1, 2, shape, device="cuda", generator=generator).to(dtype)


def view(whole: torch.Tensor, letter: str, padding: int) -> torch.Tensor:
    """Return [batch, rows, cols] inside ``whole``, with padding between rows or columns, and between matrices."""
    inner = whole[:, :-1, :-padding]
    return inner if letter == "t" else inner.transpose(1, 2)


def padded(letter: str, batch: int, rows: int, cols: int, padding: int) -> tuple[int, int, int]:
    lines, length = (rows, cols) if letter == "t" else (cols, rows)
    return batch, lines + 1, length + padding


def operands_of(kernel: str, batch: int, m: int, n: int, inp: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the fused kernels' x0, x1, x2: inp of shape ``inp``, a column-major matrix for the whole batch, a row of numbers."""
    shapes = (inp, (1, n, m), (1, 1, n))
    x = [integers(shape, dtype, 3 + i) for i, (shape, dtype) in enumerate(zip(shapes, source(kernel).operands, strict=False))]
    return [(t.transpose(1, 2) if i == 1 else t).expand(batch, m, n) for i, t in enumerate(x)]


def expected(a: torch.Tensor, b: torch.Tensor, x: list[torch.Tensor]) -> torch.Tensor:
    product = a.double() @ b.double()
    return torch.relu(2 * product + 3 * x[0].double() + x[1].double() * x[2].double()) if x else product


def strides(x: torch.Tensor) -> Strides:
    return Strides(x.stride(1), x.stride(2), x.stride(0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch sees none")
@compiles
@pytest.mark.parametrize("batch", [1, 3])
def test_integer_results_are_exact_in_any_tile_order(kernel: str, batch: int) -> None:
    op, compiled = FAMILIES[kernel.rsplit("-", 1)[0]][1], library(kernel)
    m, n, k = (301, 459, 71) if op.alignment_a == 1 else (304, 464, 80)
    padding = 16 if op.alignment_a > 1 else 1
    a = view(integers(padded(op.layout_a, batch, m, k, padding), ELEMENTS[op.a], 1), op.layout_a, padding)
    b = view(integers(padded(op.layout_b, batch, k, n, padding), ELEMENTS[op.b], 2), op.layout_b, padding)
    whole, wanted = (
        torch.full(padded(op.layout_d, batch, m, n, padding), POISON, device="cuda", dtype=ELEMENTS[op.d]) for _ in range(2)
    )
    out = view(whole, op.layout_d, padding)
    inps = itertools.cycle([(batch, m, n), (1, 1, n), (1, m, 1), (batch, 1, 1)])
    for (raster, swizzle), inp in zip(itertools.product((0, 1), (1, 2, 8)), inps, strict=False):
        x = operands_of(kernel, batch, m, n, inp)
        view(wanted, op.layout_d, padding).copy_(expected(a, b, x))
        whole.fill_(POISON)
        launch = launch_of(m, n, k, batch=batch, raster=raster, swizzle=swizzle, alpha=2.0, beta=3.0)
        launch.device = torch.cuda.current_device()
        launch.a, launch.b, launch.out = a.data_ptr(), b.data_ptr(), out.data_ptr()
        launch.a_strides, launch.b_strides, launch.out_strides = strides(a), strides(b), strides(out)
        for i, tensor in enumerate(x):
            launch.x[i], launch.x_strides[i] = tensor.data_ptr(), strides(tensor)
        assert compiled.check(ctypes.addressof(launch)) == 0
        assert compiled.launch(ctypes.addressof(launch), torch.cuda.current_stream().cuda_stream) == 0
        assert torch.equal(whole, wanted), f"{raster=} {swizzle=} {inp=}: {(whole != wanted).sum()} of {whole.numel()} are wrong"
