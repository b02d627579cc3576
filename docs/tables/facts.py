"""Tables of settings, declarations, properties, statuses, and fields of a file of shapes."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import gemmtune
from gemmtune.choice import Status
from gemmtune.cli.shapes import FIELDS
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.declaration.traits import Traits
from gemmtune.effort import EFFORT, Effort
from gemmtune.settings import Settings

from . import ANY_OPERATION, table

PACKAGE = Path(gemmtune.__file__).parent
GROUPS = {
    "tried": (
        "backends", "extra_choices", "search", "choice_allowlist_regex", "choice_denylist_regex", "template_min_gemm_size",
        "max_profiling_configs", "float32_by_parts", "deterministic", "absent_blocks", "mixed_mm_choice", "cublaslt_top_k",
    ),
    "cutlass": ("cutlass_dir", "cutlass_op_allowlist_regex", "cutlass_op_denylist_regex"),
    "ck": ("ck_dir",),
    "tuned": (
        "disable", "tune", "first_call_budget_s", "fallback_to_aten", "busy", "timing", "verify", "rows", "batch_invariant",
        "multi_kernel", "vllm", "sglang", "tune_in_subprocess",
        "compile_threads", "compile_timeout_s", "choice_timeout_s",
    ),
}  # fmt: skip
"""Settings by the heading under which they stand; all others are about files."""
STATUSES = {
    "ok": "verified and measured",
    "refused": "not legal for this problem and device, or left out by a setting; it was not compiled",
    "compile_error": "the compiler refused the kernel",
    "compile_timeout": "the compilation took longer than `compile_timeout_s`; a larger limit tries it again",
    "out_of_resources": "shared memory, registers or device memory were not enough",
    "wrong_result": "a probe or the error bound was violated, or memory outside of the result was written",
    "too_fast": "its time is shorter than the measured limits of the hardware allow",
    "dishonest": "in a process of its own, your GEMM computes something else, takes longer or does more ([judge](judge.md))",
    "runtime_error": "the launch raised an error",
    "timed_out": "verification or measurement took longer than `choice_timeout_s`; a larger limit tries it again",
    "crashed": "the worker process died, or its device became unusable",
}


def documented(module: str, name: str) -> dict[str, str]:
    """Return the docstrings of the fields of a class, as one line each."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = re.sub(r"\s+", " ", str(text.value.value)).replace("``", "`")
    return found


def settings_table(group: str) -> str:
    """Return the settings of a group, with defaults and docstrings."""
    named = [name for names in GROUPS.values() for name in names]
    names = GROUPS.get(group) or [f.name for f in dataclasses.fields(Settings) if f.name not in named]
    defaults, meanings = Settings(), documented("settings.py", "Settings")
    rows = [[f"`{name}`", f"`{getattr(defaults, name)!r}`", meanings[name]] for name in names]
    return table(["setting", "default", "meaning"], rows)


def declarations() -> str:
    """Return the traits that a GEMM may declare."""
    meanings = documented("declaration/traits.py", "Traits") | {"devices": "Devices on which it runs."}
    defaults = Traits()
    rows = [[f"`{f.name}`", f"`{getattr(defaults, f.name)!r}`", meanings[f.name]] for f in dataclasses.fields(Traits)]
    return table(["declaration", "default", "meaning"], rows)


def properties() -> str:
    """Return what the suite asserts."""
    return table(["property", "asserted"], [[f"`{x.name}`", x.meaning] for x in PROPERTIES])


def statuses() -> str:
    """Return the statuses of a choice."""
    return table(["status", "meaning"], [[f"`{status.value}`", STATUSES[status.value]] for status in Status])


def fields() -> str:
    """Return the fields of an entry in a file of shapes."""
    return table(
        ["field", "value"], [[f"`{name}`", ANY_OPERATION if name == "op" else kind.expected] for name, kind in FIELDS.items()]
    )


def efforts() -> str:
    """Return the limits of each search: the configs of each template, then everything else."""
    limits = [f.name for f in dataclasses.fields(Effort) if f.name != "configs"]
    meanings = documented("effort.py", "Effort")
    rows = {f"configs of `{name}`": [x.configs[name] for x in EFFORT.values()] for name in EFFORT["default"].configs}
    rows |= {_first_sentence(meanings[name]): [getattr(x, name) for x in EFFORT.values()] for name in limits}
    return table(["limit", *EFFORT], [[name, *("all" if x is None else str(x) for x in row)] for name, row in rows.items()])


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\w)[.,:](?: |$)", text)[0]


MAKERS: dict[str, Callable[[], str]] = {
    "efforts": efforts,
    **{f"settings-{group}": functools.partial(settings_table, group) for group in (*GROUPS, "files")},
    "declarations": declarations,
    "properties": properties,
    "statuses": statuses,
    "shape-fields": fields,
}
