"""A program that runs SGLang's engine with tables planted before, and prints as JSON what it did.

python sglang_engine.py FOLDER [experts]

SGLang starts its scheduler as another process, which imports this file too. There a hook of ours writes the kernels that ran into
the file that the variable SGLANG_RAN names.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import vllm_models
from serving_checks import count_tunings
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from tables_of_rows import put_table

from gemmtune.dispatch.ready import ready
from gemmtune.problem import Problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 256
tunings = list[str]()


def noted(result: Any, *_: Any, **__: Any) -> None:
    """Write what ran until now, in one step: the engine kills this process once the last token is there."""
    ran = sorted({f"{entry.plan.problem.op} {entry.plan.choice.backend}" for entry in ready.values()})
    file = Path(os.environ["SGLANG_RAN"])
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"ran": ran, "tunings": tunings}))
    part.replace(file)


if __name__ != "__main__":
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.process_batch_result", noted, HookType.AFTER)
    tunings = count_tunings()


def main(folder: str, method: str = "") -> None:
    """Generate six greedy tokens for prompts of twelve lengths."""
    from sglang.srt.entrypoints.engine import Engine

    model, backend = vllm_models.write_model(Path(folder), method), "cpp:" if DEVICE == "cpu" else "triton:"
    for n, k in vllm_models.WEIGHTS:
        put_table(Problem.mm(16, n, k, device_type=DEVICE), [(1, ROWS, backend)])
    for n, k in vllm_models.EXPERT_WEIGHTS if method == "experts" else ():
        groups, rows = vllm_models.EXPERTS, ROWS * vllm_models.OF_TOKEN
        put_table(Problem.grouped_mm(16, n, k, groups=groups, device_type=DEVICE), [(1, rows, backend)])
    engine = Engine(
        model_path=str(model), skip_tokenizer_init=True, device=DEVICE, dtype="bfloat16", random_seed=0,
        attention_backend="torch_native", sampling_backend="pytorch", disable_cuda_graph=DEVICE == "cpu", max_total_tokens=1024,
        disable_radix_cache=True, disable_overlap_schedule=True, log_level="info",
    )  # fmt: skip
    prompts = [[(7 * i + n) % 500 + 2 for i in range(n)] for n in range(1, 13)]
    asked = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    found = engine.generate(input_ids=prompts, sampling_params=asked, return_logprob=True, top_logprobs_num=2)
    margins = [[best[0] - second[0] for best, second in x["meta_info"]["output_top_logprobs"]] for x in found]
    print("\n" + json.dumps({"tokens": [x["output_ids"] for x in found], "margins": margins}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
