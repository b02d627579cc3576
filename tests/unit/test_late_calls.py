"""Calls after the main thread has ended: in threads that outlive it, and in functions of atexit."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from unittest import mock

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.strategies import has_main_ended
from gemmtune.threads import in_a_thread

PROGRAM = textwrap.dedent("""
    import concurrent.futures, threading
    from gemmtune.dispatch.strategies import has_main_ended
    from gemmtune.threads import in_a_thread

    def late():
        threading.main_thread().join()
        try:
            concurrent.futures.ThreadPoolExecutor(1).submit(int)
        except RuntimeError:
            print("no pool", has_main_ended(), in_a_thread(lambda: threading.current_thread().name))

    threading.Thread(target=late).start()
    print(has_main_ended())
""")


def test_a_thread_outlives_the_main_one():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["False", "no pool True gemmtune-tuning"], done.stderr


def test_nothing_is_tuned_after_the_end_of_the_main_thread(own_store):
    a, b = torch.randn(19, 67), torch.randn(67, 33)
    with (
        settings.patch(search="quick"),
        mock.patch("gemmtune.dispatch.strategies.has_main_ended", return_value=True),
        pytest.warns(RuntimeWarning, match="main thread of this program has ended"),
    ):
        result = gemmtune.mm(a, b)
    assert torch.allclose(result, a @ b, atol=1e-3)
    assert gemmtune.explain("mm", a, b).pick is None


def test_a_thread_gives_its_error_and_the_settings_of_its_caller():
    with settings.patch(search="quick"):
        assert in_a_thread(lambda: settings.current().search) == "quick"
    with pytest.raises(ZeroDivisionError):
        in_a_thread(lambda: 1 // 0)
    assert not has_main_ended()
