"""Reading ahead: order, depth, windows and failures, on Lightning's real loaders without a Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader

from lightning_tokennorm import TokenNormError
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

    fetcher: LookaheadFetcher

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.windows_left = math.inf
        self.reports: list[Report] = []
        self.windows: list[Report] = []

    @property
    def length(self) -> float:
        return math.inf if self.fetcher.length is None else self.fetcher.length

    def has_trained_on(self, micro_batches: int) -> bool:
        return True

    def take_start(self) -> tuple[bool, int]:
        return False, 0

    def start_micro_batch(self, index: int, stands_in: bool) -> None:
        pass

    def report_window(self, batches: list[int], accumulate: int, failure: Exception | None, borrows: bool) -> None:
        assert accumulate == self.accumulate
        self.reports.append(Report(batches, failure, borrows))

    def goes_on(self) -> bool:
        return bool(self.reports[-1].batches)

    def start_window(self, batch: int | None) -> tuple[int, None]:
        self.windows.append(self.reports[-1])
        return len(self.reports[-1].batches), None


def open_fetcher(source: Any, rank: Alone) -> LookaheadFetcher:
    loader = CombinedLoader(source, "max_size_cycle")
    loader.limits = [float("inf")]
    fetcher = rank.fetcher = LookaheadFetcher(rank)
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
        assert [report.batches for report in rank.reports] == [*chunks, []]  # the end is reported as well
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
    assert len(rank.reports) == 6  # the last one of them the end
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


def test_nothing_is_read_beyond_the_last_update() -> None:
    # two updates of K = 3 are left; a live stream may never answer for a seventh batch
    rank = Alone(accumulate=3)
    source = Source(20, False)
    fetcher = open_fetcher(source, rank)
    rank.windows_left = 2
    for served in range(1, 7):
        if served == 4:
            rank.windows_left = 1
        next(fetcher)
    assert source.read == 6
    assert not fetcher.done  # there may be more, and nobody has asked
    assert [report.batches for report in rank.reports] == [[0, 1, 2], [3, 4, 5], []]


class Refilling:
    """Yields views of one buffer that is filled anew: what waits is overwritten."""

    def __init__(self, kind: str, buffers: int = 1) -> None:
        self.kind, self.buffers = kind, [torch.zeros(2000, dtype=torch.int64) for _ in range(buffers)]

    def __iter__(self) -> Iterator[Any]:
        shared: dict[str, Any] = {}
        for value in range(12):
            buffer = self.buffers[value % len(self.buffers)]
            if self.kind == "torch":
                buffer.fill_(value)
                yield {"labels": buffer}
            elif self.kind == "numpy":  # which torch's count of changes does not see
                buffer.numpy()[:] = value
                yield {"labels": torch.from_numpy(buffer.numpy())}
            elif self.kind == "array":
                buffer.numpy()[:] = value
                yield [buffer.numpy()]
            else:
                shared["labels"] = torch.full((2000,), value)
                yield shared


@pytest.mark.parametrize("kind", ["torch", "numpy", "array", "dict"])
def test_a_loader_that_overwrites_what_waits_is_refused(kind: str) -> None:
    rank = Alone(accumulate=3)
    fetcher = open_fetcher(Refilling(kind), rank)
    with pytest.raises(StopIteration):
        next(fetcher)
    # noticed before the first window starts, by the report that makes all ranks refuse
    assert rank.windows[0].batches == []
    assert "has changed batch 0" in str(rank.windows[0].failure)
    assert "clone()" in str(rank.windows[0].failure)


def test_a_batch_in_hand_is_not_served_when_it_is_overwritten() -> None:
    fetcher = open_fetcher(Refilling("torch"), Alone(accumulate=1))
    with pytest.raises(TokenNormError, match=r"has changed batch 0, .* batch 1: both are in the same memory"):
        next(fetcher)


def test_a_ring_of_buffers_that_is_large_enough_is_right() -> None:
    # K = 3 wait beside the one that was served last
    fetcher = open_fetcher(Refilling("torch", buffers=4), Alone(accumulate=3))
    assert [int(next(fetcher)[0]["labels"][7]) for _ in range(12)] == list(range(12))


@pytest.mark.parametrize(
    "batches",
    [
        [{"labels": torch.arange(10)}] * 9,
        [torch.arange(100)[start : start + 20] for start in range(9)],
        torch.arange(9000).view(9, 1000).numpy(),
        ["one", "one"] * 4 + ["one"],
    ],
    ids=["one dict", "overlapping views", "rows of an array", "texts"],
)
def test_memory_that_is_shared_and_not_changed_is_right(batches: Any) -> None:
    fetcher = open_fetcher(Fixed(batches), Alone(accumulate=4))
    assert len([next(fetcher) for _ in range(9)]) == 9
    assert fetcher.done


class Fixed:
    """Yields nine batches that are there already."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batches[index] for index in range(9)])


class Stateful:
    """A loader whose state is one dict that it goes on changing; counts how often it is asked."""

    def __init__(self, length: int) -> None:
        self.length, self.asked, self.state = length, 0, {"next": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < self.length:
            self.state["next"] += 1
            yield self.state["next"] - 1
        self.state["next"] = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def test_states_are_copies_and_asked_for_once_per_window() -> None:
    source = Stateful(12)
    fetcher = open_fetcher(source, Alone(accumulate=4))
    for served in range(1, 10):
        next(fetcher)
        origin = fetcher.resume_from()
        assert (origin.states[0]["next"], origin.skip) == (served // 4 * 4, 0)
    assert source.asked == 4  # before 0, 4 and 8, and before the read that found the end


def test_a_state_between_two_asked_ones_says_how_many_batches_to_skip() -> None:
    # K goes from 4 to 2 when four batches wait: the window of 4 and 5 ends where no state was asked for
    rank = Alone(accumulate=4)
    fetcher = open_fetcher(Stateful(20), rank)
    for _ in range(4):
        next(fetcher)
    rank.accumulate = 2
    for _ in range(2):
        next(fetcher)
    origin = fetcher.resume_from()
    assert (origin.states[0]["next"], origin.skip) == (4, 2)
