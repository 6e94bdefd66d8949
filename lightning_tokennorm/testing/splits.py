"""Ways to deal the same samples to ranks and micro-batches, with everything in them that goes wrong elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MicroBatch:
    """Which samples a micro-batch holds."""

    samples: tuple[int, ...]
    """Indices of the samples."""
    supervised: bool = True
    """Whether its labels are kept; else all of them are set to the ignore index."""


@dataclass(frozen=True)
class Split:
    """An epoch of micro-batches, dealt to ranks."""

    world_size: int
    """``W``: ranks with micro-batches of their own."""
    accumulate: int
    """``K``: micro-batches per window and rank."""
    ranks: tuple[tuple[MicroBatch, ...], ...]
    """The micro-batches of each rank, the same number on every rank."""
    data_of: tuple[int, ...]
    """The processes, each by the rank whose micro-batches it trains on: those with the same are copies."""

    @property
    def copies(self) -> int:
        """How many processes train on the same micro-batches."""
        return len(self.data_of) // self.world_size

    @property
    def windows(self) -> list[list[list[MicroBatch]]]:
        """The micro-batches by window and rank."""
        starts = range(0, len(self.ranks[0]), self.accumulate)
        return [[list(rank[start : start + self.accumulate]) for rank in self.ranks] for start in starts]

    def merged(self, window: int) -> list[int]:
        """The samples of a window whose labels count: what one process sees in one batch."""
        micro_batches = [micro_batch for rank in self.windows[window] for micro_batch in rank]
        return [sample for m in micro_batches if m.supervised for sample in m.samples]

    def __str__(self) -> str:
        sizes = [len(micro_batch.samples) for rank in self.ranks for micro_batch in rank]
        copies = f" on {self.copies} ranks each" if self.copies > 1 else ""
        parts = [f"W={self.world_size}{copies} K={self.accumulate}", f"micro-batches of {min(sizes)}-{max(sizes)}"]
        if len(self.ranks[0]) % self.accumulate:
            parts.append("short last window")
        if any(all(not m.supervised for m in rank) for window in self.windows for rank in window):
            parts.append("a rank without tokens")
        elif not all(m.supervised for rank in self.ranks for m in rank):
            parts.append("a micro-batch without tokens")
        return ", ".join(parts)


def deal(num_samples: int, data_of: Sequence[int], accumulate: int, micro_batch_size: int, *, blank: bool) -> Split:
    """Deal all samples: ragged micro-batches, at least two full windows, and a short last one where ``K > 1``.

    Args:
        num_samples: How many samples there are; they are gone through again where a window is not full.
        data_of: The processes, each by the rank whose micro-batches it trains on.
        accumulate: ``K``.
        micro_batch_size: Most samples of a micro-batch; there are smaller ones, too.
        blank: Whether to leave a rank (the last micro-batch, with one rank) of the second window without tokens.
    """
    world_size = max(data_of) + 1
    ranks: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    next_sample = 0

    def add_column() -> None:
        nonlocal next_sample
        column = len(ranks[0])
        in_second_window = column // accumulate == 1
        for rank in range(world_size):
            if world_size > 1:
                no_tokens = blank and in_second_window and rank == world_size - 1
            else:
                no_tokens = blank and in_second_window and accumulate > 1 and column % accumulate == accumulate - 1
            size = 1 + (rank + column) % micro_batch_size
            samples = tuple((next_sample + i) % num_samples for i in range(size))
            ranks[rank].append(MicroBatch(samples, supervised=not no_tokens))
            if not no_tokens:
                next_sample += size

    while next_sample < num_samples or len(ranks[0]) < 2 * accumulate or len(ranks[0]) % accumulate:
        add_column()
    for _ in range(accumulate - 1):
        add_column()
    return Split(world_size, accumulate, tuple(tuple(rank) for rank in ranks), tuple(data_of))


def make_batches(
    micro_batches: Sequence[MicroBatch],
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    clear_labels: Callable[[Any], None] | None,
) -> list[Any]:
    """The batches themselves, made anew and in memory of their own: a step may change them.

    Args:
        micro_batches: Which samples they hold.
        samples: All samples.
        collate_fn: Makes a batch of a list of samples.
        clear_labels: Sets all labels of a batch to the ignore index; ``None`` where none has to be cleared.
    """
    batches = []
    for micro_batch in micro_batches:
        # a collate function may return views of the samples, or a sample itself
        batch = copy.deepcopy(collate_fn([samples[index] for index in micro_batch.samples]))
        if not micro_batch.supervised:
            assert clear_labels is not None
            clear_labels(batch)
        batches.append(batch)
    return batches
