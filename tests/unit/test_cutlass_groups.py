"""Launch of CUTLASS's kernels for groups of rows, on the CPU.

The host code and the kernel that describes groups are the original ones. Loops that read the same descriptions replace CUTLASS's
kernel.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from cpp_kernels import needs_compiler

from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.backends.cutlass import BACKEND, launch
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.launch import Library, launch_text
from gemmtune.choice import Run
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.toolchain.launcher import Workspace
from gemmtune.toolchain.render import template

pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")

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
"""
KERNEL = """
// One that CUTLASS does not know by its type: of two dimensions, the first or the second one is contiguous.
template <bool FirstContiguous>
struct Stride {
  static constexpr bool first = FirstContiguous;
  long long of;
  long long at(long long i, long long j) const { return first ? i + j * of : i * of + j; }
};
template <class T> T strides_of(Strides const& given) { return {T::first ? given.col : given.row}; }

struct Kernel {
  using ElementA = uint16_t;
  using ElementB = uint16_t;
  using ElementD = uint16_t;
  using InternalStrideA = Stride<LAYOUT_A == 'n'>;
  using InternalStrideB = Stride<LAYOUT_B == 't'>;
  using InternalStrideD = Stride<LAYOUT_D == 'n'>;
  struct ProblemShape { struct UnderlyingProblemShape { int m, n, k; }; };
};
"""
RUN = """
static float number(uint16_t bits) {
  const uint32_t word = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

extern "C" int gemmtune_launch(Launch const* launch, cudaStream_t) {
  char* memory = static_cast<char*>(launch->workspace);
  for (blockIdx.x = 0; blockIdx.x * blockDim.x < launch->batch; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) gemmtune::describe_groups<Kernel>(*launch, memory);
  }
  const gemmtune::Groups<Kernel> groups(memory, launch->batch);
  for (int g = 0; g < launch->batch; ++g) {
    for (int i = 0; i < groups.sizes[g].m; ++i) {
      for (int j = 0; j < groups.sizes[g].n; ++j) {
        float sum = 0;
        for (int k = 0; k < groups.sizes[g].k; ++k) {
          sum += number(groups.a[g][groups.a_strides[g].at(i, k)]) * number(groups.b[g][groups.b_strides[g].at(j, k)]);
        }
        uint32_t word;
        std::memcpy(&word, &sum, 4);
        groups.d[g][groups.d_strides[g].at(i, j)] = word >> 16;
      }
    }
  }
  return launch->overlaps;
}

extern "C" unsigned long long gemmtune_capture(cudaStream_t) { return 0; }
extern "C" long long gemmtune_workspace_bytes(Launch const* launch) { return launch->batch * gemmtune::group_bytes<Kernel>; }
extern "C" int gemmtune_check(Launch const*) { return 0; }
extern "C" int gemmtune_threads() { return 384; }
extern "C" int gemmtune_shared_bytes() { return 0; }
"""
M, N, K, GROUPS = 100, 24, 40, 5
ENDS = {
    "uneven": [7, 60, 61, 70, 100],
    "empty": [0, 50, 50, 100, 100],
    "all-in-one": [0, 100, 100, 100, 100],
    "end-early": [3, 4, 5, 20, 21],
    "falling": [60, 20, 80, 10, 90],
    "outside": [-7, 2**31 - 1, -(2**31), 105, 50],
}


@pytest.fixture(scope="module", params=[(layout, swap_ab) for layout in ("nn", "nt") for swap_ab in (False, True)], ids=str)
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Run]]:
    """Yield the layout of a and b, and the launch of a choice with operands on the CPU."""
    layout, swap_ab = request.param
    problem = Problem.grouped_mm(M, N, K, groups=GROUPS, layout=layout, device_type="cuda")
    offers = BACKEND.enumerate(problem, preset("sm90"), Settings(search="exhaustive"))
    choice = next(x for x in offers.choices if isinstance(x, CutlassChoice) and x.swap_ab == swap_ab)
    operation, folder, compiler = choice.config.operation, tmp_path_factory.mktemp("groups"), find_compiler()
    groups = template(launch.__package__, "groups.cuh.jinja").render(columns_grouped=operation.columns_grouped)
    (folder / "groups.cpp").write_text(HOST + launch_text(1) + KERNEL + groups + RUN)
    assert compiler is not None
    letters = zip("ABD", (operation.layout_a, operation.layout_b, operation.layout_d), strict=True)
    defined = [f"-DLAYOUT_{name}='{letter}'" for name, letter in letters]
    command = [compiler.path, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *defined, "groups.cpp", "-o", "groups.so"]
    subprocess.run(command, check=True, cwd=folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Workspace, "_new", lambda self: torch.full((self.size_bytes,), 0xFF, dtype=torch.uint8))
        patched.setattr(launch, "find_driver", lambda: None)
        patched.setattr(launch, "memory_of", lambda workspace, driver: None)
        patched.setattr(torch.cuda, "current_device", lambda: 0)
        patched.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
        patched.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        yield layout, choice.bind(Library(folder / "groups.so")).run


def operands(layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return small integers, whose sums are exact in bfloat16, and a result between guards."""
    made = torch.Generator().manual_seed(1)
    a = torch.randint(-1, 2, (M, K), generator=made).bfloat16()
    b = torch.randint(-1, 2, (GROUPS, N, K), generator=made).bfloat16().mT
    return a, b.contiguous() if layout == "nn" else b, torch.full((3 * M, N), 999.0).bfloat16()


@pytest.mark.rotates(3)
@needs_compiler
@pytest.mark.parametrize("name", ENDS)
def test_groups_are_described_and_nothing_else_is_written(name: str, launched: tuple[str, Run]) -> None:
    layout, run = launched
    a, b, memory = operands(layout)
    want, out = memory.clone(), memory[M : 2 * M]
    ends = [min(max(end, 0), M) for end in ENDS[name]]
    for group, (begin, end) in enumerate(pairwise([0, *ends])):
        want[M + begin : M + max(begin, end)] = (a[begin : max(begin, end)].float() @ b[group].float()).bfloat16()
    run(out, (a, b, torch.tensor(ENDS[name], dtype=torch.int32)), ())
    assert torch.equal(memory, want)
