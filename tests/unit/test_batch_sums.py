"""`BatchSums`: a batch counted before its step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_tokennorm import heads
from lightning_tokennorm.callbacks.batch_sums import BatchSums

CPU = torch.device("cpu")


def test_a_count_that_lives_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # on a device a count stays the tensor that it is; stands in for one
    monkeypatch.setattr(heads, "check_count", lambda count, source: count.detach())
    batch = {"n": torch.tensor(4)}
    sums = BatchSums(lambda batch: batch["n"], "mean")
    sums.before_step(batch)
    batch["n"].zero_()
    assert sums.after_step(torch.tensor(2.0), batch, CPU) == {"": (8.0, 4)}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_losses_of_one_element(shape: tuple[int, ...]) -> None:
    sums = BatchSums(lambda batch: 3, "mean")
    sums.before_step("batch")
    added = sums.after_step({"loss": torch.full(shape, 2.0)}, "batch", CPU)
    assert added is not None
    added = added[""]
    assert (added[0].shape, added[0].dtype, added[0].item()) == ((), torch.float64, 6.0)


@pytest.mark.parametrize("outputs", [None, {}, 1.5, torch.zeros(2), torch.zeros(0)])
def test_no_loss(outputs: Any) -> None:
    sums = BatchSums(lambda batch: batch["missing"], "mean")
    sums.before_step({})  # its error is nobody's where there is no loss
    assert sums.after_step(outputs, {}, CPU) is None


def test_a_batch_is_counted_once() -> None:
    counted = []
    sums = BatchSums(lambda batch: counted.append(batch) or 1, "sum")
    for batch in ("first", "second"):
        sums.before_step(batch)
        sums.after_step(torch.tensor(1.0), batch, CPU)
    assert counted == ["first", "second"]
