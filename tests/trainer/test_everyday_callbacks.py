"""Callbacks, optimizers and metrics of other people, as they are used every day."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP, TokenNormError
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R1, R2, ScalarModule, make_batch, make_loader, make_trainer
from tests.trainer.test_field_cases import fit_rig, run_alone

TOLERANCE = 1e-12


# ---- weight averaging: statistics are renewed in an epoch of forwards only


class Normed(ScalarModule):
    def __init__(self) -> None:
        super().__init__(lr=0.5)
        self.norm = nn.BatchNorm1d(1, momentum=None, dtype=torch.float64)
        self.norm.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.norm(batch["values"][:, 1:].T)
        return super().training_step(batch, batch_idx)


class Streamed:
    """Notes how far it is read ahead of what is trained on."""

    def __init__(self, rows: Any, module: ScalarModule) -> None:
        self.rows, self.module = rows, module
        self.read = 0
        self.furthest = 0

    def __iter__(self) -> Any:
        for row in self.rows:
            self.read += 1
            self.furthest = max(self.furthest, self.read - len(self.module.returned))
            yield make_batch(*row)

    def __len__(self) -> int:
        return len(self.rows)


def average_weights(rank: int, world_size: int) -> Any:
    module = Normed()
    # of two ranks the first one has half as much
    loader = Streamed(R2[rank] * (2 if rank + 1 < world_size else 4), module)  # type: ignore[operator]
    averaging = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1, annealing_epochs=1)
    trainer = make_trainer(
        world_size, strategy=TokenNormDDP(), accumulate_grad_batches=2, max_epochs=3, callbacks=[averaging]
    )
    trainer.fit(module, loader)
    last = trainer.strategy.last_update  # type: ignore[attr-defined]
    return {
        "furthest": loader.furthest,
        "steps": trainer.global_step,
        "tracked": int(module.norm.num_batches_tracked),  # type: ignore[arg-type]
        "mean": float(module.norm.running_mean),  # type: ignore[arg-type]
        "records": [(each.index, each.applied, each.micro_batches) for each in module.records],
        "last": (last.index, last.applied),
        "gradients": module.gradients,
        "t": module.t.item(),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_stochastic_weight_averaging_reads_no_further_ahead(world_size: int) -> None:
    for rank, seen in enumerate(run_ranks(average_weights, world_size)):
        assert seen["furthest"] <= 3  # the window that comes and the batch in hand; the epoch has 20
        assert seen["steps"] == 31  # Lightning counts the epoch of forwards as one
        if rank == 0:  # whose statistics DDP gives to all ranks: its own batches alone, each with one value
            assert seen["tracked"] == (20 if world_size == 1 else 10)
            assert seen["mean"] == pytest.approx(sum(x for _, x in R2[0]) / 5, abs=TOLERANCE)
        assert seen["records"] == [(index, True, 2) for index in range(30)]
        assert seen["last"] == (29, True)  # forwards alone are no update
        # SWA averages what `t` is at the start of its epochs, of which there is one before the last; Lightning itself
        # would then step once more, on the gradient that is left
        assert seen["t"] == pytest.approx(1 - 0.5 * math.fsum(seen["gradients"][:10]), abs=1e-9)


# ---- what is frozen, and what is let go (https://github.com/Lightning-AI/pytorch-lightning/issues/20340)


class Frozen(ScalarModule):
    """The loss is ``(t + backbone) n x``."""

    def __init__(self, frozen: bool = True, how: str = "") -> None:
        super().__init__(lr=0.5)
        self.backbone = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(self.backbone.weight)
        self.backbone.requires_grad_(not frozen)
        self.how = how

    def loss(self, batch: Any) -> Tensor:
        return super().loss({**batch, "values": batch["values"] * (1 + self.backbone.weight.sum() / self.t)})

    def on_train_epoch_start(self) -> None:
        if self.how == "epoch start" and self.current_epoch == 1:
            self.backbone.requires_grad_(True)
        if self.how == "freeze" and self.current_epoch == 1:
            self.backbone.requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if (self.how, batch_idx) == ("batch end", 2):
            self.backbone.requires_grad_(True)
        if (self.how, batch_idx) == ("new", 2):
            self.extra = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.trainer.optimizers[0].add_param_group({"params": [self.extra]})

    def configure_optimizers(self) -> Any:
        given = self.parameters() if self.how != "finetuning" else [self.t]
        return torch.optim.SGD(given, lr=self.lr)


class Finetunes(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1)


def unfreeze(rank: int, world_size: int, how: str) -> tuple[str, list[int], float]:
    module = Frozen(how=how)
    try:
        fit_rig(
            R1[rank] * 2,  # type: ignore[operator]
            3,
            world_size,
            module,
            max_epochs=2,
            callbacks=[Finetunes()] if how == "finetuning" else [],
        )
    except TokenNormError as error:
        return str(error), [record.index for record in module.records], module.backbone.weight.item()
    return "", [], 0.0


@pytest.mark.parametrize(
    ("how", "updates", "name"),
    [
        ("epoch start", 2, "backbone.weight"),
        ("batch end", 1, "backbone.weight"),
        ("new", 1, "extra"),
        ("finetuning", 2, "backbone.weight"),
    ],
)
def test_a_parameter_that_ddp_does_not_know_is_refused(how: str, updates: int, name: str) -> None:
    for error, done, weight in run_ranks(unfreeze, 2, how):
        assert f"Parameter `{name}` is trained, but DDP does not know it" in error
        assert "find_unused_parameters=True" in error
        assert done == list(range(updates))
        assert weight == 1.0  # it has not been trained on


def freeze(rank: int, world_size: int, accumulate: int) -> tuple[list[int], float, float]:
    module = Frozen(frozen=False, how="freeze")
    strategy = TokenNormDDP(find_unused_parameters=True)
    fit_rig(R1[rank], accumulate, world_size, module, strategy, max_epochs=2)
    return [record.index for record in module.records], module.backbone.weight.item(), module.t.item()


def test_what_is_frozen_under_way_is_fine() -> None:
    # gradients 1.75 for both, then for `t` alone
    for done, backbone, t in run_ranks(freeze, 2, 3):
        assert done == [0, 1]
        assert backbone == pytest.approx(1 - 0.5 * 1.75, abs=1e-9)
        assert t == pytest.approx(1 - 0.5 * 3.5, abs=1e-9)


# ---- ten patterns of everyday use, on two ranks


class Everyday(ScalarModule):
    """Logs, clips and steps as many modules do."""

    def __init__(self, make_optimizer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer
        self.metrics = MetricCollection({"sum": SumMetric(), "average": MeanMetric()})
        self.clipped: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metrics.update(batch["values"][0, 1].float())
        self.log_dict(self.metrics, on_step=False, on_epoch=True)  # type: ignore[arg-type]
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        parts = {"main": loss * 0.75, "auxiliary": loss * 0.25}
        return {"loss": sum(parts.values()), "parts": {key: value.detach() for key, value in parts.items()}}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=1)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        assert self.t.grad is not None
        self.clipped.append(self.t.grad.item())
        nn.utils.clip_grad_value_(self.parameters(), 1.5)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al., 2024), in its usual form: two modes, between which parameters change."""

    def __init__(self, parameters: Any, lr: float = 0.5, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _switch(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                for each in group["params"]:
                    if "z" in self.state[each]:
                        each.data.lerp_(self.state[each]["z"], weight)
                group["train_mode"] = train

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("Optimizer was not in train mode when step is called.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            share = 1 / (group["k"] + 1)
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, share)
                each.add_(each.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(each.grad, alpha=group["lr"])
            group["k"] += 1
        return loss


class Modes(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        getattr(trainer.optimizers[0], "train", lambda: None)()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        getattr(trainer.optimizers[0], "eval", lambda: None)()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        getattr(trainer.optimizers[0], "train", lambda: None)()


def live_with_all(rank: int, world_size: int, folder: str, kind: str) -> Any:
    make = ScheduleFree if kind == "schedule-free" else lambda each: torch.optim.SGD(each, lr=0.5)
    module = Everyday(make)
    logger = CSVLogger(folder, name=kind, version=0)
    best = ModelCheckpoint(folder, filename="best", monitor="val_loss", save_last=True)
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        max_epochs=3,
        logger=logger,
        enable_checkpointing=True,
        num_sanity_val_steps=1,
        callbacks=[
            *(Modes(), best, EarlyStopping("val_loss", patience=9), LearningRateMonitor("step"), TokenMeanMetric()),
            *([WeightAveraging()] if kind == "sgd" else []),
        ],
    )
    trainer.fit(module, make_loader(R2[rank]), make_loader(R1[rank]))
    logged = trainer.callback_metrics
    return (
        module.clipped,
        [record.applied for record in module.records],
        module.parameters_after,
        module.t.item(),
        {key: logged[key].item() for key in ("sum", "average", "train_loss_per_token_epoch")},
        Path(best.last_model_path).exists(),
    )


@pytest.mark.parametrize("kind", ["sgd", "schedule-free"])
def test_logging_clipping_schedules_checkpoints_and_averages(tmp_path: Path, kind: str) -> None:
    results = run_ranks(live_with_all, 2, str(tmp_path), kind)
    for clipped, applied, after, t, logged, saved in results:
        assert clipped == pytest.approx([1.75, 1.375] * 3, abs=TOLERANCE)
        assert applied == [True] * 6
        assert saved
        # values of the epoch: 1 5 2 1 5 and 2 1 3 2 1
        assert (logged["sum"], logged["average"]) == (23.0, pytest.approx(2.3))
        if kind == "sgd":  # warm-up over 6 updates, of clipped gradients
            expected = [1.0]
            for step, gradient in enumerate([1.5, 1.375] * 3):
                expected.append(expected[-1] - 0.5 * (1 + step) / 6 * gradient)
            assert after == pytest.approx(expected[1:], abs=TOLERANCE)
            assert t == pytest.approx(sum(expected[1:]) / 6, abs=1e-6)  # what `WeightAveraging` leaves
    assert results[0][2] == results[1][2]


class Breaks(ScalarModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 4 and self.current_epoch == 0:
            raise ValueError("a bad sample")
        return super().training_step(batch, batch_idx)


def break_and_save(rank: int, world_size: int, folder: str) -> None:
    trainer = make_trainer(
        1,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        callbacks=[OnExceptionCheckpoint(folder, "failed")],
        enable_checkpointing=True,
    )
    with contextlib.suppress(ValueError):
        trainer.fit(Breaks(), make_loader(R2[0]))
    saved = torch.load(Path(folder) / "failed.ckpt", weights_only=False)
    assert saved["global_step"] == 1
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 3


def test_the_checkpoint_of_an_error(tmp_path: Path) -> None:
    run_alone(break_and_save, str(tmp_path))
