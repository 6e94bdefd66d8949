"""The law on the scalar rig: gradients worked out by hand, real Trainers, real processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_tokennorm import TokenNormDDP
from tests.helpers import scalar_rig as rig
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R0, R00, R1, R2, ScalarModule, Table, make_loader, make_trainer

TOLERANCE = 1e-12


def fit(
    rank: int,
    world_size: int,
    table: Table,
    accumulate: int,
    reduction: str = "mean",
    sized: bool = True,
    plain: bool = False,
    lr: float = 0.0,
    strategy_options: dict[str, Any] | None = None,
    trainer_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Fit the rig and return what was seen on this rank."""
    module = ScalarModule(reduction, lr=lr)
    strategy = DDPStrategy() if plain else TokenNormDDP(loss_reduction=reduction, **(strategy_options or {}))
    trainer = make_trainer(world_size, strategy=strategy, accumulate_grad_batches=accumulate, **(trainer_options or {}))
    try:
        trainer.fit(module, make_loader(table[rank], sized=sized))
        error = None
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {
        "gradients": module.gradients,
        "parameters": module.parameters_after,
        "records": module.records,
        "windows": [window for window in module.windows if window],
        "returned": module.returned,
        "outputs": module.batch_losses,
        "global_step": trainer.global_step,
        "error": error,
    }


def check(results: list[dict[str, Any]], gradients: list[float]) -> None:
    """Every rank saw these gradients, and the parameters of all ranks are bitwise equal after each update."""
    for result in results:
        assert result["error"] is None
        assert result["gradients"] == pytest.approx(gradients, rel=0, abs=TOLERANCE)
        assert result["parameters"] == results[0]["parameters"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
def test_window_over_ranks_and_micro_batches(reduction: str, world_size: int, sized: bool) -> None:
    # R1's 24 tokens dealt to W ranks, all in one window: 42 / 24 however they are dealt.
    table = rig.deal(R1, world_size)
    results = run_ranks(fit, world_size, table, len(table[0]), reduction, sized)
    check(results, [rig.R1_GRADIENT])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
def test_short_last_window_and_next_epoch(reduction: str, sized: bool) -> None:
    # R2 twice: a leak of the tail into the second epoch would show 1.75 + 1.375 = 3.125 at the third step.
    results = run_ranks(fit, 2, R2, 3, reduction, sized, False, 0.0, None, {"max_epochs": 2})
    check(results, rig.R2_GRADIENTS * 2)
    for result in results:
        assert [record.num_tokens for record in result["records"]] == [24, 16, 24, 16]
        assert [record.micro_batches for record in result["records"]] == [3, 2, 3, 2]
        assert result["windows"] == [[0, 1, 2], [3, 4]] * 2


def test_plain_ddp_is_off() -> None:
    """The negative control: without this package the same rig gives the mean of means."""
    # rank 0: (1 + 5 + 2) / 3 = 8/3, rank 1: (2 + 1 + 3) / 3 = 2; their mean is 2.3333
    for result in run_ranks(fit, 2, R1, 3, "mean", True, True):
        assert result["gradients"] == pytest.approx([7 / 3], abs=TOLERANCE)
    # the tail is divided by 3 although 2 are there: (2 + 3 / 2) / 3 ... = (6 / 3 + 3 / 3) / 2 = 1.5
    for result in run_ranks(fit, 2, R2, 3, "mean", True, True):
        assert result["gradients"] == pytest.approx([7 / 3, 1.5], abs=TOLERANCE)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rank_without_a_token(reduction: str) -> None:
    check(run_ranks(fit, 2, R0, 2, reduction), [rig.R0_GRADIENT])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_unequal_ranks_without_accumulation(reduction: str) -> None:
    # K = 1 still needs scaling: (3 * 1 + 1 * 5) / 4 = 2, while the mean of the means is (1 + 5) / 2 = 3.
    check(run_ranks(fit, 2, [[(3, 1)], [(1, 5)]], 1, reduction), [2.0])


def test_tail_of_one_and_accumulation_beyond_the_epoch() -> None:
    # one batch per rank, K = 3: (3 + 4) / (3 + 2) = 1.4; plain Lightning divides by 3
    for sized in (True, False):
        check(run_ranks(fit, 2, [[(3, 1)], [(2, 2)]], 3, "mean", sized), [1.4])


def test_window_without_a_token_is_skipped_on_all_ranks() -> None:
    # R2's five columns, then (padding the epoch) R00: gradients 1.75 and 1.375 are applied, the empty window is not
    table = [[*R1[0], (0, 0), (0, 0), (0, 0), *R1[0]], [*R1[1], (0, 0), (0, 0), (0, 0), *R1[1]]]
    results = run_ranks(fit, 2, table, 3, "mean", True, False, 1.0)
    check(results, [1.75, 1.75])
    for result in results:
        assert result["global_step"] == 3
        # t starts at 1 and steps by lr * 1.75; the middle window leaves it alone, bit by bit
        assert result["parameters"] == [-0.75, -0.75, -2.5]
        first, empty, last = result["records"]
        assert (first.applied, empty.applied, last.applied) == (True, False, True)
        assert empty.num_tokens == 0
        assert "no rank has a supervised token" in empty.skipped_because
        assert empty.loss_sum.item() == 0.0
        assert math.isfinite(last.loss_sum.item())


def test_only_empty_windows_change_nothing() -> None:
    for result in run_ranks(fit, 2, R00, 2, "mean", True, False, 1.0):
        assert result["error"] is None
        assert result["parameters"] == [1.0]
        assert result["gradients"] == []


def test_empty_window_can_be_an_error() -> None:
    results = run_ranks(fit, 2, R00, 2, "mean", True, False, 0.0, {"on_empty": "error"})
    for result in results:
        assert result["error"].startswith("TokenNormError: At update 0, the window of 2 micro-batches has no")
        assert result["returned"] == []  # raised before any forward


def test_outputs_keep_the_users_loss() -> None:
    # callbacks get the loss divided by K, as Lightning documents; our factors never show there
    for rank, result in enumerate(run_ranks(fit, 2, R1, 3, "mean")):
        means = [float(value) for _, value in R1[rank]]  # t = 1, so a micro-batch's mean is its value
        assert result["returned"] == means
        assert result["outputs"] == pytest.approx([mean / 3 for mean in means], abs=TOLERANCE)


def test_record_of_an_update() -> None:
    for rank, result in enumerate(run_ranks(fit, 2, R1, 3, "mean")):
        (record,) = result["records"]
        assert (record.index, record.num_tokens, record.micro_batches, record.world_size) == (0, 24, 3, 2)
        assert (record.tokens_min, record.tokens_max) == (8, 16)
        assert (record.applied, record.skipped_because) == (True, None)
        assert record.loss_sum.item() == pytest.approx([16.0, 26.0][rank], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "gradients"),
    [
        # R2's windows of 3 and 2, cut to 4 batches: the tail is the first column, (3 + 4) / (3 + 2)
        ({"limit_train_batches": 4}, [1.75, 1.4]),
        ({"max_steps": 3, "max_epochs": -1}, [1.75, 1.375, 1.75]),
    ],
    ids=["limit_train_batches", "max_steps"],
)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
def test_trainer_limits(options: dict[str, Any], gradients: list[float], sized: bool) -> None:
    results = run_ranks(fit, 2, R2, 3, "mean", sized, False, 0.0, None, options)
    check(results, gradients)
    assert all(result["global_step"] == len(gradients) for result in results)


def test_tokens_spread_over_four_ranks() -> None:
    # W forgotten would give 1.75 / 4 = 0.4375
    table = rig.deal(R1, 4)
    check(run_ranks(fit, 4, table, 2, "mean"), [rig.R1_GRADIENT])


def test_sgd_moves_by_the_gradient() -> None:
    # lr = 1, from t = 1: 1 - 1.75 = -0.75, then -0.75 - 1.375
    for result in run_ranks(fit, 2, R2, 3, "mean", True, False, 1.0):
        assert result["parameters"] == pytest.approx([-0.75, -2.125], abs=TOLERANCE)
