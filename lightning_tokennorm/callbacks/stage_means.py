"""The means of one stage: one for a single loss, one for each head and their weighted sum where there are several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tokennorm.counting import Count
from lightning_tokennorm.heads import ONE_LOSS
from lightning_tokennorm.metric import TokenMean, TokenPerplexity, token_mean

Sums = Mapping[str, tuple[Tensor, Count | Tensor]]
"""Sum of losses and number of tokens of each head; of `ONE_LOSS` where there is a single one."""


class WeightedMeans(Metric):
    """The weighted sum of the heads' means per token; heads without a token add nothing, and without any it is NaN.

    Args:
        weights: The weight of each head.

    Example:
        >>> total = WeightedMeans({"lm": 1.0, "mtp": 0.5})
        >>> total.update({"lm": (12.0, 6), "mtp": (12.0, 4)})
        >>> total.compute()
        tensor(3.5000, dtype=torch.float64)
    """

    loss_sums: Tensor
    counts: Tensor

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self.weights = dict(weights)
        self.add_state("loss_sums", torch.zeros(len(weights), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(len(weights), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, sums: Sums) -> None:
        """Add the losses of some tokens of each head."""
        nothing = (0.0, 0)
        losses, counts = zip(*(sums.get(name, nothing) for name in self.weights), strict=True)
        self.loss_sums = self.loss_sums + self._vector(losses)
        self.counts = self.counts + self._vector(counts)

    def take_over(self, other: WeightedMeans) -> None:
        """Go on from the sums of another one, which knows of some of the heads."""
        for name, loss_sum, count in zip(other.weights, other.loss_sums, other.counts, strict=True):
            self.update({name: (loss_sum, count)})

    def _vector(self, values: Iterable[Tensor | Count]) -> Tensor:
        return torch.stack(
            [torch.as_tensor(each, dtype=torch.float64, device=self.loss_sums.device) for each in values]
        )

    def compute(self) -> Tensor:
        """``sum over h of w[h] * S[h] / N[h]``: shape ``()``, float64."""
        weights = torch.tensor(list(self.weights.values()), dtype=torch.float64, device=self.counts.device)
        means = torch.where(self.counts > 0, self.loss_sums / self.counts, 0.0)
        return torch.where(self.counts.sum() > 0, (weights * means).sum(), torch.nan)


class StageMeans:
    """What `TokenMeanMetric` logs of one stage, or of one of its loaders.

    Args:
        stage: ``"train"``, ``"val"`` or ``"test"``.
        name: What the key of the loss says after the stage.
        perplexity: Whether there are perplexities, too.
        weights: The weights of heads; 1 where none is given.
        device: Where sums live.
    """

    def __init__(
        self, stage: str, name: str, perplexity: bool, weights: Mapping[str, float], device: torch.device
    ) -> None:
        self._stage, self._name, self._perplexity, self._weights, self._device = (
            stage,
            name,
            perplexity,
            weights,
            device,
        )
        self.heads: tuple[str, ...] = ()
        """The names of the heads, as soon as they are known."""
        self.logged: dict[str, Metric] = {}
        """The metrics by their keys."""

    @property
    def main_keys(self) -> tuple[str, ...]:
        """The keys of what is shown in bars."""
        perplexity = (f"{self._stage}_perplexity",) if self._perplexity else ()
        return (f"{self._stage}_{self._name}", *perplexity)

    def keys_of(self, head: str) -> tuple[str, str]:
        """The keys of a head's mean and perplexity."""
        if head == ONE_LOSS:
            return f"{self._stage}_{self._name}", f"{self._stage}_perplexity"
        return f"{self._stage}_{head}_per_token", f"{self._stage}_{head}_perplexity"

    def take_heads(self, heads: Iterable[str]) -> bool:
        """Know of these heads from now on, all ranks of the same; says whether one is new."""
        names = tuple(sorted({*self.heads, *heads}))
        if names == self.heads:
            return False
        self.heads = names
        before, self.logged = self.logged, {}
        # In one order on all ranks, whichever they met first: it is the order in which they exchange.
        if ONE_LOSS not in names:
            total = WeightedMeans({name: self._weights.get(name, 1.0) for name in names}).to(self._device)
            if isinstance(former := before.get(self.main_keys[0]), WeightedMeans):
                total.take_over(former)
            self.logged[self.main_keys[0]] = total
        for head in names:
            for key, kind in zip(
                self.keys_of(head), (TokenMean, TokenPerplexity)[: 1 + self._perplexity], strict=False
            ):
                self.logged[key] = before[key] if key in before else kind().to(self._device)
        return True

    def update(self, sums: Sums) -> None:
        """Add the sums of a batch."""
        for head, (loss_sum, num_tokens) in sums.items():
            for key in self.keys_of(head):
                if key in self.logged:
                    self.logged[key].update(loss_sum, num_tokens)
        total = self.logged.get(self.main_keys[0])
        if isinstance(total, WeightedMeans):
            total.update(sums)

    def values_of(self, sums: Sums) -> dict[str, Tensor]:
        """The values that follow from sums alone, by their keys."""
        values: dict[str, Tensor] = {}
        for head, (loss_sum, num_tokens) in sums.items():
            mean = token_mean(loss_sum, torch.as_tensor(num_tokens))
            values |= dict(zip(self.keys_of(head), (mean, mean.exp()), strict=True))
        if isinstance(total := self.logged.get(self.main_keys[0]), WeightedMeans):
            of_sums = WeightedMeans(total.weights)
            of_sums.update(sums)
            values[self.main_keys[0]] = of_sums.compute()
        return {key: value for key, value in values.items() if key in self.logged}
