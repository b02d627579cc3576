"""Entry point of ``python -m gemmtune``, the same as the ``gemmtune`` command."""

from .cli import main

main()
