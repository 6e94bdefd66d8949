"""Fits a user's module on given batches and keeps the gradient and the parameters of every update."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_tokennorm.testing.module import batch_dependent_layers, digest_of, switch_dropout_off
from lightning_tokennorm.testing.plain_sgd import give_optimizer, step_plainly
from lightning_tokennorm.testing.shards import (
    Named,
    computed_in,
    divide_by_nothing,
    load_parameters,
    optimised,
    optimised_gradients,
    optimised_parameters,
    trainable,
)

LEARNING_RATE = 1e-2
"""Of the plain SGD that takes the place of the module's optimizer."""


@dataclass
class Facts:
    """What a module turned out to be once its fit was set up."""

    layers_with_dropout: int = 0
    """Layers whose dropout was switched off."""
    batch_dependent: list[str] = field(default_factory=list)
    """Layers that mix the samples of a batch."""
    dtypes: set[torch.dtype] = field(default_factory=set)
    """Types of the parameters that are optimised, and those that are computed in."""
    not_optimised: list[str] = field(default_factory=list)
    """Trainable parameters that no optimizer holds."""
    unused: list[str] = field(default_factory=list)
    """Trainable parameters that got no gradient in any update."""
    frozen_late: list[str] = field(default_factory=list)
    """Parameters that `configure_optimizers` freezes: strategies have wrapped the module before."""
    unfrozen_late: list[str] = field(default_factory=list)
    """Parameters that it unfreezes."""


@dataclass
class Seen:
    """What a fit leaves on one rank; tensors on rank zero only."""

    start: Named = field(default_factory=dict)
    """The optimised parameters as the module has made them."""
    start_digest: str = ""
    """A digest of their bits."""
    gradients: list[Named] = field(default_factory=list)
    """The gradient of each update, as the optimizer is about to use it; zeros where the update was skipped."""
    parameters: list[Named] = field(default_factory=list)
    """The optimised parameters after each update."""
    digests: list[str] = field(default_factory=list)
    """A digest of the bits of the parameters after each update."""
    losses: list[float] = field(default_factory=list)
    """The loss that `training_step` returned for each micro-batch, divided by ``K``."""
    num_tokens: list[Any] = field(default_factory=list)
    """``num_tokens`` of each micro-batch where `training_step` returns it, else ``None``."""
    facts: Facts = field(default_factory=Facts)
    """What the module is like."""


class _Watch(Callback):
    def __init__(
        self,
        learning_rate: float,
        divide_by: Sequence[float] | None,
        start_from: Named | None,
        seed: int,
        undo_divisor: bool,
    ) -> None:
        self.seen = Seen()
        self.learning_rate = learning_rate
        self.divide_by = divide_by
        self.start_from = start_from
        self.seed = seed
        self.undo_divisor = undo_divisor
        self.started = False
        self.updates = 0
        self.gradients: Named | None = None

    def run_configure_optimizers(self, module: pl.LightningModule, configure: Any) -> Any:
        """Run the module's own and note what it does to the parameters."""
        before = trainable(module)
        configured = configure()
        after = trainable(module)
        self.seen.facts.frozen_late = [name for name in before if name not in after]
        self.seen.facts.unfrozen_late = [name for name in after if name not in before]
        return give_optimizer(configured, module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step_plainly(trainer, self.learning_rate)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        facts = self.seen.facts
        facts.layers_with_dropout = switch_dropout_off(pl_module)
        facts.batch_dependent = batch_dependent_layers(pl_module)
        held = optimised(trainer, pl_module)
        facts.dtypes = {parameter.dtype for parameter in held.values()} | computed_in(trainer, pl_module)
        facts.not_optimised = [name for name in trainable(pl_module) if name not in held]
        facts.unused = list(trainable(pl_module))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # by now all hooks have run in which a module may draw its weights
        if self.started:
            return
        self.started = True
        start = optimised_parameters(trainer, pl_module)
        self.seen.start_digest = digest_of(start.values())
        if trainer.is_global_zero:
            self.seen.start = start
        if self.start_from is not None:
            load_parameters(pl_module, self.start_from)
        if self.undo_divisor:
            divide_by_nothing(pl_module)
        torch.manual_seed(self.seed)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parameters = dict(pl_module.named_parameters())
        self.seen.facts.unused = [n for n in self.seen.facts.unused if n in parameters and parameters[n].grad is None]

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self.divide_by is not None:
            for parameter in optimised(trainer, pl_module).values():
                _divide(parameter, self.divide_by[self.updates])
        self.gradients = optimised_gradients(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.losses.append(float(outputs["loss"]) if outputs else float("nan"))
        self.seen.num_tokens.append(outputs.get("num_tokens") if outputs else None)
        if trainer.global_step == self.updates:
            return
        self.updates = trainer.global_step
        parameters = optimised_parameters(trainer, pl_module)
        self.seen.digests.append(digest_of(parameters.values()))
        gradients, self.gradients = self.gradients, None
        if trainer.is_global_zero:
            # none where a strategy leaves an update out, since its window has no token
            self.seen.gradients.append(gradients or {n: torch.zeros_like(p) for n, p in parameters.items()})
            self.seen.parameters.append(parameters)


def _divide(parameter: nn.Parameter, divisor: float) -> None:
    if parameter.grad is None:
        return
    if divisor:
        parameter.grad /= divisor
    else:  # a mean over no token is NaN; an update without a token is none
        parameter.grad.zero_()


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
    start_from: Named | None = None,
    seed: int = 0,
    undo_divisor: bool = False,
) -> Seen:
    """Fit a module with plain SGD on a real Trainer, in a process that `run_ranks` has started.

    All hooks of the module run, `configure_optimizers` and the schedules that it makes included; dropout is off.

    Args:
        module: The module, fresh from `build`.
        batches: This rank's micro-batches, one epoch of them.
        strategy: The strategy, or the name of one.
        world_size: The number of ranks.
        accumulate: ``K``.
        learning_rate: Of SGD.
        divide_by: What to divide the gradient of each update by; 0 for an update to leave out.
        start_from: Parameters to start from instead of the module's own.
        seed: For torch's generator when training starts.
        undo_divisor: Whether to take back what the module makes FSDP2 divide by, as there is a single rank.
    """
    watch = _Watch(learning_rate, divide_by, start_from, seed, undo_divisor)
    configure_optimizers, configure_callbacks = module.configure_optimizers, module.configure_callbacks
    module.configure_optimizers = lambda: watch.run_configure_optimizers(module, configure_optimizers)  # type: ignore[method-assign]
    module.configure_callbacks = lambda: _without_metrics(configure_callbacks())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # on how parameters are gathered here
    torch.manual_seed(0)  # for what is made in `setup` or `configure_model`
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
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
            logger=DummyLogger(),  # takes whatever a module writes to `self.logger.experiment`
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, _Batches(batches))
    return watch.seen


def _without_metrics(callbacks: Any) -> list[Callback]:
    """A module's own callbacks, without those that wait for metrics of a validation that there is none of here."""
    listed = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    return [callback for callback in listed if not isinstance(callback, (Checkpoint, EarlyStopping))]
