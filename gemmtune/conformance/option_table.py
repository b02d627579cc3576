"""Options of a run, the source for both the command and the pytest plugin. Plain data, so that help needs no torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

STDOUT = "-"
LEVELS = ("smoke", "full", "exhaustive")
ARCHITECTURES = ("75", "80", "90", "100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: ``--name`` of the command and ``--gemm-name`` of pytest, or ``--name`` in both if ``shared``."""

    name: str
    help: str
    metavar: str | None = None
    kind: Literal["text", "integer", "seconds", "flag", "many", "words"] = "text"
    """Type of the value. ``many`` and ``words`` can be repeated, and ``words`` also splits each value at commas."""
    choices: tuple[str, ...] = ()
    """All legal values, if they can be listed here. ``options.RunOptions`` checks the other options."""
    shared: bool = False
    spelled: str = ""
    """Spelling on the command line, if it differs from ``name``."""

    @property
    def repeated(self) -> bool:
        """True if the option can be repeated. Its value is then a tuple."""
        return self.kind in ("many", "words")

    @property
    def spelling(self) -> str:
        """Spelling of the option on gemmtune's command line."""
        return "--" + (self.spelled or self.name).replace("_", "-")

    @property
    def pytest_spelling(self) -> str:
        """Spelling of the option on pytest's command line."""
        return self.spelling if self.shared else "--gemm-" + self.spelling.removeprefix("--")


def _option(text: str, *, kind: str = "text", default: Any = None, **more: Any) -> Any:
    """Return a dataclass field that carries its option. The default is the empty value of ``kind`` unless one is given."""
    plain = () if kind in ("many", "words") else False if kind == "flag" else None
    return dataclasses.field(default=plain if default is None else default, metadata={"help": text, "kind": kind} | more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Values of all options, which ``options.RunOptions`` checks. ``backend`` is the GEMM (pytest: ``--gemm-backend``)."""

    backend: str = ""
    device: str | None = _option("cpu, cuda or cuda:N. Default: cuda if there is a GPU, else cpu.", metavar="DEVICE")
    level: str = _option(
        "How much is tested: smoke, full or exhaustive take about 1, 5 and 30 minutes on a GPU. Default: smoke.",
        default="smoke",
        choices=LEVELS,
    )
    op: tuple[str, ...] = _option("Test only these operations, such as mm,addmm.", kind="words", metavar="OP")
    dtype: tuple[str, ...] = _option("Test only these input dtypes, such as bfloat16 or bf16.", kind="words", metavar="DTYPE")
    layout: tuple[str, ...] = _option("Test only operands of these strides, such as row,col,padded.", kind="words", metavar="KIND")
    properties: tuple[str, ...] = _option(
        "Test only these properties, such as integers,edges.", spelled="property", kind="words", metavar="NAME"
    )
    max_cases: int | None = _option(
        "Run N cases in all, spread over properties, operations and dtypes. Others take the place of those that the GEMM refuses. "
        "--seed selects another sample. Further cases are drawn only if --max-examples is given.",
        kind="integer",
        metavar="N",
    )
    max_seconds: float | None = _option(
        "Start no case later than S seconds after the first. Cases run in sample order, so that every property gets some.",
        kind="seconds",
        metavar="S",
    )
    trait: tuple[str, ...] = _option(
        "Declare a trait of the GEMM: out, alpha, beta, empty, dtypes=float16,bfloat16, min_alignment=16, multiples=1,8,8, …",
        kind="many",
        metavar="NAME=VALUE",
    )
    traits: str | None = _option("Declare traits by a TOML file.", metavar="FILE")
    max_examples: int | None = _option("Draw N random cases for each property.", kind="integer", metavar="N", shared=True)
    derandomize: bool = _option("Draw the same cases in every run. This is the default.", kind="flag", shared=True)
    random: bool = _option("Draw other cases in every run.", kind="flag")
    seed: int | None = _option("Seed for drawing and sampling cases.", kind="integer", metavar="N")
    skips_file: str | None = _option(
        "Cases to skip: one id or pattern per line, then # and the reason.", metavar="FILE", shared=True
    )
    xfails_file: str | None = _option(
        "Cases known to fail, in the same format. A listed case that passes is an error.", metavar="FILE", shared=True
    )
    strict_lists: bool = _option("Fail if a line of these files matches no case. This is the default in CI.", kind="flag")
    save_failing: str | None = _option("Write each failing case as a JSON file that --repro DIR can run again.", metavar="DIR")
    repro: tuple[str, ...] = _option(
        "Run only this case, or the cases in @FILE or in a folder of --save-failing.", kind="many", metavar="ID"
    )
    sm: tuple[str, ...] = _option(
        f"Instead of a GEMM: compile gemmtune's kernels for {', '.join(ARCHITECTURES)}, check them, run them if a GPU can.",
        kind="words",
        choices=ARCHITECTURES,
        metavar="SM",
    )
    sm_compile_only: bool = _option("With --sm: compile the kernels without running them.", kind="flag")
    sanitize: bool = _option("Also run a few cases under compute-sanitizer (CUDA).", kind="flag")
    min_executed: int | None = _option(
        "Fail if fewer than N cases are executed. Default: 40, 80 or 160 by level, and 1 if -k or any option narrows the level.",
        kind="integer",
        metavar="N",
    )
    in_process: bool = _option("Run without worker processes, for debuggers. A crash then ends the run.", kind="flag")
    trusted: bool = _option(
        "Trust the GEMM not to deceive the suite, and judge its results in its own process: quicker.", kind="flag"
    )
    timeout: float = _option("Seconds for one case, with compilation. Default: 120.", default=120.0, kind="seconds", metavar="S")
    json: str | None = _option("Write the report as JSON. - is standard output.", metavar="FILE")
    html: str | None = _option("Write the report as one HTML page, with maps of the wrong elements.", metavar="FILE")


def as_typed(text: str, spellings: Mapping[str, str]) -> str:
    """Return an error's text with the option that it begins with as the user typed it: ``max_cases: …`` as ``--max-cases: …``."""
    name, colon, rest = text.partition(": ")
    return f"{spellings.get(name, name)}{colon}{rest}"


OPTIONS = tuple(Option(name=f.name, **f.metadata) for f in dataclasses.fields(Values) if f.metadata)
"""Options of the command and of pytest. The GEMM itself is not among them."""
