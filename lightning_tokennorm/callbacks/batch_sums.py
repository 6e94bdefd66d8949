"""From what a step is given and returns to its sums: the losses and the number of the batch's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tokennorm.counting import Count, TokenCounter
from lightning_tokennorm.heads import ONE_LOSS, by_head
from lightning_tokennorm.window import LossReduction


class BatchSums:
    """Counts a batch before its step, which may change it (``batch.pop("labels")``), and adds up its losses after it.

    Args:
        count_tokens: Counts the supervised tokens of a batch.
        loss_reduction: What steps return.
    """

    def __init__(self, count_tokens: TokenCounter, loss_reduction: LossReduction) -> None:
        self._count_tokens = count_tokens
        self._loss_reduction = loss_reduction
        self._batch: Any = None
        self._counted: Mapping[str, Count | Tensor] | Exception = {}
        self._counts = True

    def before_step(self, batch: Any, known: Count | Mapping[str, Count] | None = None, *, counts: bool = True) -> None:
        """Count a batch. An error waits for the step's loss: a step that returns none need not have labels.

        Args:
            batch: The batch.
            known: Its number of tokens, where somebody has counted it already.
            counts: Whether it counts at all: a copy of another rank's has no tokens.
        """
        self._batch, self._counts = batch, counts
        try:
            counted = by_head(self._count_tokens(batch) if known is None else known)
            # which may be tensors of the batch's own
            self._counted = {
                name: count.clone() if isinstance(count, Tensor) else count for name, count in counted.items()
            }
        except Exception as error:
            self._counted = error

    def after_step(
        self, outputs: Any, batch: Any, device: torch.device
    ) -> dict[str, tuple[Tensor, Count | Tensor]] | None:
        """The sum of the losses of a batch's tokens, and their number, of each head.

        Args:
            outputs: What the step returned: the loss, of one element, or a mapping with the key ``"loss"``, or with
                ``"losses"`` where several are counted.
            batch: The batch, as it is now.
            device: Where the sum is to live.

        Returns:
            Both of shape ``()``, by the head's name (`ONE_LOSS` for a single one); ``None`` where there is no loss.
        """
        # A step that fetches its batches itself (`dataloader_iter`) has another one by now.
        ahead, self._batch = self._batch is batch, None
        losses = outputs.get("losses") if isinstance(outputs, Mapping) else None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(losses, Mapping) and not _is_loss(loss):
            return None
        counted = self._count(batch) if ahead else by_head(self._count_tokens(batch))
        if ONE_LOSS in counted:
            losses = {ONE_LOSS: loss}
        if not isinstance(losses, Mapping) or not any(_is_loss(each) for each in losses.values()):
            return None
        return {
            name: self._sums(losses[name], num_tokens if self._counts else 0, device)
            for name, num_tokens in counted.items()
            if _is_loss(losses.get(name))
        }

    def _sums(self, loss: Tensor, num_tokens: Count | Tensor, device: torch.device) -> tuple[Tensor, Count | Tensor]:
        loss = loss.detach()
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss  # a DTensor, of `loss_parallel`
        loss_sum = loss.to(device).double().reshape(())
        if self._loss_reduction == "mean":
            loss_sum = loss_sum * num_tokens
        # The mean over no token is NaN, and NaN * 0 is NaN: the sum over none is replaced by 0, not multiplied.
        if isinstance(num_tokens, Tensor):
            loss_sum = torch.where(num_tokens > 0, loss_sum, 0.0)  # on the device, without waiting for it
        elif num_tokens == 0:
            loss_sum = torch.zeros_like(loss_sum)
        return loss_sum, num_tokens

    def _count(self, batch: Any) -> Mapping[str, Count | Tensor]:
        if not isinstance(self._counted, Exception):
            return self._counted
        try:
            return by_head(self._count_tokens(batch))  # maybe the step has put the labels there
        except Exception:
            raise self._counted from None


def _is_loss(loss: Any) -> bool:
    return isinstance(loss, Tensor) and loss.numel() == 1
