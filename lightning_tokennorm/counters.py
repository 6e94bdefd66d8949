"""Ready counters of other things than tokens: what the mean is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_tokennorm.counting import (
    Count,
    SupervisedTokens,
    check_count,
    check_place,
    describe_value,
    find_in,
    rows_of,
)


@dataclass(frozen=True)
class SupervisedSamples(SupervisedTokens):
    """Counts the samples of a batch that have a label which enters the loss.

    For a module whose loss is the mean over samples of each sample's own mean: every sample of an update then has the
    same weight, whatever its length. A sample is a row, an entry of the first dimension of ``labels``, also where
    several documents are packed into it. One without a live label is in neither mean.

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
    and all ranks. Only weights of live labels are looked at, each of them from 0 on: a negative one is refused,
    whatever they add up to. Sums are taken in float64; that over ranks is rounded once: their order leaves no mark.

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
        check_place(self.weights, "WeightedTokens", "weights")

    def __call__(self, batch: Any) -> float | Tensor:  # type: ignore[override]
        """Add up the weights of one micro-batch.

        Args:
            batch: The micro-batch.

        Returns:
            A ``float`` for weights on the CPU; for those on another device a 0-dim float64 tensor on it, which is NaN
            where a weight is negative: so it is refused when it comes to the host, and counting never waits for it.

        Raises:
            TypeError: Labels are not a tensor of integers, or weights not one of numbers.
            ValueError: There are none, they differ in shape or device, or a weight is negative, infinite or NaN.
        """
        labels = self.labels_of(batch)
        weights = self._of_live(labels, self._weights_of(batch))
        num_tokens = self.add_up(weights)
        if num_tokens.device.type != "cpu":
            return num_tokens
        if not num_tokens.isfinite():
            raise ValueError(
                f"`WeightedTokens` found weights from {weights.min().item()} to {weights.max().item()} at"
                f" {self._place()}; expected weights from 0 on with a finite sum. A negative one would push its token's"
                " loss up."
            )
        return float(num_tokens)

    @staticmethod
    def add_up(weights: Tensor) -> Tensor:
        """The sum of weights; NaN where one is negative, for which the others might make up."""
        return torch.where((weights < 0).any(), torch.nan, weights.sum())

    def _weights_of(self, batch: Any) -> Tensor:
        weights = find_in(batch, self.weights, "WeightedTokens", "weights")
        if not isinstance(weights, Tensor) or weights.dtype is torch.bool or weights.is_complex():
            raise TypeError(
                f"`WeightedTokens` found {describe_value(weights)} at {self._place()}; expected a tensor of numbers,"
                " one for each label."
            )
        return weights.detach()

    def _of_live(self, labels: Tensor, weights: Tensor) -> Tensor:
        """The weights of all labels that are predicted: one-dimensional, float64, 0 where a label is not live."""
        rows, of_rows = rows_of(labels), rows_of(weights)
        shapes = [[row.shape for row in each] for each in (rows, of_rows)]
        if labels.is_nested != weights.is_nested or shapes[0] != shapes[1] or labels.device != weights.device:
            raise ValueError(
                f"`WeightedTokens` found labels, {_describe_parts(labels)}, and at {self._place()} weights,"
                f" {_describe_parts(weights)}; expected the same shape, on the same device."
            )
        return torch.cat([self._of_live_row(*each).flatten() for each in zip(rows, of_rows, strict=True)])

    def _of_live_row(self, labels: Tensor, weights: Tensor) -> Tensor:
        live = self.live(labels)
        return torch.where(live, weights[..., weights.shape[-1] - live.shape[-1] :].double(), 0.0)

    def _place(self) -> str:
        return f"`weights={self.weights!r}`"


def _describe_parts(values: Tensor) -> str:
    rows = f" with rows of shapes {[list(row.shape) for row in rows_of(values)]}" if values.is_nested else ""
    return f"{describe_value(values)}{rows} on {values.device}"


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
        check_place(self.key, "BatchCount", "key")

    def __call__(self, batch: Any) -> Count | Tensor:
        """The count of one micro-batch.

        Returns:
            The number as it is there, an ``int`` or a ``float`` for one on the CPU.

        Raises:
            TypeError: It is not a number.
            ValueError: There is none, or several: one for each sample or head.
        """
        count = find_in(batch, self.key, "BatchCount", "key", "count")
        found = f"`BatchCount(key={self.key!r})` found"
        if isinstance(count, Mapping) or getattr(count, "ndim", None):
            raise ValueError(
                f"{found} {describe_value(count)}; expected one count for the batch. Add those of its samples up in the"
                " collate function; those of several heads have a key each: `Heads(lm=BatchCount('lm_tokens'))`."
            )
        return check_count(count, found)

    def describe(self) -> str:
        """What is counted, in a few words."""
        return f"the batch's own {self.key!r}"


@dataclass(frozen=True)
class PerMicroBatch:
    """Counts 1 for each micro-batch: the plain average over micro-batches and ranks.

    For terms without tokens, such as the balance of experts, a z-loss or a regulariser: as a head beside the loss of
    tokens (`Heads`), their weight depends on neither ``K``, ``W`` nor ``N``.

    A micro-batch without labels counts as well, so its loss has to be a number: a mean over no token, which is NaN, is
    left out by counters of tokens, and here it is not. Padded micro-batches, of ranks whose data has ended, count 0.

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
