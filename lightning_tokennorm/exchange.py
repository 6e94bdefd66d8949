"""One small collective per window, over a CPU group of the ranks that DDP averages over.

It runs on the host: the counts come from batches that are still there, so every rank knows ``N`` without waiting for
its device. A row of `RankReport` is gathered rather than summed, so that every rank sees every rank's numbers: sums and
extremes follow from them, an error can name the rank at fault, and all ranks come to the same decision.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_tokennorm.counting import Count
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.window import RankReport

_CPU_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The gloo companion of each process group: made once, so that fits in a row share it, and gone with its group."""


@dataclass(frozen=True)
class WindowExchange:
    """Gathers the reports of a window. Without a process group there is one rank and nothing is sent."""

    group: dist.ProcessGroup | None = None
    """A gloo group, or ``None`` for a single process."""

    @classmethod
    def spanning(cls, process_group: dist.ProcessGroup | None, timeout: timedelta | None = None) -> WindowExchange:
        """An exchange over the ranks of `process_group`, which every one of them has to call.

        Args:
            process_group: The group that DDP averages over, of any backend; ``None`` for a single process.
            timeout: How long a rank waits for the others before it raises; torch's default for ``None``.
        """
        if process_group is None:
            return cls()
        if process_group not in _CPU_GROUPS:
            # Only members call this, hence the local synchronisation: other ranks of the world may be in other groups.
            ranks = dist.get_process_group_ranks(process_group)
            _CPU_GROUPS[process_group] = dist.new_group(
                ranks, timeout=timeout, backend="gloo", use_local_synchronization=True
            )
        return cls(_CPU_GROUPS[process_group])

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """``W``: the number of ranks in the group."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def gather(self, report: RankReport) -> list[RankReport]:
        """Exchange the reports of the coming window: the only collective of a window besides DDP's own.

        Args:
            report: This rank's report.

        Returns:
            The reports of all ranks in the order of their ranks, the same list on every rank.

        Raises:
            TokenNormError: Another rank is gone or did not come within the timeout.
        """
        if self.group is None:
            return [report]
        row = torch.tensor(_to_words(report), dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        try:
            dist.all_gather(rows, row, group=self.group)
        except RuntimeError as error:
            raise TokenNormError(
                f"Rank {self.rank} of {self.world_size} waited for the other ranks at the start of a window and got:"
                f" {error}. A rank has ended or stalled: look for its own error above, or raise `timeout`."
            ) from error
        return [_from_words(words.tolist()) for words in rows]

    def gather_reasons(self, reason: str | None) -> list[str | None]:
        """Exchange why ranks refuse to go on; called by all ranks, and only after a report said that one does.

        Args:
            reason: This rank's reason, ``None`` where it does not refuse.

        Returns:
            One entry per rank.
        """
        reasons: list[str | None] = [reason] * self.world_size
        if self.group is not None:
            dist.all_gather_object(reasons, reason, group=self.group)
        return reasons


def _to_words(report: RankReport) -> list[int]:
    # A count travels as 64 bits: an int as itself, a float as its bit pattern. Nothing is added up on the way.
    weighted = isinstance(report.num_tokens, float)
    bits = struct.unpack("<q", struct.pack("<d", report.num_tokens))[0] if weighted else int(report.num_tokens)
    return [weighted, bits, report.micro_batches, report.accumulate, report.more, report.refuses]


def _from_words(words: Sequence[int]) -> RankReport:
    weighted, bits, micro_batches, accumulate, more, refuses = words
    num_tokens: Count = struct.unpack("<d", struct.pack("<q", bits))[0] if weighted else bits
    return RankReport(num_tokens, micro_batches, accumulate, bool(more), bool(refuses))
