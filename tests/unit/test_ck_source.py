"""Source of Composable Kernel's kernels: its dependencies, and the parts that a CPU can run."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
from pathlib import Path

import pytest
import torch

from gemmtune.backends.ck.instances import INSTANCES
from gemmtune.backends.ck.legality import Predicate
from gemmtune.backends.ck.source import KernelSource, source_of
from gemmtune.backends.ck.toolkit import CONFIG, HEADER, find_toolkit
from gemmtune.device import preset
from gemmtune.errors import CompileError, UnavailableError
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.settings import patch
from gemmtune.toolchain import codeobject
from gemmtune.toolchain.codeobject import assembly_path, find_hip_compiler, make_code_object

STUBS = """
#include <cmath>
#include <cstdint>
#include <cstring>
#define __device__
#define __host__
namespace ck { template <class To, class From> To type_convert(From x) { return To(x); } }
template <class T> float to_float(T x) { return float(x); }
template <class To, class From> To bits_of(From x) { To y; std::memcpy(&y, &x, sizeof y); return y; }
static float round_f16(float x) { return x; }
static float round_bf16(float x) { return x; }
"""
"""Definitions that let a CPU run a part of a kernel's text."""


def mm(m: int = 256, n: int = 512, k: int = 1024, **options: object) -> Problem:
    return Problem.mm(m, n, k, device_type="cuda", **options)


def source(problem: Problem, arch: str = "gfx942", toolkit: str = "") -> KernelSource:
    predicate = Predicate(problem, preset(arch))
    config = next(c for i in INSTANCES if not isinstance(c := predicate.config(i), str))
    return source_of(predicate, config, toolkit)


def part(text: str, begin: str, end: str) -> str:
    return begin + text.split(begin)[1].split(end)[0]


def on_the_cpu(text: str, folder: Path) -> ctypes.CDLL:
    path = folder / "part.so"
    (folder / "part.cpp").write_text(STUBS + text)
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(folder / "part.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def test_the_text_depends_on_compile_time_decisions_and_not_on_sizes() -> None:
    one = source(mm())
    assert source(mm(512, 1024, 2048)).digest == one.digest
    others = [
        source(mm(dtype=torch.float16)), source(mm(layout="tn")), source(mm(), "gfx90a"), source(mm(), toolkit="/a/checkout"),
        source(mm(k=1000)), source(Problem.addmm(256, 512, 1024, device_type="cuda")),
    ]  # fmt: skip
    assert len({one.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert one.text == source(mm(512, 1024, 2048)).text


def test_legality_is_asserted_where_the_text_is_compiled() -> None:
    text = source(mm()).text
    assert "static_assert(Gemm::GetSharedMemoryNumberOfByte() * 1 == 32768" in text
    assert "static_assert(Pipeline::PrefetchStages == 2" in text
    assert 'extern "C" __global__ __launch_bounds__(256, 1) void gemmtune_ck(Work work)' in text
    assert "struct Work {" in text


def test_the_epilogue_matches_torch(tmp_path: Path) -> None:
    """Compile for the CPU the functor that CK calls for each element."""
    product = Problem.baddbmm(2, 256, 512, 1024, alpha=2.0, beta=0.5, device_type="cuda")
    bias, gate = torch.empty(512, dtype=torch.float32, device="meta"), torch.empty(2, 256, 512, dtype=torch.float32, device="meta")

    def epilogue(acc: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(acc + x) * torch.sigmoid(y) + torch.tanh(acc) - torch.erf(x)

    fused = dataclasses.replace(product, epilogue=trace(epilogue, product.accumulator, (bias, gate)))
    text = source(fused).text
    functions = part(text, "// Functions of an epilogue", "#pragma clang force_cuda_host_device end")
    entry = """
    extern "C" void finish(float const* c, float const* x0, float const* x1, float const* x2, float* out, int n) {
      Finish one{1.5f, -0.5f};
      for (int i = 0; i < n; ++i) one(out[i], c[i], x0[i], x1[i], x2[i]);
    }"""
    library = on_the_cpu(functions + part(text, "struct Finish {", "using Gemm =") + entry, tmp_path)
    values = [torch.randn(1000) for _ in range(4)]
    out = torch.empty(1000)
    library.finish(*(ctypes.c_void_p(x.data_ptr()) for x in (*values, out)), 1000)
    acc, inp, x, y = values
    expected = epilogue(1.5 * acc - 0.5 * inp, x, y)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_scales_and_the_halves_of_the_instructions_own_float_are_multiplied(tmp_path: Path) -> None:
    text = source(Problem.scaled_mm(256, 512, 1024, scales="row", out_dtype=torch.float32, device_type="cuda")).text
    entry = """
    extern "C" float finish(float c, float x0, float x1) { float out; Finish{0, 0}(out, c, x0, x1); return out; }"""
    finish = on_the_cpu(part(text, "struct Finish {", "using Gemm =") + entry, tmp_path).finish
    finish.argtypes, finish.restype = [ctypes.c_float] * 3, ctypes.c_float
    assert finish(3.0, 0.5, 0.25) == 4 * 3.0 * 0.5 * 0.25


def test_8_bit_floats_are_converted_to_the_instructions_type(tmp_path: Path) -> None:
    text = source(Problem.scaled_mm(256, 512, 1024, device_type="cuda")).text
    entry = """
    extern "C" void four(unsigned char const* x, unsigned char* y, int n) {
      for (int i = 0; i < n; i += 4) halved{}(*(uint32_t*)(y + i), *(uint32_t const*)(x + i));
    }
    extern "C" void one(unsigned char const* x, unsigned char* y, int n) {
      for (int i = 0; i < n; ++i) halved{}(y[i], x[i]);
    }"""
    library = on_the_cpu(part(text, "struct halved {", "using none =") + entry, tmp_path)
    every = torch.arange(256, dtype=torch.uint8)
    x = torch.cat([every, every.flip(0), every[torch.randperm(256)]])  # every number, next to other numbers
    for name in ("four", "one"):
        y = torch.empty_like(x)
        getattr(library, name)(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), len(x))
        told, read = x.view(torch.float8_e4m3fn).float(), y.view(torch.float8_e4m3fnuz).float()
        assert torch.equal(told.isnan(), read.isnan())
        assert torch.equal(told.nan_to_num(), 2 * read.nan_to_num())


@pytest.mark.parametrize(("change", "dtype"), [("widened", torch.float8_e5m2), ("shrunk", torch.float8_e4m3fn)])
def test_8_bit_floats_become_float16_with_a_factor(change: str, dtype: torch.dtype, tmp_path: Path) -> None:
    problem = Problem.scaled_mm(256, 512, 1024, dtype=torch.float8_e4m3fn, dtype_b=torch.float8_e5m2, device_type="cuda")
    text = source(problem).text
    entry = f"""
    extern "C" void four(unsigned char const* x, uint16_t* y, int n) {{
      for (int i = 0; i < n; i += 4) {change}{{}}(*(uint64_t*)(y + i), *(uint32_t const*)(x + i));
    }}
    extern "C" void one(unsigned char const* x, uint16_t* y, int n) {{
      for (int i = 0; i < n; ++i) {change}{{}}(y[i], x[i]);
    }}"""
    library = on_the_cpu(part(text, f"struct {change} {{", "// " if change == "widened" else "using none =") + entry, tmp_path)
    every = torch.arange(256, dtype=torch.uint8)
    x = torch.cat([every, every.flip(0), every[torch.randperm(256)]])
    factor = {"widened": 1, "shrunk": 256}[change]
    for name in ("four", "one"):
        y = torch.empty(len(x), dtype=torch.float16)
        getattr(library, name)(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), len(x))
        told = x.view(dtype).float()
        assert torch.equal(told.isnan(), y.isnan())
        assert torch.equal(told.nan_to_num(nan=1), (factor * y.float()).nan_to_num(nan=1))
        assert torch.equal(told.signbit(), y.signbit())


def test_rejects_a_folder_that_is_not_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"ck_dir: got .*, expected a checkout of Composable Kernel: .* is missing"):
        find_toolkit(str(tmp_path))


def test_a_checkout_gets_the_configuration_that_its_build_would_write(tmp_path: Path) -> None:
    header = tmp_path / "include" / HEADER
    header.parent.mkdir(parents=True)
    header.write_text("")
    toolkit = find_toolkit(str(tmp_path))
    written, include = toolkit.includes(tmp_path / "cache")
    assert include == tmp_path / "include"
    assert "#define CK_ENABLE_BF16" in (written / CONFIG).read_text()
    (include / CONFIG).write_text("")
    assert toolkit.includes(tmp_path / "cache") == (include,)


def test_a_missing_clang_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(codeobject, "_candidates", lambda: [tmp_path / "clang++"])
    with pytest.raises(UnavailableError, match="no compiler for HIP \\(there is no clang\\): install clang"):
        find_hip_compiler()
    old = tmp_path / "clang++"
    old.write_text("#!/bin/sh\necho 'Debian clang version 14.0.6'\n")
    old.chmod(0o755)
    with pytest.raises(UnavailableError, match="is clang 14, expected 19 or newer"):
        find_hip_compiler()


FAKE_CLANG = """#!/bin/sh
for last; do :; done
case "$*" in
  *--version*) echo 'clang version 19.1.7';;
  *-S*) echo 'the assembly' > "$last";;
  *-mcpu=gfx942*) [ -z "$REFUSES" ] || { echo 'undefined symbol' >&2; exit 1; }; head -c 64 /dev/zero > "$last";;
esac
"""


def test_a_code_object_is_stored_with_its_assembly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clang = tmp_path / "clang++"
    clang.write_text(FAKE_CLANG)
    clang.chmod(0o755)
    monkeypatch.setattr(codeobject, "_candidates", lambda: [clang])
    with patch(cache_dir=str(tmp_path / "cache")):

        def make(digest: str) -> Path:
            return make_code_object(("ck", f"{digest}.hsaco"), lambda: "text", "gfx942", lambda: [tmp_path], "ck:one")

        path = make("abc")
        assert path == tmp_path / "cache/ck/abc.hsaco"
        assert path.stat().st_size == 64
        assert assembly_path(path).read_text() == "the assembly\n"
        monkeypatch.setenv("REFUSES", "1")
        with pytest.raises(CompileError, match="undefined symbol"):
            make("def")
        assert not (tmp_path / "cache/ck/def.hsaco").exists()
