"""Reading ahead: order, depth, windows and failures, on Lightning's real loaders without a Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from lightning.pytorch.utilities import CombinedLoader

from lightning_tokennorm.lookahead import LookaheadFetcher


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


@dataclass
class Report:
    batches: list[int]
    failure: Exception | None
    borrows: bool


class Alone:
    """What a rank reports and goes through where there is no other one."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.reports: list[Report] = []
        self.windows: list[Report] = []

    def report_window(self, batches: list[int], accumulate: int, failure: Exception | None, borrows: bool) -> None:
        assert accumulate == self.accumulate
        self.reports.append(Report(batches, failure, borrows))

    def goes_on(self) -> bool:
        return bool(self.reports[-1].batches)

    def start_window(self, batch: int | None) -> tuple[int, None]:
        self.windows.append(self.reports[-1])
        return len(self.reports[-1].batches), None


def open_fetcher(source: Source, rank: Alone) -> LookaheadFetcher:
    loader = CombinedLoader(source, "max_size_cycle")
    loader.limits = [float("inf")]
    fetcher = LookaheadFetcher(
        accumulate=lambda: rank.accumulate,
        length=lambda: float("inf") if fetcher.length is None else fetcher.length,
        report_window=rank.report_window,
        goes_on=rank.goes_on,
        start_window=rank.start_window,
        start_micro_batch=lambda index, stands_in: None,
    )
    fetcher.setup(loader)
    return iter(fetcher)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
@pytest.mark.parametrize("length", range(8))
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4, 9])
def test_windows_partition_the_epoch(sized: bool, length: int, accumulate: int) -> None:
    rank = Alone(accumulate)
    fetcher = open_fetcher(Source(length, sized), rank)
    for _ in range(2):  # the second epoch opens the loaders again
        rank.reports.clear()
        rank.windows.clear()
        served = []
        for _ in range(length):
            assert not fetcher.done
            served.append(next(fetcher)[0])
        if not length:
            with pytest.raises(StopIteration):
                next(fetcher)
        assert fetcher.done
        assert served == list(range(length))
        chunks = [list(range(start, min(start + accumulate, length))) for start in range(0, length, accumulate)]
        assert [window.batches for window in rank.windows if window.batches] == chunks
        # a length tells where the epoch ends, a stream's end has to be reported
        ends: list[list[int]] = [[]] if not sized or not length else []
        assert [report.batches for report in rank.reports] == chunks + ends
        assert all(report.borrows == (length == 0) for report in rank.reports)
        iter(fetcher)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
def test_reads_one_ahead_per_micro_batch(sized: bool) -> None:
    source = Source(20, sized)
    fetcher = open_fetcher(source, Alone(accumulate=4))
    assert source.read == 0  # nothing before the first batch is asked for
    for served in range(1, 16):
        next(fetcher)
        assert source.read - served == 4  # at most K wait, also at a window's edge


def test_a_window_is_reported_while_the_one_before_runs() -> None:
    rank = Alone(accumulate=2)
    fetcher = open_fetcher(Source(6, False), rank)
    known = []
    for _ in range(6):
        next(fetcher)
        known.append((len(rank.windows), len(rank.reports)))
    # windows started, windows reported: with the second micro-batch of one, the next is reported
    assert known == [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4)]


def test_a_window_is_reported_anew_where_accumulation_has_changed() -> None:
    rank = Alone(accumulate=2)
    fetcher = open_fetcher(Source(9, True), rank)
    for _ in range(4):
        next(fetcher)
    assert rank.reports[-1].batches == [4, 5]
    rank.accumulate = 3  # micro-batches 4 and 5 complete a multiple of 3
    next(fetcher)
    assert rank.windows[-1].batches == [4, 5]
    assert len(rank.reports) == 4
    for _ in range(4):
        next(fetcher)
    assert rank.windows[-1].batches == [6, 7, 8]
    assert len(rank.reports) == 5
    assert fetcher.done


def test_length_that_promises_too_much() -> None:
    # Lightning alone never notices the last batch, so it would not step on the tail
    rank = Alone(accumulate=3)
    fetcher = open_fetcher(Source(5, True, claims=9), rank)
    served = []
    while not fetcher.done:
        served.append(next(fetcher)[0])
    assert served == [0, 1, 2, 3, 4]
    assert [len(window.batches) for window in rank.windows] == [3, 2]


def test_length_that_promises_too_little() -> None:
    fetcher = open_fetcher(Source(9, True, claims=4), Alone(accumulate=3))
    served = []
    while not fetcher.done:
        served.append(next(fetcher)[0])
    assert served == [0, 1, 2, 3]


def test_failure_is_reported_with_its_window() -> None:
    rank = Alone(accumulate=3)
    fetcher = open_fetcher(Source(9, False, fails_at=4), rank)
    for _ in range(3):
        next(fetcher)
        assert not fetcher.done
    assert rank.windows[0].failure is None
    next(fetcher)
    assert rank.windows[1].batches == [3]
    assert isinstance(rank.windows[1].failure, OSError)
