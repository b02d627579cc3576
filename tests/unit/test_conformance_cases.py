"""Cases of the suite. ``PYTHONPATH=tests python tests/unit/test_conformance_cases.py`` writes conformance_cases.json.

Lists of skipped cases name cases by id, and results of two versions compare if their cases are the same. So a change is a decision.
Operations that are added later join when the file is written again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.cases.statement import problem_of
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.declaration.labels import BIASES, DTYPES, GATES, INDEX_DTYPES, NARROW_FLOATS, OPS, SCALES, WEIGHTS
from gemmtune.declaration.traits import Traits

FILE = Path(__file__).with_name("conformance_cases.json")
KNOWN = OPS if __name__ == "__main__" else tuple(json.loads(FILE.read_text())["operations"])
ALL = Traits(
    ops=KNOWN, dtypes=tuple(DTYPES), out=True, alpha=True, beta=True, bias=BIASES, scales=SCALES, scale_dtypes=NARROW_FLOATS,
    weights=tuple(WEIGHTS), zeros=True, float8_pairs=True, results=("bfloat16", "float32"), gates=GATES, index_dtypes=INDEX_DTYPES,
    fast_accum=True, empty=True, streams=True, capturable=True, threads=True, deterministic=True, batch_invariant=True,
)  # fmt: skip
FEW = dataclasses.replace(
    ALL, dtypes=("float16", "int8"), layouts=("row", "col"), blocks=("32x32",), multiples=(1, 2, 8), least=(2, 1, 1),
    min_alignment=4, empty=False,
)  # fmt: skip
FEW_OPS = ("int_mm", "mm", "grouped_mm", "bsr_mm")
SCOPES = {
    "undeclared, smoke": Scope(traits=Traits(ops=KNOWN), device_type="cuda"),
    "all, smoke": Scope(traits=ALL, device_type="cuda"),
    "half precision, full": Scope(traits=ALL, device_type="cuda", level=Level.FULL, dtypes=("bfloat16",)),
    "few, full": Scope(traits=FEW, level=Level.FULL, ops=FEW_OPS, dtypes=("int8",)),
    "float8 is not among the declared dtypes": Scope(traits=FEW, device_type="cuda", ops=("scaled_mm", "scaled_grouped_mm")),
    "few, exhaustive": Scope(traits=FEW, device_type="cuda", level=Level.EXHAUSTIVE, ops=("mm",), dtypes=("float16",)),
}


def described(case: Case, scope: Scope) -> str:
    """Return the id of a case, whether the GEMM may refuse it, its memory, and the layouts of its operands."""
    problem = problem_of(case, scope.device_type)
    return f"{case.id} {scope.may_refuse(case)} {case.least_bytes} {problem.a} {problem.b} {problem.out}"


def found(scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield each property with the number of its cases, the first and the last one, and the digest of all."""
    for row in PROPERTIES:
        if (reason := row.needs(scope)) is not None:
            yield row.name, reason
        elif cases := list(row.cases(scope)):
            digest = hashlib.sha256("\n".join(described(case, scope) for case in cases).encode()).hexdigest()[:12]
            yield row.name, f"{len(cases)}, {cases[0].id} to {cases[-1].id}, {digest}"


@pytest.mark.rotates(2)
@pytest.mark.parametrize("name", SCOPES)
def test_the_suite_has_the_same_cases_as_before(name: str) -> None:
    assert dict(found(SCOPES[name])) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    written = {"operations": OPS} | {name: dict(found(scope)) for name, scope in SCOPES.items()}
    FILE.write_text(json.dumps(written, indent=1) + "\n")
