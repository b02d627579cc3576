"""Sources of CUTLASS kernels for operations and epilogues. The pointwise part is compiled for the host and compared to torch."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.resources
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cpp_kernels import needs_compiler
from extras import needs
from test_cpp_epilogue import GRID, ROUNDED, SPECIAL, UNARY, by_column

from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.backends.cutlass import BACKEND, launch
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.source import Source
from gemmtune.device import preset
from gemmtune.errors import ErrorFromChoice
from gemmtune.problem import Problem
from gemmtune.problem.epilogue import OPERATIONS, evaluate
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings
from gemmtune.toolchain.render import epilogue_functions

PACKAGE = "gemmtune.backends.cutlass"
HOST = """
#define __device__
#define CUTLASS_PRAGMA_UNROLL
#include <cmath>
#include <cstdint>
#include <cstring>
namespace cutlass {
template <class T, int N> struct Array {
  T values[N];
  T& operator[](int i) { return values[i]; }
  T const& operator[](int i) const { return values[i]; }
};
struct half_t {
  _Float16 value;
  explicit half_t(float x) : value(static_cast<_Float16>(x)) {}
  explicit operator float() const { return static_cast<float>(value); }
};
struct bfloat16_t {
  float value;
  explicit bfloat16_t(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = x != x ? 0x7fc00000u : (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
    std::memcpy(&value, &bits, 4);
  }
  explicit operator float() const { return value; }
};
}
"""
RUN = """
extern "C" void run(Compute const* acc, Compute const* x0, Compute const* x1, double alpha, double beta, Compute* out, int count) {
  const Pointwise<cutlass::Array<Compute, 1>> pointwise;
  for (int i = 0; i < count; ++i) {
    out[i] = pointwise({acc[i]}CALLS, Scalars{Compute(alpha), Compute(beta)})[0];
  }
}
"""


def choice_of(problem: Problem, arch: str = "sm90", **changes: object) -> CutlassChoice:
    found = BACKEND.enumerate(problem, preset(arch), Settings(search="quick", **changes)).choices  # type: ignore[arg-type]
    assert found
    assert isinstance(found[0], CutlassChoice)
    return found[0]


def source_of(problem: Problem, arch: str = "sm90") -> Source:
    pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
    return choice_of(problem, arch).source


def with_epilogue(problem: Problem, function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> Problem:
    return dataclasses.replace(problem, epilogue=trace(function, problem.accumulator, operands))


def mm(**fields: object) -> Problem:
    return Problem.mm(512, 512, 512, device_type="cuda", **fields)  # type: ignore[arg-type]


@pytest.mark.rotates(2)
@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm90"])
@pytest.mark.parametrize("name", UNARY)
def test_renders_every_function(name: str, arch: str) -> None:
    text = source_of(with_epilogue(mm(dtype=torch.float16), UNARY[name]), arch).text
    assert "{{" not in text
    assert "{%" not in text
    assert "results[i] = " in text
    assert text.count('extern "C"') >= 3


def test_defines_every_epilogue_function() -> None:
    text = epilogue_functions("float")
    infix = ("add", "sub", "mul", "div", "neg", "where", "lt", "le", "gt", "ge", "eq", "ne")
    assert {name for name in OPERATIONS if name not in infix and f" f_{name}(" not in text} == set()


@pytest.mark.parametrize(
    ("problem", "expected", "absent"),
    [
        (mm(), ["LinearCombination"], ["Pointwise", "Sm90AuxLoad"]),
        (Problem.addmm(512, 512, 512, bias="n", alpha=2, beta=0.5, device_type="cuda"),
         ["acc = acc * scalars.alpha;", "acc = acc + scalars.beta * x0[i];", "Operand<cutlass::bfloat16_t>>;"], []),
        (Problem.addmm(512, 512, 512, bias="n", device_type="cuda"), ["acc = acc + x0[i];"], ["scalars.alpha;", "scalars.beta"]),
        (Problem.addmm(512, 512, 512, bias="n", alpha=3, beta=0, device_type="cuda"), ["acc = acc * scalars.alpha;"], ["x0["]),
    ],
    ids=["plain", "alpha-beta", "added", "beta-zero"],
)  # fmt: skip
def test_scalars_and_added_operand(problem: Problem, expected: list[str], absent: list[str]) -> None:
    text = source_of(problem).text
    for piece in expected:
        assert piece in text
    for piece in absent:
        assert piece not in text


def test_epilogue_operands_follow_added_operand() -> None:
    problem = Problem.addmm(512, 512, 512, bias="n", dtype=torch.float16, device_type="cuda")
    row, column = torch.empty(512, dtype=torch.float32), torch.empty(512, 1, dtype=torch.bfloat16)
    text = source_of(with_epilogue(problem, lambda acc, x, y: acc * x + y, row, column)).text
    assert "Operand<cutlass::half_t>, Operand<float>, Operand<cutlass::bfloat16_t>>;" in text
    assert " = acc * x1[i];" in text
    assert "x2[i]" in text


def test_cast_precedes_later_scaling() -> None:
    text = source_of(with_epilogue(mm(), lambda acc: acc.to(torch.float16) * 3.0)).text
    assert "const float v1 = round_f16(acc);" in text
    assert "round_f16(v1 * float(0x1.8000000000000p+1));" in text


def test_digest_covers_inputs_of_text() -> None:
    base = mm()
    scaled = [source_of(with_epilogue(base, lambda acc, f=f: acc * f)) for f in (3.0, 3.0, 2.0)]
    assert scaled[0].digest == scaled[1].digest != scaled[2].digest
    assert scaled[0].text == scaled[1].text != scaled[2].text
    longer = source_of(dataclasses.replace(base, a=dataclasses.replace(base.a, stride=(1024, 1))))
    assert longer.digest == source_of(base).digest


@pytest.mark.parametrize(
    ("operand", "reason"),
    [
        (torch.empty(512, dtype=torch.bool), "operand 0 of the epilogue is bool, expected one of float16, bfloat16, "
         "float32, float64"),
        (torch.empty(512, dtype=torch.float64),
         "the epilogue computes in float64, this backend in float32"),
    ],
    ids=["bool", "float64"],
)  # fmt: skip
def test_refuses_unsupported_epilogue_operands(operand: torch.Tensor, reason: str) -> None:
    function = (lambda acc, x: torch.where(x, acc, -acc)) if operand.dtype == torch.bool else (lambda acc, x: acc + x)
    found = BACKEND.enumerate(with_epilogue(mm(), function, operand), preset("sm90"), Settings())
    assert not found.choices
    assert [refusal.reason for refusal in found.refusals] == [reason]


def pointwise(problem: Problem, folder: Path) -> Callable[..., torch.Tensor]:
    """Return the pointwise part of the problem's kernel, compiled for the host."""
    made = source_of(problem)
    calls = "".join(f", {{x{i}[i]}}" for i in range(len(made.operands)))
    source, library = folder / "pointwise.cpp", folder / "pointwise.so"
    source.write_text(HOST + made.pointwise + RUN.replace("CALLS", calls))
    compiler = find_compiler()
    assert compiler is not None
    command = [compiler.path, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    run = ctypes.CDLL(str(library)).run
    run.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_double] * 2 + [ctypes.c_void_p, ctypes.c_int]

    def call(acc: torch.Tensor, *x: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> torch.Tensor:
        dense = [t.expand_as(acc).to(acc.dtype).contiguous() for t in (acc, *x)]
        out = torch.empty_like(dense[0])
        pointers = [t.data_ptr() for t in dense] + [None] * (3 - len(dense))
        run(*pointers, alpha, beta, out.data_ptr(), out.numel())
        return out

    return call


@needs_compiler
def test_functions_match_torch(tmp_path: Path) -> None:
    values, which = torch.tensor(SPECIAL + GRID).reshape(-1, 1), torch.arange(len(UNARY), dtype=torch.float32)
    problem = with_epilogue(mm(dtype=torch.float32), by_column(list(UNARY.values())), torch.empty(512))
    got = pointwise(problem, tmp_path)(values.expand(-1, len(UNARY)), which)
    for j, (name, function) in enumerate(UNARY.items()):
        exact, torchs = function(values[:, 0].double()), function(values[:, 0])
        assert torch.equal(got[:, j].isnan(), exact.isnan()), (name, values[got[:, j].isnan() != exact.isnan(), 0])
        finite = exact.float().isfinite()
        error = (got[:, j].double() - exact)[finite].abs()
        # gelu and arithmetic cancel: the kernel may lose the same precision there as torch.
        allowed = 4 * 2.0**-24 * exact.abs() + 2 * (torchs.double() - exact).abs() + 2e-7 * (name[:4] == "gelu")
        assert (error <= allowed[finite] + 1e-44).all(), name


@needs_compiler
def test_16_bit_nodes_round_like_torch(tmp_path: Path) -> None:
    values = torch.cat([torch.tensor(SPECIAL + GRID), torch.randn(200, generator=torch.Generator().manual_seed(1)) * 100])
    cases = [(name, f, dtype) for name, f in ROUNDED.items() for dtype in (torch.float16, torch.bfloat16)]
    function = by_column([lambda x, f=f, dtype=dtype: f(x.to(dtype)).to(torch.float32) for _, f, dtype in cases])
    which = torch.arange(len(cases), dtype=torch.float32)
    graph = trace(function, torch.float32, (which,))
    acc = values.reshape(-1, 1).expand(-1, len(cases)).contiguous()
    problem = dataclasses.replace(mm(dtype=torch.float32), epilogue=trace(function, torch.float32, (torch.empty(512),)))
    got, expected = pointwise(problem, tmp_path)(acc, which), evaluate(graph, acc, (which,))
    differ = ~((got == expected) | (got.isnan() & expected.isnan()))
    assert not differ.any(), (cases[int(differ.any(0).int().argmax())][0], acc[differ][:3], got[differ][:3], expected[differ][:3])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_alpha_beta_and_operand(dtype: torch.dtype, tmp_path: Path) -> None:
    problem = Problem.addmm(512, 512, 512, bias="mn", alpha=2.0, beta=0.4, dtype=dtype, device_type="cuda")
    problem = with_epilogue(problem, lambda acc, x: torch.relu(acc * 3.3 - 1.234) * x, torch.empty(512, dtype=dtype))
    generator = torch.Generator().manual_seed(1)
    acc, inp, x = (torch.randn(500, dtype=dtype, generator=generator) for _ in range(3))
    got = pointwise(problem, tmp_path)(acc, inp, x, alpha=2.0, beta=0.4)
    torch.testing.assert_close(got, torch.relu((2 * acc + 0.4 * inp) * 3.3 - 1.234) * x)


@pytest.mark.parametrize(("refused_by", "status"), [("check", 7), ("call", 11), ("call", 99), ("", 0)])
def test_a_status_of_cutlass_is_an_error_that_names_it(refused_by, status, monkeypatch):
    """The library and the driver are replaced: a status of 0 is a success."""
    calls: list[object] = []
    problem = Problem.mm(64, 64, 64, dtype=torch.float16, device_type="cuda")
    choice = next(c for c in BACKEND.enumerate(problem, preset("sm80"), Settings()).choices if isinstance(c, CutlassChoice))

    def call(*given: object) -> int:
        calls.append(given)
        return status * (refused_by == "call")

    library = SimpleNamespace(
        check=lambda _: status * (refused_by == "check"), capture=None,
        workspace_bytes=ctypes.CFUNCTYPE(ctypes.c_longlong, ctypes.c_void_p)(lambda _: 0),
        call=ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(call),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=108))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 5, raising=False)
    monkeypatch.setattr(launch, "shared_workspace", lambda *_: SimpleNamespace(size_bytes=0, device=0))
    a, b, out = (torch.empty(64, 64, dtype=torch.float16) for _ in range(3))
    named = {7: "internal error", 11: "cannot implement it", 99: "status 99"}.get(status, "")
    with pytest.raises(ErrorFromChoice, match=f"CUTLASS: {named}") if status else contextlib.nullcontext():
        choice.bind(library).run(out, (a, b), ())
    assert len(calls) == (refused_by != "check")


@needs("cutlass")
def test_statuses_have_the_numbers_of_cutlass_header():
    header = importlib.resources.files("cutlass_library").joinpath("source/include/cutlass/cutlass.h").read_text()
    enumerators = re.findall(r"^  k(\w+),", header[header.index("enum class Status") :], re.MULTILINE)
    names = {
        "misaligned operand": "ErrorMisalignedOperand", "invalid data type": "ErrorInvalidDataType",
        "invalid layout": "ErrorInvalidLayout", "invalid problem": "ErrorInvalidProblem", "not supported": "ErrorNotSupported",
        "workspace is null": "ErrorWorkspaceNull", "internal error": "ErrorInternal", "architecture mismatch": "ErrorArchMismatch",
        "insufficient driver": "ErrorInsufficientDriver", "out of memory": "ErrorMemoryAllocation",
    }  # fmt: skip
    assert {enumerators.index(name): text for text, name in names.items()} == {
        number: text for number, text in launch.STATUSES.items() if number < 11
    }
