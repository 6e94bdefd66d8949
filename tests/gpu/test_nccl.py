"""The same rig on GPUs over NCCL, started as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.script import run_script

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: NCCL and CUDA are not here")

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
from tests.helpers.scalar_rig import R1, ScalarModule, deal, make_loader, make_trainer


class Checked(ScalarModule):
    def on_train_start(self):
        assert dist.get_backend() == "nccl"
        if dist.get_world_size() > 1:
            assert dist.get_backend(self.trainer.strategy._windows.exchange.group) == "gloo"

    def training_step(self, batch, batch_idx):
        assert batch["labels"].device.type == "cuda"
        return self.loss(batch)  # nothing that waits for the device

    def on_before_backward(self, loss):
        torch.cuda.set_sync_debug_mode("error")  # our scaling and DDP's backward must not synchronise

    def on_after_backward(self):
        torch.cuda.set_sync_debug_mode("default")

    def on_train_end(self):
        with open(f"{sys.argv[2]}/rank{self.global_rank}.json", "w") as file:
            json.dump([self.gradients, self.trainer.callback_metrics["train_loss_per_token"].item()], file)


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    table = deal(R1, world_size)
    trainer = make_trainer(
        world_size,
        accelerator="gpu",
        strategy=TokenNormDDP(),
        accumulate_grad_batches=len(table[0]),
        callbacks=[TokenMeanMetric()],
    )
    trainer.fit(Checked(), make_loader(table[trainer.global_rank]))
"""


def test_window_over_gpus(tmp_path: Path) -> None:
    world_size = min(2, torch.cuda.device_count())
    run_script(tmp_path, SCRIPT, str(world_size), str(tmp_path))
    for rank in range(world_size):
        gradients, logged = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert gradients == pytest.approx([1.75], abs=1e-12)
        assert logged == pytest.approx(1.75, abs=1e-12)


UNREAD = """
import sys
import torch
from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
from tests.helpers.scalar_rig import R2, ScalarModule, deal, make_loader, make_trainer


class Unread(ScalarModule):
    def on_train_batch_start(self, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("error")  # until the callbacks and the optimizer are through, too

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    table = deal(R2, world_size)
    trainer = make_trainer(
        world_size,
        accelerator="gpu",
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        log_every_n_steps=1000,
        callbacks=[TokenMeanMetric()],
    )
    trainer.fit(Unread(), make_loader(table[trainer.global_rank]))
"""


def test_no_micro_batch_waits_for_the_device(tmp_path: Path) -> None:
    run_script(tmp_path, UNREAD, str(min(2, torch.cuda.device_count())))
