"""How a host brings the gradients of its ranks together: over which of them, and by what it divides their sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Reduction:
    """What a host does with the gradients of its ranks."""

    group: dist.ProcessGroup | None
    """The ranks that go through their windows together; ``None`` for a single process."""
    divided_by: float | None = None
    """By what it divides the sum over the ranks; ``None`` for their number."""
    copies: tuple[tuple[int, ...], ...] | None = None
    """Where some of the ranks hold the same batches (tensor parallelism): one list of ranks per model replica. Tokens
    are counted, and gradients reduced, over one rank of each. ``None`` where every rank has batches of its own."""
