"""The server of docs/transformers.md in a process of its own: serving_process.py LOG, then the words of transformers' command.

The log gets a line for each choice that a layer runs, once, and for each tuning.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from documents import DOCS, blocks

from gemmtune.dispatch import strategies
from gemmtune.integration import eager

TUNES = ("select", "tune_rows", "defaults_for")


def program() -> str:
    """Return the text of serve.py."""
    return next(block.text for block in blocks(DOCS / "transformers.md", "python") if block.text.startswith("# serve.py"))


def main() -> None:
    """Run the program with the rest of the command line."""
    log = Path(sys.argv.pop(1))
    seen: set[str] = set()
    run = eager.Bound.run

    def note(text: str) -> None:
        if text not in seen:
            seen.add(text)
            with log.open("a") as file:
                file.write(f"{text}\n")

    def noted(self: eager.Bound, op: str, operands: tuple[Any, ...]) -> Any:
        note(f"ran {self.pick.plan.choice.name}")
        return run(self, op, operands)

    def tuning(name: str) -> Any:
        return lambda *args, **_: note(f"tuned {name} {args[0]}")

    eager.Bound.run = noted  # type: ignore[method-assign]
    for name in TUNES:
        setattr(strategies, name, tuning(name))
    script = log.with_name("serve.py")
    script.write_text(program())
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
