"""What README, CHANGELOG and docs say is true."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import itertools
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import gemmtune
import gemmtune.backends.ck.legality as ck
import gemmtune.backends.cpp.configs as cpp
import gemmtune.backends.cutlass.configs as cutlass
import gemmtune.backends.triton.legality as triton
from gemmtune import cli, settings
from gemmtune.backends.cublaslt.gemm import gemm_of
from gemmtune.backends.cuda.backend import CLUSTER, SKINNY
from gemmtune.backends.table import BACKENDS
from gemmtune.cli.spec import Spec
from gemmtune.cli.words import OPS
from gemmtune.device import preset
from gemmtune.errors import InvalidProblemError
from gemmtune.problem.operations import BATCHED_OPS
from gemmtune.settings import Settings

ROOT = Path(__file__).parents[2]
README, USAGE, SETTINGS, WORDS = (ROOT / name for name in ("README.md", "docs/usage.md", "docs/settings.md", "docs/words.md"))
MODELS = ROOT / "docs/models.md"
TOOLS = ("tox.ini", "constraints.txt", ".ci/run")
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def section(path: Path, title: str) -> str:
    """The text below a heading, up to the next one."""
    return path.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The rows of the first table in a text, without its head."""
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows][2:]


def docstrings_of_settings() -> dict[str, str]:
    tree = ast.parse((ROOT / "gemmtune" / "settings.py").read_text())
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    return {
        field.target.id: re.sub(r"\s+", " ", text.value.value).replace("``", "`")
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def test_the_table_of_settings_is_that_of_the_code():
    defaults, meanings = Settings(), docstrings_of_settings()
    expected = [
        [f"`{field.name}`", f"`{getattr(defaults, field.name)!r}`", meanings[field.name]] for field in dataclasses.fields(Settings)
    ]
    groups = SETTINGS.read_text().split("\n## ")[1:]
    assert sorted(row for group in groups for row in table(group)) == sorted(expected)


def test_the_glossary_names_the_backends_and_has_each_word_once():
    words = dict(table(WORDS.read_text()))
    assert len(words) == len(table(WORDS.read_text()))
    assert re.findall(r"`(\w+)`", words["Backend"]) == list(BACKENDS)
    for word in ("Layout", "Problem", "Epilogue"):
        assert hasattr(gemmtune.problem, word)


def test_the_support_table_has_the_operations_and_backends():
    rows = {name.strip("`"): (cpu, cuda) for name, cpu, cuda in table(section(USAGE, "Where kernels run"))}
    assert rows["operations"] == ("all", "all")
    assert [name for name in rows if name in BACKENDS] == list(BACKENDS)
    assert [row[0].strip("`") for row in table(section(README, "Support"))] == list(BACKENDS)


def test_the_operations_and_their_backends_are_those_of_the_code():
    told: dict[str, set[str]] = {}
    for operations, _, backends in table(section(USAGE, "Operations")):
        told |= {name: set(re.findall(r"`(\w+)`", backends)) for name in re.findall(r"`(\w+)", operations)}
    assert set(told) == set(OPS) - {"grouped_k_mm", "routed_grouped_mm", "combined_grouped_mm"}  # forms of grouped_mm
    assert set(told) <= set(gemmtune.__all__)
    assert set(told) == {name for row in table(section(README, "In Python")) for name in re.findall(r"`(\w+)", row[0])}
    for name in told:
        assert {backend for backend in BACKENDS if backend not in ("aten", "own") and serves(backend, name)} == told[name], name


def serves(backend: str, operation: str) -> bool:
    """Whether a backend has something for the operation, by its own predicate."""
    sizes = (2, 256, 256, 256) if operation in BATCHED_OPS else (256, 256, 256)
    cpu, gpu = (Spec(op=operation, device_type=kind).problem(sizes, "test") for kind in ("cpu", "cuda"))
    few_rows = Spec(op=operation, device_type="cuda").problem((*sizes[:-3], 16, 256, 256), "test")
    if backend == "cublaslt":
        with contextlib.suppress(InvalidProblemError):
            return bool(gemm_of(gpu))
        return False
    reason = {
        "triton": lambda: triton.check_problem(gpu, preset("sm90")),
        "ck": lambda: ck.check_problem(gpu, preset("gfx942")),
        "cutlass": lambda: cutlass.check_problem(gpu, preset("sm90")),
        "cuda": lambda: CLUSTER.why_not(gpu, preset("sm90")) and SKINNY.why_not(few_rows, preset("sm90")),
        "cpp": lambda: cpp.unsupported(cpu),
    }[backend]()
    return reason is None


def test_the_commands_are_those_of_the_command_line():
    commands = [re.match(r"`gemmtune ([\w-]+)", row[0]).group(1) for row in table(section(USAGE, "Command line"))]
    assert sorted(commands) == sorted(cli.cli.commands)


def test_the_first_python_example_is_short():
    [code] = re.findall(r"```python\n(.*?)```", section(README, "In Python"), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 6


EXAMPLES = [
    (path, code, printed)
    for path in (README, USAGE)
    for code, printed in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", path.read_text(), re.DOTALL)
]
[OF_MODELS] = re.findall(r"\A# Models\n.*?```python\n(.*?)```\n\n```text\n(.*?)```", MODELS.read_text(), re.DOTALL)
"""Without that of torch.compile, which takes the compiler's time."""


@pytest.mark.parametrize(
    ("path", "code", "expected"), [*EXAMPLES, (MODELS, *OF_MODELS)], ids=[*(path.name for path, _, _ in EXAMPLES), MODELS.name]
)
def test_the_python_examples_print_what_they_say(path: Path, code: str, expected: str, own_store):
    printed = io.StringIO()
    with settings.patch(search="quick", max_profiling_configs=1), contextlib.redirect_stdout(printed):
        exec(compile(code, path.name, "exec"), {})
    gemmtune.integration.compile.uninstall()
    assert any_machine(printed.getvalue()) == any_machine(expected)


def test_a_mixture_of_experts_is_what_the_example_says(own_store):
    _, code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/grouped.md").read_text(), re.DOTALL)
    x, gate_up, down = torch.randn(9, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    weights, index = torch.randn(9, 4).softmax(-1).topk(2)
    names = {"torch": torch, "gemmtune": gemmtune, "G": 4, "C": 2, "x": x, "gate_up": gate_up, "down": down}
    with settings.patch(tune="never"):
        exec(code, names | (found := {"top_k_index": index, "top_k_weights": weights}), found)
    halves = torch.einsum("tk,gnk->tgn", x, gate_up).chunk(2, dim=-1)
    every = torch.einsum("tgi,gki->tgk", torch.nn.functional.silu(halves[0]) * halves[1], down)
    torch.testing.assert_close(found["y"], torch.einsum("tc,tck->tk", weights, every[torch.arange(9)[:, None], index]))


def any_machine(text: str) -> str:
    """A text without what differs between machines: the names of picks, times and speed-ups."""
    text = re.sub(rf"\b({'|'.join(BACKENDS)}):\S+", "PICK", text)
    return re.sub(r"\d+ µs, \d+\.\d+ times", "TIME", text)


def test_every_example_is_tested():
    assert len(EXAMPLES) == sum(path.read_text().count("```python") for path in (README, USAGE, SETTINGS, WORDS)) == 3


def test_the_commands_for_quantized_operations_are_right():
    lines = re.findall(r"^gemmtune (choices|tune) (.*)$", section(USAGE, "Quantized weights"), re.MULTILINE)
    assert len(lines) == 2
    for _, arguments in lines:
        words = ["choices", *arguments.split(), *([] if "--arch" in arguments else ["--arch", "sm90"]), "--backends", "aten"]
        assert CliRunner().invoke(cli.cli, words).exit_code == 0, words


@pytest.mark.parametrize("path", [README, USAGE, SETTINGS, MODELS], ids=lambda path: path.name)
def test_the_names_that_the_documents_use_exist(path: Path):
    for name in re.findall(r"\bgemmtune\.([a-z]\w+)(?!\w*\.md)", path.read_text()):
        assert hasattr(gemmtune, name), name


def test_the_readme_is_read_in_three_minutes():
    assert len(README.read_text().splitlines()) <= 130


def test_the_install_line_has_the_main_job_and_the_constraints():
    [line] = [line for line in section(README, "Install and tune").splitlines() if line.startswith("python3 -m venv")]
    assert "pip install -c constraints.txt -e '.[dev]'" in line
    assert line.endswith("gemmtune tune 1x4096x4096 16x4096x4096 256x1024x1024 500x501x499 --dtype float32")


def test_the_constraints_pin_everything_that_the_package_asks_for():
    pinned = {re.split(r"[=<>]", line)[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    project = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|triton|test|dev) = \[(.*?)\]$", project, re.DOTALL | re.MULTILINE)
    assert len(lists) == 4
    wanted = {name.lower() for text in lists for name in re.findall(r'"([A-Za-z0-9_-]+)[>\["]', text)} - {"gemmtune"}
    assert wanted <= pinned


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", [*DOCUMENTS, *(ROOT / name for name in TOOLS)], ids=lambda path: path.name)
def test_nothing_names_a_path_outside_the_repository(path):
    text = path.read_text().removeprefix("#!/usr/bin/env bash")
    # An absolute path, or one that leaves the repository, stands by itself: not in a word, an address or a variable.
    assert not re.findall(r"(?<![\w.:/$}])/\w+/\S+|(?<!\w)\.\./\S+", text)


def test_the_triton_families_of_the_document_are_the_templates():
    text = (ROOT / "docs" / "kernels.md").read_text().split("\n## The Triton families\n")[1]
    places = {Path(row[0].strip("`")).parts[0] for row in table(text)}
    folder = ROOT / "gemmtune" / "backends" / "triton"
    assert all((folder / place).exists() for place in places)
    assert {path.parent.name for path in folder.glob("*/*.jinja")} <= places


def test_the_house_in_the_architecture_is_the_package():
    parts = [row[0].strip("`").rstrip("/") for row in table((ROOT / "docs" / "architecture.md").read_text())]
    package = {p.stem for p in (ROOT / "gemmtune").iterdir() if (p.suffix == ".py" or (p / "__init__.py").exists())}
    assert set(parts) == package - {"__init__", "__main__", "version"}
