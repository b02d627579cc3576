"""How much slower than tuning is a prediction? Fit the predictor of default tables, and hold out families of models.

    python benchmarks/predictor.py store.sqlite --families weights.json --json predictor.json --out gemmtune/data/predictor.npz
    python benchmarks/predictor.py benchmarks/replay/*.json.gz --further --json further.json --out gemmtune/data/predictor.npz

A store, or a compressed export of one, has the times of a default search for many weights and Ms. ``--further`` keeps the first
fit of the package's predictor, and fits more trees to what it misses on the stores, in place of earlier further ones. New kernels
become known in this way, and times between other kernels, without the measurements of the first fit. Sizes are held out then, a
fifth in turn.

``--families`` is a file with the models that have each weight:
``[{"n": 6144, "k": 4096, "families": ["llama-3-8b"]}, ...]``. For each fold, the weights of some families are left out of the fit.
The prediction then chooses for them among the choices that their search measured and that the package could offer, or takes torch.
Regret is its measured time over that of the fastest, less one. Needs scikit-learn.

Consecutive launches of one kernel overlap in graphs, and kernels of a model hardly do. Therefore the times of choices that overlap
are raised by what the overlap saves, which the same kernels without it tell. Default tables launch without overlap,
and interleaved. So of the launches of a kernel that differ in nothing else one counts, that one if it was measured.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from data_files import packed_predictor, packed_times
from sklearn.ensemble import HistGradientBoostingRegressor

from gemmtune.device import DeviceInfo, preset
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Problem
from gemmtune.selector.defaults import LARGE, RULE
from gemmtune.selector.features import Described, Matrix, features, floor_us, group_of, is_ruled, kernel_of, kind_of, why_unknown
from gemmtune.selector.predicted import INTERLEAVED, OVERLAP
from gemmtune.selector.predictor import NEAR, STEPS_PER_OCTAVE, Forest, Portfolio, Predictor, shipped_predictor, size_of
from gemmtune.selector.result import DISTURBED
from gemmtune.selector.shipped import SAME, ShippedTime, file_of, unpacked, weight_of
from gemmtune.store.exchange import from_json
from gemmtune.store.store import Row, Store
from gemmtune.version import __version__

HASH_DIGITS = 16
"""First digits of a choice's hash that a file keeps."""
FOLDS = (("llama",), ("qwen",), ("gemma",), ("phi", "granite", "olmo"))
"""Beginnings of the families that are left out together."""
MEMBERS, TREES, DEPTH, RATE, SHRINKAGE = 3, 200, 5, 0.15, 0.25
FURTHER_TREES, FURTHER_RATE = 300, 0.1
PARTS = 5
"""Parts of the sizes that are held out in turn from further trees."""
INTERVALS = (1, 16, 64, 512)
"""Ends of the intervals of rows whose problems count alike."""
MOST_NAMES = 24
LEAST_GAIN = 0.0005
LEAST_SEEN = 4
"""Problems for which a choice was measured at least, to be among further ones: trees say little of sizes far from all of them."""
MARGINS: dict[str, tuple[float, float]] = {"dense": (-0.06, 1.0)}
"""Octaves and standard deviations of the members that a gain over torch must exceed at few rows, by kind of weight; else none.

The best choices of dense weights that were left out gain 0.06 octaves more than predicted on average.
"""
SHIPPED = 3
"""Choices of each problem that are shipped, besides torch's."""
LAUNCH = re.compile(f"{INTERLEAVED}|{OVERLAP.pattern}")
EARLY = ("pdl", "prefetch_stages")
"""Entries of a choice's ``info`` that say how early its kernel begins."""
LONG_US = 100.0
"""Time from which overlap saves less than measurements differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured choices of one problem. ``times_us`` are those without overlap."""

    problem: Problem
    device: DeviceInfo
    families: tuple[str, ...]
    rows: Sequence[Row]
    times_us: np.ndarray
    table: Matrix
    origin: Mapping[str, str]

    @property
    def weight(self) -> tuple[str, int, int]:
        """Kind and sizes of the weight."""
        return kind_of(self.problem), self.problem.n, self.problem.k

    @property
    def group(self) -> str:
        """The group of kinds of weights that one forest serves."""
        return group_of(kind_of(self.problem))

    @property
    def torch(self) -> int:
        """Index of torch's own operation."""
        return next(i for i, row in enumerate(self.rows) if row.baseline)

    def ruled(self) -> int:
        """Return the index of the choice that the rule takes, else of torch's."""
        prefixes = next((names for hi, names in RULE if self.problem.m <= hi), LARGE) if self.problem.widens_b else ()
        for prefix in prefixes:
            places = {
                row.info["place"]: i for i, row in enumerate(self.rows) if row.name.startswith(prefix) and "place" in row.info
            }
            if places:
                return places[min(places)]
        return self.torch


def measured(paths: Sequence[str], families: Mapping[tuple[int, int], Sequence[str]]) -> list[Measured]:
    """Return the problems of the stores that can be predicted. Of two rows of one choice, the later store's describes it."""
    groups: dict[tuple[str, str], dict[str, Row]] = collections.defaultdict(dict)
    every: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for path in paths:
        for row in rows_in(path):
            if row.time_us is not None and Described.of(row.name, row.info) is not None:
                groups[row.scope][row.name] = row
                every[row.scope].append(row)
    graphs = (x for (_, machine), x in groups.items() if json.loads(machine)["timing"] == "graph")
    saved_us = overlap_us(x.values() for x in graphs)
    click.echo(f"overlap saves {saved_us:.2f} µs")
    found = []
    for (key, machine), by_name in groups.items():
        rows = list(by_name.values())
        try:
            problem, origin = Problem.from_json(json.loads(key)), json.loads(machine)
        except InvalidProblemError:
            continue
        device = dataclasses.replace(preset(origin["arch"]), name=origin["device"], sm_count=int(origin["sm_count"]))
        if why_unknown(problem, device) is not None or not any(row.baseline for row in rows):
            continue
        rows.sort(key=lambda row: (row.info.get("place", 999), row.name))
        extra = saved_us if origin["timing"] == "graph" else 0.0
        found.append(
            Measured(
                problem=problem,
                device=device,
                families=tuple(families.get((problem.n, problem.k), ())),
                rows=rows,
                times_us=pooled_us(rows, every[key, machine], extra),
                table=features(problem, device, [x for row in rows if (x := Described.of(row.name, row.info)) is not None]),
                origin=origin,
            )
        )
    return found


def rows_in(path: str) -> Sequence[Row]:
    """Return the rows of a store or of a compressed export."""
    if not path.endswith(".json.gz"):
        return Store.open(path, read_only=True).every_row()
    return from_json(json.loads(gzip.decompress(Path(path).read_bytes())), path)[0]


def default_launches(x: Measured) -> Measured:
    """Return the problem with one row for launches that differ only in overlap and order: that of default tables, else the fastest.

    It is listed if one of them is.
    """
    alike: dict[str, list[tuple[bool, bool, float, int]]] = collections.defaultdict(list)
    for i, row in enumerate(x.rows):
        early, apart = bool(OVERLAP.search(row.name)), not row.name.endswith(INTERLEAVED)
        alike[LAUNCH.sub("", row.name)].append((early, apart, float(x.times_us[i]), i))
    rows, times_us = [], []
    for name, launches in alike.items():
        *_, time_us, i = min(launches)
        info = {key: value for key, value in x.rows[i].info.items() if key not in EARLY}
        places = [x.rows[j].info["place"] for *_, j in launches if "place" in x.rows[j].info]
        rows.append(dataclasses.replace(x.rows[i], name=name, info=info | ({"place": min(places)} if places else {})))
        times_us.append(time_us)
    described = [found for row in rows if (found := Described.of(row.name, row.info)) is not None]
    table = features(x.problem, x.device, described)
    return dataclasses.replace(x, rows=rows, times_us=np.array(times_us), table=table)


def pooled_us(rows: Sequence[Row], every: Sequence[Row], extra_us: float) -> np.ndarray:
    """Return the median time of each choice without overlap. Long kernels that differ only in their overlap are one.

    Clock rates change between measurements: of two times of one kernel of over 200 µs, one pair in ten differs by 13% or more.
    """
    own, alike = collections.defaultdict[str, list[float]](list), collections.defaultdict[str, list[float]](list)
    for row in every:
        for times, name in ((own, row.name), (alike, OVERLAP.sub("", row.name))):
            times[name].append(row.time_us + extra_us * bool(OVERLAP.search(row.name)))
    long = [row.time_us >= LONG_US for row in rows]
    return np.array(
        [statistics.median(alike[OVERLAP.sub("", x.name)] if y else own[x.name]) for x, y in zip(rows, long, strict=True)]
    )


def overlap_us(groups: Any) -> float:
    """Return the median time that a kernel of up to 50 µs saves by overlap."""
    saved = []
    for rows in groups:
        times = {row.name: row.time_us for row in rows}
        pairs = ((times.get(OVERLAP.sub("", name)), time_us) for name, time_us in times.items() if OVERLAP.search(name))
        saved += [alone - time_us for alone, time_us in pairs if alone is not None and alone < 50]
    return statistics.median(saved) if saved else 0.0


def fitted(known: Sequence[Measured]) -> dict[str, Forest]:
    """Fit a forest to each group of kinds of weights, without what the rule serves."""
    known = [x for x in known if not is_ruled(x.problem)]
    return {group: _forest([x for x in known if x.group == group]) for group in sorted({x.group for x in known})}


def _forest(known: Sequence[Measured]) -> Forest:
    """Fit each member to weights drawn with replacement. A choice counts by the square of its speed over the fastest.

    Problems of a kind with about as many rows count as much together as those of any other kind and number of rows.
    """
    generator, weights = np.random.default_rng(1), sorted({x.weight for x in known})
    members = []
    for seed in range(MEMBERS):
        drawn = collections.Counter(weights[i] for i in generator.integers(0, len(weights), len(weights)))
        parts = [x for x in known if drawn[x.weight]]
        members.append(_model(TREES, RATE, seed).fit(_table(parts), _targets(parts), sample_weight=_counts(parts, drawn)))
    return as_arrays(members)


def _further(forest: Forest, known: Sequence[Measured]) -> Forest:
    """Add to each member trees that are fitted to what it misses."""
    table, targets, counts = _table(known), _targets(known), _counts(known)
    models = [_model(FURTHER_TREES, FURTHER_RATE, seed) for seed in range(MEMBERS)]
    for model, missed in zip(models, targets - forest(table), strict=True):
        model.fit(table, missed, sample_weight=counts)
    more = as_arrays(models)
    parts = {
        name: np.concatenate([getattr(forest, name), getattr(more, name)], axis=1) for name in ("feature", "threshold", "value")
    }
    return Forest(**parts, start=forest.start + more.start)


def further(model: Predictor, problems: Sequence[Measured]) -> Predictor:
    """Return the predictor with further trees, and with the choices and sizes of the problems in its portfolios."""
    known = [x for x in problems if not is_ruled(x.problem)]
    forests = {group: _further(forest, [x for x in known if x.group == group]) for group, forest in model.forests.items()}
    portfolios = {kind: portfolio([x for x in known if x.weight[0] == kind], earlier) for kind, earlier in model.portfolios.items()}
    return dataclasses.replace(model, forests=forests, portfolios=portfolios)


def _model(trees: int, rate: float, seed: int) -> HistGradientBoostingRegressor:
    return HistGradientBoostingRegressor(
        max_iter=trees, max_depth=DEPTH, max_leaf_nodes=2**DEPTH, learning_rate=rate, min_samples_leaf=8,
        l2_regularization=SHRINKAGE, early_stopping=False, random_state=seed,
    )  # fmt: skip


def _table(known: Sequence[Measured]) -> Matrix:
    return np.concatenate([x.table for x in known])


def _targets(known: Sequence[Measured]) -> np.ndarray:
    return np.concatenate([np.log2(x.times_us / floor_us(x.problem, x.device)) for x in known])


def _counts(known: Sequence[Measured], drawn: Mapping[Any, int] | None = None) -> np.ndarray:
    """Return how much each choice counts. A weight may be ``drawn`` several times."""
    alike = collections.Counter(map(_alike, known))
    times = [1 if drawn is None else drawn[x.weight] for x in known]
    return np.concatenate([n * (x.times_us.min() / x.times_us) ** 2 / alike[_alike(x)] for n, x in zip(times, known, strict=True)])


def _alike(x: Measured) -> tuple[str, int]:
    """Return the kind of a problem's weight and the interval of its rows."""
    return kind_of(x.problem), int(np.searchsorted(INTERVALS, x.problem.m))


def as_arrays(members: Sequence[HistGradientBoostingRegressor]) -> Forest:
    """Return the fitted trees as complete trees."""
    nodes, trees = 2**DEPTH - 1, len(members[0]._predictors)
    feature = np.zeros((len(members), trees, nodes), dtype=np.int8)
    threshold = np.full(feature.shape, np.inf, dtype=np.float32)
    value = np.zeros((len(members), trees, nodes + 1), dtype=np.float32)
    start = np.array([float(np.squeeze(model._baseline_prediction)) for model in members], dtype=np.float32)

    def fill(tree: Any, at: tuple[int, int], node: int, place: int) -> None:
        x = tree[node]
        if place >= nodes:
            value[(*at, place - nodes)] = x["value"]
        elif x["is_leaf"]:  # both children of a node without a split are the leaf
            fill(tree, at, node, 2 * place + 1)
            fill(tree, at, node, 2 * place + 2)
        else:
            feature[(*at, place)], threshold[(*at, place)] = x["feature_idx"], x["num_threshold"]
            fill(tree, at, int(x["left"]), 2 * place + 1)
            fill(tree, at, int(x["right"]), 2 * place + 2)

    for i, model in enumerate(members):
        for j, (tree,) in enumerate(model._predictors):
            fill(tree.nodes, (i, j), 0, 0)
    return Forest(feature=feature, threshold=threshold, value=value, start=start)


def portfolio(known: Sequence[Measured], earlier: Portfolio | None = None) -> Portfolio:
    """Return the choices that add the most over CUDA's listed ones, and the sizes at which each kernel was measured.

    Those of an ``earlier`` portfolio come first.
    """
    gains, reached = [], []
    names = [] if earlier is None else list(dict.fromkeys(LAUNCH.sub("", name) for name in earlier.names))
    known = [x for x in known if not is_ruled(x.problem)]
    for x in known:
        at = dict(zip((row.name for row in x.rows), np.log2(x.times_us[x.torch] / x.times_us), strict=True))
        reached.append(max(gain for row, gain in zip(x.rows, at.values(), strict=True) if row.baseline or listed(row)))
        gains.append({row.name: at[row.name] for row in x.rows if not row.baseline and not listed(row)})
        reached[-1] = max(reached[-1], *(at[name] for name in names if name in at), -np.inf)
    counts = collections.Counter(name for at in gains for name in at)
    usual = {name for name, count in counts.items() if earlier is None or count >= LEAST_SEEN}
    while len(names) < MOST_NAMES:
        added: dict[str, float] = collections.defaultdict(float)
        for before, at in zip(reached, gains, strict=True):
            for name in at.keys() & usual:
                added[name] += max(at[name] - before, 0.0)
        best = max(sorted(added), key=added.__getitem__, default="")
        if not best or added[best] < LEAST_GAIN * len(known):
            break
        names.append(best)
        reached = [max(before, at.get(best, before)) for before, at in zip(reached, gains, strict=True)]
    sizes: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for x in known:
        for kernel in {kernel_of(row.name) for row in x.rows if row.name in names or row.name.startswith("cuda:")}:
            sizes[kernel].append(size_of(x.problem))
    points = {} if earlier is None else dict(earlier.measured)
    for kernel, found in sizes.items():
        points[kernel] = np.unique(np.array([*points.get(kernel, ()), *found], dtype=np.float32), axis=0)
    margin, spreads = MARGINS.get(known[0].weight[0], (0.0, 0.0))
    return Portfolio(names=tuple(names), measured=points, margin=margin, spreads=spreads)


def listed(row: Row) -> bool:
    """Return True for a choice that the backend CUDA offers, and not a variant of one."""
    return row.name.startswith("cuda:") and "place" in row.info


def chosen(x: Measured, forests: Mapping[str, Forest], known: Portfolio) -> tuple[int, bool]:
    """Return the index of the choice for a problem, and if it is a predicted one. Torch serves where no gain is likely."""
    if is_ruled(x.problem):
        return x.ruled(), False
    times = forests[x.group](x.table).astype(np.float64)
    gains: np.ndarray = times[:, x.torch : x.torch + 1] - times
    likely = known.likely(gains, x.problem.m)
    kernels = {kernel_of(row.name) for row in x.rows if listed(row)}
    named = [row.name in known.names and (kernel_of(row.name) in kernels or not row.name.startswith("cuda:")) for row in x.rows]
    offered = np.array([(y or listed(row)) and known.supports(row.name, x.problem) for row, y in zip(x.rows, named, strict=True)])
    best = int(np.where(offered, likely, -np.inf).argmax())
    if not offered.any():
        return x.ruled(), False
    return (best, True) if likely[best] > 0 else (x.torch, False)


def evaluated(problems: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return one record for each problem, predicted by a fit without its family."""
    found = []
    for fold in FOLDS:
        left_out = [x for x in problems if any(name.startswith(fold) for name in x.families)]
        known = [x for x in problems if x not in left_out]
        forests = fitted(known)
        portfolios = {kind: portfolio([x for x in known if kind_of(x.problem) == kind]) for kind in {x.weight[0] for x in known}}
        for x in left_out:
            kind, n, k = x.weight
            index, predicted = chosen(x, forests, portfolios[kind]) if kind in portfolios else (x.ruled(), False)
            best, torch_us = x.times_us.min(), x.times_us[x.torch]
            names = {"choice": x.rows[index].name, "best": x.rows[int(x.times_us.argmin())].name}
            numbers = {
                "regret": x.times_us[index] / best - 1,
                "rule_regret": x.times_us[x.ruled()] / best - 1,
                "over_torch": torch_us / x.times_us[index],
                "tuned_over_torch": torch_us / best,
            }
            record = {
                "kind": kind,
                "m": x.problem.m,
                "n": n,
                "k": k,
                "families": x.families,
                "fold": fold[0],
                "predicted": predicted,
            }
            found.append(record | names | {name: round(float(value), 4) for name, value in numbers.items()})
    return found


def before_and_after(model: Predictor, problems: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the regret of the predictor for each problem, as it is and with further trees that did not see these sizes."""
    sizes, found = sorted({x.weight[1:] for x in problems}), []
    for part in (set(sizes[i::PARTS]) for i in range(PARTS)):
        models = {"before": model, "after": further(model, [x for x in problems if x.weight[1:] not in part])}
        for x in (x for x in problems if x.weight[1:] in part):
            kind, n, k = x.weight
            record: dict[str, Any] = {
                "kind": kind,
                "m": x.problem.m,
                "n": n,
                "k": k,
                "device": x.device.name,
                "timing": x.origin["timing"],
            }
            for name, fitted_model in models.items():
                index, _ = chosen(x, fitted_model.forests, fitted_model.portfolios[kind])
                record |= {name: x.rows[index].name, f"{name}_regret": round(float(x.times_us[index] / x.times_us.min() - 1), 4)}
            found.append(record | {"best": x.rows[int(x.times_us.argmin())].name})
    return sorted(found, key=lambda x: (x["timing"], x["device"], x["kind"], x["m"], x["n"], x["k"]))


def seen(known: Portfolio, problem: Problem) -> bool:
    """Return True if a weight of the problem's sizes was measured for the fit, at any number of rows."""
    points = np.concatenate(list(known.measured.values()))[:, 1:]
    return bool((np.abs(points - size_of(problem)[1:]) <= 0.5 / STEPS_PER_OCTAVE).all(axis=1).any())


def unseen(paths: Sequence[str]) -> dict[str, Any]:
    """Return what the package's own predictor takes for the weights of other stores, and its speed over the dense product.

    The stores have torch's dense product of the same sizes too.
    """
    model, problems = own_predictor(), [default_launches(x) for x in measured(paths, {})]
    dense = {(x.problem.m, x.problem.n, x.problem.k): float(x.times_us[x.torch]) for x in problems if x.weight[0] == "dense"}
    found = []
    for x in problems:
        kind, n, k = x.weight
        if kind == "dense" or seen(model.portfolios[kind], x.problem):
            continue
        index, predicted = chosen(x, model.forests, model.portfolios[kind])
        base_us, names = dense[x.problem.m, n, k], {"choice": x.rows[index].name, "best": x.rows[int(x.times_us.argmin())].name}
        numbers = {
            "regret": x.times_us[index] / x.times_us.min() - 1,
            "over_dense": base_us / x.times_us[index],
            "tuned_over_dense": base_us / x.times_us.min(),
        }
        record = {"kind": kind, "m": x.problem.m, "n": n, "k": k, "predicted": predicted}
        found.append(record | names | {name: round(float(value), 4) for name, value in numbers.items()})
    found.sort(key=lambda x: (x["kind"], x["m"], x["n"], x["k"]))
    machines = sorted({tuple(sorted(x.origin.items())) for x in problems})
    return {"predictor": model.digest, "machines": [dict(x) for x in machines], "records": found}


def own_predictor() -> Predictor:
    """Return the package's predictor."""
    model = shipped_predictor()
    if model is None:
        raise click.ClickException("the package has no predictor")
    return model


def first_fit(model: Predictor) -> Predictor:
    """Return a predictor without its further trees. Its times are off by one factor, which matters for none of its choices."""
    parts = ("feature", "threshold", "value")
    forests = {
        group: dataclasses.replace(forest, **{name: getattr(forest, name)[:, :TREES] for name in parts})
        for group, forest in model.forests.items()
    }
    return dataclasses.replace(model, forests=forests)


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the quantiles of the regret, and the geometric mean of the speed over torch."""
    regret, rule = (np.array([x[name] for x in records]) for name in ("regret", "rule_regret"))
    speed, tuned = (np.log([x[name] for x in records]) for name in ("over_torch", "tuned_over_torch"))
    numbers = {
        "regret_median": np.median(regret), "regret_p95": np.quantile(regret, 0.95), "regret_most": regret.max(),
        "rule_regret_median": np.median(rule), "rule_regret_p95": np.quantile(rule, 0.95),
        "over_torch": np.exp(speed.mean()), "over_torch_least": np.exp(speed.min()), "tuned_over_torch": np.exp(tuned.mean()),
    }  # fmt: skip
    counts = {"problems": len(records), "predicted": sum(x["predicted"] for x in records)}
    return counts | {name: round(float(value), 4) for name, value in numbers.items()}


def ship(problems: Sequence[Measured], folder: Path, *, add: bool) -> None:
    """Write the fastest choices of each problem, and torch's, to a file for each GPU.

    With ``add`` the file keeps what it has of other problems. Those that were timed in graphs or on a busy machine are left out.
    """
    for device in {x.device for x in problems}:
        own, times = [x for x in problems if x.device == device], collections.defaultdict[str, dict[int, list[ShippedTime]]](dict)
        path, dates = folder / file_of(device.name).name, [row.measured_at[:10] for x in own for row in x.rows]
        machine = own[0].origin
        if add:
            own = [x for x in own if x.origin["timing"] != "graph" and not any(row.info.get(DISTURBED) for row in x.rows)]
            earlier = unpacked(path.read_bytes())
            if not own:
                continue
            machine, dates = earlier.machine, [*dates, earlier.versions["measured"][:10]]
            if any(x.origin[name] != machine[name] for x in own for name in SAME):
                raise click.ClickException(f"{path} is of other versions or another GPU; write a file without --further")
            for weight, by_m in earlier.times.items():
                times[weight] = {m: list(found) for m, found in by_m.items()}
        for x in own:
            order = [i for i in x.times_us.argsort() if x.rows[i].name.startswith(("triton:", "cuda:"))][:SHIPPED]
            times[weight_of(x.problem)][x.problem.m] = [
                ShippedTime(
                    name=x.rows[i].name,
                    content_hash=x.rows[i].content_hash[:HASH_DIGITS],
                    time_us=round(float(x.times_us[i]), 2),
                    baseline=x.rows[i].baseline,
                )
                for i in sorted((*order, x.torch), key=lambda i: x.times_us[i])
            ]
        path.write_bytes(packed_times(machine, {"gemmtune": __version__, "measured": f"{min(dates)} to {max(dates)}"}, times))
        click.echo(f"{path}: {len(times)} weights, {path.stat().st_size} bytes")


def _united(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    return [*first, *(x for x in second if x not in first)]


@click.command()
@click.argument("stores", nargs=-1, required=True)
@click.option("--families", multiple=True, help="File with the models that have each weight.")
@click.option("--unseen", "other", help="Evaluate the package's own predictor on the stores, and write that to this file.")
@click.option("--json", "report", help="Write the evaluation to this file.")
@click.option("--out", help="Fit to everything, and write the predictor to this file.")
@click.option("--ship", "folder", help="Write the fastest choices to a file for each GPU in this folder; --further adds to it.")
@click.option("--further", "more", is_flag=True, help="Keep the package's predictor, and add trees for what it misses here.")
def main(
    stores: Sequence[str],
    families: Sequence[str],
    other: str | None,
    report: str | None,
    out: str | None,
    folder: str | None,
    more: bool,
) -> None:
    """Evaluate on families that are left out, and fit to all."""
    if other:
        Path(other).write_text(json.dumps(unseen(stores), indent=1) + "\n")
        return
    entries = [x for path in families for x in json.loads(Path(path).read_text())]
    problems = measured(stores, {(x["n"], x["k"]): x["families"] for x in entries})
    origins = [dict(x.origin) for x in problems]
    origin = {
        "devices": sorted({x["device"] for x in origins}),
        "machines": [dict(x) for x in sorted({tuple(sorted(y.items())) for y in origins})],
    }
    if folder:
        ship(problems, Path(folder), add=more)
    problems = [default_launches(x) for x in problems]
    if more:
        model = first_fit(own_predictor())
        origin = {name: _united(model.origin[name], values) for name, values in origin.items()}
        if report:
            records = before_and_after(model, problems)
            Path(report).write_text(json.dumps({"origin": origin, "records": records}, indent=1) + "\n")
        if out:
            added = further(model, problems)
            Path(out).write_bytes(packed_predictor(added.forests, added.portfolios, origin))
        return
    if report:
        records = evaluated(problems)
        groups = {(x["kind"], x["m"]) for x in records}
        rows = [
            {"kind": kind, "m": m} | summary([x for x in records if (x["kind"], x["m"]) == (kind, m)]) for kind, m in sorted(groups)
        ]
        kinds = {kind: summary([x for x in records if x["kind"] == kind]) for kind in sorted({kind for kind, _ in groups})}
        for line in (*kinds.items(), *rows):
            click.echo(line)
        Path(report).write_text(json.dumps({"origin": origin, "kinds": kinds, "rows": rows, "records": records}, indent=1) + "\n")
    if out:
        by_kind = {kind: [x for x in problems if x.weight[0] == kind] for kind in sorted({x.weight[0] for x in problems})}
        data = packed_predictor(fitted(problems), {kind: portfolio(known) for kind, known in by_kind.items()}, origin)
        Path(out).write_bytes(data)
        click.echo(f"{out}: {len(data)} bytes, octaves within {NEAR}")


if __name__ == "__main__":
    main()
