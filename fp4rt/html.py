"""What a notebook shows: cards and tables in HTML, and scales as a strip of colours.

Every text is escaped. There are no styles beyond alignment, so that a notebook's own theme applies,
light or dark, and so that nothing is lost where styles are stripped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

STRIP_CELLS = 48
"""Most cells of a strip, along the rows of an operand."""
STRIP_SAMPLES = 16
"""Most scales that are looked at for a cell."""

# From dark to light in lightness too, so that it reads without colour vision (viridis, thinned).
_COLOURS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
_NAN_COLOUR = "#d55e00"
_ZERO_COLOUR = "#000000"


def size(nbytes: int) -> str:
    """Write a number of bytes for people.

    Examples
    --------
    >>> size(1), size(331_780), size(3 << 30)
    ('1 byte', '331.8 kB', '3.221 GB')
    """
    if nbytes < 1000:
        return f"{nbytes} byte{'s' if nbytes != 1 else ''}"
    power = min((len(str(nbytes)) - 1) // 3, 4)
    return f"{nbytes / 1000**power:.4g} {('', 'kB', 'MB', 'GB', 'TB')[power]}"


def listed(items: Sequence[object], most: int = 8) -> str:
    """Write items with commas between them, not all if there are many.

    Examples
    --------
    >>> listed([3, 1]), listed(range(100), most=2)
    ('3, 1', '0, 1, … (100 in all)')
    """
    text = ", ".join(str(item) for item in items[:most])
    return text + f", … ({len(items)} in all)" * (len(items) > most)


def card(title: str, facts: Mapping[str, object], picture: str = "") -> str:
    """Lay out one object: a title, and a row for each fact that is not None.

    Parameters
    ----------
    title, facts
        Texts; escaped.
    picture
        HTML that goes below.

    Examples
    --------
    >>> text = card("a <device>", {"name": "cpu", "memory": None})
    >>> "a &lt;device&gt;" in text, "cpu" in text, "memory" in text
    (True, True, False)
    """
    rows = "".join(
        f"<tr>{_cell(name, 'left')}{_cell(fact, 'left')}</tr>"
        for name, fact in facts.items()
        if fact is not None
    )
    head = f'<th colspan="2" style="text-align:left">{escape(title)}</th>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{picture}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out many objects of a kind, the first column to the left, numbers to the right.

    Examples
    --------
    >>> "a&lt;b" in table("times", ["variant", "µs"], [["a<b", 2.0]])
    True
    """
    sides = ["left", *["right"] * (len(columns) - 1)]
    head = "".join(
        f'<th style="text-align:{side}">{escape(column)}</th>'
        for column, side in zip(columns, sides, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(x, side) for x, side in zip(row, sides, strict=True)) + "</tr>"
        for row in rows
    )
    caption = f'<caption style="text-align:left">{escape(title)}</caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(content: object, side: str) -> str:
    return f'<td style="text-align:{side}">{escape(str(content))}</td>'


def strip(rows: int, cols: int, scale_at: Callable[[Any, Any], NDArray[np.float32]]) -> str:
    """Draw the scales of an operand from its first row to its last, one colour for a run of rows.

    The colour of a cell is the largest of a few scales of one row, the run's middle one; NaN has a
    colour of its own. Only these scales are read, so the picture of a huge operand costs no more.

    Parameters
    ----------
    rows, cols
        Shape of the scales, groups of a stack counted as rows.
    scale_at
        Gives the scales at arrays of row and column indices, which broadcast.

    Returns
    -------
    str
        HTML: an SVG picture and its legend; empty if there are no scales.

    Examples
    --------
    >>> scales = np.float32([[1, 2], [4, np.nan]])
    >>> strip(2, 2, lambda r, c: scales[r, c]).count("<rect")
    2
    """
    if rows == 0 or cols == 0:
        return ""
    cells = min(rows, STRIP_CELLS)
    middle = (np.arange(cells) * rows + rows // 2) // cells
    across = _spread(cols, STRIP_SAMPLES)
    found = np.abs(np.asarray(scale_at(middle[:, np.newaxis], across), np.float32))
    largest = found.max(axis=1)  # NaN if there is one
    usable = largest[np.isfinite(largest) & (largest > 0)]
    low, high = (usable.min(), usable.max()) if usable.size else (1.0, 1.0)
    width = 10
    rects = "".join(
        f'<rect x="{width * i}" width="{width}" height="14" fill="{_colour(x, low, high)}"/>'
        for i, x in enumerate(largest.tolist())
    )
    span = width * cells
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{span}" height="14" role="img" '
        f'aria-label="largest scales along the rows">{rects}</svg>'
    )
    words = "scales along the rows, the largest of a sample"
    if usable.size:
        words += f": {low:g} (dark) to {high:g} (light)" if low < high else f": {low:g}"
    if (largest == 0).any():
        words += ", 0 (black)"
    if np.isnan(largest).any():
        words += ", NaN (orange)"
    return f"<div>{picture}<br><small>{words}</small></div>"


def _spread(extent: int, most: int) -> NDArray[np.int64]:
    """Up to `most` indices below `extent`, evenly spread, the first and the last among them."""
    return np.linspace(0, extent - 1, min(extent, most)).astype(np.int64)


def _colour(x: float, low: float, high: float) -> str:
    if np.isnan(x):
        return _NAN_COLOUR
    if x == 0:
        return _ZERO_COLOUR
    if low == high:
        return _COLOURS[len(_COLOURS) // 2]
    place = np.log(x / low) / np.log(high / low)
    return _COLOURS[round(float(place) * (len(_COLOURS) - 1))]
