"""A program that runs vLLM in its own process, with tables planted before, and prints as JSON what it did.

python vllm_engine.py '{"model": "folder", "load_format": "auto", "mixed": "", "eager": true}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import vllm_models
from serving_checks import count_tunings
from tables_of_rows import put_table

from gemmtune.dispatch.ready import ready
from gemmtune.problem import Problem

ROWS = 64
LENGTHS = range(1, 21)


def problems(kind: str) -> list[Problem]:
    """Return the products of the model's layers: dense ones, for ``gptq`` or ``awq`` those of four bits, and ``experts``."""
    dense = [Problem.mm(16, n, k, device_type="cpu") for n, k in vllm_models.WEIGHTS]
    if not kind:
        return dense
    if kind == "experts":
        groups = vllm_models.EXPERTS
        return dense + [Problem.grouped_mm(16, n, k, groups=groups, device_type="cpu") for n, k in vllm_models.EXPERT_WEIGHTS]
    words: dict[str, Any] = {"encoding": "int4"} if kind == "gptq" else {"encoding": "uint4", "zeros": True}
    scales: Any = f"group_{vllm_models.GROUP}"
    return dense + [
        Problem.mixed_mm(16, n, k, dtype="bf16", scales=scales, device_type="cpu", **words) for n, k in vllm_models.WEIGHTS
    ]


def main(model: str, load_format: str, mixed: str, eager: bool, plant: bool = True) -> None:
    """Generate eight greedy tokens for prompts of twenty lengths."""
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    for problem in problems(mixed) if plant else ():
        put_table(problem, [(1, ROWS, "cpp:")])
    engine = LLM(
        model, load_format=load_format, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256, seed=0, max_num_seqs=8,
        enforce_eager=eager,
    )  # fmt: skip
    tunings = count_tunings()
    before = len(ready)
    prompts: Any = [{"prompt_token_ids": [(7 * i + n) % 500 + 2 for i in range(n)]} for n in LENGTHS]
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=2)
    found = [x.outputs[0] for x in engine.generate(prompts, asked, use_tqdm=False)]
    layers = engine.llm_engine.vllm_config.additional_config.get("gemmtune", ())
    ran = sorted({f"{entry.plan.problem.op} {entry.plan.choice.backend}" for entry in ready.values()})
    done = {"tokens": [list(x.token_ids) for x in found], "margins": [[margin(step) for step in x.logprobs] for x in found]}
    print(json.dumps(done | {"ran": ran, "plans": len(ready) - before, "tunings": tunings, "layers": len(layers)}))


def margin(step: Any) -> float:
    """Return the difference of the two best log-probabilities of a token."""
    best, second, *_ = sorted((x.logprob for x in step.values()), reverse=True)
    return float(best - second)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
