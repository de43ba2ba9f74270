"""One line of progress: on a terminal it is rewritten in place, in a pipe nothing is printed."""

from __future__ import annotations

import sys


def show(text: str) -> None:
    """Replace the terminal's current line; an empty text clears it.

    Examples
    --------
    >>> show("half done")
    >>> show("")
    """
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
