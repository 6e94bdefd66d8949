"""How a host brings the gradients of its ranks together: over which of them, and by what it divides their sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Reduction:
    """What a host does with the gradients of ranks that hold different batches."""

    group: dist.ProcessGroup | None
    """The ranks; ``None`` for a single process."""
    divided_by: float | None = None
    """By what it divides the sum over the ranks; ``None`` for their number."""
