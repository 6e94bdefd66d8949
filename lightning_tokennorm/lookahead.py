"""Reads the micro-batches of the coming window without consuming them.

The fetcher below takes the place of the fit loop's own. It serves the same batches in the same order, but reads ahead:
at the start of a window the counts of all its micro-batches are known, and whether another one follows. It rolls:
each micro-batch served reads one more, so at most ``K`` wait on the host (none on a device), and a loader that is as
slow as the compute is never asked for a whole window at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from lightning_tokennorm import _compat

T = TypeVar("T")


@dataclass(frozen=True)
class _Read(Generic[T]):
    """A micro-batch that was read ahead."""

    item: Any
    """What Lightning's loops expect: the batch, its index and its loader's."""
    count: T
    """Its supervised tokens."""
    states: list[Any]
    """The states of stateful loaders from before it was read."""


@dataclass(frozen=True)
class ComingWindow(Generic[T]):
    """What one rank can see of a window before its first micro-batch is served."""

    counts: tuple[T, ...]
    """One count per micro-batch; empty at the end of the data."""
    more: bool
    """Whether the epoch goes on after the window."""
    failure: Exception | None
    """What went wrong while reading or counting a micro-batch of the window."""


class LookaheadFetcher(_compat.BaseFetcher):  # type: ignore[misc]
    """Serves the training batches of an epoch, window by window.

    Args:
        count: Counts the supervised tokens of a batch that has just been read.
        accumulate: Returns ``K``; asked at every window, since callbacks change it.
        start_window: Called with the `ComingWindow` before its first micro-batch is served, also at the end of the
            data, and on every rank alike: the place for an exchange. What it raises ends the epoch.
        start_micro_batch: Called with the index in its window of each micro-batch that is served.
    """

    def __init__(
        self,
        *,
        count: Callable[[Any], T],
        accumulate: Callable[[], int],
        start_window: Callable[[ComingWindow[T]], None],
        start_micro_batch: Callable[[int], None],
    ) -> None:
        self._ahead: deque[_Read[T]] = deque()
        self._states_at_window: list[Any] = []
        self._failure: Exception | None = None
        self._exhausted = False
        self._served = self._window_size = 0
        super().__init__()
        self._count = count
        self._accumulate = accumulate
        self._start_window = start_window
        self._start_micro_batch = start_micro_batch

    def reset(self) -> None:
        super().reset()
        self._ahead.clear()
        self._failure = None
        self._exhausted = False
        self._served = self._window_size = 0

    def __next__(self) -> Any:
        if self._served == self._window_size:
            self._open_window()
        if not self._ahead:
            self.done = True
            raise StopIteration
        read = self._ahead.popleft()
        if self._served == 0:
            self._states_at_window = read.states
        self.fetched += 1
        self._start_micro_batch(self._served)
        self._served += 1
        self._read_ahead(self._accumulate())
        self.done = not self._ahead and self._failure is None
        return read.item

    @property
    def unfinished(self) -> int:
        """How many micro-batches of a window that is not complete have been served."""
        return self._served if self._served < self._window_size else 0

    def resume_states(self) -> list[Any]:
        """The loaders' states to go on from: what was read ahead, or belongs to an unfinished window, comes again.

        At the end of an epoch there are none: the next one opens the loaders afresh.
        """
        if self.unfinished:
            return self._states_at_window
        if self._ahead:
            return self._ahead[0].states
        return [] if self.done else _compat.loader_states(self)

    def _open_window(self) -> None:
        # Lightning steps when the number of batches is a multiple of K, so a window that starts elsewhere (after a
        # resume, or where K has changed) is shorter.
        size = self._accumulate() - self.fetched % self._accumulate()
        self._read_ahead(size + 1)
        counts = tuple(read.count for read in islice(self._ahead, size))
        # a failure beyond the window is a matter of the next one
        failure = self._failure if len(counts) < size else None
        more = len(self._ahead) > size or (self._failure is not None and failure is None)
        self._served, self._window_size = 0, len(counts)
        self._start_window(ComingWindow(counts, more, failure))

    def _read_ahead(self, depth: int) -> None:
        if self.length is not None:
            depth = min(depth, self.length - self.fetched)
        while len(self._ahead) < depth and not self._exhausted and self._failure is None:
            try:
                # before the read: a stateful loader's state has to lead back to this very batch
                states = _compat.loader_states(self)
                item = _compat.profiled_read(self)
            except StopIteration:
                self._exhausted = True
            except Exception as error:  # to be raised when its window comes, by all ranks together
                self._failure = error
            else:
                self._append(item, states)

    def _append(self, item: Any, states: list[Any]) -> None:
        batch, _, _ = item
        try:
            self._ahead.append(_Read(item, self._count(batch), states))
        except Exception as error:
            self._failure = error
