"""The plugin in the real vLLM on a CPU: equal tokens with and without it, our kernels seen to run, nothing tuned in a request.

Each test starts programs that import vLLM and compile kernels, a minute each.
"""

from __future__ import annotations

import http.client
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_models
import vllm_stand_in as stand_in
from extras import needs
from http_server import free_port, started
from serving_checks import TIE, equal_but_for_ties

from gemmtune.integration.vllm.points import KERNELS, MOE, ExpertPoints, Points, find_points

HERE = Path(__file__).parent


def environment(folder: Path, changes: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program that runs vLLM with one thread, and keeps its kernels in ``folder``."""
    ours = {
        "GEMMTUNE_CACHE_DIR": str(folder / "cache"), "GEMMTUNE_SEARCH": "quick", "GEMMTUNE_VLLM": "all",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(folder / "vllm"), "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE, HERE.parent / "unit", HERE.parent))),
    }  # fmt: skip
    return {name: x for name, x in os.environ.items() if not name.startswith("GEMMTUNE_")} | ours | dict(changes)


def ran(folder: Path, arguments: Mapping[str, Any], **changes: str) -> dict[str, Any]:
    """Run the engine once, and return what it printed."""
    command = [sys.executable, str(HERE / "vllm_engine.py"), json.dumps(dict(arguments))]
    done = subprocess.run(command, env=environment(folder, changes), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_tokens_may_differ_at_ties_only() -> None:
    theirs = {"tokens": [[1, 2, 3]], "margins": [[1.0, 0.01, 1.0]]}
    assert equal_but_for_ties({"tokens": [[1, 2, 3]]}, theirs, TIE) == 3
    equal_but_for_ties({"tokens": [[1, 9, 9]]}, theirs, TIE)  # another token at the tie changes all that follow
    with pytest.raises(AssertionError):
        equal_but_for_ties({"tokens": [[9, 2, 3]]}, theirs, TIE)


@needs("vllm")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_bf16_gives_equal_tokens_by_our_kernels(tmp_path: Path, eager: bool) -> None:
    model = vllm_models.write_model(tmp_path / "model")
    asked = {"model": str(model), "load_format": "auto", "mixed": "", "eager": eager}
    ours, theirs = ran(tmp_path, asked), ran(tmp_path, asked, GEMMTUNE_VLLM="0")
    assert equal_but_for_ties(ours, theirs, TIE) > 140  # of 160
    assert len(ours["tokens"]) == 20
    assert (ours["ran"], theirs["ran"]) == (["mm cpp"], [])
    assert ours["tunings"] == []
    assert ours["layers"] == 4
    assert theirs["layers"] == 0


@needs("vllm")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_int4_gives_equal_tokens_by_our_kernels(tmp_path: Path, method: str) -> None:
    model = vllm_models.write_model(tmp_path / "model", method)
    asked = {"model": str(model), "load_format": "auto", "mixed": method, "eager": True}
    wide = asked | {"model": str(vllm_models.write_model(tmp_path / "wide", method, widened=True)), "mixed": ""}
    # vLLM alone has no product of int4 on a CPU without AVX-512
    ours, theirs = ran(tmp_path, asked), ran(tmp_path, asked if torch.cpu._is_avx512_supported() else wide, GEMMTUNE_VLLM="0")
    assert equal_but_for_ties(ours, theirs, TIE) > 140  # of 160
    assert ours["ran"] == ["mixed_mm cpp", "mm cpp"]
    assert ours["tunings"] == []


@needs("vllm")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_experts_give_equal_tokens_by_our_kernels(tmp_path: Path, eager: bool) -> None:
    model = vllm_models.write_model(tmp_path / "model", "experts")
    asked = {"model": str(model), "load_format": "auto", "mixed": "experts", "eager": eager}
    ours, theirs = ran(tmp_path, asked), ran(tmp_path, asked, GEMMTUNE_VLLM="0")
    assert equal_but_for_ties(ours, theirs, TIE) > 130  # of 160
    assert (ours["ran"], theirs["ran"]) == (["grouped_mm cpp", "mm cpp"], [])
    assert ours["tunings"] == []
    assert ours["layers"] == 3  # two sizes of linear layers, and experts


@needs("vllm")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_tables_vllm_runs_every_layer(tmp_path: Path) -> None:
    model = vllm_models.write_config(tmp_path / "model")
    asked = {"model": str(model), "load_format": "dummy", "mixed": "", "eager": True, "plant": False}
    assert (found := ran(tmp_path, asked))["ran"] == []
    assert (found["layers"], found["tunings"]) == (0, [])


@needs("vllm")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_serves_over_http(tmp_path: Path) -> None:
    model = vllm_models.write_model(tmp_path / "model")
    ran(tmp_path, {"model": str(model), "load_format": "auto", "mixed": "", "eager": True})  # plants the tables
    answers = []
    for switch in ("all", "0"):
        with serving(tmp_path, model, GEMMTUNE_VLLM=switch) as (port, log):
            answers.append([asked(port, list(range(2, 2 + length))) for length in (1, 7, 19)])
            assert ("gemmtune runs mm Mx512x256" in log.read_text()) == (switch == "all")
    assert answers[0] == answers[1]


@contextmanager
def serving(folder: Path, model: Path, **changes: str) -> Iterator[tuple[int, Path]]:
    """Serve the model. Yield the port and the server's log."""
    port = free_port()
    log = folder / f"server-{port}.log"
    words = [
        "--model", str(model), "--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16",
        "--max-model-len", "256", "--max-num-seqs", "8", "--host", "127.0.0.1", "--port", str(port), "--seed", "0",
        "--enable-scale-out",  # the endpoint that takes and returns numbers of tokens, as the model has no tokenizer
    ]  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    variables = environment(folder, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **changes})
    with started(command, port, log, variables):
        yield port, log


def asked(port: int, prompt: list[int]) -> Any:
    """Return the greedy tokens that follow a prompt."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"token_ids": prompt, "sampling_params": {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "detokenize": False}}
    connection.request("POST", "/inference/v1/generate", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, text
    return [choice["token_ids"] for choice in json.loads(text)["choices"]]


@needs("vllm")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_stand_in_is_as_vllm_is() -> None:
    found = find_points()
    assert isinstance(found, Points), found
    assert isinstance(found.experts, ExpertPoints), found.experts
    bases = {x.__name__: x for x in (*found.bases.values(), found.experts.base)}
    for base in stand_in.BASES:
        real = bases[base.__name__]
        assert real.__module__.startswith((KERNELS, MOE))
        for name, function in vars(base).items():
            if inspect.isfunction(function):
                theirs = [x for x in inspect.signature(getattr(real, name)).parameters if x != "kwargs"]
                ours = [x for x in inspect.signature(function).parameters if x != "_"]
                assert ours == theirs[: len(ours)] or name == "apply_scaled_mm", (base.__name__, name, theirs, ours)
