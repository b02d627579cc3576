"""Tables for weights that nobody tuned. Every choice is verified here first, and only those of floats on a CPU are timed.

Where the shipped predictor knows the GPU and the kind of weight, it chooses. Elsewhere, and up to FEWEST_ROWS rows, a rule serves
weights of 4 or 8 bits: torch has no product of them, and dequantizing the whole weight in each call takes longer than the product
itself up to some 500 rows.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..choice import Choice
from ..device import DeviceInfo
from ..problem.rows import RowClass
from ..settings import Settings
from ..store.store import Ranged, Store
from .features import FEWEST_ROWS
from .precompile import Compilation
from .predicted import ROWS, Gains, baseline_of, kept_kernels, launched_alone, likely_gains, offered_by, ordered
from .predictor import shipped_predictor
from .progress import Progress
from .proof import PROVED_ROWS, legal_runs, narrow
from .range_work import Work, segment_of
from .ranges import proved
from .segments import DEFAULT, Segment, Table, merged
from .shipped import shipped_for
from .timed import BUDGET_S, contenders_of, is_timed, largest_first, timed_orders
from .timed import ROWS as TIMED_ROWS

FEW_ROWS = ("cuda:skinny", "triton:mixed_words")
SOME_ROWS = ("cuda:wgmma", "triton:mixed_words")
LARGE = ("cuda:wgmma_stream", "cuda:wgmma")
RULE: tuple[tuple[int, tuple[str, ...]], ...] = (
    (FEWEST_ROWS, ("cuda:gemv", *FEW_ROWS)),
    (16, FEW_ROWS),
    (32, FEW_ROWS),
    (64, SOME_ROWS),
    (128, SOME_ROWS),
    (192, SOME_ROWS),
    (256, SOME_ROWS),
    (384, SOME_ROWS),
    (512, SOME_ROWS),
    *((rows, LARGE) for rows in (640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192)),
)
"""The last M of each interval, and the families whose likeliest config serves it, the preferred first; then torch.

Dequantizing int4 in one pass before torch's product reaches 0.50 of the bfloat16 layer's speed at up to 32 rows on an H100, 0.49 at
up to 128, 0.53 at up to 512 and 0.84 above, over four weights of 2048 x 6144 to 12288 x 4096. The kernels of the rule are faster.
"""


RULE_ON_CPU: tuple[tuple[int, tuple[str, ...]], ...] = tuple((m, ("cpp:",)) for m in (1, 4, 7, 15, 32, 64, 256, 1024, 8192))
"""The rule for a CPU. Two compiled kernels serve all weights of a kind and dtype: one dequantizes while it multiplies few rows, one
while it packs a part of the weight for more.

Compared with torch's product of a bfloat16 weight they are 1.1 to 2 times as fast at 16 rows, and 0.9 to 1.2 times at 64 to 2048,
over int4 and int8, 896 x 4864 and 4096 x 4096, one core with AVX-512 and bfloat16 pairs. With AVX2 alone they are 3 to 4 times as
fast. Dequantizing before torch's product reaches 0.5 to 0.9 at 512 rows.
"""
MOST_ROWS_BY_TILES = 64
MOST_ROWS_OF_FLOAT32 = 1024
"""Largest M of the rule where torch multiplies by tiles (AMX), which are many times as fast, and for float32 inputs.

torch's product of float32 may be faster than ours, by less than it takes to dequantize the weight.
"""
TILES = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}
"""CPU flags of tiles, by the dtype of the input."""


ROWS_OF_AN_EXPERT = 32
"""Rows of each expert up to which the compiled kernel serves a CPU.

Compared with dequantizing all experts and torch's product it is 8 to 27 times as fast at 1 row of each expert, 2.3 to 25 times at 8
and 1.0 to 8 times at 32, over int4 and int8 in bfloat16 and float32, 8 experts of 512 x 512, one core. At 64 rows it is 0.9 to 7
times as fast.
"""


RULED, PREDICTED, SHIPPED, TIMED = "rule", "predicted", "shipped", "timed"
"""First words of the ``origin`` of a default table."""


@dataclass(frozen=True, slots=True)
class Default:
    """Default table of one class, not yet verified: the last M of each interval, and names of its choices, the preferred first."""

    work: Work
    origin: str
    orders: Sequence[tuple[int, Sequence[str]]]
    _segments: dict[frozenset[str], list[Segment]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Segments by the wrong choices that they leave out."""

    def segments(self) -> list[Segment]:
        """Return the segments of the choices that are not known to be wrong."""
        known = frozenset(self.work.wrong)
        if known not in self._segments:
            found, lo = [], 1
            for hi, names in self.orders:
                found += _served(self.work, range(lo, hi + 1), [name for name in names if name not in known])
                lo = hi + 1
            self._segments[known] = list(merged(found))
        return self._segments[known]

    def kernels(self) -> list[Choice]:
        """Return the choices at both ends of each segment, which need nearly all of its kernels."""
        ends = [(x.name, m) for x in self.segments() for m in (x.lo, x.hi) if not self.work.choices[x.name].baseline]
        return [at for name, m in ends if isinstance(at := self.work.at(name, m), Choice)]

    def table(self, *, torch_alone: bool = False) -> Table | None:
        """Return the table, each choice verified at both ends of its interval and for each kernel, torch's where it begins.

        Without choices that are wrong or cannot be compiled; torch serves the rest, unless excluded. None if only torch is left,
        unless ``torch_alone`` makes a table too. On a CPU a choice is verified with PROVED_ROWS and few columns of the weight.
        Raises NoValidChoicesError if torch or every choice fails here, NoWorkerError if no process can be started to verify them.
        """
        segments, part = self.segments(), self._part
        if not torch_alone and all(self.work.choices[x.name].baseline for x in segments):
            return None
        made = proved(self.work, self.segments, lambda x, _: self._checked(x), part)
        return dataclasses.replace(made, origin=self.origin)

    @property
    def _part(self) -> RowClass | None:
        """The class with fewer columns by which the choices are verified, which takes milliseconds. None: with all of them."""
        rows_class = self.work.rows_class
        return narrow(rows_class) if self.work.device.type == "cpu" and not rows_class.problem.groups else None

    def _checked(self, x: Segment) -> tuple[int, ...]:
        baseline = self.work.choices[x.name].baseline
        if self.work.rows_class.problem.groups:  # each M has patterns of groups, which take seconds on a CPU
            return () if baseline else tuple(sorted({x.hi, *x.kernels[1:]}))
        rows = {x.lo} if baseline else {x.lo, x.hi, *x.kernels}
        if self._part is None:
            return tuple(sorted(rows))
        few = {min(m, PROVED_ROWS) for m in rows}
        return tuple(sorted(m for m in few if self.work.rows_class.has(m)))

    def stored(self, store: Store, kind: str = DEFAULT, *, torch_alone: bool = False, disturbed: str = "") -> Table | None:
        """Make the table and store it. It serves until one is measured. Raises what ``table`` does."""
        table, work = self.table(torch_alone=torch_alone), self.work
        if table is not None:
            table = dataclasses.replace(table, disturbed=disturbed)
            store.put_ranged(Ranged(key=work.rows_class.key, fingerprint=work.fingerprint, kind=kind, value=table.to_json()))
        return table


@dataclass(frozen=True)
class Timed:
    """Default table of one class that is not timed yet. No timing begins after ``ends`` of ``time.monotonic``."""

    work: Work
    ends: Callable[[], float]

    def kernels(self) -> list[Choice]:
        """Return the choices that need kernels."""
        return [choice for found in self._contenders.values() for choice in found[1:]]

    @functools.cached_property
    def _contenders(self) -> Mapping[int, Sequence[Choice]]:
        """The choices that compete at each M. Listing them takes some ten milliseconds."""
        return {m: contenders_of(self.work, m) for m in TIMED_ROWS if self.work.rows_class.has(m)}

    def stored(self, store: Store, kind: str = DEFAULT) -> Table | None:
        """Time the choices and store the table, also of torch alone. None without choices or time. Raises what ``table`` does."""
        if time.monotonic() > self.ends() or not any(choice.compiled for choice in self.kernels()):
            return None
        orders, disturbed = timed_orders(self.work, self._contenders)
        return Default(self.work, TIMED, orders).stored(store, kind, torch_alone=True, disturbed=disturbed)


def origin_for(rows_class: RowClass, device: DeviceInfo) -> str:
    """Return the ``origin`` of a class's default table here: empty if torch runs such weights by default."""
    predictor, shipped, problem = shipped_predictor(), shipped_for(device), rows_class.problem
    known = [f"{predictor.digest}"] if predictor is not None and predictor.knows(problem, device) else []
    if shipped is not None and shipped.has(problem):
        return " ".join([SHIPPED, shipped.digest, *known])
    if known:
        return f"{PREDICTED} {known[0]}"
    return RULED if problem.widens_b else TIMED if is_timed(problem) else ""


def defaults_for(
    classes: Sequence[RowClass],
    device: DeviceInfo,
    settings: Settings,
    progress: Progress,
    while_compiling: Callable[[], object] = bool,
) -> Generator[Default | Timed, None, None]:
    """Yield the default tables of classes, each once its kernels are compiled. Classes that torch runs by default are left out.

    The classes share few kernels, so that those of a model compile within seconds. ``while_compiling`` is called once they do.
    """
    works = {x: Work(x, range(1, ROWS[-1] + 1), device, settings, 0.0, progress) for x in classes if origin_for(x, device)}
    ends = functools.cache(lambda: time.monotonic() + BUDGET_S)  # from the first timing on
    timed = [Timed(works.pop(x), ends) for x in largest_first(works)]
    predictor, shipped = shipped_predictor(), shipped_for(device)
    gains = {x: likely_gains(work, predictor, shipped) for x, work in works.items()}
    kept = kept_kernels(list(gains.values()))
    defaults = [Default(work, origin_for(x, device), _orders(work, gains[x], kept)) for x, work in works.items()]
    made: list[Timed | Default] = [*timed, *defaults]
    kernels = [x.kernels() for x in made]
    with Compilation(itertools.chain(*kernels), settings) as compilation:
        while_compiling()
        for default, needed in zip(made, kernels, strict=True):
            compilation.wait(needed)
            yield default


def _orders(work: Work, gains: Gains, kept: frozenset[str]) -> list[tuple[int, list[str]]]:
    """Return the names for each interval: those with a gain over torch, then torch. The rule serves where nothing was measured."""
    launched = functools.cache(lambda name: work.take(work.found_at[name], launched_alone(work.choices[name], work.settings)))
    orders = []
    for m in filter(work.rows_class.has, ROWS if gains else (m for m, _ in rule_for(work))):
        if m not in gains and work.rows_class.problem.widens_b:
            orders.append((m, _ruled(work, m)))
            continue
        baseline = baseline_of(work, work.rows_class.at(m))
        names = list(dict.fromkeys(map(launched, ordered(gains.get(m, {}), kept))))
        orders.append((m, names if baseline is None else [*names, work.take(m, baseline)]))
    return orders


def rule_for(work: Work) -> Sequence[tuple[int, tuple[str, ...]]]:
    """Return the rule for a class. Experts divide the rows among them."""
    groups = work.rows_class.problem.groups
    if work.device.type != "cpu":
        return RULE
    tiles = TILES.get(work.rows_class.problem.dtype) in work.device.isa
    most = MOST_ROWS_BY_TILES if tiles else MOST_ROWS_OF_FLOAT32 if work.rows_class.problem.dtype == torch.float32 else math.inf
    most = min(most, ROWS_OF_AN_EXPERT) if groups else most
    return [(rows * max(groups, 1), names if rows <= most else ()) for rows, names in RULE_ON_CPU]


def _ruled(work: Work, m: int) -> list[str]:
    """Return the names of the rule's first choice offered for an M, and of torch's operation. Few backends have to enumerate."""
    problem, found = work.rows_class.at(m), list[Choice]()
    for prefix in next((names for hi, names in rule_for(work) if m <= hi), () if work.device.type == "cpu" else LARGE):
        if not found:
            offered = offered_by(prefix.partition(":")[0], work, problem)
            found += [launched_alone(c, work.settings) for c in offered if c.name.startswith(prefix)][:1]
    return [work.take(m, choice) for choice in (*found, baseline_of(work, problem)) if choice is not None]


def _served(work: Work, rows: range, names: list[str]) -> list[Segment]:
    """Return the segments for an interval: each M has the first of the choices that is legal there."""
    found: list[Segment] = []
    for part, reason in legal_runs(work.choices[names[0]], rows, work.rows_class, work.device) if names else ():
        if reason is None:
            found.append(segment_of(work, names[0], part[0], part[-1]))
        else:
            found += _served(work, part, names[1:])
    return found
