"""How much of everything is measured: for two CPU cores, for a GPU, or next to nothing for a test.

Nothing here imports torch: ``--help`` is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MODES = ("correctness", "accumulation", "overhead", "hosts", "loader", "exchange")
MICRO_BATCHES = (8, 4, 2, 1)
"""Rows per micro-batch of the modes `correctness` and `accumulation`, whose window has eight rows."""
Precision = Literal["32-true", "bf16-mixed"]


@dataclass(frozen=True)
class Size:
    """A causal transformer and the rows that it is fed."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    """Positions of a row."""


@dataclass(frozen=True)
class Preset:
    """The sizes of a run."""

    name: str
    device: str
    """``"cpu"`` or ``"cuda"``."""
    size: Size
    """The transformer of all modes."""
    micro_batch: int
    """Rows per micro-batch of the modes `overhead` and `loader`."""
    rounds: int
    """How often the contestants take turns."""
    timed_micro_batches: int
    """Micro-batches of a fit that are timed, a window more."""
    world_sizes: tuple[int, ...]
    """W of the mode `overhead`."""
    accumulates: tuple[int, ...]
    """K of the mode `overhead`."""
    hosts_size: Size
    """The transformer of the mode `hosts`, whose micro-batches have one row."""
    hosts_weighed_size: Size
    """The transformer whose memory is looked at there."""
    hosts_sleep_s: float
    """Seconds that it sleeps besides."""
    hosts_timed_micro_batches: int
    """Micro-batches of a fit that are timed there, a window more: with thirteen contestants fewer than elsewhere."""
    hosts_world_sizes: tuple[int, ...]
    """W of the mode `hosts`."""
    hosts_accumulates: tuple[int, ...]
    """K of the mode `hosts`."""
    loader_accumulates: tuple[int, ...]
    """K of the mode `loader`."""
    sleep_s: float | None
    """Seconds of a micro-batch of the model that sleeps, where the CPU computes; None where a GPU does.

    With it a machine that has fewer cores than ranks, or other work, still shows what a trainer adds to a micro-batch.
    """
    correctness_world_sizes: tuple[int, ...]
    """W of the mode `correctness`."""
    timed_precisions: tuple[Precision, ...]
    """Precisions of the mode `accumulation`."""
    exchange_ranks: tuple[int, ...]
    """W of the mode `exchange`."""
    exchange_calls: int
    """Exchanges per round and W."""
    no_op_windows: int
    """Windows that a fit of the model that does nothing begins."""

    @property
    def loader_world_size(self) -> int:
        """W of the mode `loader`: the ranks that two cores carry."""
        return min(2, max(self.world_sizes))

    def windows(self, accumulate: int, timed_micro_batches: int | None = None) -> int:
        """Windows that a fit begins: the first to warm up, the last to end the one before it, one or more timed."""
        return 3 + (timed_micro_batches or self.timed_micro_batches) // accumulate


CPU = Preset(
    name="cpu",
    device="cpu",
    size=Size(layers=2, hidden=128, heads=4, vocabulary=512, length=64),
    micro_batch=2,
    rounds=5,
    timed_micro_batches=12,
    world_sizes=(1, 2, 4),
    accumulates=(1, 4, 16),
    hosts_size=Size(layers=2, hidden=192, heads=4, vocabulary=256, length=16),  # 1.0 M parameters
    hosts_weighed_size=Size(layers=2, hidden=384, heads=4, vocabulary=256, length=16),  # 3.8 M parameters
    hosts_sleep_s=0.01,
    hosts_timed_micro_batches=8,
    hosts_world_sizes=(1, 2),
    hosts_accumulates=(1, 4, 16),
    loader_accumulates=(8, 32),
    sleep_s=0.02,
    correctness_world_sizes=(1, 2),
    timed_precisions=("32-true",),  # bfloat16 is emulated on most CPUs, and what that costs says nothing
    exchange_ranks=(1, 2, 3, 4, 6, 8, 12, 16),
    exchange_calls=30,
    no_op_windows=12,
)

GPU = replace(
    CPU,
    name="gpu",
    device="cuda",
    size=Size(layers=8, hidden=1024, heads=16, vocabulary=8192, length=512),  # 118 M parameters
    micro_batch=8,
    hosts_size=Size(layers=8, hidden=1024, heads=16, vocabulary=8192, length=512),
    hosts_weighed_size=Size(layers=8, hidden=1024, heads=16, vocabulary=8192, length=512),
    hosts_sleep_s=0.0,
    sleep_s=None,
    timed_precisions=("32-true", "bf16-mixed"),
)

QUICK = replace(
    CPU,
    name="quick",
    size=Size(layers=1, hidden=16, heads=2, vocabulary=32, length=32),
    rounds=1,
    timed_micro_batches=2,
    world_sizes=(2,),
    accumulates=(1, 3),
    hosts_size=Size(layers=1, hidden=16, heads=2, vocabulary=32, length=32),
    hosts_weighed_size=Size(layers=1, hidden=16, heads=2, vocabulary=32, length=32),
    hosts_sleep_s=0.0,
    hosts_timed_micro_batches=2,
    hosts_world_sizes=(2,),
    hosts_accumulates=(3,),
    loader_accumulates=(3,),
    sleep_s=0.005,
    correctness_world_sizes=(2,),
    exchange_ranks=(1, 2, 3),
    exchange_calls=20,
    no_op_windows=4,
)

PRESETS = {preset.name: preset for preset in (CPU, GPU, QUICK)}
