"""`strategy.tokens_seen`: the clock of schedules by tokens, across skipped updates and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_tokennorm import TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R2, ScalarModule, make_loader, make_trainer

TOTAL = 40  # tokens of R2: 24 and 16


class ByTokens(ScalarModule):
    """Its learning rate falls in a straight line from 1 to 0 over the tokens of the run."""

    def __init__(self) -> None:
        super().__init__(lr=1.0)
        self.rates: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 1 - self.trainer.strategy.tokens_seen / TOTAL

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


class Clock(Callback):
    """Reads the clock after each update, and writes a checkpoint after one of them."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.seen = path, []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.window.is_last:
            self.seen.append(trainer.strategy.tokens_seen)
        if self.path is not None and batch_idx == 2:
            trainer.save_checkpoint(self.path)


def fit(rank: int, world_size: int, accumulate: int, path: Path | None = None, **options: Any) -> Any:
    module, clock = ByTokens(), Clock(path)
    trainer = make_trainer(world_size, strategy=TokenNormDDP(), accumulate_grad_batches=accumulate, callbacks=[clock])
    trainer.fit(module, make_loader(R2[rank]), **options)
    return clock.seen, module.rates, trainer.strategy.tokens_seen


def whole_and_resumed(rank: int, world_size: int, folder: Path) -> Any:
    path = folder / "after_one_update.ckpt"
    return fit(rank, world_size, 3, path), fit(rank, world_size, 1, ckpt_path=path)


def test_a_schedule_by_tokens_across_a_resume_with_another_k(tmp_path: Path) -> None:
    """R2 has 24 tokens in its first window, and two micro-batches of 3 + 2 and 1 + 10 after it."""
    for whole, resumed in run_ranks(whole_and_resumed, 2, tmp_path):
        assert whole == ([24, 40], [1.0, 1 - 24 / 40], 40)
        assert resumed == ([29, 40], [1 - 24 / 40, 1 - 29 / 40], 40)


def test_updates_that_are_left_out_do_not_count() -> None:
    clock = Clock()
    trainer = make_trainer(1, strategy=TokenNormDDP(), callbacks=[clock])
    with pytest.warns(UserWarning, match="it is left out"):
        trainer.fit(ScalarModule(), make_loader([(3, 1.0), (0, 0.0), (2, 1.0)]))
    assert clock.seen == [3, 3, 5]
    assert trainer.strategy.tokens_seen == 5  # also after the fit
