"""``python -m gemmtune.cli`` is the ``gemmtune`` command."""

from . import main

main()
