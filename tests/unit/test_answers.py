"""Answers of each public operation and constructor to wrong and unusual arguments: the result, or the message.

``PYTHONPATH=tests python tests/unit/test_answers.py`` writes answers.json.

Each argument of a plain call is replaced by values of many kinds, one at a time. A digest covers the answers for one argument.
Which calls are refused, and with which words, is a decision.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.statement import problem_of
from gemmtune.conformance.options import RunOptions
from gemmtune.declaration.labels import plain_scales
from gemmtune.declaration.traits import Traits
from gemmtune.numerics.bounds import Claims
from gemmtune.problem import Problem
from gemmtune.problem.operations import OPERATIONS

FILE = Path(__file__).with_name("answers.json")
Tensor = torch.Tensor
ADDRESS = re.compile("0x[0-9a-f]+")


def _float8(*size: int) -> Tensor:
    return torch.ones(size).to(torch.float8_e4m3fn)


def calls() -> dict[str, dict[str, Any]]:
    """Return the arguments of a plain call of each operation."""
    a, b, square, offs = torch.ones(6, 32), torch.ones(32, 16), torch.ones(32, 32), torch.tensor([4, 6], dtype=torch.int32)
    bsr, numbers = square.to_sparse_bsr((16, 16)), torch.ones(32, 16, dtype=torch.int8)
    int_bsr = torch.sparse_bsr_tensor(bsr.crow_indices(), bsr.col_indices(), bsr.values().to(torch.int8), (32, 32))
    groups, float8 = torch.ones(2, 32, 16), _float8(16, 32).t()
    return {
        "mm": {"a": a, "b": b},
        "addmm": {"inp": torch.ones(16), "a": a, "b": b, "beta": 2.0, "alpha": 0.5},
        "bmm": {"a": groups, "b": groups.mT},
        "baddbmm": {"inp": torch.ones(2, 32, 32), "a": groups, "b": groups.mT, "beta": 2.0, "alpha": 0.5},
        "mm_plus_mm": {"a": a, "b": b, "c": a, "d": b},
        "int_mm": {"a": numbers.t().contiguous(), "b": numbers},
        "int_mm_mul": {"a": numbers.t().contiguous(), "b": numbers, "scale": torch.ones(16, 1), "out_dtype": None},
        "mixed_mm": {"a": a, "b": numbers, "scale_b": torch.ones(1, 16), "zero_b": None, "encoding": ""},
        "scaled_mm": {
            "a": _float8(6, 32), "b": float8, "scale_a": torch.ones(1, 1), "scale_b": torch.ones(1, 1), "bias": None,
            "out_dtype": torch.bfloat16, "fast_accum": False,
        },
        "bsr_mm": {"bsr": bsr, "x": square},
        "bsr_addmm": {
            "inp": square, "bsr": bsr, "x": square, "beta": 1.0, "alpha": 1.0, "left_alpha": torch.ones(32),
            "right_alpha": torch.ones(32),
        },
        "int_bsr_addmm": {
            "inp": square.int(), "bsr": int_bsr, "x": square.to(torch.int8), "beta": 1, "alpha": 1, "left_alpha": None,
            "right_alpha": None,
        },
        "sampled_addmm_bsr": {"inp": bsr, "a": square, "b": square, "beta": 1.0, "alpha": 1.0},
        "grouped_mm": {"a": a, "b": groups, "offs": offs, "rows": None, "gated": "", "scatter": None},
        "mixed_grouped_mm": {
            "a": a, "b": torch.ones(2, 32, 16, dtype=torch.int8), "scale_b": torch.ones(2, 1, 16), "offs": offs, "encoding": "",
        },
        "scaled_grouped_mm": {
            "a": _float8(6, 32), "b": _float8(2, 16, 32).mT, "scale_a": torch.ones(6, 1), "scale_b": torch.ones(2, 1, 16),
            "offs": offs, "out_dtype": torch.bfloat16, "fast_accum": False,
        },
        "pack_int4": {"weight": numbers, "encoding": "int4"},
        "unpack_int4": {"packed_weight": numbers.view(torch.uint8), "encoding": "int4"},
        "prepack": {"b": b, "op": "mm"},
        "QuantizedWeight": {"numbers": numbers, "scales": torch.ones(1, 16), "zero_points": None, "encoding": "", "dtype": None},
        "QuantizedWeight.quantize": {"weight": b, "kind": "int8", "scales": "column", "scale_dtype": None},
        "quantize_": {"model": model, "kind": "int4", "group": 32, "skip": (), "filter_fn": None},
        "sparsify_": {"model": model, "block": 16, "density": 0.5},
        "restore": {"model": model},
        **{f"Problem.{name}": sizes(name) for name in OPERATIONS},
        **{name: defaults(made) for name, made in MADE.items()},
        "Layout": {"size": (6, 4), "stride": (4, 1), "dtype": torch.float16, "offset": 0},
    }  # fmt: skip


def stated(op: str) -> Callable[..., Problem]:
    """Return a function that states the problem of a case of the suite."""
    case = Case(
        property_name="offers",
        op=op,
        dtype="float8_e4m3fn" if op == "scaled_mm" else "bfloat16",
        m=6,
        n=32,
        k=32,
        scales=plain_scales(op),
    )

    def state(**fields: Any) -> Problem:
        return problem_of(case.changed(**fields), "cpu")

    fields = {x.name: getattr(case, x.name) for x in dataclasses.fields(Case) if x.name not in ("property_name", "op", "seed")}
    parameters = [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=y) for x, y in fields.items()]
    state.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return state


MADE: dict[str, Callable[..., Any]] = {
    "Settings": settings.Settings, "Traits": Traits, "RunOptions": RunOptions,
    "Claims": functools.partial(Claims, accumulate=torch.float32),
    **{f"case of {op}": stated(op) for op in ("mm", "baddbmm", "mixed_mm", "scaled_mm", "grouped_mm", "bsr_addmm")},
}  # fmt: skip
"""Constructors that are no attributes of the package, with defaults for all arguments."""


def defaults(made: Callable[..., Any]) -> dict[str, Any]:
    """Return the default of each argument."""
    given = {x: y.default for x, y in inspect.signature(made).parameters.items()}
    return {x: getattr(Traits(), x) if made is Traits else y for x, y in given.items()}


def model() -> torch.nn.Module:
    """Return a model that a call may change."""
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64, bias=False))


def sizes(op: str) -> dict[str, Any]:
    """Return the arguments of a problem on a GPU, with the defaults of all options."""
    parameters = inspect.signature(getattr(gemmtune.Problem, op)).parameters.values()
    given = {x.name: 64 if x.default is x.empty else x.default for x in parameters}
    return {**given, "device_type": "cuda"}


SHARED = {"out": None, "epilogue": None, "epilogue_args": ()}
"""Further arguments of most operations."""
OTHERS: Mapping[str, Any] = {
    "none": None, "int": 3, "bool": True, "nan": float("nan"), "complex": 1j, "text": "int4", "other text": "silu", "list": [1.0],
    "dtype": torch.float16, "other dtype": torch.int16, "function": torch.relu, "wrong function": len,
    "other function": lambda acc: acc[0], "number": torch.tensor(2.0), "row": torch.ones(16), "offsets": torch.tensor([2, 6]),
    "matrix": torch.ones(6, 16), "narrow": torch.ones(6, 16).half(), "wide": torch.ones(6, 16).double(),
    "strided": torch.ones(16, 6).t(), "matrices": torch.ones(2, 6, 16),
    "pair": (torch.zeros(6, dtype=torch.int64), torch.ones(3, 2)),
    "zero": 0, "minus one": -1, "large": 2**33, "half": 0.5, "two": (16, 2), "texts": ("float16", "tt"),
    **{text: text for text in ("float16", "row", "tn", "mn", "column", "group_32", "block_128x128", "skewed", "never", "m:f", "(")},
    "quantized": gemmtune.QuantizedWeight(torch.ones(32, 16, dtype=torch.int8), torch.ones(1, 16), dtype=torch.float32),
}  # fmt: skip
"""Values that any argument is given."""
CHANGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "half": Tensor.half, "double": Tensor.double, "int8": lambda x: x.to(torch.int8), "uint8": lambda x: x.to(torch.uint8),
    "complex": lambda x: x.to(torch.complex64), "bool": Tensor.bool, "meta": lambda x: x.to("meta"), "int64": Tensor.long,
    "transposed": lambda x: x.mT, "one less": lambda x: x[..., :-1], "first": lambda x: x[:1], "none": lambda x: x[:0],
    "one more": lambda x: x.unsqueeze(0), "expanded": lambda x: x[..., :1].expand(x.shape), "sparse": Tensor.to_sparse,
    "learned": lambda x: x.detach().requires_grad_(), "dense": Tensor.to_dense, "numpy": Tensor.numpy,
    "twice": lambda x: x[..., ::2],
    "blocks": lambda x: x.to_sparse_bsr((8, 8)), "float8": lambda x: x.to(torch.float8_e5m2), "as a parameter": torch.nn.Parameter,
}  # fmt: skip
"""Other tensors made of one that fits."""


def variations(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield other values for an argument by name. A call that takes one as its out writes to a copy."""
    yield from ((name, x.clone() if type(x) is Tensor else x) for name, x in OTHERS.items())
    for name, change in CHANGES.items() if isinstance(value, Tensor) else ():
        try:
            yield f"changed: {name}", change(value)
        except (RuntimeError, TypeError, IndexError, ValueError):  # torch cannot make it
            continue


def answer(name: str, given: Mapping[str, Any]) -> str:
    """Return the form of a call's result, or its error."""
    function = found_by(name)
    given = {x: y() if y is model else y for x, y in given.items()}
    positional = [x.name for x in inspect.signature(function).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    try:
        return form(
            function(*(given[x] for x in positional if x in given), **{x: y for x, y in given.items() if x not in positional})
        )
    except Exception as error:  # noqa: BLE001 - which error it is is the answer
        by_torch = type(error).__module__ == "builtins" and "gemmtune" not in str(error)
        return type(error).__name__ if by_torch else ours(f"{type(error).__name__}: {error}")


def ours(text: str) -> str:
    """Return the part of an error that is the same for every version of torch and Python."""
    return ADDRESS.sub("0x", text).partition(", and refuses: ")[0].partition(" Did you mean")[0]


def form(got: object) -> str:
    """Return what a test compares of a result."""
    if isinstance(got, torch.nn.Module):
        return f"{got} {[type(x).__name__ for x in got.parameters()]}"
    if isinstance(got, gemmtune.Problem):
        return f"{got} {got.key}"
    facts = [
        str(getattr(got, fact)) for fact in ("shape", "dtype", "requires_grad") if hasattr(got, "shape") and hasattr(got, fact)
    ]
    return " ".join([type(got).__name__, *(facts or [ADDRESS.sub("0x", str(got))])])


def unknown(name: str, given: Mapping[str, Any]) -> str:
    """Return what is said about an option that the function does not have."""
    try:
        found_by(name)(**{x: y() if y is model else y for x, y in given.items()}, other=1)
    except TypeError as error:
        return ours(str(error))
    raise AssertionError(f"{name}: expected no option named other")


def found_by(name: str) -> Any:
    """Return a function or class of the package by its name."""
    return MADE[name] if name in MADE else functools.reduce(getattr, name.split("."), gemmtune)


def answers() -> dict[str, list[str]]:
    """Return the answers of each operation, by argument."""
    found: dict[str, list[str]] = {}
    with settings.patch(tune="never", backends=("aten",)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, plain in calls().items():
            taken = inspect.signature(found_by(name)).parameters
            given = {x: y for x, y in ({**SHARED, **plain}).items() if x in taken}
            found[name] = [answer(name, given), unknown(name, given)]
            for argument, value in given.items():
                texts = found.setdefault(f"{name} {argument}", [])
                others = [(kind, x) for kind, x in variations(value) if argument != "device_type" or x is not None]  # the machine's
                texts.extend(f"{kind}: {answer(name, given | {argument: other})}" for kind, other in others)
    return found


def digests(found: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the number of errors and results for each argument, and the digest of the answers."""
    refused = {name: sum("Error" in text for text in texts) for name, texts in found.items()}
    hashes = {name: hashlib.sha256(repr(texts).encode()).hexdigest()[:8] for name, texts in found.items()}
    return {name: f"{refused[name]} of {len(texts)} refused, {hashes[name]}" for name, texts in found.items()}


@pytest.mark.turn(3, 4)
def test_wrong_and_unusual_arguments_are_answered_as_before() -> None:
    found, known = answers(), json.loads(FILE.read_text())
    changed = {name: found[name] for name, text in digests(found).items() if known.get(name) != text}
    assert (changed, known.keys() - found.keys()) == ({}, set()), "run this file as a script if the change is meant"


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests(answers()), indent=1) + "\n")
