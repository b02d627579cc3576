"""Print what each kernel family is worth: the best time without it over the best time, in all stored measurements.

``python benchmarks/family_worth.py --match cuda:stream`` also lists the problems of a family. ``--without '^cuda:'`` leaves choices
out first, as on GPUs for which they do not exist.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
BACKENDS = ROOT / "gemmtune/backends"
TIE = 0.02
"""Difference of times within which a pick goes by a fixed order."""
Times = Sequence[tuple[str, float]]
"""Names of choices and their times in µs."""
Loss = tuple[float, str, str]
"""Share of time lost without a family, the file, and the problem."""
_LABEL = re.compile(r"[a-z_]*?[a-z](?=_(?:[swk]?\d|i[48]|bf16|f16|bmm)|\+|$)")
_OPTIONS = {
    "+padded": r"_pad$|_pad\+", "+swap": r"^triton:.*_swap", "+split-K": r"^triton:.*_k\d", "+runs": r"^triton:.*_r\d",
    "+fragments": r"mixed_words.*_group", "+dense": r"\+dense$", "+pdl": r"_pdl",
}  # fmt: skip
"""Expression that finds an option of several families in a name."""


def families(name: str) -> set[str]:
    """Return the backend, the family and the options of a choice."""
    backend, _, rest = name.partition(":")
    label = _LABEL.match(rest) if backend in ("aten", "cuda", "triton") else None
    found = {backend, *((f"{backend}:{label[0]}",) if label else ())}
    return found | {option for option, expression in _OPTIONS.items() if re.search(expression, name)}


def measured(files: str = "") -> Iterator[tuple[str, str, Times]]:
    """Yield (file, problem, times) of every problem in the results, and in the stores that searches are replayed on."""
    found = sorted(file for file in (ROOT / "benchmarks").glob("re*/**/*.json*") if re.search(files, file.name))
    for file in (file for file in found if file.suffix == ".json" and file.parents[1].name == "results"):
        data = json.loads(file.read_text())
        for shape in data["shapes"] if isinstance(data.get("shapes"), list) else ():
            yield file.stem, shape.get("problem", ""), _right(shape.get("finalists", ()))
        for product in data.get("products", ()):
            problem = " ".join(str(product[x]) for x in ("kind", "m", "n", "k") if x in product)
            yield file.stem, problem, [(name if ":" in name else "aten:mm", us) for name, us in product["times_us"].items()]
    for file in (file for file in found if file.suffix == ".gz"):
        for one in _unzipped(file)["measurements"]:
            key = json.loads(one["key"])
            problem = f"{key['op']} {key['m']}x{key['n']}x{key['k']} {key['b']['dtype']}"
            yield file.name.partition(".")[0], problem, _right(one["rows"])


def _unzipped(file: Path) -> Any:
    return json.loads(gzip.decompress(file.read_bytes()))


def _right(outcomes: Sequence[Mapping[str, Any]]) -> Times:
    return [(x["name"], x["time_us"]) for x in outcomes if x["status"] == "ok" and x["time_us"]]


def losses(without: str, files: str = "") -> dict[str, list[Loss]]:
    """Return the losses on the problems that a family was measured for, by family. Infinite: there is no other choice."""
    found: dict[str, list[Loss]] = defaultdict(list)
    for file, problem, listed in measured(files):
        times = [(name, us) for name, us in listed if not (without and re.search(without, name))]
        for family in set().union(*(families(name) for name, _ in times)):
            others = [us for name, us in times if family not in families(name)]
            best = min(us for _, us in times)
            found[family].append((min(others, default=math.inf) / best - 1, file, problem))
    return found


def shipped() -> Counter[str]:
    """Return the number of shipped picks, for a weight and an M, by family."""
    files = (ROOT / "gemmtune/data").glob("*.json.gz")
    picks = [found[0][0] for file in files for by_m in _unzipped(file)["weights"].values() for found in by_m.values()]
    return Counter(family for name in picks for family in families(name))


def invariant() -> Counter[str]:
    """Return how often the results of batch-invariant tables name a choice, by family."""
    texts = [file.read_text() for file in (ROOT / "benchmarks/results").glob("*/invariant*.json")]
    names = [name for text in texts for name in re.findall(r'"((?:cuda|triton|cublaslt|aten):[^"]+)"', text)]
    return Counter(family for name in names for family in families(name))


def lines_of(family: str) -> int:
    """Return the lines of the folder or module of a backend or family; 0 if it has none of its own."""
    place = BACKENDS.joinpath(*family.split(":"))
    files = [place.with_suffix(".py"), *place.rglob("*.py"), *place.rglob("*.jinja")]
    return sum(len(file.read_text().splitlines()) for file in files if file.is_file())


@click.command(help=__doc__)
@click.option("--match", default="", help="Regular expression of families whose problems are listed.")
@click.option("--without", default="", help="Regular expression of choices that are left out.")
@click.option("--files", default="", help="Regular expression of names of files, of which alone the problems count.")
def main(match: str, without: str, files: str) -> None:
    click.echo(f"{'family':20} {'lines':>6} {'problems':>8} {'wins':>5} {'loss':>8} {'worst':>8} {'>2%':>4} shipped invariant")
    picks, tables = shipped(), invariant()
    for family, found in sorted(losses(without, files).items(), key=lambda x: _geomean(x[1])):
        wins, over = (sum(x[0] > least for x in found) for least in (0, TIE))
        numbers = f"{len(found):8} {wins:5} {_geomean(found):8.2%} {max(found)[0]:8.1%} {over:4}"
        click.echo(f"{family:20} {lines_of(family):6} {numbers} {picks[family]:7} {tables[family]:9}")
        for loss, file, problem in sorted(found, reverse=True) if match and re.search(match, family) else ():
            click.echo(f"    {loss:8.1%}  {file}  {problem}")


def _geomean(found: Sequence[Loss]) -> float:
    logs = [math.log1p(loss) for loss, _, _ in found if loss < math.inf]
    return math.expm1(sum(logs) / len(logs)) if logs else math.inf


if __name__ == "__main__":
    main()
