"""Who looks at a value after an update: a value that is not exchanged there is an older update's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tokennorm import _compat


def is_monitored(trainer: pl.Trainer, keys: Set[str]) -> bool:
    """Whether Lightning itself looks at one of these keys, on all ranks: a checkpoint, a stop, a plateau scheduler."""
    return not keys.isdisjoint(_monitored(trainer))


def _monitored(trainer: pl.Trainer) -> Iterator[str | None]:
    for callback in _callbacks(trainer):
        if isinstance(callback, (EarlyStopping, ModelCheckpoint)):
            yield callback.monitor
        if isinstance(callback, ModelCheckpoint):
            yield from re.findall(r"\{([^:}]+)", callback.filename or "")
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            yield config.monitor


def warn_of_other_monitors(trainer: pl.Trainer, keys: Set[str]) -> None:
    """Warn of callbacks that look at one of these keys, and that may be on some ranks only."""
    every = _compat.log_every_n_steps(trainer)
    for callback in _callbacks(trainer):
        key: Any = getattr(callback, "monitor", None)
        if every != 1 and key in keys and not isinstance(callback, (EarlyStopping, ModelCheckpoint)):
            rank_zero_warn(
                f"`{type(callback).__name__}` monitors {key!r}, which `TokenMeanMetric` renews only at updates that"
                f" are logged; with `log_every_n_steps={every}` it finds an older value at the others. Set"
                f" `Trainer(log_every_n_steps=1)`, or monitor the epoch's value ({key.removesuffix('_step')}_epoch)."
            )


def _callbacks(trainer: Any) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # which Lightning does not declare
    return callbacks
