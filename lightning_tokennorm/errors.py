"""The one exception of this package, and how an error of several ranks is told once."""

from __future__ import annotations

from traceback import TracebackException
from types import TracebackType


class TokenNormError(RuntimeError):
    """Something went wrong while training that would make an update wrong, or leave other ranks waiting.

    Where that is possible every rank raises it at the same exchange, so no rank is left in a collective that nobody
    joins. The text names the rank at fault, what was received, what is expected and what to change.

    Args:
        text: The text.
        together: Whether all ranks raise this very error.
    """

    def __init__(self, text: str = "", *, together: bool = False) -> None:
        super().__init__(text)
        self.together = together
        """Whether all ranks raise this very error, so that one of them can tell it for all."""


class RaisedElsewhere(Exception):  # noqa: N818
    """Stands for what another rank's code raised, as the cause of a `TokenNormError` here.

    Args:
        rank: That rank.
        text: Its traceback there, by `text_of`.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"on rank {rank}\n{text}")


def text_of(exception: BaseException) -> str:
    """An exception with its traceback, as Python prints it, from where it has left Lightning and this package."""
    kind, trace = type(exception), beyond_lightning(exception.__traceback__)
    return "".join(TracebackException(kind, exception, trace).format()).rstrip()


def up_to_lightning(trace: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that lead to the call of Lightning."""
    if trace is None or _is_inside(trace):
        return None
    return TracebackType(up_to_lightning(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def beyond_lightning(trace: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that come after those of Lightning and this package."""
    while trace is not None and _is_inside(trace):
        trace = trace.tb_next
    return trace


def _is_inside(trace: TracebackType) -> bool:
    package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("lightning", __name__.partition(".")[0])
