"""The command line as a whole: usage, errors, exit statuses, interruption."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import warnings

import click
import pytest
import torch
from store_cases import row

from gemmtune import __version__, cli, settings
from gemmtune.cli import commands, words
from gemmtune.cli.output import warnings_as_lines
from gemmtune.device import PRESETS
from gemmtune.errors import StoreError
from gemmtune.problem.dtypes import DTYPES, FLOAT8, FLOAT8_FNUZ, dtype_info, dtype_name
from gemmtune.problem.fused import NAMES
from gemmtune.problem.grouped_compositions import GATES
from gemmtune.problem.operations import OPERATIONS
from gemmtune.selector.table import DEFAULT_ROWS
from gemmtune.store.store import Store, open_store


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"gemmtune, version {__version__}\n"


def test_help_imports_no_torch():
    program = (
        "import sys\n"
        "from gemmtune import cli\n"
        "helps = [[], ['--version'], ['--help'], *([name, '--help'] for name in cli.cli.commands)]\n"
        "print([cli.run(words) for words in helps][1:] == [0] * len(helps[1:]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "True False"


@pytest.mark.parametrize("words", [[], ["-q"], ["--"]])
def test_a_group_without_a_command_prints_its_help_once(capsys, words):
    assert cli.run(words) == 2
    printed = capsys.readouterr()
    assert (printed.out.count("Usage:"), printed.err) == (1, "")


def every_command():
    """Every command with its words, those of groups included."""

    def within(words, command):
        yield words, command
        for name, inner in getattr(command, "commands", {}).items():
            yield from within([*words, name], inner)

    return [found for found in within([], cli.cli) if found[0]]


def test_every_command_has_the_options_about_its_output():
    for words_, command in every_command():
        names = {name for parameter in command.params for name in parameter.opts}
        assert {"-q", "--quiet", "-v", "--verbose"} <= names, words_
        assert "--json" in names or isinstance(command, click.Group), words_


def test_each_command_has_a_short_first_sentence():
    """The list of commands has 60 columns for it on a terminal of 80."""
    for words_, command in every_command():
        assert not command.get_short_help_str(60).endswith("..."), words_


def test_every_dtype_option_takes_every_name_of_a_dtype():
    for words_, command in every_command():
        for option in (x for x in command.params if "dtype" in x.name and isinstance(x.type, click.Choice)):
            legal = option.type.choices
            for name in (n for n in legal if n != "tf32"):
                dtype = getattr(torch, name)
                for other in (name.upper(), str(dtype), dtype_info(dtype).short):
                    assert option.type.convert(other, option, None) == name, (words_, other)


@pytest.mark.parametrize(
    ("level", "shown"), [([], "warning: old\n"), (["-q"], ""), (["-v"], "warning: old\ndetail\n"), (["-v", "-q"], "")]
)
def test_quiet_silences_warnings_and_the_log(capsys, own_store, monkeypatch, level, shown):
    def warn(**_):
        warnings.warn("old", UserWarning, stacklevel=1)
        logging.getLogger("gemmtune").debug("detail")
        return 0

    monkeypatch.setattr("gemmtune.cli.stores.show", warn)
    before = logging.getLogger("gemmtune").level
    assert cli.run(["show", *level]) == 0
    assert capsys.readouterr().err == shown
    assert logging.getLogger("gemmtune").level == before


def test_option_words_match_the_package():
    assert tuple(PRESETS) == words.ARCHITECTURES
    assert [op for op in words.OPS if op != "int_mm_mul"] == list(OPERATIONS)
    assert set(words.OPS) == {*OPERATIONS, *NAMES}
    assert tuple(GATES) == words.GATES
    assert tuple(map(dtype_name, (torch.int8, torch.uint8, *FLOAT8))) == words.WEIGHT_DTYPES
    assert (*map(dtype_name, DTYPES), "tf32", "int8", *map(dtype_name, (*FLOAT8, *FLOAT8_FNUZ))) == words.DTYPES
    assert commands.TABLE_ROWS == DEFAULT_ROWS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("export {store}", "FILE: got {store}, a store, expected another file: its measurements would be lost"),
        ("show --json {store}", "--json: got {store}, a store"),
        ("tune --shapes shapes.json --json ./shapes.json", "--json: got ./shapes.json, expected another file than --shapes"),
        ("record -o link.py -- python shapes.json", "-o: got link.py, expected another file than PROGRAM"),
        ("report shapes.json --md shapes.json", "--md: got shapes.json, expected another file than FILES"),
        ("report --html new --md new", "--md: got new, expected another file than --html"),
        ("conformance shapes.json:f --json shapes.json", "--json: got shapes.json, expected another file than GEMM"),
        ("conformance own.ops:f --html own/ops.py", "--html: got own/ops.py, expected another file than GEMM"),
        ("judge own --json own/__init__.py", "--json: got own/__init__.py, expected another file than TARGET"),
        ("report --html -", "Invalid value for '--html': got '-', which is not possible here"),
        ("bundle -o -", "Invalid value for '-o' / '--output': got '-', which is not possible here"),
    ],
)
def test_no_output_overwrites_a_store_or_what_the_command_reads(capsys, own_store, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Store.open(own_store).close()
    (tmp_path / "own").mkdir()
    (tmp_path / "shapes.json").write_text("kept")
    (tmp_path / "link.py").symlink_to("shapes.json")
    before = own_store.read_bytes()
    assert cli.run(words.format(store=own_store).split()) == 2
    assert message.format(store=own_store) in capsys.readouterr().err
    assert (own_store.read_bytes(), (tmp_path / "shapes.json").read_text()) == (before, "kept")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("settings search >&-", 0, ""),
        ("--help > /dev/full", 1, "error: standard output: got No space left on device, expected to write the result there\n"),
    ],
)
def test_standard_output_that_cannot_be_written(words, status, message):
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m gemmtune {words}"], stderr=subprocess.PIPE, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (status, message)


@pytest.mark.parametrize("name", ["tune", "choices", "show", "export", "import", "merge", "doctor", "bundle"])
def test_every_command_has_help_and_json(capsys, name):
    assert cli.run([name, "--help"]) == 0
    assert "--json FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune"], "got no shapes, expected MxNxK or BxMxNxK, for instance 16x4096x4096, or --shapes FILE"),
        (["tune", "16x4096"], "shape: got '16x4096', expected MxNxK or BxMxNxK with whole numbers, for instance 16x4096x4096"),
        (["tune", "9" * 20 + "x2x3"],
         "shape: got '99999999999999999999x2x3', expected MxNxK or BxMxNxK with whole numbers of at most 18 digits"),
        (["tune", "1x2x3", "--op", "bmm"], "shape 1x2x3: got 3 sizes for bmm, expected BxMxNxK"),
        (["choices", "1x2"], "shape: got '1x2', expected MxNxK or BxMxNxK with whole numbers, for instance 16x4096x4096"),
        (["tune", "1x2x3", "--dtype", "int3"], "Invalid value for '--dtype': 'int3' is not one of"),
        (["tune", "1x2x3", "--json", "nowhere/x.json"],
         "Invalid value for '--json': got 'nowhere/x.json', but the folder 'nowhere' does not exist; make it, or name another"),
        (["show", "--json", "."], "Invalid value for '--json': got '.', which is a folder; expected a file to write, or -"),
        (["tune", "1x2x3", "--device", "tpu"], "--device: got 'tpu', expected cpu, cuda or cuda:N, for instance cuda:1"),
        (["tune", "1x2x3", "--backends", "tirton"],
         "--backends: got 'tirton', expected names out of aten, cublaslt, triton, cutlass, ck, cuda, cpp, own"),
        (["perf-gate", "1x2x3", "--backends", ","], "--backends: got nothing, expected at least one name of the table of backends"),
        (["choices", "1x2x3", "--arch", "sm1"],
         "--arch: got 'sm1', expected one of sm75, sm80, sm86, sm89, sm90, sm100, sm120, gfx90a, gfx942"),
        (["build", "1x2x3", "--arch", "sm1"], "--arch: got 'sm1', expected one of"),
        (["choices", "1x2x3", "--allow", "("], "--allow: got '(', expected a regular expression"),
        (["tune", "1x2x3", "--deny", "["], "--deny: got '[', expected a regular expression"),
        (["tune", "1x2x3", "--op", "mixed_mm", "--dtype-b", "int4"],
         "Invalid value for '--dtype-b': got 'int4', which is a way to pack b and not a dtype; give --encoding int4"),
        (["choices", "1x2x4", "--op", "mixed_mm", "--encoding", "int4", "--dtype-b", "int8"],
         "shape 1x2x4: dtype_b: got 'int8' with encoding int4, expected uint8 or nothing"),
        (["choices", "1x2x3", "--with", "nosuch:fn"], "--with: nosuch:fn: there is no module 'nosuch' here"),
        (["tune", "-4x64x64"], "shape: got one that begins with '-4', expected whole numbers, such as 16x4096x4096"),
        (["choices", "1x2x3", "-Q"], "No such option"),
        (["frobnicate"], "No such command 'frobnicate'."),
        (["export"], "Missing argument 'FILE'."),
    ],
    ids=["no-shape", "two-sizes", "digits", "bmm-3", "choices", "dtype", "json-folder",
         "json-is-folder", "device", "backend", "no-backend", "arch",
         "arch-to-build", "allow", "deny", "dtype-int4", "int4-in-int8", "with", "minus", "option", "command", "argument"],
)  # fmt: skip
def test_wrong_usage_exits_with_2_and_names_the_expected_input(capsys, arguments, message):
    assert cli.run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Usage: gemmtune")
    assert f"error: {message}" in printed.err


@pytest.mark.parametrize("text", ["{", "[]", '[{"m": 1}]', '[{"m": 1, "n": 2, "k": 3, "dtype": "int3"}]'])
def test_a_malformed_file_of_shapes_is_wrong_usage(capsys, tmp_path, text):
    path = tmp_path / "shapes.json"
    path.write_text(text)
    assert cli.run(["tune", "--shapes", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--shapes", "nowhere.json"], "--shapes: cannot read nowhere.json: No such file or directory"),
        (["merge", "nowhere.sqlite"], "cannot read nowhere.sqlite: No such file or directory"),
    ],
    ids=["shapes", "merge"],
)
def test_failure_exits_with_1_and_one_line(capsys, own_store, arguments, message):
    assert cli.run(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {message}")
    assert "Traceback" not in printed.err


def test_a_wrong_environment_variable_is_an_error(capsys, monkeypatch):
    monkeypatch.setenv("GEMMTUNE_SERCH", "quick")
    settings.from_environment.cache_clear()
    try:
        assert cli.run(["show"]) == 1
    finally:
        monkeypatch.undo()
        settings.from_environment.cache_clear()
    assert capsys.readouterr().err.startswith(
        "error: unknown environment variable GEMMTUNE_SERCH; the known ones are GEMMTUNE_BACKENDS"
    )


def test_a_file_that_cannot_be_written_after_all_is_an_error(capsys, own_store, tmp_path, monkeypatch):
    path = tmp_path / "x.json"

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gemmtune.cli.output.Path.write_text", refuse)
    assert cli.run(["show", "--json", str(path)]) == 1
    assert capsys.readouterr().err == f"error: --json: cannot write {path}: Permission denied\n"


def test_warnings_are_lines_without_the_place_in_the_source(capsys):
    before = warnings.showwarning
    with warnings_as_lines():
        warnings.simplefilter("always")
        warnings.warn("the store cannot be written", RuntimeWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: the store cannot be written\nwarning: old (DeprecationWarning)\n"
    assert warnings.showwarning is before


def test_an_error_of_the_package_is_one_line_and_exit_1(capsys, monkeypatch):
    def fail(_settings):
        raise StoreError("store: got a fault, expected none")

    monkeypatch.setattr("gemmtune.cli.stores.open_store", fail)
    assert cli.run(["show"]) == 1
    assert capsys.readouterr() == ("", "error: store: got a fault, expected none\n")


def test_ctrl_c_while_tuning_exits_with_130_and_says_where_the_measurements_are(capsys, monkeypatch, own_store):
    """A tuning is stopped before its first measurement, after one, when told to measure all anew, and where no file takes them."""

    made = []

    def run(*_, **words):
        open_store(words["settings"]).put(made)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("gemmtune.cli.tune.run_tuning", run)
    kept = f"measurements are kept in {own_store}"
    cases = ((None, "nothing was measured yet"), (6.0, f"{kept}; the same command goes on from there"), (7.0, kept))
    for time_us, text in cases:
        made[:] = [row(time_us=time_us)] if time_us else []
        force = ["--force"] * (text == kept)
        assert cli.run(["tune", "64x64x64", "--device", "cpu", *force]) == 130
        assert capsys.readouterr().err == f"interrupted: {text}\n"
    monkeypatch.setattr(Store, "writable", False)
    monkeypatch.setattr(Store, "trouble", "the disk is full")
    made[:] = [row(time_us=8.0)]
    assert cli.run(["tune", "64x64x64", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "interrupted: measurements are lost: the disk is full\n"


def test_the_module_runs_as_the_command_does():
    done = subprocess.run([sys.executable, "-m", "gemmtune", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"gemmtune, version {__version__}\n"


def test_ctrl_c_while_the_command_is_imported_is_no_traceback():
    program = (
        "import os, runpy, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == module:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "for module in sys.argv[1:]:\n"
        "    if not (child := os.fork()):\n"
        "        sys.meta_path.insert(0, Interrupting())\n"
        "        sys.argv = ['gemmtune', '--help']\n"
        "        runpy.run_module('gemmtune', run_name='__main__')\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    words = [sys.executable, "-c", program, "gemmtune.cli", "gemmtune.settings", "click", "gemmtune.cli.options", "no module"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr == "interrupted\n" * 4
    assert done.stdout.splitlines()[:4] == ["130"] * 4
    assert done.stdout.endswith("\n0\n")


@pytest.mark.turn(2, 8)
def test_closed_pipe_prints_no_traceback(own_store, tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m gemmtune doctor --json - | head -c 1", shell=True, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr


@pytest.mark.turn(2, 8)
@pytest.mark.parametrize(("words", "encoding"), [("choices", "latin-1"), ("choices --json -", "utf-8")])
def test_output_suits_an_encoding_without_its_characters(words, encoding, tmp_path):
    words = [*words.split(), "8x8x8", "--dtype", "float32", "--with", "caf\u0119.py:f"]
    (tmp_path / "caf\u0119.py").write_text("def f(a, b):\n    return a @ b\n")
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "gemmtune", *words]
    done = subprocess.run(command, capture_output=True, check=True, env=environment, cwd=tmp_path, timeout=120)
    assert ("caf?" if encoding == "latin-1" else "caf\u0119") in done.stdout.decode(encoding)


def test_json_of_a_command_is_all_there_is_on_standard_output(capsys, own_store):
    assert cli.run(["show", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_settings_are_shown_with_their_sources(capsys, own_store):
    assert cli.run(["settings", "store_path", "GEMMTUNE_SEARCH", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "store_path": {"value": str(own_store), "source": "program"},
        "search": {"value": "default", "source": "default"},
    }
    assert cli.run(["settings", "--changed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["store_path", repr(str(own_store)), "program"] for line in lines)
    assert not any(line.endswith(" default") for line in lines)
    assert cli.run(["settings", "search", "--changed"]) == 0
    assert capsys.readouterr().out == "nothing differs from the defaults\n"
    assert cli.run(["settings", "serch"]) == 2
    assert "settings: got 'serch', expected names out of backends, " in capsys.readouterr().err


@pytest.mark.parametrize("json_first", [True, False])
def test_standard_output_has_json_alone_to_the_end_of_the_process(json_first: bool) -> None:
    program = """
from gemmtune.cli import output
if {json_first}:
    with output.reserved_stdout():
        print("meanwhile")
        output.print_json("[]")
print("after")
output.seal_stdout()
print("at the end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program.format(json_first=json_first)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (("[]\nafter\n", "meanwhile\nat the end\n") if json_first else ("after\nat the end\n", ""))
