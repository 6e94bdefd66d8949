"""The ready counters in training: each makes an update the mean over what it counts, on real processes.

One parameter ``t`` = 1 that stays where it is, and per-token losses ``t * x``: so a window's gradient, its mean loss
and what `TokenMeanMetric` logs are the same number, worked out by hand in the table below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_tokennorm import (
    BatchCount,
    PerMicroBatch,
    SupervisedSamples,
    SupervisedTokens,
    TokenBudget,
    TokenMeanMetric,
    TokenNormDDP,
    WeightedTokens,
)
from lightning_tokennorm.testing import assert_partition_invariant
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import ScalarModule, make_trainer
from tests.helpers.tiny_lm import TinyModule, make_samples
from tests.helpers.tiny_lm import collate as make_batch

X = -100
NAN = float("nan")
Batch = dict[str, Any]


# ---- the micro-batches


def rows_of(*rows: Sequence[float], weights: Sequence[Sequence[float]] | None = None) -> Batch:
    """Rows of token values; position 0 of each is live and never predicted, the rest is padding.

    What stands there must not count: the values and weights are 99, and NaN where a label is not live.
    """
    width = 1 + max(map(len, rows), default=0)
    labels = torch.full((len(rows), width), X)
    values = torch.full((len(rows), width), NAN, dtype=torch.float64)
    of_labels = values.clone()
    labels[:, 0], values[:, 0], of_labels[:, 0] = 1, 99.0, 99.0
    for index, row in enumerate(rows):
        labels[index, 1 : 1 + len(row)] = 1
        values[index, 1 : 1 + len(row)] = torch.tensor(row, dtype=torch.float64)
        if weights is not None:
            of_labels[index, 1 : 1 + len(row)] = torch.tensor(weights[index], dtype=torch.float64)
    return {"labels": labels, "values": values, "loss_weights": of_labels}


def weighing(values: Sequence[float], weights: Sequence[float]) -> Batch:
    return rows_of(values, weights=[weights])


def bringing(total: float, num_tokens: Any) -> Batch:
    """A loss sum, and what the collate function says that it is over. There is no label."""
    return {"total": total, "num_tokens": num_tokens}


def balance(value: float) -> Batch:
    """A term that has a value for each micro-batch."""
    return {"balance": value, "labels": torch.full((1, 4), X)}


# ---- the losses that users write; a mean over nothing is 0 / 0


def live_part(batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    live = batch["labels"][:, 1:] != X
    return live, torch.where(live, batch[name][:, 1:], 0.0)


def token_mean(batch: Batch, t: Tensor) -> Tensor:
    live, values = live_part(batch, "values")
    return (t * values).sum() / live.sum()


def sample_mean(batch: Batch, t: Tensor) -> Tensor:
    live, values = live_part(batch, "values")
    has_one = live.any(1)
    means = (t * values).sum(1)[has_one] / live.sum(1)[has_one]
    return means.sum() / has_one.sum()


def weighted_mean(batch: Batch, t: Tensor) -> Tensor:
    _, values = live_part(batch, "values")
    _, weights = live_part(batch, "loss_weights")
    return (t * values * weights).sum() / weights.sum()


def brought_mean(batch: Batch, t: Tensor) -> Tensor:
    return t * batch["total"] / torch.as_tensor(batch["num_tokens"], dtype=torch.float64)


def balance_of(batch: Batch, t: Tensor) -> Tensor:
    return t * batch["balance"]


LOSSES = {
    "samples": (SupervisedSamples(), sample_mean),
    "weights": (WeightedTokens(), weighted_mean),
    "brought": (BatchCount(), brought_mean),
    "micro-batches": (PerMicroBatch(), balance_of),
    "tokens": (SupervisedTokens(), token_mean),
}


@dataclass(frozen=True)
class Case:
    counter: str
    table: list[list[Batch | None]]
    """The micro-batches by rank."""
    gradients: list[float]
    """By update."""
    counts: list[float] = field(default_factory=list)
    """``N`` by update."""
    reduction: str = "mean"
    accumulate: int = 2
    strategy: type = TokenNormDDP


SAMPLES = [
    # means 1 and 4, then 4
    [rows_of([1, 1, 1], [4]), rows_of([2, 6])],
    # 4 beside a sample without a label, then 10, 1, 7 and 9
    [rows_of([], [3, 5, 4]), rows_of([10], [0, 2], [7, 7, 7, 7], [9])],
]
WEIGHTS = [
    # 0.5 + 7.5 over 2, then 12 over 6
    [weighing([1, 5], [0.5, 1.5]), weighing([2], [6])],
    # 6 over 2, for the other token weighs nothing, then 1.5 + 5.75 over 6
    [weighing([3, 100], [2, 0]), weighing([6, 1], [0.25, 5.75])],
]
BROUGHT = [
    [bringing(6, 3), bringing(5, torch.tensor(1))],
    [bringing(4, 2.5), bringing(9, torch.tensor(1.5))],
]
BALANCE = [[balance(2), balance(6)], [balance(1), balance(3)]]

ONE_PROCESS = {
    "samples": Case("samples", SAMPLES[:1], [3.0], [3]),  # (1 + 4 + 4) / 3
    "weights": Case("weights", WEIGHTS[:1], [2.5], [8]),  # (8 + 12) / 8
    "brought": Case("brought", BROUGHT[:1], [2.75], [4]),  # (6 + 5) / 4
    "micro-batches": Case("micro-batches", BALANCE[:1], [4.0], [2]),  # (2 + 6) / 2
}
TWO_RANKS = {
    "samples": Case("samples", SAMPLES, [5.0], [8]),  # (1 + 4 + 4 + 4 + 10 + 1 + 7 + 9) / 8
    "samples, K=1": Case("samples", SAMPLES, [3.0, 31 / 5], [3, 5], accumulate=1),  # 9 / 3, then (4 + 27) / 5
    "weights": Case("weights", WEIGHTS, [2.078125], [16]),  # (8 + 12 + 6 + 7.25) / 16
    "brought": Case("brought", BROUGHT, [3.0], [8]),  # (6 + 5 + 4 + 9) / 8
    "micro-batches": Case("micro-batches", BALANCE, [3.0], [4]),  # (2 + 6 + 1 + 3) / 4
    # rank 0 has nothing to train on, and its loss is 0 / 0: what is left is (4 + 10 + 1 + 7 + 9) / 5 of rank 1, then
    # 13.25 / 8 and 13 / 4
    "samples, an empty rank": Case("samples", [[rows_of([]), rows_of([], [])], SAMPLES[1]], [6.2], [5]),
    "weights, an empty rank": Case("weights", [[weighing([5], [0]), weighing([], [])], WEIGHTS[1]], [1.65625], [8]),
    "brought, an empty rank": Case("brought", [[bringing(0, 0), bringing(0, 0.0)], BROUGHT[1]], [3.25], [4]),
    # no micro-batch here has a label, and each counts; a rank without data has none: (1 + 3) / 2
    "micro-batches, an empty rank": Case("micro-batches", [[], BALANCE[1]], [2.0], [2]),
    # three and one micro-batches: (2 + 6 + 1) / 3, then 5 / 1. The padded ones count 0.
    "micro-batches, uneven": Case(
        "micro-batches", [[balance(2), balance(6), balance(5)], [balance(1)]], [3.0, 5.0], [3, 1]
    ),
    # a batch that is None has nothing in it: (2 + 1 + 3) / 3
    "micro-batches, one is None": Case("micro-batches", [[balance(2), None], BALANCE[1]], [2.0], [3]),
    # controls: the same samples by tokens, (3 + 4 + 8 + 12 + 10 + 2 + 28 + 9) / 17; and under plain DDP the mean of the
    # micro-batches' means, which are 2.5, 4, 4 and 27 / 4, or 4, 2, 3 and 7.25 / 6
    "samples, by tokens": Case("tokens", SAMPLES, [76 / 17], [17]),
    "samples, plain": Case("samples", SAMPLES, [4.3125], strategy=DDPStrategy),
    "weights, plain": Case("weights", WEIGHTS, [(4 + 2 + 3 + 7.25 / 6) / 4], strategy=DDPStrategy),
}


class Rig(ScalarModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.mean = LOSSES[name][1]

    def loss(self, batch: Batch) -> Tensor:
        return self.mean(batch, self.t)


class Seen(Callback):
    """What `TokenMeanMetric` has logged when an update is over."""

    def __init__(self) -> None:
        self.updates = 0
        self.logged: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step > self.updates:
            self.updates = trainer.global_step
            metrics = trainer.callback_metrics
            self.logged.append((metrics["train_loss_per_token"].item(), metrics["train_tokens"].item()))


def fit(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    module, seen = Rig(case.counter), Seen()
    counter = LOSSES[case.counter][0]
    own = case.strategy is TokenNormDDP
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(count_tokens=counter) if own else case.strategy(),
        accumulate_grad_batches=case.accumulate,
        # which takes the strategy's counter, where it has one
        callbacks=[TokenMeanMetric(count_tokens=None if own else counter), seen],
    )
    trainer.fit(module, DataLoader(case.table[rank], batch_size=None))
    found = {
        "gradients": module.gradients,
        "counts": [record.num_tokens for record in module.records],
        "logged": seen.logged,
        "epoch": trainer.callback_metrics["train_loss_per_token_epoch"].item(),
    }
    if all(map(all, case.table)) and all(case.table):  # a validation of Lightning's needs data on every rank
        trainer.validate(module, DataLoader(case.table[rank], batch_size=None), verbose=False)
        found["validation"] = trainer.callback_metrics["val_loss_per_token"].item()
    return found


def fit_all(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    return {name: fit(rank, world_size, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def alone() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(fit_all, 1, ONE_PROCESS, timeout_s=120)


@pytest.fixture(scope="module")
def pair() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(fit_all, 2, TWO_RANKS, timeout_s=180)


def check(case: Case, found: dict[str, Any]) -> None:
    assert found["gradients"] == pytest.approx(case.gradients, rel=1e-15)
    if case.strategy is not TokenNormDDP:
        return
    assert found["counts"] == case.counts
    # t = 1, so that the loss is what the gradient is: in each update, the epoch, and validation on the same data
    assert [value for value, _ in found["logged"]] == pytest.approx(case.gradients, rel=1e-15)
    assert [count for _, count in found["logged"]] == case.counts
    over_all = math.fsum(g * n for g, n in zip(case.gradients, case.counts, strict=True)) / math.fsum(case.counts)
    assert found["epoch"] == pytest.approx(over_all, rel=1e-15)
    if "validation" in found:
        assert found["validation"] == pytest.approx(over_all, rel=1e-15)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(name: str, alone: list[dict[str, dict[str, Any]]]) -> None:
    check(ONE_PROCESS[name], alone[0][name])


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str, pair: list[dict[str, dict[str, Any]]]) -> None:
    for found in pair:
        check(TWO_RANKS[name], found[name])


def test_the_metric_shows_the_same_mean_under_plain_ddp(pair: list[dict[str, dict[str, Any]]]) -> None:
    """It is given the counter there: what it logs is right where the gradient is not."""
    for found in pair:
        assert found["samples, plain"]["logged"] == [(5.0, 8)]
        assert found["weights, plain"]["logged"] == [(2.078125, 16.0)]


# ---- float sums and the order of ranks


def count_in_orders(rank: int, world_size: int) -> list[float]:
    """The window's weight with 2**53, 1 and 1 dealt to the ranks in three orders."""
    weights = [2.0**53, 1.0, 1.0]
    counted = []
    for turn in range(3):
        module = Rig("weights")
        table = [weighing([1], [weights[(rank + turn) % 3]])]
        make_trainer(world_size, strategy=TokenNormDDP(count_tokens=WeightedTokens())).fit(
            module, DataLoader(table, batch_size=None)
        )
        counted += [record.num_tokens for record in module.records]
    return counted


def test_the_order_of_ranks_leaves_no_mark() -> None:
    # added up one after the other, 2**53 + 1 + 1 is 2**53
    assert run_ranks(count_in_orders, 3, timeout_s=120) == [[2.0**53 + 2] * 3] * 3


# ---- callbacks


@pytest.mark.parametrize(
    ("budget", "updates"),
    [
        (2, 1),  # updates of 2 samples and of 1, which have 4 tokens and 2
        (3, 2),
    ],
)
def test_budgets_are_of_what_is_counted(budget: int, updates: int) -> None:
    metric = TokenMeanMetric(name="loss_per_sample")
    trainer = make_trainer(
        1,
        strategy=TokenNormDDP(count_tokens=SupervisedSamples()),
        callbacks=[metric, TokenBudget(budget)],
        max_epochs=-1,
    )
    trainer.fit(Rig("samples"), DataLoader(SAMPLES[0], batch_size=None))
    assert trainer.global_step == updates
    assert trainer.callback_metrics["train_loss_per_sample_step"].item() == [2.5, 4.0][updates - 1]


# ---- models, and how their samples are dealt


class MeanOfSamples(TinyModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses, live = self.token_losses(batch)
        has_one = live.any(1)
        return ((losses * live).sum(1)[has_one] / live.sum(1)[has_one]).sum() / has_one.sum()

    def token_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, labels = self.model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
        return losses, labels != X


class MeanByWeight(MeanOfSamples):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses, live = self.token_losses(batch)
        weights = batch["loss_weights"][:, 1:] * live
        return (losses * weights).sum() / weights.sum()


def weigh_by_token(samples: Sequence[Batch]) -> Batch:
    batch = make_batch(samples)
    return {**batch, "loss_weights": (1.0 + batch["input_ids"]) / 8}


@pytest.mark.parametrize(
    ("module", "counter"),
    [(MeanOfSamples, SupervisedSamples()), (MeanByWeight, WeightedTokens())],
    ids=["samples", "weights"],
)
def test_updates_do_not_depend_on_how_samples_are_dealt(module: Any, counter: Any) -> None:
    report = assert_partition_invariant(
        module,
        make_samples(8),
        collate_fn=weigh_by_token,
        world_sizes=(2,),
        accumulate=(2,),
        strategy=lambda: TokenNormDDP(count_tokens=counter),
    )
    assert all(result.ok and result.rel_l2_error < 1e-12 for result in report.results)


def test_a_counter_that_does_not_fit_the_loss_is_found() -> None:
    with pytest.raises(AssertionError, match="worst in"):
        assert_partition_invariant(
            MeanOfSamples, make_samples(8), collate_fn=weigh_by_token, world_sizes=(1,), accumulate=(2,)
        )


# ---- what one rank refuses, all refuse

WRONG: dict[str, tuple[str, list[list[Batch]], str]] = {
    "a negative weight": (
        "weights",
        [WEIGHTS[0], [WEIGHTS[1][0], weighing([1, 2, 3], [4, -0.5, 4])]],
        r"`WeightedTokens` found weights from -0.5 to 4.0 at `weights='loss_weights'`",
    ),
    "a weight that is NaN": ("weights", [WEIGHTS[0], [weighing([1], [NAN])]], "found weights from nan to nan"),
    "no count": ("brought", [BROUGHT[0], [{"total": 1.0}]], "`BatchCount` found no count at `key='num_tokens'`"),
    "a count by sample": ("brought", [BROUGHT[0], [bringing(1, torch.ones(2))]], "expected one count for the batch"),
    "a negative count": ("brought", [BROUGHT[0], [bringing(1, -3)]], "returned -3; expected a finite count"),
}


def fit_wrong(rank: int, world_size: int) -> dict[str, str]:
    said = {}
    for name, (counter, table, _) in WRONG.items():
        try:
            fit(rank, world_size, Case(counter, table, []))
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(fit_wrong, 2, timeout_s=120)


@pytest.mark.parametrize("name", WRONG)
def test_what_one_rank_refuses_all_refuse(name: str, said: list[dict[str, str]]) -> None:
    for texts in said:
        assert texts[name].startswith("TokenNormError")
        assert WRONG[name][2] in texts[name]
        assert "rank 1" in texts[name].lower()
