"""Settings: defaults, patch, the environment, messages for illegal values."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gemmtune import settings
from gemmtune.cache import cache_dir
from gemmtune.device import detect
from gemmtune.errors import SettingsError
from gemmtune.selector.offers import enabled_backends
from gemmtune.settings import Settings

ILLEGAL: dict[str, tuple[dict[str, object], str]] = {
    "no backend": (
        {"backends": ()},
        "backends: got nothing, expected at least one name of the table of backends, or None for all",
    ),
    "tune": ({"tune": "always"}, "tune: got 'always', expected one of on_miss, never, predict, force"),
    "search": ({"search": "fast"}, "search: got 'fast', expected one of quick, default, exhaustive"),
    "timing": ({"timing": None}, "timing: got None, expected one of graph, spaced, eager"),
    "threads": ({"compile_threads": -1}, "compile_threads: got -1, expected a whole number of at least 0"),
    "timeout": ({"choice_timeout_s": 0}, "choice_timeout_s: got 0, expected a number of at least 0.1"),
    "type": ({"compile_timeout_s": "5"}, "compile_timeout_s: got '5', expected a number of at least 0.1"),
    "bool": ({"cublaslt_top_k": True}, "cublaslt_top_k: got True, expected a whole number of at least 0"),
    "fraction": ({"compile_threads": 1.5}, "compile_threads: got 1.5, expected a whole number of at least 0"),
    "switch": ({"verify": "0"}, "verify: got '0', expected True or False"),
    "regex": (
        {"choice_allowlist_regex": "mm_("},
        "choice_allowlist_regex: got 'mm_(', expected a regular expression of Python's re module (missing ), unterminated "
        "subpattern at position 3); put a backslash before a literal special character",
    ),
    "huge regex": (
        {"choice_denylist_regex": "a{99999999999}"},
        "choice_denylist_regex: got 'a{99999999999}', expected a regular expression of Python's re module (the repetition number "
        "is too large); put a backslash before a literal special character",
    ),
    "a function that no other process finds": (
        {"extra_choices": ["__main__:matmul"]},
        "extra_choices: got '__main__:matmul', expected package.module:function, for instance mylib.ops:matmul, or such a function "
        "itself; worker processes import it, so it has to be in a module instead of the main program",
    ),
    "no regex": (
        {"choice_denylist_regex": ["aten"]},
        "choice_denylist_regex: got ['aten'], expected a regular expression as text, or None",
    ),
    "size": ({"template_min_gemm_size": -1}, "template_min_gemm_size: got -1, expected a whole number of at least 0"),
    "no size": ({"template_min_gemm_size": None}, "template_min_gemm_size: got None, expected a whole number of at least 0"),
    "cap": ({"max_profiling_configs": 0}, "max_profiling_configs: got 0, expected a whole number of at least 1, or None"),
    "nan": ({"compile_timeout_s": float("nan")}, "compile_timeout_s: got nan, expected a number of at least 0.1"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_values_list_the_legal_ones(name: str) -> None:
    changes, message = ILLEGAL[name]
    before = settings.current()
    with pytest.raises(SettingsError) as caught, settings.patch(**changes):
        pass
    assert str(caught.value) == message
    assert settings.current() is before


def test_every_switch_is_checked() -> None:
    for field in dataclasses.fields(Settings):
        if isinstance(field.default, bool):
            with pytest.raises(SettingsError, match=f"^{field.name}: got None, expected True or False$"):
                dataclasses.replace(Settings(), **{field.name: None})


def test_an_unknown_setting_lists_the_known_ones() -> None:
    with pytest.raises(SettingsError) as caught, settings.patch(backend="aten"):
        pass
    known = ", ".join(f.name for f in dataclasses.fields(Settings))
    assert str(caught.value) == f"unknown setting 'backend'; the settings are {known}"


def test_extra_choices_become_import_paths() -> None:
    with settings.patch(extra_choices=[torch.nn.functional.linear, torch.mm, settings, "a.b:c"]) as chosen:
        assert chosen.extra_choices == ("torch._C._nn:linear", "torch:mm", "gemmtune.settings", "a.b:c")
    with settings.patch(extra_choices=test_patches_nest_and_end) as chosen:
        assert chosen.extra_choices == (f"{__name__}:test_patches_nest_and_end",)
    with pytest.raises(SettingsError, match="extra_choices: got <function"):
        settings.patch(extra_choices=[lambda a, b: a @ b]).__enter__()


def test_patches_nest_and_end() -> None:
    outside = settings.current()
    with settings.patch(search="quick") as outer:
        assert settings.current() is outer
        with settings.patch(backends=["aten"]) as inner:
            assert (settings.current(), inner.search, inner.backends) == (inner, "quick", ("aten",))
        assert settings.current() is outer
    assert settings.current() is outside


def test_a_patch_ends_with_an_exception() -> None:
    outside = settings.current()
    with pytest.raises(KeyError), settings.patch(search="quick"):
        raise KeyError
    assert settings.current() is outside


def test_a_patch_holds_for_its_thread_only() -> None:
    seen: list[str] = []
    with settings.patch(search="exhaustive"):
        thread = threading.Thread(target=lambda: seen.append(settings.current().search))
        thread.start()
        thread.join()
        assert settings.current().search == "exhaustive"
    assert seen == [settings.from_environment().search]


def test_use_puts_whole_settings_in_force() -> None:
    whole = Settings(search="quick", cache_dir="/nowhere")
    with settings.patch(tune="never"), settings.use(whole) as used:
        assert used is whole
        assert settings.current() is whole


def test_tokens_are_equal_exactly_for_equal_settings() -> None:
    assert Settings(search="quick").token == Settings(search="quick").token
    assert Settings(search="quick").token != Settings(search="exhaustive").token
    with settings.patch(search="quick") as patched:
        assert settings.token() == patched.token
    assert settings.token() == settings.current().token


def test_settings_are_frozen_and_hashable() -> None:
    assert hash(Settings()) == hash(Settings())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().search = "quick"  # type: ignore[misc]


def test_folders(tmp_path: Path) -> None:
    made = Settings(cache_dir=str(tmp_path))
    assert (made.folder, made.store_file) == (tmp_path, tmp_path / "store.sqlite")
    assert dataclasses.replace(made, store_path=str(tmp_path / "x.db")).store_file == tmp_path / "x.db"
    assert Settings().folder.name == "gemmtune"
    with settings.patch(cache_dir=str(tmp_path)):
        assert cache_dir("cpp", "so") == tmp_path / "cpp" / "so"
    assert (tmp_path / "cpp" / "so").is_dir()


def test_torchs_switch_for_deterministic_algorithms_holds_for_the_settings() -> None:
    with settings.patch(deterministic=False) as allowed:
        assert settings.current() is allowed
        assert settings.token() == allowed.token
        torch.use_deterministic_algorithms(True)
        try:
            assert settings.current() == dataclasses.replace(allowed, deterministic=True)
            assert settings.token() == settings.current().token != allowed.token
        finally:
            torch.use_deterministic_algorithms(False)
        assert settings.current() is allowed


def test_compile_processes() -> None:
    assert Settings(compile_threads=3).compile_processes == 3
    assert Settings().compile_processes == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Settings)])
def test_every_setting_is_documented(field: str) -> None:
    lines = Path(settings.__file__).read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith(f"    {field}: ")]
    assert lines[at + 1].strip().startswith('"""')


PROGRAM = """
from gemmtune import settings
from gemmtune.errors import SettingsError
try:
    print(settings.current())
except SettingsError as error:
    print(error)
"""


def in_environment(**variables: str) -> str:
    """Return the settings, or the error, that a new process with these variables prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GEMMTUNE_")} | variables
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_a_process_reads_its_environment() -> None:
    expected = Settings(
        backends=("aten", "triton"),
        fallback_to_aten=False,
        tune="never",
        compile_threads=3,
        choice_timeout_s=1.5,
        log_file="/tmp/log.jsonl",
        choice_allowlist_regex="^cpp|[,x]",
        template_min_gemm_size=4096,
    )
    assert str(expected) == in_environment(
        GEMMTUNE_BACKENDS="aten, triton",
        GEMMTUNE_FALLBACK_TO_ATEN="0",
        GEMMTUNE_TUNE="never",
        GEMMTUNE_COMPILE_THREADS="3",
        GEMMTUNE_CHOICE_TIMEOUT_S="1.5",
        GEMMTUNE_LOG_FILE="/tmp/log.jsonl",
        GEMMTUNE_STORE_PATH="",
        GEMMTUNE_CHOICE_ALLOWLIST_REGEX="^cpp|[,x]",
        GEMMTUNE_CHOICE_DENYLIST_REGEX="",
        GEMMTUNE_TEMPLATE_MIN_GEMM_SIZE="4096",
        GEMMTUNE_MAX_PROFILING_CONFIGS="",
    )


BAD_VARIABLES = {
    "unknown": (
        "GEMMTUNE_BACKEND",
        "aten",
        "unknown environment variable GEMMTUNE_BACKEND; the known ones are GEMMTUNE_BACKENDS, ",
    ),
    "bool": ("GEMMTUNE_VERIFY", "maybe", "GEMMTUNE_VERIFY: got 'maybe', expected 0 or 1"),
    "number": ("GEMMTUNE_COMPILE_THREADS", "many", "GEMMTUNE_COMPILE_THREADS: got 'many', expected a whole number"),
    "empty number": ("GEMMTUNE_COMPILE_THREADS", "", "GEMMTUNE_COMPILE_THREADS: got '', expected a whole number"),
    "cap": ("GEMMTUNE_MAX_PROFILING_CONFIGS", "few", "GEMMTUNE_MAX_PROFILING_CONFIGS: got 'few', expected a whole number"),
    "regex": ("GEMMTUNE_CHOICE_DENYLIST_REGEX", "*", "GEMMTUNE_CHOICE_DENYLIST_REGEX: got '*', expected a regular"),
    "choice": ("GEMMTUNE_TUNE", "always", "GEMMTUNE_TUNE: got 'always', expected one of on_miss, never, predict, force"),
    "least": ("GEMMTUNE_CUBLASLT_TOP_K", "-1", "GEMMTUNE_CUBLASLT_TOP_K: got -1, expected a whole number of at least 0"),
}


@pytest.mark.parametrize("name", BAD_VARIABLES)
def test_bad_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, value, message = BAD_VARIABLES[name]
    monkeypatch.setenv(variable, value)
    settings.from_environment.cache_clear()
    try:
        with pytest.raises(SettingsError) as caught:
            settings.current()
        assert str(caught.value).startswith(message)
    finally:
        monkeypatch.undo()
        settings.from_environment.cache_clear()


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A working folder whose pyproject.toml counts, without variables."""
    for variable in [name for name in os.environ if name.startswith("GEMMTUNE_")]:
        monkeypatch.delenv(variable)
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    settings.from_environment.cache_clear()
    yield tmp_path / "pyproject.toml"
    monkeypatch.undo()
    settings.from_environment.cache_clear()


TABLE = """
[tool.gemmtune]
backends = ["aten", "cpp"]
search = "quick"
verify = false
choice_timeout_s = 5
store_path = "picks/store.sqlite"
cache_dir = "/somewhere"
"""


def test_a_table_of_pyproject_toml_sets_what_no_variable_does(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside.write_text(TABLE)
    monkeypatch.setenv("GEMMTUNE_SEARCH", "exhaustive")
    assert settings.current() == Settings(
        backends=("aten", "cpp"), search="exhaustive", verify=False, choice_timeout_s=5, cache_dir="/somewhere",
        store_path=str(outside.parent / "picks/store.sqlite"),
    )  # fmt: skip
    with settings.patch(rows="exact"):
        sources = settings.sources()
    named = {name: source for name, source in sources.items() if source != settings.DEFAULT}
    assert named == dict.fromkeys(("backends", "verify", "choice_timeout_s", "store_path", "cache_dir"), str(outside)) | {
        "search": "GEMMTUNE_SEARCH",
        "rows": "program",
    }


def test_the_nearest_table_counts_alone(outside: Path) -> None:
    outside.write_text(TABLE)
    inner = outside.parent / "inner" / "pyproject.toml"
    inner.write_text('[project]\nname = "gemmtune-user"\n')  # it has no table
    assert settings.current().search == "quick"
    inner.write_text("[tool.gemmtune]\nnative = false\n")
    settings.from_environment.cache_clear()
    assert settings.current() == Settings(native=False)


BAD_TABLES = {
    "serch = 'quick'": " [tool.gemmtune]: unknown setting 'serch'; the settings are backends, ",
    "search = 'fast'": " [tool.gemmtune]: search: got 'fast', expected one of quick, default, exhaustive",
    "backends = 'aten'": " [tool.gemmtune]: backends: got 'aten', expected a list of texts, or None",
    "store_path = 3": " [tool.gemmtune]: store_path: got 3, expected a path as text, or None",
    "verify = 1": " [tool.gemmtune]: verify: got 1, expected True or False",
    "backends = ['cpp', 3]": " [tool.gemmtune]: backends: got 3, expected names of backends as texts",
    "first_call_budget_s = 0": " [tool.gemmtune]: first_call_budget_s: got 0, expected a number of at least 0.1, or None",
    "search quick": ": got text that is not TOML (",
}


@pytest.mark.parametrize("line", BAD_TABLES)
def test_a_wrong_line_is_an_error_that_names_the_file(outside: Path, line: str) -> None:
    outside.write_text(f"[tool.gemmtune]\n{line}\n")
    with pytest.raises(SettingsError) as caught:
        settings.current()
    assert str(caught.value).startswith(f"{outside}{BAD_TABLES[line]}")


def test_a_file_that_others_can_change_is_ignored_with_a_warning(outside: Path) -> None:
    outside.write_text(TABLE)
    outside.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="is ignored, because others than you can change the file"):
        assert settings.current() == Settings()


def test_a_table_in_another_encoding_is_an_error(outside: Path) -> None:
    outside.write_bytes("[project]\nauthors = 'Jürgen'\n[tool.gemmtune]\nsearch = 'quick'\n".encode("latin-1"))
    with pytest.raises(SettingsError, match="got text that is not TOML \\('utf-8' codec"):
        settings.current()


def test_a_pipe_is_no_project_file(outside: Path) -> None:
    os.mkfifo(outside)
    assert settings.current() == Settings()


def test_other_files_that_are_not_toml_do_not_matter(outside: Path) -> None:
    outside.write_text("gemmtune, but no TOML")
    assert settings.current() == Settings()


def test_disable_is_torch_for_every_other_setting(outside: Path) -> None:
    with settings.patch(search="quick", choice_denylist_regex="aten", cache_dir="/x", disable=True) as given:
        now = settings.current()
        assert (now.tune, now.backends, now.native, now.choice_denylist_regex) == ("never", ("aten",), False, None)
        assert (now.cache_dir, settings.given()) == ("/x", given)
        assert settings.token() == now.token
        assert {settings.sources()[name] for name in ("tune", "backends", "native")} == {"disable"}
        with settings.patch(disable=False):
            assert settings.current().search == "quick"


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("False", False)])
def test_booleans_of_the_environment(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMTUNE_VERIFY", text)
    settings.from_environment.cache_clear()
    try:
        assert settings.current().verify is value
    finally:
        monkeypatch.undo()
        settings.from_environment.cache_clear()


def test_environment_is_changed_for_a_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_A", "before")
    monkeypatch.delenv("GEMM_B", raising=False)
    with settings.environment({"GEMM_A": None, "GEMM_B": "new"}):
        assert ("GEMM_A" in os.environ, os.environ["GEMM_B"]) == (False, "new")
    assert (os.environ["GEMM_A"], "GEMM_B" in os.environ) == ("before", False)


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("1", True), ("", False), ("0", False), ("False", False)])
def test_in_continuous_integration(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("CI", value)
    assert settings.in_continuous_integration() is expected


def test_unknown_backend_is_an_error_at_use() -> None:
    with settings.patch(backends=("aten", "rocm")) as named, pytest.raises(SettingsError) as caught:
        enabled_backends(detect("cpu"), named)
    assert (
        str(caught.value)
        == "backends (GEMMTUNE_BACKENDS): got 'rocm', expected names out of aten, cublaslt, triton, cutlass, ck, cuda, cpp, own"
    )


def test_the_token_of_one_process_does_not_travel_to_another() -> None:
    settings = Settings(search="quick")
    assert settings.token == Settings(search="quick").token
    arrived = pickle.loads(pickle.dumps(settings))
    assert arrived == settings
    assert "token" not in vars(arrived)


def test_a_patch_is_entered_again_and_inside_of_itself() -> None:
    block = settings.patch(search="quick")
    for _ in range(2):
        with block as outer, settings.patch(search="exhaustive"), block as inner:
            assert (outer.search, inner.search, settings.given().search) == ("quick", "quick", "quick")
        assert settings.given().search == "default"


def test_tasks_and_threads_leave_their_own_entry_of_a_patch() -> None:
    block = settings.patch(search="quick")

    async def inside(seconds: float) -> tuple[str, str]:
        with block:
            await asyncio.sleep(seconds)
            found = settings.given().search
        return found, settings.given().search

    async def both() -> list[tuple[str, str]]:
        return await asyncio.gather(inside(0.001), inside(0.01), inside(0.002))

    with ThreadPoolExecutor(2) as pool:
        elsewhere = [pool.submit(asyncio.run, both()) for _ in range(2)]
    assert [*asyncio.run(both()), *(x for found in elsewhere for x in found.result())] == [("quick", "default")] * 9
    with block:
        pass
    assert settings.given().search == "default"


def test_a_patch_decorates_functions_and_coroutines() -> None:
    """The patch holds while the coroutine runs, not while it is made."""

    @settings.patch(search="quick")
    async def awaited(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return settings.given().search

    @settings.patch(search="quick")
    def called() -> str:
        return settings.given().search

    async def both() -> tuple[str, str, str]:
        first, second = await asyncio.gather(awaited(0.002), awaited(0.001))
        return first, second, settings.given().search

    assert asyncio.run(both()) == ("quick", "quick", "default")
    assert (called(), settings.given().search) == ("quick", "default")


def test_a_patch_decorates_no_generator() -> None:
    with pytest.raises(SettingsError, match=r"got the generator function .*numbers, expected a function or coroutine"):

        @settings.patch(search="quick")
        def numbers() -> Iterator[int]:
            yield 1
