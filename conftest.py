"""What needs a CUDA device is skipped, with this reason, where there is none. The other settings of pytest are in tox.ini."""

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` on a machine without one, so that ``-m sm80`` runs anywhere; asked for, they fail there."""
    if torch.cuda.is_available():
        return
    if config.getoption("markexpr") == "gpu":
        raise pytest.UsageError("-m gpu: got no CUDA device (torch sees none), expected one; run without -m gpu on this machine")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))
