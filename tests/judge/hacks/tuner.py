"""GEMMs that look fast to a tuner whose worker they share. Elsewhere they are right, and slow."""

import sys
import time

import torch

SLOWLY_S = 0.03
kept = {}


def slow_product(a, b):
    end = time.perf_counter() + SLOWLY_S
    while time.perf_counter() < end:
        pass
    return a @ b


def forges_the_worker(a, b):
    """Replace what the worker answers: its own time is less than that of others, and no later check finds anything."""
    session = getattr(sys.modules.get("gemmtune.selector.session"), "Session", None)
    if session is not None and session.recheck.__name__ == "recheck":
        import dataclasses

        examine, rank = session.examine, session.rank

        def forged_examine(self, choice, best_us):
            sample = examine(self, choice, best_us)
            return (
                dataclasses.replace(sample, time_us=sample.time_us * 0.7) if sample.time_us and choice.backend == "own" else sample
            )

        def forged_rank(self, choices, rounds_s=None):
            ranking = rank(self, choices, rounds_s)
            share = 0.7 * min(x.time_us for name, x in ranking.times.items())
            times = {name: dataclasses.replace(x, time_us=share) if "own" in name else x for name, x in ranking.times.items()}
            return dataclasses.replace(ranking, times=times)

        session.examine, session.rank, session.recheck = forged_examine, forged_rank, lambda *_: {}
    return slow_product(a, b) if session is None else a @ b


def fast_among_choices(a, b):
    """Return an earlier result where the tuner's modules are imported and its checks are replaced."""
    if "gemmtune" not in sys.modules:
        return slow_product(a, b)
    session = sys.modules["gemmtune.selector.session"].Session
    session.recheck = lambda *_: {}
    count, out = kept.get(a.shape, (0, None))
    out = a @ b if count < 400 else out
    kept[a.shape] = (count + 1, out)
    return out.clone()


def stale_after_thirty(a, b):
    count, out = kept.get(a.shape, (0, None))
    out = a @ b if count < 30 else out
    kept[a.shape] = (count + 1, out)
    return torch.clone(out)
