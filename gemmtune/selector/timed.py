"""Choices for float weights on a CPU that nobody tuned: a rule names two for each M, and short rounds here decide against torch.

How fast torch is depends on the CPU, its number of threads and the library that torch was built with. So a gain is never assumed.
One compiled kernel serves all weights of a dtype. It takes turns with torch at few Ms and with part of the weight, as many columns
as show the speed of the whole: that takes some tenths of a second for a weight of any size.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..choice import Choice
from ..device import DeviceInfo
from ..problem import Problem
from ..problem.rows import RowClass
from ..timing.rounds import Ranked
from .predicted import baseline_of, offered_by
from .proof import narrow
from .range_work import Work
from .remote import AnySession, open_session

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_NUMBERS = 2**16
"""Numbers in the smallest weight that is timed. The call of a smaller one takes as long as its product."""
ROWS = (1, 4, 16, 64, 256)
"""Last M of each interval, where its choices are timed. A gain at few rows falls with M, so it is least there."""
LAST = 8192
"""Last M of the table, served like the last of ROWS if the gain there is at least MORE_GAIN."""
LEAST_GAIN, MORE_GAIN = 0.05, 0.15
FEW_ROWS = 64
"""Largest M at which choices of all modes compete, and not only those of the mode that won at the M before."""
MODES = 2
ROUNDS_S = 0.02
NUMBERS, COLUMNS_OF_A_THREAD = 2**22, 128
"""Numbers of the part of a weight that is timed, and the least columns for each thread."""
BUDGET_S = 3.0
"""Time for all weights of a model. Torch runs those that were not begun by then, until a later process times them."""

Orders = list[tuple[int, Sequence[str]]]
"""Last M of each interval, and the names of its choices, the preferred first."""


def is_timed(problem: Problem) -> bool:
    """Return True if default tables of such weights are timed."""
    plain = problem.op in ("mm", "addmm") and problem.device_type == "cpu" and problem.sparsity is None
    return plain and problem.dtype in DTYPES and problem.b.dtype == problem.dtype and problem.n * problem.k >= LEAST_NUMBERS


def largest_first(classes: Iterable[RowClass]) -> list[RowClass]:
    """Return the classes whose default tables are timed, the largest weights first: they take most of a model's time."""
    return sorted((x for x in classes if is_timed(x.problem)), key=lambda x: -x.problem.n * x.problem.k)


def contenders_of(work: Work, m: int) -> list[Choice]:
    """Return torch's operation and the first choice of each of two modes of one compiled kernel. Empty without any of these."""
    problem = work.rows_class.at(m)
    offered, baseline = offered_by("cpp", work, problem), baseline_of(work, problem)
    if not offered or baseline is None:
        return []
    modes: dict[object, Choice] = {}
    for choice in offered:
        if choice.compile_key == offered[0].compile_key:
            modes.setdefault(choice.info["mode"], choice)
    return [baseline, *list(modes.values())[:MODES]]


def timed_orders(work: Work, contenders: Mapping[int, Sequence[Choice]]) -> tuple[Orders, str]:
    """Return the names for each interval, timed here, and how other work disturbed the timing (empty: it did not)."""
    columns = max(NUMBERS // work.rows_class.problem.k, COLUMNS_OF_A_THREAD * max(work.device.threads, 1))
    part = narrow(work.rows_class, columns)  # what is timed
    orders, disturbed, mode, gain = Orders(), "", "", 0.0
    with open_session(part.at(max(contenders)), work.device, work.settings) as session:
        for m, (baseline, *others) in contenders.items():
            ours = [choice for choice in others if m <= FEW_ROWS or choice.info["mode"] == mode]
            gains = _gains(baseline, ours, part.at(m), work.device, session)
            disturbed = disturbed or (f"too few samples at M = {m}" if None in gains.values() else "")
            best = max(ours, key=lambda choice: gains.get(choice.name) or 0.0, default=baseline)
            gain = gains.get(best.name) or 0.0
            names = [work.take(m, choice) for choice in ((best, baseline) if gain else (baseline,))]
            orders.append((m, names))
            mode = str(best.info["mode"]) if gain else ""
    orders.append((LAST, names if gain >= MORE_GAIN else names[-1:]))
    return orders, disturbed


def _gains(
    baseline: Choice, ours: Sequence[Choice], part: Problem, device: DeviceInfo, session: AnySession
) -> dict[str, float | None]:
    """Return the gains of choices over torch by name, timed for a part of their problem."""
    timed = [at for choice in (baseline, *ours) if isinstance(at := choice.at(part, device), Choice)]
    times = session.rank(timed, ROUNDS_S).times if len(timed) > 1 else {}
    torchs = next((times[choice.name] for choice in timed if choice.baseline and choice.name in times), None)
    return {x.name: gain_over(torchs, times[x.name]) for x in ours if torchs is not None and x.name in times}


def gain_over(torchs: Ranked, ours: Ranked) -> float | None:
    """Return the gain over torch's time, zero if it is too small to leave torch, None if the samples cannot tell."""
    gain = torchs.time_us / ours.time_us - 1
    if gain < LEAST_GAIN:
        return 0.0
    return gain if torchs.margin_us + ours.margin_us < torchs.time_us - ours.time_us else None
