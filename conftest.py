"""Steps that must precede the import of torch. The plugin has the options of the conformance suite and sees to ``gpu``.

The settings of pytest are in tox.ini.
"""

import gc
import os

# The tests run in one process for each core; a second thread in each would only take turns with the neighbour's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A process of tests holds a million objects. Collections of young ones every 700 allocations took a twentieth of a run.
gc.set_threshold(20_000, 50, 50)

pytest_plugins = ["gemmtune.conformance.plugin"]
