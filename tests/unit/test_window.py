"""The algebra of a window, without processes."""

from __future__ import annotations

from lightning_tokennorm.window import RankReport, WindowPlan, differing_accumulation, total, uneven_windows


def report(num_tokens: float = 4, micro_batches: int = 3, accumulate: int = 3) -> RankReport:
    return RankReport(num_tokens, micro_batches, accumulate)


def test_factors_undo_what_lightning_and_ddp_divide() -> None:
    # R1 on rank 0: n = 3, 1, 4 of N = 24, W = 2, K = 3
    plan = WindowPlan.agreed([report(8), report(16)], (3, 1, 4))
    assert (plan.num_tokens, plan.tokens_min, plan.tokens_max, plan.micro_batches) == (24, 8, 16, 3)
    assert [plan.factor(k, "mean", 3) for k in range(3)] == [6 * 3 / 24, 6 * 1 / 24, 6 * 4 / 24]
    assert [plan.factor(k, "sum", 3) for k in range(3)] == [6 / 24] * 3


def test_empty_micro_batches_and_windows_have_factor_zero() -> None:
    plan = WindowPlan.agreed([report(4), report(0)], (0, 4, 0))
    assert [plan.factor(k, "sum", 3) for k in range(3)] == [0, 1.5, 0]
    assert WindowPlan.agreed([report(0), report(0)], (0, 0, 0)).factor(1, "mean", 3) == 0


def test_loss_sum_from_what_lightning_hands_over() -> None:
    plan = WindowPlan.agreed([report(8), report(16)], (3, 1, 4))
    # A loss of 2 comes as 2 / 3, divided by K. As a mean over 4 tokens it sums to 8 = 2 / 3 * 12, as a sum to 2.
    assert plan.loss_weight(2, "mean", 3) == 12
    assert plan.loss_weight(2, "sum", 3) == 3


def test_totals() -> None:
    assert total([]) == 0
    assert total([2**62, 2**62, 1]) == 2**63 + 1
    # 0.1 ten times is 0.9999999999999999 when added one by one
    assert total([0.1] * 10) == 1.0
    assert isinstance(total([1, 2.0]), float)


def test_agreement_and_disagreement() -> None:
    assert differing_accumulation([report(), report(9)]) is None
    assert uneven_windows([report(), report(9)]) is None
    for problem, parts in (
        (uneven_windows([report(), report(micro_batches=2)]), ["rank 0 has 3, rank 1 has 2", "DistributedSampler"]),
        (uneven_windows([report(), report(0, 0)]), ["rank 0 has 3, rank 1 has 0"]),
        (
            differing_accumulation([report(), report(accumulate=4)]),
            ["`accumulate_grad_batches` differs", "rank 0 has 3, rank 1 has 4"],
        ),
    ):
        assert problem is not None
        for part in parts:
            assert part in problem


def test_a_window_is_as_long_as_the_longest_ranks() -> None:
    # 1, 3 and 0 micro-batches: 2 + 0 + 3 are padded
    reports = [report(4, 1), report(6, 3), report(0, 0)]
    plan = WindowPlan.agreed(reports, (4,))
    assert (plan.tokens, plan.micro_batches, plan.padded_micro_batches) == ((4, 0, 0), 3, 5)
    # K * W * n / N = 3 * 3 * 4 / 10
    assert [plan.factor(k, "mean", 3) for k in range(3)] == [3.6, 0, 0]
