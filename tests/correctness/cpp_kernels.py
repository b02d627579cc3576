"""Kernels of the cpp backend for tests: every instruction set of this machine, with small blocks so that there are many."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from rotation import rotated

from gemmtune.backends.cpp import BACKEND
from gemmtune.backends.cpp.build import CppChoice
from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.backends.cpp.configs import Config, refusal
from gemmtune.device import DeviceInfo, detect, preset
from gemmtune.problem import Layout, Problem

CPU = torch.device("cpu")
ORDER = ("portable", "avx2", "avx512")
PLAIN_HERE = ORDER[: ORDER.index(detect("cpu").arch) + 1]
VNNI_FLAGS = {"avx2": "avx_vnni", "avx512": "avx512_vnni"}
PAIRS_FLAG = "avx512_bf16"
HERE = (*PLAIN_HERE, *(["avx512bf16"] if PAIRS_FLAG in detect("cpu").isa else []))
"""Instruction sets with and without an instruction for bfloat16 pairs; without it, pairs are widened."""
INT8_HERE = (*PLAIN_HERE, *(f"{arch}vnni" for arch in PLAIN_HERE if VNNI_FLAGS.get(arch) in detect("cpu").isa))
"""Instruction sets for int8 products. Those with a byte instruction also occur without it."""

SIZES = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129)
DENSE = ("row", "column", "row-padded", "column-padded", "every-second")
EXPANDED = ("same-row", "same-column", "one-element")

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
as_shipped = pytest.mark.usefixtures("shipped_compiler")
"""Fully optimised kernels, for offered configurations and for rounding; see tests/quick_compiler.py."""


def widest_and(instruction_sets: Sequence[str], count: int, name: str) -> list[str]:
    """Return the widest instruction set, which users of this machine run, and ``count`` of the others.

    The others vary with the name and the commit.
    """
    others = instruction_sets[:-1]
    return [*rotated(others, max(1, len(others) // count), name)[:count], instruction_sets[-1]] if others else [*instruction_sets]


def on_each_isa(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrise a test with the widest instruction set and one of the others."""
    return pytest.mark.parametrize("arch", widest_and(HERE, 1, test.__name__))(test)


def on_each_int8_isa(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrise a test with the widest instruction set, with a byte instruction, and one of the others."""
    return pytest.mark.parametrize("arch", widest_and(INT8_HERE, 1, test.__name__))(test)


def device_for(arch: str) -> DeviceInfo:
    """Return the preset of an instruction set. It has an instruction for bytes or bfloat16 pairs only if the name says so.

    The names contain ``vnni`` or ``bf16``.
    """
    name = arch.removesuffix("vnni").removesuffix("bf16")
    isa = tuple(flag for flag in preset(name).isa if flag not in (*VNNI_FLAGS.values(), PAIRS_FLAG))
    more = (VNNI_FLAGS[name],) if arch.endswith("vnni") else (PAIRS_FLAG,) if arch.endswith("bf16") else ()
    return dataclasses.replace(preset(name), isa=(*isa, *more))


def mr_for(arch: str, dtype: torch.dtype) -> int:
    """Return the rows of the micro-tile.

    The widest set has enough rows to stress register allocation; the others have few, to compile fast.
    """
    return 14 if arch.startswith("avx512") and dtype in (torch.float32, torch.int8) else 3


def config_for(problem: Problem, arch: str, **changes: object) -> Config:
    """Return a config with small blocks, so that small problems have many of them."""
    values = {
        "mr": mr_for(arch, problem.dtype),
        "nv": 2,
        "mode": "steps",
        "kc": 40,
        "task_m": 2,
        "task_n": 2,
        "direct": False,
    } | changes
    return Config(**values)


def choice_for(problem: Problem, arch: str, **changes: object) -> CppChoice:
    """Return the choice of ``config_for``, which must be legal."""
    config = config_for(problem, arch, **changes)
    assert refusal(config, problem, device_for(arch)) is None
    (found,) = BACKEND.choices_of((config,), problem, device_for(arch)).choices
    return found


def legal(problem: Problem, arch: str, **changes: object) -> bool:
    """Return True if there is such a choice."""
    return refusal(config_for(problem, arch, **changes), problem, device_for(arch)) is None


def call(problem: Problem, arch: str, *operands: torch.Tensor, inp=None, alpha=1.0, beta=0.0, extra=(), **changes) -> torch.Tensor:
    """Return the result for a and b; a prepacked b is packed here."""
    out = torch.empty_strided(problem.out.size, problem.out.stride, dtype=problem.out.dtype)
    out.fill_(float("nan") if out.is_floating_point() else 0x5A5A5A5B)
    choice = choice_for(problem, arch, **changes)
    a, b = operands
    added = () if inp is None else (inp,)
    choice.build().run(out, (a, choice.pack(b), *added, *extra), (alpha, beta) if added else ())
    return out


def drawing(name: str) -> random.Random:
    """Return the random draws of the named case, one of three variants per commit."""
    return random.Random(f"{name} {rotated(range(3), 3, name)[0]}")


def strides_of(rng: random.Random, rows: int, columns: int, kind: str) -> tuple[int, int]:
    pad = rng.choice((1, 4, 8, 17))
    return {
        "row": (columns, 1), "column": (1, rows), "row-padded": (columns + pad, 1), "column-padded": (1, rows + pad),
        "every-second": (2 * columns + 2, 2), "same-row": (0, 1), "same-column": (1, 0), "one-element": (0, 0),
    }[kind]  # fmt: skip


def random_layout(rng: random.Random, size: tuple[int, ...], dtype: torch.dtype, kinds: tuple[str, ...], *, shared: bool) -> Layout:
    rows, columns = size[-2:]
    stride = strides_of(rng, rows, columns, rng.choice(kinds))
    span = 1 + max(rows - 1, 0) * stride[0] + max(columns - 1, 0) * stride[1]
    lead = (rng.choice((0, span, span + 3)) if shared else span + 3,) if len(size) == 3 else ()
    return Layout(size=size, stride=lead + stride, dtype=dtype, offset=rng.randrange(16 // dtype.itemsize))


def random_config(rng: random.Random, arch: str, dtype: torch.dtype) -> Config:
    """Draw any mode and any blocks."""
    return Config(
        mr=mr_for(arch, dtype), nv=2, mode=rng.choice(("steps", "columns", "dots")), kc=rng.choice((1, 5, 16, 40, 1000)),
        task_m=rng.choice((1, 2, 8)), task_n=rng.choice((1, 2, 8)), direct=rng.random() < 0.5,
    )  # fmt: skip
