"""`TokenWeightMonitor`: logs how unevenly plain DDP weighs the tokens of each update, under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_tokennorm import _compat
from lightning_tokennorm.callbacks.gradient_distance import GradientDistance
from lightning_tokennorm.callbacks.per_update import PerUpdate
from lightning_tokennorm.counting import Count, TokenCounter

SPREAD = "train_token_weight_spread"
DISTANCE = "train_gradient_distance"


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

    The spread needs counts only. Ranks exchange them (one collective) where Lightning logs the update
    (``Trainer(log_every_n_steps=...)``), and at each one where Lightning monitors the value.

    Args:
        count_tokens: Counts the supervised tokens of a batch. Default: the strategy's counter where it has one, else
            `SupervisedTokens()`, which looks at the module.
        gradient_windows: For how many updates at the start to measure what the weights do to the gradient, too: logged
            is ``train_gradient_distance``, the relative L2 distance of plain DDP's gradient from the mean over tokens,
            and `gradient_distances` keeps the values, which are also said when the last one is there. Each micro-batch
            of these updates runs a second backward, and two more gradients are held. DDP and single devices only.

    Raises:
        TypeError: ``count_tokens`` is not callable, or ``gradient_windows`` is not an int.
        ValueError: ``gradient_windows`` is negative.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tokennorm import TokenWeightMonitor
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[TokenWeightMonitor()])  # any strategy
    """

    def __init__(self, *, count_tokens: TokenCounter | None = None, gradient_windows: int = 0) -> None:
        super().__init__(count_tokens)
        if isinstance(gradient_windows, bool) or not isinstance(gradient_windows, int):
            raise TypeError(
                f"`TokenWeightMonitor(gradient_windows=...)` got {gradient_windows!r}; expected a number of updates."
            )
        if gradient_windows < 0:
            raise ValueError(
                f"`TokenWeightMonitor(gradient_windows=...)` got {gradient_windows}; expected a number from 0 upwards."
            )
        self.names = (SPREAD, DISTANCE) if gradient_windows else (SPREAD,)
        self.gradient_windows = gradient_windows
        self.gradient_distances: list[float] = []
        """Of each update that was measured."""
        self._spread = WeightSpread()
        self._distance: GradientDistance | None = None
        self._latest_distance: float | None = None
        self._stop_watching: Callable[[], Any] = _nothing

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._end_measuring()
        if self.gradient_windows:
            GradientDistance.check(trainer, pl_module)
            self.gradient_distances = []
            self._distance = GradientDistance(trainer, pl_module)
            self._stop_watching = _compat.watch_training_steps(trainer, self._distance.note)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_measuring()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_measuring()

    def _end_measuring(self) -> None:
        self._stop_watching()
        self._stop_watching, self._distance = _nothing, None

    @override
    def start(self, device: torch.device) -> None:
        self._spread = WeightSpread().to(device)

    @override
    def add(self, tokens: Count | Tensor) -> None:
        self._spread.update(tokens)
        if self._distance is not None:
            self._distance.add(tokens)

    @override
    def end_update(self) -> None:
        self._latest_distance = None if self._distance is None else self._distance.end_window()
        if self._latest_distance is not None:
            self.gradient_distances.append(self._latest_distance)
        if self._distance is None or (
            self._latest_distance is not None and len(self.gradient_distances) < self.gradient_windows
        ):
            return
        self._end_measuring()
        if self.gradient_distances:
            listed = ", ".join(f"{distance:.3g}" for distance in self.gradient_distances)
            rank_zero_info(
                f"`TokenWeightMonitor`: plain DDP's gradient of the first updates is off by {listed} (relative L2"
                " distance from the mean over tokens)."
            )

    @override
    def values(self) -> Mapping[str, Tensor | None]:
        distance = self._latest_distance
        return {
            SPREAD: self._spread.compute().cpu(),
            DISTANCE: None if distance is None else torch.tensor(distance, dtype=torch.float64),
        }

    @override
    def start_update(self) -> None:
        self._spread.reset()
        if self._distance is not None:
            self._distance.start_window()


def _nothing() -> None:
    """Nothing to undo."""
