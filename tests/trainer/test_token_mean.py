"""`TokenMeanMetric` beside what modules and other callbacks do: change K, consume the batch, monitor what it logs."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
from tests.distributed.test_metric import read_csv
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R1, Batches, MicroBatch, ScalarModule, make_loader, make_trainer

STRATEGIES: dict[str, Callable[[], Any]] = {
    "tokennorm": TokenNormDDP,
    "ddp": DDPStrategy,
    "single device": lambda: "auto",
}
KINDS = pytest.mark.parametrize("kind", list(STRATEGIES))


def fresh(micro_batches: Sequence[MicroBatch]) -> DataLoader[Any]:
    """A loader whose batches a step may change."""
    return DataLoader(Batches(micro_batches), batch_size=None, collate_fn=copy.deepcopy)


class Updates(Callback):
    """What is to be seen after each update."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tokens: list[int] = []
        self._seen = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self._seen:
            self._seen = trainer.global_step
            self.losses.append(trainer.callback_metrics["train_loss_per_token_step"].item())
            self.tokens.append(trainer.callback_metrics["train_tokens"].item())


# ---- K changes under way


class SetsK(Callback):
    def __init__(self, hook: str, batch_idx: int, accumulate: int) -> None:
        def change(trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.batch_idx == batch_idx:
                trainer.accumulate_grad_batches = accumulate

        setattr(self, hook, change)


class SetsKInItsStep(ScalarModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.trainer.accumulate_grad_batches = 4
        return super().training_step(batch, batch_idx)


# micro-batches of 1, 2, ... 10 tokens, each of value 3: whatever the windows are, the mean per token is 3
THREES = [(n, 3.0) for n in range(1, 11)]


def fit_threes(
    rank: int, world_size: int, kind: str, accumulate: int, before: list[Callback], after: list[Callback], own: bool
) -> tuple[list[float], list[int], float]:
    updates = Updates()
    trainer = make_trainer(
        world_size,
        strategy=STRATEGIES[kind](),
        accumulate_grad_batches=accumulate,
        callbacks=[*before, TokenMeanMetric(), *after, updates],
    )
    trainer.fit(SetsKInItsStep() if own else ScalarModule(), make_loader(THREES))
    return updates.losses, updates.tokens, trainer.callback_metrics["train_loss_per_token_epoch"].item()


def fit_with_changing_k(rank: int, world_size: int, kind: str) -> list[Any]:
    change = ("on_train_batch_end", 1, 4)
    cases: list[tuple[int, list[Callback], list[Callback], bool]] = [
        (2, [SetsK(*change)], [], False),
        (2, [], [SetsK(*change)], False),
    ]
    if kind != "tokennorm":  # which refuses another K inside a window, or while it ends
        cases += [
            (2, [SetsK("on_before_optimizer_step", 1, 4)], [], False),
            (2, [SetsK("on_before_backward", 1, 4)], [], False),
            (2, [], [], True),
            (4, [SetsK("on_train_batch_start", 1, 2)], [], False),
            (4, [], [SetsK("on_train_batch_start", 1, 2)], False),
        ]
    return [fit_threes(rank, world_size, kind, *case) for case in cases]


@KINDS
def test_k_is_the_one_that_divided_the_loss(kind: str) -> None:
    world_size = 1 if kind == "single device" else 2
    # K = 2, after two micro-batches 4: windows end after micro-batches 2, 4, 8 and 10
    two_to_four = [1 + 2, 3 + 4, 5 + 6 + 7 + 8, 9 + 10]
    # K = 4, at the second micro-batch 2
    four_to_two = [1 + 2, 3 + 4, 5 + 6, 7 + 8, 9 + 10]
    for seen in run_ranks(fit_with_changing_k, world_size, kind):
        for (losses, tokens, epoch), right in zip(seen, [*[two_to_four] * 5, *[four_to_two] * 2], strict=False):
            assert tokens == [world_size * n for n in right]
            assert losses == pytest.approx([3.0] * len(right), abs=1e-12)
            assert epoch == pytest.approx(3.0, abs=1e-12)


def fit_and_write(rank: int, world_size: int, folder: str) -> None:
    trainer = make_trainer(
        world_size,
        accumulate_grad_batches=4,
        callbacks=[SetsK("on_train_batch_end", 5, 2), TokenMeanMetric()],
        logger=CSVLogger(folder, name="", version=""),
    )
    trainer.fit(ScalarModule(), make_loader(THREES))


def test_a_change_of_k_writes_no_value_twice(tmp_path: Any) -> None:
    # Lightning takes the change to 2 after the sixth micro-batch for an update, and writes
    run_ranks(fit_and_write, 1, str(tmp_path))
    tokens = [float(row["train_tokens"]) for row in read_csv(tmp_path) if row["train_tokens"]]
    assert tokens == [1 + 2 + 3 + 4, 5 + 6 + 7 + 8, 9 + 10]


# ---- losses of one element


class ReturnsOne(ScalarModule):
    """Returns losses of shape [1], on rank 1 only: others may have nothing to add, or another shape."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss.reshape(1) if self.global_rank else loss


def fit_and_validate_ones(rank: int, world_size: int, kind: str) -> tuple[list[float], float]:
    updates = Updates()
    trainer = make_trainer(world_size, strategy=STRATEGIES[kind](), callbacks=[TokenMeanMetric(), updates])
    # plain DDP needs as many batches on every rank; with TokenNormDDP rank 0 has nothing for the second update
    train = [[(3, 1), (1, 5)], [(2, 2), (10, 1)]] if kind == "ddp" else [[(3, 1)], [(2, 2), (10, 1)]]
    validation: list[list[MicroBatch]] = [[], [(2, 2), (10, 1)]]
    trainer.fit(ReturnsOne(), make_loader(train[rank], sized=False), make_loader(validation[rank], sized=False))
    return updates.losses, trainer.callback_metrics["val_loss_per_token"].item()


@pytest.mark.parametrize("kind", ["tokennorm", "ddp"])
def test_losses_of_one_element_where_a_rank_has_none(kind: str) -> None:
    # (3 + 4) / 5, then (5 + 10) / 11 or rank 1's 10 / 10 alone; validation (4 + 10) / 12 on rank 1 alone
    second = 15 / 11 if kind == "ddp" else 1.0
    for losses, validated in run_ranks(fit_and_validate_ones, 2, kind, timeout_s=60):
        assert losses == pytest.approx([7 / 5, second], abs=1e-12)
        assert validated == pytest.approx(14 / 12, abs=1e-12)


# ---- steps that change their batch


class Consumes(ScalarModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.how == "made in the step":
            batch["labels"] = batch.pop("made_of")
        loss = super().loss(batch)
        if self.how == "popped":
            batch.pop("labels")
        elif self.how == "overwritten":
            batch["labels"].fill_(-100)
        elif self.how == "own count":
            batch["n"].zero_()
        return loss


def hides_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"made_of": batch["labels"].clone(), "values": batch["values"]}


def brings_count(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "n": (batch["labels"][:, 1:] != -100).sum()}


def fit_and_consume(rank: int, world_size: int, kind: str) -> dict[str, tuple[list[float], float]]:
    seen = {}
    for how in ("popped", "overwritten", "own count", *(["made in the step"] if kind == "single device" else [])):
        collate = {"own count": brings_count, "made in the step": hides_labels}.get(how, copy.deepcopy)
        count = (lambda batch: batch["n"]) if how == "own count" else None
        updates = Updates()
        trainer = make_trainer(
            world_size,
            strategy=TokenNormDDP(count_tokens=count) if kind == "tokennorm" else STRATEGIES[kind](),
            accumulate_grad_batches=3,
            callbacks=[TokenMeanMetric(count_tokens=count), updates],
        )
        loaders = [DataLoader(Batches(R1[rank]), batch_size=None, collate_fn=collate) for _ in range(2)]
        trainer.fit(Consumes(how), *loaders)
        seen[how] = updates.losses, trainer.callback_metrics["val_loss_per_token"].item()
    return seen


@KINDS
def test_steps_may_change_their_batch(kind: str) -> None:
    world_size = 1 if kind == "single device" else 2
    right = 16 / 8 if world_size == 1 else 42 / 24
    for seen in run_ranks(fit_and_consume, world_size, kind):
        for losses, validated in seen.values():
            assert losses == pytest.approx([right], abs=1e-12)
            assert validated == pytest.approx(right, abs=1e-12)


class WithoutLoss(ScalarModule):
    """Validates on batches without labels and returns nothing."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert "labels" not in batch


def test_a_step_without_a_loss_needs_no_labels() -> None:
    trainer = make_trainer(1, callbacks=[TokenMeanMetric()])
    loader = DataLoader(Batches(R1[0]), batch_size=None, collate_fn=hides_labels)
    with pytest.warns(UserWarning, match=r"`WithoutLoss.validation_step` returned no loss for some batches"):
        trainer.validate(WithoutLoss(), loader, verbose=False)
    assert math.isnan(trainer.callback_metrics["val_loss_per_token"].item())


class WithoutLabels(ScalarModule):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        batch.clear()
        return torch.zeros(())


def test_the_error_of_a_count_shows_the_batch_as_it_was() -> None:
    trainer = make_trainer(1, callbacks=[TokenMeanMetric()])
    loader = DataLoader(Batches(R1[0]), batch_size=None, collate_fn=hides_labels)
    with pytest.raises(ValueError, match=r"found no labels at `labels='labels'`. The batch is a dict that holds.*made"):
        trainer.validate(WithoutLabels(), loader, verbose=False)


class SkipsSome(ScalarModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        """Without a loss there is none to record."""


class EndsEpoch(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.ends = batch_idx == 4


class EndsEpochEarly(SkipsSome):
    ends = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.ends else None


def test_steps_that_return_none_and_epochs_that_end_early() -> None:
    # windows of two: (3, 1) and nothing; nothing and (2, 6); the fifth batch ends the epoch
    updates = Updates()
    trainer = make_trainer(1, accumulate_grad_batches=2, callbacks=[TokenMeanMetric(), updates, EndsEpoch()])
    trainer.fit(EndsEpochEarly(), make_loader([(3, 1), (1, 5), (4, 2), (2, 6), (7, 9), (7, 9)]))
    assert (updates.losses, updates.tokens) == ([1.0, 6.0], [3, 2])
    assert trainer.callback_metrics["train_loss_per_token_epoch"].item() == pytest.approx(15 / 5, abs=1e-12)


class Fetches(ScalarModule):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


def test_steps_that_fetch_their_batches() -> None:
    updates = Updates()
    trainer = make_trainer(1, callbacks=[TokenMeanMetric(), updates])
    trainer.fit(Fetches(), make_loader([(3, 1), (1, 5), (4, 2)]))
    assert (updates.losses, updates.tokens) == ([1.0, 5.0, 2.0], [3, 1, 4])


# ---- who monitors the value of an update

FOUR = [(2, 1.0), (2, 2.0), (2, 3.0), (2, 4.0)]


def fit_monitored(rank: int, world_size: int, kind: str, folder: str, monitor: str | None) -> list[float]:
    # https://github.com/Lightning-AI/pytorch-lightning/issues/10718
    checkpoint = ModelCheckpoint(
        folder,
        filename="{step}" if monitor else "{step}-{train_loss_per_token_step:.1f}",
        monitor=monitor,
        every_n_train_steps=1,
        save_top_k=-1,
    )
    trainer = make_trainer(
        world_size,
        strategy=STRATEGIES[kind](),
        callbacks=[checkpoint, TokenMeanMetric()],
        enable_checkpointing=True,
        log_every_n_steps=2,
    )
    trainer.fit(ScalarModule(), make_loader([(n, x + rank) for n, x in FOUR]))
    if monitor:
        return [float(score) for score in checkpoint.best_k_models.values()]
    from pathlib import Path

    return sorted(float(path.stem.rpartition("=")[2]) for path in Path(folder).glob("*.ckpt"))


@KINDS
@pytest.mark.parametrize("monitor", ["train_loss_per_token_step", "train_loss_per_token", None])
def test_a_checkpoint_is_judged_by_its_own_update(kind: str, monitor: str | None, tmp_path: Any) -> None:
    world_size = 1 if kind == "single device" else 2
    right = [1.0, 2.0, 3.0, 4.0] if world_size == 1 else [1.5, 2.5, 3.5, 4.5]
    assert run_ranks(fit_monitored, world_size, kind, str(tmp_path), monitor)[0] == right


class Plateaus(ScalarModule):
    def __init__(self) -> None:
        super().__init__()
        self.judged: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "train_loss_per_token_step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.judged.append(metric.item())


def test_a_plateau_scheduler_sees_every_update() -> None:
    module = Plateaus()
    make_trainer(1, callbacks=[TokenMeanMetric()], log_every_n_steps=2).fit(module, make_loader(FOUR))
    assert module.judged == [1.0, 2.0, 3.0, 4.0]


def test_an_early_stop_sees_the_last_update() -> None:
    stop = EarlyStopping("train_loss_per_token_step", check_on_train_epoch_end=True)
    trainer = make_trainer(1, callbacks=[stop, TokenMeanMetric()], log_every_n_steps=3)
    trainer.fit(ScalarModule(), make_loader(FOUR))
    assert stop.best_score.item() == 4.0


class Prunes(Callback):
    """As of a hyperparameter search: not one that Lightning runs on all ranks alike."""

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor


@pytest.mark.parametrize(
    ("monitor", "log_every", "warns"),
    [
        ("train_loss_per_token_step", 50, True),
        ("train_loss_per_token", 50, True),
        ("train_loss_per_token_step", 1, False),
        ("train_loss_per_token_epoch", 50, False),
        ("val_loss_per_token", 50, False),
    ],
)
def test_other_monitors_are_warned_of(monitor: str, log_every: int, warns: bool) -> None:
    trainer = make_trainer(1, callbacks=[TokenMeanMetric(), Prunes(monitor)], log_every_n_steps=log_every)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(ScalarModule(), make_loader(FOUR))
    told = [str(warning.message) for warning in caught if "`Prunes` monitors" in str(warning.message)]
    assert bool(told) == warns
    assert all("Set `Trainer(log_every_n_steps=1)`" in text and "train_loss_per_token_epoch" in text for text in told)


# ---- what a bar shows


class Shown(Callback):
    """Reads the bar as it reads itself."""

    def __init__(self) -> None:
        self.at_batches: list[dict[str, Any]] = []
        self.at_validations: list[dict[str, Any]] = []
        self.at_epochs: list[dict[str, Any]] = []

    def _read(self, trainer: Any, module: Any) -> dict[str, Any]:
        return dict(trainer.progress_bar_callback.get_metrics(trainer, module))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.at_batches.append(self._read(trainer, module))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.at_validations.append(self._read(trainer, module))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.at_epochs.append(self._read(trainer, module))


class SeveralLoaders(ScalarModule):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.loss(batch)


@pytest.mark.parametrize("bar_first", [True, False])
def test_short_names_in_the_bar_and_full_ones_elsewhere(bar_first: bool, tmp_path: Any) -> None:
    shown, bar = Shown(), TQDMProgressBar()
    callbacks = [bar, shown, TokenMeanMetric()] if bar_first else [TokenMeanMetric(), bar, shown]
    trainer = make_trainer(
        1,
        callbacks=callbacks,
        enable_progress_bar=True,
        max_epochs=2,
        accumulate_grad_batches=2,
        logger=CSVLogger(tmp_path, name="", version=0),
    )
    trainer.fit(ScalarModule(), make_loader(FOUR), make_loader(R1[0]))
    # updates (2 + 4) / 4 and (6 + 8) / 4; the epoch 20 / 8; validation 16 / 8
    assert shown.at_validations[0] == {"loss/tok": 3.5, "val/tok": 2.0, "v_num": 0}
    assert shown.at_epochs == [{"val/tok": 2.0, "epoch/tok": 2.5, "v_num": 0}] * 2
    assert shown.at_batches[5] == {"loss/tok": 1.5 if not bar_first else 3.5, "val/tok": 2.0, "v_num": 0}
    full = {"train_loss_per_token", "train_loss_per_token_step", "train_loss_per_token_epoch"}
    assert set(trainer.callback_metrics) == {*full, "train_tokens", "val_loss_per_token"}
    columns = set(read_csv(tmp_path / "version_0")[0])
    assert columns == {
        "train_loss_per_token_step",
        "train_loss_per_token_epoch",
        "train_tokens",
        "val_loss_per_token",
    } | {
        "epoch",
        "step",
    }


def test_the_values_fit_into_80_columns() -> None:
    for shown in ({"loss/tok": "2.310", "val/tok": "2.450"}, {"val/tok": "2.450", "epoch/tok": "2.500"}):
        postfix = ", ".join(f"{key}={value}" for key, value in [*shown.items(), ("v_num", 0)])
        line = tqdm.format_meter(500, 500, 33.8, ncols=80, prefix="Epoch 0", postfix=postfix)
        assert all(f"{key}={value}" in line for key, value in shown.items())


def test_names_of_several_loaders_of_a_perplexity_and_of_others() -> None:
    class LogsToo(SeveralLoaders):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("ppl", 7.0, prog_bar=True)
            return loss

    shown = Shown()
    trainer = make_trainer(
        1, callbacks=[TokenMeanMetric("nll_per_token", perplexity=True), shown], enable_progress_bar=True
    )
    trainer.fit(LogsToo(), make_loader(FOUR), [make_loader(R1[0]), make_loader(R1[1])])
    # a short name that the module shows already is left to it
    assert {"ppl": 7.0, "nll/tok": 2.0}.items() <= shown.at_batches[1].items()
    assert shown.at_batches[1]["train_perplexity_step"] == pytest.approx(math.exp(2), abs=1e-9)
    assert list(shown.at_epochs[0]) == [
        "ppl",  # the module's own
        *("val_nll/tok/0", "val_ppl/0", "val_nll/tok/1", "val_ppl/1"),
        *("epoch_nll/tok", "epoch_ppl"),
    ]
