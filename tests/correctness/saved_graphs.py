"""Steps of programs that share caches: ``python saved_graphs.py STEP FOLDER`` does one in a process and prints its report as JSON.

Nothing of gemmtune is imported at the top: one step loads a graph in a process that has not imported it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo.utils import counters

ROWS, WIDTH = 16, 64
Report = dict[str, Any]
Tensor = torch.Tensor


class Model(nn.Module):
    """Two products, of which the second has a weight of eight bits; no pointwise nodes, whose code would need a compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def example() -> Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def model() -> Model:
    """Return the model of every process."""
    torch.manual_seed(0)
    made = Model()
    importlib.import_module("gemmtune").quantize_(made.second, "int8")
    return made


def weights() -> tuple[Tensor, Tensor]:
    """Return two weights next to each other in one storage."""
    whole = torch.linspace(-1, 1, 2 * WIDTH * WIDTH).reshape(2 * WIDTH, WIDTH)
    return whole[:WIDTH], whole[WIDTH:]


def pair(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply one input by two weights, which may become one product."""
    return x @ first.t(), x @ second.t()


def called(compiled: Callable[[Tensor], Tensor], eager: nn.Module) -> Report:
    """Call a compiled model, and report its error and how often each cache answered."""
    names = (("aot_autograd", "autograd_cache_hit"), ("inductor", "fxgraph_cache_hit"), ("inductor", "fxgraph_cache_miss"))
    before = [counters[group][name] for group, name in names]
    with torch.no_grad():
        got, expected = compiled(example()), eager(example())
    error = float((got - expected).abs().max())
    return {"error": error} | {name: counters[group][name] - was for (group, name), was in zip(names, before, strict=True)}


def tuned(folder: Path) -> Report:
    """Tune the model, as the first program does."""
    importlib.import_module("gemmtune").optimize(model(), tune=example(), progress=False)
    return {}


def ran(folder: Path) -> Report:
    """Run the model by stored picks, as each later program does. Nothing is loaded by its first call."""
    made = model()
    importlib.import_module("gemmtune").optimize(made)
    planned = importlib.import_module("gemmtune.integration.compile.planned")
    load = planned.ready_launch
    with patch.object(planned, "ready_launch", side_effect=load) as loaded:
        report = called(torch.compile(made, backend="gemmtune"), made)
    picks = [plan.choice.name for plan in importlib.import_module("gemmtune.dispatch.ready")._plans.values()]
    return report | {"loaded_in_calls": loaded.call_count, "launches": len(planned._launches), "picks": picks}


def compiled(folder: Path) -> Report:
    """Run the model, whose graph is compiled now, and save what the caches got, and a function compiled ahead of time."""
    report = ran(folder)
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    (folder / "artifacts").write_bytes(saved[0])
    decisions = importlib.import_module("gemmtune.integration.compile.decisions")
    importlib.import_module("gemmtune.integration.compile.backend").install(policy=decisions.FixedPolicy("alone"))
    with torch.no_grad(), torch._dynamo.config.patch(enable_aot_compile=True):  # the default since torch 2.12
        ahead = torch.compile(pair, fullgraph=True).aot_compile(((example(), *weights()), {}))
    ahead.save_compiled_function(str(folder / "package"))
    return report


def elsewhere(folder: Path) -> Report:
    """Take graphs from another cache, without ``optimize``; then without the pass, and with another version of gemmtune."""
    torch.compiler.load_cache_artifacts((folder / "artifacts").read_bytes())
    made = model()
    report = {"same": called(torch.compile(made, backend="gemmtune"), made)}
    torch._dynamo.reset()
    report["without_pass"] = called(torch.compile(made), made)
    torch._dynamo.reset()
    rewriting = importlib.import_module("gemmtune.integration.compile.rewriting")
    with patch.object(rewriting, "__version__", "another"):
        report["another_version"] = called(torch.compile(made, backend="gemmtune"), made)
    torch._dynamo.reset()
    with patch.object(rewriting, "_source_digest", return_value="another"):
        report["another_source"] = called(torch.compile(made, backend="gemmtune"), made)
    return report


def loaded(folder: Path) -> Callable[..., Any]:
    with (folder / "package").open("rb") as file:
        function: Callable[..., Any] = torch.compiler.load_compiled_function(file)
    return function


class Missing(MetaPathFinder):
    """Lets gemmtune be missing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.split(".")[0] == "gemmtune":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextmanager
def missing() -> Iterator[None]:
    finder = Missing()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def ahead_of_time(folder: Path) -> Report:
    """Load the function that was compiled ahead of time, where nothing is stored: without gemmtune, before anything of it is
    imported, and with one of another interface."""
    said = []
    with missing():
        said.append(refusal(folder))
    imported, function = "gemmtune" in sys.modules, loaded(folder)
    x, (first, second) = example(), weights()
    errors = []
    for second_weight in (second, second.clone()):  # next to the first, and where a moved model has it
        with torch.no_grad():
            results = function(x, first, second_weight)
        expected = pair(x, first, second)
        errors.append(max(float((got - want).abs().max()) for got, want in zip(results, expected, strict=True)))
    operators = [
        name for name in ("planned", "planned_join", "sum_of_experts", "mm", "bsr_mm") if hasattr(torch.ops.gemmtune, name)
    ]
    extern = importlib.import_module("gemmtune.integration.compile.extern")
    with patch.object(extern, "INTERFACE", 999):
        said.append(refusal(folder))
    loaded(folder)
    return {"imported": imported, "errors": errors, "operators": operators, "said": said}


def refusal(folder: Path) -> str:
    try:
        loaded(folder)
    except (ImportError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


STEPS = {step.__name__: step for step in (tuned, compiled, ran, elsewhere, ahead_of_time)}


def main(name: str, folder: str) -> None:
    """Do a step and print its report."""
    torch.set_num_threads(1)
    print(json.dumps(STEPS[name](Path(folder))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
