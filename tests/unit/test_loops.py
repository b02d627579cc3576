"""Where a kernel spills, read off its assembly."""

from __future__ import annotations

import pytest

from gemmtune.toolchain.compiled import AMDGCN, SASS, spilled_share

BEFORE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;             /* 0x00000a00ff017b82 */
                                                                      /* 0x000fe20000000800 */
        /*0010*/                   STL [R1], R4 ;                     /* 0x0000000401007387 */
"""
LOOP = """
        /*0020*/                   LDL R4, [R1] ;                     /* 0x0000000001047983 */
        /*0030*/                   HMMA.16816.F32 R8, R4, R6, R8 ;    /* 0x000000060408723c */
        /*0040*/                   IADD3 R2, R2, 0x1, RZ ;            /* 0x0000000102027810 */
        /*0050*/              @P0  BRA 0x20 ;                         /* 0xffffffa000000947 */
"""
AFTER = """
        /*0060*/                   LDL R5, [R1+0x4] ;                 /* 0x0000040001057983 */
        /*0070*/                   EXIT ;                             /* 0x000000000000794d */
"""


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (BEFORE + LOOP + AFTER, 1 / 4),
        (BEFORE + LOOP.replace("LDL R4", "LDS R4") + AFTER, 0),
        (BEFORE + LOOP.replace("HMMA.16816.F32", "MOV") + AFTER, 3 / 8),
        (BEFORE + AFTER, 2 / 4),
        (BEFORE + LOOP + AFTER.replace("EXIT", "BRA 0x70"), 1 / 4),
        ("", 0),
    ],
    ids=["in-the-loop", "outside", "a-loop-that-multiplies-nothing", "no-loop", "the-endless-loop-at-the-end", "nothing"],
)
def test_of_cuda(text: str, share: float) -> None:
    assert spilled_share(text, SASS) == share


def test_the_worst_of_several_loops_counts() -> None:
    second = LOOP.replace("/*00", "/*01").replace("0x20", "0x120").replace("IADD3 R2, R2, 0x1, RZ", "STL [R1], R4")
    assert spilled_share(BEFORE + LOOP + second, SASS) == 2 / 4


def test_of_amd() -> None:
    text = """
gemmtune_mm:
	scratch_store_dword off, v1, off
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	scratch_load_dword v1, off, off
	v_mfma_f32_32x32x8_bf16 a[0:15], v[2:3], v[4:5], a[0:15]
	s_add_i32 s2, s2, 1
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	s_endpgm
"""
    assert spilled_share(text, AMDGCN) == 1 / 4
    assert spilled_share(text.replace("s_cbranch_scc1 .LBB0_1", "s_nop 0"), AMDGCN) == 2 / 6
    # gfx90a has no scratch instructions; other loads of its loops are told from these by a comment.
    load = "buffer_load_dword v1, off, s[28:31], 0 offset:8"
    older = text.replace("scratch_load_dword v1, off, off", f"{load} ; 4-byte Folded Reload")
    assert spilled_share(older, AMDGCN) == 1 / 4
    assert spilled_share(older.replace(" ; 4-byte Folded Reload", ""), AMDGCN) == 0
