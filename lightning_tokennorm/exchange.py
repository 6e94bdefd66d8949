"""One small collective per window, over a CPU group of the ranks that DDP averages over.

It runs on the host: the counts come from batches that are still there, so every rank knows ``N`` without waiting for
its device. And it runs ahead: a rank sends its row before it trains on the last micro-batch of the window before, so
that nobody waits where the ranks are in step.

A row of `RankReport` is gathered rather than summed, so that every rank sees every rank's numbers: sums and extremes
follow from them, an error can name the rank at fault, and all ranks come to the same decision.
"""

from __future__ import annotations

import atexit
import itertools
import pickle
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_tokennorm.counting import Count
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.window import RankReport

_T = TypeVar("_T")
_WORDS = 6
_FLAGS = ("refuses", "borrows", "sigterm", "requeue", "meets", "leaves", "names_heads")
_STORE_ANSWERS_WITHIN_S = 5
_ASKS_EVERY_S = 0.5
_EXCHANGES = itertools.count()
"""Numbers the exchanges over a group, so that no word is left from an earlier one: its ranks make them in step."""

_CPU_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The gloo companion of each process group: made once, so that fits in a row share it, and gone with its group."""


_LEFT: list[WindowExchange] = []
"""Exchanges whose last word may still be on its way."""


class WindowExchange:
    """Gathers the reports of a window. Without a process group there is one rank and nothing is sent.

    Args:
        group: A gloo group, or ``None`` for a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        """This process's rank in the group."""
        self.world_size = 1 if group is None else dist.get_world_size(group)
        """The number of ranks in the group."""
        if group is not None:
            self._word = f"lightning_tokennorm/{group.group_name}/{next(_EXCHANGES)}"
        # Kept from window to window: a tensor that only a thread of gloo still holds is freed by that thread, which
        # aborts the process where the interpreter is on its way out.
        self._kept: list[Any] = []
        self.widen(0)
        self._on_its_way: dist.Work | None = None
        self._sent = self._sent_at_start = 0  # rows so far, and as the latest window started
        self._reports: list[RankReport] = []

    def widen(self, heads: int) -> None:
        """Make rows with a count for each of several heads from now on; called by all ranks at the same point."""
        self.heads = heads
        """The number of heads that a row has a count for."""
        self._row = torch.zeros(_WORDS + 2 * heads, dtype=torch.int64)
        self._table = torch.zeros(self.world_size, len(self._row), dtype=torch.int64)
        self._rows = list(self._table.unbind())
        self._kept += [self._row, self._table, self._rows]

    @classmethod
    def spanning(cls, process_group: dist.ProcessGroup | None, timeout: timedelta | None = None) -> WindowExchange:
        """An exchange over the ranks of `process_group`, which every one of them has to call.

        Args:
            process_group: The group that DDP averages over, of any backend; ``None`` without one. Nothing is sent in
                a group of one.
            timeout: How long a rank waits for the others before it raises; torch's default for ``None``.
        """
        if process_group is None or dist.get_world_size(process_group) == 1:
            return cls()
        # Threads of gloo that are still there when the interpreter goes can abort the process. Lightning does the same
        # for NCCL.
        atexit.unregister(_destroy_process_groups)
        atexit.register(_destroy_process_groups)
        if process_group not in _CPU_GROUPS:
            # Only members call this, hence the local synchronisation: other ranks of the world may be in other groups.
            ranks = dist.get_process_group_ranks(process_group)
            _CPU_GROUPS[process_group] = dist.new_group(
                ranks, timeout=timeout, backend="gloo", use_local_synchronization=True
            )
        return cls(_CPU_GROUPS[process_group])

    def send(self, report: RankReport) -> None:
        """Send the report of a coming window: the only collective of a window besides DDP's own. Waits for nobody.

        Args:
            report: This rank's report. Every rank has to send one, and as often as the others.

        Raises:
            TokenNormError: As `receive`.
        """
        self._sent += 1
        if self.group is None:
            self._reports = [report]
            return
        self._wait()  # for one that nobody has received, since its epoch ended early or it was sent anew
        self._row.copy_(torch.tensor(_to_words(report, self.heads)))
        with self._naming_what_failed():
            self._on_its_way = dist.all_gather(self._rows, self._row, group=self.group, async_op=True)

    def receive(self) -> list[RankReport]:
        """The reports that all ranks have sent last; waits for those that are on their way.

        Returns:
            The reports in the order of the ranks, the same list on every rank.

        Raises:
            TokenNormError: Another rank is gone or did not come within the timeout.
        """
        if self._on_its_way is not None:
            beside = self._sent > self._sent_at_start + 1  # more than the others may have sent
            if beside and (gone := self._wait_beside_others(self._on_its_way)) is not None:
                raise TokenNormError(
                    f"Rank {self.rank} has reported a window anew that rank {gone} has started as it was:"
                    f" `accumulate_grad_batches` differs between ranks, since rank {self.rank} has changed it between"
                    " windows and not all others have, or it has left an epoch alone. Do so on all ranks."
                )
            self._wait()
            self._reports = [_from_words(words) for words in self._table.tolist()]
        return self._reports

    def start(self) -> None:
        """Say that this rank starts the window that was reported last; every rank has to call this."""
        self._sent_at_start = self._sent
        if self.group is not None:
            with suppress(RuntimeError):  # without the store nothing but this goes on as before
                _store().set(f"{self._word}/{self.rank}", str(self._sent))

    def _wait_beside_others(self, work: dist.Work) -> int | None:
        """Wait for a row that was sent beside the windows' own, unless another rank has started its window without one.

        Such a rank sends its next row at the end of that window, to which it may not come: the host's own collectives
        in a forward wait for this rank.

        Returns:
            That rank, if there is one.
        """
        asked_at = time.monotonic()
        while not work.is_completed():
            time.sleep(0.001)
            if time.monotonic() - asked_at < _ASKS_EVERY_S:
                continue
            answers = _aside(self._gone_on)
            if not answers:
                return None  # the process of the store stands still: it would not answer again either
            if answers[0] is not None:
                return answers[0]
            asked_at = time.monotonic()
        return None

    def _gone_on(self) -> int | None:
        """A rank that has started a window with one row less than this one has sent."""
        others = {rank: f"{self._word}/{rank}" for rank in range(self.world_size) if rank != self.rank}
        with suppress(RuntimeError):
            for rank, key in others.items():
                if _store().check([key]) and int(_store().get(key)) == self._sent - 1:
                    return rank
        return None

    def meet(self) -> bool:
        """Ask whether all ranks are at such a call, between or inside windows, before they exchange objects there.

        A rank that calls this alone hears of it when the others report their next window, and they do as well.
        """
        reports = self.receive()  # of a window, which are still to be used
        self.send(RankReport(0, 0, 0, meets=True))
        between_windows = self._sent > self._sent_at_start + 1  # inside one the others will report the next
        if between_windows and self._on_its_way is not None and self._wait_beside_others(self._on_its_way) is not None:
            return False
        met = all(report.meets for report in self.receive())
        self._reports = reports
        return met

    def who_left(self) -> list[int]:
        """Ask which ranks have left, before something of the host's that would wait for them in vain.

        Called by all ranks that are still there, at the same points of a window.

        Returns:
            Their ranks; the same list on all others.
        """
        if self.group is None:
            return []
        reports = self.receive()  # of a window, which are still to be used
        if not any(report.leaves for report in reports):
            self.send(RankReport(0, 0, 0))
            answers = self.receive()
            self._reports, reports = reports, answers
        return [rank for rank, report in enumerate(reports) if report.leaves]

    def leave(self) -> None:
        """Tell the other ranks, in place of what they expect next, that this one goes on elsewhere. Raises nothing.

        Where all ranks leave at the same point, nobody needs to hear of it.
        """
        if self.group is None:
            return
        with suppress(Exception):  # the others, or the process group, have gone before
            self.send(RankReport(0, 0, 0, leaves=True))
            # what is sent must not be freed before it is sent
            _LEFT[:] = [each for each in _LEFT if each._on_its_way and not each._on_its_way.is_completed()] + [self]

    def _wait(self) -> None:
        if self._on_its_way is not None:
            with self._naming_what_failed():
                self._on_its_way.wait()
            self._on_its_way = None

    @contextmanager
    def _naming_what_failed(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            said = self.announced() or "A rank has ended or stalled: look for its own error, or raise `timeout`."
            raise TokenNormError(
                f"Rank {self.rank} of {self.world_size} waited for the other ranks at the start of a window and got:"
                f" {error}. {said}"
            ) from error

    def gather_objects(self, item: Any) -> list[Any]:
        """Exchange one object per rank; called by all ranks, and never where windows follow each other regularly.

        Args:
            item: This rank's object; it can be pickled.

        Returns:
            The objects of all ranks in the order of their ranks.
        """
        items = [item] * self.world_size
        if self.group is not None:
            dist.all_gather_object(items, item, group=self.group)
        return items

    def lend(self, item: Any, lender: int) -> Any:
        """Give one rank's object to all; called by all ranks, and only after a report said that one borrows.

        Args:
            item: The lender's object; not used on other ranks.
            lender: The rank that has one.

        Raises:
            TokenNormError: On all ranks: it cannot be pickled.
        """
        if self.group is None:
            return item
        parcel: list[Any] = [None]
        if self.rank == lender:
            try:
                parcel = [pickle.dumps(item)]
            except Exception as error:  # to be raised by all ranks together
                parcel = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(parcel, src=dist.get_global_rank(self.group, lender), group=self.group)
        if isinstance(parcel[0], str):
            raise TokenNormError(
                f"A rank without any batch needs one to run its forward on, but rank {lender}'s cannot be pickled:"
                f" {parcel[0]}. Give every rank at least one batch, or let the loader yield what can be pickled."
            )
        return pickle.loads(parcel[0])

    def announce(self, reason: str) -> None:
        """Leave word of why this rank alone cannot go on, for `announced` on the others. The first word stays.

        No collective: the others are where only the end of this process wakes them.
        """
        if self.group is not None and self.announced() is None:
            with suppress(RuntimeError):  # the store has gone before us
                _store().set(self._word, reason)

    def announced(self) -> str | None:
        """What a rank that failed alone has left word of; ``None`` where none has."""
        if self.group is None:
            return None
        if said := _aside(self._ask_store):
            return said[0]
        return (
            "The store of the process group does not answer. Rank 0 keeps it unless a launcher does: look at what that"
            " process does."
        )

    def _ask_store(self) -> str | None:
        try:
            return _store().get(self._word).decode() if _store().check([self._word]) else None
        except RuntimeError:
            return (
                "The store of the process group is gone. Rank 0 keeps it unless a launcher does: look for its own"
                " error first."
            )


def _aside(ask: Callable[[], _T]) -> list[_T]:
    """What a question to the store gives; empty where the store's process stands still.

    Such a store never answers, whatever its timeout: wait for it aside, and not for long.
    """
    said: list[_T] = []
    asks = threading.Thread(target=lambda: said.append(ask()), daemon=True)
    asks.start()
    asks.join(_STORE_ANSWERS_WITHIN_S)
    return said


def is_of_a_collective(error: BaseException | None) -> bool:
    """Whether an error says that a collective broke off, so that the fault is another rank's."""
    # Those of gloo have no type of their own; each names the place in gloo's source.
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _destroy_process_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _store() -> dist.Store:
    # The key-value store that the ranks met through: a rank can still read it when a collective has failed.
    return dist.distributed_c10d._get_default_store()


def _to_words(report: RankReport, heads: int) -> list[int]:
    flags = sum(flag << bit for bit, flag in enumerate(getattr(report, name) for name in _FLAGS))
    counts = [report.num_tokens, *report.heads, *[0] * (heads - len(report.heads))]
    words = [report.micro_batches, report.accumulate, flags, report.fingerprint]
    return words + [word for count in counts for word in _count_to_words(count)]


def _from_words(words: Sequence[int]) -> RankReport:
    micro_batches, accumulate, flags, fingerprint, *counts = words
    num_tokens, *heads = itertools.starmap(_count_from_words, zip(counts[::2], counts[1::2], strict=True))
    said = {name: bool(flags >> bit & 1) for bit, name in enumerate(_FLAGS)}
    return RankReport(num_tokens, micro_batches, accumulate, **said, fingerprint=fingerprint, heads=tuple(heads))


def _count_to_words(count: Count) -> tuple[int, int]:
    # A count travels as 64 bits: an int as itself, a float as its bit pattern. Nothing is added up on the way.
    weighted = isinstance(count, float)
    return weighted, struct.unpack("<q", struct.pack("<d", count))[0] if weighted else int(count)


def _count_from_words(weighted: int, bits: int) -> Count:
    count: Count = struct.unpack("<d", struct.pack("<q", bits))[0] if weighted else bits
    return count
