"""`TokenMean`: the mean over tokens, kept as a sum and a count until somebody asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tokennorm.counting import Count


def token_mean(loss_sum: Tensor, num_tokens: Tensor) -> Tensor:
    """``sum S / sum N``.

    Args:
        loss_sum: Sum of the losses of some tokens, shape ``()``, floating point.
        num_tokens: How many they are or the sum of their weights, shape ``()``.

    Returns:
        The mean, shape ``()``; NaN over no token, where a sum has nothing to be divided by.

    Example:
        >>> token_mean(torch.tensor(42.0), torch.tensor(24))
        tensor(1.7500)
    """
    return torch.where(num_tokens > 0, loss_sum / num_tokens, torch.nan)


class TokenMean(Metric):
    """The mean loss per token over everything it was updated with, on all ranks: ``sum S / sum N``.

    The state is a float64 sum of losses, an int64 count of tokens and, where counts are sums of token weights, a
    float64 count; each is summed over ranks. One division at the end, so batches, ranks and their sizes leave no mark.

    A loss that is NaN or infinite stays visible: it is never dropped. Over no token at all the mean is NaN.

    Args:
        **kwargs: Passed on to `torchmetrics.Metric`.

    Example:
        >>> mean = TokenMean()
        >>> mean.update(16.0, 8)
        >>> mean.update(26.0, 16)
        >>> mean.compute()  # 42 / 24, not the mean of 2 and 1.625
        tensor(1.7500, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    loss_sum: Tensor
    """Sum of the losses of all tokens: shape ``()``, float64."""
    num_tokens: Tensor
    """Number of tokens from integer counts: shape ``()``, int64."""
    token_weight: Tensor
    """Sum of token weights from float counts: shape ``()``, float64."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Two counts rather than one that changes its type: ranks have to agree on the types when they sum.
        self.add_state("loss_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("token_weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @property
    def count(self) -> Tensor:
        """The denominator: shape ``()``, int64, or float64 once there are token weights."""
        return self.num_tokens if self.token_weight == 0 else self.num_tokens + self.token_weight

    def update(self, loss_sum: Tensor | float, num_tokens: Tensor | Count) -> None:
        """Add the losses of some tokens.

        Args:
            loss_sum: Sum of the losses of the tokens: a number or a tensor of one element.
            num_tokens: How many tokens they are (an int or an integer tensor of one element), or the sum of their
                weights (a float or a floating-point tensor of one element).

        Raises:
            ValueError: A tensor has more or less than one element.
        """
        self.loss_sum = _plus(self.loss_sum, loss_sum)
        if num_tokens.is_floating_point() if isinstance(num_tokens, Tensor) else isinstance(num_tokens, float):
            self.token_weight = _plus(self.token_weight, num_tokens)
        else:
            self.num_tokens = _plus(self.num_tokens, num_tokens)

    def compute(self) -> Tensor:
        """The mean per token: shape ``()``, float64; NaN over no token."""
        return token_mean(self.loss_sum, self.num_tokens + self.token_weight)


class TokenPerplexity(TokenMean):
    """``exp`` of the mean loss per token (in nats): the perplexity. States and arguments as in `TokenMean`.

    Example:
        >>> perplexity = TokenPerplexity()
        >>> perplexity.update(0.0, 4)
        >>> perplexity.compute()
        tensor(1., dtype=torch.float64)
    """

    def compute(self) -> Tensor:
        """``exp(sum S / sum N)``: shape ``()``, float64."""
        return super().compute().exp()


def _plus(state: Tensor, value: Tensor | Count) -> Tensor:
    if not isinstance(value, Tensor):
        # A Python number goes along with the kernel: as a tensor it would be rounded to float32, and copied.
        return state + value
    value = value.detach().to(state)
    if not value.dim():
        return state + value
    if value.numel() != 1:
        raise ValueError(
            f"`TokenMean.update` got a tensor of shape {list(value.shape)}; expected one element: the sum over the"
            " tokens, and their number."
        )
    # The state stays of shape (): ranks whose shapes differ cannot sum them.
    return state + value.reshape(())
