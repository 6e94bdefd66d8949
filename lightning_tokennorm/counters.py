"""Ready counters of other things than tokens: what the mean is taken over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_tokennorm.counting import SupervisedTokens, find_in, rows_of


@dataclass(frozen=True)
class SupervisedSamples(SupervisedTokens):
    """Counts the samples of a batch that have a label which enters the loss.

    For a module whose loss is the mean over samples of each sample's own mean: every sample of an update then has the
    same weight, whatever its length. A sample is a row: an entry of the first dimension of ``labels``.

    Args:
        labels: As in `SupervisedTokens`.
        ignore_index: See there.
        shift: See there.

    Example:
        >>> batch = {"labels": torch.tensor([[7, 8, 9, -100], [7, -100, -100, -100]])}
        >>> SupervisedSamples()(batch)  # the second row has a label at position 0 only, which is never predicted
        1
    """

    counts: ClassVar[str] = "samples with"

    def __call__(self, batch: Any) -> int | Tensor:
        """Count the samples of one micro-batch, as `SupervisedTokens` counts tokens."""
        labels = self.labels_of(batch)
        if labels.is_nested:  # its rows come one by one
            live = torch.stack([self.live(row).any() for row in rows_of(labels)])
        else:
            live = self.live(labels)
            live = live.flatten(1).any(1) if live.dim() > 1 else live
        num_samples = torch.count_nonzero(live)
        return int(num_samples) if num_samples.device.type == "cpu" else num_samples


@dataclass(frozen=True)
class WeightedTokens(SupervisedTokens):
    """Adds up the weights of the tokens that enter the loss.

    For a module whose loss is ``sum(w * l) / sum(w)`` over its batch's tokens; the update is the same over the window
    and all ranks. Weights are looked at where a label is live only. The sum is taken in float64, and that over ranks is
    rounded once, whatever their order.

    Args:
        labels: As in `SupervisedTokens`.
        ignore_index: See there.
        shift: See there; weights are shifted alike.
        weights: Where the weights are, found as labels are: a tensor of the labels' shape, of numbers from 0 on.

    Raises:
        TypeError: ``weights`` is neither ``str`` nor ``int``.

    Example:
        >>> batch = {
        ...     "labels": torch.tensor([[7, 8, 9, -100]]),
        ...     "loss_weights": torch.tensor([[9.0, 0.5, 2.0, 9.0]]),
        ... }
        >>> WeightedTokens()(batch)
        2.5
    """

    weights: str | int = "loss_weights"
    counts: ClassVar[str] = "weights of"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.weights, bool) or not isinstance(self.weights, (str, int)):
            raise TypeError(
                f"`WeightedTokens(weights=...)` got {self.weights!r}; expected a key or attribute name (str) or an"
                " index into the batch (int)."
            )

    def __call__(self, batch: Any) -> float | Tensor:  # type: ignore[override]
        """Add up the weights of one micro-batch.

        Args:
            batch: The micro-batch.

        Returns:
            A ``float`` for weights on the CPU; for those on another device a 0-dim float64 tensor on it, which is NaN
            where a weight is negative, so that it is refused without waiting for the device here.

        Raises:
            TypeError: Labels or weights are not tensors of numbers.
            ValueError: There are none, they differ in shape, or a weight is negative.
        """
        labels, weights = self.labels_of(batch), find_in(batch, self.weights, "WeightedTokens", "weights")
        if not isinstance(weights, Tensor) or weights.dtype is torch.bool or weights.is_complex():
            got = f"a tensor of {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
            raise TypeError(
                f"`WeightedTokens` found {got} at `weights={self.weights!r}`; expected a tensor of numbers."
            )
        rows, of_weights = rows_of(labels), rows_of(weights)
        if labels.is_nested != weights.is_nested or len(rows) != len(of_weights):
            raise ValueError(
                "`WeightedTokens` found labels and weights of different shapes: one of them is a nested tensor, or they"
                " have different numbers of rows."
            )
        num_tokens = torch.stack([self._sum_live(*each) for each in zip(rows, of_weights, strict=True)]).sum()
        return float(num_tokens) if num_tokens.device.type == "cpu" else num_tokens

    def _sum_live(self, labels: Tensor, weights: Tensor) -> Tensor:
        if labels.shape != weights.shape:
            raise ValueError(
                f"`WeightedTokens` found labels of shape {list(labels.shape)} and weights of shape"
                f" {list(weights.shape)} at `weights={self.weights!r}`; expected the same shape."
            )
        live = self.live(labels)
        weights = torch.where(live, weights[..., weights.shape[-1] - live.shape[-1] :].double(), 0.0)
        is_negative = (weights < 0).any()
        if weights.device.type == "cpu" and is_negative:
            raise ValueError(
                f"`WeightedTokens` found a weight of {weights.min().item()} at `weights={self.weights!r}`; expected"
                " weights from 0 on: a negative one would push its token's loss up."
            )
        return torch.where(is_negative, torch.nan, weights.sum())


@dataclass(frozen=True)
class BatchCount:
    """Takes a count that the batch brings along, made by the collate function: no labels are looked at.

    Args:
        key: Where it is: a key of a mapping, an attribute of an object, or the index into a tuple or list. An int, a
            float (a sum of weights) or a 0-dim tensor.

    Raises:
        TypeError: ``key`` is neither ``str`` nor ``int``.

    Example:
        >>> BatchCount("num_tokens")({"input_ids": torch.zeros(2, 8), "num_tokens": 11})
        11
    """

    key: str | int = "num_tokens"

    def __post_init__(self) -> None:
        if isinstance(self.key, bool) or not isinstance(self.key, (str, int)):
            raise TypeError(
                f"`BatchCount(key=...)` got {self.key!r}; expected a key or attribute name (str) or an index into the"
                " batch (int)."
            )

    def __call__(self, batch: Any) -> Any:
        """The count of one micro-batch, as it is there.

        Raises:
            ValueError: There is none, or one for each sample.
        """
        count = find_in(batch, self.key, "BatchCount", "key")
        if isinstance(count, Tensor) and count.dim():
            raise ValueError(
                f"`BatchCount` found a tensor of shape {list(count.shape)} at `key={self.key!r}`; expected one count"
                " for the batch. Add the counts of samples up in the collate function."
            )
        return count

    def describe(self) -> str:
        """What is counted, in a few words."""
        return f"the batch's own {self.key!r}"


@dataclass(frozen=True)
class PerMicroBatch:
    """Counts 1 for each micro-batch: the plain average over micro-batches and ranks.

    For terms without tokens, such as the balance of experts, a z-loss or a regulariser: as a head beside the loss of
    tokens (`Heads`), their weight depends on neither ``K``, ``W`` nor ``N``.

    Example:
        >>> PerMicroBatch()({"input_ids": torch.zeros(2, 8)})
        1
    """

    def __call__(self, batch: Any) -> int:
        """1, whatever the batch is."""
        return 1

    def describe(self) -> str:
        """What is counted, in a few words."""
        return "1 for each micro-batch"
