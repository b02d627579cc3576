"""Program without torch: it reads pickled compilations and settings from its input, runs them, and prints which modules it has."""

from __future__ import annotations

import pickle
import sys

from gemmtune.workers import compiling

if __name__ == "__main__":
    compilations, settings = pickle.loads(sys.stdin.buffer.read())
    for compilation in compilations:
        compiling.run(compilation, settings)
    print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "triton", "numpy"}))
