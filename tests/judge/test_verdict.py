"""The judge's targets, reports and exit statuses."""

from __future__ import annotations

import html.parser
import json
import os
import random
from pathlib import Path

import pytest
import torch
from hack_table import HACKS

import gemmtune
from gemmtune import cli
from gemmtune.backends.own.targets import loaded
from gemmtune.choice import Claims
from gemmtune.errors import GemmtuneError, SubjectError, UnavailableError
from gemmtune.judging import sizes
from gemmtune.judging import verdict as verdicts
from gemmtune.judging.report import as_html, as_json, lines
from gemmtune.judging.targets import target_of, targets_of
from gemmtune.judging.verdict import Judgement, Standing, Verdict, judge
from gemmtune.problem import Problem
from gemmtune.selector import pick
from gemmtune.untrusted.candidate import TORCH, Candidate, CandidateEnded, RemoteError
from gemmtune.untrusted.checks import Checker
from gemmtune.untrusted.conduct import Conduct, Finding
from gemmtune.untrusted.memory import Memory
from gemmtune.untrusted.shape import Shape
from gemmtune.untrusted.target import Target

pytest_plugins = ["pytester"]

CPP = """
#include <cstdint>
#pragma GCC optimize("O2")
extern "C" void matmul(const float* a, const float* b, float* out, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j < n; j++) out[i * n + j] = 0;
    for (int64_t x = 0; x < k; x++)
      for (int64_t j = 0; j < n; j++) out[i * n + j] += a[i * k + x] * b[x * n + j];
  }
}
"""
MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b

class ModelNew(torch.nn.Module):
    gemm_traits = {"calls_torch": True, "dtypes": ["float32"]}

    def forward(self, a, b):
        return torch.matmul(a, b)

def get_inputs():
    return [torch.rand(64, 32), torch.rand(32, 48)]

def get_init_inputs():
    return []
"""
ON_CPU = ["--device", "cpu", "--level", "brief"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("candidates")
    (made / "kernel.cpp").write_text(CPP)
    (made / "model.py").write_text(MODEL)
    (made / "zeros.py").write_text("import torch\n\ndef matmul(a, b):\n    return a.new_zeros(a.shape[0], b.shape[1])\n")
    (made / "no.cpp").write_text('extern "C" void matmul(no')
    (made / "_part.py").write_text("1 / 0")
    (made / "broken.py").write_text("import nowhere_to_be_found\n\ndef matmul(a, b):\n    return a @ b\n")
    (made / "latin.py").write_bytes(b"# \xff")
    (made / "gpu.cu").write_text('extern "C" void matmul(const float* a')
    return made


@pytest.fixture(scope="module")
def known() -> dict[str, Verdict]:
    return {}


@pytest.fixture
def remembered(known: dict[str, Verdict], hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge each candidate of the folder once, whether Python, the command or pytest asks."""
    judged = verdicts._judged

    def once(target: Target | SubjectError, options: verdicts._Options) -> Verdict:
        asked = f"{target} {options}"
        if asked not in known:
            known[asked] = judged(target, options)
        return known[asked]

    monkeypatch.setattr(verdicts, "_judged", once)


@pytest.fixture
def judged(folder: Path, remembered: None) -> Judgement:
    return judge(str(folder), device="cpu", level="brief")


def test_judges_each_candidate_of_a_folder(judged: Judgement) -> None:
    standings = {Path(v.target).name: v.standing for v in judged.verdicts}
    assert standings == {
        "broken.py": Standing.NOT_JUDGED,
        "gpu.cu": Standing.NOT_JUDGED,
        "kernel.cpp": Standing.RIGHT,
        "latin.py": Standing.NOT_JUDGED,
        "model.py": Standing.RIGHT,
        "no.cpp": Standing.NOT_JUDGED,
        "zeros.py": Standing.WRONG,
    }, [v.findings for v in judged.verdicts]
    assert judged.exit_status == 1
    broken, gpu, kernel, latin, _, uncompiled, _ = judged.verdicts
    assert gpu.reason == "got device cpu, expected cuda"
    assert "got no Python source" in latin.reason
    assert "nowhere_to_be_found" in broken.reason
    assert "did not compile" in uncompiled.reason
    assert kernel.work.startswith("its own: none of torch's products")
    assert kernel.speed is not None
    assert kernel.calls >= 40


def test_a_fault_of_the_judge_is_none_of_the_gemm(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Verdict:
        raise RuntimeError("sizes do not fit")

    monkeypatch.setattr(verdicts, "_examined", fail)
    judged = judge(str(folder / "zeros.py"), device="cpu", level="brief")
    assert judged.exit_status == 2
    assert judged.verdicts[0].reason == (
        "the judge failed by a fault of gemmtune, not of the GEMM: RuntimeError('sizes do not fit')"
    )
    assert "in fail" in capsys.readouterr().err


def test_reports_are_whole(judged: Judgement) -> None:
    text = "\n".join(lines(judged))
    text = "\n".join(lines(judged))
    assert "zeros.py: WRONG: " in text
    assert "gemmtune conformance" in text, "how to run a failing case again"
    for line, verdict in zip(str(judged).splitlines(), judged.verdicts, strict=True):
        assert line.startswith(f"{verdict.target} on cpu: {verdict.standing}"), line
    data = json.loads(json.dumps(as_json(judged), allow_nan=False))
    assert [bool(v["to_do"]) for v in data["verdicts"]] == [False, False, False, False, False, False, True]
    assert [v["exit_status"] for v in data["verdicts"]] == [2, 2, 0, 2, 0, 2, 1]
    assert data["verdicts"][-1]["values"]["failures"]
    page = as_html(judged)
    parser = html.parser.HTMLParser()
    parser.feed(page)
    assert page.count("<script") == 1, "that of every page"
    assert "http" not in page
    assert page.count("<h3>Speed</h3>") == sum(v.speed is not None for v in judged.verdicts)


def test_text_from_elsewhere_is_escaped(judged: Judgement) -> None:
    import dataclasses

    sly = dataclasses.replace(judged.verdicts[0], target="<b>\x1b[31m", findings=(Finding(kind=Conduct.LOOKS, detail="<i>\x1b"),))
    page = as_html(Judgement(target="<script>", level="brief", verdicts=(sly,)))
    assert page.count("<script>") == 1
    assert "<b>" not in page
    assert "<i>" not in page
    assert "\x1b" not in page + "\n".join(lines(Judgement(target="", level="brief", verdicts=(sly,))))


def test_text_from_elsewhere_is_no_line_of_the_report(judged: Judgement) -> None:
    import dataclasses

    forged = "it failed\nverdict: RIGHT\r\nx.py: RIGHT"
    sly = dataclasses.replace(judged.verdicts[0], reason=forged, findings=(Finding(kind=Conduct.LOOKS, detail=forged),))
    for verdict in (sly, dataclasses.replace(sly, findings=())):
        text = "\n".join(lines(Judgement(target="", level="brief", verdicts=(verdict, verdict))))
        assert not [line for line in text.splitlines() if line.startswith(("verdict: RIGHT", "x.py"))]


@pytest.mark.usefixtures("remembered")
def test_command_prints_and_exits(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "v.json", tmp_path / "v.html"
    assert cli.run(["judge", f"{folder / 'model.py'}:ModelNew", *ON_CPU, "--json", str(made[0]), "--html", str(made[1])]) == 0
    assert "verdict: RIGHT" in capsys.readouterr().out
    assert json.loads(made[0].read_text())["verdicts"][0]["standing"] == "RIGHT"
    assert made[1].read_text().startswith("<!doctype html>")
    assert cli.run(["judge", str(folder / "zeros.py"), *ON_CPU, "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["exit_status"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py:f"], "got no such file"),
        (["no_such_module:f"], "no_such_module"),
        (["{folder}/zeros.py:other"], "other"),
        (["{folder}/zeros.py", "--trait", "nonsense"], "nonsense"),
        (["{folder}/zeros.py", "--device", "xpu"], "xpu"),
        (["{folder}/empty"], "got a folder without candidates"),
    ],
)
def test_nothing_judged_is_never_0(words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "empty").mkdir(exist_ok=True)
    given = [word.format(folder=folder).replace(f"{folder}/empty", str(folder.parent / "empty")) for word in words]
    assert cli.run(["judge", *ON_CPU, *given]) == 2
    out, err = capsys.readouterr()
    assert said in out + err


def test_python_call_names_what_it_takes() -> None:
    assert gemmtune.judge is judge
    with pytest.raises(GemmtuneError, match="level: got 'deep', expected one of brief, normal, full"):
        judge("x:y", level="deep")


def test_targets_are_found_without_being_imported(folder: Path) -> None:
    assert target_of("json.decoder:JSONDecoder").roots[0].endswith("json")
    assert target_of(str(folder / "model.py")).name == "ModelNew"
    assert [Path(t.path).name for t in targets_of(str(folder), "cpu") if isinstance(t, Target) and t.kind == "file"] == [
        "broken.py", "model.py", "zeros.py",
    ]  # fmt: skip
    with pytest.raises(SubjectError, match="got device cuda, expected cpu"):
        target_of(f"{folder / 'kernel.cpp'}:matmul", "cuda")


@pytest.mark.parametrize(
    ("dtype", "lower"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float64, torch.float32)],
    ids=str,
)
def test_checks_find_a_narrower_type_on_random_operands(dtype: torch.dtype, lower: torch.dtype) -> None:
    problem = Problem.mm(160, 176, 192, dtype=dtype)
    checker = Checker(problem, Claims(accumulate=dtype), torch.device("cpu"), 3)
    x = checker.fresh()
    assert checker.trouble(x.a @ x.b, x) is None
    assert checker.trouble((x.a.to(lower) @ x.b.to(lower)).to(dtype), x) is not None
    one = x.a @ x.b
    one[77, 5] += 1
    assert checker.trouble(one, x) is not None


def test_memory_keeps_alignment_and_strides() -> None:
    memory = Memory(torch.device("cpu"))
    whole = torch.arange(4000, dtype=torch.float32)
    view = whole.as_strided((5, 7), (13, 2), 3)
    placed, end = memory.place([view, view.t()], 2)
    assert len(placed) == 1
    [storage] = placed.values()
    assert storage.copy.data_ptr() % 256 == whole.data_ptr() % 256
    assert end % 4096 == 0
    assert not storage.changed()
    storage.copy[12] += 1
    assert storage.changed()


def test_a_process_that_has_ended_is_replaced() -> None:
    candidate = Candidate(target_of(f"{HACKS / 'harness.py'}:exit_0"))
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    for _ in range(2):
        with pytest.raises(CandidateEnded, match="exited with status 0"):
            candidate.call("", (a, b), {})
    candidate.close()


def test_a_gemm_that_ends_its_program_says_how(tmp_path: Path) -> None:
    (path := tmp_path / "ends.py").write_text("def mm(a, b): raise SystemExit('bye')\n")
    candidate = Candidate(target_of(f"{path}:mm"))
    with pytest.raises(CandidateEnded, match=r"(?s)exited with status 1.*SystemExit: bye"):
        candidate.call("", (torch.randn(3, 4), torch.randn(4, 5)), {})
    candidate.close()


def test_an_answer_that_comes_too_late_answers_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    process_of_torch = Candidate(TORCH)
    process_of_torch.opened()
    assert process_of_torch.fork is not None
    with monkeypatch.context() as on_a_busy_machine:
        on_a_busy_machine.setattr("gemmtune.untrusted.process.ENDING_S", 0.0)
        assert process_of_torch.fork._first.status(os.getpid()) is None
    process_of_torch.stop()
    assert torch.equal(process_of_torch.call("mm", (torch.eye(3), torch.ones(3, 2)), {}), torch.ones(3, 2))
    process_of_torch.close()


def test_errors_of_a_gemm_are_its_own() -> None:
    torch_process = Candidate(TORCH)
    torch_process.opened()
    with pytest.raises(RemoteError, match="RuntimeError"):
        torch_process.call("mm", (torch.randn(3, 4), torch.randn(5, 6)), {})
    assert torch.equal(torch_process.call("mm", (torch.eye(3), torch.ones(3, 2)), {}), torch.ones(3, 2))
    torch_process.close()


def test_unavailable_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.untrusted.process._firsts", {})
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(UnavailableError, match="no process for untrusted code can be started"):
        Candidate(TORCH).opened()


@pytest.mark.usefixtures("remembered")
def test_pytest_has_a_test_for_each_target(folder: Path, pytester: pytest.Pytester) -> None:
    names = [str(folder / name) for name in ("model.py", "zeros.py", "broken.py")]
    options = ["-p", "gemmtune.judging.plugin", "--judge-level=brief", "--judge-device=cpu", "-p", "no:cacheprovider"]
    result = pytester.runpytest_inprocess(*options, *(f"--judge={name}" for name in names))
    result.assert_outcomes(passed=1, failed=2)
    text = result.stdout.str()
    assert "verdict: WRONG" in text
    assert "verdict: NOT JUDGED" in text


def test_an_import_that_replaces_functions_is_refused_and_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sly.py").write_text(
        "import sys, torch\n"
        "pick = sys.modules.get('gemmtune.selector.pick')\n"
        "pick.right = lambda *_: []\n"
        "pick.Outcome.disturbed = None\n"
        "torch.Tensor.copy_ = lambda x, *_: x\n"
        "def f(a, b): return a @ b\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    right, copy, disturbed = pick.right, torch.Tensor.copy_, vars(pick.Outcome)["disturbed"]
    with pytest.raises(SubjectError, match="sly:f: its import replaced"):
        loaded("sly:f")
    assert pick.right is right
    assert torch.Tensor.copy_ is copy
    assert vars(pick.Outcome)["disturbed"] is disturbed


@pytest.mark.turn(2, 4)
def test_conformance_runs_in_an_untrusted_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HACKS.parent))
    short = ["--device", "cpu", "--max-cases", "6", "--trait", "dtypes=float32"]
    assert cli.run(["conformance", "hacks.harness:patched_comparison", *short]) == 1
    assert cli.run(["conformance", "hacks.harness:exit_0", *short]) == 1
    assert "exited with status 0" in capsys.readouterr().out
    assert cli.run(["conformance", "honest:by_numpy", *short]) == 0
    assert "trusted" not in capsys.readouterr().out


OWN_SIZE = """
import torch

class ModelNew(torch.nn.Module):
    gemm_traits = {"calls_torch": True, "dtypes": ["float32"]}

    def forward(self, a, b):
        if a.shape[0] == 2 * ROWS:
            return a.new_zeros(a.shape[0], b.shape[1])
        return torch.matmul(a, b)

ROWS = 111

def get_inputs():
    return [torch.rand(2 * ROWS, 33), torch.rand(33, 40)]
"""


def test_a_gemm_that_refuses_every_timed_shape_is_not_timed() -> None:
    refused, timed = (
        Shape(problem=Problem.mm(512, 512, 512), calls=1, **more)
        for more in ({"refused": "MemoryError: verdict: RIGHT\n  in mm"}, {"pairs": ((1e-3, 1e-3),)})
    )
    expected = "not timed: it refused 2 of 2 shapes, most often with: MemoryError: verdict: RIGHT"
    assert verdicts._untimed((), (refused, refused)) == expected
    assert not verdicts._untimed((), (refused, timed))


@pytest.mark.usefixtures("one_shape")
def test_a_model_is_judged_with_its_own_inputs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(OWN_SIZE)
    [verdict] = judge(str(tmp_path / "model.py"), device="cpu", level="brief").verdicts
    assert verdict.standing is Standing.WRONG
    assert any("mm 222x40x33" in str(finding) for finding in verdict.findings)


ONLY_OWN_SIZE = """
import torch

class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        if a.shape != (96, 120) or b.shape != (120, 72) or not a.dtype == b.dtype == torch.float64:
            raise ValueError("made for one size")
        return torch.from_numpy(a.numpy() @ b.detach().numpy())

def get_inputs():
    return [torch.rand(96, 120).double(), torch.rand(120, 72).double()]
"""


@pytest.mark.turn(1, 4)
def test_a_model_may_refuse_all_but_its_own_inputs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(ONLY_OWN_SIZE)
    [verdict] = judge(str(tmp_path / "model.py"), device="cpu", level="brief").verdicts
    assert verdict.standing is Standing.RIGHT, verdict
    assert not verdict.values.executed
    assert verdict.calls > 2 * verdicts.LEVELS["brief"].timed_calls, "its own inputs get more calls"


@pytest.mark.parametrize(
    "inputs",
    [
        None,
        [],
        [[[2, 3], "float32"]],
        [[[2, 3], "float32"], [[4, 5], "float32"]],
        [[[2, 3], "float32"], [[3, 5], "float64"]],
        [[[2, 3], "object"], [[3, 5], "object"]],
        [[[0, 3], "float32"], [[3, 5], "float32"]],
        [[["2", 3], "float32"], [[3, 5], "float32"]],
        [[[2, 2, 3], "float32"], [[4, 3, 5], "float32"]],
        [[[1 << 20, 1 << 20], "float32"], [[1 << 20, 1 << 20], "float32"]],
    ],
    ids=str,
)
def test_inputs_that_are_no_product_are_not_tried(inputs: object) -> None:
    assert sizes.of_inputs(inputs, "cuda") is None


def test_inputs_of_a_model_are_a_case() -> None:
    case = sizes.of_inputs([[[4, 2, 3], "bfloat16"], [[4, 3, 5], "bfloat16"]], "cpu")
    assert case is not None
    assert sizes.of_inputs([[[9000, 8], "float32"], [[8, 9000], "float32"]], "cpu") is None, "the result is too large for a CPU"
    assert (case.op, case.batch, case.m, case.n, case.k, case.dtype) == ("bmm", 4, 2, 5, 3, "bfloat16")


def test_sizes_of_the_source_are_drawn_together(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("if (m, n, k) == (512, 256, 768):\n    x = 0.5 + a12 + 99999\n")
    numbers = sizes.named_in(sizes.source_in([str(tmp_path)]))
    assert numbers == [512, 256, 768] * sizes.MORE
    drawn = list(sizes.drawn(numbers, 512**3, random.Random(1)))
    assert {(512, 256, 768), (512, 512, 512)} <= set(drawn)
    assert len(set(drawn)) == len(drawn)
    assert all(m * n * k <= 512**3 for m, n, k in drawn)
    assert list(sizes.drawn([], 512**3, random.Random(1))) == []
    large = [x for seed in range(40) for x in sizes.drawn([2, 31337, 3, 9], 2**31, random.Random(seed))]
    assert max(max(m * n, n * k, m * k) for m, n, k in large) <= sizes.MOST_ON_CPU, "copies of an operand would fill the memory"
    (tmp_path / "kernel.py").write_text("side = 1 << 10\nother = 2 ** 9\nhuge = 1 << 99999\n")
    assert sizes.named_in(sizes.source_in([str(tmp_path)])) == [1024, 512]
    assert sizes.named_in(sizes.source_in([str(tmp_path / "absent.py"), "/dev/zero"])) == [], "neither is a file"


def test_usual_sizes_are_squares_multiples_few_rows_and_large_ones() -> None:
    found = list(sizes.usual(2**31, random.Random(2)))
    assert (1024, 1024, 1024) in found
    assert sum(m == n == k for m, n, k in found) == 2
    assert any(not (m % 256 or n % 256 or k % 256) and len({m, n, k}) > 1 for m, n, k in found)
    for seed in range(20):
        tall = [(m, n, k) for m, n, k in sizes.usual(2**31, random.Random(seed)) if min(m, n) <= 4]
        assert all(max(m, n) * k >= 10**7 for m, n, k in tall), "a large operand, whose numbers few products would need"
        assert len(tall) == 2, "few rows, and few columns"
    assert max(m * n * k for m, n, k in found) == 2**31
    assert list(sizes.usual(1000, random.Random(2))) == []
