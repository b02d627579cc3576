"""transformers' server with an optimized model over HTTP: the same greedy tokens, our kernels, and no tuning within a request."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import serving_process
import torch
from extras import needs
from http_server import free_port, started
from models import Needed, made, tokens
from test_generate import GREEDY, served, with_tables

import gemmtune
from gemmtune.integration.modules import is_optimized

__all__ = ["served"]
transformers = Needed("transformers")
tokenizers = Needed("tokenizers")
HERE = Path(__file__).parent
LENGTHS = (3, 9, 17, 30, 1)
"""Tokens of the prompts, each another number of rows."""
BATCHES = ["--continuous-batching", "--cb-num-blocks", "8", "--cb-block-size", "32", "--cb-max-batch-tokens", "64"]
"""Words for continuous batching with a small cache."""


def text(numbers: Sequence[int]) -> str:
    """Return the words of tokens."""
    return " ".join(f"t{number}" for number in numbers)


def saved(folder: Path) -> Path:
    """Save a small model with a tokenizer that knows the words of ``text``."""
    model, _ = made("llama")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    words = {text([number]): number for number in range(model.config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", pad_token="t0").save_pretrained(folder)
    return folder


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> type:
    """transformers' class that loads the models of a server, as serve.py changes it."""
    manager = pytest.importorskip("transformers.cli.serving.model_manager", reason="the extra 'models' installs it").ModelManager
    monkeypatch.setattr(manager, "_load_model", manager._load_model)  # restored at the end
    exec(compile(serving_process.program(), "serve.py", "exec"), {"__name__": "serve"})
    return manager  # type: ignore[no-any-return]


@needs("accelerate")
def test_the_server_loads_optimized_models(served: object, loaded: type, tmp_path: Path) -> None:
    """Needs no package of a server."""
    name = saved(tmp_path / "model")
    manager = loaded(device="cpu", force_model=str(name))
    model, _ = manager.load_model_and_processor(f"{name}@main")
    layers = [x for x in model.modules() if isinstance(x, torch.nn.Linear)]
    assert len(layers) == 15
    assert all(map(is_optimized, layers))
    assert torch.equal(model(tokens()).logits, gemmtune.restore(model)(tokens()).logits)


@needs("accelerate", "serve")
@pytest.mark.slow
@pytest.mark.parametrize("words", [[], BATCHES], ids=["one by one", "batches"])
def test_requests_over_http_get_the_same_tokens_and_tune_nothing(served: object, tmp_path: Path, words: Sequence[str]) -> None:
    model = saved(tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    prompts = [tokens(1, length) for length in LENGTHS]
    answers = [plain.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, ids.shape[1] :] for ids in prompts]
    with_tables(plain)  # the server finds them in the store
    with serving(tmp_path, model, words) as (port, log), concurrent.futures.ThreadPoolExecutor() as executor:
        found = list(executor.map(lambda ids: answer(port, model, text(ids[0].tolist())), prompts))
        assert found == [text(x.tolist()) for x in answers]
        lines = log.read_text().splitlines()
    assert lines
    assert all(line.startswith("ran cpp:") for line in lines), lines


@contextmanager
def serving(folder: Path, model: Path, words: Sequence[str]) -> Iterator[tuple[int, Path]]:
    """Serve a model. Yield the port and the log of what ran."""
    port, log = free_port(), folder / "ran.log"
    log.touch()
    command = [sys.executable, str(HERE / "serving_process.py"), str(log), "serve", str(model), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port), *words]
    paths = (HERE.parents[1], HERE, HERE.parent / "unit", HERE.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
    with started(command, port, folder / "server.log", environment):
        yield port, log


def answer(port: int, model: Path, prompt: str) -> str:
    """Return the greedy words that follow a prompt."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": str(model), "prompt": prompt, "max_tokens": GREEDY["max_new_tokens"], "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = response.read().decode()
    assert response.status == 200, found
    return str(json.loads(found)["choices"][0]["text"])
