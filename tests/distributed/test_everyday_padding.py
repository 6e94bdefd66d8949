"""A micro-batch without data leaves no trace: what its forward changes is put back.

Buffers of a rank whose data has ended: https://github.com/pytorch/pytorch/pull/160602.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_tokennorm import TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import MicroBatch, ScalarModule, make_loader, make_trainer

TOLERANCE = 1e-12
# Rank 0 has two batches, of mean value 2; rank 1 four of value 8.
ROWS: list[list[MicroBatch]] = [[(2, 1.0), (2, 3.0)], [(2, 8.0)] * 4]


class Meter:
    """Somebody's running mean."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


class Stateful(ScalarModule):
    """Its training step changes what a module can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=None, dtype=torch.float64)  # a cumulative mean
        self.norm.requires_grad_(False)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("replaced", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng(3)
        self.python_generator = random.Random(3)
        self.metric = MeanMetric(sync_on_compute=False)
        self.meter = Meter()
        self.steps = 0
        self.seen: list[float] = []
        self.counts: Counter[float] = Counter()
        self.nested: dict[str, Any] = {"sum": torch.zeros(()), "by value": {"values": []}}
        self.moving = torch.zeros(())  # made anew in each step, as averages often are
        self.in_place = torch.zeros(())
        self.array = np.zeros(1)
        self.history: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        value = batch["values"][0, 1].item()
        self.norm(batch["values"][:, 1:].T)
        self.dropout(torch.ones(3))
        torch.rand((), generator=self.generator)
        np.random.random(), self.numpy_generator.random()
        random.random(), self.python_generator.random()
        self.replaced = self.replaced + 1
        self.metric.update(value)
        self.meter.update(value)
        self.steps += 1
        self.seen.append(value)
        self.counts[value] += 1
        self.nested["sum"] += value
        self.nested["by value"]["values"].append(value)
        self.moving = 0.5 * self.moving + 0.5 * value
        self.in_place.add_(value)
        self.array += value
        self.fresh = value  # an attribute that the first step makes
        self.log("last", value, on_step=True, on_epoch=False)
        self.log("mean", value, on_step=False, on_epoch=True, batch_size=1)
        self.log("sync", value, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.history.append(self.state())

    def state(self) -> dict[str, Any]:
        return {
            "tracked": int(self.norm.num_batches_tracked),  # type: ignore[arg-type]
            "mean": float(self.norm.running_mean),  # type: ignore[arg-type]
            "replaced": float(self.replaced),
            "random": [
                *(torch.get_rng_state().sum().item(), self.generator.get_state().sum().item()),
                *(int(np.random.get_state()[1].sum()), str(self.numpy_generator.bit_generator.state)),  # type: ignore[index,union-attr]
                *(random.getstate(), self.python_generator.getstate()),
            ],
            "metric": float(self.metric.compute()),
            "meter": (self.meter.total, self.meter.count),
            "steps": self.steps,
            "seen": list(self.seen),
            "counts": dict(self.counts),
            "nested": (float(self.nested["sum"]), list(self.nested["by value"]["values"])),
            "averages": (float(self.moving), float(self.in_place), float(self.array[0])),
            "fresh": getattr(self, "fresh", None),
        }


def fit(rank: int, world_size: int, broadcast_buffers: bool, accumulate: int) -> Any:
    module = Stateful()
    strategy = TokenNormDDP(broadcast_buffers=broadcast_buffers)
    trainer = make_trainer(world_size, strategy=strategy, accumulate_grad_batches=accumulate)
    trainer.fit(module, make_loader(ROWS[rank]))
    logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return module.history, logged, module.gradients


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_padded_forward_changes_is_put_back(accumulate: int) -> None:
    (short, short_logged, _), (long, long_logged, gradients) = run_ranks(fit, 2, False, accumulate)
    assert len(short) == len(long) == 4
    for history, values in ((short, [1.0, 3.0]), (long, [8.0] * 4)):
        for index, state in enumerate(history):
            seen = values[: index + 1]
            moving = 0.0
            for value in seen:
                moving = 0.5 * moving + 0.5 * value
            mean = sum(seen) / len(seen)
            assert (state["tracked"], state["mean"]) == (len(seen), pytest.approx(mean, abs=TOLERANCE))
            assert (state["replaced"], state["steps"], state["seen"]) == (len(seen), len(seen), seen)
            assert state["metric"] == pytest.approx(mean)
            assert state["meter"] == (sum(seen), len(seen))
            assert state["counts"] == {value: seen.count(value) for value in seen}
            assert state["nested"] == (sum(seen), seen)
            assert state["averages"] == (pytest.approx(moving), sum(seen), sum(seen))
            assert state["fresh"] == seen[-1]
    assert short[1] == short[2] == short[3]  # all of it, random states too
    assert len({str(state["random"]) for state in long}) == 4  # which steps with data do move
    assert (short_logged["mean"], short_logged["last"]) == (2.0, 3.0)
    assert (long_logged["mean"], long_logged["last"]) == (8.0, 8.0)
    assert short_logged["sync"] == long_logged["sync"] == pytest.approx((1 + 3 + 4 * 8) / 6)
    assert gradients == pytest.approx([4.5, 5.5, 8.0, 8.0] if accumulate == 1 else [5.0, 8.0], abs=TOLERANCE)


def test_buffers_that_are_broadcast() -> None:
    # before each forward rank 1 takes rank 0's: 0, 1, 2 and, since rank 0's are put back, 2 again
    (short, *_), (long, *_) = run_ranks(fit, 2, True, 1)
    assert [state["tracked"] for state in short] == [1, 2, 2, 2]
    assert [state["tracked"] for state in long] == [1, 2, 3, 3]
    assert [state["mean"] for state in short] == pytest.approx([1.0, 2.0, 2.0, 2.0], abs=TOLERANCE)
    # (8), (1 + 8) / 2, (1 + 3 + 8) / 3 twice
    assert [state["mean"] for state in long] == pytest.approx([8.0, 4.5, 4.0, 4.0], abs=TOLERANCE)
