"""What CUTLASS's kernels read of groups of rows: the text of the kernel that writes it, compiled for this machine and run."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from itertools import pairwise

import pytest
from cpp_kernels import needs_compiler

from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.backends.cutlass.launch import Launch, launch_text
from gemmtune.toolchain.render import template
from gemmtune.toolchain.structs import Strides

HOST = """
#include <cstdint>
#include <cstring>
#include <type_traits>
#define __host__
#define __device__
#define __global__
using cudaStream_t = void*;
using cudaError_t = int;
using Loaded = int;
struct CUlaunchConfig { unsigned of[7]; void* stream; void* attributes; unsigned count; };
int launch_prepared(CUlaunchConfig const&, int, void**, Loaded const&) { return 0; }
struct Place { int x; } blockIdx, threadIdx, blockDim{128};
int max(int x, int y) { return x > y ? x : y; }
namespace cute { template <class T> using remove_cvref_t = std::remove_cv_t<std::remove_reference_t<T>>; }
extern "C" int gemmtune_launch(struct Launch const*, cudaStream_t) { return 0; }
"""
RUN = """
struct Kernel {
  using ElementA = int16_t;
  using ElementB = int16_t;
  using ElementD = int32_t;
  struct Stride { long long of; };
  using InternalStrideA = Stride;
  using InternalStrideB = Stride;
  using InternalStrideD = Stride;
  struct ProblemShape { struct UnderlyingProblemShape { int m, n, k; }; };
};

extern "C" int group_bytes() { return gemmtune::group_bytes<Kernel>; }
extern "C" void describe(Launch const* launch, char* memory) {
  for (blockIdx.x = 0; blockIdx.x * blockDim.x < launch->batch; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
      gemmtune::describe_groups<Kernel>(*launch, memory);
    }
  }
}
"""
STRIDES = "template <class T> T strides_of(Strides const& given) { return {given.row * 1000 + given.col}; }\n"
M, N, K, A, B, OUT = 100, 24, 40, 1 << 20, 1 << 24, 1 << 28
"""Rows of all groups; addresses."""
ENDS = {
    "uneven": [7, 60, 61, 100],
    "empty": [0, 50, 50, 100],
    "all-in-one": [100, 100, 100, 100],
    "end-early": [3, 4, 5, 20],
    "many": [i * 100 // 300 for i in range(1, 301)],
    "falling": [60, 20, 80, 10],
    "outside": [-7, 2**31 - 1, -(2**31), 105],
}


@pytest.fixture(scope="module", params=[False, True], ids=["rows", "columns"])
def described(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, ctypes.CDLL]:
    """Whether groups are columns, and the kernel for that."""
    folder = tmp_path_factory.mktemp("groups")
    text = template("gemmtune.backends.cutlass", "groups.cuh.jinja").render(columns_grouped=request.param)
    (folder / "groups.cpp").write_text(HOST + launch_text(1) + STRIDES + text + RUN)
    compiler = find_compiler()
    assert compiler is not None
    command = [compiler.path, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "groups.cpp", "-o", "groups.so"]
    subprocess.run(command, check=True, cwd=folder)
    return request.param, ctypes.CDLL(str(folder / "groups.so"))


def planned(ends: list[int], *, columns: bool) -> tuple[Launch, ctypes.Array[ctypes.c_int]]:
    """a [M, K] and out [M, N] row-major, b [G, N, K]; where groups are columns the transpose of that. And what x points to."""
    words, offs = Launch(), (ctypes.c_int * len(ends))(*ends)
    words.out, words.x[0], words.batch, words.k = OUT, ctypes.addressof(offs), len(ends), K
    words.m, words.n = (N, M) if columns else (M, N)
    words.a, words.b = (B, A) if columns else (A, B)
    one, other = Strides(K, 1, 0), Strides(1, K, N * K)
    words.a_strides, words.b_strides = (Strides(K, 1, N * K), Strides(1, K, 0)) if columns else (one, other)
    words.out_strides = Strides(1, N, 0) if columns else Strides(N, 1, 0)
    return words, offs


@needs_compiler
@pytest.mark.parametrize("name", ENDS)
def test_each_group_has_its_rows_and_its_matrix_whatever_the_offsets_are(name: str, described: tuple[bool, ctypes.CDLL]) -> None:
    (columns, code), ends = described, ENDS[name]
    count = len(ends)
    words, kept = planned(ends, columns=columns)
    memory = ctypes.create_string_buffer(count * code.group_bytes() + 8)
    memory[-8:] = b"untouchd"
    code.describe(ctypes.byref(words), memory)
    del kept
    *longs, sizes = (memory.raw[8 * count * i : 8 * count * (i + 1 if i < 6 else 9)] for i in range(7))
    first, second, out, first_strides, second_strides, out_strides = (struct.unpack(f"{count}q", one) for one in longs)
    a, b = (second, first) if columns else (first, second)
    for group, (begin, end) in enumerate(pairwise([0, *(min(max(x, 0), M) for x in ends)])):
        rows = max(end - begin, 0)
        expected = (N, rows, K) if columns else (rows, N, K)
        assert struct.unpack_from("3i", sizes, 12 * group) == expected
        assert a[group] == A + 2 * begin * K
        assert b[group] == B + 2 * group * N * K
        assert out[group] == OUT + 4 * begin * N
        assert begin + rows <= M
    # CUTLASS has columns of its second operand first, as those of the transpose.
    assert {*first_strides} == {*second_strides} == {1000 * K + 1}
    assert {*out_strides} == {1000 + N if columns else 1000 * N + 1}
    assert memory.raw[-8:] == b"untouchd"
