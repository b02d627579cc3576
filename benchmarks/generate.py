"""Time ``generate()`` of transformers with and without gemmtune: before the first call, the first calls, tokens a second.

    python benchmarks/generate.py --json generate.json
    python benchmarks/generate.py --model gemma-2-9b --ways transformers,optimize,tune
    python benchmarks/generate.py --model qwen2.5-0.5b --layers 24 --dtype bfloat16 --device cpu --ways transformers,tune,int4
    python benchmarks/generate.py --small

The model has random weights and few layers. One sequence is generated greedily with a static cache. Each way starts with an empty
store, an empty cache of kernels and an empty cache of Inductor, as on a machine that never saw the model. After their first calls
the ways take turns in one process, so that all see the same clocks. On a GPU some decoding steps of each way are traced then:
``busy_us`` is the time of a step's kernels, ``gaps_us`` that of short pauses between them, and ``waits_us`` that of long ones, in
which the GPU waits for the host.

``compile`` and the ways that end with ``+compile`` compile the whole forward, prompts included. They only serve to compare the
time to the first token, and generate two tokens after the first prompt.

``--clock processor`` counts the processor time of one thread, which other work on the machine hardly changes.
"""

from __future__ import annotations

import copy
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import click
import torch
from environment import describe_environment
from model_configs import MODELS as PUBLISHED
from model_trace import Trace, trace_of
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.streamers import BaseStreamer

import gemmtune
from gemmtune import settings
from gemmtune.device import detect
from gemmtune.integration.compile import uninstall
from gemmtune.native import build

MODELS: Mapping[str, tuple[type, type, Mapping[str, Any]]] = {
    "qwen3-8b": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
    "gemma-2-9b": (Gemma2Config, Gemma2ForCausalLM, PUBLISHED["gemma-2-9b"]),
    "qwen2.5-0.5b": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
}
"""Configuration and class of each model, with the sizes as published."""
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "query_pre_attn_scalar": 32,
}
STD = 0.02
"""Standard deviation of the random weights."""
TRACED_FROM, TRACED_STEPS = 8, 16
"""The first traced token of a call, and how many steps are traced."""
WAIT_US = 20.0
"""Shortest pause in which the GPU waits for the host. The kernels of a CUDA graph follow each other sooner."""

Prepare = Callable[[PreTrainedModel, torch.Tensor], object]
"""Function that prepares a model for its first call, with the first prompt."""


def _as_it_is(_model: PreTrainedModel, _ids: torch.Tensor) -> None:
    """Leave the model as it is."""


def _optimize(model: PreTrainedModel, _ids: torch.Tensor) -> None:
    gemmtune.optimize(model, progress=False)


def _tune(model: PreTrainedModel, ids: torch.Tensor) -> None:
    gemmtune.optimize(model, tune=ids, progress=False)


def _int4(model: PreTrainedModel, _ids: torch.Tensor) -> None:
    gemmtune.quantize_(model, "int4", skip=("lm_head",))
    gemmtune.optimize(model, progress=False)


def _compiled(prepare: Prepare) -> Prepare:
    def compiled(model: PreTrainedModel, ids: torch.Tensor) -> None:
        prepare(model, ids)
        model.__dict__["forward"] = torch.compile(model.forward)
        model.generation_config.disable_compile = True

    return compiled


WAYS: Mapping[str, Prepare] = {
    "transformers": _as_it_is,
    "compile": _compiled(_as_it_is),
    "optimize": _optimize,
    "tune": _tune,
    "int4": _int4,
    "optimize+compile": _compiled(_optimize),
    "int4+compile": _compiled(_int4),
}
"""The ways to generate, by name. Those that change no model come first: our pass is not installed yet while they compile."""
USUAL = ("transformers", "compile", "optimize", "tune", "int4")


CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


class Clock(BaseStreamer):
    """Notes when each token arrives."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.begun = now, now()
        self.seconds: list[float] = []

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002 - given by transformers
        """Note the time. The first call brings the prompt."""
        self.seconds.append(self.now() - self.begun)

    def end(self) -> None:
        """Do nothing: each token is noted already."""


class Tracer(BaseStreamer):
    """Traces the kernels of some steps between two tokens."""

    def __init__(self) -> None:
        self._count = 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.trace = Trace()
        self.launches: dict[str, int] = {}
        """Launches by the host: of single kernels and of CUDA graphs."""

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002 - given by transformers
        """Begin or end the trace at its token, which is on the host already. The first call brings the prompt."""
        self._count += 1
        if self._count == 1 + TRACED_FROM:
            self._profile.start()
        elif self._count == 1 + TRACED_FROM + TRACED_STEPS:
            torch.cuda.synchronize()
            self._profile.stop()
            self.trace = trace_of(self._profile)
            names = [event.name for event in self._profile.events()]
            self.launches = {
                name: sum(x.startswith(name) for x in names) for name in ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
            }

    def end(self) -> None:
        """Do nothing: the trace has ended."""


@dataclass(kw_only=True)
class Runner:
    """A way that is ready to generate, with what it took."""

    name: str
    model: PreTrainedModel
    folder: Path
    before_s: float
    now: Callable[[], float]
    first_call_s: dict[int, float] = field(default_factory=dict)
    first_token_s: float = 0.0
    second_token_s: float = 0.0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def caches(self) -> Iterator[None]:
        """Use the store and the kernels of this way."""
        with settings.patch(store_path=str(self.folder / "store.sqlite"), cache_dir=str(self.folder / "kernels")):
            yield

    @property
    def whole(self) -> bool:
        """True if the way takes part in the rounds."""
        return "compile" not in self.name

    def generate(self, ids: torch.Tensor, new: int, clock: BaseStreamer | None = None) -> tuple[float, list[int]]:
        """Return the seconds of one call and the new tokens."""
        _wait(ids)
        begun = self.now()
        found = self.model.generate(
            ids,
            max_new_tokens=new,
            do_sample=False,
            cache_implementation="static",
            streamer=clock,
            attention_mask=torch.ones_like(ids),
        )
        _wait(ids)
        return self.now() - begun, found[0, ids.shape[1] :].tolist()

    def trace(self, ids: torch.Tensor, new: int) -> None:
        """Keep the kernels of a decoding step after a prompt, and how long the GPU is busy with them."""
        tracer = Tracer()
        with self.caches():
            self.generate(ids, new, tracer)
        trace = tracer.trace
        kernels = [row | {"count": row["count"] / TRACED_STEPS, "us": row["us"] / TRACED_STEPS} for row in trace.kernels]
        self.steps[ids.shape[1]] = {
            "busy_us": trace.busy_us / TRACED_STEPS,
            "gaps_us": trace.idle_us(longer=WAIT_US) / TRACED_STEPS,
            "waits_us": trace.idle_us(shorter=WAIT_US) / TRACED_STEPS,
            "kernels_run": len(trace.spans) / TRACED_STEPS,
            "launches": {name: count / TRACED_STEPS for name, count in tracer.launches.items()},
            "kernels": kernels,
        }


def _words(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    found = tuple(word for word in value.split(",") if word)
    if unknown := [word for word in found if word not in WAYS]:
        raise click.BadParameter(f"got {', '.join(unknown)}; known: {', '.join(WAYS)}")
    return found


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in value.split(",") if word)
    except ValueError as error:
        raise click.BadParameter(f"got {value!r}, expected numbers with commas between them") from error


@click.command()
@click.option("--model", "name", type=click.Choice(list(MODELS)), default="qwen3-8b", show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=12, show_default=True, help="Layers of the model that are built.")
@click.option("--prompts", default="37,190,800", callback=_numbers, show_default=True, help="Tokens of each prompt.")
@click.option("--new", type=click.IntRange(min=3), default=96, show_default=True, help="New tokens of each call.")
@click.option("--ways", default=",".join(USUAL), callback=_words, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--seconds", default=240.0, show_default=True, help="No way begins that may end later.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="By default bfloat16 on a GPU and float32 on a CPU.")
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall", show_default=True)
@click.option("--small", is_flag=True, help="Build a tiny model in float32, with short prompts and few tokens.")
@click.option("--json", "out", help="Write everything to this file.")
def main(
    name: str,
    layers: int,
    prompts: Sequence[int],
    new: int,
    ways: Sequence[str],
    rounds: int,
    seconds: float,
    device: str,
    dtype: str | None,
    clock: str,
    small: bool,
    out: str | None,
) -> None:
    """Compare ways to generate, in one process."""
    torch._dynamo.config.recompile_limit = 1024  # every way compiles the same functions again
    ends = time.monotonic() + seconds
    if clock == "processor":
        torch.set_num_threads(1)
    if small:
        layers, prompts, new, rounds = 2, tuple(min(x, 5 + x // 30) for x in prompts), min(new, 6), 1
    info = detect(device)
    model = _built(name, layers, info.torch_device, small, dtype)
    options = {"model": name, "layers": layers, "prompts": prompts, "new": new, "ways": ways, "rounds": rounds, "small": small}
    options["clock"] = clock
    options["dtype"] = str(model.dtype).removeprefix("torch.")
    report: dict[str, Any] = {"environment": describe_environment(info), "options": options, "ways": {}}
    torch.compile(torch.sin)(torch.ones(4, device=info.torch_device))  # imports of the compiler are no part of a way
    look_up = build.make()  # once for a machine, as by gemmtune doctor --build: no part of a first call
    torch.manual_seed(1)
    inputs = [torch.randint(0, model.config.vocab_size, (1, length), device=info.torch_device) for length in prompts]
    with tempfile.TemporaryDirectory(prefix="gemmtune-generate-") as folder:
        runners: list[Runner] = []
        longest = 0.0
        for way in ways:
            if time.monotonic() + longest > ends:
                report["ways"][way] = {"error": f"not begun: it may not end within {seconds:g} s (--seconds)"}
                continue
            begun = time.monotonic()
            place = Path(folder) / way
            shutil.copytree(look_up.parent, place / "kernels" / look_up.parent.name)
            runners.append(_first_calls(way, copy.deepcopy(model), place, inputs, new, CLOCKS[clock]))
            longest = max(longest, time.monotonic() - begun)
        whole = [runner for runner in runners if runner.whole]
        _rounds(whole, inputs, new, rounds)
        _report(report, runners, new, out)  # before the traces, which take as long as some rounds
        if info.type != "cpu" and new > TRACED_FROM + TRACED_STEPS:
            for runner in whole:
                for ids in inputs:
                    runner.trace(ids, new)
            _report(report, runners, new, out)
    _print(report["ways"], prompts)


def _report(report: dict[str, Any], runners: Sequence[Runner], new: int, out: str | None) -> None:
    """Add what is known of each way, and write the file."""
    for runner in runners:
        report["ways"][runner.name] = _reported(runner, runners[0], new)
    if out:
        Path(out).write_text(json.dumps(report, indent=1) + "\n")


def _built(name: str, layers: int, device: torch.device, small: bool, asked: str | None = None) -> PreTrainedModel:
    """Build a model with random weights, whose generation no token ends."""
    config, kind, words = MODELS[name]
    dtype = getattr(torch, asked or ("float32" if small or device.type == "cpu" else "bfloat16"))
    sizes = {**words, **{key: value for key, value in SMALL.items() if key in words}} if small else words
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: PreTrainedModel = kind(config(**{**sizes, "num_hidden_layers": layers, "max_position_embeddings": 8192}))
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=STD)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _give_own_code(model: PreTrainedModel) -> None:
    """Give the model a class whose ``forward`` has code of its own.

    Dynamo keeps the graphs of one code object in one list. With a shared one, the look-up of a later way would first try the graphs
    of earlier ways at each step, which takes some 0.1 ms for 12 layers.
    """
    kind = type(model)
    shared: Any = kind.forward
    forward = FunctionType(shared.__code__.replace(), shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__)
    forward.__dict__.update(shared.__dict__)
    forward.__kwdefaults__ = shared.__kwdefaults__
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _first_calls(
    way: str, model: PreTrainedModel, folder: Path, inputs: Sequence[torch.Tensor], new: int, now: Callable[[], float]
) -> Runner:
    """Prepare a way and make its first call of each prompt, with cold compilers."""
    from torch._inductor.utils import fresh_cache  # noqa: PLC0415 - takes seconds to import

    torch._dynamo.pgo.reset_code_state()  # sizes that another way met are not dynamic here
    _give_own_code(model)
    runner = Runner(name=way, model=model, folder=folder, before_s=0.0, now=now)
    with runner.caches(), fresh_cache():
        begun = now()
        WAYS[way](model, inputs[0])
        _wait(inputs[0])
        runner.before_s = now() - begun
        for ids in inputs if runner.whole else inputs[:1]:
            clock = Clock(now) if ids is inputs[0] else None
            length = ids.shape[1]
            runner.first_call_s[length], runner.tokens[length] = runner.generate(ids, new if runner.whole else 2, clock)
            if clock is not None:
                runner.first_token_s, runner.second_token_s = clock.seconds[1:3]
    uninstall()  # what the next way compiles is its own
    if not runner.whole:
        del runner.model, model
        gc.collect()  # compiled models are part of cycles
    click.echo(f"{way}: {runner.before_s:.1f} s before the first call, first calls {_listed(runner.first_call_s.values())} s")
    return runner


def _rounds(runners: Sequence[Runner], inputs: Sequence[torch.Tensor], new: int, rounds: int) -> None:
    order = list(runners)
    for number in range(rounds + 1):
        for ids in inputs:
            for runner in order:
                with runner.caches():
                    seconds, _ = runner.generate(ids, new)
                if number:  # the first round warms up
                    runner.seconds.setdefault(ids.shape[1], []).append(seconds)
        order.reverse()


def _reported(runner: Runner, reference: Runner, new: int) -> dict[str, Any]:
    """Return plain values of a way. The first way is the reference of its tokens and speeds."""
    medians = {length: statistics.median(values) for length, values in runner.seconds.items()}
    return {
        "before_s": runner.before_s,
        "first_token_s": runner.before_s + runner.first_token_s,
        "second_token_s": runner.before_s + runner.second_token_s,
        "first_call_s": runner.first_call_s,
        "tokens_per_s": {length: new / value for length, value in medians.items()},
        "over_first_way": {
            length: statistics.median(reference.seconds[length]) / value
            for length, value in medians.items()
            if length in reference.seconds
        },
        "same_tokens": {
            length: next((i for i, (x, y) in enumerate(zip(found, reference.tokens[length], strict=False)) if x != y), len(found))
            for length, found in runner.tokens.items()
        },
        "seconds": runner.seconds,
        "steps": runner.steps,
    }


def _print(ways: Mapping[str, Mapping[str, Any]], prompts: Sequence[int]) -> None:
    """Print a row for each way, with a number for each prompt."""
    lengths = " / ".join(map(str, prompts))
    click.echo(f"\nprompts {lengths}; seconds from the model to the first call, first and second token, first calls")
    click.echo(f"{'':18} {'before':>7} {'token 1':>8} {'token 2':>8}  {'first call':22} {'tokens a second':22} over the first way")
    for name, row in ways.items():
        if "error" in row:
            click.echo(f"{name:18} {row['error']}")
            continue
        click.echo(
            f"{name:18} {row['before_s']:7.1f} {row['first_token_s']:8.1f} {row['second_token_s']:8.1f}  "
            f"{_listed(row['first_call_s'].values()):22} {_listed(row['tokens_per_s'].values(), 0):22} "
            f"{_listed(row['over_first_way'].values(), 3)}"
        )


def _listed(values: Any, digits: int = 1) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def _wait(ids: torch.Tensor) -> None:
    if ids.device.type != "cpu":
        torch.cuda.synchronize(ids.device)


if __name__ == "__main__":
    main()
