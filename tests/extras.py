"""Optional packages of the tests. ``@needs("cutlass")`` skips a test without that extra, and says so."""

from __future__ import annotations

import importlib.util

import pytest

MODULES = {
    "triton": "triton",
    "cublaslt": "nvmath",
    "cutlass": "cutlass_library",
    "fleet": "ray",
    "models": "transformers",
    "torchao": "torchao",
    "accelerate": "accelerate",
    "peft": "peft",
    "lightning": "lightning",
    "vllm": "vllm",
    "sglang": "sglang",
    "serve": "fastapi",
    "kernels": "kernels",
    "kernel_tuner": "kernel_tuner",
    "autotuning_methodology": "autotuning_methodology",
}
"""Module of each extra, by the name that tests give: an extra of gemmtune, a package of the extra ``models``, vLLM, SGLang,
``transformers[serving]``, the package ``kernels``, or a package that reads our files."""


def needs(*extras: str) -> pytest.MarkDecorator:
    """Return the mark of a test that cannot run without these extras."""
    return pytest.mark.needs(*extras)


def missing(extra: str) -> bool:
    """Return True if the module of an extra is not installed. Raises KeyError for an unknown name."""
    return importlib.util.find_spec(MODULES[extra]) is None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs an absent extra."""
    for mark in item.iter_markers("needs"):
        absent = [extra for extra in mark.args if missing(extra)]
        if absent:
            pytest.skip(f"needs the extra {' and '.join(absent)}, which is not installed")
