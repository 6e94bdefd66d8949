"""Faults that users have reported in public around extra losses, sub-groups and DDP itself (their numbers: Bnn)."""

from __future__ import annotations

import math
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
from tests.distributed.test_ddp_options import (
    NonReentrant,
    Reentrant,
    Strained,
    fit_strained,
    strained_data,
    strained_reference,
)
from tests.helpers.ddp_hooks import count_buckets
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R0, R1, ScalarModule, Table, make_loader, make_trainer

TOLERANCE = 1e-12


def fit(
    rank: int, world_size: int, table: Table, accumulate: int, module: ScalarModule, strategy: TokenNormDDP
) -> dict[str, float]:
    """Fit this rank's row of a table, and return what was logged."""
    trainer = make_trainer(
        world_size, strategy=strategy, accumulate_grad_batches=accumulate, callbacks=[TokenMeanMetric()]
    )
    trainer.fit(module, make_loader(table[rank]))
    return {key: value.item() for key, value in trainer.callback_metrics.items()}


# ---- B45: a second head over the same tokens


class TwoHeads(ScalarModule):
    """Both heads see the same tokens, so one denominator is right for their sum."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + super().loss(batch)


def two_heads(rank: int, world_size: int, reduction: str) -> tuple[list[float], float]:
    module = TwoHeads(reduction)
    logged = fit(rank, world_size, R1, 3, module, TokenNormDDP(loss_reduction=reduction))  # type: ignore[arg-type]
    return module.gradients, logged["train_loss_per_token"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_second_head_over_the_same_tokens_doubles_the_gradient(reduction: str) -> None:
    # each head 42 / 24; added 84 / 24
    for gradients, logged in run_ranks(two_heads, 2, reduction):
        assert gradients == pytest.approx([3.5], abs=TOLERANCE)
        assert logged == pytest.approx(3.5, abs=TOLERANCE)


# ---- B46, B47: ranks that share or repeat a row

# 2 data-parallel rows x 2 sequence shards. R1's row 0 has the tokens 1 1 1 5 | 2 2 2 2, its row 1 the tokens
# 2 2 1 1 1 1 1 1 | 1 1 1 1 3 3 3 3: shards of 4, 4, 8 and 8 tokens with sums 8, 8, 10 and 16, together 42 over 24.
SHARDS: Table = [[(3, 1), (1, 5)], [(4, 2), (0, 0)], [(2, 2), (6, 1)], [(4, 1), (4, 3)]]


def sharded(rank: int, world_size: int, over: str) -> tuple[list[float], Any, int]:
    # ranks 0 and 2 hold the first shards, 1 and 3 the second ones
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    options = {"process_group": groups[rank % 2]} if over == "first or second shards" else {}
    module = ScalarModule()
    fit(rank, world_size, SHARDS, 2, module, TokenNormDDP(**options))
    return module.gradients, module.records[0].num_tokens, module.records[0].world_size


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ("all ranks", [(1.75, 24, 4)] * 4),
        # N and W are those of the same group: 18 / 12 and 24 / 12. Tokens of one group (12) under the average over
        # all four ranks would give 42 / 12 = 3.5.
        ("first or second shards", [(1.5, 12, 2), (2.0, 12, 2)] * 2),
    ],
)
def test_sequence_shards(over: str, expected: list[tuple[float, int, int]]) -> None:
    for seen, (gradient, num_tokens, world_size) in zip(run_ranks(sharded, 4, over), expected, strict=True):
        assert seen == ([pytest.approx(gradient, abs=TOLERANCE)], num_tokens, world_size)


def repeated(rank: int, world_size: int) -> float:
    trainer = make_trainer(world_size, strategy=TokenNormDDP(), callbacks=[TokenMeanMetric()])
    trainer.validate(ScalarModule(), make_loader(R1[rank // 2]), verbose=False)
    return trainer.callback_metrics["val_loss_per_token"].item()


def test_the_metric_over_ranks_that_hold_the_same_batches() -> None:
    # sums and counts both double: 84 / 48. A factor on one of them would show 3.5 or 0.875.
    assert run_ranks(repeated, 4) == pytest.approx([1.75] * 4, abs=TOLERANCE)


# ---- B50: a rank whose mean is NaN


def nan_on_a_rank(rank: int, world_size: int) -> dict[str, Any]:
    module = ScalarModule("mean", lr=0.5)
    logged = fit(rank, world_size, R0, 2, module, TokenNormDDP())
    return {
        "returned": module.returned,
        "gradients": module.gradients,
        "after": module.t.item(),
        "loss_sum": module.records[0].loss_sum.item(),
        "logged": logged["train_loss_per_token"],
    }


def test_the_nan_mean_of_a_rank_without_labels_is_replaced() -> None:
    empty, full = run_ranks(nan_on_a_rank, 2)
    assert all(math.isnan(mean) for mean in empty["returned"])
    assert full["returned"] == [1.0, 4.0]
    for seen in (empty, full):
        assert seen["gradients"] == pytest.approx([2.0], abs=TOLERANCE)  # (4 * 1 + 2 * 4) / 6
        assert seen["after"] == pytest.approx(0.0, abs=TOLERANCE)  # 1 - 0.5 * 2
        assert seen["logged"] == pytest.approx(2.0, abs=TOLERANCE)
    assert (empty["loss_sum"], full["loss_sum"]) == (0.0, pytest.approx(12.0, abs=TOLERANCE))
    assert empty["after"] == full["after"]


# ---- B68: activation checkpointing that torch itself refuses


def test_reentrant_checkpointing_with_unused_parameters_is_torchs_own_error() -> None:
    options = {"find_unused_parameters": True}
    for text in run_ranks(fit_strained, 2, Reentrant, options, 3, None):
        assert text.startswith("RuntimeError: Expected to mark a variable ready only once.")
    # the other kind is fine with them: windows of 3 and 1
    expected = strained_reference(NonReentrant, strained_data(2, 4), 3)
    for windows in run_ranks(fit_strained, 2, NonReentrant, options, 3, None):
        assert_windows_close(windows, expected)


def assert_windows_close(windows: Any, expected: list[Any]) -> None:
    assert not isinstance(windows, str), windows
    for ours, reference in zip(windows, expected, strict=True):
        for gradient, wanted in zip(ours, reference, strict=True):
            torch.testing.assert_close(
                torch.tensor(gradient, dtype=torch.float64),
                torch.tensor(wanted, dtype=torch.float64),
                rtol=TOLERANCE,
                atol=TOLERANCE,
            )


# ---- B75: one reduction per bucket and window


def fit_with_small_buckets(rank: int, world_size: int) -> tuple[Any, int]:
    counter: Counter[str] = Counter()
    options = {
        "bucket_cap_mb": 1e-6,  # one byte: a bucket per parameter
        "ddp_comm_hook": count_buckets,
        "ddp_comm_state": counter,
        "ddp_hook_reduces": "mean",
    }
    return fit_strained(rank, world_size, Strained, options, 2, None), counter["buckets"]


def test_each_of_several_buckets_is_reduced_once_per_window() -> None:
    # Two windows of 2 micro-batches: DDP starts with one bucket and then makes the 4 that the cap asks for, one for
    # each weight and bias of two layers. Were every micro-batch reduced, it would be 1 + 3 * 4.
    expected = strained_reference(Strained, strained_data(2, 4), 2)
    for windows, buckets in run_ranks(fit_with_small_buckets, 2):
        assert_windows_close(windows, expected)
        assert buckets == 1 + 4


# ---- B76: a branch that a rank does not use


class Branched(ScalarModule):
    """A second parameter whose branch is left out of the forward where there is no token."""

    def __init__(self) -> None:
        super().__init__(lr=0.5)
        self.u = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.steps: list[tuple[float, float]] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        live = batch["labels"][:, 1:] != -100
        weight = self.t + self.u if live.any() else self.t
        return (weight * batch["values"][:, 1:] * live).sum() / live.sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if len(self.steps) < len(self.parameters_after):
            self.steps.append((self.t.item(), self.u.item()))


def fit_branched(rank: int, world_size: int, accumulate: int, find_unused: bool) -> list[tuple[float, float]] | str:
    # a group of its own with a short timeout, for the run in which a rank waits in vain
    group = dist.new_group(timeout=timedelta(seconds=60 if find_unused else 3))
    module = Branched()
    try:
        strategy = TokenNormDDP(process_group=group, find_unused_parameters=find_unused)
        fit(rank, world_size, [row * 2 for row in R0], accumulate, module, strategy)  # type: ignore[operator]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return module.steps


def test_a_branch_that_the_empty_rank_skips() -> None:
    # rank 0 has no token. K = 1: gradients 1 and 4 of rank 1's micro-batches for both parameters, twice.
    expected = [(0.5, 0.5), (-1.5, -1.5), (-2.0, -2.0), (-4.0, -4.0)]
    assert run_ranks(fit_branched, 2, 1, True) == [expected] * 2  # bitwise equal on both ranks
    # K = 2: 12 / 6 = 2, twice
    assert run_ranks(fit_branched, 2, 2, True) == [[(0.0, 0.0), (-1.0, -1.0)]] * 2


def test_a_skipped_branch_that_ddp_was_not_told_of() -> None:
    # in torch rank 1 would wait for a gradient that rank 0 never has: a loss without tokens is led to all parameters
    expected = [(0.5, 0.5), (-1.5, -1.5), (-2.0, -2.0), (-4.0, -4.0)]
    assert run_ranks(fit_branched, 2, 1, False) == [expected] * 2
