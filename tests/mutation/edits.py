"""Small edits of a module's text, each of which a test should notice.

==============  ==================================================================================================================
``comparison``  ``<`` and ``<=`` exchanged, ``==`` and ``!=``, ``in`` and ``not in``, ``is`` and ``is not``
``constant``    a small integer increased or decreased by one
``boolean``     ``and`` and ``or`` exchanged
``not``         ``not`` dropped
``extreme``     min, max, torch.minimum or torch.maximum replaced by one of its arguments
``arithmetic``  ``+`` and ``-`` exchanged, ``*`` replaced by ``+``
``condition``   the condition of an if or a conditional expression negated
``return``      the returned value negated, increased by one, or emptied, by the function's annotation
``statement``   a call for its effect, an augmented assignment, a raise, a continue or a break dropped
==============  ==================================================================================================================

The rest of the text does not change. Annotations, docstrings, decorators, messages, large limits, comparisons with a clock and
``budget=``, an approximate number of cases, get no edits.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass

__all__ = ["Edit", "edits_of"]

LARGEST_CONSTANT = 16
"""Largest integer to edit. Larger ones are limits of memory or time, where a change by one does not show."""
_OPERATORS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+")}
_ORDER, _CLOCK = re.compile("[<>]=?"), re.compile(r"\btime\.(monotonic|perf_counter|time)\(\)")
"""Operators between a clock and a limit, which the clock never meets exactly."""
_EXTREMES = ("min", "max", "minimum", "maximum")
_RETURNS = {"bool": "not ({})", "int": "({}) + 1", "float": "({}) + 1", "str": '""'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Replacement of the bytes ``start`` to ``end`` of a module's text by ``new``."""

    kind: str
    line: int
    start: int
    end: int
    new: str

    def applied(self, text: str) -> str:
        """Return the text with the edit."""
        data = text.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

    def diff(self, text: str) -> str:
        """Return the changed lines before and after."""
        data = text.encode()
        first = data.rfind(b"\n", 0, self.start) + 1
        after = data.find(b"\n", self.end) % (len(data) + 1)  # the end of a text without a last newline
        changed = data[first : self.start] + self.new.encode() + data[self.end : after]
        pair = (part.decode().splitlines() for part in (data[first:after], changed))
        lines = difflib.unified_diff(*pair, n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    def key(self, text: str) -> str:
        """Return the key of the edit in the list of equivalent ones: its kind and the changed lines without indentation."""
        before, after = ([x[1:].strip() for x in self.diff(text).splitlines() if x[0] == sign] for sign in "-+")
        return f"{self.kind}: {' '.join(before)} => {' '.join(after)}"


def edits_of(text: str) -> list[Edit]:
    """Return all edits of a module, in the order of its text."""
    found = _Finder(text)
    found.visit(ast.parse(text))
    unchanged = {edit for edit in found.edits if edit.applied(text) == text}
    return sorted((e for e in dict.fromkeys(found.edits) if e not in unchanged), key=lambda e: (e.start, e.end, e.new))


class _Finder(ast.NodeVisitor):
    def __init__(self, text: str) -> None:
        self.edits: list[Edit] = []
        self._data = text.encode()
        self._lines = [0]
        for line in self._data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._returns: list[str] = []

    # Nodes without edits

    def visit_Import(self, node: ast.Import) -> None: ...
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None: ...

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "budget":
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._returns.append(ast.unparse(node.returns) if node.returns else "")
        for default in (*node.args.defaults, *(x for x in node.args.kw_defaults if x is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._returns.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    # Edits

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            old, new = _OPERATORS[type(operator)]
            if not (_ORDER.fullmatch(old) and _CLOCK.search(f"{self._text(left)} {self._text(right)}")):
                self._between("comparison", left, right, old, new)
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _ARITHMETIC and not any(_is_text(side) for side in (node.left, node.right)):
            self._between("arithmetic", node.left, node.right, *_ARITHMETIC[type(node.op)])
        if isinstance(node.op, ast.Pow) and isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant):
            return
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("boolean", left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace("not", node, self._text(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int and abs(node.value) <= LARGEST_CONSTANT:
            self._replace("constant", node, str(node.value + 1))
            if node.value > 0:
                self._replace("constant", node, str(node.value - 1))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in _EXTREMES and len(node.args) > 1 and not any(isinstance(x, ast.Starred) for x in node.args):
            for argument in node.args:
                self._replace("extreme", node, f"({self._text(argument)})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._replace("condition", node.test, f"not ({self._text(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._replace("condition", node.test, f"(not ({self._text(node.test)}))")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        annotation = self._returns[-1] if self._returns else ""
        if annotation in _RETURNS:
            self._replace("return", node.value, _RETURNS[annotation].format(self._text(node.value)))
        elif "None" in annotation and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace("return", node.value, "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._replace("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace("statement", node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace("statement", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace("statement", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace("statement", node, "pass")

    # Places in the text

    def _at(self, line: int, column: int) -> int:
        return self._lines[line - 1] + column

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._data[start:end].decode()

    def _replace(self, kind: str, node: ast.expr | ast.stmt, new: str) -> None:
        start, end = self._span(node)
        self.edits.append(Edit(kind=kind, line=node.lineno, start=start, end=end, new=new))

    def _between(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace the operator ``old``. Only parentheses and comments surround it between the two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        place = self._data[start:end].decode().find(old)
        assert place >= 0
        first = start + len(self._data[start:end].decode()[:place].encode())
        line = self._data[:first].count(b"\n") + 1
        self.edits.append(Edit(kind=kind, line=line, start=first, end=first + len(old), new=new))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
