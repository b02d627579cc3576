"""The plugin in the real SGLang: layers and hooks of its own, and equal tokens by its engine with and without the plugin."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import sglang_stand_in as stand_in
from extras import needs
from serving_checks import TIE, equal_but_for_ties

from gemmtune.integration import sglang as plugin
from gemmtune.integration.sglang.points import DENSE, MIXED, SCALED, Points, find_points

HERE = Path(__file__).parent
LAYERS = """
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.awq import AWQConfig
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_stand_in import awq_layer
from tables_of_rows import put_table
import gemmtune.integration.sglang as plugin
from gemmtune.dispatch.ready import ready
from gemmtune.problem import Problem

N, K = 48, 64
put_table(Problem.mm(8, N, K, dtype="fp32", device_type="cpu"), [(1, 64, "cpp:")])
words = {"dtype": "bf16", "encoding": "uint4", "zeros": True, "scales": "group_32", "device_type": "cpu"}
put_table(Problem.mixed_mm(8, N, K, **words), [(1, 64, "cpp:")])
plugin.register()
HookRegistry.apply_hooks()

dense = ReplicatedLinear(K, N, bias=True, params_dtype=torch.float32)
for x in dense.parameters():
    x.data.normal_()
packed = ReplicatedLinear(K, N, bias=False, params_dtype=torch.bfloat16, quant_config=AWQConfig(4, 32, True), prefix="packed")
layer, _, weight = awq_layer(K, N, 32)
for name, x in layer.named_parameters():
    packed.get_parameter(name).data.copy_(x)
for x in (dense, packed):
    x.quant_method.process_weights_after_loading(x)
compiled = torch.compile(lambda x: dense(x)[0], backend="eager", dynamic=True, fullgraph=True)
for m in (1, 3, 5, 7):
    x = torch.randn(m, K)
    expected = torch.nn.functional.linear(x, dense.weight, dense.bias)
    torch.testing.assert_close(dense(x)[0], expected)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(packed(x.bfloat16())[0].float(), x.bfloat16().float() @ weight, atol=0.1, rtol=0.02)
dense.weight.data.copy_(torch.randn(N, K))
torch.testing.assert_close(dense(x)[0], torch.nn.functional.linear(x, dense.weight, dense.bias))
print(sorted({f"{entry.plan.problem.op} {entry.plan.choice.backend}" for entry in ready.values()}))
"""


def ran(folder: Path, arguments: list[str], **changes: str) -> str:
    """Run a program in which SGLang is imported, with one thread and tables of its own. Return the last line that it printed."""
    ours = {
        "GEMMTUNE_CACHE_DIR": str(folder / "cache"), "GEMMTUNE_SEARCH": "quick", "GEMMTUNE_SGLANG": "all", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE, HERE.parent / "unit", HERE.parent))),
    }  # fmt: skip
    variables = {name: x for name, x in os.environ.items() if not name.startswith("GEMMTUNE_")} | ours | changes
    done = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def test_the_distribution_declares_the_plugin() -> None:
    [point] = [x for x in entry_points(group="sglang.srt.plugins") if x.name == "gemmtune"]
    assert point.load() is plugin.register


@needs("sglang")
@pytest.mark.slow
def test_layers_of_the_real_package_run_by_our_kernels(tmp_path: Path) -> None:
    assert ran(tmp_path, ["-c", LAYERS]) == "['mixed_mm cpp', 'mm cpp']"


@needs("sglang", "vllm")  # SGLang takes vLLM's rotary embedding on a CPU
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "kernels"), [("", 1), ("experts", 2)], ids=["dense", "experts"])
def test_the_engine_gives_equal_tokens_by_our_kernels(tmp_path: Path, method: str, kernels: int) -> None:
    answers = list[Any]()
    for switch in ("all", "0"):
        file = tmp_path / switch
        program = [str(HERE / "sglang_engine.py"), str(tmp_path / "model"), method]
        tokens = ran(tmp_path, program, GEMMTUNE_SGLANG=switch, SGLANG_RAN=str(file))
        answers.append((json.loads(tokens), json.loads(file.read_text())))
    (ours, seen), (theirs, nothing) = answers
    assert equal_but_for_ties(ours, theirs, TIE) > 60  # of 72
    assert len(ours["tokens"]) == 12
    assert seen["tunings"] == nothing["tunings"] == nothing["ran"] == []
    assert len(seen["ran"]) == kernels


@needs("sglang")
@pytest.mark.slow
def test_the_stand_in_is_as_sglang_is(tmp_path: Path) -> None:
    found = find_points()
    assert isinstance(found, Points), found
    assert {*MIXED, *SCALED} <= found.targets
    assert found.combined is not None
    made = stand_in.StandIn("cpu")
    for name in ("register", "apply_hooks"):
        ours, theirs = (inspect.signature(getattr(x, name)) for x in (made.registry, found.registry))
        assert list(ours.parameters) == list(theirs.parameters)
    assert found.around.name == "AROUND"
    assert found.most_rows is None  # this process serves nothing
    assert not found.bounded
    for target in (DENSE, *MIXED, *SCALED):
        assert made.method(target)
