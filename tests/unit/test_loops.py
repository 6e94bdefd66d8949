"""`token_windows` in one process: what is refused, what is left out, and what a model says of its reduction."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tokennorm import TokenNormError, token_windows
from lightning_tokennorm.reduction import Reduction, reduction_of
from tests.helpers.launch import run_ranks

Batch = dict[str, Tensor]


def batch(tokens: int, value: float = 1.0) -> Batch:
    """One row of which `tokens` labels are live after the shift; the gradient of each token's loss is `value`."""
    labels = torch.full((1, 6), -100)
    labels[0, 1 : 1 + tokens] = 1
    return {"x": torch.full((1, 1), value, dtype=torch.float64), "labels": labels}


def model() -> nn.Module:
    linear = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(linear.weight, 0.0)
    return linear


def gradients(batches: Any, **options: Any) -> list[float]:
    """The gradient of each window."""
    linear, found = model(), []
    for window in token_windows(batches, model=linear, **{"accumulate": 2, **options}):
        linear.zero_grad()
        for each in window:
            with window.no_sync():
                window.backward(linear(each["x"]).mean())
        found.append(linear.weight.grad.item())
    return found


def test_weights_by_hand() -> None:
    # (3 * 1 + 1 * 5) / 4 = 2, and a short window: 2
    assert gradients([batch(3, 1.0), batch(1, 5.0), batch(4, 2.0)]) == pytest.approx([2.0, 2.0], abs=1e-15)


def test_what_the_backward_divides_by() -> None:
    linear = model()
    for window in token_windows([batch(3, 1.0), batch(1, 5.0)], accumulate=2, model=linear, divided_by=4):
        for each in window:
            window.backward(linear(each["x"]).mean(), lambda loss: (loss / 4).backward())
        assert window.record.loss_sum == 0.0
    assert linear.weight.grad.item() == pytest.approx(2.0, abs=1e-15)


def test_a_scaler_is_left_to_the_loop() -> None:
    linear, scaler, steps = model(), torch.amp.GradScaler("cpu", init_scale=1024.0), []
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    # (3 * 1 + 1 * 5) / 4 = 2; a window with an infinity, which is not stepped on; (2 * 1 + 2 * 3) / 4 = 2
    data = [batch(3, 1.0), batch(1, 5.0), batch(1, 1.0), batch(1, math.inf), batch(2, 1.0), batch(2, 3.0)]
    for window in token_windows(data, accumulate=2, model=linear):
        before = linear.weight.item()
        for each in window:
            window.backward(linear(each["x"]).mean(), lambda loss: scaler.scale(loss).backward())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append(before - linear.weight.item())
    assert steps == [2.0, 0.0, 2.0]
    assert scaler.get_scale() == 512.0


def test_record() -> None:
    linear = model()
    nn.init.constant_(linear.weight, 2.0)
    for window in token_windows([batch(3, 1.0), batch(1, 5.0)], accumulate=2, model=linear):
        assert (window.num_tokens, len(window)) == (4, 2)
        lasts = []
        with pytest.raises(TokenNormError, match="made by the backward of the window's last"):
            _ = window.record
        for each in window:
            lasts.append(window.is_last)
            window.backward(linear(each["x"]).mean())
        assert lasts == [False, True]
        record = window.record
        assert record is window.record
        assert (record.index, record.num_tokens, record.micro_batches, record.applied) == (0, 4, 2, True)
        assert record.loss_sum.item() == 16.0  # 3 tokens of loss 2 and one of 10


def test_windows_without_tokens_are_left_out() -> None:
    with pytest.warns(UserWarning, match="No rank has a supervised token in any of the 2") as caught:
        assert gradients([batch(0), batch(0), batch(1, 7.0), batch(0)]) == [7.0]
    assert caught[0].filename == __file__  # at the loop, which is where to look
    with pytest.warns(UserWarning, match="2 of 2 windows had no supervised token"):
        assert gradients([batch(0)] * 4) == []
    with pytest.raises(TokenNormError, match="has no supervised token"):
        gradients([batch(0)], on_empty="error")


@pytest.mark.filterwarnings("ignore:No rank has a supervised token")
def test_nothing_but_windows_without_tokens_is_an_error() -> None:
    with pytest.raises(TokenNormError, match="None of the first 50 windows"):
        gradients([batch(0)] * 200)


def test_a_loss_of_no_tokens_may_have_no_graph() -> None:
    linear = model()
    for window in token_windows([batch(0), batch(1)], accumulate=2, model=linear):
        for index, each in enumerate(window):
            window.backward(linear(each["x"]).mean() if index else torch.tensor(float("nan")))
    assert linear.weight.grad.item() == 1.0


def test_any_iterable() -> None:
    def stream() -> Iterator[Batch]:
        yield from (batch(1), batch(1), batch(1))

    assert gradients(stream()) == gradients([batch(1)] * 3) == gradients(tuple([batch(1)] * 3)) == [1.0, 1.0]
    assert gradients([]) == []


def test_a_loader_that_fails() -> None:
    def stream() -> Iterator[Batch]:
        yield from (batch(1), batch(1))
        raise OSError("disk gone")

    with pytest.raises(TokenNormError, match="OSError: disk gone"):
        gradients(stream())


def test_misuse() -> None:
    linear = model()
    windows = iter(token_windows([batch(1)] * 6, accumulate=2, model=linear))
    first = next(windows)
    for each in first:
        first.backward(linear(each["x"]).mean())
    with pytest.raises(TokenNormError, match="iterated twice"):
        next(iter(first))
    second = next(windows)
    for each in second:
        second.backward(linear(each["x"]).mean())
        with pytest.raises(TokenNormError, match=r"A second `window\.backward` for micro-batch 1 of window 2"):
            second.backward(linear(each["x"]).mean())
        break
    with pytest.raises(TokenNormError, match="have ended with an error"):
        next(windows)


def test_a_window_that_is_left_early() -> None:
    linear = model()
    windows = token_windows([batch(1)] * 4, accumulate=2, model=linear)
    first = next(windows)
    first.backward(linear(next(iter(first))["x"]).mean())
    with pytest.raises(TokenNormError, match="do not leave a window early"):
        next(windows)


@pytest.mark.parametrize(
    ("loss", "kind", "text"),
    [
        (1.0, TypeError, "got a loss of float"),
        (torch.ones(2, requires_grad=True), TypeError, r"shape \(2,\)"),
        (torch.ones(()), TokenNormError, "no way leads from it"),
        (torch.ones((), requires_grad=True), TokenNormError, "no way leads from it"),
    ],
)
def test_losses_that_cannot_be(loss: Any, kind: type[Exception], text: str) -> None:
    window = next(token_windows([batch(1)], accumulate=1, model=model()))
    next(iter(window))
    with pytest.raises(kind, match=text):
        window.backward(loss)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"accumulate": 0}, ValueError, "accumulate=.*got 0"),
        ({"accumulate": 2.0}, TypeError, "accumulate=.*got 2.0"),
        ({"accumulate": True}, TypeError, "accumulate=.*got True"),
        ({"divided_by": 0}, ValueError, "divided_by=.*got 0"),
        ({"divided_by": float("nan")}, ValueError, "divided_by=.*got nan"),
        ({"divided_by": "K"}, TypeError, "divided_by=.*got 'K'"),
        ({"count_tokens": 3}, TypeError, "count_tokens=.*got 3"),
        ({"loss_reduction": "none"}, ValueError, "loss_reduction=.*expected 'mean' or 'sum'"),
        ({"on_empty": "warn"}, ValueError, "on_empty=.*expected 'skip' or 'error'"),
        ({"uneven": "drop"}, ValueError, "uneven=.*expected 'pad' or 'error'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):  # at the call, not at the first window
        token_windows([], **{"accumulate": 1, **options})


def test_an_engine_of_deepspeed_is_refused() -> None:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    with pytest.raises(ValueError, match="DeepSpeed's engine divides losses by itself"):
        token_windows([], accumulate=1, model=engine)


def read_reductions(rank: int, world_size: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    assert reduction_of(DistributedDataParallel(nn.Linear(2, 2))) == Reduction(dist.group.WORLD)
    assert reduction_of(DistributedDataParallel(nn.Linear(2, 2), process_group=half)).group is half
    assert reduction_of(None, half) == reduction_of(nn.Linear(2, 2), half) == Reduction(half)
    for alone in (None, nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="in one of 4 processes"):
            reduction_of(alone)
    with pytest.raises(ValueError, match=r"`group` got the ranks .* but the model's gradients are averaged over"):
        reduction_of(DistributedDataParallel(nn.Linear(2, 2)), half)

    def parts() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = fully_shard(parts(), mesh=mesh)
    assert reduction_of(whole) == Reduction(dist.group.WORLD, 4.0)
    whole.set_gradient_divide_factor(3.0)
    assert reduction_of(whole).divided_by == 3.0
    mixed = parts()
    fully_shard(mixed[0], mesh=mesh)
    fully_shard(mixed, mesh=mesh)
    mixed[0].set_gradient_divide_factor(1.0)
    with pytest.raises(ValueError, match=r"different numbers: \[1.0, 4.0\]"):
        reduction_of(mixed)
    across = parts()
    fully_shard(across[0], mesh=mesh["a"])
    fully_shard(across, mesh=mesh["b"])
    with pytest.raises(ValueError, match="reduced over different ranks"):
        reduction_of(across)
    partly = parts()
    fully_shard(partly[0], mesh=mesh["b"])
    with pytest.raises(ValueError, match=r"`1.weight` requires a gradient, but no part"):
        reduction_of(partly)
    partly[1].requires_grad_(False)
    assert dist.get_process_group_ranks(reduction_of(partly).group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert reduction_of(partly).divided_by == 2.0

    units = parts()
    units[0] = FullyShardedDataParallel(units[0], device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(ValueError, match=r"`1.weight` requires a gradient, but no part"):
        reduction_of(units)
    units = FullyShardedDataParallel(units, device_id=torch.device("cpu"), use_orig_params=True)
    assert reduction_of(units) == Reduction(dist.group.WORLD, 4.0)
    units._gradient_postdivide_factor *= 2
    with pytest.raises(ValueError, match="different numbers"):
        reduction_of(units)

    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(ValueError, match="communication hook"):
        token_windows([], accumulate=1, model=hooked)


def test_what_a_model_says_of_its_reduction() -> None:
    run_ranks(read_reductions, 4, timeout_s=120)
