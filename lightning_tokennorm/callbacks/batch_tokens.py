"""The supervised tokens of the micro-batch in hand, under any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_tokennorm.counting import Count, SupervisedTokens, TokenCounter, check_count, counter_for


class BatchTokens:
    """Counts each batch of this rank before its step, which may change it (``batch.pop("labels")``).

    What the strategy has counted already is not counted again, and neither are micro-batches that are padded, or
    batches that another rank of the same model replica counts.

    Args:
        count_tokens: Counts the supervised tokens of a batch. Default: the strategy's counter where it has one, else
            `SupervisedTokens()`, which looks at the module.
        asked_by: Whose argument it is, for the text of an error.

    Raises:
        TypeError: ``count_tokens`` is not callable.
    """

    def __init__(self, count_tokens: TokenCounter | None, asked_by: str) -> None:
        if count_tokens is not None and not callable(count_tokens):
            raise TypeError(
                f"`{asked_by}(count_tokens=...)` got {count_tokens!r}; expected a callable that takes a batch and"
                " returns its number of supervised tokens."
            )
        self._given = count_tokens
        self._counter: TokenCounter = SupervisedTokens()
        self._batch: Any = None
        self._counted: Count | Tensor | Exception = 0

    def start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the counter, when the module is complete and the strategy has looked at it."""
        counter = self._given or getattr(trainer.strategy, "count_tokens", None) or SupervisedTokens()
        self._counter = counter_for(counter, pl_module)

    def before_step(self, trainer: pl.Trainer, batch: Any) -> None:
        """Count a batch. An error waits until it is known that its step has trained on it."""
        self._batch = batch
        try:
            count = self._count(trainer, batch)
            self._counted = count.clone() if isinstance(count, Tensor) else count  # maybe a tensor of the batch's own
        except Exception as error:
            self._counted = error

    def after_step(self, trainer: pl.Trainer, outputs: Any, batch: Any) -> Count | Tensor:
        """The tokens that a step has trained on.

        Args:
            trainer: The Trainer.
            outputs: What the step has made of it: nothing where it has left the batch out.
            batch: The batch, as it is now.
        """
        # A step that fetches its batches itself (`dataloader_iter`) has another one by now.
        ahead, self._batch = self._batch is batch, None
        left_out = outputs is None or (isinstance(outputs, Mapping) and not outputs)
        if batch is None or (left_out and trainer.lightning_module.automatic_optimization):
            return 0
        if ahead and not isinstance(self._counted, Exception):
            return self._counted
        try:
            return self._count(trainer, batch)  # maybe the step has put the labels there
        except Exception:
            if ahead and isinstance(self._counted, Exception):
                raise self._counted from None
            raise

    def _count(self, trainer: pl.Trainer, batch: Any) -> Count | Tensor:
        # Duck-typed on purpose: any strategy may say so.
        if adds_nothing(trainer):
            return 0
        known: Count | None = None if self._given else getattr(trainer.strategy, "micro_batch_tokens", None)
        return check_count(self._counter(batch)) if known is None else known


def adds_nothing(trainer: pl.Trainer) -> bool:
    """Whether this rank's micro-batch in hand is none of the data's: padded, or another rank's as well."""
    return bool(
        getattr(trainer.strategy, "micro_batch_is_padded", False) or getattr(trainer.strategy, "is_copy", False)
    )
