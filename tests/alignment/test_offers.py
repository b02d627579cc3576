"""Offers of each backend for problems of every form.

``PYTHONPATH=tests:tests/unit python tests/alignment/test_offers.py`` writes offers.json.

A store and shipped tables keep choices by name. So a change of what is legal, of names or of claims is a decision. A digest covers
the names and refusals, and for choices of each kind all plain data of which their source and launch are made. It also covers
each plain value that a function of the backend returns. Templates are not part of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from extras import needs
from many_problems import problems
from rotation import rotated
from test_problem_facts import properties
from watching import Watched, watching

from gemmtune.backends.cpp.build import CppChoice
from gemmtune.backends.cpp.plan import make_plan
from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.table import load
from gemmtune.choice import Choice
from gemmtune.device import DeviceInfo, preset
from gemmtune.numerics.buffers import storage_bits
from gemmtune.problem.rows import row_classes
from gemmtune.settings import Settings

FILE = Path(__file__).with_name("offers.json")
GPUS = ("sm90", "sm80", "sm75", "gfx942", "sm90", "sm89", "sm100", "sm120", "sm86")
DEVICES: dict[str, tuple[tuple[str, ...], int]] = {
    "triton": (GPUS, 1), "cuda": (("sm90",), 12), "cpp": (("avx2", "avx512", "portable"), 2), "ck": (("gfx942", "gfx90a"), 3),
    "aten": (("sm90", "sm80", "gfx942"), 1), "cutlass": (GPUS, 2),
}  # fmt: skip
"""Devices in turn, and the number of passes over all forms, by backend."""
OTHER_ROWS = 240
MOST_PACKED = 2**19
"""Elements of a weight that is packed."""
PARTS = 6
"""A commit takes one of so many parts of a backend's problems."""
DESCRIBED = ("info", "claims", "packed_format", "legal_between", "one_kernel", "batch_invariant", "baseline")
MADE_OF = ("spec", "values", "preamble", "blocks", "buffers", "record", "copying", "slices")
"""Plain data of kernels, where a backend has them."""


def described(choice: Choice, device: DeviceInfo) -> Iterator[str]:
    """Yield all plain data of a choice, and the names of its variants and of the same choice for another M."""
    yield f"{choice.name} " + " ".join(repr(getattr(choice, name)) for name in DESCRIBED)
    yield " ".join(repr(getattr(choice, name)) for name in MADE_OF if hasattr(choice, name))
    if hasattr(source := getattr(choice, "source", None), "values"):
        yield repr(source.values)
    config = getattr(choice, "config", None)
    parts = (config, getattr(config, "shape", None), getattr(config, "operation", None))
    yield from (properties(x) for x in parts if dataclasses.is_dataclass(x))
    if hasattr(choice, "expected"):
        yield repr(choice.expected(device))
    if isinstance(choice, CppChoice):
        plan = make_plan(choice.problem, choice.config, choice.arch, vnni=choice.vnni)
        yield f"{source} {list(plan.words)} {plan.swapped} {plan.rows}"
    if isinstance(choice, CudaChoice):
        yield f"{choice.family.estimate_us(choice.problem, device, choice.config):.4g}"
    if choice.packed_format is not None and choice.problem.sparsity is None and choice.problem.b.span < MOST_PACKED:
        layout = choice.problem.b
        values = torch.arange(layout.span).remainder(113).to(torch.uint8).view(torch.int8).to(layout.dtype)
        packed = choice.pack(values.as_strided(layout.size, layout.stride))
        yield f"{packed.shape} {hashlib.sha256(storage_bits(packed).numpy().tobytes()).hexdigest()}"
    for part in ("inner", "adding"):
        if getattr(choice, part, None) is not None:
            yield from described(getattr(choice, part), device)
    yield " ".join(x.name for x in (*choice.launch_variants(), *choice.with_parts(2, device)))
    if choice.problem.m > 1 and (classes := row_classes(choice.problem)) and classes[0].has(OTHER_ROWS):
        yield str(choice.at(classes[0].at(OTHER_ROWS), device))


def offered(backend: str, part: int) -> dict[str, str]:
    """Return the numbers of problems and choices and the digest of all, by operation and dtype, for one of PARTS."""
    load(backend)
    rooms = (
        [] if backend == "cutlass" else [f"backends.{backend}"]
    )  # CUTLASS's manifest is kept by a process, so calls depend on others
    with watching(*rooms) as watched:
        return _offered(backend, part, watched)


def _offered(backend: str, part: int, watched: Watched) -> dict[str, str]:
    archs, passes = DEVICES[backend]
    found: dict[str, list[list[str]]] = {}
    for number, (name, problem) in enumerate(problems("cpu" if backend == "cpp" else "cuda", passes)):
        if number // len(archs) % PARTS == part:
            device = preset(archs[number % len(archs)])
            offers = load(backend).enumerate(problem, device, Settings())
            kinds: dict[type[Choice], list[int]] = {}
            for i, choice in enumerate(offers.choices):
                kinds.setdefault(type(choice), []).append(i)
            places = sorted(x for kind in kinds.values() for x in {kind[0], kind[len(kind) // 2], kind[-1]})
            few = [offers.choices[i] for i in places]
            texts = [f"{device.arch} {problem}", *watched.taken(), *(line for choice in few for line in described(choice, device))]
            texts += [f"{x.count} {x.name}: {x.reason}" for x in offers.refusals]
            found.setdefault(name, []).append([*(choice.name for choice in offers.choices), "", *texts])
    digests = {name: hashlib.sha256(repr(texts).encode()).hexdigest()[:8] for name, texts in found.items()}
    return {
        name: f"{len(all_)} problems, {sum(texts.index('') for texts in all_)} choices, {digests[name]}"
        for name, all_ in found.items()
    }


@pytest.mark.rotates(2)
@pytest.mark.parametrize("backend", [pytest.param(name, marks=needs("cutlass") if name == "cutlass" else ()) for name in DEVICES])
def test_backends_offer_what_they_offered(backend: str) -> None:
    for part in rotated(range(PARTS), PARTS, backend):
        known = json.loads(FILE.read_text())[backend][part]
        found = offered(backend, part)
        changed = {name: text for name, text in found.items() if known.get(name) != text}
        assert (changed, known.keys() - found.keys()) == ({}, set()), "run this file as a script if the change is meant"


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: [offered(name, part) for part in range(PARTS)] for name in DEVICES}, indent=1) + "\n")
