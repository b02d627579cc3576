"""Time training of adapters with peft, and Lightning's fit, with and without gemmtune.

    python benchmarks/finetune.py --json finetune.json
    python benchmarks/finetune.py --small

The model is a Llama of random weights. ``peft`` trains the adapters of all linear layers: forward, backward and the step of the
optimizer. ``peft, one token`` is a forward of one token with these adapters. ``lightning`` fits the adapters by ``Trainer.fit``.
The ways of a program take turns in one process, with one store that is empty at the start. ``ratio`` is the time of the first way,
the same program without gemmtune, over that of another: above 1 that is faster.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from environment import describe_environment
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import gemmtune
from gemmtune import settings
from gemmtune.device import detect
from gemmtune.timing.timer import collection_paused, median_margin

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 4096}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
WAYS = ("without", "optimize", "int8", "int4")
FITTED = 3
"""Steps of one call of Lightning's ``fit``."""
Step = Callable[[], object]


def adapted(way: str, sizes: Mapping[str, int], layers: int, dtype: torch.dtype, tokens: torch.Tensor) -> nn.Module:
    """Return a model with adapters, made by this way."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, use_cache=False)).to(tokens.device, dtype)
    if way not in ("without", "optimize"):
        gemmtune.quantize_(model, way)
    if way != "without":
        gemmtune.optimize(model, tune={"input_ids": tokens}, progress=False)
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def weight_bytes(model: nn.Module) -> int:
    """Return the memory of the weights."""
    return sum(x.nbytes for x in model.parameters())


def training(model: nn.Module, tokens: torch.Tensor) -> Step:
    """Return one step of training of the adapters."""
    optimizer = optimizer_of(model)

    def step() -> None:
        model.train()(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the adapters."""
    return torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-4)


def one_token(model: nn.Module, tokens: torch.Tensor) -> Step:
    """Return a forward of one token."""

    def step() -> None:
        with torch.no_grad():
            model.eval()(input_ids=tokens[:1, :1])

    return step


def fitting(model: nn.Module, tokens: torch.Tensor) -> Step:
    """Return a fit of some steps by Lightning."""
    import lightning  # noqa: PLC0415 - a package of its own extra, which takes seconds

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    module, rows = Module(), torch.utils.data.DataLoader(list(tokens) * FITTED, batch_size=len(tokens))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}

    def step() -> None:
        module.train()
        lightning.Trainer(max_steps=FITTED, accelerator="cpu" if tokens.device.type == "cpu" else "gpu", devices=1, **quiet).fit(
            module, rows
        )

    return step


PROGRAMS: Mapping[str, tuple[Callable[[nn.Module, torch.Tensor], Step], int]] = {
    "peft": (training, 1),
    "peft, one token": (one_token, 1),
    "lightning": (fitting, FITTED),
}
"""Each program, and the number of steps of one run."""


def compared(steps: Mapping[str, Step], count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the time of one step of each way and its ratio to the first. The ways take turns."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    with collection_paused():
        for turn in range(rounds + 1):  # the first one warms up
            for way, step in steps.items():
                begun = time.perf_counter()
                step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if turn:
                    times[way].append((time.perf_counter() - begun) / count)
    first, found = next(iter(steps)), {}
    for way, mine in times.items():
        ratio, margin = median_margin([a / b for a, b in zip(times[first], mine, strict=True)])
        found[way] = {"ms": 1e3 * statistics.median(mine), "ratio": ratio, "ratio_margin": margin}
    return found


@click.command(help=__doc__)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--batch", default=2, show_default=True)
@click.option("--tokens", "length", default=32, show_default=True, help="Tokens of each sequence.")
@click.option("--rounds", default=20, show_default=True)
@click.option("--ways", default=",".join(WAYS), show_default=True)
@click.option("--programs", default="peft;peft, one token;lightning", show_default=True)
@click.option("--threads", type=int, help="Threads of torch; one is least disturbed by other work on the machine.")
@click.option("--small", is_flag=True, help="A tiny model, to try the script.")
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(device: str, dtype: str, layers: int, batch: int, length: int, rounds: int, ways: str, programs: str,
         threads: int | None, small: bool, file: Path | None) -> None:  # fmt: skip
    """Measure each program in each way."""
    if threads:
        torch.set_num_threads(threads)
    info, sizes = detect(device), SMALL if small else SIZES
    tokens = torch.randint(sizes["vocab_size"], (batch, length), device=info.torch_device)
    result: dict[str, Any] = {
        "environment": describe_environment(info),
        "options": {"model": dict(sizes), "layers": layers, "dtype": dtype, "batch": batch, "tokens": length, "rounds": rounds},
        "programs": {},
    }
    with tempfile.TemporaryDirectory() as folder, settings.patch(store_path=str(Path(folder) / "store.sqlite")):
        models = {way: adapted(way, sizes, layers, getattr(torch, dtype), tokens) for way in ways.split(",")}
        result["weights_mb"] = {way: weight_bytes(model) / 1e6 for way, model in models.items()}
        for name in programs.split(";"):
            make, count = PROGRAMS[name]
            found = compared({way: make(model, tokens) for way, model in models.items()}, count, rounds)
            result["programs"][name] = found
            shown = (f"{way} {x['ms']:.2f} ms ×{x['ratio']:.2f} ± {x['ratio_margin']:.2f}" for way, x in found.items())
            click.echo(f"{name:16} {'  '.join(shown)}")
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
