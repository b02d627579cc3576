"""Shell completion of lists of words."""

from collections.abc import Callable, Collection

import click
from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
Legal = Collection[str] | Callable[[], Collection[str]]
"""Words, or a function that returns them because their import takes long."""


def complete_of(words: Legal, *, several: bool = False) -> Complete:
    """Return the completion of a word of a list, or with ``several`` of the last of words that are joined by commas."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001 - click's
        *before, last = incomplete.split(",") if several else [incomplete]
        given = "".join(f"{word}," for word in before)
        known = words() if callable(words) else words
        return [CompletionItem(given + word) for word in known if word.startswith(last) and word not in before]

    return complete
