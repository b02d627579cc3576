"""Public GEMMs in the judge: makes candidates out of checkouts, and judges them.

    python benchmarks/audit.py --sources checkouts --out candidates [--device cpu] [--only flame] [--json audit.json]

``checkouts`` has a git repository for each entry, as ``owner+name``. Nothing of them is in this repository: a candidate is a file
at a commit and a few lines of ours, which give it the form that the judge takes. ``--prepare`` makes the candidates alone.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from gemmtune.judging.report import as_json
from gemmtune.judging.verdict import judge

__all__ = ["ENTRIES", "Entry"]

COLUMN_MAJOR = """
#include <cstdint>
#include <cstring>
extern "C" void matmul(const {T}* a, const {T}* b, {T}* out, int64_t m, int64_t n, int64_t k) {{
  memset(out, 0, sizeof({T}) * m * n);
  {call};
}}
"""
"""A row-major product is the column-major one of the transposed matrices, in the other order."""
LLM_C = """
#include <cstdint>
#include <vector>
extern "C" void matmul(const float* a, const float* b, float* out, int64_t m, int64_t n, int64_t k) {
  std::vector<float> weight(n * k);
  for (int64_t i = 0; i < k; i++) for (int64_t j = 0; j < n; j++) weight[j * k + i] = b[i * n + j];
  matmul_forward(out, a, weight.data(), nullptr, 1, m, k, n);
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One public GEMM: a file at a commit, and what makes a candidate of it."""

    name: str
    repository: str
    commit: str
    path: str
    before: str = ""
    after: str = ""
    lines: tuple[int, int] | None = None
    """First and last line of the file, or None for all."""
    record: tuple[str, int] | None = None
    """In a file of JSON lines: the field with the code, and the task of level 1."""
    devices: tuple[str, ...] = ("cpu",)
    traits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def suffix(self) -> str:
        """End of the candidate's file name."""
        return ".py" if self.record else ".cpp"


def _flame(variant: str) -> Entry:
    return Entry(
        name=f"flame_{variant}", repository="flame/how-to-optimize-gemm", commit="40b1ec685db23e63ed92f3f60b0fef4cd193455d",
        path=f"src/MMult_{variant}.c", traits={"dtypes": ["float64"], "multiples": [4, 4, 1]},
        after=COLUMN_MAJOR.format(T="double", call="MY_MMult(n, m, k, (double*)b, n, (double*)a, k, out, n)"),
    )  # fmt: skip


def _salykova(variant: str, **traits: Any) -> Entry:
    return Entry(
        name=f"salykova_{variant}", repository="salykova/sgemm.c", commit="bde9cb75edb1f74d9ee297abfeae605c0b9416fa",
        path=f"tutorial/matmul_{variant}.h", traits={"dtypes": ["float32"]} | traits, before="#include <cstring>\n",
        after=COLUMN_MAJOR.format(T="float", call=f"matmul_{variant}((float*)b, (float*)a, out, n, m, k)"),
    )  # fmt: skip


def _cuda_l1(gpu: str, task: int, code: str = "custom_code", devices: tuple[str, ...] = ("cuda",)) -> Entry:
    return Entry(
        name=f"cuda_l1_{gpu}_{task}" + ("" if code == "custom_code" else f"_{code}"), repository="deepreinforce-ai/CUDA-L1",
        commit="51e8356bf844101cab2aeeca4bdff47ebb1953b8", path=f"optimized_cuda_code/{gpu}.json", record=(code, task),
        after="\n\nif 'ModelNew' not in globals():\n    ModelNew = Model\n", devices=devices,
        traits={"dtypes": ["float32"], "calls_torch": True, "layouts": ["row"]},
    )  # fmt: skip


ENTRIES = (
    *map(_flame, ("4x4_10", "4x4_15")),
    _salykova("kernel", multiples=[6, 16, 1]), *map(_salykova, ("pad", "cache", "parallel")),
    Entry(
        name="llm_c", repository="karpathy/llm.c", commit="f1e2ace651495b74ae22d45d1723443fd00ecd3a",
        path="train_gpt2.c", lines=(163, 229), after=LLM_C,
        before="#include <cstddef>\n", traits={"dtypes": ["float32"]},
    ),
    *(_cuda_l1("a100", task, devices=("cpu", "cuda")) for task in (3, 8, 9)),
    *(_cuda_l1("a100", task) for task in (1, 6)),
    *(_cuda_l1("h100", task) for task in (1, 6, 3, 7, 9)),
    *(_cuda_l1("h100", task, "cuda_graph_code") for task in (1, 3, 8)),
)  # fmt: skip
"""Audited GEMMs, with the declarations under which each is judged: float32 of KernelBench, and torch's products allowed."""


def candidate(entry: Entry, sources: Path, out: Path) -> Path:
    """Write the candidate of an entry. Return its file."""
    folder = sources / entry.repository.replace("/", "+")
    shown = subprocess.run(["git", "show", f"{entry.commit}:{entry.path}"], cwd=folder, capture_output=True, text=True, check=True)
    text = shown.stdout
    if entry.record is not None:
        code, task = entry.record
        rows = map(json.loads, filter(str.strip, text.splitlines()))
        text = next(row[code] for row in rows if (row["level_id"], row["task_id"]) == (1, task))
    if entry.lines is not None:
        first, last = entry.lines
        text = "\n".join(text.splitlines()[first - 1 : last])
    path = out / f"{entry.name}{entry.suffix}"
    path.write_text(f"{entry.before}{text}{entry.after}")
    return path


@click.command()
@click.option(
    "--sources", type=click.Path(path_type=Path, file_okay=False), help="Folder of checkouts. Without it, --out has candidates."
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--level", default="normal", show_default=True)
@click.option("--only", multiple=True, help="Beginning of the names of entries.")
@click.option("--prepare", is_flag=True)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(sources: Path | None, out: Path, device: str, level: str, only: tuple[str, ...], prepare: bool, file: Path | None) -> None:
    """Judge public GEMMs."""
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for entry in ENTRIES:
        if (only and not entry.name.startswith(only)) or not (prepare or device.partition(":")[0] in entry.devices):
            continue
        path = candidate(entry, sources, out) if sources else out / f"{entry.name}{entry.suffix}"
        if prepare:
            continue
        target = str(path) if entry.suffix == ".py" else f"{path}:matmul"
        [found] = as_json(judge(target, device=device, level=level, declared=entry.traits))["verdicts"]
        row = {"name": entry.name, "repository": entry.repository, "commit": entry.commit, "path": entry.path,
               "traits": dict(entry.traits), "record": entry.record, "device": found["device"]}  # fmt: skip
        rows.append(row | {key: found[key] for key in ("standing", "why", "conduct", "values", "calls", "work", "note")})
        ratio = f"{found['speed']['ratio']:.2f}× torch" if found["speed"] else "not timed"
        rows[-1]["ratio"] = found["speed"]["ratio"] if found["speed"] else None
        click.echo(f"{entry.name}: {found['standing']}, {ratio}: {found['why']}")
        wrong = (found["calls"]["wrong"] or found["values"]["failures"] or [{}])[0]
        conduct = [f"{x['kind']}: {x['detail']}" for x in found["conduct"]]
        for text in filter(None, (wrong.get("error") or wrong.get("message"), found["note"], *conduct)):
            click.echo(f"    {text[:300]}")
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
