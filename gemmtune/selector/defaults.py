"""Tables of quantized weights by rule, for weights that nobody tuned: no time is measured, every choice is verified here first.

torch has no product of a weight of 4 or 8 bits. What it does instead dequantizes the whole weight in each call, which takes longer
than the product itself up to some 500 rows.
"""

from __future__ import annotations

from ..device import DeviceInfo
from ..problem.rows import RowClass
from ..settings import Settings
from .offers import offers_for
from .progress import Progress
from .proof import legal_runs
from .range_work import Work, segment_of
from .ranges import proved
from .segments import Segment, Table, merged

FEW_ROWS = ("cuda:skinny", "triton:mixed_words")
SOME_ROWS = ("cuda:wgmma", "triton:mixed_words")
LARGE = ("cuda:wgmma",)
RULE: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ("cuda:gemv", *FEW_ROWS)),
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

On an H100, over four weights of 2048 x 6144 to 12288 x 4096, a layer of int4 so reaches 2.16 times the speed of the bfloat16 layer
at up to 32 rows, 1.40 at up to 128, 0.95 at up to 512 and 0.86 above; int8 1.30, 1.34, 0.87 and 0.86 (``benchmarks/defaults.py``).
Dequantizing in one pass before torch's product reaches 0.50, 0.49, 0.53 and 0.84 with int4.
"""


def default_table(rows_class: RowClass, device: DeviceInfo, settings: Settings, progress: Progress) -> Table | None:
    """Return the table that the rule gives for a weight, each choice verified at both ends of its interval and for each kernel.

    A choice that is wrong, or cannot be compiled, is left out. Torch serves the rest, unless the settings exclude it. Return None
    if nothing is left.

    Raises:
        NoValidChoicesError: torch's own operation fails here, for example for lack of memory, or every choice does.
        NoWorkerError: no process can be started to verify the choices.
    """
    work = Work(rows_class, range(1, RULE[-1][0] + 1), device, settings, 0.0, progress)
    orders = [(m, _order(work, m, prefixes)) for m, prefixes in RULE]

    def segments() -> list[Segment]:
        found, lo = [], 1
        for hi, names in orders:
            found += _served(work, range(lo, hi + 1), [name for name in names if name not in work.wrong])
            lo = hi + 1
        return list(merged(found))

    if not segments():
        return None
    return proved(work, segments, lambda x, _: tuple(sorted({x.lo, x.hi, *x.kernels})))


def _order(work: Work, m: int, prefixes: tuple[str, ...]) -> list[str]:
    """Return the names of the choices for an M, the preferred first and torch's own operation last."""
    offered = offers_for(work.rows_class.at(m), work.device, work.settings).choices
    likeliest = (next((c for c in offered if c.name.startswith(prefix)), None) for prefix in prefixes)
    return [work.take(m, choice) for choice in (*likeliest, *(c for c in offered if c.baseline)) if choice is not None]


def _served(work: Work, rows: range, names: list[str]) -> list[Segment]:
    """Return the segments for an interval: each M has the first of the choices that is legal there."""
    found: list[Segment] = []
    for part, reason in legal_runs(work.choices[names[0]], rows, work.rows_class, work.device) if names else ():
        if reason is None:
            found.append(segment_of(work, names[0], part[0], part[-1]))
        else:
            found += _served(work, part, names[1:])
    return found
