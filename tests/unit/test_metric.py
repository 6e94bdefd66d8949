"""`TokenMean`: a sum, a count, one division."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_tokennorm import TokenMean


def test_sum_over_count() -> None:
    mean = TokenMean()
    mean.update(torch.tensor(16.0), torch.tensor(8))
    mean.update(26.0, 16)
    assert mean.compute().item() == 1.75
    assert (mean.compute().dtype, mean.num_tokens.dtype, mean.loss_sum.dtype) == (
        torch.float64,
        torch.int64,
        torch.float64,
    )


def test_token_weights() -> None:
    # weights 1.5 + 0.5 + 2 over sums 3, 5, 8: 16 / 4; cut to ints it would be 16 / 3
    mean = TokenMean()
    for loss_sum, weight in ((3, 1.5), (5, 0.5), (8, torch.tensor(2.0))):
        mean.update(loss_sum, weight)
    assert mean.compute().item() == 4.0
    assert mean.count.item() == 4.0


def test_counts_beyond_float32_and_int32() -> None:
    mean = TokenMean()
    for count in (16777216, 1, 2**33):
        mean.update(0.0, count)
    assert mean.num_tokens.item() == 16777217 + 2**33


def test_many_small_updates() -> None:
    # float32 states are off by more than 1e-3 here
    mean = TokenMean()
    for _ in range(100_000):
        mean.update(0.1, 1)
    assert mean.compute().item() == pytest.approx(0.1, abs=1e-9)


def test_no_token_is_nan_and_nan_stays() -> None:
    mean = TokenMean()
    mean.update(0.0, 0)
    assert math.isnan(mean.compute().item())
    mean.update(math.nan, 4)
    mean.update(1.0, 4)
    assert math.isnan(mean.compute().item())


def test_bfloat16_losses_are_summed_in_float64() -> None:
    mean = TokenMean()
    for _ in range(1000):
        mean.update(torch.tensor(1.0, dtype=torch.bfloat16), 1)
    assert mean.loss_sum.item() == 1000.0


def test_the_state_keeps_its_shape() -> None:
    # ranks whose states differ in shape cannot sum them
    mean = TokenMean()
    mean.update(torch.tensor([[6.0]]), torch.tensor([3]))
    mean.update(torch.tensor([1.0]), torch.tensor([0.5]))
    assert (mean.loss_sum.shape, mean.num_tokens.shape, mean.token_weight.shape) == ((), (), ())
    assert mean.compute().item() == 2.0  # 7 / 3.5


def test_more_than_one_element_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`TokenMean.update` got a tensor of shape \[2\]; expected one element"):
        TokenMean().update(torch.zeros(2), 3)
