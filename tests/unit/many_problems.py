"""Problems of each operation and dtype in every form, for tests that compare all of them with an earlier version."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from test_conformance_cases import ALL

from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.forms import forms_of
from gemmtune.conformance.cases.scope import Scope
from gemmtune.conformance.cases.statement import problem_of
from gemmtune.declaration.labels import BIASES, OPS, plain_scales
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace

SIZES = (
    (16, 4096, 4096), (1, 1024, 4096), (4096, 4096, 4096), (60, 6144, 2048), (256, 512, 256), (130, 256, 65536), (301, 512, 1024),
    (70, 1001, 1003), (8, 64, 128), (1000, 1024, 512), (2, 7, 40), (33, 136, 264),
)  # fmt: skip
STRIDES = (("row", "col"), ("row", "row"), ("row", "col"), ("col", "row"), ("row+8", "col+17"), ("row", "col@3"), ("col", "col"))
OUT = ("", "", "row+8", "", "col")
EACH = ("2", "", "3")
"""Rows that are weighted and added up to one."""
FUSED: tuple[Callable[..., Any], ...] = (
    lambda acc, x: torch.nn.functional.gelu(acc + x),
    lambda acc, x: (acc * x).sigmoid() + 0.1,
    lambda acc, x: torch.where(acc > 0.3, x, acc.exp() - 1),
    lambda acc, x: acc.clamp(-0.7, 1.3) / (x.abs() + 0.5) - x.sqrt(),
    lambda acc, x: torch.tanh(acc) * x.to(torch.bfloat16),
)
"""Epilogues of every seventh problem without an added operand, with a row as the other operand."""
FORMS_MOST = 10
"""Forms of an operation with one dtype. Others have their turn with other dtypes."""


def problems(device_type: str, passes: int) -> Iterator[tuple[str, Problem]]:
    """Yield problems of each operation and dtype, named by both, in many forms, sizes and strides, and prepacked ones."""
    scope, number = Scope(traits=ALL, device_type=device_type), 0
    for op in OPS:
        forms = forms_of(op, ALL)
        count = -(-len(forms) // FORMS_MOST)
        for turn, dtype in enumerate(scope.tested_dtypes(op)):
            for form in [x for i in range(passes) for x in forms[(turn + i) % count :: count] * (3 if len(forms) < 3 else 1)]:
                number += 1
                m, n, k = SIZES[(number + number // len(SIZES)) % len(SIZES)]
                a, b = STRIDES[(number + number // len(STRIDES)) % len(STRIDES)] if number % 3 else STRIDES[0]
                plain = Case(property_name="offers", op=op, dtype=dtype, m=0, n=0, k=0, scales=plain_scales(op))
                fields: dict[str, Any] = {"m": m, "n": n, "k": k, "a": a, "b": b, **form.fields(dtype, m)}
                fields["batch"] = 1 + plain.row.batched * (number % 4)
                if plain.row.sparse:
                    sides = ("16x16", "32x32", "64x64", "128x128")[number % 4]
                    fields |= {"b": "row", "blocks": f"{sides}@0.3", "n": max(n // 128, 1) * 128, "k": max(k // 128, 1) * 128}
                if plain.row.grouped:
                    fields["groups"] = str(1 + number % 9)
                if plain.row.operand("weights") is not None:
                    fields["each"] = EACH[number % len(EACH)]
                if not plain.row.grouped:
                    fields["out"] = OUT[number % len(OUT)]
                if plain.added:
                    bias = BIASES[number % len(BIASES)]
                    fields |= {"bias": bias, "alpha": "general", "beta": ("one", "general")[number % 2]}
                case = plain.changed(**fields)
                problem = problem_of(case.changed(k=case.k + -case.k % case.step_of_k), device_type)
                yield f"{op} {dtype}", problem
                if number % 7 == 0 and problem.epilogue is None and problem.inp is None and not problem.groups:
                    yield f"{op} {dtype}", fused(problem, FUSED[number // 7 % len(FUSED)])
                if number % 2 and not problem.groups and (problem.sparsity or problem.widens_b):
                    yield f"{op} {dtype}", dataclasses.replace(problem, prepacked=True)


def fused(problem: Problem, function: Callable[..., Any]) -> Problem:
    """Return the problem with an epilogue that reads a row. Sums of integers become float32."""
    out = problem.out if problem.out.dtype.is_floating_point else dataclasses.replace(problem.out, dtype=torch.float32)
    row = Layout.contiguous((1, problem.n), out.dtype)
    graph = trace(function, problem.accumulator, [torch.empty_strided(row.size, row.stride, dtype=row.dtype, device="meta")])
    return dataclasses.replace(problem, out=out, epilogue=dataclasses.replace(graph, operands=(row,)))
