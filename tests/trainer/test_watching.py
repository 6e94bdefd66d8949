"""`TokenWeightMonitor`, `TokenThroughput` and `TokenBudget`, under any strategy."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_tokennorm import (
    SupervisedTokens,
    TokenBudget,
    TokenMeanMetric,
    TokenNormDDP,
    TokenThroughput,
    TokenWeightMonitor,
)
from lightning_tokennorm.callbacks.throughput import tokens_without_padding
from lightning_tokennorm.callbacks.weight_monitor import WeightSpread
from tests.distributed.test_metric import read_csv
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R0, R1, R2, ScalarModule, Table, make_loader, make_trainer
from tests.trainer.test_precision import Rig, precision_options
from tests.trainer.test_token_mean import fresh

STRATEGIES: dict[str, Callable[[], Any]] = {
    "tokennorm": TokenNormDDP,
    "ddp": DDPStrategy,
    "single device": lambda: "auto",
}
KINDS = pytest.mark.parametrize("kind", list(STRATEGIES))


class PopsLabels(ScalarModule):
    """Takes the labels out of the batch, as `model(**batch, labels=batch.pop("labels"))` does."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inner = {"labels": batch.pop("labels"), "values": batch["values"]}
        return super().training_step(inner, batch_idx)


class Updates(Callback):
    """What `callback_metrics` hold after each update, and how often ranks were asked to gather since the last."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.seen: list[tuple[Any, ...]] = []
        self._updates = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self._updates:
            self._updates = trainer.global_step
            values = [trainer.callback_metrics.get(name) for name in self.names]
            self.seen.append(tuple(None if value is None else float(value) for value in values))


# ---- weights


SPREAD = "train_token_weight_spread"


def fit_with_monitor(
    rank: int, world_size: int, kind: str, table: Table, every: int, folder: str | None, monitor: bool = False
) -> list[Any]:
    updates = Updates(SPREAD)
    watches: list[Callback] = [EarlyStopping(SPREAD, patience=99, check_on_train_epoch_end=False)] if monitor else []
    trainer = make_trainer(
        world_size,
        strategy=STRATEGIES[kind](),
        accumulate_grad_batches=3,
        log_every_n_steps=every,
        callbacks=[TokenWeightMonitor(), updates, *watches],
        logger=CSVLogger(folder, name="", version="") if folder else False,
    )
    trainer.fit(PopsLabels(), fresh(table[rank]))
    return updates.seen


@KINDS
def test_spread_of_each_update(kind: str, tmp_path: Path) -> None:
    # R2, both ranks: 3 1 4 and 2 10 4 tokens, so 10 / 1; then 3 1 and 2 10. Rank 0 alone: 4 / 1, then 3 / 1.
    right = [(4.0,), (3.0,)] if kind == "single device" else [(10.0,), (10.0,)]
    for seen in run_ranks(fit_with_monitor, 1 if kind == "single device" else 2, kind, R2, 1, str(tmp_path)):
        assert seen == right
    assert [(row["step"], (float(row[SPREAD]),)) for row in read_csv(tmp_path)] == [("0", right[0]), ("1", right[1])]


@pytest.mark.parametrize("kind", ["tokennorm", "ddp"])
def test_spread_is_exchanged_only_where_it_is_looked_at(kind: str, tmp_path: Path) -> None:
    table: Table = [[*R2[0], (3, 1)], [*R2[1], (6, 1)]]  # the second window has 3 1 3 and 2 10 6 tokens
    for seen in run_ranks(fit_with_monitor, 2, kind, table, 2, None):
        assert seen == [(None,), (10.0,)]
    log = tmp_path / "log"
    long: Table = [[(1, 1), (2, 1), (3, 1)] * 5, [(1, 1), (4, 1), (2, 1)] * 5]
    run_ranks(fit_with_monitor, 2, kind, long, 2, str(log))  # what is logged once is not logged again
    assert [(row["step"], row[SPREAD]) for row in read_csv(log) if row[SPREAD]] == [("1", "4.0"), ("3", "4.0")]
    for seen in run_ranks(fit_with_monitor, 2, kind, [R1[0], R1[0]], 2, None, True):  # monitored
        assert seen == [(4.0,)]


def test_spread_leaves_empty_micro_batches_out_and_uneven_ranks_are_padded() -> None:
    # K = 3, R0: rank 0 has no token, rank 1 has 4 and 2
    for seen in run_ranks(fit_with_monitor, 2, "tokennorm", R0, 1, None):
        assert seen == [(2.0,)]
    # rank 1 has ended after 8 tokens; what rank 0 runs beside it is not counted twice
    for seen in run_ranks(fit_with_monitor, 2, "tokennorm", [[(2, 1), (4, 1), (1, 1)], [(8, 1)]], 1, None):
        assert seen == [(8.0,)]
    (seen,) = run_ranks(fit_with_monitor, 1, "ddp", [[(0, 0), (0, 0), (0, 0)]], 1, None)
    assert math.isnan(seen[0][0])


def test_spread_of_counts_on_a_device_and_of_weights() -> None:
    for counts in ([3, 0, 12, 4.5], [torch.tensor(n) for n in (3, 0, 12, 4.5)]):
        spread = WeightSpread()
        for count in counts:
            spread.update(count)
        assert spread.compute() == 4.0


# ---- what the weights do to the gradient


class Checkpointed(ScalarModule):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inner = super().loss
        loss: Tensor = checkpoint(lambda t: inner(batch), self.t, use_reentrant=True)
        return loss


def fit_with_gradients(
    rank: int, world_size: int, kind: str, table: Table, accumulate: int, windows: int, reduction: str = "mean"
) -> tuple[list[float], list[Any], list[float]]:
    monitor = TokenWeightMonitor(gradient_windows=windows)
    updates = Updates("train_gradient_distance")
    strategy = TokenNormDDP(loss_reduction="sum") if reduction == "sum" else STRATEGIES[kind]()
    trainer = make_trainer(
        world_size,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        callbacks=[monitor, TokenMeanMetric(), updates],
    )
    module = ScalarModule(reduction)
    trainer.fit(module, make_loader(table[rank]))
    return monitor.gradient_distances, updates.seen, module.gradients


@KINDS
def test_distance_of_the_gradients(kind: str) -> None:
    # The gradient of a micro-batch's mean is its x. R2, both ranks: (1 + 5 + 2 + 2 + 1 + 3) / 6 = 7/3 where 42 / 24 =
    # 7/4 is right, off by 1/3; then (1 + 5 + 2 + 1) / 6 = 3/2 where 22 / 16 = 11/8, off by 1/11. Rank 0 alone: 8/3
    # where 16 / 8 = 2, off by 1/3, then 6 / 3 = 2 where 8 / 4 = 2.
    alone = kind == "single device"
    right = [1 / 3, 0.0] if alone else [1 / 3, 1 / 11]
    trained = {"tokennorm": [1.75, 1.375], "ddp": [7 / 3, 3 / 2], "single device": [8 / 3, 2.0]}[kind]
    for distances, logged, gradients in run_ranks(fit_with_gradients, 1 if alone else 2, kind, R2, 3, 5):
        assert distances == pytest.approx(right, abs=1e-12)
        assert [each[0] for each in logged] == pytest.approx(right, abs=1e-6)
        assert gradients == pytest.approx(trained, abs=1e-12)  # as without the monitor


def test_distance_over_fewer_windows_of_sums_and_with_an_empty_rank() -> None:
    for distances, logged, gradients in run_ranks(fit_with_gradients, 2, "tokennorm", R2, 3, 1, "sum"):
        assert distances == [pytest.approx(1 / 3, abs=1e-12)]
        assert logged[0][0] == pytest.approx(1 / 3, abs=1e-6)
        assert gradients == pytest.approx([1.75, 1.375], abs=1e-12)
    # rank 0 without tokens: (1 + 4) / (2 * 2) where 12 / 6 = 2 is right, off by 3/8
    for distances, _, gradients in run_ranks(fit_with_gradients, 2, "tokennorm", R0, 2, 1):
        assert distances == [pytest.approx(3 / 8, abs=1e-12)]
        assert gradients == [2.0]


class SetsKAtBatch(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.batch_idx == 2:
            trainer.accumulate_grad_batches = 1


@pytest.mark.parametrize("monitor_first", [True, False])
def test_who_watches_losses_beside_the_monitor_goes_on_when_it_ends(monitor_first: bool) -> None:
    callbacks: list[Callback] = [TokenWeightMonitor(gradient_windows=1), TokenMeanMetric()]
    updates = Updates("train_loss_per_token_step")
    callbacks = callbacks if monitor_first else callbacks[::-1]
    trainer = make_trainer(1, accumulate_grad_batches=2, callbacks=[*callbacks, updates, SetsKAtBatch()])
    # K = 2, then 1: losses of 3 per token stay 3, since what they were divided by is seen after the first window, too
    for _ in range(2):
        updates.seen.clear()
        trainer.accumulate_grad_batches = 2
        trainer.fit(ScalarModule(), make_loader([(2, 3.0)] * 4))
        trainer.fit_loop.epoch_progress.reset()
        assert updates.seen == [(3.0,)] * 3


def test_gradients_that_cannot_be_taken() -> None:
    monitor = TokenWeightMonitor(gradient_windows=2)
    trainer = make_trainer(1, accumulate_grad_batches=3, callbacks=[monitor])
    module = Checkpointed()
    with pytest.warns(UserWarning, match=r"gives up, since gradients cannot be taken beside the training"):
        trainer.fit(module, make_loader(R2[0]))
    assert monitor.gradient_distances == []
    assert module.gradients == pytest.approx([8 / 3, 2.0], abs=1e-12)


# ---- throughput


class Clock:
    """Stands in for `time.perf_counter`: one second per micro-batch, 100 for each validation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticks(Callback):
    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.now += self.seconds

    def on_validation_batch_start(self, *_: Any) -> None:
        self.clock.now += 100


class Tokens(ScalarModule):
    """Adds what a Hugging Face collator would have put there."""

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        mask = torch.zeros(1, 13, dtype=torch.long)
        mask[:, :8] = 1
        return {**batch, "input_ids": torch.zeros(1, 13), "attention_mask": mask}


def fit_with_throughput(
    rank: int, world_size: int, kind: str, table: Table, folder: str, beside: bool = False
) -> list[Any]:
    from lightning_tokennorm.callbacks import throughput

    clock = Clock()
    throughput.time = type("time", (), {"perf_counter": clock})  # type: ignore[attr-defined]
    updates = Updates("train_supervised_tokens_per_sec", "train_tokens_per_sec")
    lightnings = [ThroughputMonitor(batch_size_fn=lambda batch: 1, length_fn=lambda batch: 13, window_size=2)]
    trainer = make_trainer(
        world_size,
        strategy=STRATEGIES[kind](),
        accumulate_grad_batches=3,
        val_check_interval=2,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        callbacks=[
            TokenThroughput(count_tokens=SupervisedTokens() if beside else None),
            # the slower rank takes three seconds per micro-batch, the faster one: two on average
            Ticks(clock, 1 + 2 * rank if world_size > 1 else 2),
            updates,
            *(lightnings if beside else []),
        ],
        logger=CSVLogger(folder, name="", version="") if beside else False,
    )
    trainer.fit(Tokens(), make_loader(table[rank]), make_loader(R1[rank]))
    return updates.seen


@KINDS
def test_tokens_per_second(kind: str, tmp_path: Path) -> None:
    # Three micro-batches take 6 seconds on average, two take 4; 24 and 16 supervised tokens over both ranks, 8 and 4 on
    # one. Eight positions of each micro-batch are no padding. Validations between take no time.
    right = [(8 / 6, 24 / 6), (4 / 4, 16 / 4)] if kind == "single device" else [(24 / 6, 48 / 6), (16 / 4, 32 / 4)]
    world_size = 1 if kind == "single device" else 2
    for seen in run_ranks(fit_with_throughput, world_size, kind, R2, str(tmp_path)):
        assert seen == [pytest.approx(each, abs=1e-12) for each in right]


def test_padded_micro_batches_are_not_counted_and_lightnings_own_monitor_works_beside(tmp_path: Path) -> None:
    # rank 1 has one micro-batch of three: 8 + 2 tokens in 6 seconds, and 8 positions in each of 4 micro-batches
    table: Table = [R1[0], [(2, 1)]]
    for seen in run_ranks(fit_with_throughput, 2, "tokennorm", table, str(tmp_path), True):
        assert seen == [pytest.approx((10 / 6, 32 / 6), abs=1e-12)]
    columns = read_csv(tmp_path)[0].keys()
    assert {"train_tokens_per_sec", "train_supervised_tokens_per_sec"} <= columns
    assert any(column.startswith("train/") for column in columns)


def test_without_input_ids_a_warning_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = Updates("train_supervised_tokens_per_sec", "train_tokens_per_sec")
    trainer = make_trainer(1, accumulate_grad_batches=3, callbacks=[TokenThroughput(), updates])
    with pytest.warns(UserWarning, match=r"found neither `attention_mask` nor `input_ids`.*`count_all_tokens`"):
        trainer.fit(ScalarModule(), make_loader(R1[0]))
    assert updates.seen[0][0] > 0
    assert updates.seen[0][1] is None
    counted = Updates("train_tokens_per_sec")
    own = TokenThroughput(count_all_tokens=lambda batch: batch["labels"].numel())
    start = time.perf_counter()
    make_trainer(1, accumulate_grad_batches=3, callbacks=[own, counted]).fit(ScalarModule(), make_loader(R1[0]))
    assert counted.seen[0][0] >= 39 / (time.perf_counter() - start)


def test_tokens_without_padding() -> None:
    ids, mask = torch.zeros(2, 5), torch.tensor([[1, 1, 0, 0, 0], [2, 2, 2, 0, 0]])
    assert tokens_without_padding({"input_ids": ids, "attention_mask": mask}) == 5
    assert tokens_without_padding({"input_ids": ids, "attention_mask": torch.zeros(2, 1, 5, 5)}) == 10
    assert tokens_without_padding({"input_ids": ids}) == 10
    assert tokens_without_padding(type("Batch", (), {"input_ids": ids})()) == 10
    assert tokens_without_padding((ids,)) is None


# ---- budget


def fit_to_budget(
    rank: int, world_size: int, kind: str, table: Table, budget: float, options: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    options = {"accumulate_grad_batches": 3, "max_epochs": 4, **(options or {})}
    resume, saved = options.pop("resume", None), options.pop("save", None)
    callback = TokenBudget(budget)
    saves = [ModelCheckpoint(saved, every_n_train_steps=1, save_top_k=-1, filename="{step}")] if saved else []
    trainer = make_trainer(
        world_size,
        strategy=STRATEGIES[kind](),
        callbacks=[callback, TokenMeanMetric(), *saves],
        **{"enable_checkpointing": bool(saved), **options},
    )
    module = ScalarModule()
    trainer.fit(module, make_loader(table[rank]), ckpt_path=resume)
    return trainer.global_step, callback.tokens, len(module.gradients)


@KINDS
@pytest.mark.parametrize(
    ("budget", "updates", "tokens"),
    # R2 has 24 and 16 tokens per epoch: 24 40 64 80 after each update. Rank 0 alone: 8 12 20 24.
    [((24, 8), 1, (24, 8)), ((24.5, 8.5), 2, (40, 12)), ((41, 13), 3, (64, 20)), ((1e9, 1e9), 8, (160, 48))],
)
def test_stops_at_the_first_update_that_reaches_the_budget(
    kind: str, budget: tuple[float, float], updates: int, tokens: tuple[int, int]
) -> None:
    alone = kind == "single device"
    for seen in run_ranks(fit_to_budget, 1 if alone else 2, kind, R2, budget[alone]):
        assert seen == (updates, tokens[alone], updates)


@pytest.mark.parametrize("kind", ["tokennorm", "ddp"])
def test_a_budget_survives_a_resume(kind: str, tmp_path: Path) -> None:
    run_ranks(fit_to_budget, 2, kind, R2, 30, {"save": str(tmp_path)})  # 40 tokens after two updates
    # from the checkpoint after the first update, inside the epoch: 24 + 16 + 24 = 64
    first, second = tmp_path / "step=1.ckpt", tmp_path / "step=2.ckpt"
    for seen in run_ranks(fit_to_budget, 2, kind, R2, 60, {"resume": first}):
        assert seen == (3, 64, 2)
    for seen in run_ranks(fit_to_budget, 2, kind, R2, 40, {"resume": second}):  # spent already
        assert seen == (2, 40, 0)


def test_updates_that_were_skipped_are_not_trained_on() -> None:
    # windows of 8 and of no token; the last two of 4: 8, 8, 12, 16
    table: Table = [[(3, 1), (5, 1), (0, 0), (0, 0), (1, 1), (3, 1), (2, 1), (2, 1)]]
    (seen,) = run_ranks(fit_to_budget, 1, "tokennorm", table, 9, {"accumulate_grad_batches": 2})
    assert seen[:2] == (3, 12)


def test_updates_that_overflowed_are_not_trained_on() -> None:
    budget = TokenBudget(8)
    trainer = make_trainer(
        1, strategy=TokenNormDDP(), callbacks=[budget], max_epochs=2, **precision_options("16-mixed")
    )
    # 5 tokens whose gradient times the scale overflows, then 3, in each of two epochs
    trainer.fit(Rig("16-mixed"), make_loader([(5, 1e38), (3, 1)]))
    assert (budget.tokens, trainer.global_step) == (6, 4)


class LeavesOut(ScalarModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("strategy", ["auto", "tokennorm_ddp"])
def test_batches_that_a_step_left_out_are_not_trained_on(strategy: str) -> None:
    # rank 0 of R1 without its second micro-batch: 3 + 4
    budget, updates = TokenBudget(1000), Updates(SPREAD)
    trainer = make_trainer(
        1, strategy=strategy, accumulate_grad_batches=3, callbacks=[budget, TokenWeightMonitor(), updates]
    )
    trainer.fit(LeavesOut(), make_loader(R1[0]))
    assert budget.tokens == 7
    assert updates.seen == [(4 / 3,)]


def test_batches_whose_labels_cannot_be_counted() -> None:
    for callback in (TokenWeightMonitor(), TokenThroughput(count_all_tokens=len), TokenBudget(5)):
        trainer = make_trainer(1, callbacks=[copy.deepcopy(callback)])
        with pytest.raises(ValueError, match="found no labels"):
            trainer.fit(_NoLabels(), make_loader(R1[0]))


class _NoLabels(ScalarModule):
    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> Any:
        return {"tokens": batch["labels"], "values": batch["values"]}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step({"labels": batch["tokens"], "values": batch["values"]}, batch_idx)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: TokenBudget(0), ValueError, r"max_tokens=\.\.\.\)` got 0; expected a positive, finite"),
        (lambda: TokenBudget(math.nan), ValueError, "got nan"),
        (lambda: TokenBudget(math.inf), ValueError, "got inf"),
        (lambda: TokenBudget("1e6"), TypeError, "got '1e6'; expected a number"),  # type: ignore[arg-type]
        (lambda: TokenBudget(True), TypeError, "got True"),
        (lambda: TokenBudget(5, count_tokens=5), TypeError, r"`TokenBudget\(count_tokens"),  # type: ignore[arg-type]
        (lambda: TokenWeightMonitor(count_tokens="n"), TypeError, r"`TokenWeightMonitor\(count_tokens"),  # type: ignore[arg-type]
        (lambda: TokenWeightMonitor(gradient_windows=-1), ValueError, r"gradient_windows=\.\.\.\)` got -1"),
        (lambda: TokenWeightMonitor(gradient_windows=1.5), TypeError, r"gradient_windows=\.\.\.\)` got 1\.5"),  # type: ignore[arg-type]
        (lambda: TokenThroughput(count_all_tokens=3), TypeError, r"count_all_tokens=\.\.\.\)` got 3"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
