"""`TokenBudget`: ends the training on all ranks together when enough tokens have been trained on."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_tokennorm.callbacks.batch_tokens import BatchTokens
from lightning_tokennorm.callbacks.per_update import state_device
from lightning_tokennorm.counting import Count, TokenCounter


class _Sum(Metric):
    """Tokens of a window, summed over ranks in one collective; exact up to 2**53."""

    full_state_update = False
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("tokens", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, tokens: Count | Tensor) -> None:
        self.tokens += tokens.to(self.tokens) if isinstance(tokens, Tensor) else tokens

    def compute(self) -> Tensor:
        return self.tokens


class TokenBudget(Callback):
    """A callback that ends the training at the first update at which enough supervised tokens have been trained on.

    Tokens are those of all ranks and of all updates so far, also of the runs that this one was resumed from: the number
    is part of every checkpoint. All ranks stop after the same update, as Lightning does after any early stop: with a
    validation, and not before `min_epochs` and `min_steps`. A run that is resumed at its budget does no update.

    Under a strategy of this package the number is that of its records (`UpdateRecord`), which costs nothing, and
    updates that were skipped do not count. Under any other one ranks exchange their counts at each update (one
    collective), and an update that a GradScaler has skipped counts like any other.

    Args:
        max_tokens: The budget: supervised tokens, or the sum of their weights.
        count_tokens: Counts the supervised tokens of a batch under strategies that do not. Default:
            `SupervisedTokens()`, which looks at the module.

    Raises:
        TypeError: ``max_tokens`` is no number, or ``count_tokens`` is not callable.
        ValueError: ``max_tokens`` is not positive and finite.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tokennorm import TokenBudget
        >>> trainer = Trainer(accelerator="cpu", logger=False, max_epochs=-1, callbacks=[TokenBudget(2_000_000)])
    """

    def __init__(self, max_tokens: float, *, count_tokens: TokenCounter | None = None) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, (int, float)):
            raise TypeError(f"`TokenBudget(max_tokens=...)` got {max_tokens!r}; expected a number of tokens.")
        if not 0 < max_tokens < math.inf:
            raise ValueError(f"`TokenBudget(max_tokens=...)` got {max_tokens}; expected a positive, finite number.")
        self.max_tokens = max_tokens
        self.tokens: Count = 0
        """Supervised tokens trained on so far, over all ranks and updates."""
        self._counter = BatchTokens(count_tokens, "TokenBudget")
        self._window = _Sum()
        self._updates = 0
        self._last_update: Any = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = state_dict["tokens"]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._counter.start(trainer, pl_module)
        self._window = _Sum().to(state_device(pl_module))
        self._updates, self._last_update = trainer.global_step, getattr(trainer.strategy, "last_update", None)
        self._stop_at_budget(trainer)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window.reset()  # a window that the last epoch left unfinished was never stepped

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not _records_updates(trainer):
            self._counter.before_step(trainer, batch)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _records_updates(trainer):
            record = trainer.strategy.last_update  # type: ignore[attr-defined]
            if record is not self._last_update:
                self._last_update = record
                self.tokens += record.num_tokens if record.applied else 0
        else:
            self._window.update(self._counter.after_step(trainer, outputs, batch))
            if trainer.global_step != self._updates:
                self._updates = trainer.global_step
                tokens = float(self._window.compute())
                self._window.reset()
                self.tokens += int(tokens) if tokens.is_integer() else tokens
        self._stop_at_budget(trainer)

    def _stop_at_budget(self, trainer: pl.Trainer) -> None:
        if self.tokens >= self.max_tokens and not trainer.should_stop:
            trainer.should_stop = True
            rank_zero_info(
                f"`TokenBudget`: trained on {self.tokens} supervised tokens in {trainer.global_step} updates, of"
                f" max_tokens={self.max_tokens}."
            )


def _records_updates(trainer: pl.Trainer) -> bool:
    return hasattr(trainer.strategy, "last_update")
