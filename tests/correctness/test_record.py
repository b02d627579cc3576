"""record: the products of a run are counted without changing it, and other processes tune and use them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import made, result
from processes import printed, process, program
from rotation import rotated
from torch.nn import functional

import gemmtune
from gemmtune import Problem, QuantizedWeight, Recording, settings
from gemmtune.cli import run
from gemmtune.errors import InvalidProblemError
from gemmtune.integration.sparsify import sparse_problems

A, B, C = (torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in ((4, 8), (8, 6), (6,)))


FOUR_BITS = QuantizedWeight.quantize(B, "int4")


def problem(op: str, *sizes: int, **options: object) -> Problem:
    options = {"dtype": torch.float32, "layout": "nn", "device_type": "cpu"} | options
    return getattr(Problem, op)(*sizes, **options)


def stated(name: str, *operands: object, **arguments: object) -> Problem:
    """Return the problem that a call states outside of record()."""
    return gemmtune.explain(name, *operands, **arguments).problem


PACKED, BLOCKS = gemmtune.prepack(B), gemmtune.sparse.create_blocked_tensor(4, 8, block=2, density=0.5)
PACKED_BLOCKS, PARTS = gemmtune.prepack(BLOCKS), (BLOCKS.crow_indices(), BLOCKS.col_indices(), BLOCKS.values())
FEW = PARTS[2].new_ones(4)
BY_ROWS = torch.empty(6, 4).t()
EXPERTS, ENDS = torch.randn(3, 4, 8).mT, torch.tensor([1, 1, 4], dtype=torch.int32)

CALLS = {
    "mm": (lambda: torch.mm(A, B), problem("mm", 4, 6, 8)),
    "matmul": (lambda: A.view(2, 2, 8) @ B, problem("mm", 4, 6, 8)),
    "out": (lambda: torch.mm(A, B, out=torch.empty(4, 6)), problem("mm", 4, 6, 8)),
    "linear": (lambda: functional.linear(A.view(2, 2, 8), B.t().contiguous()), problem("mm", 4, 6, 8, layout="nt")),
    "bias": (lambda: functional.linear(A, B.t().contiguous(), C), problem("addmm", 4, 6, 8, layout="nt")),
    "addmm": (lambda: torch.addmm(C, A, B, alpha=2), problem("addmm", 4, 6, 8, alpha=2)),
    "bmm": (lambda: torch.bmm(A.expand(3, 4, 8).clone(), B.expand(3, 8, 6).clone()), problem("bmm", 3, 4, 6, 8)),
    "int8": (lambda: torch._int_mm(A.char(), B.char()), Problem.int_mm(4, 6, 8, layout="nn", device_type="cpu")),
    "ours": (lambda: gemmtune.mm(A, B), problem("mm", 4, 6, 8)),
    "ours with an epilogue": (lambda: gemmtune.mm(A, B, epilogue=torch.relu), stated("mm", A, B, epilogue=torch.relu)),
    "ours into columns": (lambda: gemmtune.mm(A, B, out=torch.empty(6, 4).t()), stated("mm", A, B, out=torch.empty(6, 4).t())),
    "ours prepacked": (lambda: gemmtune.mm(A, PACKED), stated("mm", A, PACKED)),
    "ours with blocks": (lambda: gemmtune.bsr_addmm(C[:4, None], BLOCKS, B), stated("bsr_addmm", C[:4, None], BLOCKS, B)),
    "blocks": (lambda: BLOCKS @ B, stated("bsr_mm", PACKED_BLOCKS, B)),
    "blocks and a sum": (
        lambda: torch.addmm(FEW[:, None], BLOCKS, B, alpha=2),
        stated("bsr_addmm", FEW[:, None], PACKED_BLOCKS, B, alpha=2),
    ),
    "ours as operators": (lambda: torch.ops.gemmtune.bsr_mm(*PARTS, B), stated("bsr_mm", PACKED_BLOCKS, B)),
    "ours as a layer": (
        lambda: torch.ops.gemmtune.bsr_linear(B.t().contiguous(), *PARTS),
        stated("bsr_mm", PACKED_BLOCKS, B.t().contiguous().t(), out=BY_ROWS),
    ),
    "ours with a sum": (lambda: gemmtune.addmm(C, A, B, alpha=2), problem("addmm", 4, 6, 8, alpha=2)),
    "ours of integers": (lambda: gemmtune.int_mm(A.char(), B.char()), Problem.int_mm(4, 6, 8, layout="nn", device_type="cpu")),
    "groups of rows": (lambda: torch._grouped_mm(A, EXPERTS, offs=ENDS), problem("grouped_mm", 4, 4, 8, groups=3, layout="nt")),
    "groups of columns": (
        lambda: torch._grouped_mm(EXPERTS.mT, A.t(), offs=ENDS),
        problem("grouped_mm", 4, 4, 8, groups=3, layout="nt"),
    ),
    "groups of terms": (
        lambda: torch._grouped_mm(A.t(), A, offs=ENDS),
        problem("grouped_k_mm", 8, 8, 4, groups=3, layout="tn"),
    ),
    "four bits": (
        lambda: functional.linear(A.view(2, 2, 8), FOUR_BITS.t()),
        problem("mixed_mm", 4, 6, 8, dtype_b=torch.uint8, encoding="int4", scales="column"),
    ),
    "compiled": (torch.compile(lambda: torch.mm(A, B), backend="eager", fullgraph=True), problem("mm", 4, 6, 8)),
}


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_products_are_counted_and_keep_their_results(name, mode):
    call, expected = CALLS[name]
    with settings.patch(tune_in_subprocess=False), mode():
        plain = call()
        with gemmtune.record() as recording:
            noted = [call(), call()]
    assert recording.counts == {expected: 2}
    assert repr(recording) == "<Recording of 1 problems in 2 calls>"
    exact = not name.startswith("ours")  # torch runs these while a mode is active
    assert all(torch.equal(x, plain) if exact else torch.allclose(x, plain, atol=1e-6) for x in noted)


def test_equal_values_of_different_arguments_are_different_problems():
    with gemmtune.record() as recording:
        torch.addmm(C, A, B, alpha=2)
        torch.addmm(C, A, B, beta=2)
    assert recording.counts == {problem("addmm", 4, 6, 8, alpha=2): 1, problem("addmm", 4, 6, 8, beta=2): 1}


def test_sparse_layers_are_counted_as_optimize_tunes_them():
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64, bias=False)), torch.ones(3, 64)
    gemmtune.sparsify_(model, block=16)
    with torch.inference_mode(), gemmtune.record() as by_torch:
        model(x)
    with sparse_problems(model) as expected, torch.no_grad(), gemmtune.record() as of_optimized:
        gemmtune.optimize(model)(x)
    gemmtune.restore(model)
    assert list(by_torch.counts) == list(of_optimized.counts) == expected
    tokens, expected = B.t().contiguous(), stated("bsr_addmm", FEW[:, None], PACKED_BLOCKS, B.t().contiguous().t(), out=BY_ROWS)
    for x in (tokens, tokens.view(2, 3, 8)):
        with gemmtune.record() as recording:
            functional.linear(x, BLOCKS, FEW)
        assert recording.counts == {expected: 1}
    with contextlib.suppress(RuntimeError), gemmtune.record() as recording:
        torch.mm(B.t(), B.to_sparse_bsr((2, 2)))  # neither torch nor gemmtune has this product on a CPU
    assert not recording.counts


def test_backward_passes_are_counted_and_unsupported_dtypes_are_not():
    weight = B.clone().requires_grad_()
    with gemmtune.record() as recording:
        (A @ weight).relu().mul(2).sum().backward()
        torch.mm(A.cfloat(), B.cfloat())
    assert {(p.m, p.n, p.k, p.layout_letters) for p in recording.counts} == {(4, 6, 8, "nn"), (8, 6, 4, "tn")}


def test_the_file_has_counts_and_a_histogram_and_can_be_read(tmp_path):
    file = tmp_path / "shapes.json"
    with contextlib.suppress(ZeroDivisionError), gemmtune.record(file):
        for rows in (1, 4, 4, 2):
            torch.mm(A[:rows], B)
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        raise ZeroDivisionError
    data = json.loads(file.read_text())
    assert data["rows"] == [
        {"text": "mm Mx64x64 float32 nn on cpu", "m": {"64": 1}},
        {"text": "mm Mx6x8 float32 nn on cpu", "m": {"1": 1, "2": 1, "4": 2}},
    ]
    found = Recording.read(file)
    assert found.counts == {
        problem("mm", 1, 6, 8): 1,
        problem("mm", 2, 6, 8): 1,
        problem("mm", 4, 6, 8): 2,
        problem("mm", 64, 64, 64): 1,
    }
    assert [(p.m, p.device_type) for p in found.problems("cuda")] == [(64, "cuda"), (4, "cuda"), (2, "cuda"), (1, "cuda")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "got text that is not JSON"),
        ("[]", "got list, expected a file that gemmtune record"),
        ('{"format": "gemmtune-recording", "version": 9}', "got format 'gemmtune-recording', version 9, expected"),
        (
            '{"format": "gemmtune-recording", "version": 1, "problems": [{"count": 1}]}',
            r"problems\[0\]: 'problem'; record it again",
        ),
    ],
)
def test_invalid_files_are_rejected_with_the_reason(text, message, tmp_path, capsys):
    file = tmp_path / "shapes.json"
    file.write_text(text)
    with pytest.raises(InvalidProblemError, match=message):
        Recording.read(file)
    assert run(["tune", "--recorded", str(file)]) == 2
    assert "--recorded" in capsys.readouterr().err


@pytest.mark.parametrize("name", rotated(["llama", "qwen2", "bert", "gpt2", "vit", "whisper", "t5"], 2, "record"))
def test_every_product_of_a_model_is_counted(name):
    model, inputs = made(name)
    with torch.no_grad():
        expected = result(model, inputs)
        with torch.profiler.profile() as profile:
            model(**inputs)
        with gemmtune.record() as recording:
            assert torch.equal(result(model, inputs), expected)
    seen = {e.key: e.count for e in profile.key_averages()}
    asked = {op: sum(count for p, count in recording.counts.items() if p.op == op) for op in ("mm", "addmm", "bmm", "baddbmm")}
    assert asked == {op: seen.get(f"aten::{op}", 0) for op in asked}
    assert sum(asked.values()) > 8


PROGRAM = """
import sys, torch
torch.manual_seed(0)
layer = torch.nn.Linear(96, 64)
print(sys.argv[1:], layer(torch.randn(32, 96)).shape)
sys.exit(3)
"""
USE = """
import sys, torch, gemmtune
from gemmtune.cli import run
from gemmtune.dispatch.ready import forget_plans
from gemmtune.integration import modules
torch.manual_seed(0)
layer = torch.nn.Linear(96, 64)
x = torch.randn(32, 96)
with torch.no_grad():
    plain = layer(x)
    for known in (False, True):
        gemmtune.optimize(layer)
        assert torch.allclose(layer(x), plain, atol=1e-5)
        [bound] = modules._picks[layer].found.values()
        print(gemmtune.explain("addmm", layer.bias, x, layer.weight.t()).origin, bound and bound.pick.plan.choice.name)
        gemmtune.restore(layer)
        assert known or run(["import", "store.json"]) == 0
        forget_plans()
"""


@pytest.mark.turn(6, 8)
def test_record_tune_export_import_and_use_in_separate_processes(own_store, tmp_path, capsys, monkeypatch):
    """Record an unchanged script, tune in this process, and use the result in another process with its own store."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    environment = {
        "GEMMTUNE_STORE_PATH": str(tmp_path / "other.sqlite"), "GEMMTUNE_TUNE": "never", "GEMMTUNE_BACKENDS": "aten,cpp",
        "GEMMTUNE_SEARCH": "quick", "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
    with process(**environment) as other:
        *ended, told = other(printed, run, ["record", "-o", "shapes.json", "--", "python", "program.py", "--steps", "2"])
    assert ended == [3, "['--steps', '2'] torch.Size([32, 64])\n"], told
    assert "1 problem in 1 call written to shapes.json" in told
    tuning = ["tune", "--recorded", str(tmp_path / "shapes.json"), "--quiet", "--backends", "aten,cpp", "--search", "quick"]
    assert run(tuning) == 0
    assert capsys.readouterr().out.startswith("addmm 32x64x96 float32 nt inp[64] alpha=one beta=one on cpu: ")
    assert run(["export", str(tmp_path / "store.json")]) == 0
    exported = json.loads((tmp_path / "store.json").read_text())
    for row in exported["measurements"][0]["rows"]:
        row["time_us"] *= 1000 if row["backend"] == "aten" else 1  # the tests compile without optimization
    (tmp_path / "store.json").write_text(json.dumps(exported))
    with process(**environment) as other:
        _, said, told = other(printed, program, USE)
    lines = [line for line in said.splitlines() if "rows of" not in line]
    assert lines[0] == "the store knows no choice, and tune is 'never' None", said + told
    assert lines[1].startswith("from the store cpp:"), said + told


@pytest.mark.parametrize(("status", "expected"), [(0, 1), (3, 3)])
def test_a_recording_that_cannot_be_written_is_an_error(tmp_path, monkeypatch, capsys, status, expected):
    """The program has run to its end by then: its status counts, and its products still go to --json."""
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(f"import torch\ntorch.mm(torch.ones(4, 8), torch.ones(8, 4))\nraise SystemExit({status})\n")
    assert run(["record", "-o", "/dev/full", "--json", "found.json", "--", "python", "program.py"]) == expected
    assert capsys.readouterr().err == "error: --output: cannot write /dev/full: No space left on device\n"
    assert len(json.loads(Path("found.json").read_text())["problems"]) == 1


ENDED = """
import os, signal, torch
torch.mm(torch.ones(4, 8), torch.ones(8, 4))
if (fork := os.fork()) == 0:
    torch.mm(torch.ones(5, 8), torch.ones(8, 4))
    raise SystemExit(3)
assert os.waitpid(fork, 0)[1] == 3 << 8 and not os.path.exists("shapes.json")
os.kill(os.getpid(), signal.SIGTERM)
torch.mm(torch.ones(6, 8), torch.ones(8, 4))
"""


@pytest.mark.turn(5, 6)
def test_a_program_that_forks_and_is_terminated_is_recorded(tmp_path):
    (tmp_path / "program.py").write_text(ENDED)
    command = [sys.executable, "-m", "gemmtune", "record", "-o", "shapes.json", "--", "program.py"]
    path = os.pathsep.join([str(Path(gemmtune.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert ended.stderr.count("1 problem in 1 call written to shapes.json") == 1, ended.stderr
    assert [problem.m for problem in Recording.read(tmp_path / "shapes.json").problems()] == [4]


def test_a_program_without_products_keeps_an_older_file(capsys, tmp_path):
    (program := tmp_path / "program.py").write_text("raise SystemExit('no GPU')")
    (file := tmp_path / "shapes.json").write_text("of an earlier run")
    assert run(["record", "-o", str(file), "--", str(program)]) == 1
    assert capsys.readouterr().err.splitlines() == ["no GPU", f"no GEMMs were recorded: {file} is not written"]
    assert file.read_text() == "of an earlier run"


def test_missing_scripts_and_invalid_recordings_are_errors(capsys, tmp_path):
    assert run(["record", "nowhere.py"]) == 2
    assert "record: got nowhere.py, which is not a file, expected a Python script" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert run(["tune", "--recorded", str(other)]) == 2
    assert "got format None, version None, expected a file that gemmtune record has written" in capsys.readouterr().err
    other.write_text('[{"m": 2, "n": 2, "k": 2}]')
    assert run(["tune", "--recorded", str(other)]) == 2
    assert "tune a file of shapes by --shapes" in capsys.readouterr().err


PROGRAM_ENDS = {
    "exception": "def f():\n    raise ValueError('boom')\nf()",
    "exception with a cause": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "exception of gemmtune": "from gemmtune.errors import StoreError\nraise StoreError('of the program')",
    "import": "import nowhere_at_all",
    "syntax": "def f(:",
    "interrupt": "raise KeyboardInterrupt",
    "exit": "raise SystemExit(3)",
    "exit with a text": "import sys\nsys.exit('text')",
    "exit with an object": "import sys\nsys.exit((1, 2))",
    "hook": "import sys\nsys.excepthook = lambda *_: print('hooked', file=sys.stderr)\nraise ValueError",
}
MODULES = {
    "no module": "nowhere_at_all",
    "no module of a package": "parts.no",
    "package": "parts",
    "module that fails": "parts.fails",
}


@pytest.mark.parametrize("name", [*PROGRAM_ENDS, *MODULES])
def test_a_recorded_program_ends_as_it_does_unrecorded(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/__init__.py").touch()
    (tmp_path / "parts/fails.py").write_text(PROGRAM_ENDS["exception"])
    (script := tmp_path / "program.py").write_text(PROGRAM_ENDS.get(name, ""))
    arguments = ["-m", MODULES[name]] if name in MODULES else [str(script)]
    path = os.pathsep.join([str(Path(gemmtune.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    alone = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    status = run(["record", "--", "python", *arguments])
    *told, last = capsys.readouterr().err.splitlines()
    assert last == "no GEMMs were recorded: shapes.json is not written"
    assert told == [line for line in alone.stderr.splitlines() if not line.startswith('  File "<frozen runpy>')]
    assert status == (128 + signal.SIGINT if alone.returncode == -signal.SIGINT else alone.returncode) != 0


@pytest.mark.parametrize(("file", "message"), [("no/shapes.json", "its folder does not exist"), (".", "which is a folder")])
def test_unwritable_files_are_errors_before_the_block_runs(file, message, tmp_path):
    with pytest.raises(InvalidProblemError, match=message), gemmtune.record(tmp_path / file):
        pytest.fail("the block runs, and what it records is lost")


def test_programs_that_are_not_python_are_rejected(capsys):
    for words in ("torchrun train.py", "python", "python -m", "python -c pass", "python3.12 -u train.py"):
        assert run(["record", "--", *words.split()]) == 2
        expected = "expected a script, or python with a script or -m and a module"
        assert f"record: got '{words}', {expected}" in capsys.readouterr().err
