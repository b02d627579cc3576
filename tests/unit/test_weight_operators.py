"""No operator of torch writes into a QuantizedWeight, or into a view of one, without effect."""

from __future__ import annotations

import re

import operator_walk
import pytest
import torch
from operator_arguments import Case, cases
from processes import process
from rotation import rotated

from gemmtune.quantized import functions as weight_functions

aten = torch.ops.aten

UNCALLED_VIEWS = {
    r"_?(indices|values)|[a-z]+_indices|coalesce|_sparse_broadcast_to": "of sparse tensors",
    r"_nested_.*": "of nested tensors",
    r"_conj|imag|view_as_real|view_as_complex": "of complex numbers",
    r"dsplit": "of three dimensions",
    r"_make_dual": "within a level of forward-mode differentiation",
    r"pin_memory": "of a machine with an accelerator",
}
"""Patterns of functions of views that take no matrix of floats, and the operands that they take."""

EXCEPTIONS = {
    r"_foobar|_test_.*": "torch's own tests, which return their operand and declare new memory",
    r"_unsafe_view": "torch promises that its operand is a temporary",
    r"dequantize": "the floats of a weight are new memory, and torch returns floats that are given",
    r"dropout": "in inference mode torch clones a subclass of Tensor before",
    r"(linalg_)?matrix_power": "torch fills a clone of its operand, which is a weight too: refused aloud",
    r"set_data|set_": "torch works below __torch_dispatch__, on storages; `weight.data = ` is refused in Python",
    r"_(fw_primal_copy|make_dual_copy|unpack_dual)": "in inference mode torch raises outside of forward mode",
    r"_saturate_weight_to_fp16|choose_qparams_optimized|fbgemm_.*": "torch reads the memory below __torch_dispatch__, and raises",
}
"""Operators of which a walk may find a fault, and the reason why it stays."""


@pytest.mark.rotates(9)
@pytest.mark.parametrize(
    ("kind", "subject", "mode"),
    [("int8", "weight", "no_grad"), ("int4", "weight", "inference"), ("int4", "view", "no_grad")],
)
def test_every_operator_reads_refuses_or_writes(kind, subject, mode):
    """Call a third of all operators, which changes with the commit."""
    every = len(list(cases()))
    numbers = rotated(range(every), 3, "operators")
    with process() as run:
        found = run(operator_walk.found, kind, subject, mode, numbers)
    assert every > 5000
    assert len(found) == len(numbers)
    count = {word: sum(verdict.startswith(word) for *_, verdict in found) for word in ("read", "view", "refused", "uncalled")}
    share = len(numbers) / every
    assert count["read"] > 1500 * share, count
    assert count["view"] > 60 * share, count
    assert count["refused"] > 800 * share, count
    faults = [f"{case}: {verdict}" for case, _, verdict in found if verdict.startswith("FAULT") and not known(EXCEPTIONS, case)]
    assert not faults, "\n".join(faults)
    views = [f"{case}: {verdict}" for case, viewed, verdict in found if viewed and verdict.startswith("uncalled")]
    views = [line for line in views if not known(UNCALLED_VIEWS, line)]
    assert not views, "give them arguments, or a reason in UNCALLED_VIEWS:\n" + "\n".join(views)


def known(table: dict[str, str], case: str) -> bool:
    """Return True if the table has the operator of a case, written as ``aten.name.overload[argument]``."""
    return any(re.fullmatch(pattern, case.split(".")[1]) for pattern in table)


def test_views_are_of_the_first_argument():
    """``weight_views`` relies on it."""
    assert {case.place for case in cases() if case.is_viewed} == {0}


class TestTheWalkItself:
    """Checks that the walk finds functions that fall through."""

    @pytest.fixture
    def judge(self):
        def judge(operator, place=0, kind="int8", subject="weight"):
            with torch.no_grad():
                return operator_walk.judged(Case(operator, place), kind, subject)

        return judge

    def test_verdicts(self, judge):
        assert judge(aten.sum.default) == "read"
        assert judge(aten.select.int) == judge(aten.t.default) == judge(aten.t.default, subject="view") == "view"
        assert judge(aten.zero_.default) == judge(aten.zero_.default, subject="view") == "refused"
        assert judge(aten.add.out, 3) == "refused"
        assert judge(aten.imag.default).startswith("uncalled: RuntimeError: imag is not implemented")

    def test_a_write_that_vanishes(self, judge, monkeypatch):
        monkeypatch.setattr("gemmtune.quantized.functions.check_unwritten", lambda *_: None)
        assert judge(aten.zero_.default) == "FAULT: a write vanishes"

    def test_a_writable_temporary(self, judge, monkeypatch):
        monkeypatch.setattr("gemmtune.quantized.functions.read_only", lambda result: result)
        assert judge(aten.select.int) == "FAULT: a view of the weight is a temporary that can be written"

    def test_a_read_that_is_refused(self, judge, monkeypatch):
        monkeypatch.setattr("gemmtune.quantized.views._SHARING", (aten.sum,))
        assert judge(aten.sum.default) == "FAULT: a read is refused"

    def test_a_rule_that_writes(self, judge, monkeypatch):
        def zero(_, weight):
            weight.scales.zero_()
            return weight

        monkeypatch.setitem(weight_functions._RULES, aten.zero_.default, zero)
        assert judge(aten.zero_.default) == "written by a rule"
