"""The scalar rig: one parameter ``t``, so that every gradient can be worked out by hand.

A micro-batch ``(n, x)`` has ``n`` tokens of value ``x`` and the loss sum ``S = t * n * x``, so ``dS/dt = n * x`` and
the gradient of a window is ``(sum of n * x) / N``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

MicroBatch = tuple[int, float]
Table = Sequence[Sequence[MicroBatch]]
"""The micro-batches of an epoch, by rank."""

# Two ranks, three micro-batches: sum of n * x = (3 + 5 + 8) + (4 + 10 + 12) = 42, N = 8 + 16 = 24.
R1: Table = [[(3, 1), (1, 5), (4, 2)], [(2, 2), (10, 1), (4, 3)]]
R1_GRADIENT = 1.75  # 42 / 24

# With K = 3 a window like R1 and a tail of two: (3 + 5) + (4 + 10) = 22, N = (3 + 1) + (2 + 10) = 16.
R2: Table = [[*R1[0], (3, 1), (1, 5)], [*R1[1], (2, 2), (10, 1)]]
R2_GRADIENTS = [1.75, 1.375]

# Rank 0 has no token: sum of n * x = 4 + 8 = 12, N = 6.
R0: Table = [[(0, 0), (0, 0)], [(4, 1), (2, 4)]]
R0_GRADIENT = 2.0

# Nobody has a token.
R00: Table = [[(0, 0), (0, 0)], [(0, 0), (0, 0)]]


def make_batch(num_tokens: int, value: float, width: int = 12) -> dict[str, Tensor]:
    """A micro-batch of one row: the first label is never predicted, `num_tokens` others are live."""
    labels = torch.full((1, width + 1), -100)
    labels[0, 0] = 1  # position 0 is live and does not count: the loss shifts
    labels[0, 1 : 1 + num_tokens] = 1
    return {"labels": labels, "values": torch.full((1, width + 1), float(value), dtype=torch.float64)}


class Batches(Dataset[dict[str, Tensor]]):
    """A rank's micro-batches, sized."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.batches = [make_batch(*micro_batch) for micro_batch in micro_batches]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batches[index]


class Stream(IterableDataset[dict[str, Tensor]]):
    """A rank's micro-batches, of unknown length."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.batches = [make_batch(*micro_batch) for micro_batch in micro_batches]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


def make_loader(micro_batches: Sequence[MicroBatch], *, sized: bool = True) -> DataLoader[Any]:
    return DataLoader(Batches(micro_batches) if sized else Stream(micro_batches), batch_size=None)


class ScalarModule(pl.LightningModule):
    """Records the gradient of every update as the optimizer is about to see it.

    Args:
        reduction: What `training_step` returns. A mean over no token is 0 / 0 = NaN, as in a hand-written
            ``sum(loss * mask) / sum(mask)``, and so is its gradient.
        start: The first value of the parameter.
        lr: The learning rate of plain SGD; 0 leaves the parameter where it is.
    """

    def __init__(self, reduction: str = "mean", start: float = 1.0, lr: float = 0.0) -> None:
        super().__init__()
        self.t = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
        self.reduction = reduction
        self.lr = lr
        self.gradients: list[float] = []
        self.parameters_after: list[float] = []
        self.returned: list[float] = []
        self.batch_losses: list[float] = []
        self.windows: list[list[int]] = [[]]
        self.records: list[Any] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        live = batch["labels"][:, 1:] != -100
        loss_sum = (self.t * batch["values"][:, 1:] * live).sum()
        return loss_sum if self.reduction == "sum" else loss_sum / live.sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.windows[-1].append(batch_idx)
        loss = self.loss(batch)
        self.returned.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    test_step = validation_step

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.t.grad is not None
        self.gradients.append(self.t.grad.item())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batch_losses.append(outputs["loss"].item())
        record = getattr(self.trainer.strategy, "last_update", None)
        if record is not None and (not self.records or record is not self.records[-1]):
            self.records.append(record)
            self.parameters_after.append(self.t.item())
            self.windows.append([])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def make_trainer(world_size: int, **options: Any) -> pl.Trainer:
    """A quiet Trainer on the ranks that `run_ranks` has started."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "max_epochs": 1,
        "use_distributed_sampler": False,  # a rig names each rank's micro-batches itself
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(**{**defaults, **options})


def deal(table: Table, world_size: int) -> Table:
    """The same micro-batches on another number of ranks, column by column; missing ones have no token."""
    columns = [micro_batch for column in zip(*table, strict=True) for micro_batch in column]
    columns += [(0, 0.0)] * (-len(columns) % world_size)
    return [columns[rank::world_size] for rank in range(world_size)]
