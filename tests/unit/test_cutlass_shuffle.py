"""Prepacked weights of CUTLASS kernels: torch's permutation equals the layout compiled into the kernel."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from typing import Any

import pytest
import torch

from gemmtune import pack_int4
from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.shuffle import ROWS, atom_depth, shuffled
from gemmtune.backends.cutlass.toolkit import find_toolkit
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.toolchain.nvcc import find_compiler, toolkit_folders
from gemmtune.toolchain.render import template

PROGRAM = """
#include <cstdio>
#include "cute/layout.hpp"
{order}
template <int Bits>
void print(int rows, int depth) {{
  const auto layout = gemmtune::shuffled<Bits>(rows, depth);
  std::printf("%d %d %d", Bits, int(cute::size<0>(layout)), int(cute::size<1>(layout)));
  for (int i = 0; i < cute::size<0>(layout); ++i) {{
    for (int j = 0; j < cute::size<1>(layout); ++j) {{
      std::printf(" %d", int(layout(cute::make_coord(i, j, 0))));
    }}
  }}
  std::printf("\\n");
}}
int main() {{
  print<4>({n}, {k});
  print<8>({n}, {k});
}}
"""
"""Program that prints the memory index of each element of the first operand."""
N, K = 100, 176


def missing() -> str | None:
    try:
        find_toolkit(None)
        find_compiler()
    except UnavailableError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[int, torch.Tensor]:
    """Return, by element width, the memory index of each element [rows, depth] in CuTe's layout of an N × K operand."""
    if (reason := missing()) is not None:
        pytest.skip(f"compiles with CUTLASS: {reason}")
    folder = tmp_path_factory.mktemp("order")
    order = template("gemmtune.backends.cutlass", "order.cuh.jinja").render()
    (folder / "order.cu").write_text(PROGRAM.format(order=order, n=N, k=K))
    includes = [f"-I{include}" for include in find_toolkit(None).include]
    program = folder / "order"
    toolkits = [f"-I{toolkit}/include{part}" for toolkit in toolkit_folders() for part in ("", "/cccl")]
    quick = [shutil.which("c++") or "c++", "-x", "c++", *toolkits]
    slow = [find_compiler().path, "--expt-relaxed-constexpr"]
    for compiler in (quick, slow):  # the first compiles only host code, and needs the path of the toolkit's headers
        command = [*compiler, "-std=c++17", "-w", *includes, "-o", str(program), str(folder / "order.cu")]
        done = subprocess.run(command, check=False, timeout=300, capture_output=True, text=True)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    found = {}
    for line in subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout.splitlines():
        bits, rows, depth, *numbers = map(int, line.split())
        found[bits] = torch.tensor(numbers).reshape(rows, depth)
    return found


def weights(bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (K, N), generator=generator, dtype=torch.int8)


def numbers_of(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the elements in memory order."""
    if bits == 8:
        return packed.view(torch.int8)
    halves = torch.stack([packed & 15, packed >> 4], dim=1).flatten()
    return (halves.to(torch.int8) ^ 8) - 8


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_elements_match_kernel_layout(places: dict[int, torch.Tensor], bits: int, *, columns: bool) -> None:
    weight, place = weights(bits), places[bits]
    b = weight if bits == 8 else pack_int4(weight)
    packed = shuffled(b.t().contiguous().t() if columns else b, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() * 8 == place.numel() * bits
    expected = torch.zeros(place.shape, dtype=torch.int8)
    expected[:N, :K] = weight.t()
    assert torch.equal(numbers_of(packed, bits)[place], expected)


@pytest.mark.parametrize(("bits", "depth"), [(4, 64), (8, 32)])
def test_atom_has_sixteen_bytes_per_thread(bits: int, depth: int) -> None:
    assert atom_depth(bits) == depth
    assert ROWS * depth * bits // 8 == 128 * 16
    assert shuffled(torch.zeros(depth * bits // 8, 1, dtype=torch.uint8), bits).shape == (128 * 16,)


def choices(**fields: Any) -> list[CutlassChoice]:
    problem = Problem.mixed_mm(16, 512, 1024, device_type="cuda", **fields)
    found = BACKEND.enumerate(dataclasses.replace(problem, prepacked=True), preset("sm90"), Settings(search="exhaustive")).choices
    return [choice for choice in found if isinstance(choice, CutlassChoice)]


@pytest.mark.parametrize(("fields", "name"), [({"encoding": "uint4"}, "cutlass_shuffled4"), ({}, "cutlass_shuffled8")])
def test_unpacked_weights_compete_with_packed(fields: dict[str, Any], name: str) -> None:
    pytest.importorskip("cutlass_library")
    formats = {choice.packed_format: choice for choice in choices(**fields)}
    assert set(formats) == {None, name}
    b = torch.arange(256, dtype=torch.uint8).repeat(64, 1).t()
    assert formats[None].pack(b) is b
    packed = formats[name].pack(b)
    assert packed.shape == (b.numel(),)
    assert torch.equal(packed.sort().values, b.flatten().sort().values) == (name == "cutlass_shuffled8")
