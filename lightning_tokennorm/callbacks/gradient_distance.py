"""How far plain DDP's gradient of an update is from the one in which every token weighs the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_tokennorm.counting import Count


class GradientDistance:
    """Takes the gradient of each micro-batch's own loss, beside the training, and compares two ways to add them up.

    With ``G`` the gradient of a micro-batch's mean loss over its ``n`` tokens, and sums over a window and all ranks,
    plain DDP's is ``sum G / (K W)`` and the mean over tokens ``sum n G / N``. Micro-batches without tokens add nothing.

    Args:
        trainer: The Trainer.
        module: The module.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._gradients: Sequence[Tensor] | None = None  # of the micro-batch in hand
        self._failure: str | None = None
        self._accumulate = 1
        self.start_window()

    @staticmethod
    def check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Refuse what has no whole gradients to take.

        Raises:
            MisconfigurationException: The strategy shards the parameters, or the optimization is not Lightning's.
        """
        if not isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy)) or not module.automatic_optimization:
            raise MisconfigurationException(
                f"`TokenWeightMonitor(gradient_windows=...)` got {type(trainer.strategy).__name__} and"
                f" automatic_optimization={module.automatic_optimization}; expected DDP or a single device, with"
                " automatic optimization. Leave `gradient_windows` at 0: the spread needs counts only."
            )

    def start_window(self) -> None:
        """Start adding up from nothing."""
        self._of_means = [torch.zeros_like(each, dtype=_wide(each)) for each in self._parameters]
        self._of_tokens = [torch.zeros_like(each, dtype=_wide(each)) for each in self._parameters]
        self._num_tokens = torch.zeros((), dtype=torch.float64, device=_device(self._parameters))

    def note(self, output: Any, divided_by: int) -> None:
        """Take the gradient of what a training step has returned, before its backward and any factor on it."""
        self._gradients, self._accumulate = None, divided_by
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or not loss.requires_grad or self._failure:
            return
        if getattr(self._trainer.strategy.model, "static_graph", False):
            self._failure = "DDP with a static graph takes part in each backward"
            return
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()  # fp16 would lose small gradients
        try:
            # Gradients for these inputs are handed out and not accumulated, so DDP's hooks do not see them.
            taken = torch.autograd.grad(loss * scale, self._parameters, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            self._failure = str(error).splitlines()[0]
            return
        self._gradients = [
            torch.zeros_like(parameter) if gradient is None else gradient / scale
            for parameter, gradient in zip(self._parameters, taken, strict=True)
        ]

    def add(self, tokens: Count | Tensor) -> None:
        """Add the micro-batch whose step was noted last.

        Args:
            tokens: Its supervised tokens; 0 where it is to weigh nothing.
        """
        gradients, self._gradients = self._gradients, None
        if gradients is None or not tokens:
            return
        returns_sum = getattr(self._trainer.strategy, "loss_reduction", "mean") == "sum"
        self._num_tokens += tokens
        for of_means, of_tokens, gradient in zip(self._of_means, self._of_tokens, gradients, strict=True):
            of_means += gradient / tokens if returns_sum else gradient
            of_tokens += gradient if returns_sum else gradient * tokens

    def end_window(self) -> float | None:
        """The relative L2 distance; called by all ranks, and at the end of each window.

        Returns:
            The same on all ranks: NaN without tokens, ``None`` where gradients cannot be taken.
        """
        strategy: Any = self._trainer.strategy
        failed = torch.tensor(float(self._failure is not None), device=self._num_tokens.device)
        if strategy.reduce(failed, reduce_op="sum") > 0:
            rank_zero_warn(
                "`TokenWeightMonitor(gradient_windows=...)` gives up, since gradients cannot be taken beside the"
                f" training: {self._failure or 'on another rank'}. The spread is logged all the same."
            )
            return None
        num_tokens = strategy.reduce(self._num_tokens, reduce_op="sum")
        off = right = 0.0
        for each in zip(self._of_means, self._of_tokens, strict=True):
            of_means, of_tokens = (strategy.reduce(gradient, reduce_op="sum") for gradient in each)
            mean = of_tokens / num_tokens
            off += (of_means / (self._accumulate * strategy.world_size) - mean).double().square().sum().item()
            right += mean.double().square().sum().item()
        return (off / right) ** 0.5 if right else float("nan")


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _device(parameters: Sequence[Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")
