"""`TokenMeanMetric` where tensor-parallel ranks hold copies of the same batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_tokennorm import TokenMeanMetric, TokenNormModelParallel
from tests.helpers import law
from tests.helpers.launch import run_ranks
from tests.helpers.law import Case
from tests.helpers.scalar_rig import make_trainer
from tests.helpers.tiny_lm import TinyLM, collate, num_supervised
from tests.hosts.test_model_parallel import LOSS_PARALLEL, LossParallel, Sharded


class Validated(Sharded):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


class ValidatedLossParallel(LossParallel):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


def fit(rank: int, world_size: int) -> list[list[float]]:
    case, found = Case(accumulate=5), []
    loader = DataLoader([collate(each) for each in case.micro_batches()[rank // 2]], batch_size=None)
    for module, counter in (
        (Validated(case), None),
        (Validated(case), num_supervised),
        (ValidatedLossParallel(case, **LOSS_PARALLEL), None),
    ):
        trainer = make_trainer(
            world_size,
            strategy=TokenNormModelParallel(data_parallel_size=2, tensor_parallel_size=2),
            accumulate_grad_batches=5,
            callbacks=[TokenMeanMetric(count_tokens=counter)],
        )
        trainer.fit(module, loader, loader)
        logged = trainer.callback_metrics
        found.append([float(logged[name]) for name in ("train_tokens", "train_loss_per_token", "val_loss_per_token")])
    return found


def test_copies_are_logged_once() -> None:
    """One update on the whole epoch, then validation on the same batches."""
    (window,) = Case(accumulate=5).windows()
    merged, (_, (after,)) = collate(window), law.reference([window], law.LR)
    num_tokens, model = num_supervised(merged), TinyLM()
    with torch.no_grad():
        train = model.loss_sum(merged).item() / num_tokens
        nn.utils.vector_to_parameters(after, model.parameters())
        val = model.loss_sum(merged).item() / num_tokens
    for found in run_ranks(fit, 4):
        for logged in found:
            assert logged == pytest.approx([num_tokens, train, val], rel=1e-6)
