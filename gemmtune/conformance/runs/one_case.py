"""Runner of cases in this process, one line of JSON for each outcome. ``compute-sanitizer`` wraps this program.

python -m gemmtune.conformance.runs.one_case mypkg.ops:matmul 'out-of-bounds:mm-f16-64x64x64-out.row' --device cuda
"""

import argparse
import json
import sys
from collections.abc import Sequence

from ...declaration.subject import SubjectSpec
from ...errors import GemmtuneError
from ..bench.outcome import CaseStatus
from ..cases.case import Case
from .isolation import InProcessRunner


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases of the arguments. Return 0 if every case has an outcome, 1 if one broke the device, 2 if there was none."""
    parser = argparse.ArgumentParser(prog="python -m gemmtune.conformance.runs.one_case", description="Run cases in one process.")
    parser.add_argument("target", help="the GEMM, such as mypkg.ops:matmul")
    parser.add_argument("ids", nargs="+", metavar="id", help="a case, such as bound:mm-bf16-127x64x33-seed.7")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--declared", default="{}", metavar="JSON", help="traits by name")
    parser.add_argument("--traits-file", default="")
    given = parser.parse_args(arguments)
    try:
        spec = SubjectSpec(target=given.target, declared=json.loads(given.declared), traits_file=given.traits_file)
        cases = [Case.parse(text) for text in given.ids]
        runner = InProcessRunner(spec, given.device)
        for case in cases:
            outcome = runner.run(case)
            print(json.dumps(outcome.as_json()), flush=True)
            if outcome.status is CaseStatus.CRASHED:
                return 1
    except (GemmtuneError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def arguments_for(spec: SubjectSpec, cases: Sequence[Case], device: str) -> list[str]:
    """Return the arguments with which ``main`` runs these cases."""
    options = ["--device", device, "--declared", json.dumps(dict(spec.declared)), "--traits-file", spec.traits_file]
    return [*options, "--", spec.target, *(case.id for case in cases)]


if __name__ == "__main__":
    sys.exit(main())
