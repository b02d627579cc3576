"""What README, CONTRIBUTING, CHANGELOG and docs say is true."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import tomllib
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from documents import DOCS, PAGES, README, ROOT, Block, blocks, commands, section, table
from test_imports import layer_of

import gemmtune
from gemmtune import cli, settings
from gemmtune.backends.cuda.backend import FAMILIES
from gemmtune.backends.table import BACKENDS
from gemmtune.cli.shapes import problems_of_file
from gemmtune.cli.spec import Spec
from gemmtune.cli.words import OPS
from gemmtune.declaration.traits import Traits
from gemmtune.integration.compile import uninstall
from gemmtune.problem.operations import OPERATIONS
from gemmtune.setting_types import from_toml
from gemmtune.settings import Settings

TOOLS = ("tox.ini", "constraints.txt", "mkdocs.yml", "MANIFEST.in", ".ci/run")
DOCUMENTS = [*PAGES, ROOT / "CHANGELOG.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OUTSIDE = {"cd", "cp", "rm", "export", "eval", "gh", "git", "ruff", "mypy", "python3", "ray"}
"""Programs of other people in blocks of shell, whose arguments are not looked at."""
REAL_BACKENDS = {"README.md", "batch-invariant.md", "debugging.md", "every-m.md", "first-tune.md", "index.md"}
"""Pages whose examples need more than torch's kernels; the others are quicker without."""


def python_blocks(page: Path, *, gpu: bool) -> list[Block]:
    return [block for block in blocks(page, "python") if (block.mark == "gpu") == gpu]


def cases() -> list[object]:
    found = []
    for page in PAGES:
        code = python_blocks(page, gpu=False)
        compiles = any("torch.compile(" in block.text for block in code)
        slow = any(block.mark == "slow" for block in code) or compiles or page.name in REAL_BACKENDS
        if code:
            in_turn = [pytest.mark.slow, pytest.mark.turn(len(found) % 4, 4)]
            found.append(pytest.param(page, id=page.name, marks=in_turn if slow else []))
    return found


@pytest.mark.parametrize("page", cases())
def test_the_python_blocks_of_a_page_run_and_print_what_they_say(page: Path, own_store: Path) -> None:
    """The blocks of a page are one program: a later one may use what an earlier one made."""
    names: dict[str, object] = {}
    changes = {"search": "quick", "max_profiling_configs": 1, "rows": "shared"} | (
        {} if page.name in REAL_BACKENDS else {"backends": ("aten",)}
    )
    try:
        for block in python_blocks(page, gpu=False):
            if block.mark == "needs" and not all(importlib.util.find_spec(name.strip()) for name in block.rest.split(",")):
                continue
            printed = io.StringIO()
            with settings.patch(**changes), contextlib.redirect_stdout(printed):
                exec(compile(block.text, page.name, "exec"), names)
            if block.printed is not None:
                assert any_machine(printed.getvalue()) == any_machine(block.printed)
    finally:
        uninstall()


@pytest.mark.gpu
@pytest.mark.parametrize("block", [pytest.param(x, id=page.name) for page in PAGES for x in python_blocks(page, gpu=True)])
def test_the_blocks_for_a_gpu_run_on_a_small_model(block: Block, own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    small = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512
    )
    model = transformers.AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16).eval()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    printed = io.StringIO()
    try:
        with settings.patch(search="quick", max_profiling_configs=1), contextlib.redirect_stdout(printed):
            exec(compile(block.text, block.page.name, "exec"), {})
    finally:
        uninstall()
    assert re.match(r"graph 0: \d+ of \d+ GEMMs, \d+ of \d+ attentions\n", printed.getvalue())


def any_machine(text: str) -> str:
    """Return a text without what differs between machines: the names of picks, times and speed-ups."""
    text = re.sub(rf"\b({'|'.join(BACKENDS)}):\S+", "PICK", text)
    return re.sub(r"\d+ µs, \d+\.\d+ times", "TIME", text)


def test_every_setting_stands_on_the_page_once() -> None:
    groups = (DOCS / "settings.md").read_text(encoding="utf-8").split("\n## ")[1:]
    names = [row[0].strip("`") for group in groups for row in table(group)]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(Settings))


def test_the_glossary_names_the_backends_and_has_each_word_once() -> None:
    groups = (DOCS / "words.md").read_text(encoding="utf-8").split("\n## ")[1:]
    rows = [row for group in groups for row in table(group)]
    words = {row[0]: row[1] for row in rows}
    assert len(words) == len(rows)
    assert re.findall(r"`(\w+)`", words["Backend"]) == list(BACKENDS)
    for word in ("Layout", "Problem", "Epilogue"):
        assert hasattr(gemmtune.problem, word)


def test_the_backends_of_the_document_are_those_of_the_table() -> None:
    assert [row[0].strip("`") for row in table(section(DOCS / "support.md", "Backends"))] == list(BACKENDS)


def test_the_matrix_of_support_knows_what_kernels_there_are() -> None:
    """Every family of the CUDA backend serves an operation that the matrix shows, and torch serves all."""
    rows = {row[0].strip("`"): row[1:] for row in table(section(DOCS / "support.md", "Operations and dtypes"))}
    assert list(rows) == list(OPS)
    assert all(row[0] for row in rows.values())
    column = [name for name in BACKENDS if name != "own"].index("cuda")
    served = {name for name, row in rows.items() if row[column]}
    assert {"mm", "mixed_mm", "bsr_mm", "grouped_mm", "grouped_k_mm", "mixed_grouped_mm"} <= served
    assert len(FAMILIES) == 11


def test_every_public_name_is_in_the_reference() -> None:
    named = set(re.findall(r"^::: gemmtune\.(\w+)", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    errors = {name for name in gemmtune.__all__ if isinstance(getattr(gemmtune, name), type) and name.endswith(("Error", "Choice"))}
    assert set(gemmtune.__all__) - {"__version__"} - errors <= named
    forms = {"grouped_k_mm", "routed_grouped_mm", "combined_grouped_mm"}
    assert (set(OPERATIONS) | set(OPS)) - forms <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_can_be_given(page: Path) -> None:
    for program, *arguments in commands(page):
        check_command(program, arguments)


def check_command(program: str, arguments: list[str]) -> None:
    """Check a command of a page, as far as is quick: it parses, and what it names exists."""
    if program == "gemmtune":
        check_own(arguments)
    elif program == "environment":
        name = arguments[0].partition("=")[0]
        assert not name.startswith("GEMMTUNE_") or name[9:].lower() in {f.name for f in dataclasses.fields(Settings)}, name
    elif program == "pip":
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
            assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"]), arguments
    elif program == "tox":
        check_tox(arguments)
    elif program == "pytest":
        check_pytest(arguments)
    elif program == "python":
        check_script(arguments)
    else:
        assert program in OUTSIDE or (ROOT / program).exists(), program


def check_own(arguments: list[str]) -> None:
    """Check a command of gemmtune. Its problem is stated, and choices are listed with torch's kernels alone."""
    if arguments[0].startswith("-"):
        arguments = ["doctor", *arguments]
    command, rest = cli.cli, arguments
    while isinstance(command, click.Group):
        name, *rest = rest
        command = command.commands[name]
    with contextlib.suppress(click.exceptions.Exit):
        context = command.make_context(name, [word for word in rest if word != "--version"])
        shapes = context.params.get("shapes") or filter(None, [context.params.get("shape")])
        known = {field.name for field in dataclasses.fields(Spec)}
        for shape in (x for x in shapes if re.match(r"\d", x)):
            words = [str(shape).replace("1..", "")]
            for option in command.params:
                if option.name in known and context.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE:
                    value = context.params[option.name]
                    words += [option.opts[0], *([] if getattr(option, "is_flag", False) else [str(value)])]
            done = CliRunner().invoke(cli.cli, ["choices", *words, "--arch", "sm90", "--backends", "aten"])
            assert done.exit_code == 0, (words, done.output)


def check_tox(arguments: list[str]) -> None:
    """Check that the named environments exist."""
    text = (ROOT / "tox.ini").read_text(encoding="utf-8")
    known = {name for found in re.findall(r"^\[testenv:\{?([\w,]+)\}?\]", text, re.MULTILINE) for name in found.split(",")}
    assert set(arguments[arguments.index("-e") + 1].split(",")) <= known, arguments


def check_pytest(arguments: list[str]) -> None:
    """Check that named files and markers exist."""
    text = (ROOT / "tox.ini").read_text(encoding="utf-8")
    for word in arguments:
        assert not word.startswith("tests/") or (ROOT / word).exists(), word
    if "-m" in arguments:
        assert re.search(rf"^    {arguments[arguments.index('-m') + 1]}:", text, re.MULTILINE), arguments


def check_script(arguments: list[str]) -> None:
    """Check that a script exists and knows its options."""
    script = ROOT / arguments[0]
    folder = script if script.is_dir() else script.parent
    assert script.exists(), script
    text = "".join(path.read_text(encoding="utf-8") for path in ([script] if script.is_file() else folder.glob("*.py")))
    for option in (word for word in arguments[1:] if word.startswith("--") and word != "--help"):
        assert f'"{option}' in text or f'/{option}"' in text, option


def test_the_files_of_the_documents_are_read(tmp_path: Path) -> None:
    """Examples of JSON are files of shapes, those of TOML settings, declarations or entry points."""
    for page in PAGES:
        for block in blocks(page, "json"):
            path = tmp_path / "shapes.json"
            path.write_text(json.dumps(json.loads(block.text)))
            assert problems_of_file(str(path), Spec(device_type="cuda"))[0]
        for block in blocks(page, "toml"):
            data = tomllib.loads(block.text)
            if "tool" in data:
                values = data["tool"]["gemmtune"].items()
                assert Settings(**{name: from_toml(value, None, tmp_path) for name, value in values}) != Settings()
            else:
                assert "project" in data or Traits.of(data)


def test_the_first_python_example_is_short() -> None:
    for block in blocks(README, "python"):
        assert len([line for line in block.text.splitlines() if line and not re.match(r"import |from ", line)]) <= 6


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 110


def test_the_readme_installs_the_package_first() -> None:
    first, *_ = [words for words in commands(README) if words[0] == "pip"]
    assert first == ["pip", "install", "."]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_names_that_the_documents_use_exist(page: Path) -> None:
    for name in re.findall(r"\bgemmtune\.([a-z]\w+)(?!\w*\.md)\b(?!\")", page.read_text(encoding="utf-8")):
        assert hasattr(gemmtune, name) or importlib.util.find_spec(f"gemmtune.{name}"), name


def test_the_constraints_pin_everything_that_the_package_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {re.split(r"[=<>]", line)[0].lower().replace("_", "-") for line in lines if not line.startswith("#")}
    wanted = [*PROJECT["dependencies"], *(name for extra in PROJECT["optional-dependencies"].values() for name in extra)]
    names = {re.split(r"[^\w-]", line)[0].lower() for line in wanted} - {"gemmtune"}
    assert names <= pinned, names - pinned


def test_an_extra_brings_what_the_suite_imports() -> None:
    assert {re.split(r"\W", x)[0] for x in PROJECT["optional-dependencies"]["conformance"]} == {"pytest", "hypothesis"}


def test_every_extra_is_on_the_page_of_the_installation() -> None:
    assert {row[0].strip("`") for row in table(section(DOCS / "install.md", "Extras"))} == set(PROJECT["optional-dependencies"])


def test_the_source_distribution_has_the_files_of_each_folder() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    kept = {words[1]: {x[1:] for x in words[2:]} for words in map(str.split, lines) if words[0] == "recursive-include"}
    assert {"docs", "examples", "tests", "benchmarks"} <= set(kept)
    for folder, suffixes in kept.items():
        files = [x for x in (ROOT / folder).rglob("*.*") if x.is_file() and "." not in str(x.relative_to(ROOT).parent)]
        assert {x.suffix for x in files if not x.name.startswith(".")} - {".pyc", ".so"} <= suffixes, folder


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_headings_lead_to_one(path: Path) -> None:
    for page, heading in re.findall(r"\]\(([\w-]*(?:\.md)?)#([\w-]+)\)", path.read_text(encoding="utf-8")):
        text = (path.parent / page if page else path).read_text(encoding="utf-8")
        if text.startswith("--8<--"):
            text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
        slugs = {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        assert heading in slugs, (page, heading)


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    assert sorted(re.findall(r"- (?:Overview: )?([\w-]+\.md)", text)) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("path", [*DOCUMENTS, *(ROOT / name for name in TOOLS)], ids=lambda path: path.name)
def test_nothing_names_a_path_outside_the_repository(path: Path) -> None:
    text = re.sub(r"^```dockerfile\n.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    # An absolute path, or one that leaves the repository, stands alone: not in a word, an address or a variable.
    assert not re.findall(r"(?<![\w.:/$}~])/\w+/\S+|(?<!\w)\.\./\S+", text.removeprefix("#!/usr/bin/env bash"))


def test_the_modules_that_pages_name_exist() -> None:
    """Check paths whose first folder is one of the repository or of the package; audits name files of other people."""
    named = {(page.name, x) for page in PAGES for x in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|h|jinja))`", page.read_text("utf-8"))}
    roots = (ROOT, ROOT / "gemmtune", ROOT / "gemmtune" / "backends", ROOT / "gemmtune" / "integration")
    ours = {x for x in named if any((root / x[1].partition("/")[0]).is_dir() for root in roots)}
    assert len(ours) > 20
    assert not {x for x in ours if not any((root / x[1]).is_file() for root in roots)}


def test_the_triton_families_of_the_document_are_the_templates() -> None:
    places = {Path(row[0].strip("`")).parts[0] for row in table(section(DOCS / "kernels.md", "The Triton families"))}
    folder = ROOT / "gemmtune" / "backends" / "triton"
    assert all((folder / place).exists() for place in places)
    assert {path.parent.name for path in folder.glob("*/*.jinja")} <= places


def test_the_cuda_families_of_the_document_are_those_of_the_table() -> None:
    places = [row[0].strip("`/") for row in table(section(DOCS / "kernels.md", "The CUDA families"))]
    assert places == sorted(type(family).__module__.split(".")[-2] for family in FAMILIES)


def test_the_modules_in_the_architecture_are_those_of_the_package() -> None:
    parts = [row[0].strip("`").rstrip("/") for row in table(section(DOCS / "architecture.md", "Modules"))]
    package = {p.stem for p in (ROOT / "gemmtune").iterdir() if (p.suffix == ".py" or (p / "__init__.py").exists())}
    assert sorted(parts) == sorted(package - {"__init__", "__main__", "version"})
    assert parts == sorted(parts, key=layer_of), "not in the order of LAYERS"
