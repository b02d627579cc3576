"""Generation by transformers with the tables of a model: the same tokens, our kernels, and no tuning within a request."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Needed, made, tokens

import gemmtune
from gemmtune import settings
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans
from gemmtune.integration import eager
from gemmtune.integration.weights import classes_of
from gemmtune.selector.offers import offers_for
from gemmtune.selector.segments import TABLE, Segment, Table
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Ranged, open_store

transformers = Needed("transformers")
NEW = 5
GREEDY = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(autouse=True)
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Yield the number of runs of each choice by layers. Servers run models in threads, which see the environment alone."""
    changes = {"GEMMTUNE_STORE_PATH": str(tmp_path / "store.sqlite"), "GEMMTUNE_ROWS": "shared", "GEMMTUNE_BACKENDS": "aten,cpp"}
    ran: Counter[str] = Counter()
    run = eager.Bound.run

    def noted(self: eager.Bound, op: str, operands: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        ran[self.pick.plan.choice.name] += 1
        return run(self, op, operands)

    monkeypatch.setattr(eager.Bound, "run", noted)
    for tunes in ("select", "tune_rows"):
        monkeypatch.setattr(f"gemmtune.dispatch.strategies.{tunes}", None)
    with settings.environment(changes):
        settings.from_environment.cache_clear()
        forget_plans()
        yield ran
        open_store(settings.current()).close()
    settings.from_environment.cache_clear()
    forget_plans()


def with_tables(model: Any) -> Any:
    """Optimize a model whose store has a table of our kernel for each weight, whatever is faster on this machine."""
    device, chosen = detect("cpu"), settings.current()
    for rows_class in classes_of(model):
        choice = next(c for c in offers_for(rows_class.at(16), device, chosen).choices if c.backend == "cpp")
        choice.compile()
        segment = Segment.of(choice, 1, 64, 16, kernels=(1,))
        fact = Ranged(
            key=rows_class.key,
            fingerprint=fingerprint_text(device, chosen.timing),
            kind=TABLE,
            value=Table(segments=(segment,)).to_json(),
        )
        open_store(chosen).put_ranged(fact)
    return gemmtune.optimize(model)


CASES = {
    "dynamic cache": ("llama", {}),
    "static cache": ("llama", {"cache_implementation": "static"}),
    "beams": ("llama", {"num_beams": 3}),
    "Conv1D": ("gpt2", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_generate_returns_the_same_tokens(case: str, served: Counter[str]):
    name, words = CASES[case]
    model, _ = made(name)
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padding on the left
    with torch.no_grad():
        expected = model.generate(ids, attention_mask=mask, **GREEDY, **words)
        found = with_tables(model).generate(ids, attention_mask=mask, **GREEDY, **words)
    assert torch.equal(found, expected)
    assert served
    assert all(choice.startswith("cpp:") for choice in served)


def test_a_trace_of_random_prompts_in_batches_returns_the_same_tokens(served: Counter[str]):
    """Most steps have a number of rows that no step had before."""
    model, _ = made("llama")
    generator = random.Random(3)
    prompts = [[generator.randrange(1, 96) for _ in range(generator.randint(1, 40))] for _ in range(24)]
    batching = transformers.ContinuousBatchingConfig(block_size=32, num_blocks=32, max_batch_tokens=64)
    greedy = transformers.GenerationConfig(**GREEDY | {"eos_token_id": -1})

    def generated() -> list[list[int]]:
        found = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=batching, warmup=False)
        return [found[key].generated_tokens for key in sorted(found)]

    expected = generated()
    with_tables(model)
    assert generated() == expected
    assert [len(x) for x in expected] == [NEW] * len(prompts)
    assert served
    assert all(choice.startswith("cpp:") for choice in served)
