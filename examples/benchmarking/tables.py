"""How tables are written: Markdown that lines up as plain text, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]
Spread = dict[str, float]


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns that line up."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (headers, rule, *cells)
    )


def with_spread(values: Spread, form: str) -> str:
    """Median, and quartiles in brackets."""
    return f"{values['median']:{form}} ({values['q1']:{form}} .. {values['q3']:{form}})"


def listed(collectives: Rows, where: str) -> str:
    """The collectives of a window, as in ``1 allgather of 48 B``."""
    found = [row for row in collectives if row["where"] == where]
    return ", ".join(f"{row['count']} {row['op']} of {row['bytes']} B" for row in found) or "none"


def folded(title: str, text: str) -> str:
    """Text that a page shows when its title is clicked."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"
