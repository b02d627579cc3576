"""What Python fills of a launch is what the C++ of a shared object reads."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from gemmtune.backends.cutlass.launch import GIVEN, Launch, launch_text

MAIN = """
#include <cstddef>
#include <cstdio>
#include <cstring>
using cudaStream_t = void*;
{text}
extern "C" int gemmtune_launch(Launch const*, cudaStream_t) {{ return 0; }}
int main() {{
{prints}
  std::printf("%zu %d %zu", sizeof(Launch), kLaunchBytes, sizeof(Given));
}}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_struct_is_that_of_the_source(tmp_path: Path) -> None:
    names = [name for name, _ in Launch._fields_]
    prints = "\n".join(f'  std::printf("{name} %zu %zu\\n", offsetof(Launch, {name}), sizeof(Launch::{name}));' for name in names)
    source, program = tmp_path / "offsets.cpp", tmp_path / "offsets"
    source.write_text(MAIN.format(text=launch_text(3), prints=prints))
    subprocess.run(["g++", "-std=c++17", str(source), "-o", str(program)], check=True)
    *printed, sizes = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    fields = {name: getattr(Launch, name) for name in names}
    assert printed == [f"{name} {field.offset} {field.size}" for name, field in fields.items()]
    last = fields[names[-1]]
    assert sizes == f"{ctypes.sizeof(Launch)} {last.offset + last.size} {struct.calcsize(f'{GIVEN}3P')}"
