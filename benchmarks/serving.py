"""Serve a trace of requests by transformers' continuous batching: the times of steps, and the tunings within requests.

    python benchmarks/serving.py --json serving.json
    python benchmarks/serving.py --model gemma-2-9b --ways compile,optimize+compile
    python benchmarks/serving.py --small

The model has random weights and few layers. Lengths of prompts and answers are random, so that most steps have a number of rows
that no step had before. All ways serve the same trace. Each starts with an empty store, an empty cache of kernels and an empty
cache of Inductor. ``compile`` and the ways that end with ``+compile`` let transformers compile the forward with dynamic shapes.

Steps are synchronous and without CUDA graphs. The time of a step is that of its forward, its sampling and the copy of its tokens.
Requests before the trace warm up: they compile, as a server does before it is ready. Their steps are not counted.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from environment import describe_environment
from generate import MODELS, Prepare, _as_it_is, _built, _int4, _optimize
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from gemmtune import settings
from gemmtune.device import detect
from gemmtune.dispatch import strategies
from gemmtune.dispatch.ready import forget_plans
from gemmtune.integration.compile import uninstall

WAYS: dict[str, tuple[Prepare, int]] = {
    "transformers": (_as_it_is, 0),
    "compile": (_as_it_is, 1),
    "optimize": (_optimize, 0),
    "optimize+compile": (_optimize, 1),
    "int4": (_int4, 0),
    "int4+compile": (_int4, 1),
}
"""The preparation of the model and transformers' level of compilation. Those that change no model come first."""
REFERENCE = "compile"
TUNES = ("select", "tune_rows", "defaults_for")
"""Functions by which a call tunes, or predicts a table."""
BLOCK = 32
"""Tokens of one block of the cache."""
WARM = 8
"""Requests that warm up, of the shortest and the longest prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests: prompts, and the number of tokens to generate for each."""

    prompts: Sequence[list[int]]
    new: Sequence[int]

    @classmethod
    def drawn(cls, count: int, longest: int, new: int, vocabulary: int, seed: int) -> Trace:
        """Draw prompts of 4 to ``longest`` tokens, as many in each octave, and answers of 2 to ``new`` tokens."""
        generator = random.Random(seed)
        lengths = [round(4 * (longest / 4) ** generator.random()) for _ in range(count)]
        return cls(
            prompts=[[generator.randrange(1, vocabulary) for _ in range(length)] for length in lengths],
            new=[generator.randint(2, new) for _ in range(count)],
        )


@dataclass(slots=True)
class Steps:
    """Times of steps, and the functions that tuned within them."""

    seconds: list[float] = field(default_factory=list)
    tunings: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note the steps of the block, and what tunes."""
        step = ContinuousBatchProcessor._generation_step

        def timed(processor: ContinuousBatchProcessor, model: PreTrainedModel) -> None:
            begun = time.perf_counter()
            step(processor, model)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            self.seconds.append(time.perf_counter() - begun)

        def noting(name: str, function: Any) -> Any:
            def noted(*args: Any, **words: Any) -> Any:
                self.tunings.append(f"{name}({args[0]})")
                return function(*args, **words)

            return noted

        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(ContinuousBatchProcessor, "_generation_step", timed))
            for name in TUNES:
                patches.enter_context(mock.patch.object(strategies, name, noting(name, getattr(strategies, name))))
            yield


def _words(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    found = tuple(word for word in value.split(",") if word)
    if unknown := [word for word in found if word not in WAYS]:
        raise click.BadParameter(f"got {', '.join(unknown)}; known: {', '.join(WAYS)}")
    return found


@click.command()
@click.option("--model", "name", type=click.Choice(list(MODELS)), default="qwen3-8b", show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True, help="Layers of the model that are built.")
@click.option("--requests", type=click.IntRange(min=WARM), default=2000, show_default=True)
@click.option("--longest", type=click.IntRange(min=8), default=1024, show_default=True, help="Tokens of the longest prompt.")
@click.option("--new", type=click.IntRange(min=3), default=48, show_default=True, help="New tokens of the longest answer.")
@click.option("--ways", default="compile,optimize,optimize+compile,int4+compile", callback=_words, show_default=True)
@click.option("--seconds", default=480.0, show_default=True, help="No way begins that may end later.")
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--small", is_flag=True, help="Build a tiny model in float32, with few and short requests.")
@click.option("--json", "out", help="Write everything to this file.")
def main(
    name: str, layers: int, requests: int, longest: int, new: int, ways: Sequence[str], seconds: float, seed: int, device: str,
    small: bool, out: str | None,
) -> None:  # fmt: skip
    """Compare ways to serve one trace."""
    torch._dynamo.config.recompile_limit = 1024  # every way compiles the same functions again
    ends, longest_s = time.monotonic() + seconds, 0.0
    if small:
        layers, requests, longest, new = 2, min(requests, 24), min(longest, 40), min(new, 5)
    info = detect(device)
    model = _built(name, layers, info.torch_device, small)
    trace = Trace.drawn(requests, longest, new, model.config.vocab_size, seed)
    options = {"model": name, "layers": layers, "requests": requests, "longest": longest, "new": new, "seed": seed, "small": small}
    report: dict[str, Any] = {"environment": describe_environment(info), "options": options, "ways": {}}
    for way in ways:
        if time.monotonic() + longest_s > ends:
            report["ways"][way] = {"error": f"not begun: it may not end within {seconds:g} s (--seconds)"}
            continue
        begun = time.monotonic()
        report["ways"][way] = _served(way, copy.deepcopy(model), trace)
        longest_s = max(longest_s, time.monotonic() - begun)
        gc.collect()  # compiled models are part of cycles
    _compare(report["ways"])
    if out:
        Path(out).write_text(json.dumps(report, indent=1) + "\n")


def _served(way: str, model: PreTrainedModel, trace: Trace) -> dict[str, Any]:
    """Serve the trace with cold caches. Return the times of its steps in seconds, and what was tuned within them."""
    from torch._inductor.utils import fresh_cache  # noqa: PLC0415 - takes seconds to import

    prepare, level = WAYS[way]
    by_length = sorted(trace.prompts, key=len)
    warm = Trace(prompts=[*by_length[: WARM // 2], *by_length[-WARM // 2 :]], new=[max(trace.new)] * WARM)
    with tempfile.TemporaryDirectory(prefix="gemmtune-serving-") as folder, _own_caches(folder), fresh_cache():
        begun = time.perf_counter()
        prepare(model, torch.ones(1, 4, dtype=torch.long, device=model.device))
        optimized_s = time.perf_counter() - begun
        with _serving(model, trace, level) as manager:
            _answers(manager, warm)
            ready_s, steps = time.perf_counter() - begun, Steps()
            with steps.watched():
                tokens = _answers(manager, trace)
    uninstall()  # what the next way compiles is its own
    click.echo(f"{way}: ready after {ready_s:.1f} s, {len(steps.seconds)} steps in {sum(steps.seconds):.1f} s")
    return {
        "optimized_s": optimized_s,
        "ready_s": ready_s,
        "steps": len(steps.seconds),
        **{f"p{share}_ms": 1e3 * _quantile(steps.seconds, share / 100) for share in (50, 90, 99)},
        "largest_ms": 1e3 * max(steps.seconds),
        "tokens_per_s": sum(map(len, tokens)) / sum(steps.seconds),
        "tunings": steps.tunings,
        "tokens": tokens,
    }


@contextlib.contextmanager
def _own_caches(folder: str) -> Iterator[None]:
    """Use a store and a cache of kernels in a folder. A server's threads see the environment alone."""
    with settings.environment({"GEMMTUNE_STORE_PATH": f"{folder}/store.sqlite", "GEMMTUNE_CACHE_DIR": folder}):
        settings.from_environment.cache_clear()
        forget_plans()
        yield
    settings.from_environment.cache_clear()
    forget_plans()


@contextlib.contextmanager
def _serving(model: PreTrainedModel, trace: Trace, level: int) -> Iterator[Any]:
    """Start a server of a model. The cache has room for a batch of the longest requests."""
    length = max(map(len, trace.prompts)) + max(trace.new)
    batch = min(len(trace.prompts), 64)
    config = ContinuousBatchingConfig(
        block_size=BLOCK, num_blocks=math.ceil(length / BLOCK) * batch, max_batch_tokens=2 * length, max_requests_per_batch=batch,
        use_async_batching=False, use_cuda_graph=False, default_compile_level=level, allow_block_sharing=False,
        max_blocks_per_request=0,
    )  # fmt: skip
    greedy = GenerationConfig(do_sample=False, max_new_tokens=max(trace.new), eos_token_id=-1, pad_token_id=0)
    given: dict[str, Any] = {"generation_config": greedy, "continuous_batching_config": config, "warmup": False}
    with model.continuous_batching_context_manager(**given) as manager:
        yield manager


def _answers(manager: Any, trace: Trace) -> list[list[int]]:
    """Send all requests, and return the tokens of each."""
    names = [
        manager.add_request(ids, max_new_tokens=new, eos_token_id=-1) for ids, new in zip(trace.prompts, trace.new, strict=True)
    ]
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise click.ClickException(f"a request failed: {result.error}")
            found[result.request_id] = list(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise click.ClickException("the thread of the server ended; its log says why")
    return [found[name] for name in names]


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that as large a share of the values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def _compare(ways: dict[str, Any]) -> None:
    """Add to each way its p99 and its equal answers, compared with the reference, and print a row for each."""
    served = [row for row in ways.values() if "error" not in row]
    reference = ways[REFERENCE] if ways.get(REFERENCE) in served else next(iter(served), {})
    for row in served:
        row["p99_over"] = row["p99_ms"] / reference["p99_ms"]
        row["equal_answers"] = statistics.mean(x == y for x, y in zip(row["tokens"], reference["tokens"], strict=True))
    heads = ("ready s", "steps", "p50 ms", "p99 ms", "largest", "tunings", "p99 over", "equal")
    click.echo("\n" + " " * 18 + "".join(f"{head:>9}" for head in heads))
    for way, row in ways.items():
        if "error" in row:
            click.echo(f"{way:18} {row['error']}")
            continue
        del row["tokens"]
        click.echo(
            f"{way:18}{row['ready_s']:9.1f}{row['steps']:9}{row['p50_ms']:9.2f}{row['p99_ms']:9.2f}{row['largest_ms']:9.1f}"
            f"{len(row['tunings']):9}{row['p99_over']:9.3f}{row['equal_answers']:9.3f}"
        )


if __name__ == "__main__":
    main()
