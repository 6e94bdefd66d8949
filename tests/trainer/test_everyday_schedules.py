"""Schedules from `trainer.estimated_stepping_batches`, whoever asks for it, and the tuners of Lightning.

To ask sets Lightning's loaders up before the fit has started
(https://github.com/Lightning-AI/pytorch-lightning/issues/13740).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader

from lightning_tokennorm import TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R1, R2, ScalarModule, Table, make_loader, make_trainer
from tests.trainer import test_resume as resumes
from tests.trainer.test_field_cases import run_alone

TOLERANCE = 1e-12
HOOKS = ["configure_callbacks", "setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start"]


class Asks(ScalarModule):
    """Asks for the number of updates in one of its hooks."""

    def __init__(self, hook: str, make_schedule: bool = False) -> None:
        super().__init__()
        self.hook = hook
        self.make_schedule = make_schedule
        self.estimates: list[float] = []

    def ask(self, hook: str) -> None:
        if hook == self.hook:
            self.estimates.append(self.trainer.estimated_stepping_batches)

    def configure_callbacks(self) -> Any:
        self.ask("configure_callbacks")
        return []

    def setup(self, stage: str) -> None:
        self.ask("setup")

    def configure_model(self) -> None:
        self.ask("configure_model")

    def on_fit_start(self) -> None:
        self.ask("on_fit_start")

    def on_train_start(self) -> None:
        self.ask("on_train_start")

    def configure_optimizers(self) -> Any:
        self.ask("configure_optimizers")
        optimizer = super().configure_optimizers()
        if not self.make_schedule:
            return optimizer
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AskingCallback(Callback):
    def __init__(self, hook: str) -> None:
        self.estimates: list[float] = []

        def ask(trainer: Any, *_: Any, **__: Any) -> None:
            self.estimates.append(trainer.estimated_stepping_batches)

        setattr(self, hook, ask)


class Data(pl.LightningDataModule):
    def __init__(self, table: Table, asks: bool = False) -> None:
        super().__init__()
        self.table, self.asks = table, asks
        self.estimates: list[float] = []

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.rank = self.trainer.global_rank
        if self.asks:
            self.estimates.append(self.trainer.estimated_stepping_batches)

    def train_dataloader(self) -> Any:
        return make_loader(self.table[self.rank])


def fit(module: ScalarModule, data: Any, world_size: int = 1, accumulate: int = 3, **options: Any) -> pl.Trainer:
    callbacks = options.pop("callbacks", [])
    trainer = make_trainer(
        world_size, strategy=TokenNormDDP(), accumulate_grad_batches=accumulate, callbacks=callbacks, **options
    )
    trainer.fit(module, datamodule=data) if isinstance(data, Data) else trainer.fit(module, data)
    return trainer


# ---- who asks, and when


def ask_everywhere(rank: int, world_size: int) -> None:
    for hook in HOOKS:
        module = Asks(hook)
        fit(module, make_loader(R1[rank]), world_size)
        assert (module.estimates, module.gradients) == ([1], [pytest.approx(1.75, abs=TOLERANCE)]), hook
    for hook in ("setup", "on_fit_start"):
        callback, module = AskingCallback(hook), Asks("")
        fit(module, make_loader(R1[rank]), world_size, callbacks=[callback])
        assert (callback.estimates, module.gradients) == ([1], [pytest.approx(1.75, abs=TOLERANCE)]), hook
    data, module = Data(R1, asks=True), Asks("")
    fit(module, data, world_size)
    assert (data.estimates, module.gradients) == ([1], [pytest.approx(1.75, abs=TOLERANCE)])
    module = Asks("configure_optimizers")
    fit(module, Data(R1), world_size)
    assert (module.estimates, module.gradients) == ([1], [pytest.approx(1.75, abs=TOLERANCE)])


def test_whichever_hook_asks() -> None:
    run_ranks(ask_everywhere, 2)


# ---- whatever the data, and however long the fit


class Reloads(Asks):
    """Its data are one window longer from epoch to epoch."""

    def train_dataloader(self) -> Any:
        return make_loader(R1[0] * (1 + self.current_epoch))  # type: ignore[operator]


def one_process(rank: int, world_size: int) -> None:
    # R1's first rank: (3 + 5 + 8) / 8 = 2; R2's tail: (3 + 5) / 4 = 2
    cases: list[tuple[Any, dict[str, Any], float, int]] = [
        (R2[0], {"max_epochs": 2}, 4, 4),
        (R2[0], {"max_epochs": 2, "max_steps": 3}, 3, 3),
        (R2[0], {"max_epochs": -1, "max_steps": 3}, 3, 3),
        (R2[0], {"limit_train_batches": 3, "max_epochs": 2}, 2, 2),
        (R2[0], {"limit_train_batches": 0.61, "max_epochs": 2}, 2, 2),  # int(0.61 * 5) = 3
        (R2[0], {"sized": False, "max_epochs": -1, "max_steps": 3}, 3, 3),
        (R2[0], {"sized": False, "max_epochs": 2, "max_steps": 9}, 9, 4),  # a stream: Lightning's own upper bound
        (R2[0], {"sized": False, "limit_train_batches": 3, "max_epochs": 2}, 2, 2),
        (R2[0], {"accumulate": 7}, 1, 1),
        (R2[0], {"accumulate": 1}, 5, 5),
    ]
    for micro_batches, options, estimate, updates in cases:
        module, options = Asks("configure_optimizers"), dict(options)
        trainer = fit(module, make_loader(micro_batches, sized=options.pop("sized", True)), **options)
        assert (module.estimates, trainer.global_step) == ([estimate], updates), options
        if "accumulate" not in options:
            assert module.gradients == pytest.approx([2.0] * updates, abs=TOLERANCE), options
    # loaders that are put together: the second one's batches are counted as well
    module = Combined("configure_optimizers")
    strategy = TokenNormDDP(
        count_tokens=lambda parts: sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
    )
    both = CombinedLoader([make_loader(R1[0]), make_loader(R1[1])], "max_size")
    make_trainer(1, strategy=strategy, accumulate_grad_batches=3).fit(module, both)
    assert module.estimates == [1]
    assert module.gradients == pytest.approx([1.75], abs=TOLERANCE)
    # a schedule of as many steps as the fit takes: one more would raise in torch
    module = Asks("", make_schedule=True)
    trainer = fit(module, make_loader(R2[0]), max_epochs=2)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    # loaders that are made anew
    module = Reloads("configure_optimizers")
    trainer = make_trainer(
        1, strategy=TokenNormDDP(), accumulate_grad_batches=3, max_epochs=2, reload_dataloaders_every_n_epochs=1
    )
    trainer.fit(module)
    assert module.estimates == [2]  # as far as anybody can know
    assert module.gradients == pytest.approx([2.0] * 3, abs=TOLERANCE)
    # two fits of one Trainer
    module = Asks("configure_optimizers")
    trainer = make_trainer(1, strategy=TokenNormDDP(), accumulate_grad_batches=3)
    trainer.fit(module, make_loader(R1[0]))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader(R2[0]))
    assert module.estimates == [1, 4]
    assert module.gradients == pytest.approx([2.0] * 3, abs=TOLERANCE)


class Combined(Asks):
    def loss(self, batch: Any) -> torch.Tensor:
        # the mean over the tokens of both parts
        lives = [part["labels"][:, 1:] != -100 for part in batch]
        parts = zip(batch, lives, strict=True)
        return sum((self.t * part["values"][:, 1:] * live).sum() for part, live in parts) / sum(  # type: ignore[return-value]
            live.sum() for live in lives
        )


def test_estimates_are_what_the_fit_does() -> None:
    run_alone(one_process)


# ---- ranks of unequal length


UNEQUAL: Table = [[(3, 1), (1, 5), (4, 2)], [(2, 2), (10, 1), (4, 3), (3, 1), (1, 5)]]


def unequal(rank: int, world_size: int, hook: str) -> tuple[list[float], int, list[float], int]:
    module = Asks(hook, make_schedule=True)
    trainer = fit(module, make_loader(UNEQUAL[rank]), world_size, accumulate=2)
    return module.estimates, trainer.global_step, module.gradients, int(trainer.num_training_batches)


@pytest.mark.parametrize("hook", ["configure_optimizers", "setup"])
def test_unequal_ranks_agree_on_the_number_of_updates(hook: str) -> None:
    # windows of 2, 2 and 1: (3 + 5 + 4 + 10) / 16, (8 + 12 + 3) / (4 + 4 + 3), 5 / 1
    for estimates, updates, gradients, batches in run_ranks(unequal, 2, hook):
        assert (estimates, updates, batches) == ([3], 3, 5)
        assert gradients == pytest.approx([22 / 16, 23 / 11, 5.0], abs=TOLERANCE)


# ---- resumes


class Scheduled(resumes.Module):
    """Its learning rate depends on the number of updates."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (total + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit_scheduled(kind: str, path: Any = None, world_size: int = 1, **options: Any) -> Scheduled:
    module = Scheduled()
    trainer = make_trainer(
        world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3, max_epochs=2, max_steps=6, **options
    )
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(module, resumes.make_stateful_loader(kind), ckpt_path=path)
    return module


def resume(rank: int, world_size: int, folder: str, kind: str) -> None:
    whole = fit_scheduled(kind, world_size=world_size)
    assert len(whole.parameters_after) == 6
    for at in (1, 2, 3, 5, 6, 7):  # batches of the two epochs of 8: windows end at 2, 5, 7
        path = Path(folder) / f"{kind}-{at}.ckpt"
        fit_scheduled(kind, world_size=world_size, callbacks=[resumes.Saves(path, at)])
        resumed = fit_scheduled(kind, path, world_size)
        updates = len(resumed.parameters_after)
        assert updates == 6 - (at + 1) // 3 - (at == 7)
        assert resumed.parameters_after == whole.parameters_after[-updates:], (kind, at)


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_resumes_inside_an_epoch_are_exact(tmp_path: Path, kind: str) -> None:
    run_ranks(resume, 2, str(tmp_path), kind)


# ---- tuners


class Tuned(Asks):
    """Any of its learning rates trains; its batches have values from 0 on."""

    def __init__(self) -> None:
        super().__init__("configure_optimizers", make_schedule=True)
        self.lr = 1e-3
        self.batches: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch["values"][0, 1].item())
        return super().training_step(batch, batch_idx) * self.t

    def train_dataloader(self) -> Any:
        return make_loader([(1 + i % 4, float(i)) for i in range(12)])


def tune(rank: int, world_size: int, folder: str, how: str) -> None:
    module = Tuned()
    finder = [LearningRateFinder(num_training_steps=6)] if how == "callback" else []
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        callbacks=finder,
        default_root_dir=folder,
        enable_checkpointing=True,
    )
    if how == "tuner":
        found = Tuner(trainer).lr_find(module, num_training=6)
        assert found is not None
        assert len(found.results["loss"]) == 4  # updates of the one epoch that there is
    trainer.fit(module)
    assert module.batches[-12:] == [float(i) for i in range(12)]  # none is left out after the finder's run
    assert len(module.batches) > 12
    assert trainer.global_step == 4
    last = trainer.strategy.last_update  # type: ignore[attr-defined]
    assert (last.index, last.applied) == (3, True)


@pytest.mark.parametrize("how", ["tuner", "callback"])
def test_the_learning_rate_finder(tmp_path: Path, how: str) -> None:
    run_alone(tune, str(tmp_path), how)


class FailsOnce(resumes.Module):
    """Goes wrong at a batch of the fit proper, after the learning rate finder's run."""

    def __init__(self, fail_at: int | None) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.fitting = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fitting and batch_idx == self.fail_at:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


class StartsFit(Callback):
    def on_train_start(self, trainer: Any, pl_module: FailsOnce) -> None:
        if trainer.fit_loop.max_steps == -1:  # not the finder's run
            pl_module.fitting = True
            pl_module.trained.clear()


def error_after_the_finder(rank: int, world_size: int, folder: str) -> None:
    # nine batches, K = 3, an error at batch 4: windows 3 4 5 and 6 7 come again
    module = FailsOnce(4)
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    module.learning_rate = 0.1  # type: ignore[assignment]
    trainer = make_trainer(
        1,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        callbacks=[finder, StartsFit()],
        default_root_dir=folder,
        enable_checkpointing=True,
    )
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(module, resumes.make_stateful_loader("stream"))
    assert module.trained == [0, 1, 2, 3]
    path = Path(folder) / "after.ckpt"
    trainer.save_checkpoint(path)
    resumed = FailsOnce(None)
    make_trainer(1, strategy=TokenNormDDP(), accumulate_grad_batches=3).fit(
        resumed, resumes.make_stateful_loader("stream"), ckpt_path=path
    )
    assert resumed.trained == [3, 4, 5, 6, 7]


def test_the_checkpoint_of_an_error_after_the_learning_rate_finder(tmp_path: Path) -> None:
    run_alone(error_after_the_finder, str(tmp_path))
