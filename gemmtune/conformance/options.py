"""Options of a run of the suite, checked."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..declaration.labels import DTYPES, OPS
from ..declaration.layouts import KINDS
from ..declaration.named import importable
from ..declaration.subject import SubjectSpec
from ..declaration.traits import Traits
from ..errors import ConformanceError, TraitsError, raised_as
from ..operand_kinds import full_dtype_name
from .option_table import OPTIONS, STDOUT, Values
from .properties.table import PROPERTIES

WORDS = {"op": OPS, "dtype": tuple(DTYPES), "layout": tuple(KINDS), "properties": tuple(p.name for p in PROPERTIES)}
"""Legal values of the options whose table entry does not list them."""
_LEAST = {"max_examples": 1, "max_cases": 1, "seed": 0, "min_executed": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(Values):
    """Checked options of a run. Raises ConformanceError for illegal ones or missing files, TraitsError for declarations."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "RunOptions":
        """Return options from parsed values, None if not given. ``words`` of repeatable options may be joined by commas."""
        given = {name: value for name, value in values.items() if value is not None}
        for option in OPTIONS:
            if option.repeated and option.name in given:
                words = [word for text in given[option.name] for word in (text.split(",") if option.kind == "words" else [text])]
                given[option.name] = tuple(full_dtype_name(word) if option.name == "dtype" else word for word in words)
        return cls(**given)

    def __post_init__(self) -> None:
        # Words of a closed list.
        for option in OPTIONS:
            value, legal = getattr(self, option.name), option.choices or WORDS.get(option.name)
            for word in value if option.repeated else (value,):
                if legal and word is not None and word not in legal:
                    raise ConformanceError(f"{option.name}: got {word!r}, expected one of {', '.join(legal)}")
        # Numbers in range.
        for name, least in _LEAST.items():
            number = getattr(self, name)
            if number is not None and number < least:
                raise ConformanceError(f"{name}: got {number}, expected at least {least}")
        for name in ("timeout", "max_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConformanceError(f"{name}: got {seconds:g}, expected a number of seconds above 0")
        # Combinations that contradict each other.
        drawing = [name for name in ("derandomize", "random", "seed") if getattr(self, name) not in (None, False)]
        if len(drawing) > 1:
            others = " and ".join(drawing[1:])
            raise ConformanceError(f"{drawing[0]}: got {others} as well, expected one of them: each selects how cases are drawn")
        if self.sm and self.backend:
            raise ConformanceError(
                f"sm: got the GEMM {self.backend!r} as well, expected no GEMM: --sm compiles gemmtune's own kernels"
            )
        if self.sm and self.html:
            raise ConformanceError("html: got it together with sm, expected json: the architecture matrix has no HTML page")
        # Paths to read and to write.
        for name in ("skips_file", "xfails_file", "traits"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConformanceError(f"{name}: got {path!r}, expected a file that exists")
        for name in ("json", "html"):
            path = getattr(self, name)
            if path is None or (path == STDOUT and name == "json"):
                continue
            if path == STDOUT or Path(path).is_dir() or not Path(path).parent.is_dir():
                raise ConformanceError(f"{name}: got {path!r}, expected a file to write, in a folder that exists")
        declared_by(self.trait)

    @property
    def active(self) -> bool:
        """True if there is anything to test."""
        return bool(self.backend or self.sm)

    @property
    def spec(self) -> SubjectSpec:
        """Target of the GEMM and the declarations given as options."""
        file = str(Path(self.traits).absolute()) if self.traits else ""
        return SubjectSpec(target=importable(self.backend), declared=declared_by(self.trait), traits_file=file)

    @property
    def narrowed(self) -> bool:
        """True if the options select only a part of the level."""
        return bool(self.op or self.dtype or self.layout or self.properties or self.repro or self.sampled)

    @property
    def sampled(self) -> bool:
        """True if the cases are a sample. They then come in an order of which every prefix is a sample too."""
        return (self.max_cases is not None or self.max_seconds is not None) and not self.repro

    def given(self) -> dict[str, Any]:
        """Return the options whose value differs from the default."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}


def declared_by(words: tuple[str, ...]) -> dict[str, Any]:
    """Parse declarations such as ``out`` and ``dtypes=float16,bfloat16``. Raises TraitsError for illegal names or values."""
    defaults, declared = Traits().as_json(), dict[str, Any]()
    for word in words:
        name, equals, text = word.partition("=")
        default = defaults.get(name)
        if not equals:
            declared[name] = True
        elif isinstance(default, dict):
            declared[name] = dict(part.partition(":")[::2] for part in text.split(","))
        elif isinstance(default, list) or default is None:
            declared[name] = [_plain(part) for part in text.strip("[]").split(",") if part]
        else:
            declared[name] = _plain(text)
    with raised_as(TraitsError, before="trait: "):
        Traits().changed(declared)
    return declared


def _plain(text: str) -> Any:
    """Parse ``text`` as a TOML value. Return the text itself if it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text.strip()
