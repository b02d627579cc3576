"""Tables of ``benchmarks/results``: products that ``benchmarks/run.py`` measured, calls, and tables for every M."""

from __future__ import annotations

import functools
import json
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import DOCS, shell, table

ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
SHAPES = ROOT / "benchmarks" / "shapes"
ABOUT = {
    "bsr-best": "block-sparse GEMMs",
    "bsr-blocks": "block-sparse GEMMs, blocks of 16 to 128",
    "bsr-dense": "block-sparse GEMMs by Triton",
    "bsr-large": "block-sparse GEMMs, 4096 tokens",
    "bsr-ordered": "block-sparse GEMM, half of the blocks of 64",
    "bsr-skinny": "block-sparse GEMMs, few tokens",
    "bsr-small": "block-sparse GEMMs, blocks of 16 to 64",
    "bsr": "block-sparse GEMMs, patterns",
    "cpu": "float32 and float16 on a CPU",
    "few-rows": "1 to 64 rows, bfloat16",
    "routers": "routers of experts, few columns",
    "float32": "float32 by bfloat16 parts",
    "grouped-words": "experts with int4 and int8 weights",
    "grouped": "grouped GEMMs",
    "long-sums": "small M and N, long K, bfloat16",
    "middle-rows": "32 to 512 rows, bfloat16",
    "mixed-prepacked": "prepacked quantized weights",
    "models": "layers of public models, four dtypes",
    "picks": "shapes of a test for equal picks",
    "quantized-cutlass": "quantized GEMMs, with CUTLASS",
    "quantized": "quantized GEMMs",
    "reference18-cutlass-cold": "18 common shapes, with CUTLASS, cold",
    "reference18-cutlass": "18 common shapes, with CUTLASS",
    "reference18-inductor-rest": "4 of the 18 common shapes",
    "reference18-inductor": "14 of the 18 common shapes",
    "reference18": "18 common shapes, bfloat16",
    "sums": "sums of two GEMMs",
    "unaligned-inductor-rest": "unaligned sizes, 9 shapes",
    "unaligned-inductor": "unaligned sizes, 5 shapes",
}
NOTES = {"middle-rows": "Every second shape of the file's grid of M and weight: they stand in front there."}
"""Sentences about which shapes of a file were measured."""
BASELINES = {
    "torch": "torch",
    "torch-best": "torch, best parameters",
    "torch-default": "torch, default parameters",
    "dense": "torch, dense weight",
    "inductor": "Inductor, max-autotune",
}


@functools.cache
def results(folder: str, name: str) -> Any:
    """Return the content of a file of results."""
    return json.loads((RESULTS / folder / f"{name}.json").read_text(encoding="utf-8"))


REGRETS = ("regret %, median", "regret %, 95th percentile", "regret %, largest")
"""Headings of a distribution of regrets."""


def runs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield folder, name and content of each file that ``benchmarks/run.py`` wrote."""
    for path in sorted(RESULTS.glob("*/*.json")):
        content = results(path.parent.name, path.stem)
        if isinstance(content, dict) and "graph" in content.get("summary", {}) and "against" in content.get("options", {}):
            yield path.parent.name, path.stem, content


def section(folder: str, name: str) -> str:
    """Return the heading of a file's shapes: its name, with the GPU's if the first GPU has such a file too."""
    first = next(other for other, other_name, _ in runs() if other_name == name)
    return name if first == folder else f"{name}-{folder}"


@functools.cache
def files_of_shapes() -> dict[str, list[str]]:
    """Return the names of the shapes in each file of shapes, which is relative to the repository."""
    found = {}
    for path in sorted(SHAPES.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = data["shapes"] if isinstance(data, dict) else data
        found[path.relative_to(ROOT).as_posix()] = [entry.get("name", "") for entry in entries]
    return found


def origin(content: dict[str, Any]) -> tuple[str, int]:
    """Return the file of shapes that has all shapes of a result, and the number of its shapes that the result's options leave.

    Raises:
        ValueError: No file has all of them, or fewer were measured and they are not those in front, as ``--limit`` asks for them.
    """
    measured, pattern = [row["name"] for row in content["shapes"]], content["options"]["names"]
    for path, names in files_of_shapes().items():
        left = [name for name in names if re.search(pattern, name)]
        if sorted(measured) == sorted(left) or measured == left[: len(measured)]:
            return path, len(left)
    raise ValueError(f"got the shapes {measured}, expected those in front of a file in {SHAPES}. Add them to one.")


def command(content: dict[str, Any]) -> str:
    """Return the command that measures the shapes of a file."""
    options = content["options"]
    path, shapes = origin(content)
    words = ["python", "benchmarks/run.py", "--shapes", path, "--device", options["device"]]
    words += ["--against", ",".join(options["against"])]
    words += ["--only", options["names"]] if options["names"] else []
    words += ["--limit", str(len(content["shapes"]))] if len(content["shapes"]) < shapes else []
    words += ["--backends", ",".join(options["backends"])] if options["backends"] else []
    words += ["--search", options["search"]] if options["search"] != "default" else []
    return shell(shlex.join(words))


def device(content: dict[str, Any]) -> str:
    """Return the device of a file of results, in short."""
    return str(content["environment"]["device"]).removeprefix("NVIDIA ")


def summary() -> str:
    """Return one row for each file and baseline: geometric mean, least and most of the ratios."""
    rows = []
    for folder, name, content in runs():
        for baseline, found in content["summary"]["graph"].items():
            ratios = [
                row["regimes"]["graph"]["references"][baseline]["ratio"] for row in content["shapes"] if baseline in references(row)
            ]
            numbers = [f"{found['geomean']:.2f}", f"{min(ratios):.3f}", f"{max(ratios):.2f}"]
            what = f"[{ABOUT[name]}](measured-shapes.md#{section(folder, name)})"
            rows.append([what, device(content), str(found["shapes"]), BASELINES[baseline], *numbers])
    return table(["GEMMs", "device", "shapes", "baseline", "speed-up, geometric mean", "lowest speed-up", "highest speed-up"], rows)


def references(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a shape was compared with."""
    found: dict[str, Any] = row["regimes"].get("graph", {}).get("references", {})
    return found


def every_shape() -> str:
    """Return a section for each file: what it was measured on, the command, a table of its shapes."""
    parts = []
    for folder, name, content in runs():
        environment = content["environment"]
        versions = {key: value for key, value in environment["versions"].items() if key in ("torch", "triton") and value}
        on = f"{environment['device']}, " + ", ".join(f"{key} {value}" for key, value in versions.items())
        what = f"{ABOUT[name].capitalize()}. {on}.\n{NOTES.get(name, '')}".strip()
        parts.append(f"## {section(folder, name)}\n\n{what}\n\n```sh\n{command(content)}\n```\n\n{shape_table(content)}")
    return "\n".join(parts)


def shape_table(content: dict[str, Any]) -> str:
    """Return the shapes of a file: pick, time, share of the machine's limit, ratio to each baseline."""
    baselines = list(content["summary"]["graph"])
    rows = []
    for row in content["shapes"]:
        ours = row["regimes"]["graph"]["gemmtune_us"]
        limit = f"{100 * row['limit_us'] / ours:.0f}" if row["limit_us"] else ""
        ratios = [f"{found[name]['ratio']:.3f}" if name in (found := references(row)) else "" for name in baselines]
        rows.append([f"`{row['problem']}`", f"`{row['pick']}`", f"{ours:.2f}", limit, *ratios])
    heads = [f"× {BASELINES[name]}" for name in baselines]
    return table(["problem", "pick", "µs", "% of limit", *heads], rows)


def host() -> str:
    """Return the host's cost of warm calls as a share of torch's."""
    rows = []
    for folder in ("nvidia-h200", "cpu-amd-epyc"):
        content = results(folder, "host")
        for row in content["rows"]:
            numbers = [f"{row[name]:.2f}" for name in ("torch_us", "native_us", "native_ratio", "python_ratio")]
            rows.append([device(content), row["backend"], str(row["size"]), *numbers])
    return table(["device", "pick of", "M = N = K", "torch µs", "gemmtune µs", "gemmtune ÷ torch", "Python look-up ÷ torch"], rows)


def ranges() -> str:
    """Return the time that a table for every M takes."""
    rows = []
    for folder, name in (
        ("nvidia-h200", "rows-between"),
        ("nvidia-h200", "rows-steps"),
        ("nvidia-h200", "rows-int4"),
        ("cpu-amd-epyc", "rows"),
    ):
        content = results(folder, name)
        for row in content["tuning"]:
            rows.append([device(content), row["weight"], f"{row['seconds']:.1f}", str(row["segments"])])
    return table(["device", "weight N×K", "seconds to tune", "segments"], rows)


def regret() -> str:
    """Return how much slower the pick of a table is than that of a tuning for the M alone."""
    rows = []
    for name in ("rows-between", "rows-steps", "rows-int4"):
        for row in results("nvidia-h200", name)["regret"]:
            rows.append(
                [row["weight"], str(row["m"]), f"`{row['choice'][:40]}`", f"{100 * row['regret']:.1f}", f"{row['of_torch']:.3f}"]
            )
    return table(["weight N×K", "M", "choice of the table", "% slower than tuned for this M", "× torch"], rows)


def look_ups() -> str:
    """Return times of calls with random M, up to the launch."""
    rows = []
    for folder in ("nvidia-h200", "cpu-amd-epyc"):
        content = results(folder, "rows")
        for row in content["trace"]:
            if row["trace"] == "looking up":
                numbers = [f"{row[key]:.2f}" for key in ("new_p50_us", "new_p99_us", "one_p50_us", "one_p99_us")]
                rows.append([device(content), row["dtype"], str(row["calls"]), *numbers])
    return table(
        ["device", "dtype", "calls", "random M: median µs", "99th percentile µs", "one M: median µs", "99th percentile µs"], rows
    )


def exactness() -> str:
    """Return the largest error of float32 by parts over torch's, by whether such a kernel is offered."""
    rows = []
    for allowed in (True, False):
        cases = [row for row in results("nvidia-h200", "exactness")["rows"] if row["allowed"] is allowed]
        largest = max(row["either_sign"] for row in cases if row["either_sign"] is not None)
        rows.append(["yes" if allowed else "no", str(len(cases)), f"{largest:.2f}"])
    return table(["kernels are offered", "cases", "largest error ÷ torch's"], rows)


def experts_around() -> str:
    """Return times of the steps around grouped products."""
    content = results("nvidia-h200", "experts-around")
    rows = [
        [str(x["tokens"]), str(x["experts_of_a_token"]), str(x["columns"]), "yes" if x["written_out"] else "no", f"{x['us']:.1f}"]
        for x in content["sums"]
    ]
    return table(["tokens", "experts of a token", "columns", "written out", "µs"], rows)


def picks() -> str:
    """Return how often cold processes picked the same choice."""
    rows = []
    for folder in ("nvidia-h200", "cpu-amd-epyc"):
        content = results(folder, "picks")
        for name, found in content["repeat_picks"]["shapes"].items():
            rows.append([device(content), name, str(content["repeat_picks"]["processes"]), f"{100 * found['share']:.0f}"])
    return table(["device", "shape", "processes", "% with the most common pick"], rows)


def mean(ratios: Iterable[float]) -> str:
    """Return a geometric mean as text."""
    return f"{statistics.geometric_mean(ratios):.2f}"


def ratios(folder: str, name: str, baseline: str = "torch", only: str = "") -> list[float]:
    """Return the ratios of a file to a baseline, of problems whose text begins with the expression ``only``."""
    rows = [row for row in results(folder, name)["shapes"] if re.match(only, row["problem"])]
    return [references(row)[baseline]["ratio"] for row in rows if baseline in references(row)]


def first_calls() -> str:
    """Return what tuning and first calls took."""
    cpu, common = results("cpu-amd-epyc", "cpu"), results("nvidia-h200", "reference18")
    cold = results("nvidia-h200", "reference18-cutlass-cold")
    tables = [row["seconds"] for row in results("nvidia-h200", "rows-between")["tuning"]]
    ways = next(x for x in results("nvidia-h200", "model")["scenarios"] if x["name"] == "decode-1")["ways"]
    stored = ways["optimize+compile, timing=graph"]["first_call_from_store_s"]
    model = "first call of 8 layers of Llama-3-8B, one sequence"
    rows = [
        [f"tune {len(cpu['shapes'])} shapes", "AMD EPYC, 2 cores", f"{cpu['tuning_s']:.0f}"],
        [f"tune {len(common['shapes'])} shapes in bfloat16", "H200", f"{common['tuning_s']:.0f}"],
        ["the same 18 with CUTLASS, nothing compiled yet", "H200", f"{cold['tuning_s']:.0f}"],
        ["one weight, a table for M = 1 to 8192: the quickest of five weights", "H200", f"{min(tables):.0f}"],
        ["the slowest of the five", "H200", f"{max(tables):.0f}"],
        [f"{model}, torch.compile", "H200", f"{ways['compile']['first_call_s']:.0f}"],
        [f"{model}, torch.compile with max-autotune", "H200", f"{ways['max-autotune']['first_call_s']:.0f}"],
        [f"{model}, `optimize` and torch.compile", "H200", f"{ways['optimize+compile']['first_call_s']:.0f}"],
        ['the same from the store (`timing="graph"`)', "H200", f"{stored:.0f}"],
    ]
    return table(["task", "device", "seconds"], rows)


def defaults() -> str:
    """Return the speed of layers that nobody tuned, relative to torch's way and to bfloat16, by number of rows."""
    content, rows = results("nvidia-h100", "defaults"), []
    for kind in dict.fromkeys(row["kind"] for row in content["rows"]):
        for count in dict.fromkeys(row["rows"] for row in content["rows"]):
            found = [row for row in content["rows"] if (row["kind"], row["rows"]) == (kind, count)]
            cells = []
            for way in ("torch", "bfloat16"):
                ratios = [row[way] / row["default"] for row in found if way in row]
                cells += [f"{statistics.geometric_mean(ratios):.2f}", f"{min(ratios):.2f}"] if ratios else ["", ""]
            rows.append([kind, str(count), str(len(found)), *cells])
    ratios = ["× torch, geometric mean", "× torch, lowest", "× bfloat16, geometric mean", "× bfloat16, lowest"]
    return table(["weights", "rows M", "layers", *ratios], rows)


def shares() -> str:
    """Return what layers that nobody tuned reach of a search's speed, and both speeds relative to bfloat16, by number of rows."""
    content, rows = results("nvidia-h200", "defaults"), []
    for kind in dict.fromkeys(row["kind"] for row in content["rows"]):
        for count in dict.fromkeys(row["rows"] for row in content["rows"]):
            found = [row for row in content["rows"] if (row["kind"], row["rows"]) == (kind, count)]
            reached = [row["tuned"] / row["default"] for row in found]
            over = [[row.get("bfloat16", row["torch"]) / row[way] for row in found] for way in ("default", "tuned")]
            cells = [f"{statistics.geometric_mean(reached):.2f}", f"{min(reached):.2f}"]
            rows.append([kind, str(count), str(len(found)), *cells, *(f"{statistics.geometric_mean(x):.2f}" for x in over)])
    names = ["of a search's speed", "lowest", "× bfloat16 untuned", "× bfloat16 tuned"]
    return table(["weights", "rows M", "layers", *names], rows)


def predicted() -> str:
    """Return the regret of predictions for weights of models that the fit did not see, by ranges of rows."""
    content, rows = results("nvidia-h200", "predictor"), []
    for kind in content["kinds"]:
        for low, high in ((1, 1), (2, 16), (17, 64), (65, 512), (513, 4096)):
            found = [x for x in content["records"] if x["kind"] == kind and low <= x["m"] <= high]
            regret = sorted(100 * x["regret"] for x in found)
            rows.append(
                [
                    "bfloat16" if kind == "dense" else kind,
                    f"{low} to {high}" if high > low else str(low),
                    str(len(found)),
                    str(sum(x["predicted"] for x in found)),
                    f"{statistics.median(regret):.1f}",
                    f"{statistics.quantiles(regret, n=20, method='inclusive')[-1]:.1f}",
                    f"{regret[-1]:.1f}",
                    f"{statistics.geometric_mean(x['over_torch'] for x in found):.2f}",
                    f"{min(x['over_torch'] for x in found):.2f}",
                    f"{statistics.geometric_mean(x['tuned_over_torch'] for x in found):.2f}",
                ]
            )
    head = ["weights", "rows M", "shapes", "of them predicted", *REGRETS]
    return table([*head, "× torch, geometric mean", "× torch, lowest", "tuned: × torch, geometric mean"], rows)


def unseen() -> str:
    """Return the speed of predicted and of tuned kernels for weights that are not in the data, over the bfloat16 product."""
    rows, records = [], results("nvidia-h100", "predictor-unseen")["records"]
    for kind in sorted({x["kind"] for x in records}):
        for m in sorted({x["m"] for x in records}):
            found = [x for x in records if (x["kind"], x["m"]) == (kind, m)]
            speeds = [[x[name] for x in found] for name in ("over_dense", "tuned_over_dense")]
            numbers = [f"{number:.2f}" for speed in speeds for number in (statistics.geometric_mean(speed), min(speed))]
            rows.append([kind, str(m), str(len(found)), *numbers])
    ratios = [f"{way}: × bfloat16, {which}" for way in ("predicted", "tuned") for which in ("geometric mean", "lowest")]
    return table(["weights", "rows M", "shapes", *ratios], rows)


def further() -> str:
    """Return what predictions reach of the fastest, before and after further trees, for sizes that these did not see."""
    records = results("nvidia-h200", "predictor-further")["records"]
    rows, records = [], [x for x in records if x["timing"] == "spaced"]
    for kind in dict.fromkeys(x["kind"] for x in records):
        for low, high in ((8, 16), (17, 64), (65, 512), (513, 4096)):
            found = [x for x in records if x["kind"] == kind and low <= x["m"] <= high]
            speeds = [[1 / (1 + x[f"{name}_regret"]) for x in found] for name in ("before", "after")]
            numbers = [f"{number:.2f}" for speed in speeds for number in (statistics.geometric_mean(speed), min(speed))]
            rows.append(["bfloat16" if kind == "dense" else kind, f"{low} to {high}", str(len(found)), *numbers])
    names = [f"{when}: {which}" for when in ("before", "after") for which in ("geometric mean", "lowest")]
    return table(["weights", "rows M", "GEMMs", *names], rows)


def replayed() -> str:
    """Return the regret of replayed searches after a few choices and at their end."""
    rows = []
    for curve in results("nvidia-h200", "replay")["curves"]:
        last = curve["budgets"][-1]["choices"]
        for budget in (x for x in curve["budgets"] if x["choices"] in (4, 8, 16, 32, last)):
            numbers = [f"{100 * budget[name]:.1f}" for name in ("median", "p95", "worst")]
            rows.append([curve["search"], curve["order"], str(budget["choices"]), *numbers, f"{100 * curve['known']:.0f}"])
    return table(["search", "order", "choices measured", *REGRETS, "% of choices stored"], rows)


def experts_models() -> str:
    """Return the steps of models with experts, in bfloat16 and with int4 weights, each as it was measured last."""
    steps: dict[tuple[str, str], list[list[str]]] = {}
    for name in ("model-experts", "model-experts-prefill"):
        content = results("nvidia-h200", name)
        for scenario in content["scenarios"]:
            step, base = (scenario.get("model") or content["options"]["model"], scenario["name"]), scenario["ways"]["compile"]["ms"]
            steps[step] = [
                [f"`{name}`", *step, way, f"{found['ms']:.3f}", f"{base / found['ms']:.2f}"]
                for way, found in scenario["ways"].items()
            ]
    return table(
        ["results", "model", "step", "way to run it", "ms", "× torch.compile"], [row for rows in steps.values() for row in rows]
    )


def gains() -> str:
    """Return the table of README: one number for each kind of product."""
    common = ratios("nvidia-h200", "reference18-cutlass")
    experts = ratios("nvidia-h200", "grouped", only=r"grouped_\w*mm .* bfloat16 .*")
    blocks, cpu = ratios("nvidia-h200", "bsr-best", "dense"), ratios("cpu-amd-epyc", "cpu")
    untuned, on_gpu = (
        results(device, name)["ways"]["optimize"]["over_first_way"]
        for device, name in (("cpu-amd-epyc", "generate"), ("nvidia-h200", "generate-36-layers-joined-prompts"))
    )
    int4 = [
        results("nvidia-h200", f"generate-36-layers-{name}")["ways"]["int4"]["over_first_way"] for name in ("walks-int4", "190")
    ]
    rows = [
        [f"{len(common)} common shapes, bfloat16, with CUTLASS", "H200", "torch", mean(common)],
        [f"{len(experts)} grouped GEMMs (experts), bfloat16", "H200", "torch", mean(experts)],
        [f"{len(blocks)} block-sparse GEMMs", "H200", "torch, dense weight", mean(blocks)],
        [f"{len(cpu)} shapes in float32 and float16", "AMD EPYC, 2 cores", "torch", mean(cpu)],
        ["`generate()` of Qwen3-8B, bfloat16, without tuning", "H200", "transformers", mean(on_gpu.values())],
        ["the same with int4 weights", "H200", "transformers, bfloat16", mean(x for each in int4 for x in each.values())],
        ["`generate()` of Qwen2.5-0.5B, bfloat16, without tuning", "AMD EPYC, 2 cores", "transformers", mean(untuned.values())],
    ]
    return table(["workload", "device", "baseline", "speed-up"], rows)


MAKERS: dict[str, Callable[[], str]] = {
    "first-calls": first_calls,
    "measured-defaults": defaults,
    "measured-shares": shares,
    "measured-predicted": predicted,
    "measured-unseen": unseen,
    "measured-further": further,
    "measured-replay": replayed,
    "measured-experts-models": experts_models,
    "gains": gains,
    "measured-summary": summary,
    "measured-shapes": every_shape,
    "measured-host": host,
    "measured-ranges": ranges,
    "measured-regret": regret,
    "measured-look-ups": look_ups,
    "measured-exactness": exactness,
    "measured-experts-around": experts_around,
    "measured-picks": picks,
}
