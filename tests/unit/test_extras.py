"""The mark ``needs`` skips what an absent package makes impossible, and nothing else."""

from __future__ import annotations

import extras
import pytest

pytest_plugins = ["pytester"]
SOURCE = """
from extras import needs
import pytest

@needs("cutlass")
def test_runs(): pass

@needs("nowhere")
def test_skipped(): raise AssertionError("ran")

@needs("misspelt")
def test_unknown(): pass
"""


def test_absent_extra_skips_with_its_name(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(extras.MODULES, "nowhere", "no_such_module")
    monkeypatch.setitem(extras.MODULES, "cutlass", "pytest")
    pytester.makeconftest("from extras import pytest_runtest_setup")
    pytester.makeini("[pytest]\nmarkers =\n    needs: an extra\n")
    pytester.makepyfile(SOURCE)
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, skipped=1, errors=1)
    result.stdout.fnmatch_lines(["*KeyError: 'misspelt'*", "*needs the extra nowhere, which is not installed*"])
