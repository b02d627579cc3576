"""Entry point of the ``gemmtune`` command and of ``python -m gemmtune``."""

import importlib
import signal
import sys


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback, also while it is imported."""
    try:
        importlib.import_module(".cli", __package__).main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
