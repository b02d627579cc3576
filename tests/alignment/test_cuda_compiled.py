"""Compiled cuda kernels: predicted resources, expected instructions, and no early reads of sums.

The source itself compares shared memory and threads with the launch (``static_assert``).
"""

from __future__ import annotations

from typing import Any

import pytest
from cuda_cases import (
    BF16,
    F16,
    F32,
    FAMILY,
    INT4,
    SM90,
    UINT4,
    UINT8,
    addmm,
    biased,
    blocked,
    choice,
    cluster_shape,
    config,
    dense_shape,
    gated,
    gemv_shape,
    mixed,
    mixed_groups,
    mm,
    parts_shape,
    skinny_shape,
)
from rotation import rotated
from sass import read_early, touched_on_their_way

from gemmtune.backends.cuda.bsr import configs as bsr
from gemmtune.backends.cuda.bsr_skinny import family as bsr_skinny
from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.cuda.cluster import configs as cluster
from gemmtune.backends.cuda.gemv import family as gemv
from gemmtune.backends.cuda.grouped import configs as grouped
from gemmtune.backends.cuda.hopper import MMA, registers_per_thread
from gemmtune.backends.cuda.mixed.weights import weights_of
from gemmtune.backends.cuda.narrow import family as narrow
from gemmtune.backends.cuda.parts import configs as parts
from gemmtune.backends.cuda.skinny import family as skinny
from gemmtune.backends.cuda.stream import configs as stream
from gemmtune.backends.cuda.wgmma import configs as wgmma
from gemmtune.backends.cuda.wgmma_stream import family as wgmma_stream
from gemmtune.errors import UnavailableError
from gemmtune.numerics.bounds import PRODUCTS_OF_PARTS
from gemmtune.problem import Problem
from gemmtune.toolchain.compiled import find_cuobjdump
from gemmtune.toolchain.cubin import find_cubin_compiler

pytestmark = pytest.mark.rotates(8)

MOST_LINES = 10_000
"""Maximum lines of a SASS listing, at two lines per instruction. Code that runs once must be fetched from memory."""


def has_compiler() -> bool:
    try:
        find_cubin_compiler()
    except UnavailableError:
        return False
    return find_cuobjdump() is not None


CLUSTER_SHAPES = (*cluster.SHAPES, *cluster.MIDDLE, *cluster.ONE_RUN[:6])
CLUSTER = [choice(mm(512, 512, layout=layout), shape) for shape in CLUSTER_SHAPES for layout in ("nt", "tn", "nn")
           if layout == "nt" or (shape.block_n % 64 == 0 and (shape.cluster_tiles > 1 or layout == "tn"))]  # fmt: skip
FIELDS: list[dict[str, Any]] = [
    INT4 | {"scales": "group_128"}, INT4 | {"scales": "group_32", "zeros": True}, {"scales": "column"},
    {"dtype": BF16, "scales": "group_64"}, {"dtype": BF16} | UINT4, {"scales": "column", "zeros": True}, {"dtype_b": UINT8},
    INT4 | {"dtype": BF16, "scales": "group_32"}, UINT4 | {"scales": "group_32", "zeros": True}, INT4 | {"scales": "column"},
]  # fmt: skip


def legal(shape: Any, m: int, bits: tuple[int, ...] = (4, 8)) -> list[CudaChoice]:
    found = []
    for fields in FIELDS:
        problem = mixed(m, **fields)
        if weights_of(problem).bits in bits:
            try:
                found.append(choice(problem, shape))
            except AssertionError:  # not every shape has registers for every kind of weight
                continue
    return found


BSR = [
    choice(problem, shape)
    for problem in (blocked(), blocked(layout="tt"), blocked(block=32), blocked(block=32, layout="tt", dtype=F16))
    for shape in bsr.SHAPES
    if not FAMILY["bsr"].why_not_config(problem, SM90, config(shape))
]
BSR_SKINNY = [
    choice(problem, shape)
    for shape in bsr_skinny.SHAPES
    for layout, block in (("nt", 16), ("tt", 16), ("nt", 32), ("tt", 32))
    for problem in [blocked(shape.block_n, layout=layout, block=block, dtype=F16 if block == 32 else BF16)]
    if not FAMILY["bsr_skinny"].why_not_config(problem, SM90, config(shape))
]
SKINNY = [one for shape in skinny.SHAPES for one in legal(shape, shape.block_m)]
GEMV = [one for shape in gemv.SHAPES for one in (choice(mm(1), shape), *legal(shape, gemv.BLOCK_M))]
NARROW = [
    choice(problem, shape)
    for shape in narrow.SHAPES
    for problem in (mm(shape.block_m), mm(16, dtype=F16), gated(mm(shape.block_m)))
]
GROUPED = [
    choice(problem, shape, swap_ab=swap_ab)
    for problem in (
        Problem.grouped_mm(8192, 1024, 2048, device_type="cuda"),
        Problem.grouped_k_mm(1024, 1024, 2048, device_type="cuda"),
    )
    for shape in grouped.SHAPES
    for swap_ab in (False, True)
    if not FAMILY["grouped"].why_not_config(problem, SM90, config(shape, swap_ab=swap_ab))
]
PARTS = [choice(mm(4096, 4096, layout=layout, dtype=F32), shape) for shape in parts.SHAPES for layout in ("nt", "tn")]
WGMMA = [one for bits, shapes in wgmma.SHAPES.items() for shape in shapes for one in legal(shape, shape.block_m, (bits,))]
WGMMA += [
    choice(mixed_groups(**fields), shape)
    for fields in ({}, INT4 | {"scales": "group_128"}, {"scales": "group_32", "dtype": F16})
    for shape in wgmma.SHAPES_FOR_GROUPS[weights_of(mixed_groups(**fields)).bits]
    if not FAMILY["wgmma"].why_not_config(mixed_groups(**fields), SM90, config(shape))
]
STREAM = [
    one for bits, shapes in wgmma_stream.SHAPES.items() for shape in shapes for one in legal(shape, 4 * shape.block_m, (bits,))
]
DENSE = [
    choice(mm(512, 4096, layout=layout), shape, swap_ab=swap_ab)
    for shape in stream.SHAPES[::7]
    for layout in ("nt", "tt")
    for swap_ab in (False, True)
    if not FAMILY["stream"].why_not_config(mm(512, 4096, layout=layout), SM90, config(shape, swap_ab=swap_ab))
]
LARGEST = [
    choice(gated(blocked(block=32)), bsr.SHAPES[3]),
    choice(gated(blocked(30, layout="tt")), bsr_skinny.Shape(block_n=32, warps=4, stages=2, stage_fragments=4)),
    choice(biased(Problem.grouped_mm(512, 512, 512, dtype=F16, layout="nn", device_type="cuda")), grouped.FITTED[0], swap_ab=True),
    choice(mm(512, 512), cluster_shape("128x64x64_s8_k1_2x2")),
    choice(gated(mixed(16, **INT4, scales="group_128")), skinny_shape(16, 128, 4, 2, 4)),
    choice(mixed(1, **INT4, scales="group_128"), gemv_shape(8, 4, 4)),
    choice(gated(mm(1)), gemv_shape(16, 2, 8)),
    choice(addmm(512, 512, 512, dtype=F32), parts_shape(128, 128, 5, halves=2)),
    choice(mm(512, 512, 512, "tn", dtype=F32), parts_shape(128, 128, 5, halves=2)),
    choice(biased(Problem.grouped_mm(512, 512, 512, dtype=F16, layout="nn", device_type="cuda")), grouped.SHAPES[0]),
    choice(mixed(64, scales="column"), wgmma.SHAPES[8][0]),
    choice(mixed(256, scales="column"), wgmma.SHAPES[8][-1]),
    choice(biased(mixed(192, **INT4, scales="group_128")), wgmma.SHAPES[4][-1]),
    choice(biased(mixed(999, scales="column")), wgmma_stream.SHAPES[8][-1]),
    choice(gated(mixed(999, dtype=BF16, **INT4, scales="group_128")), wgmma_stream.SHAPES[4][-1]),
    choice(mixed(999, dtype=BF16, **INT4, scales="group_128"), wgmma_stream.SHAPES[4][-1], whole=True, runs=2),
    choice(gated(mixed_groups(**INT4, scales="group_128")), wgmma.SHAPES_FOR_GROUPS[4][2]),
    choice(biased(mm(512, 4096)), dense_shape(128, 256, 2)),
    choice(gated(mm(512, 4096, dtype=F16)), dense_shape(192, 176, 1, 2), swap_ab=True),
    choice(gated(mm(512, 4096)), dense_shape(64, 208, 1, 2), swap_ab=True),
]
"""Largest tiles, whose registers are the scarcest, with epilogues. Each commit tests a sixth of them."""
KINDS = rotated((BSR, BSR_SKINNY, CLUSTER, GEMV, GROUPED, PARTS, SKINNY, WGMMA, STREAM, DENSE), 2, "compiled")
SAMPLE = [one for all in KINDS for one in rotated(all, len(all), all[0].family.name)]
COMPILED = {one.compile_key: one for one in (*rotated(LARGEST, 6, "largest"), *SAMPLE)}


def assert_products_of_tiles(code: str, shape: Any, widths: tuple[int, ...], products: int, *, gives_registers: bool) -> None:
    """Check a kernel whose blocks walk over tiles. ``products`` of each width are in the loop and the last step."""
    for n in widths:
        assert code.count(f"HGMMA.64x{n}x16.F32") == products
    assert code.count("WARPGROUP.ARRIVE") == 2 * len(widths), "products of a step are not put in sequence by the compiler"
    assert code.count("USETMAXREG") == (2 if gives_registers else 0), "as many registers as the shape says"
    assert ("UTMALDG.3D.MULTICAST" if shape.cluster > 1 else "UTMALDG.3D") in code
    assert read_early(code) == []


@pytest.mark.skipif(not has_compiler(), reason="needs NVRTC or nvcc, and cuobjdump")
@pytest.mark.parametrize("one", COMPILED.values(), ids=lambda one: f"{one.name.removeprefix('cuda:')}-{one.problem}")
def test_compiled_resources_match_prediction(one: CudaChoice) -> None:
    [made] = one.artifacts(SM90)
    shape, code = one.config.shape, made.code
    assert (made.threads, made.shared_bytes) == (shape.threads, made.predicted_bytes)
    # Threads of three warp groups that multiply and widen have 128 registers each.
    few = isinstance(shape, gemv.Shape) or (type(shape) is wgmma.Shape and shape.warp_groups == 3)
    assert (made.stack_bytes, made.spilled_share) <= ((32, 0.05) if few else (0, 0)), "a few addresses"
    assert made.registers is not None
    if isinstance(shape, cluster.Shape):
        assert made.registers <= registers_per_thread(shape.threads, shape.blocks_per_sm)
        assert f"HGMMA.64x{shape.block_n}x16.F32.BF16" in code
        assert ("UTMALDG.3D.MULTICAST" if shape.cluster_tiles > 1 else "UTMALDG.3D") in code
        assert read_early(code) == []
        return
    if isinstance(shape, grouped.Shape):
        products = shape.block_m // 64 * grouped.BLOCK_K // 16
        assert_products_of_tiles(code, shape, shape.products_n, products, gives_registers=shape.gives_registers)
        return
    if isinstance(shape, stream.Shape):
        assert_products_of_tiles(code, shape, (shape.block_n,), 2 * stream.BLOCK_K // 16, gives_registers=shape.warp_groups > 1)
        return
    assert ("MEMBAR" in code) == (isinstance(shape, wgmma_stream.Shape) and one.config.runs == 1), (
        "the blocks of a cluster wait for each other at barriers alone"
    )
    if isinstance(shape, bsr.Shape):
        assert made.registers <= registers_per_thread(shape.threads, 1)
        assert code.count("USETMAXREG") == (2 if shape.gives_registers else 0), "as many registers as the shape says"
        assert one.problem.sparsity is not None
        fragments = 2 if one.problem.sparsity.block_k == 16 else 4  # a row of blocks after the other, or of one block
        assert code.count("HMMA.16816.F32") == fragments * shape.block_n // 8, "which blocks exist is asked in loops"
        assert code.count("LDSM.16.M") == 2 * shape.block_n // 16
        return
    if isinstance(shape, bsr_skinny.Shape):
        assert made.registers <= registers_per_thread(shape.threads, shape.blocks_per_sm)
        found = [code.count(name) for name in ("LDG.E.NA.LTC256B.128", "HMMA.16816.F32")]
        # All loads before the first is waited for, and again in the loop, which has one copy of what is predicated.
        assert found == [shape.stages * shape.stage_fragments * count for count in (2, shape.block_n // 8)]
        return
    if isinstance(shape, parts.Shape):
        # Two steps in the loop, and the last two.
        products = 4 * shape.halves * PRODUCTS_OF_PARTS * parts.BLOCK_K // 16
        assert code.count(f"HGMMA.64x{shape.block_n // shape.halves}x16.F32.BF16") == products
        assert code.count("WARPGROUP.ARRIVE") == 4 * shape.halves, "products of a step are not put in sequence by the compiler"
        assert touched_on_their_way(code) == []
        return
    if isinstance(shape, gemv.Shape):
        weights = gemv.stored(one.problem)
        assert made.registers <= registers_per_thread(shape.threads, shape.blocks_per_sm(weights))
        loads = code.count(f"LDG.E.NA.LTC256B.{32 * gemv.words_of(weights)}" if gemv.words_of(weights) > 1 else "LDG.E.NA.LTC256B ")
        assert loads >= 2 * 2 * shape.stages * shape.col_tiles, "all of them before the first is waited for, and again in the loop"
        assert code.count("HMMA.16816.F32") % (shape.stages * shape.col_tiles) == 0
        return
    weights = weights_of(one.problem)
    if isinstance(shape, skinny.Shape):
        assert one.family.instruction == MMA
        assert made.registers <= registers_per_thread(shape.threads, shape.blocks_per_sm(weights))
        products = shape.col_tiles * shape.block_m // 8 * weights.block_k() // 16 // shape.warps_k
        assert code.count("HMMA.16816.F32") == products
        return
    assert (made.registers <= shape.most_registers, "UTMALDG.2D.MULTICAST" in code) == (True, shape.cluster_n > 1)
    products = shape.col_tiles * shape.block_k(weights) // 16
    assert code.count(f"HGMMA.64x{shape.block_m}x16.F32") == products, "products are not put in sequence by the compiler"
    assert read_early(code) == []
    assert one.problem.epilogue is not None or len(code.splitlines()) < MOST_LINES


@pytest.mark.skipif(not has_compiler(), reason="needs NVRTC or nvcc, and cuobjdump")
@pytest.mark.parametrize("one", rotated(NARROW, len(NARROW) // 2, "narrow"), ids=lambda one: one.name)
def test_narrow_kernels_have_one_copy_of_a_stage(one: CudaChoice) -> None:
    [made] = one.artifacts(SM90)
    shape, lines, code = one.config.shape, one.config.shape.block_k // 64, made.code
    loads = 4 + 2 * shape.row_tiles  # of a line
    assert (made.threads, made.shared_bytes) == (shape.threads, made.predicted_bytes)
    assert (made.stack_bytes, made.spilled_share) == (0, 0)
    assert made.registers is not None
    assert made.registers <= registers_per_thread(shape.threads, shape.blocks_per_sm)
    found = [code.count(name) for name in ("HMMA.16816.F32", "LDSM.16.M88.4", "UTMALDG.2D", "MEMBAR")]
    assert found == [4 * lines * shape.row_tiles, loads * (lines + 1), 2 * lines, 0], "and the first line before the loop"


def test_finds_access_to_registers_of_pending_products() -> None:
    first = "HGMMA.64x64x16.F32.BF16 R56, R100, gdesc[UR16], R56, gsb0 ;"
    second = "HGMMA.64x64x16.F32.BF16 R24, R104, gdesc[UR16], R24, gsb0 ;"
    one, other = "FADD R3, R3, R87 ;", "IADD3 R103, R1, R2, RZ ;"
    wait = [f"WARPGROUP.DEPBAR.LE gsb0, {left} ;" for left in ("0x1", "0x0")]
    assert touched_on_their_way("\n".join([first, second, wait[0], one, other, wait[1], "FADD R3, R3, R24 ;"])) == []
    assert touched_on_their_way("\n".join([first, second, one, other, wait[0], "FADD R3, R3, R24 ;"])) == [
        one,
        other,
        "FADD R3, R3, R24 ;",
    ]


def test_finds_read_of_sums_before_wait() -> None:
    first = "HGMMA.64x64x16.F32 R88, R24, gdesc[UR8], R88 ;"
    last = "/*0100*/ HGMMA.64x64x16.F32 R120, R28, gdesc[UR8], R120, gsb0 ; /* 0x01 */"
    bare = ["WARPGROUP.DEPBAR.LE gsb0, 0x1 ;", "LDS.U16 R23, [R87] ;"]
    read = "F2FP.F16.F32.PACK_AB R3, R89, R151 ;"
    end = ["WARPGROUP.DEPBAR.LE gsb0, 0x0 ;", read]
    assert read_early("\n".join([first, last, *bare, *end])) == []
    assert read_early("\n".join([first, last, *bare, read, *end])) == [read]
