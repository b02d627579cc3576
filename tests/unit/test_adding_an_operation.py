"""Adding an operation by the recipe of CONTRIBUTING.md gives it everything that the others have.

The steps change a copy of the package, and another process uses the copy. The operation is ``outer_bmm``, a batch of
products with outer products added, which has a second GEMM, a composition and a gradient of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gemmtune

COMPOSITION = '''

def with_outer_product(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return a @ b + c @ d for batches of columns c and rows d."""
    return torch.baddbmm(c * d, a, b)
'''
GRADIENT = '''
of_outer_product: Gradient = {
    **of_product,
    "c": Rule(("d",), lambda g, x, numbers, product: (g * x["d"]).sum(-1, keepdim=True)),  # noqa: ARG005
    "d": Rule(("c",), lambda g, x, numbers, product: (g * x["c"]).sum(-2, keepdim=True)),  # noqa: ARG005
}
"""The gradients of a @ b + c @ d for columns c and rows d."""
'''
ROW = """\
    _row(
        "outer_bmm", "a @ b + c @ d for a batch, a column times a row",
        (*_product(_FLOATS), Operand(role="c", shape=("M", "1"), like_a=True), Operand(role="d", shape=("1", "N"), like_a=True)),
        with_outer_product, of_outer_product, batched=True,
    ),
"""
CONSTRUCTOR = '''
    @classmethod
    @_constructor()
    def outer_bmm(cls, batch: int, m: int, n: int, k: int, **options: Unpack[Floats]) -> Self:
        """Return out[B, M, N] = a[B, M, K] @ b[B, K, N] + c[B, M, 1] @ d[B, 1, N]."""
        return _of(cls, "outer_bmm", (batch, m, n, k), **options)
'''
FUNCTION = '''

def outer_bmm(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(a @ b + c @ d, *epilogue_args) for columns c [B, M, 1] and rows d [B, 1, N]"""
    return operate("outer_bmm", (a, b, c, d), out, epilogue, epilogue_args)
'''
IMPORTS = (
    "from .compositions import with_outer_product\nfrom .gradients import of_outer_product\nfrom .operation import Op, Operand, "
)
STEPS = {
    "problem/compositions.py": [(None, COMPOSITION)],
    "problem/gradients.py": [(None, GRADIENT)],
    "problem/operations.py": [
        ("_ROWS = (\n", f"_ROWS = (\n{ROW}"),
        ("from .operation import Op, Operand, ", IMPORTS),
    ],
    "problem/constructors.py": [(None, CONSTRUCTOR)],
    "ops/products.py": [(None, FUNCTION)],
    "__init__.pyi": [(None, "from .ops.products import outer_bmm as outer_bmm\n")],
}
"""Files to their changes: a text, and its replacement. None stands for the end of the file."""
MOST_FILES = 12
"""Files that an operation may touch. They include tests, documents, and numerics that this operation does not need."""
ROOT = Path(__file__).parents[2]

USE = """
import json, torch, gemmtune
from gemmtune import cli, settings
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.selector.offers import legal_offers

a, b, c, d = torch.randn(3, 33, 48), torch.randn(3, 48, 40), torch.randn(3, 33, 1), torch.randn(3, 1, 40)

def exact(a, b, c, d): return (a.double() @ b.double() + c.double() @ d.double()).float()

def near(x, y): return bool(torch.allclose(x, y, rtol=1e-4, atol=1e-4))

def message(*operands):
    try: gemmtune.outer_bmm(*operands)
    except gemmtune.InvalidProblemError as error: return str(error)

def gradients(function, operands):
    wanted = [x.clone().requires_grad_() for x in operands]
    return torch.autograd.grad(function(*wanted).square().sum(), wanted)

told = {}
problem = Problem.outer_bmm(3, 33, 40, 48, dtype=torch.float32, layout="nn", device_type="cpu")
[tuned] = gemmtune.tune(problem, progress=False)
on_gpu = Problem.outer_bmm(3, 256, 256, 256, device_type="cuda")
chosen = settings.Settings()
told["on a GPU"] = sorted({x.backend for x in legal_offers(on_gpu, preset("sm90"), chosen, on_this_machine=False).choices})
told["tuned"] = {o.name: str(o.status) for o in tuned.outcomes}
[ranges] = gemmtune.tune(problem, m=(1, 40), progress=False)
told["over M"] = sorted({x.name for x in ranges.table.segments})
told["explained"] = gemmtune.explain("outer_bmm", a, b, c, d).pick
out = torch.empty(3, 33, 40)
gemmtune.outer_bmm(a, b, c, d, out=out)
told["right"] = [near(x, exact(a, b, c, d)) for x in (gemmtune.outer_bmm(a, b, c, d), gemmtune.outer_bmm(a, b, c, d), out)]
told["epilogue"] = near(gemmtune.outer_bmm(a, b, c, d, epilogue=torch.relu), exact(a, b, c, d).relu())
told["operator"] = near(torch.ops.gemmtune.outer_bmm(a, b, c, d), exact(a, b, c, d))
ours, theirs = gradients(gemmtune.outer_bmm, (a, b, c, d)), gradients(exact, (a, b, c, d))
told["gradients"] = [near(x, y) for x, y in zip(ours, theirs)]
compiled = torch.compile(gemmtune.outer_bmm, backend="gemmtune", fullgraph=True)
traced = torch.compile(gemmtune.outer_bmm, backend="aot_eager", fullgraph=True)
told["compiled"] = [near(compiled(a, b, c, d), exact(a, b, c, d))]
told["compiled"] += [near(x, y) for x, y in zip(gradients(traced, (a, b, c, d)), theirs)]
with gemmtune.record("recorded.json") as recording:
    gemmtune.outer_bmm(a, b, c, d)
told["recorded"] = [str(x) for x in recording.counts] == [str(problem)]
told["tuned from the recording"] = cli.run(["tune", "--recorded", "recorded.json", "--quiet"])
weight = gemmtune.QuantizedWeight.quantize(b.mT.contiguous()).mT
told["quantized"] = near(gemmtune.outer_bmm(a, weight, c, d), exact(a, weight.dequantize(), c, d))
told["messages"] = [message(a, b, a, b), message(a, b, c, d[0])]
told["command"] = cli.run(["tune", "2x8x8x8", "--op", "outer_bmm", "--dtype", "float32", "--device", "cpu", "--quiet"])
told["conformance"] = cli.run(
    "conformance gemmtune --op outer_bmm --device cpu --dtype float32 --property bound --in-process --json report.json".split()
)
told["report"] = [json.load(open("report.json"))[key] for key in ("verdict", "refused", "executed")]
print("told:" + json.dumps(told))
"""


def use_of_a_copy(folder: Path) -> dict[str, Any]:
    """Do the recipe's steps on a copy of the package, run the program there, and return its findings."""
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


@pytest.mark.turn(3, 6)
def test_it_is_tuned_called_differentiated_recorded_compiled_and_tested(tmp_path: Path) -> None:
    told = use_of_a_copy(tmp_path)
    assert told["on a GPU"] == ["aten"]  # the other backends refuse it
    assert told["tuned"] == {"aten:outer_bmm": "ok"}
    assert told["over M"] == ["aten:outer_bmm"]
    assert told["explained"] == "aten:outer_bmm"
    assert (told["right"], told["epilogue"], told["operator"], told["gradients"]) == ([True] * 3, True, True, [True] * 4)
    assert told["compiled"] == [True] * 5
    assert (told["recorded"], told["tuned from the recording"], told["quantized"]) == (True, 0, True)
    assert told["messages"] == [
        "outer_bmm: shapes do not fit, got a [3, 33, 48], b [3, 48, 40], c [3, 33, 48] and d [3, 48, 40]; "
        "expected a [B, M, K], b [B, K, N], c [B, M, 1] and d [B, 1, N]",
        "outer_bmm: d must be a 3-D tensor, got shape [1, 40]",
    ]
    assert (told["command"], told["conformance"]) == (0, 0)
    *verdict, executed = told["report"]
    assert verdict == ["CONFORMS", 0]
    assert executed > 20


def test_an_operation_touches_few_files() -> None:
    """Compare the files that the recipe names with those that the steps above change."""
    texts = [(ROOT / name).read_text() for name in ("CONTRIBUTING.md",)]
    recipe = "\n".join(text.partition("## Adding an operation\n")[2].partition("\n## ")[0] for text in texts)
    named = set(re.findall(r"^\| `(.*?)` \|", recipe, re.MULTILINE))
    assert len(named) <= MOST_FILES
    assert {f"gemmtune/{name}" for name in STEPS} <= named
    assert not [name for name in named if not (ROOT / name).exists()]
