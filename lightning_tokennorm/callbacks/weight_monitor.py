"""`TokenWeightMonitor`: logs how unevenly plain DDP weighs the tokens of each update, under any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_tokennorm.callbacks.per_update import PerUpdate
from lightning_tokennorm.counting import Count, TokenCounter


class WeightSpread(Metric):
    """The heaviest over the lightest weight of a token under plain DDP, from the tokens of its micro-batches.

    A token of a micro-batch with ``n`` tokens weighs ``1 / (K W n)``, so the quotient is the greatest ``n`` over the
    least, of micro-batches that have tokens.

    Example:
        >>> spread = WeightSpread()
        >>> for num_tokens in (3, 0, 12):
        ...     spread.update(num_tokens)
        >>> spread.compute()
        tensor(4., dtype=torch.float64)
    """

    is_differentiable = False
    full_state_update = False

    extremes: Tensor
    """The greatest and minus the least number of tokens: shape ``(2,)``, float64."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("extremes", torch.full((2,), -torch.inf, dtype=torch.float64), dist_reduce_fx="max")

    def update(self, num_tokens: Count | Tensor) -> None:
        """Add a micro-batch.

        Args:
            num_tokens: Its tokens, or the sum of their weights: a number, or a tensor of shape ``()``.
        """
        if isinstance(num_tokens, Tensor):
            both = torch.stack([num_tokens, -num_tokens]).to(self.extremes)
            # on the device, without waiting for it
            self.extremes = torch.where(num_tokens > 0, torch.maximum(self.extremes, both), self.extremes)
        elif num_tokens:
            greatest, minus_least = self.extremes.unbind()
            self.extremes = torch.stack([greatest.clamp(min=num_tokens), minus_least.clamp(min=-num_tokens)])

    def compute(self) -> Tensor:
        """The spread: shape ``()``, float64, 1 where all tokens weigh the same; NaN over no token."""
        return self.extremes[0] / -self.extremes[1]


class TokenWeightMonitor(PerUpdate):
    """A callback that logs, under any strategy, how unevenly plain DDP weighs the tokens of each optimizer update.

    Logged is ``train_token_weight_spread``: the weight of the heaviest supervised token over that of the lightest one,
    over the update's micro-batches on all ranks. A token of a micro-batch with ``n`` tokens weighs ``1 / (K W n)``
    there, so the spread is the greatest ``n`` over the least one that is not 0: 1 where plain DDP is right, whatever
    ``K`` and ``W`` are; NaN for an update without tokens. Under a strategy of this package all tokens weigh the same,
    and the value says what that spares the run.

    It looks at counts only. Ranks exchange them (one collective) where Lightning logs the update
    (``Trainer(log_every_n_steps=...)``), and at each one where Lightning monitors the value.

    Args:
        count_tokens: Counts the supervised tokens of a batch. Default: the strategy's counter where it has one, else
            `SupervisedTokens()`, which looks at the module.

    Raises:
        TypeError: ``count_tokens`` is not callable.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tokennorm import TokenWeightMonitor
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[TokenWeightMonitor()])  # any strategy
    """

    names = ("train_token_weight_spread",)

    def __init__(self, *, count_tokens: TokenCounter | None = None) -> None:
        super().__init__(count_tokens)
        self._spread = WeightSpread()

    @override
    def start(self, device: torch.device) -> None:
        self._spread = WeightSpread().to(device)

    @override
    def add(self, tokens: Count | Tensor) -> None:
        self._spread.update(tokens)

    @override
    def values(self) -> Mapping[str, Any]:
        return {self.names[0]: self._spread.compute().cpu()}

    @override
    def start_update(self) -> None:
        self._spread.reset()
