"""The fit with a Lightning Trainer, under whichever strategy."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from benchmarking.measuring import Probe
from benchmarking.workload import Batch, Job


class CausalLM(pl.LightningModule):
    """An ordinary module that returns the mean loss of its micro-batch."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.new_model()
        self.job = job

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean over the supervised tokens."""
        loss: Tensor = self.model(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The job's."""
        return self.job.new_optimizer(self.model)


class ProbeCallback(pl.Callback):
    """Lightning's hooks to the probe's."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: D102
        window, micro_batch = divmod(batch_idx, trainer.accumulate_grad_batches)
        if micro_batch == 0:
            self.probe.window_starts()
            trainer.should_stop = window == pl_module.job.windows - 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: D102
        self.probe.before_step(trainer.model)  # with what the strategy put around the module


def fit_lightning(strategy: Callable[[], ParallelStrategy], module: type[CausalLM], job: Job, probe: Probe) -> None:
    """Fit with a Trainer, on the ranks that exist already."""
    quieten()
    trainer = pl.Trainer(
        accelerator="gpu" if job.device.type == "cuda" else "cpu",
        devices=job.place.ranks_per_node,
        num_nodes=job.world_size // job.place.ranks_per_node,
        precision=job.precision,
        strategy=strategy(),
        accumulate_grad_batches=job.accumulate,
        max_epochs=1,
        callbacks=[ProbeCallback(probe)],
        use_distributed_sampler=False,  # the loader has this rank's share
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(job), job.loader())


def quieten() -> None:
    """Keep the advice of the trainers out of the progress lines: hundreds of fits would repeat it."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
