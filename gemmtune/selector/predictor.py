"""Prediction of the times of choices that nobody measured on this problem, from measurements of other weights.

Two ensembles of boosted trees predict log2(time / floor) from ``features``, one for dense weights and one for those of 4 or 8 bits.
What their members disagree about is uncertain. A choice counts only near problems for which it was measured.
``benchmarks/predictor.py`` fits the ensembles and writes the file.
"""

import functools
import hashlib
import io
import json
import logging
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ..choice import Choice
from ..device import DeviceInfo
from ..problem import Problem
from .features import NAMES, Described, features, floor_us, group_of, is_ruled, kernel_of, kind_of, why_unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Sum of complete binary trees of one depth per model. ``row[feature] > threshold`` goes right, ``value`` has the leaves."""

    feature: NDArray[np.int8]  # (members, trees, 2^depth - 1)
    threshold: NDArray[np.float32]  # (members, trees, 2^depth - 1)
    value: NDArray[np.float32]  # (members, trees, 2^depth)
    start: NDArray[np.float32]  # (members,)

    def __post_init__(self) -> None:
        members, trees, nodes = self.feature.shape if self.feature.ndim == 3 else (0, 0, 0)
        leaves = (members, trees, nodes + 1)
        if not members or nodes & (nodes + 1) or self.threshold.shape != self.feature.shape:
            raise ValueError(f"forest: got nodes {self.feature.shape} and {self.threshold.shape}, expected complete trees")
        if self.value.shape != leaves or self.start.shape != (members,):
            raise ValueError(f"forest: got leaves {self.value.shape} and {self.start.shape}, expected {leaves} and ({members},)")

    @property
    def columns(self) -> int:
        """Number of features that the rows must have at least."""
        return int(self.feature.max()) + 1

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return each member's sum for each row: [members, rows]."""
        members, trees, nodes = self.feature.shape
        feature, threshold = self.feature.reshape(-1), self.threshold.reshape(-1)
        count, width = rows.shape
        flat, row = np.ascontiguousarray(rows).reshape(-1), (np.arange(count) * width)[:, None]
        root = (np.arange(members * trees) * nodes)[None, :]
        place = np.zeros((count, members * trees), dtype=np.int64)
        for _ in range((nodes + 1).bit_length() - 1):
            node = root + place
            place = 2 * place + 1 + (flat.take(row + feature.take(node)) > threshold.take(node))
        leaf = self.value.reshape(-1).take(np.arange(members * trees)[None, :] * (nodes + 1) + place - nodes)
        sums: NDArray[np.float32] = leaf.reshape(count, members, trees).sum(axis=2)
        return (sums + self.start).T


log = logging.getLogger("gemmtune")

FILE = Path(__file__).parents[1] / "data" / "predictor.npz"
VERSION = 3
DAMAGES = (
    BadZipFile, zlib.error, struct.error, LookupError, TypeError, AttributeError, OSError, EOFError, UnicodeDecodeError,
    ArithmeticError, MemoryError, RuntimeError,
)  # fmt: skip
"""Exceptions of zipfile and numpy for a file with other bytes: wrong lengths, methods, flags, sizes."""
NEAR = (1.0, 2.0, 2.5)
"""Octaves of M, N and K within which a measured problem supports a prediction."""
FEW_ROWS, MARGIN_OF_MORE = 16, 0.02
"""Rows up to which the margin and spreads of a portfolio hold, and the least margin above: gains are small there."""
STEPS_PER_OCTAVE = 16
"""Steps in which the file keeps the logarithms of measured sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio:
    """Choices for one kind of weight, and where their kernels were measured.

    ``names`` are choices that were the fastest somewhere, and that no cheap enumeration lists. ``measured`` has log2 of M, N and K
    of the measured problems by kernel (``kernel_of``). A predicted gain over torch must exceed ``margin`` octaves and ``spreads``
    standard deviations of the members. Held-out weights determine both.
    """

    names: tuple[str, ...]
    measured: Mapping[str, NDArray[np.float32]]  # (problems, 3)
    margin: float
    spreads: float

    def likely(self, gains: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
        """Return what remains of predicted gains over torch, by member and choice, for a number of rows: [choices]."""
        few = rows <= FEW_ROWS
        margin, spreads = (self.margin, self.spreads) if few else (max(self.margin, MARGIN_OF_MORE), 0.0)
        least: NDArray[np.float64] = gains.mean(axis=0) - margin - spreads * gains.std(axis=0)
        return least

    def supports(self, name: str, problem: Problem) -> bool:
        """Return True if the choice's kernel was measured near the problem."""
        points = self.measured.get(kernel_of(name))
        return points is not None and bool((np.abs(points - size_of(problem)) <= NEAR).all(axis=1).any())


def size_of(problem: Problem) -> NDArray[np.float64]:
    """Return log2 of M, N and K: (3,)."""
    return np.log2([problem.m, problem.n, problem.k])


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Fitted models by group of kinds of weights, with the kernels that they may recommend by kind."""

    forests: Mapping[str, Forest]
    portfolios: Mapping[str, Portfolio]
    origin: Mapping[str, Any]
    """Versions and GPUs of the measurements."""
    digest: str = ""
    """First digits of the file's hash. Tables by another file are made anew."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the GPUs that were measured."""
        return tuple(self.origin["devices"])

    @property
    def archs(self) -> frozenset[str]:
        """Their architectures."""
        return frozenset(machine["arch"] for machine in self.origin["machines"])

    def knows(self, problem: Problem, device: DeviceInfo) -> bool:
        """Return True if weights of the problem's kind were measured, on this GPU or on one of the same multiprocessors."""
        return kind_of(problem) in self.portfolios and why_unknown(problem, device) is None

    def times(self, problem: Problem, device: DeviceInfo, choices: Sequence[Choice]) -> dict[str, NDArray[np.float64]]:
        """Return log2 of the predicted times by name, [members], of the choices that were measured near the problem.

        Torch's own operation was measured everywhere. Only differences mean something: the floor of the problem is left out.
        Empty for problems that the rule serves.
        """
        if is_ruled(problem) or not self.knows(problem, device):
            return {}
        portfolio, known = self.portfolios[kind_of(problem)], dict[str, Described]()
        for choice in choices:
            described = Described.of(choice.name, choice.info)
            if described is not None and (choice.baseline or portfolio.supports(choice.name, problem)):
                known[choice.name] = described
        if not known:
            return {}
        found = self.forests[group_of(kind_of(problem))](features(problem, device, list(known.values()))).astype(np.float64)
        return dict(zip(known, found.T, strict=True))

    def time_us(self, problem: Problem, device: DeviceInfo, choice: Choice) -> float | None:
        """Return the predicted time of a choice between other kernels, in µs. None if it was not measured near the problem."""
        found = self.times(problem, device, (choice,)).get(choice.name)
        return None if found is None else floor_us(problem, device) * 2.0 ** float(found.mean())

    def gains(self, problem: Problem, device: DeviceInfo, choices: Sequence[Choice], baseline: Choice) -> NDArray[np.float64]:
        """Return each choice's likely gain over ``baseline`` in octaves, [len(choices)]; −inf if not measured nearby."""
        found = np.full(len(choices), -np.inf)
        times = self.times(problem, device, (*choices, baseline))
        known = [i for i, choice in enumerate(choices) if choice.name in times and not choice.baseline]
        if baseline.name in times and known:
            gains = [times[baseline.name] - times[choices[i].name] for i in known]
            found[known] = self.portfolios[kind_of(problem)].likely(np.stack(gains, axis=1), problem.m)
        return found


def unpacked(data: bytes) -> Predictor:
    """Return the predictor of a file. Raises ValueError if the bytes are no such file, or one of another version."""
    if not data.startswith(b"PK"):
        raise ValueError(f"got {len(data)} bytes that are no archive, expected one of version {VERSION}")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            meta = json.loads(arrays["meta"].tobytes())
            if meta["version"] != VERSION or tuple(meta["features"]) != NAMES:
                raise ValueError(f"got version {meta['version']} with {len(meta['features'])} features, expected {VERSION}")
            names = ("feature", "threshold", "value", "start")
            parts = zip(*(arrays[x].astype(np.float32) if x == "value" else arrays[x] for x in names), strict=True)
            forests = {
                group: Forest(**dict(zip(names, part, strict=True))) for group, part in zip(meta["groups"], parts, strict=True)
            }
            points = arrays["points"].astype(np.float32) / STEPS_PER_OCTAVE
        if any(x.columns > len(NAMES) or int(x.feature.min()) < 0 for x in forests.values()):
            raise ValueError(f"got trees over other features than {len(NAMES)}")
        portfolios, begin = {}, 0
        for kind, x in meta["portfolios"].items():
            measured = {}
            for kernel, count in x["counts"].items():
                measured[kernel], begin = points[begin : begin + count], begin + count
            listed, margin, spreads = tuple(map(str, x["names"])), float(x["margin"]), float(x["spreads"])
            portfolios[kind] = Portfolio(names=listed, measured=measured, margin=margin, spreads=spreads)
        if begin != len(points):
            raise ValueError(f"got {len(points)} measured sizes, expected {begin}")
    except DAMAGES as error:
        raise ValueError(f"got damaged data ({type(error).__name__}: {error})") from error
    return Predictor(forests=forests, portfolios=portfolios, origin=meta["origin"], digest=hashlib.sha256(data).hexdigest()[:8])


@functools.cache
def shipped_predictor() -> Predictor | None:
    """Return the package's predictor. None without its file, or with one that cannot be read, which is logged once."""
    if not FILE.is_file():
        return None
    try:
        return unpacked(FILE.read_bytes())
    except (OSError, ValueError) as error:
        log.warning("%s: %s, expected the predictor of this version; install gemmtune again. Nothing is predicted", FILE, error)
        return None
