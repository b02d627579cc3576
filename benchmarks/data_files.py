"""Writers of the files in ``gemmtune/data``, which ``selector.predictor`` and ``selector.shipped`` read."""

import gzip
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from gemmtune.selector import shipped
from gemmtune.selector.features import NAMES
from gemmtune.selector.predictor import STEPS_PER_OCTAVE, VERSION, Forest, Portfolio


def packed_predictor(forests: Mapping[str, Forest], portfolios: Mapping[str, Portfolio], origin: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file with a predictor."""
    points = [np.round(x * STEPS_PER_OCTAVE).astype(np.uint16) for p in portfolios.values() for x in p.measured.values()]
    meta = {
        "version": VERSION,
        "features": NAMES,
        "origin": dict(origin),
        "groups": list(forests),
        "portfolios": {
            kind: {"names": p.names, "counts": {x: len(y) for x, y in p.measured.items()}, "margin": p.margin, "spreads": p.spreads}
            for kind, p in portfolios.items()
        },
    }
    file = io.BytesIO()
    np.savez_compressed(
        file,
        meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
        feature=np.stack([x.feature for x in forests.values()]),
        threshold=np.stack([x.threshold for x in forests.values()]),
        value=np.stack([x.value for x in forests.values()]).astype(np.float16),
        start=np.stack([x.start for x in forests.values()]),
        points=np.concatenate(points) if points else np.zeros((0, 3), np.uint16),
    )
    return file.getvalue()


def packed_times(machine: Mapping[str, str], versions: Mapping[str, str], times: shipped.Times) -> bytes:
    """Return the bytes of a file. Equal measurements give equal bytes."""
    weights = {
        weight: {str(m): [[x.name, x.content_hash, x.time_us, x.baseline] for x in found] for m, found in sorted(by_m.items())}
        for weight, by_m in sorted(times.items())
    }
    data = {
        "format": shipped.FORMAT,
        "version": shipped.VERSION,
        "machine": dict(machine),
        "versions": dict(versions),
        "weights": weights,
    }
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
