"""Where are sums of float32 by parts no less exact than torch's? The rule of ``gemmtune/backends/by_parts.py``, asked of a GPU.

    python benchmarks/exactness.py --json exactness.json

Tensor cores truncate the sum of a step of K, and the sums of steps are rounded one by one into that of a tile. So the terms of a
step and the number of steps decide the error, whichever kernel adds them: a few configs of Triton's stand for all. torch's own
error hangs on whether it divides K for the sizes. A row has the largest error of an element, over the sum of its terms'
magnitudes, as a multiple of torch's, for terms of either sign and for positive ones. What the rule allows and is less exact than
torch, by more than chance, is an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from environment import describe_environment

from gemmtune import Problem
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.parts import PartsChoice, PartsPredicate
from gemmtune.device import DeviceInfo, detect

SIZES = """
256x256x16384 300x301x1500 512x512x512 16x4096x4096 128x4096x1024 48x768x4096 1000x768x4096 256x4096x4096 2048x768x4096
640x3072x2048 512x4096x4096 768x3072x8192 1664x1664x2048 1536x2048x4096 1024x4096x4096 1024x4096x8192 1024x4096x16384
2048x2048x2048 2048x2048x8192 1152x4096x4096 3072x2048x4096 3072x2048x8192 6304x1024x4096 6304x1024x8192 6304x1024x16384
2048x4096x4096 2048x4096x16384 4096x2048x32768 4608x2048x8192 4096x4096x4096 4096x4096x16384
"""
"""M, N, K: a few tiles and many, short sums and long ones."""
CONFIGS = [Config(block_m=64, block_n=64, block_k=block_k, stages=3, warps=4) for block_k in (32, 64)]
SPLITS = (1, 2, 4, 8, 16)
CHANCE = 0.1
"""By so much the largest of many errors differs from one draw to the next."""
ELEMENTS = 2**21
"""At least so many results of each size, of more draws where it has fewer: the largest error of few hangs on chance."""


@click.command()
@click.option("--json", "out", help="Write everything to this file, after each product anew.")
def main(out: str | None) -> None:
    """Compare the errors of products by parts with torch's."""
    if not torch.cuda.is_available():
        raise click.ClickException("torch sees no GPU here, and tensor cores are what is asked about")
    device = detect("cuda")
    report: dict[str, Any] = {"environment": describe_environment(device), "rows": []}
    for sizes in SIZES.split():
        for row in _rows(Problem.mm(*map(int, sizes.split("x")), dtype=torch.float32, device_type="cuda"), device):
            report["rows"].append(row)
            click.echo(
                "  ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
            )
        if out:
            Path(out).write_text(json.dumps(report, indent=1) + "\n")
    worse = [row for row in report["rows"] if row["allowed"] and max(row["either_sign"], row["positive"]) > 1 + CHANCE]
    if worse:
        raise click.ClickException(f"allowed, and less exact than torch: {worse}")


def _rows(problem: Problem, device: DeviceInfo) -> Iterator[dict[str, Any]]:
    predicate = PartsPredicate(problem, device)
    configs = [dataclasses.replace(config, split_k=splits) for config in CONFIGS for splits in SPLITS]
    kernels = {c: PartsChoice.of(problem, device, c).build().run for c in configs if predicate.check(c) is None}
    torch.manual_seed(1)
    ratios: dict[Config, list[float]] = {config: [] for config in kernels}
    for draw in (torch.randn, torch.rand):
        torchs, found = 0.0, dict.fromkeys(kernels, 0.0)
        for _ in range(max(1, ELEMENTS // (problem.m * problem.n))):
            a, b = draw(problem.m, problem.k, device="cuda"), draw(problem.n, problem.k, device="cuda").t()
            right, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
            torchs = max(torchs, float(((torch.mm(a, b).double() - right).abs() / magnitude).max()))
            for config, run in kernels.items():
                run(out := torch.empty_like(right, dtype=torch.float32), (a, b), ())
                found[config] = max(found[config], float(((out.double() - right).abs() / magnitude).max()))
        for config, error in found.items():
            ratios[config].append(error / torchs)
    for config, (either_sign, positive) in ratios.items():
        yield {
            "sizes": f"{problem.m}x{problem.n}x{problem.k}",
            "step": config.block_k,
            "terms": predicate.terms(config),
            "allowed": predicate.check_steps(config) is None,
            "either_sign": either_sign,
            "positive": positive,
        }


if __name__ == "__main__":
    main()
