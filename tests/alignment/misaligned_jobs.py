"""Jobs for a process whose Triton interprets. Triton decides that at its import."""

from __future__ import annotations

import misaligned
import torch

from gemmtune import settings
from gemmtune.dispatch.ready import ready
from gemmtune.problem import Layout

CPU = torch.device("cpu")


def wrong_layouts(op: str, dtype: torch.dtype, names: list[str], allow: str) -> list[str]:
    """Return the layouts of a and of b for which an operation by one Triton choice is wrong, or was not done by it."""
    size_a, size_b = misaligned.sizes(op, 17, 20, 33)
    plain_a, plain_b = (misaligned.layout(size, dtype, "rows", 0, 0) for size in (size_a, size_b))
    inp = misaligned.filled(misaligned.layout((17, 20), dtype, "rows", 1, 3), CPU, seed=2)
    layouts_a, layouts_b = misaligned.layouts(size_a, dtype), misaligned.layouts(size_b, dtype)
    pairs = {f"a {name}": (layouts_a[name], plain_b) for name in names} | {
        f"b {name}": (plain_a, layouts_b[name]) for name in names
    }
    wrong = []
    only = {"backends": ("triton",), "choice_allowlist_regex": allow, "max_profiling_configs": 1, "verify": False}
    with settings.patch(**only, fallback_to_aten=False):
        for name, (at_a, at_b) in pairs.items():
            a, b = misaligned.filled(at_a, CPU), misaligned.filled(at_b, CPU, seed=1)
            count = len(ready)
            right = torch.equal(misaligned.called(op, a, b, inp), misaligned.expected(op, a, b, inp))
            new = list(ready.values())[count:]
            if not right or any(
                p.choice.backend != "triton" or (p.problem.a, p.problem.b) != (Layout.of(a), Layout.of(b)) for p in new
            ):
                wrong.append(name)
    return wrong
