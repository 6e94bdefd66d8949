"""An error of several ranks, in words: one line, and the part of a traceback that is the user's."""

from __future__ import annotations

from traceback import extract_tb

import pytest

from lightning_tokennorm.accounting import WindowAccounting
from lightning_tokennorm.errors import (
    RaisedElsewhere,
    TokenNormError,
    beyond_lightning,
    text_of,
    up_to_lightning,
    words_of,
)
from lightning_tokennorm.exchange import WindowExchange


class WordlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


FROM_WORKER = """Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 374, in _worker_loop
OSError: shard 3 is gone
"""


@pytest.mark.parametrize(
    ("exception", "words"),
    [
        (ValueError("no labels."), "ValueError: no labels"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (WordlessError(), "WordlessError: its text cannot be shown"),
        (ValueError("one\n  two"), "ValueError: one two"),
        (
            RuntimeError(FROM_WORKER),
            "RuntimeError: Caught OSError in DataLoader worker process 0. OSError: shard 3 is gone",
        ),
    ],
)
def test_words(exception: BaseException, words: str) -> None:
    assert words_of(exception) == words


def count(batch: object) -> int:
    raise KeyError("labels")


def fail_within() -> BaseException:
    """What `count` raises where this package calls it."""
    exchange = WindowExchange()
    windows = WindowAccounting(exchange, count, loss_reduction="mean", on_empty="skip", uneven="pad")
    windows.report_window([object()], 1)
    try:
        windows.start_window(update=0)
    except TokenNormError as error:
        return error
    raise AssertionError


def test_traceback_before_and_after_this_package() -> None:
    error = fail_within()
    assert error.__cause__ is not None
    assert [frame.name for frame in extract_tb(up_to_lightning(error.__traceback__))] == ["fail_within"]
    assert [frame.name for frame in extract_tb(beyond_lightning(error.__cause__.__traceback__))] == ["count"]


def test_text_of_another_rank_is_its_traceback() -> None:
    cause = fail_within().__cause__
    assert cause is not None
    text = str(RaisedElsewhere(1, text_of(cause)))
    assert text.startswith("on rank 1\nTraceback (most recent call last):")
    assert "in count" in text
    assert "report_window" not in text
