"""``python -m gemmtune`` is the ``gemmtune`` command."""

from .cli import main

main()
