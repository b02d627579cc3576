"""Files of torch's TunableOp as lists of shapes."""

from __future__ import annotations

import re

import pytest
import torch

from gemmtune import Problem, cli
from gemmtune.cli.shapes import problems_of_file
from gemmtune.cli.spec import Spec

GPU = Spec(device_type="cuda")


def read(tmp_path, *lines, spec=GPU):
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    return problems_of_file(str(tmp_path / "x.csv"), spec)


def test_lines_of_each_kind(tmp_path):
    problems, skipped = read(
        tmp_path,
        "Validator,PT_VERSION,2.11.0",
        "GemmTunableOp_BFloat16_TN,tn_6144_8_2560_ld_2560_2560_6144,Gemm_Hipblaslt_6849,0.200725",
        "GemmTunableOp_BFloat16_TN,tn_6144_8_2560_ld_2560_2560_6144,Gemm_Hipblaslt_6849,0.200725",
        "GemmTunableOp_Half_NN,nn_64_16_32_ld_64_32_64,Default,0.1",
        "GemmTunableOp_float_NT,nt_64_16_32_ld_64_16_64",
        "GemmAndBiasTunableOp_BFloat16_TN,tn_64_16_32_ld_32_32_64",
        "GemmStridedBatchedTunableOp_Half_TN,tn_64_16_32_B_6_ld_32_32_64",
        "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_64_16_32_ld_32_32_64_rw_1_bias_None",
        "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_64_16_32_ld_32_32_64_rw_0_bias_BFloat16",
    )
    assert not skipped
    assert problems[:3] == [
        Problem.mm(8, 6144, 2560, layout="nt", device_type="cuda"),
        Problem.mm(16, 64, 32, dtype=torch.float16, layout="nn", device_type="cuda"),
        Problem.mm(16, 64, 32, dtype=torch.float32, layout="tn", device_type="cuda"),
    ]
    assert [(p.op, p.batch, p.inp is not None) for p in problems[3:5]] == [("addmm", 1, True), ("bmm", 6, False)]
    rows, whole = problems[5:]
    assert (rows.op, rows.scale_a.size, whole.scale_a.numel) == ("scaled_mm", (16, 1), 1)
    assert (whole.epilogue is None, rows.epilogue is None) == (False, True), "a bias is an epilogue"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("GemmTunableOp_BFloat16_TN,tn_64_16_32_ld_96_32_64", r"leading dimensions \(96, 32, 64\)"),
        ("GemmTunableOp_c10::complex<float>_TN,tn_64_16_32_ld_32_32_64", "complex<float> is no dtype"),
        ("GemmTunableOp_BFloat16_TN,tn_64_16", "a line of another form"),
    ],
)
def test_lines_that_are_skipped_with_a_reason(tmp_path, line, reason):
    problems, [skipped] = read(tmp_path, "Validator,PT_VERSION,2.11.0", line)
    assert not problems
    assert re.search(reason, skipped)


def test_it_is_a_file_of_shapes_of_the_command_line(tmp_path, capsys):
    (tmp_path / "x.csv").write_text("GemmTunableOp_float_TN,tn_64_16_32_ld_32_32_64\n")
    assert cli.run(["tune", "--shapes", str(tmp_path / "x.csv"), "--device", "cpu", "--backends", "aten"]) == 0
    assert "mm 16x64x32 float32 nt on cpu" in capsys.readouterr().out
    (tmp_path / "x.csv").write_text("nothing of the kind")
    assert cli.run(["tune", "--shapes", str(tmp_path / "x.csv")]) == 2
    assert "is not JSON, nor a file of TunableOp" in capsys.readouterr().err
