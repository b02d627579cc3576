"""An operation that is added by the recipe of docs/architecture.md is one like the others.

The steps are done to a copy of the package, and another process uses the copy: ``outer_mm``, a product with an outer product added.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gemmtune

ROW = """\
    Operation(
        name="outer_mm",
        formula="a @ b + c @ d, a column times a row",
        operands=(
            *_product(_FLOATS),
            Operand(role="c", shape=("M", "1"), like_a=True),
            Operand(role="d", shape=("1", "N"), like_a=True),
        ),
        result=_DENSE,
        compose=two_products,
        gradient=of_two_products,
    ),
"""
CONSTRUCTOR = '''\
    @classmethod
    def outer_mm(cls, m, n, k, *, dtype=torch.bfloat16, layout="nt", device_type=None, precision=None):
        """out[M, N] = a[M, K] @ b[K, N] + c[M, 1] @ d[1, N]"""
        a, b, out = operand_layouts((), m, n, k, layout, dtype)
        c, d, _ = operand_layouts((), m, n, 1, layout, dtype)
        return cls._of(device_type, precision, op="outer_mm", a=a, b=b, c=c, d=d, out=out)

'''
FUNCTION = '''

def outer_mm(a, b, c, d, *, out=None, epilogue=None, epilogue_args=NOTHING):
    """out = epilogue(a @ b + c @ d, *epilogue_args) for a column c [M, 1] and a row d [1, N]"""
    return operate("outer_mm", (a, b, c, d), out, epilogue, epilogue_args)
'''
NAMED = '"mm_plus_mm",', '"mm_plus_mm", "outer_mm",'
STEPS = {
    "problem/operations.py": [('    Operation(\n        name="int_mm",', ROW + '    Operation(\n        name="int_mm",')],
    "problem/constructors.py": [("    @classmethod\n    def int_mm(", CONSTRUCTOR + "    @classmethod\n    def int_mm(")],
    "ops/products.py": [(None, FUNCTION)],
    "public.py": [NAMED, ("from .problem import", "from .ops.products import outer_mm\nfrom .problem import")],
    "__init__.py": [NAMED],
    "cli/words.py": [NAMED],
}
"""File to what is put in the place of what in it; None is its end."""

USE = """
import json, torch, gemmtune
from gemmtune import cli, settings
from gemmtune.problem import Problem

a, b, c, d = torch.randn(33, 48), torch.randn(48, 40), torch.randn(33, 1), torch.randn(1, 40)
exact = (a.double() @ b.double() + c.double() @ d.double()).float()

def near(x, y): return bool(torch.allclose(x, y, rtol=1e-4, atol=1e-4))

def message(*operands):
    try: gemmtune.outer_mm(*operands)
    except gemmtune.InvalidProblemError as error: return str(error)

told = {}
[tuned] = gemmtune.tune(Problem.outer_mm(33, 40, 48, dtype=torch.float32, layout="nn", device_type="cpu"), progress=False)
told["tuned"] = {o.name: str(o.status) for o in tuned.outcomes}
told["explained"] = gemmtune.explain("outer_mm", a, b, c, d).pick
out = torch.empty(33, 40)
gemmtune.outer_mm(a, b, c, d, out=out)
told["right"] = [near(x, exact) for x in (gemmtune.outer_mm(a, b, c, d), gemmtune.outer_mm(a, b, c, d), out)]
told["epilogue"] = near(gemmtune.outer_mm(a, b, c, d, epilogue=torch.relu), exact.relu())
told["operator"] = near(torch.ops.gemmtune.outer_mm(a, b, c, d), exact)
wanted = [x.clone().requires_grad_() for x in (a, b, c, d)]
ours = torch.autograd.grad(gemmtune.outer_mm(*wanted).sum(), wanted)
theirs = torch.autograd.grad((wanted[0] @ wanted[1] + wanted[2] @ wanted[3]).sum(), wanted)
told["gradients"] = [near(x, y) for x, y in zip(ours, theirs)]
told["messages"] = [message(a, b, a, b), message(a, b, c, d[0])]
told["command"] = cli.run(["tune", "8x8x8", "--op", "outer_mm", "--dtype", "float32", "--device", "cpu", "--quiet"])
told["conformance"] = cli.run(
    "conformance gemmtune --op outer_mm --device cpu --dtype float32 --property bound --in-process --json report.json".split()
)
told["report"] = [json.load(open("report.json"))[key] for key in ("verdict", "refused", "executed")]
print("told:" + json.dumps(told))
"""


def use_of_a_copy(folder: Path) -> dict[str, Any]:
    """The recipe's steps on a copy of the package, and what the program found out there."""
    package = folder / "gemmtune"
    shutil.copytree(Path(gemmtune.__file__).parent, package)  # with what Python has compiled already
    for name, changes in STEPS.items():
        text = (package / name).read_text()
        for old, new in changes:
            assert old is None or text.count(old) == 1, f"{name}: {old!r} is there {text.count(old)} times"
            text = text + new if old is None else text.replace(old, new)
        (package / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(folder), "GEMMTUNE_BACKENDS": "aten", "GEMMTUNE_TUNE_IN_SUBPROCESS": "0"}
    environment |= {"GEMMTUNE_STORE_PATH": str(folder / "store.db"), "GEMMTUNE_SEARCH": "quick"}
    command = [sys.executable, "-c", USE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.rpartition("told:")[2])
    return found


def test_it_is_tuned_called_differentiated_and_tested_like_the_others(tmp_path: Path) -> None:
    told = use_of_a_copy(tmp_path)
    assert told["tuned"] == {"aten:outer_mm": "ok"}
    assert told["explained"] == "aten:outer_mm"
    assert (told["right"], told["epilogue"], told["operator"], told["gradients"]) == ([True] * 3, True, True, [True] * 4)
    assert told["messages"] == [
        "outer_mm: shapes do not fit, got a [33, 48], b [48, 40], c [33, 48] and d [48, 40]; "
        "expected a [M, K], b [K, N], c [M, 1] and d [1, N]",
        "outer_mm: d must be a 2-D tensor, got shape [40]",
    ]
    assert (told["command"], told["conformance"]) == (0, 0)
    *verdict, executed = told["report"]
    assert verdict == ["CONFORMS", 0]
    assert executed > 20
