"""What has to be done before anything imports torch. The plugin has the options of the conformance suite and sees to ``gpu``.

The settings of pytest are in tox.ini.
"""

import os

# The tests run in one process for each core; a second thread in each would only take turns with the neighbour's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["gemmtune.conformance.plugin"]
