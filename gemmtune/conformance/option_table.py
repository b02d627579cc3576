"""The table of a run's options, from which the command and the pytest plugin have theirs. Plain data: help needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ARCHITECTURES", "LEVELS", "OPTIONS", "STDOUT", "Option"]

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
    """Where it is not spelled as it is named."""

    @property
    def repeated(self) -> bool:
        """The value is a tuple, of what was given each time."""
        return self.kind in ("many", "words")

    @property
    def word(self) -> str:
        """Without dashes before it."""
        return self.spelled or self.name

    @property
    def spelling(self) -> str:
        """The option as the command has it."""
        return "--" + self.word.replace("_", "-")

    @property
    def pytest_spelling(self) -> str:
        """The option as pytest has it."""
        return self.spelling if self.shared else "--gemm-" + self.word.replace("_", "-")


OPTIONS: tuple[Option, ...] = (
    Option(name="device", metavar="DEVICE", help="cpu, cuda or cuda:N; cuda when there is one and nothing is given."),
    Option(name="level", choices=LEVELS, help="How much is tested: about 1, 5 and 30 minutes on a GPU; smoke when not given."),
    Option(name="op", kind="words", metavar="OP", help="Only these operations, such as mm,addmm."),
    Option(
        name="dtype", kind="words", metavar="DTYPE",
        help="Only these input dtypes, such as bfloat16 or bf16.",
    ),
    Option(name="layout", kind="words", metavar="KIND", help="Only operands of these strides, such as row,col,padded."),
    Option(
        name="properties", spelled="property", kind="words", metavar="NAME",
        help="Only these properties, such as integers,edges.",
    ),
    Option(
        name="max_cases", kind="integer", metavar="N",
        help="Only N of the cases, a sample of every property, operation and dtype; --seed takes another. Nothing more is drawn "
        "unless --max-examples is given.",
    ),
    Option(
        name="max_seconds", kind="seconds", metavar="S",
        help="Begin no case later than S seconds after the first. Cases come in the order of a sample, so that each property has "
        "had some.",
    ),
    Option(
        name="trait", kind="many", metavar="NAME=VALUE",
        help="What the GEMM declares: out, alpha, beta, empty, dtypes=float16,bfloat16, min_alignment=16, multiples=1,8,8, …",
    ),
    Option(name="traits", metavar="FILE", help="The same as a TOML file."),
    Option(name="max_examples", kind="integer", metavar="N", shared=True, help="Cases drawn for each property."),
    Option(name="derandomize", kind="flag", shared=True, help="Draw the same cases in every run. This is the default."),
    Option(name="random", kind="flag", help="Draw other cases in every run."),
    Option(name="seed", kind="integer", metavar="N", help="Draw, or sample, the cases of this seed."),
    Option(name="skips_file", metavar="FILE", shared=True, help="Cases not to run: on each line an id or pattern, # and why."),
    Option(name="xfails_file", metavar="FILE", shared=True, help="Cases known to fail, alike; it is an error if one passes."),
    Option(name="strict_lists", kind="flag", help="It is an error if a line of these files fits no case, as it is in CI."),
    Option(name="save_failing", metavar="DIR", help="Write each failing case as a JSON file, for --repro DIR."),
    Option(name="repro", kind="many", metavar="ID", help="Only this case, or those of @FILE or of a folder of --save-failing."),
    Option(
        name="sm", kind="words", choices=ARCHITECTURES, metavar="SM",
        help=f"No GEMM: compile gemmtune's kernels for {', '.join(ARCHITECTURES)}, check them, and run them where a GPU can.",
    ),
    Option(name="sm_compile_only", kind="flag", help="With sm: do not run them."),
    Option(name="sanitize", kind="flag", help="Run a few cases under compute-sanitizer as well (CUDA)."),
    Option(
        name="min_executed", kind="integer", metavar="N",
        help="It is a failure if fewer cases than this are executed. When not given: 40, 80 or 160 by level, and 1 where -k or any "
        "option takes only a part of the level.",
    ),
    Option(name="in_process", kind="flag", help="No worker process: for debuggers. A crash then ends the run."),
    Option(name="timeout", kind="seconds", metavar="S", help="Seconds for one case, compilation included; 120."),
    Option(name="json", metavar="FILE", help="Write the report as JSON; - is standard output."),
    Option(name="html", metavar="FILE", help="Write the report as one HTML page, with maps of where results are wrong."),
)  # fmt: skip
"""All but the GEMM itself, which is the command's argument and ``--gemm-backend`` of pytest."""
