"""What is logged: sum S / sum N over the window, the epoch, validation and test, on all ranks, under any strategy."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R0, R00, R1, R2, ScalarModule, Table, make_loader, make_trainer

NAMES = {"tokennorm": TokenNormDDP, "ddp": DDPStrategy}


class Seen(Callback):
    """What a user sees after each micro-batch: the progress bar's entries and the logger's."""

    def __init__(self) -> None:
        self.bar: list[float | None] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.epoch: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.bar.append(trainer.progress_bar_metrics.get("train_loss_per_token_step"))

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.bar.append(trainer.progress_bar_metrics.get("train_loss_per_token_step"))
        self.epoch.append(trainer.callback_metrics["train_loss_per_token_epoch"].item())


def count_collectives(counter: Counter[str]) -> None:
    """Count what torch.distributed is asked for from now on, DDP's own bucket reductions aside."""
    import torch.distributed as dist

    for name in ("all_gather", "all_gather_into_tensor", "all_reduce", "barrier", "broadcast", "all_gather_object"):
        original = getattr(dist, name)

        def counted(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            counter[_name] += 1
            return _original(*args, **kwargs)

        setattr(dist, name, counted)


def fit(
    rank: int,
    world_size: int,
    table: Table,
    accumulate: int,
    kind: str = "tokennorm",
    reduction: str = "mean",
    folder: str | None = None,
    trainer_options: dict[str, Any] | None = None,
    perplexity: bool = False,
) -> dict[str, Any]:
    seen = Seen()
    module = ScalarModule(reduction)
    options = {"loss_reduction": reduction} if kind == "tokennorm" else {}
    metric = TokenMeanMetric(perplexity=perplexity, **({} if options else {"loss_reduction": reduction}))
    trainer = make_trainer(
        world_size,
        strategy=NAMES[kind](**options) if kind in NAMES else "auto",
        accumulate_grad_batches=accumulate,
        callbacks=[metric, seen],
        logger=CSVLogger(folder, name="", version="") if folder else False,
        **(trainer_options or {}),
    )
    trainer.fit(module, make_loader(table[rank]))
    return {
        "bar": seen.bar,
        "epoch": seen.epoch,
        "callback": {key: value.item() for key, value in trainer.callback_metrics.items()},
    }


def read_csv(folder: Any) -> list[dict[str, str]]:
    import csv

    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", ["tokennorm", "ddp"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_train_value_once_per_update_and_per_epoch(kind: str, reduction: str, tmp_path: Any) -> None:
    # t = 1: R1's window is 42 / 24, the tail 22 / 16, the epoch 64 / 40 = 1.6 and not their mean 1.5625
    for result in run_ranks(fit, 2, R2, 3, kind, reduction, str(tmp_path)):
        assert result["bar"] == [None, None, None, 1.75, 1.75, 1.375]
        assert result["epoch"] == [pytest.approx(1.6, abs=1e-12)]
        assert result["callback"]["train_loss_per_token"] == pytest.approx(1.6, abs=1e-12)
        assert result["callback"]["train_tokens"] == 16
    rows = [row for row in read_csv(tmp_path) if row["train_loss_per_token_step"]]
    assert [(row["step"], float(row["train_loss_per_token_step"])) for row in rows] == [("0", 1.75), ("1", 1.375)]
    assert [float(row["train_tokens"]) for row in rows] == [24, 16]


def test_on_a_single_device() -> None:
    # rank 0's rows of R2: (3 + 5 + 8) / 8 = 2, then (3 + 5) / 4 = 2; epoch 24 / 12 = 2
    (result,) = run_ranks(fit, 1, R2, 3, "single device")
    assert result["bar"] == [None, None, None, 2.0, 2.0, 2.0]
    assert result["epoch"] == [2.0]


def test_unlogged_updates_keep_the_bar_and_log_nothing(tmp_path: Any) -> None:
    # four updates of one micro-batch each, every second is logged: the second (1 + 10) / 11 and the fourth 11 / 11
    table = [[(3, 1), (1, 1), (4, 2), (1, 1)], [(2, 2), (10, 1), (4, 3), (10, 1)]]
    for result in run_ranks(fit, 2, table, 1, "tokennorm", "mean", str(tmp_path), {"log_every_n_steps": 2}):
        assert result["bar"] == [None, None, 1.0, 1.0, 1.0]
        # 7 + 11 + 20 + 11 over 5 + 11 + 8 + 11: the epoch counts the unlogged updates, too
        assert result["epoch"] == [pytest.approx(49 / 35, abs=1e-12)]
    assert [row["step"] for row in read_csv(tmp_path) if row["train_loss_per_token_step"]] == ["1", "3"]


class Stops(Callback):
    """Ends training at the third update, where Lightning writes to the loggers whatever `log_every_n_steps` says."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 3


def fit_and_stop(rank: int, world_size: int, folder: str) -> None:
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        callbacks=[TokenMeanMetric(), Stops()],
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=2,
    )
    trainer.fit(ScalarModule(), make_loader([(3, rank + x) for x in (1, 2, 3, 4)]))


def test_a_value_is_never_logged_again_as_anothers(tmp_path: Any) -> None:
    run_ranks(fit_and_stop, 2, str(tmp_path))
    # update 1: (3 * 2 + 3 * 3) / 6; what is written at update 2 has no value of ours
    for key, value in (("train_loss_per_token_step", "2.5"), ("train_tokens", "6")):
        assert {row["step"]: row[key] for row in read_csv(tmp_path) if row[key]} == {"1": value}


def test_empty_rank_and_empty_window() -> None:
    for result in run_ranks(fit, 2, R0, 2):
        assert result["bar"][-1] == 2.0  # 12 / 6, rank 0's NaN means are replaced
    for result in run_ranks(fit, 2, R00, 2):
        assert math.isnan(result["bar"][-1])
        assert result["callback"]["train_tokens"] == 0


def test_nan_stays_visible() -> None:
    table = [R1[0], [(2, 2), (10, math.nan), (4, 3)]]
    for result in run_ranks(fit, 2, table, 3):
        assert math.isnan(result["bar"][-1])
        assert math.isnan(result["epoch"][0])


def test_perplexity() -> None:
    for result in run_ranks(fit, 2, R2, 3, "tokennorm", "mean", None, None, True):
        assert result["callback"]["train_perplexity_step"] == pytest.approx(math.exp(1.375), abs=1e-12)
        assert result["callback"]["train_perplexity"] == pytest.approx(math.exp(1.6), abs=1e-12)


def evaluate(rank: int, world_size: int, tables: list[Table], kind: str, what: str = "validate") -> dict[str, float]:
    metric = TokenMeanMetric()
    trainer = make_trainer(world_size, strategy=NAMES[kind](), callbacks=[metric])
    loaders = [make_loader(table[rank]) for table in tables]
    return getattr(trainer, what)(_Evaluated(), loaders if len(loaders) > 1 else loaders[0], verbose=False)[0] | {
        key: value.item() for key, value in trainer.callback_metrics.items()
    }


class _Evaluated(ScalarModule):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self.loss(batch)

    test_step = validation_step


@pytest.mark.parametrize("kind", ["tokennorm", "ddp"])
@pytest.mark.parametrize(("what", "key"), [("validate", "val_loss_per_token"), ("test", "test_loss_per_token")])
def test_evaluation_over_all_ranks(kind: str, what: str, key: str) -> None:
    # the same 24 tokens on one and on two ranks; the mean of the ranks' means would be (2 + 26 / 16) / 2 = 1.8125
    one = [[micro_batch for rank in R1 for micro_batch in rank]]
    for world_size, table in ((1, one), (2, R1)):
        for result in run_ranks(evaluate, world_size, [table], kind, what):
            assert result[key] == pytest.approx(1.75, abs=1e-12)


def test_evaluation_with_an_empty_rank_and_with_nobody() -> None:
    for result in run_ranks(evaluate, 2, [R0], "tokennorm"):
        assert result["val_loss_per_token"] == 2.0
    for result in run_ranks(evaluate, 2, [R00], "tokennorm"):
        assert math.isnan(result["val_loss_per_token"])


def test_several_validation_loaders() -> None:
    for result in run_ranks(evaluate, 2, [R1, R0], "tokennorm"):
        assert result["val_loss_per_token/dataloader_idx_0"] == pytest.approx(1.75, abs=1e-12)


def fit_and_count(rank: int, world_size: int, kind: str, log_every_n_steps: int) -> Counter[str]:
    """Collectives of a fit of six updates with the callback, minus those of the same fit without it."""
    counters = []
    counter: Counter[str] = Counter()
    count_collectives(counter)
    for callbacks in ([], [], [TokenMeanMetric()]):  # the very first fit sets up more than the later ones
        counter.clear()
        trainer = make_trainer(
            world_size, strategy=NAMES[kind](), callbacks=callbacks, log_every_n_steps=log_every_n_steps
        )
        trainer.fit(ScalarModule(), make_loader([(3, 1)] * 6))
        counters.append(Counter(counter))
    counters[2].subtract(counters[1])
    return counters[2]


@pytest.mark.parametrize("kind", ["tokennorm", "ddp"])
def test_no_collective_except_where_a_value_is_logged(kind: str) -> None:
    # never logged by step: what remains is the epoch's value, once
    for epoch_only in run_ranks(fit_and_count, 2, kind, 100):
        every_second = run_ranks(fit_and_count, 2, kind, 2)[0]
        # three logged updates and the epoch cost four times what the epoch alone costs
        assert sum(epoch_only.values()) > 0
        assert {name: n for name, n in every_second.items() if n} == {
            name: 4 * n for name, n in epoch_only.items() if n
        }
