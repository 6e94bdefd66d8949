"""Plain SGD in the place of a module's own optimizer, whose set-up runs all the same."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer


def give_optimizer(configured: Any, module: pl.LightningModule) -> Any:
    """What `configure_optimizers` returned; where it chose no optimizer, one over all trainable parameters."""
    if configured is not None:
        return configured
    return torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad])


def step_plainly(trainer: pl.Trainer, learning_rate: float) -> None:
    """Let all optimizers of a fit step as plain SGD with a fixed learning rate.

    An adaptive optimizer hides a wrong scale. The objects stay the module's own, with their parameter groups, their
    hooks and the schedules that hang on them, so that all code which uses these runs as it does in training.

    Args:
        trainer: The trainer, after its strategy has set the optimizers up.
        learning_rate: Of SGD. Whatever a schedule writes into the parameter groups is not looked at.
    """
    for optimizer in trainer.optimizers:
        _replace_step(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer, learning_rate)
    for config in trainer.lr_scheduler_configs:
        config.strict = False  # there is no validation, whose metrics `ReduceLROnPlateau` may wait for


def _replace_step(optimizer: Any, learning_rate: float) -> None:
    def step(self: Any, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter in held if learning_rate else ():  # 0 * NaN would be NaN
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-learning_rate)
        return result

    # wrappers of optimizers often never run `Optimizer.__init__`, which makes the places for hooks
    has_hooks = isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks")
    optimizer.step = MethodType(Optimizer.profile_hook_step(step) if has_hooks else step, optimizer)
