"""Reads the micro-batches of the coming window without consuming them.

The fetcher below takes the place of the fit loop's own. It serves the same batches in the same order, but reads ahead:
at the start of a window all its micro-batches are known. It rolls: each micro-batch served reads one
more, so at most ``K`` wait on the host (none on a device), and a loader that is as slow as the compute is never asked
for a whole window at once. So a window is known, and reported to the other ranks, when the last micro-batch of the one
before is served: their reports arrive while that one is trained on.

Ranks go through their windows in step. Where this rank has fewer micro-batches than another, or a loader yields
``None``, the forward still has to run, for DDP's sake: on a copy of a batch that was there, a stand-in.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from lightning_tokennorm import _compat
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.reuse import BatchMark


class WindowOwner(Protocol):
    """What the fetcher asks of whoever trains on its batches."""

    @property
    def accumulate(self) -> int:
        """``K``; asked at every micro-batch, since callbacks change it."""

    @property
    def length(self) -> float:
        """The micro-batches of the epoch that ranks have agreed on; infinite where some rank's is not known."""

    @property
    def windows_left(self) -> float:
        """How many windows the training may still go through, one in hand included; infinite without a limit."""

    def has_trained_on(self, micro_batches: int) -> bool:
        """Whether this many micro-batches of the epoch have been trained on, each to its end."""

    def take_start(self) -> tuple[bool, int]:
        """Where this rank's data of its first epoch starts; asked at its first window, and true of that epoch only.

        Returns:
            Whether the run that this one resumes had used it up; else how many batches to leave out.
        """

    def report_window(self, batches: Sequence[Any], accumulate: int, failure: Exception | None, borrows: bool) -> None:
        """Take what this rank has for the coming window, as soon as that is known and on every rank alike.

        The place to start an exchange. Called anew where ``K`` has changed before the window starts.

        Args:
            batches: This rank's batches; none at the end of the data.
            accumulate: ``K``.
            failure: What went wrong while reading a batch of the window.
            borrows: Whether there is no batch that could stand in for one that is missing.
        """

    def goes_on(self) -> bool:
        """Wait for the reports of all ranks, and say whether some rank has more; asked where this one has none."""

    def start_window(self, batch: Any) -> tuple[int, Any]:
        """Plan the window before its first micro-batch is served, on every rank alike: the place to end the exchange.

        What it raises ends the epoch.

        Args:
            batch: A batch that could be lent to another rank.

        Returns:
            How many micro-batches all ranks go through, 0 at the end of all data (a rank that has fewer serves
            stand-ins for the rest), and another rank's batch where some rank has none, else ``None``.
        """

    def start_micro_batch(self, index: int, stands_in: bool) -> None:
        """Go on to a micro-batch of the window.

        Args:
            index: Its index in the window.
            stands_in: Whether it is a stand-in.
        """


@dataclass(frozen=True)
class Origin:
    """Where in its data a rank goes on: states of its loaders, and how many batches come after them."""

    states: tuple[Any, ...] = ()
    """The states of stateful loaders; none where no loader has one, or an epoch starts afresh."""
    skip: int = 0
    """Batches to leave out after these states."""


@dataclass(frozen=True)
class _Read:
    """A micro-batch that was read ahead."""

    item: Any
    """What Lightning's loops expect: the batch, its index and its loader's."""
    origin: Origin
    """From where it can be read again."""
    mark: BatchMark
    """What it looked like."""


class LookaheadFetcher(_compat.BaseFetcher):  # type: ignore[misc]
    """Serves the training batches of an epoch, window by window.

    Args:
        owner: Whoever trains on them.
    """

    def __init__(self, owner: WindowOwner) -> None:
        self._owner = owner
        self._ahead: deque[_Read] = deque()
        self._stateful_loaders: list[Any] = []
        self._stand_in: Any = None
        super().__init__()
        self._start_epoch()

    def _start_epoch(self) -> None:
        self._ahead.clear()
        self._failure: Exception | None = None
        self._exhausted = False
        self._skip = 0  # batches to leave out before the next one that is read
        self._origin: Origin | None = None  # of the latest batch that was read
        self._origin_of_window = Origin()
        # The window in hand: its micro-batches, those of them that are this rank's own, those that were served.
        self._micro_batches = self._own = self._served = 0
        self._reported_for: int | None = None  # the K that the next window was reported with

    def reset(self) -> None:
        super().reset()
        # once per epoch: to look whether a loader has a state takes longer than to count a batch
        self._stateful_loaders = _compat.stateful_loaders(self)
        self._start_epoch()

    def __next__(self) -> Any:
        accumulate = self._owner.accumulate
        if self._served == self._micro_batches:
            self._open_window(accumulate)
        self.done = not self._micro_batches
        if self.done:
            raise StopIteration
        read = self._ahead.popleft() if self._served < self._own else None
        item = (None, self.fetched, 0) if read is None else read.item
        stands_in = item[0] is None
        if stands_in:
            item = (_copy(self._stand_in), *item[1:])
        self._owner.start_micro_batch(self._served, stands_in)
        self._served += 1
        self.fetched += 1
        waits_until = self._micro_batches - self._served + (self._owner.windows_left - 1) * accumulate
        self._read_ahead(min(accumulate, waits_until), accumulate, in_hand=read)
        if self._served == self._micro_batches:
            self._look_beyond(item[0], accumulate)
        return item

    @property
    def unfinished(self) -> int:
        """How many micro-batches of a window that is not complete have been served."""
        is_done = self._served == self._micro_batches and self._owner.has_trained_on(int(self.fetched))
        return 0 if is_done else self._served

    def resume_from(self) -> Origin:
        """From where to go on: what was read ahead, or belongs to an unfinished window, comes again.

        At the end of an epoch that is its start: the next one opens the loaders afresh.
        """
        if self.unfinished:
            return self._origin_of_window
        if self._ahead:
            return self._ahead[0].origin
        return Origin() if self.done or self.ended else self._here()

    @property
    def stream_has_ended(self) -> bool:
        """Whether the epoch is over, and its length was not known before on some rank."""
        return bool(self.done) and not self.unfinished and math.isinf(self._owner.length)

    @property
    def ended(self) -> bool:
        """Whether this rank has nothing to go on with in this epoch, in which other ranks have more."""
        if self.unfinished:
            return self._own == 0
        used_up = self._exhausted or (self.length is not None and self.fetched >= self.length)
        return used_up and not self._ahead and not self.done

    def _open_window(self, accumulate: int) -> None:
        if self._reported_for != accumulate:  # at the start of an epoch, and where K has changed in between
            self._take_start()
            self._read_ahead(self._size(accumulate), accumulate)
            self._report(accumulate)
        self._reported_for = None
        reads = list(islice(self._ahead, self._size(accumulate)))
        batch = next((read.item[0] for read in self._ahead if read.item[0] is not None), None)
        # no window while the ranks agree, lest one that they refuse looks like one in hand
        self._micro_batches = self._served = 0
        self._own = len(reads)
        micro_batches, lent_batch = self._owner.start_window(self._stand_in if batch is None else batch)
        self._origin_of_window = self._ahead[0].origin if self._ahead else Origin()
        self._micro_batches = micro_batches
        # The copy is made before the step that may change the batch, and only where it will be needed.
        if self._own < self._micro_batches or any(read.item[0] is None for read in reads):
            if batch is not None:
                self._stand_in = _copy(batch)
            elif self._stand_in is None:
                self._stand_in = lent_batch

    def _take_start(self) -> None:
        ended, skip = self._owner.take_start()
        self._exhausted |= ended
        self._skip += skip

    def _look_beyond(self, batch: Any, accumulate: int) -> None:
        """Report the next window while the last micro-batch of this one is still to be trained on.

        Also that there is none: a rank that sees it otherwise, since its ``K`` alone has changed, hears of it then.
        """
        ends = self.fetched >= self._owner.length
        if ends or self._owner.windows_left <= 1:
            self._owner.report_window([], accumulate, None, False)
            self.done = ends or self.fetched % accumulate != 0  # a short window is the last one of all ranks' data
            return
        if self._stand_in is None and all(read.item[0] is None for read in self._ahead):
            self._stand_in = _copy(batch)  # before the step that may change it
        self._report(accumulate)
        # a rank that has more itself need not wait to know that the epoch goes on
        self.done = not self._ahead and not self._owner.goes_on()

    def _report(self, accumulate: int) -> None:
        size = self._size(accumulate)
        batches = [read.item[0] for read in islice(self._ahead, size)]
        # a failure beyond the window is a matter of the next one
        failure = self._failure if len(batches) < size else None
        borrows = self._stand_in is None and all(read.item[0] is None for read in self._ahead)
        self._owner.report_window(batches, accumulate, failure, borrows)
        self._reported_for = accumulate

    def _size(self, accumulate: int) -> int:
        """How many micro-batches the coming window has where there are enough."""
        # Lightning steps when the number of batches is a multiple of K, so a window that starts elsewhere (after a
        # resume, or where K has changed) is shorter.
        return accumulate - int(self.fetched) % accumulate

    def _here(self) -> Origin:
        # Copies: some loaders return the very dict that they go on changing.
        return Origin(tuple(_copy(loader.state_dict()) for loader in self._stateful_loaders))

    def _next_origin(self, accumulate: int) -> Origin:
        """From where the batch that is about to be read can be read again."""
        starts_window = (self.fetched + len(self._ahead)) % accumulate == 0
        # States can be costly: they are asked for where a window starts, which is where a run can go on.
        if self._origin is None or starts_window or not self._stateful_loaders:
            return self._here()
        return Origin(self._origin.states, self._origin.skip + 1)

    def _read_ahead(self, depth: float, accumulate: int, in_hand: _Read | None = None) -> None:
        if self.length is not None:
            depth = min(depth, self.length - self.fetched)
        while len(self._ahead) < depth and not self._exhausted and self._failure is None:
            try:
                while self._skip:
                    self._skip -= 1
                    _compat.profiled_read(self)
                # before the read: a stateful loader's state has to lead back to this very batch
                origin = self._next_origin(accumulate)
                item = _compat.profiled_read(self)
            except StopIteration:
                self._exhausted = True
            except Exception as error:  # to be raised when its window comes, by all ranks together
                self._failure = error
            else:
                self._origin = origin
                read = _Read(item, origin, BatchMark(item[0]))
                if self._has_overwritten_none(read, in_hand):
                    self._ahead.append(read)

    def _has_overwritten_none(self, read: _Read, in_hand: _Read | None) -> bool:
        """Whether all batches that wait are still what they were before this one was read.

        Else the window of the first that is not will be refused, or the one in hand is.
        """
        waiting = self._ahead if in_hand is None else (in_hand, *self._ahead)
        for index, other in enumerate(waiting):
            if read.mark.places.isdisjoint(other.mark.places) or not other.mark.has_changed():
                continue
            error = TokenNormError(
                f"The loader has changed batch {other.item[1]}, which was read ahead and still waits, when it yielded"
                f" batch {read.item[1]}: both are in the same memory. Let the loader make new tensors for each batch"
                " (`tensor.clone()` where it fills a buffer, a new dict where it changes one)."
            )
            whole = index - (in_hand is not None)
            if whole < self._own - self._served:  # its window has begun: too late for all ranks to refuse it together
                raise error
            self._failure = error
            while len(self._ahead) > whole:
                self._ahead.pop()
            return False
        return True


def _copy(batch: Any) -> Any:
    """A copy that a step can change without harm to the next one; the batch itself where it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # raised on this rank alone it would leave the others waiting
        return batch
