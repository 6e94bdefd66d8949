"""What callbacks share that log values of each optimizer update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_tokennorm import _compat
from lightning_tokennorm.callbacks.batch_tokens import BatchTokens
from lightning_tokennorm.callbacks.monitors import is_monitored
from lightning_tokennorm.counting import Count, TokenCounter


class StepValue(Metric):
    """Holds a value that is logged by step and has no meaning over an epoch."""

    def update(self) -> None:
        """Nothing is accumulated."""

    def compute(self) -> Tensor:
        """There is no value over an epoch."""
        return torch.tensor(torch.nan)


class PerUpdate(Callback):
    """Adds up something over micro-batches, and logs what comes of it once per optimizer update.

    Ranks exchange it only where Lightning logs the update, or looks at one of its values: the other updates cost no
    collective and no synchronisation of the device, and log nothing, lest an older value stand for theirs.

    Args:
        count_tokens: As of `BatchTokens`.
    """

    names: tuple[str, ...]
    """The keys of what is logged."""

    def __init__(self, count_tokens: TokenCounter | None) -> None:
        self._tokens = BatchTokens(count_tokens, type(self).__name__)
        self._logged: dict[str, StepValue] = {}
        self._updates = 0
        self._exchanges_all = False
        self._has_values = False

    def start(self, device: torch.device) -> None:
        """Get ready, with states on a device."""
        raise NotImplementedError

    def add(self, tokens: Count | Tensor) -> None:
        """Add the supervised tokens of a micro-batch of this rank."""
        raise NotImplementedError

    def values(self) -> Mapping[str, Tensor | None]:
        """The values of the update that is over, by name: tensors of shape ``()``, or ``None`` for nothing.

        Called by all ranks: may exchange.
        """
        raise NotImplementedError

    def end_update(self) -> None:
        """Do what is to be done at the end of every update, logged or not."""

    def start_update(self) -> None:
        """Start with the next update's micro-batches."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tokens.start(trainer, pl_module)
        self._logged = {name: StepValue() for name in self.names}
        self._updates, self._has_values = trainer.global_step, False
        self._exchanges_all = is_monitored(trainer, set(self.names))
        self.start(state_device(pl_module))

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start_update()  # a window that the last epoch left unfinished was never stepped

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._tokens.before_step(trainer, batch)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.add(self._tokens.after_step(trainer, outputs, batch))
        # Whether the window ended is what Lightning did, not what K says by now: any hook may have changed it.
        stepped, self._updates = trainer.global_step != self._updates, trainer.global_step
        is_over = stepped
        if not pl_module.automatic_optimization:
            # where a window may have any number of steps, so only a strategy that knows of windows can tell
            is_over = getattr(getattr(trainer.strategy, "window", None), "is_last", True)
        if is_over:
            self.end_update()
        logs = is_over and (self._exchanges_all or _compat.logs_this_update(trainer))
        if logs or self._has_values:  # else Lightning might write the same values again, as a later update's
            self._log(pl_module, self.values() if logs else {})
        if is_over:
            self.start_update()

    def _log(self, pl_module: pl.LightningModule, values: Mapping[str, Tensor | None]) -> None:
        for name, metric in self._logged.items():
            _compat.set_step_value(metric, values.get(name))
            pl_module.log(name, metric, on_step=True, on_epoch=False, batch_size=1, metric_attribute=name)
        self._has_values = bool(values)


def state_device(pl_module: pl.LightningModule) -> torch.device:
    """Where float64 sums live: beside the loss, except on a device that has no float64."""
    return torch.device("cpu") if pl_module.device.type == "mps" else pl_module.device
