"""Settings, each from a block of ``patch``, else from a variable GEMMTUNE_*, else from pyproject.toml, else its default.
Only this module reads the environment.

    with gemmtune.settings.patch(backends=("aten", "triton"), search="quick"):
        gemmtune.tune(problem)
"""

import contextvars
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_type_hints

import platformdirs

from . import setting_types as kinds
from .blocks import Block
from .errors import SettingsError
from .project_file import find_table

Tune = Literal["on_miss", "never", "predict", "force"]
Search = Literal["quick", "default", "exhaustive"]
Timing = Literal["graph", "spaced", "eager"]

S = TypeVar("S", bound="Settings | None")

ENVIRONMENT_PREFIX, DEFAULT = "GEMMTUNE_", "default"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of searching, measuring and remembering choices.

    ``GEMMTUNE_<FIELD IN CAPITALS>`` sets a field: tuples as comma-separated words, booleans as 0 or 1. A line of
    ``[tool.gemmtune]`` in pyproject.toml sets it where no variable does.
    """

    backends: kinds.Names = None
    """Backends that may offer choices; None means every backend that serves the problem's device by default."""
    extra_choices: kinds.Targets = None
    """Your own GEMMs, each as `package.module:function`, which compete regardless of `backends` for the problems that they
    declare. None: only those of installed packages (entry point `gemmtune.backends`)."""
    disable: bool = False
    """Run torch's own operation for every GEMM. Nothing is tuned, compiled, or read from the store."""
    fallback_to_aten: bool = True
    """True runs torch, with a warning, if no valid choice remains. False raises NoValidChoicesError instead."""
    tune: Tune = "on_miss"
    """``on_miss`` tunes the first call on a new problem, ``never`` uses the store or torch, ``force`` measures again. ``predict``
    verifies likely choices for every M of a new weight, and times only floats on a CPU."""
    rows: kinds.Rows = "shared"
    """``shared`` serves a call with a new number of rows (M) from the table of its range. Without a table it uses the choice
    tuned for the nearest M. It tunes nothing. ``exact`` tunes each M separately."""
    batch_invariant: bool = False
    """Use only choices that sum K in one order for every number of rows. The bits of a row do not depend on its batch then."""
    multi_kernel: kinds.Place = None
    """Index, from 0 on, of the choice that every ``gemmtune.multi`` runs; None: the choice that it has decided on."""
    tune_in_subprocess: bool = True
    """Verify and measure in a worker process, which a crash or hang of a choice cannot take down with the caller."""
    compile_threads: kinds.Natural = 0
    """Processes that compile at the same time; 0 means one for each core this process may use."""
    compile_timeout_s: kinds.Seconds = 120.0
    """Time limit in seconds for the compilation of one choice."""
    choice_timeout_s: kinds.Seconds = 60.0
    """Time limit in seconds for the verification or measurement of one choice (subprocess only)."""
    first_call_budget_s: kinds.Budget = None
    """Seconds for the tuning of one problem in a call; None: as many as it takes. The fastest choice measured by then runs, and
    later processes measure the rest."""
    search: Search = "default"
    """Number of configurations that each template offers."""
    busy: kinds.Busy = "repeat"
    """Treatment of a busy machine, whose results are marked. ``repeat`` measures once more what other work disturbed, and
    disturbed limits at their next use. ``wait`` also waits up to two minutes for a quiet machine. ``accept`` does neither."""
    timing: Timing = "graph"
    """``graph`` ranks by kernel time alone (a CUDA graph on a GPU). ``spaced`` does the same with a small unrelated kernel
    between two calls, as in a model, so that calls do not overlap. ``eager`` includes the host's cost of each call."""
    cublaslt_top_k: kinds.Natural = 8
    """Number of algorithms of cuBLASLt's heuristic query to offer."""
    mixed_mm_choice: kinds.MixedMmChoice = "default"
    """Choices for mixed_mm: ``default`` uses the fastest of all, ``triton`` the fastest of Triton, ``aten`` torch.
    ``heuristic`` uses a fixed Triton config for the shape without measuring. torch runs if Triton has no choice."""
    choice_allowlist_regex: kinds.Regex = None
    """Regular expression (`re.search`) that the name of a choice must match to be tried and run; None or empty: no restriction."""
    choice_denylist_regex: kinds.Regex = None
    """Regular expression of names of choices that are never tried or run, even if allowed or torch's own; None or empty: none."""
    template_min_gemm_size: kinds.Natural = 0
    """Least M·N·K of a GEMM for which templates offer choices."""
    max_profiling_configs: kinds.Most = None
    """Largest number of configs of each template for a problem, spread over different tiles and schedules; None: the search
    decides."""
    cutlass_dir: kinds.File = None
    """Checkout of CUTLASS to use instead of the nvidia-cutlass package."""
    cutlass_op_allowlist_regex: kinds.Regex = None
    """Like `choice_allowlist_regex`, but for CUTLASS's choices only, such as `stream_k`."""
    cutlass_op_denylist_regex: kinds.Regex = None
    """Like `choice_denylist_regex`, but for CUTLASS's choices only, such as `pingpong`."""
    ck_dir: kinds.File = None
    """Checkout of Composable Kernel (AMD) to use instead of the amd-aiter package's headers."""
    float32_by_parts: bool = True
    """Allow float32 GEMMs on tensor cores, as six GEMMs of bfloat16 parts, if torch's float32 precision is `ieee`. This
    is equally exact. Off uses float32 instructions only."""
    deterministic: bool = True
    """Use only choices that give equal bits for equal inputs. Off also allows sums in order of arrival, except while
    `torch.use_deterministic_algorithms` is on."""
    absent_blocks: kinds.AbsentBlocks = "any"
    """Treatment of NaN and infinity at absent blocks of a block-sparse weight. ``skipped`` keeps them out of the result, as
    in torch. ``any`` also allows choices that multiply them by zero, such as the dense GEMM."""
    verify: bool = True
    """Verify each choice before it is timed. Off is for measuring the tuner itself."""
    native: bool = True
    """Look up warm calls in C++, in a module that is compiled during the first tuning of a process or by `gemmtune doctor
    --build`."""
    vllm: kinds.Plugin = "1"
    """The plugin in vLLM. ``0`` leaves vLLM as it is. ``1`` runs layers on a GPU whose weight has a table, quantized ones and
    experts only by a measured table. ``all`` also runs quantized layers by default tables, and layers on a CPU by measured ones."""
    sglang: kinds.Plugin = "1"
    """The plugin in SGLang, with the values of ``vllm``."""
    log_file: kinds.File = None
    """File to which one JSON line for each choice and problem is appended."""
    store_path: kinds.File = None
    """SQLite file of measurements; None means ``store.sqlite`` in the cache folder."""
    cache_dir: kinds.File = None
    """Folder of compiled kernels, locks and the store; None means the user's cache folder."""

    def __post_init__(self) -> None:
        for field, hint in _HINTS.items():
            kinds.check(field, hint, getattr(self, field))

    def __getstate__(self) -> dict[str, object]:
        """Return the fields without ``token``, which is valid in this process only."""
        return {field: getattr(self, field) for field in _HINTS}

    @functools.cached_property
    def token(self) -> int:
        """Small number that is equal for equal settings in this process, for the keys of in-memory caches."""
        return _tokens.setdefault(self, next(_token_counter))

    @functools.cached_property
    def made_deterministic(self) -> "Settings":
        """These settings with ``deterministic`` on."""
        return dataclasses.replace(self, deterministic=True)

    @functools.cached_property
    def never_tuning(self) -> "Settings":
        """These settings with ``tune="never"``. Calls of models ask for them."""
        return dataclasses.replace(self, tune="never")

    @functools.cached_property
    def by_torch(self) -> "Settings":
        """The settings that run torch's own operations, which hold while ``disable`` is on."""
        kept = {name: getattr(self, name) for name in ("deterministic", "log_file", "store_path", "cache_dir")}
        return Settings(disable=True, tune="never", backends=("aten",), native=False, **kept)

    @functools.cached_property
    def folder(self) -> Path:
        """Cache folder of compiled kernels, locks and, by default, the store."""
        return Path(self.cache_dir) if self.cache_dir else Path(platformdirs.user_cache_dir("gemmtune"))

    @functools.cached_property
    def store_file(self) -> Path:
        """SQLite file of measurements."""
        return Path(self.store_path) if self.store_path else self.folder / "store.sqlite"

    @property
    def compile_processes(self) -> int:
        """Number of processes that compile concurrently: ``compile_threads``, or the usable cores if that is 0."""
        return self.compile_threads or len(os.sched_getaffinity(0))

    @property
    def tunes(self) -> bool:
        """True if a call may measure choices."""
        return self.tune in ("on_miss", "force")


_HINTS, _LISTS = get_type_hints(Settings, include_extras=True), ("backends", "extra_choices")
_named: dict[str, str] = {}
"""Sources of the settings that ``from_environment`` has read."""
_tokens, _token_counter = dict[Settings, int](), itertools.count()
patched: contextvars.ContextVar[Settings | None] = contextvars.ContextVar("gemmtune_settings", default=None)
"""Settings of the innermost ``patch``, or None outside of any."""


def given() -> Settings:
    """Return the settings of the innermost ``patch``, else those of the environment and of pyproject.toml."""
    return patched.get() or from_environment()


def current() -> Settings:
    """Return the settings in force: the given ones, deterministic if torch has to be, or ``by_torch`` if they disable gemmtune."""
    settings = given()
    if settings.disable:
        return settings.by_torch
    if not settings.deterministic:
        import torch  # noqa: PLC0415 - it takes seconds, and the command's help does not need it

        if torch.are_deterministic_algorithms_enabled():
            return settings.made_deterministic
    return settings


def token(deterministic: bool | None = None) -> int:
    """Return ``current().token`` quickly enough for every call. ``deterministic`` says if torch has to be deterministic."""
    settings = given()
    if not settings.disable and (settings.deterministic or deterministic is False):
        return settings.token
    return current().token


def patch(**changes: object) -> Block[Settings]:
    """Change settings for a ``with`` block or a decorated function, in this thread or task only.

    Raises:
        SettingsError: an unknown field or an illegal value. The settings are unchanged then.
    """
    return Block(lambda: use(_replace(given(), changes)))


@contextmanager
def use(settings: S) -> Iterator[S]:
    """Activate complete settings for a ``with`` block, in this thread or task only. None means those of the environment."""
    reset = patched.set(settings)
    try:
        yield settings
    finally:
        patched.reset(reset)


def _replace(base: Settings, changes: Mapping[str, object]) -> Settings:
    for name in changes.keys() - _HINTS.keys():
        raise SettingsError(f"unknown setting {name!r}; the settings are {', '.join(_HINTS)}")
    values = {k: tuple(v) if k in _LISTS and isinstance(v, list) else v for k, v in changes.items()}
    if (extra := values.get("extra_choices")) is not None:
        values["extra_choices"] = tuple(kinds.target_of(x) for x in (extra if isinstance(extra, tuple) else (extra,)))
    return dataclasses.replace(base, **values)  # type: ignore[arg-type]


@functools.cache
def from_environment() -> Settings:
    """Return the settings of the GEMMTUNE_* variables, else of pyproject.toml, read once.

    Raises:
        SettingsError: a variable or a line names no setting, or its value is illegal.
    """
    settings, table = Settings(), find_table()
    _named.clear()
    for field, value in table.values.items():
        if field not in _HINTS:
            raise SettingsError(f"{table.source}: unknown setting {field!r}; the settings are {', '.join(_HINTS)}")
        with kinds.blamed_on(f"{table.source}: {field}", field):
            settings = _replace(settings, {field: kinds.from_toml(value, _HINTS[field], table.folder)})
        _named[field] = str(table.path)
    for variable, text in ((name, value) for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIX)):
        field = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if field not in _HINTS:
            known = ", ".join(ENVIRONMENT_PREFIX + name.upper() for name in _HINTS)
            raise SettingsError(f"unknown environment variable {variable}; the known ones are {known}")
        with kinds.blamed_on(variable, field):
            settings = _replace(settings, {field: kinds.parse(text, _HINTS[field])})
        _named[field] = variable
    return settings


def sources() -> dict[str, str]:
    """Return the source of each setting in force: its variable, a file, DEFAULT, or what changed it in this process."""
    outside, now = from_environment(), current()
    same = (field for field in _HINTS if getattr(now, field) == getattr(outside, field))
    return dict.fromkeys(_HINTS, "disable" if now.disable else "program") | {field: _named.get(field, DEFAULT) for field in same}


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change environment variables of this process and its children for a ``with`` block. None removes a variable."""
    before = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a program that must not see who started it, with ``changes``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith((ENVIRONMENT_PREFIX, "PYTEST_"))}
    return {**kept, **changes}


def in_continuous_integration() -> bool:
    """Return True if the variable ``CI`` is set, as on every common service."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def named_compiler() -> str:
    """Return the C++ compiler that the environment variable ``CXX`` names, as for other programs, or ""."""
    return os.environ.get("CXX", "")
