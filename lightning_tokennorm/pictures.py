"""Where pictures are drawn: matplotlib is only needed by who wants one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(asked_by: str, **options: Any) -> Figure:
    """An empty figure, which needs no display.

    Args:
        asked_by: What was called, for the text of an error.
        **options: Of matplotlib's `Figure`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{asked_by} draws with matplotlib, which cannot be imported ({error}). Install it:"
            ' pip install "lightning-tokennorm[plot]".'
        ) from error
    return Figure(layout="constrained", **options)
