"""When a rank cannot go on: who was the first to fail, whom nobody should wait for, and who tells it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from lightning_tokennorm.errors import TokenNormError, beyond_lightning, up_to_lightning
from lightning_tokennorm.exchange import WindowExchange, is_of_a_collective


def tell(exception: BaseException, exchange: WindowExchange, where: str) -> None:
    """Add to an exception what the other ranks have to say of it, or leave word for them.

    Args:
        exception: What ends the training on this rank.
        exchange: Between the ranks.
        where: Where this rank is, for the others.
    """
    if isinstance(exception, TokenNormError) and exception.together:
        _print_once(exception, tells=exchange.rank == 0)
        return
    if exchange.world_size == 1:
        return
    if is_of_a_collective(exception) or is_of_a_collective(exception.__cause__):
        # which stands in the error already where this package was waiting
        said = None if isinstance(exception, TokenNormError) else exchange.announced()
        if said is not None:
            _add_note(exception, f"Another rank has ended. {said}")
        return
    what = str(exception).removesuffix(".")
    exchange.announce(
        f"The first to fail was {where}: {type(exception).__name__}: {what}. Mend what its own traceback shows; the"
        " run can go on from its last checkpoint."
    )
    _add_note(exception, f"This was {where}.")


def name_failed_rank(error: RuntimeError, exchange: WindowExchange) -> None:
    """Raise who has failed, where a collective of the host broke off: that says only that a connection was closed.

    Raises:
        TokenNormError: A rank has left word of why it ended.
    """
    if is_of_a_collective(error) and (said := exchange.announced()) is not None:
        raise TokenNormError(f"Another rank has ended inside a window. {said}") from error


def _add_note(exception: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        exception.add_note(note)


def _print_once(exception: TokenNormError, *, tells: bool) -> None:
    """Where this error ends the program, let one rank print it, without the way through Lightning's loops.

    The text is the same on all ranks, and that way says nothing about it.
    """
    print_others = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if error is exception:
            if not tells:
                return
            trace = error.__traceback__ = up_to_lightning(error.__traceback__) or error.__traceback__
            if (cause := error.__cause__) is not None:
                cause.__traceback__ = beyond_lightning(cause.__traceback__)
        print_others(kind, error, trace)

    sys.excepthook = hook
