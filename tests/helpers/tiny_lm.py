"""A float64 causal transformer of a few thousand parameters on ragged data, and its single-process reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, WIDTH, LENGTH = 17, 8, 7
IGNORE = -100


class TinyLM(nn.Module):
    """Embedding, one causal attention block, head; no dropout, so every split sees the same function."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(42)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of shape ``[rows, length, vocabulary]`` for ids of shape ``[rows, length]``."""
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=torch.float64)
        return self.head(self.block(self.embed(input_ids), src_mask=mask, is_causal=True))

    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        """Sum of the next-token losses over live labels."""
        logits = self(batch["input_ids"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def num_supervised(batch: dict[str, Tensor]) -> int:
    """Live labels after the shift: written out again, so that the reference shares nothing with the package."""
    return int((batch["labels"][:, 1:] != IGNORE).sum())


def make_samples(num_samples: int, empty: Sequence[int] = (), seed: int = 2026) -> list[dict[str, Tensor]]:
    """Samples with 1 to 6 supervised tokens each; those whose index is in `empty` have none."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(num_samples):
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        live = 0 if index in empty else int(torch.randint(1, LENGTH, (), generator=generator))
        labels = ids.clone()
        labels[: LENGTH - live] = IGNORE
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def reference(windows: Sequence[Sequence[dict[str, Tensor]]], lr: float) -> tuple[list[Tensor], list[Tensor]]:
    """Plain SGD in one process on the merged windows: flat gradients and parameters, one of each per update."""
    model = TinyLM()
    gradients, parameters = [], []
    for window in windows:
        merged = collate(window)
        model.zero_grad()
        (model.loss_sum(merged) / num_supervised(merged)).backward()
        gradients.append(flat(parameter.grad for parameter in model.parameters()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
        parameters.append(flat(model.parameters()))
    return gradients, parameters


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class TinyModule(pl.LightningModule):
    """Returns the mean as `F.cross_entropy` does (NaN with zero gradients over no token), the sum, or a hand-written
    mean that is NaN all the way down over no token."""

    def __init__(self, loss: str = "mean", lr: float = 0.1) -> None:
        super().__init__()
        self.model = TinyLM()
        self.loss_kind = loss
        self.lr = lr
        self.gradients: list[Tensor] = []
        self.after: list[Tensor] = []

    @property
    def reduction(self) -> str:
        return "sum" if self.loss_kind == "sum" else "mean"

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.loss_kind == "sum":
            return self.model.loss_sum(batch)
        logits, labels = self.model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        if self.loss_kind == "mean":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        mask = labels != IGNORE
        losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
        return (losses * mask).sum() / mask.sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(flat(parameter.grad for parameter in self.model.parameters()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if len(self.after) < len(self.gradients):
            self.after.append(flat(self.model.parameters()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def make_loader(micro_batches: Sequence[Sequence[dict[str, Tensor]]]) -> DataLoader[Any]:
    """A rank's micro-batches, each a list of samples."""
    batches = [collate(samples) for samples in micro_batches]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
