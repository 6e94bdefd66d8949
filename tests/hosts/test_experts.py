"""A small mixture of experts: the loss of tokens beside a balance of experts that knows no tokens."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_tokennorm import Heads, PerMicroBatch, SupervisedTokens, TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import make_trainer
from tests.helpers.tiny_lm import IGNORE, VOCABULARY, WIDTH, collate, flat, make_samples

BALANCE, LR, EXPERTS = 0.1, 0.5, 3
MICRO_BATCHES = [collate(make_samples(1 + index % 3, seed=index)) for index in range(4)]
"""The window, whoever trains on it."""


class Experts(nn.Module):
    """Each token goes to its best expert; the balance is Switch Transformer's, ``E * sum over e of f[e] * P[e]``."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embed, self.router = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(EXPERTS))
        self.double()
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randn(each.shape, generator=generator, dtype=torch.float64) * 0.5)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and how unevenly the experts are used in this batch."""
        hidden = self.embed(input_ids)
        shares = self.router(hidden).softmax(-1)
        weighted = torch.stack([expert(hidden) for expert in self.experts], -2) * shares.unsqueeze(-1)
        chosen = F.one_hot(shares.argmax(-1), EXPERTS).double().flatten(0, -2).mean(0)
        return weighted.sum(-2), EXPERTS * (chosen * shares.flatten(0, -2).mean(0)).sum()

    def losses(self, batch: dict[str, Tensor], reduction: str) -> tuple[Tensor, Tensor]:
        logits, balance = self(batch["input_ids"])
        labels = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction=reduction), balance


class Balanced(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Experts()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        lm, balance = self.model.losses(batch, "mean")
        return {"losses": {"lm": lm, "balance": balance}}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


class AddedUp(Balanced):
    """As it is usually written: the balance is a part of the loss, and weighs what its micro-batch's tokens weigh."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        lm, balance = self.model.losses(batch, "mean")
        return lm + BALANCE * balance


def expected() -> Tensor:
    """``sum S / sum N`` of the tokens, and the plain average of the balance over micro-batches."""
    model = Experts()
    losses = [model.losses(batch, "sum") for batch in MICRO_BATCHES]
    tokens = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in MICRO_BATCHES)
    balance = sum(each for _, each in losses) / len(MICRO_BATCHES)
    (sum(each for each, _ in losses) / tokens + BALANCE * balance).backward()
    return flat(each.grad for each in model.parameters())


def fit(rank: int, world_size: int, added_up: bool) -> float:
    module = AddedUp() if added_up else Balanced()
    before = flat(module.parameters())
    heads = Heads(lm=SupervisedTokens(), balance=PerMicroBatch())
    strategy = TokenNormDDP() if added_up else TokenNormDDP(count_tokens=heads, head_weights={"balance": BALANCE})
    trainer = make_trainer(world_size, strategy=strategy, accumulate_grad_batches=4 // world_size)
    trainer.fit(module, DataLoader(MICRO_BATCHES[rank::world_size], batch_size=None))
    return ((before - flat(module.parameters())) / LR - expected()).abs().max().item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_balance_weighs_the_same_in_every_layout(world_size: int) -> None:
    assert max(run_ranks(fit, world_size, False)) < 1e-12


def test_added_to_the_loss_it_weighs_by_tokens() -> None:
    assert min(run_ranks(fit, 2, True)) > 1e-4
