"""From what a step is given and returns to its sums: the losses and the number of the batch's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tokennorm.counting import Count, TokenCounter, check_count
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
        self._counted: Count | Tensor | Exception = 0

    def before_step(self, batch: Any, known: Count | None = None) -> None:
        """Count a batch. An error waits for the step's loss: a step that returns none need not have labels.

        Args:
            batch: The batch.
            known: Its number of tokens, where somebody has counted it already.
        """
        self._batch = batch
        if known is not None:
            self._counted = known
            return
        try:
            count = check_count(self._count_tokens(batch))
            # which may be a tensor of the batch's own
            self._counted = count.clone() if isinstance(count, Tensor) else count
        except Exception as error:
            self._counted = error

    def after_step(self, outputs: Any, batch: Any, device: torch.device) -> tuple[Tensor, Count | Tensor] | None:
        """The sum of the losses of a batch's tokens, and their number.

        Args:
            outputs: What the step returned: the loss, of one element, or a mapping with the key ``"loss"``.
            batch: The batch, as it is now.
            device: Where the sum is to live.

        Returns:
            Both of shape ``()``, or ``None`` where there is no loss.
        """
        # A step that fetches its batches itself (`dataloader_iter`) has another one by now.
        ahead, self._batch = self._batch is batch, None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return None
        num_tokens = self._count(batch) if ahead else check_count(self._count_tokens(batch))
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

    def _count(self, batch: Any) -> Count | Tensor:
        if not isinstance(self._counted, Exception):
            return self._counted
        try:
            return check_count(self._count_tokens(batch))  # maybe the step has put the labels there
        except Exception:
            raise self._counted from None
