"""Fits a user's module on given batches and keeps the gradient and the parameters of every update."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

LEARNING_RATE = 1e-2
"""Of the plain SGD that takes the place of the module's optimizer: an adaptive one hides a wrong scale."""

Named = dict[str, Tensor]
"""Tensors by the name of their parameter, on the CPU."""


@dataclass
class Seen:
    """What a fit leaves on one rank; tensors on rank zero only."""

    gradients: list[Named] = field(default_factory=list)
    """The gradient of each update, as the optimizer is about to use it."""
    parameters: list[Named] = field(default_factory=list)
    """The trainable parameters after each update."""
    digests: list[str] = field(default_factory=list)
    """A digest of the bits of the parameters after each update."""
    losses: list[float] = field(default_factory=list)
    """The loss that `training_step` returned for each micro-batch, divided by ``K``."""
    num_tokens: list[Any] = field(default_factory=list)
    """``num_tokens`` of each micro-batch where `training_step` returns it, else ``None``."""


class _Watch(Callback):
    def __init__(self, divide_by: Sequence[float] | None) -> None:
        self.seen = Seen()
        self.divide_by = divide_by
        self.updates = 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        gradients = {}
        for name, parameter in _trainable(pl_module):
            if parameter.grad is None:
                gradients[name] = torch.zeros_like(parameter).cpu()
                continue
            if self.divide_by is not None:
                parameter.grad /= self.divide_by[self.updates]
            gradients[name] = parameter.grad.detach().cpu().clone()
        if trainer.is_global_zero:
            self.seen.gradients.append(gradients)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.losses.append(float(outputs["loss"]) if outputs else float("nan"))
        self.seen.num_tokens.append(outputs.get("num_tokens") if outputs else None)
        if trainer.global_step == self.updates:
            return
        self.updates = trainer.global_step
        parameters = {name: parameter.detach().cpu().clone() for name, parameter in _trainable(pl_module)}
        digest = hashlib.sha256()
        for parameter in parameters.values():
            digest.update(parameter.view(-1).view(torch.uint8).numpy().tobytes())
        self.seen.digests.append(digest.hexdigest())
        if trainer.is_global_zero:
            self.seen.parameters.append(parameters)


class _Batches:
    """A loader of batches that are there already, of whatever type."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def fit(
    module: pl.LightningModule,
    batches: Sequence[Any],
    *,
    strategy: Strategy | str,
    world_size: int = 1,
    accumulate: int = 1,
    learning_rate: float = LEARNING_RATE,
    divide_by: Sequence[float] | None = None,
) -> Seen:
    """Fit a module with plain SGD on a real Trainer, in a process that `run_ranks` has started.

    Args:
        module: The module, prepared by `prepare`.
        batches: This rank's micro-batches, one epoch of them.
        strategy: The strategy, or the name of one.
        world_size: ``W``.
        accumulate: ``K``.
        learning_rate: Of SGD.
        divide_by: What to divide the gradient of each update by.
    """
    optimizer = torch.optim.SGD([parameter for _, parameter in _trainable(module)], lr=learning_rate)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    watch = _Watch(divide_by)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy,
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            use_distributed_sampler=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            callbacks=[watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, _Batches(batches))
    return watch.seen


def prepare(make_module: Callable[[], pl.LightningModule]) -> tuple[pl.LightningModule, int]:
    """Build the module from a fixed seed and switch dropout off.

    Returns:
        The module, and how many layers had dropout.
    """
    torch.manual_seed(0)
    module = make_module()
    return module, _switch_dropout_off(module)


def _switch_dropout_off(module: nn.Module) -> int:
    layers = 0
    for layer in module.modules():
        found = isinstance(layer, _DropoutNd) and layer.p > 0
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
        # attention layers, here and in transformers, keep a bare number
        for name, value in list(vars(layer).items()):
            if "drop" in name and isinstance(value, float) and value > 0:
                setattr(layer, name, 0.0)
                found = True
        layers += found
    return layers


def batch_dependent_layers(module: nn.Module) -> list[str]:
    """Layers that mix the samples of a batch while training, by name and type: no split leaves them alike."""
    return [
        f"{name} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.training
    ]


def parameters_of(module: nn.Module) -> Named:
    """Copies of the trainable parameters."""
    return {name: parameter.detach().clone() for name, parameter in _trainable(module)}


def load_parameters(module: nn.Module, parameters: Named) -> None:
    """Set the trainable parameters."""
    with torch.no_grad():
        for name, parameter in _trainable(module):
            parameter.copy_(parameters[name])


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
