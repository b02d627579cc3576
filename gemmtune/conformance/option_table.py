"""The options of a run, from which the command and the pytest plugin have theirs. Plain data: help needs no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

STDOUT = "-"
LEVELS = ("smoke", "full", "exhaustive")
ARCHITECTURES = ("75", "80", "90", "100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: ``--name`` of the command, ``--gemm-name`` of pytest; ``--name`` in both if it is ``shared``."""

    name: str
    help: str
    metavar: str | None = None
    kind: Literal["text", "integer", "seconds", "flag", "many", "words"] = "text"
    """``many`` may be given several times, ``words`` too, and each time several joined by commas."""
    choices: tuple[str, ...] = ()
    """Every legal value, where these are few; ``options.RunOptions`` knows the others."""
    shared: bool = False
    spelled: str = ""
    """How the option is spelled, where that is not its name."""

    @property
    def repeated(self) -> bool:
        """The value is a tuple, of what was given each time."""
        return self.kind in ("many", "words")

    @property
    def word(self) -> str:
        """The option as it is spelled, without dashes before it."""
        return self.spelled or self.name

    @property
    def spelling(self) -> str:
        """The option as the command has it."""
        return "--" + self.word.replace("_", "-")

    @property
    def pytest_spelling(self) -> str:
        """The option as pytest has it."""
        return self.spelling if self.shared else "--gemm-" + self.word.replace("_", "-")


def _option(text: str, *, kind: str = "text", default: Any = None, **more: Any) -> Any:
    """A field with its option. Unless another is given, its default is that nothing was said."""
    plain = () if kind in ("many", "words") else False if kind == "flag" else None
    return dataclasses.field(default=plain if default is None else default, metadata={"help": text, "kind": kind} | more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What was given of each option; ``options.RunOptions`` checks it. The GEMM itself is the command's argument and
    ``--gemm-backend`` of pytest."""

    backend: str = ""
    device: str | None = _option("cpu, cuda or cuda:N; cuda when there is one and nothing is given.", metavar="DEVICE")
    level: str = _option(
        "How much is tested: about 1, 5 and 30 minutes on a GPU; smoke when not given.", default="smoke", choices=LEVELS
    )
    op: tuple[str, ...] = _option("Only these operations, such as mm,addmm.", kind="words", metavar="OP")
    dtype: tuple[str, ...] = _option("Only these input dtypes, such as bfloat16 or bf16.", kind="words", metavar="DTYPE")
    layout: tuple[str, ...] = _option("Only operands of these strides, such as row,col,padded.", kind="words", metavar="KIND")
    properties: tuple[str, ...] = _option(
        "Only these properties, such as integers,edges.", spelled="property", kind="words", metavar="NAME"
    )
    max_cases: int | None = _option(
        "Only N of the cases, a sample of every property, operation and dtype; --seed takes another. Nothing more is drawn "
        "unless --max-examples is given.",
        kind="integer",
        metavar="N",
    )
    max_seconds: float | None = _option(
        "Begin no case later than S seconds after the first. Cases come in the order of a sample, so that each property has "
        "had some.",
        kind="seconds",
        metavar="S",
    )
    trait: tuple[str, ...] = _option(
        "What the GEMM declares: out, alpha, beta, empty, dtypes=float16,bfloat16, min_alignment=16, multiples=1,8,8, …",
        kind="many",
        metavar="NAME=VALUE",
    )
    traits: str | None = _option("The same as a TOML file.", metavar="FILE")
    max_examples: int | None = _option("Cases drawn for each property.", kind="integer", metavar="N", shared=True)
    derandomize: bool = _option("Draw the same cases in every run. This is the default.", kind="flag", shared=True)
    random: bool = _option("Draw other cases in every run.", kind="flag")
    seed: int | None = _option("Draw, or sample, the cases of this seed.", kind="integer", metavar="N")
    skips_file: str | None = _option("Cases not to run: on each line an id or pattern, # and why.", metavar="FILE", shared=True)
    xfails_file: str | None = _option("Cases known to fail, alike; it is an error if one passes.", metavar="FILE", shared=True)
    strict_lists: bool = _option("It is an error if a line of these files fits no case, as it is in CI.", kind="flag")
    save_failing: str | None = _option("Write each failing case as a JSON file, for --repro DIR.", metavar="DIR")
    repro: tuple[str, ...] = _option(
        "Only this case, or those of @FILE or of a folder of --save-failing.", kind="many", metavar="ID"
    )
    sm: tuple[str, ...] = _option(
        f"No GEMM: compile gemmtune's kernels for {', '.join(ARCHITECTURES)}, check them, and run them where a GPU can.",
        kind="words",
        choices=ARCHITECTURES,
        metavar="SM",
    )
    sm_compile_only: bool = _option("With sm: do not run them.", kind="flag")
    sanitize: bool = _option("Run a few cases under compute-sanitizer as well (CUDA).", kind="flag")
    min_executed: int | None = _option(
        "It is a failure if fewer cases than this are executed. When not given: 40, 80 or 160 by level, and 1 where -k or any "
        "option takes only a part of the level.",
        kind="integer",
        metavar="N",
    )
    in_process: bool = _option("No worker process: for debuggers. A crash then ends the run.", kind="flag")
    timeout: float = _option("Seconds for one case, compilation included; 120.", default=120.0, kind="seconds", metavar="S")
    json: str | None = _option("Write the report as JSON; - is standard output.", metavar="FILE")
    html: str | None = _option("Write the report as one HTML page, with maps of where results are wrong.", metavar="FILE")


OPTIONS = tuple(Option(name=f.name, **f.metadata) for f in dataclasses.fields(Values) if f.metadata)
"""All but the GEMM."""
