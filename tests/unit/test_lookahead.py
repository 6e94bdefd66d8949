"""Reading ahead: order, depth, windows and failures, on Lightning's real loaders without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from lightning.pytorch.utilities import CombinedLoader

from lightning_tokennorm.lookahead import AgreedWindow, ComingWindow, LookaheadFetcher


class Source:
    """Yields 0, 1, 2, …; remembers how far it was read."""

    def __init__(self, length: int, sized: bool, claims: int | None = None, fails_at: int | None = None) -> None:
        self.length, self.fails_at, self.read = length, fails_at, 0
        if sized:
            self.__class__ = type("SizedSource", (Source,), {"__len__": lambda self: claims or length})

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            if index == self.fails_at:
                raise OSError("disk gone")
            self.read += 1
            yield index


def alone(coming: ComingWindow[int]) -> AgreedWindow:
    """What is agreed on where there is no other rank."""
    return AgreedWindow(len(coming.counts), coming.more, lent_batch=None)


def open_fetcher(
    source: Source,
    accumulate: int,
    windows: list[ComingWindow[int]],
    agree: Callable[[ComingWindow[int]], AgreedWindow] = alone,
) -> LookaheadFetcher:
    def start_window(coming: ComingWindow[int]) -> AgreedWindow:
        windows.append(coming)
        return agree(coming)

    loader = CombinedLoader(source, "max_size_cycle")
    loader.limits = [float("inf")]
    fetcher = LookaheadFetcher(
        count=lambda batch: batch * 10,
        accumulate=lambda: accumulate,
        start_window=start_window,
        start_micro_batch=lambda index, stands_in: None,
    )
    fetcher.setup(loader)
    return iter(fetcher)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
@pytest.mark.parametrize("length", range(8))
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4, 9])
def test_windows_partition_the_epoch(sized: bool, length: int, accumulate: int) -> None:
    windows: list[ComingWindow[int]] = []
    fetcher = open_fetcher(Source(length, sized), accumulate, windows)
    for _ in range(2):  # the second epoch opens the loaders again
        windows.clear()
        served = []
        while not fetcher.done:
            try:
                served.append(next(fetcher)[0])
            except StopIteration:
                break
        assert served == list(range(length))
        chunks = [tuple(range(start, min(start + accumulate, length))) for start in range(0, length, accumulate)]
        assert [window.counts for window in windows if window.counts] == [tuple(10 * i for i in c) for c in chunks]
        more = [True] * (len(chunks) - 1) + [False] * bool(chunks)
        assert [window.more for window in windows if window.counts] == more
        iter(fetcher)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
def test_reads_one_ahead_per_micro_batch(sized: bool) -> None:
    source, accumulate = Source(20, sized), 4
    fetcher = open_fetcher(source, accumulate, [])
    assert source.read == 0  # nothing before the first batch is asked for
    for served in range(1, 16):
        next(fetcher)
        assert source.read - served == accumulate  # at most K wait, also at a window's edge


def test_length_that_promises_too_much() -> None:
    # Lightning alone never notices the last batch, so it would not step on the tail
    windows: list[ComingWindow[int]] = []
    fetcher = open_fetcher(Source(5, True, claims=9), 3, windows)
    served = []
    while not fetcher.done:
        served.append(next(fetcher)[0])
    assert served == [0, 1, 2, 3, 4]
    assert [len(window.counts) for window in windows] == [3, 2]


def test_length_that_promises_too_little() -> None:
    fetcher = open_fetcher(Source(9, True, claims=4), 3, [])
    served = []
    while not fetcher.done:
        served.append(next(fetcher)[0])
    assert served == [0, 1, 2, 3]


def test_failure_is_reported_with_its_window() -> None:
    windows: list[ComingWindow[int]] = []
    fetcher = open_fetcher(Source(9, False, fails_at=4), 3, windows)
    for _ in range(3):
        next(fetcher)
        assert not fetcher.done
    assert windows[0].failure is None
    assert windows[0].more
    next(fetcher)
    assert windows[1].counts == (30,)
    assert isinstance(windows[1].failure, OSError)
