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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning_tokennorm import _compat


@dataclass(frozen=True)
class _Read:
    """A micro-batch that was read ahead."""

    item: Any
    """What Lightning's loops expect: the batch, its index and its loader's."""
    states: list[Any]
    """The states of stateful loaders from before it was read."""


class LookaheadFetcher(_compat.BaseFetcher):  # type: ignore[misc]
    """Serves the training batches of an epoch, window by window.

    Args:
        accumulate: Returns ``K``; asked at every micro-batch, since callbacks change it.
        length: Returns the number of micro-batches of the epoch that ranks have agreed on; infinite where some rank's
            is not known.
        report_window: Called with what this rank has for the coming window as soon as that is known, also at the end of
            the data unless `length` tells, and on every rank alike: the place to start an exchange. Called anew where
            ``K`` has changed before the window starts. Arguments: the batches, none at the end of the data; ``K``; what
            went wrong while reading a batch of the window; whether there is no batch that could stand in for one that
            is missing.
        goes_on: Waits for the reports of all ranks, and returns whether some rank has more; called on ranks that have
            none.
        start_window: Called before the window's first micro-batch is served, with a batch that could be lent to another
            rank, and on every rank alike: the place to end the exchange. Returns how many micro-batches all ranks go
            through, 0 at the end of all data (a rank that has fewer serves stand-ins for the rest), and another rank's
            batch where some rank has none, else ``None``. What it raises ends the epoch.
        start_micro_batch: Called for each micro-batch that is served, with its index in the window and whether it is a
            stand-in.
        ended: Whether the data of the first epoch has been used up before, by the run that this one resumes.
    """

    def __init__(
        self,
        *,
        accumulate: Callable[[], int],
        length: Callable[[], float],
        report_window: Callable[[Sequence[Any], int, Exception | None, bool], None],
        goes_on: Callable[[], bool],
        start_window: Callable[[Any], tuple[int, Any]],
        start_micro_batch: Callable[[int, bool], None],
        ended: bool = False,
    ) -> None:
        self._ahead: deque[_Read] = deque()
        self._states_at_window: list[Any] = []
        self._failure: Exception | None = None
        self._stand_in: Any = None
        self._stateful_loaders: list[Any] = []
        self._exhausted, self._starts_exhausted = False, ended
        # The window in hand: its micro-batches, those of them that are this rank's own, those that were served.
        self._micro_batches = self._own = self._served = 0
        self.stepped = False
        """Whether the optimizer has stepped on the window in hand; to be set by whoever steps."""
        self._reported_for: int | None = None  # the K that the next window was reported with
        super().__init__()
        self._accumulate = accumulate
        self._agreed_length = length
        self._report_window = report_window
        self._goes_on = goes_on
        self._start_window = start_window
        self._start_micro_batch = start_micro_batch

    def reset(self) -> None:
        super().reset()
        # once per epoch: to look whether a loader has a state takes longer than to count a batch
        self._stateful_loaders = _compat.stateful_loaders(self)
        self._ahead.clear()
        self._failure = None
        self._exhausted, self._starts_exhausted = self._starts_exhausted, False
        self._micro_batches = self._own = self._served = 0
        self.stepped = False
        self._reported_for = None

    def __next__(self) -> Any:
        accumulate = self._accumulate()
        if self._served == self._micro_batches:
            self._open_window(accumulate)
        self.done = not self._micro_batches
        if self.done:
            raise StopIteration
        item = self._ahead.popleft().item if self._served < self._own else (None, self.fetched, 0)
        stands_in = item[0] is None
        if stands_in:
            item = (_copy(self._stand_in), *item[1:])
        self._start_micro_batch(self._served, stands_in)
        self._served += 1
        self.fetched += 1
        self._read_ahead(accumulate)
        if self._served == self._micro_batches:
            self._look_beyond(item[0], accumulate)
        return item

    @property
    def unfinished(self) -> int:
        """How many micro-batches of a window that is not complete have been served."""
        return 0 if self.stepped else self._served

    def resume_states(self) -> list[Any]:
        """The loaders' states to go on from: what was read ahead, or belongs to an unfinished window, comes again.

        At the end of an epoch there are none: the next one opens the loaders afresh.
        """
        if self.unfinished:
            return self._states_at_window
        if self._ahead:
            return self._ahead[0].states
        return [] if self.done or self.ended else self._loader_states()

    @property
    def ended(self) -> bool:
        """Whether this rank has nothing to go on with in this epoch, in which other ranks have more."""
        if self.unfinished:
            return self._own == 0
        used_up = self._exhausted or (self.length is not None and self.fetched >= self.length)
        return used_up and not self._ahead and not self.done

    def _open_window(self, accumulate: int) -> None:
        if self._reported_for != accumulate:  # at the start of an epoch, and where K has changed in between
            self._read_ahead(self._size(accumulate))
            self._report(accumulate)
        self._reported_for = None
        reads = list(islice(self._ahead, self._size(accumulate)))
        batch = next((read.item[0] for read in self._ahead if read.item[0] is not None), None)
        self._states_at_window = self._ahead[0].states if self._ahead else []
        self._served, self._own = 0, len(reads)
        self.stepped = False
        # no window while the ranks agree, lest one that they refuse looks like one in hand
        self._micro_batches = 0
        self._micro_batches, lent_batch = self._start_window(self._stand_in if batch is None else batch)
        # The copy is made before the step that may change the batch, and only where it will be needed.
        if self._own < self._micro_batches or any(read.item[0] is None for read in reads):
            if batch is not None:
                self._stand_in = _copy(batch)
            elif self._stand_in is None:
                self._stand_in = lent_batch

    def _look_beyond(self, batch: Any, accumulate: int) -> None:
        """Report the next window while the last micro-batch of this one is still to be trained on."""
        if self.fetched >= self._agreed_length():
            self.done = True
            return
        if not self._ahead and self._stand_in is None:
            self._stand_in = _copy(batch)  # before the step that may change it
        self._report(accumulate)
        # a rank that has more itself need not wait to know that the epoch goes on
        self.done = not self._ahead and not self._goes_on()

    def _report(self, accumulate: int) -> None:
        size = self._size(accumulate)
        batches = [read.item[0] for read in islice(self._ahead, size)]
        # a failure beyond the window is a matter of the next one
        failure = self._failure if len(batches) < size else None
        borrows = self._stand_in is None and all(read.item[0] is None for read in self._ahead)
        self._report_window(batches, accumulate, failure, borrows)
        self._reported_for = accumulate

    def _size(self, accumulate: int) -> int:
        """How many micro-batches the coming window has where there are enough."""
        # Lightning steps when the number of batches is a multiple of K, so a window that starts elsewhere (after a
        # resume, or where K has changed) is shorter.
        return accumulate - int(self.fetched) % accumulate

    def _loader_states(self) -> list[Any]:
        return [loader.state_dict() for loader in self._stateful_loaders]

    def _read_ahead(self, depth: int) -> None:
        if self.length is not None:
            depth = min(depth, self.length - self.fetched)
        while len(self._ahead) < depth and not self._exhausted and self._failure is None:
            try:
                # before the read: a stateful loader's state has to lead back to this very batch
                states = self._loader_states()
                item = _compat.profiled_read(self)
            except StopIteration:
                self._exhausted = True
            except Exception as error:  # to be raised when its window comes, by all ranks together
                self._failure = error
            else:
                self._ahead.append(_Read(item, states))


def _copy(batch: Any) -> Any:
    """A copy that a step can change without harm to the next one; the batch itself where it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # raised on this rank alone it would leave the others waiting
        return batch
