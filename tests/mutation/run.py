"""Plant small faults in the package and count how many the tests notice.

    python tests/mutation/run.py --sample 100 --seed 7 -j 2
    python tests/mutation/run.py gemmtune/numerics/compare.py --sample 0        # every edit of one module

A seeded sample of the edits of ``edits.py`` is tried, in the whole package or in the named files. For each edit, the related test
files run on a copy of the tree until a test fails. For those that survive this commit's part of the cases, the other cases and
more files run. The output lists the survivors with their place and change, and a summary. The exit status is 1 if fewer than
``--threshold`` percent are killed. Edits without any visible effect are listed in ``equivalent.toml``, each with a reason, and do
not count. A module has no edits if all its tests need an absent package.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from extras import missing

from mutation.edits import edits_of
from mutation.related import MOST_FOR_SURVIVORS, NEEDED, has_turns, related_tests
from mutation.trees import ROOT, Job, Mutant, Trees, finished

__all__ = ["Mutant", "Result", "equivalent_edits", "mutants_of", "run", "sampled", "summary"]

THRESHOLD = 90.0
TIME_LIMIT_S = 80.0
TIMES_LIMIT = 6
"""Time limit for all tests of an edit, as a multiple of the limit for one test. The edit survives if it is reached."""
NO_SUCH_TEST, NO_TESTS = 4, 5
"""Exit statuses of pytest for an unknown test name, and for a run without tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result for a mutant: ``killed``, ``survived`` (all tests, or those within the time limit), or ``untested``."""

    mutant: Mutant
    verdict: str
    seconds: float
    killed_by: str = ""

    @property
    def killed(self) -> bool:
        """True if the tests noticed the edit."""
        return self.verdict == "killed"

    def text(self) -> str:
        """Return one line, followed by the change if the mutant survived."""
        mutant = self.mutant
        line = f"{self.verdict:9} {self.seconds:5.1f} s  {mutant.path}:{mutant.edit.line} {mutant.edit.kind} {self.killed_by}"
        return line if self.killed else f"{line}\n{mutant.diff}"


def mutants_of(root: Path, paths: Iterable[Path]) -> list[Mutant]:
    """Return all edits of these files that are not equivalent and whose tests can run here, in order."""
    known = equivalent_edits(root)
    found = []
    for path in paths:
        if path.as_posix() in NEEDED and missing(NEEDED[path.as_posix()]):
            continue
        text = (root / path).read_text()
        edits = (edit for edit in edits_of(text) if (path.as_posix(), edit.key(text)) not in known)
        found += [Mutant(path=path, edit=edit, diff=edit.diff(text)) for edit in edits]
    return found


def equivalent_edits(root: Path) -> dict[tuple[str, str], str]:
    """Return the reasons in equivalent.toml by file and key. Raises ValueError for an entry without a matching edit or reason."""
    entries = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text()).get("edit", [])
    reasons = {(entry["path"], entry["edit"]): entry["reason"] for entry in entries}
    texts = {path: (root / path).read_text() if (root / path).exists() else "" for path, _ in reasons}
    present = {path: {edit.key(text) for edit in edits_of(text)} for path, text in texts.items()}
    for (path, key), reason in reasons.items():
        if not reason or key not in present[path]:
            raise ValueError(f"equivalent.toml: got {path}: {key!r}, expected an edit of the file as it is now, with a reason")
    return reasons


def sampled(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants (0: all) in the order of the files. The same seed and text give the same ones."""
    if not count or count >= len(mutants):
        return list(mutants)
    chosen = random.Random(seed).sample(range(len(mutants)), count)
    return [mutants[i] for i in sorted(chosen)]


def summary(results: Sequence[Result]) -> str:
    """Return a line for each package and one for all."""
    lines = []
    for name in (*sorted({result.mutant.package for result in results}), "all"):
        own = [result for result in results if name in ("all", result.mutant.package)]
        killed = sum(result.killed for result in own)
        lines.append(f"{name:10} {killed:4} of {len(own):4} killed ({100 * killed / max(1, len(own)):.1f}%)")
    return "\n".join(lines)


def run(root: Path, mutants: Sequence[Mutant], jobs: int, limit_s: float, say: Callable[[str], None]) -> list[Result]:
    """Try all mutants. A test that also fails without an edit is excluded, and the mutants that it killed are tried again.

    Raises RuntimeError if pytest cannot run here.
    """
    runpy.run_path(str(ROOT / "conftest.py"))  # has the steps that must precede the import of torch
    import torch  # noqa: F401 - imported once, for all forked processes

    tests = {path: _names(root, related_tests(root, path)) for path in {m.path for m in mutants}}
    all_tests_s = TIMES_LIMIT * limit_s
    results: dict[Mutant, Result] = {}
    broken: dict[str, bool] = {}
    survivors: list[Mutant] = []
    todo = list(mutants)
    with tempfile.TemporaryDirectory(prefix="gemmtune-mutation-") as folder, Trees(root, jobs, Path(folder), limit_s) as trees:
        collected: list[Job] = [(None, ["--collect-only", *tests[mutant.path]], False) for mutant in mutants[:1]]
        for _, status, _, log in finished(trees, collected, all_tests_s, folder):
            if status:
                raise RuntimeError(f"without an edit, pytest ends with status {status}, which would count as a kill:\n{log}")
        while todo:
            # Exclude a test with all its parameters. They mostly fail for one reason, and each would cost a round.
            left_out = [word for name, failing in broken.items() if failing for word in ("--deselect", name.partition("[")[0])]
            work: list[Job] = [(mutant, [*tests[mutant.path], *left_out], mutant in survivors) for mutant in todo]
            for number, status, seconds, log in finished(trees, work, all_tests_s, folder):
                result = _result(todo[number], status, seconds, log)
                results[result.mutant] = result
                say(result.text())
            killers = sorted({results[mutant].killed_by for mutant in todo} - broken.keys() - {""})
            unedited: list[Job] = [(None, [killer], bool(survivors)) for killer in killers]
            for number, status, _, _ in finished(trees, unedited, all_tests_s, folder):
                broken[killers[number]] = status not in (0, NO_SUCH_TEST)  # an edit may create test cases
                if broken[killers[number]]:
                    say(f"fails as it is: {killers[number]}")
            todo = [mutant for mutant in todo if broken.get(results[mutant].killed_by)]
            if not todo and not survivors:
                todo = survivors = [mutant for mutant in mutants if results[mutant].verdict == "survived"]
                tests |= {path: _more_tests(root, path, tests[path]) for path in {m.path for m in survivors}}
    return [results[mutant] for mutant in mutants]


def _names(root: Path, tests: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(root)) for path in tests]


def _more_tests(root: Path, module: Path, run: Sequence[str]) -> list[str]:
    """Return files for a survivor of those that have run: these with cases of other commits, broad ones first, then more files."""
    again = [name for name in reversed(run) if has_turns(root, root / name)]
    return again + [name for name in _names(root, related_tests(root, module, MOST_FOR_SURVIVORS)) if name not in run]


def _result(mutant: Mutant, status: int | None, seconds: float, log: str) -> Result:
    verdict = {0: "survived", None: "survived", NO_TESTS: "untested"}.get(status, "killed")
    return Result(mutant=mutant, verdict=verdict, seconds=seconds, killed_by=_first_failure(log) if verdict == "killed" else "")


def _first_failure(log: str) -> str:
    lines = [line for line in log.splitlines() if line.startswith(("FAILED ", "ERROR ", "E  "))]
    named = [line for line in lines if not line.startswith("E  ")] or lines
    return named[0].split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ").strip() if named else ""


def _as_json(results: Sequence[Result], seed: int) -> dict[str, Any]:
    counts: Counter[str] = Counter(result.verdict for result in results)
    return {
        "seed": seed,
        "counts": dict(counts),
        "mutants": [
            {
                "path": r.mutant.path.as_posix(), "line": r.mutant.edit.line, "kind": r.mutant.edit.kind, "verdict": r.verdict,
                "seconds": round(r.seconds, 1), "killed_by": r.killed_by,
                "diff": r.mutant.diff,
            }
            for r in results
        ],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="modules or folders; default: the whole package")
    parser.add_argument("--sample", type=int, default=100, help="number of edits; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="S", help="time limit for one test")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, metavar="PERCENT")
    parser.add_argument("--again", type=Path, metavar="JSON", help="try only the survivors of the run that wrote this file")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    given = options.paths or [Path("gemmtune")]
    files = [f.relative_to(ROOT) for p in given for f in ([ROOT / p] if p.suffix else sorted((ROOT / p).rglob("*.py")))]
    mutants = mutants_of(ROOT, files)
    if options.again:
        old = json.loads(options.again.read_text())["mutants"]
        survivors = {(x["path"], x["kind"], x["diff"]) for x in old if x["verdict"] in ("survived", "untested")}
        mutants = [m for m in mutants if (m.path.as_posix(), m.edit.kind, m.diff) in survivors]
    else:
        mutants = sampled(mutants, options.sample, options.seed)
    results = run(ROOT, mutants, options.jobs, options.time_limit, lambda line: print(line, flush=True))
    if options.json:
        options.json.write_text(json.dumps(_as_json(results, options.seed), indent=1))
    for result in results:
        if not result.killed:
            mutant = result.mutant
            print(f"\n{result.verdict}: {mutant.path}:{mutant.edit.line} ({mutant.edit.kind})\n{mutant.diff}")
    print(f"\nseed {options.seed}\n{summary(results)}")
    return 0 if 100 * sum(r.killed for r in results) >= options.threshold * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
