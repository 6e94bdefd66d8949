"""Nothing of ours reads a value from the device while training, and per window there is one collective of ours.

A tensor that refuses to be read stands for one on a GPU: every value that is made of it refuses as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R2, ScalarModule, make_loader, make_trainer

READS = {"item", "__bool__", "__float__", "__int__", "__index__", "tolist", "numpy", "cpu"}
ACCUMULATE, WINDOWS = 3, 4


class OnDevice(Tensor):
    """Raises where its value is asked for, and so does all that is computed with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:  # not `to`: the module's device is the CPU here
            raise AssertionError(f"`{name}` waits for the device")
        return super().__torch_function__(func, types, args, kwargs or {})


class Enough(BaseException):
    """Ends a fit before its epoch does, where values are logged and read."""


class Refuses(ScalarModule):
    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch).as_subclass(OnDevice)
        if self.reads:
            loss.item()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Nothing is read."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        record = self.trainer.strategy.last_update  # type: ignore[attr-defined]
        if record is not None:
            assert isinstance(record.loss_sum, OnDevice)
        if batch_idx == ACCUMULATE * WINDOWS - 1:
            raise Enough


def fit_unread(rank: int, world_size: int, log_every: int, reads: bool) -> str:
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=ACCUMULATE,
        log_every_n_steps=log_every,
        callbacks=[TokenMeanMetric()],
    )
    try:
        trainer.fit(Refuses(reads), make_loader([*R2[rank]] * 4))
    except (Enough, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "went to its end"


@pytest.mark.parametrize(
    ("log_every", "reads", "ended"),
    [
        (50, False, "Enough: "),
        (1, False, "AssertionError: `cpu` waits for the device"),  # a logged value is read: once, by the metric
        (50, True, "AssertionError: `item` waits for the device"),
    ],
    ids=["unlogged", "logged", "a module that reads"],
)
def test_no_value_is_read_where_nothing_is_logged(log_every: int, reads: bool, ended: str) -> None:
    assert run_ranks(fit_unread, 2, log_every, reads) == [ended] * 2


# ---- collectives


class Counts(ScalarModule):
    """Counts the collectives that Python code starts in each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.per_micro_batch: list[Counter[str]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.per_micro_batch.append(self.calls.copy())
        self.calls.clear()


@contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    names = ["all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "broadcast_object_list"]
    with mock.patch.multiple(dist, **{name: _counting(name, calls) for name in names}):
        yield


def _counting(name: str, calls: Counter[str]) -> Any:
    collective = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        size = sum(tensor.nbytes for tensor in args if isinstance(tensor, Tensor))
        calls[f"{name} of {size} bytes"] += 1
        return collective(*args, **kwargs)

    return call


def count(rank: int, world_size: int, kind: str) -> list[Counter[str]]:
    module = Counts()
    strategy = DDPStrategy() if kind == "plain" else TokenNormDDP()
    if kind == "lightning's sigterm":
        strategy.agree_on_sigterm = False  # type: ignore[attr-defined]
    trainer = make_trainer(
        world_size,
        strategy=strategy,
        accumulate_grad_batches=ACCUMULATE,
        log_every_n_steps=50,
        callbacks=[TokenMeanMetric()],
    )
    with counted(module.calls):
        trainer.fit(module, make_loader([*R2[rank]] * 3))
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)  # Lightning's loop is as it was
    return module.per_micro_batch


def test_one_collective_of_48_bytes_per_window_and_no_other() -> None:
    for seen in run_ranks(count, 2, "ours"):
        # Micro-batches 0, 1 and 2 are the first window, and so on. With the last one of each the next window's
        # exchange starts; with the last one of the fifth, a short one, the row that says that there is none after it.
        assert seen[1:] == [*[{}, {"all_gather of 48 bytes": 1}, {}] * 4, {"all_gather of 48 bytes": 1}, {}]


@pytest.mark.parametrize("kind", ["plain", "lightning's sigterm"])
def test_lightnings_own_broadcasts(kind: str) -> None:
    """The control: what is left out, and what stays where it is asked for."""
    for seen in run_ranks(count, 2, kind):
        ours = {"all_gather of 48 bytes": 1} if kind != "plain" else {}
        theirs = {key: value for key, value in seen[4].items() if key.startswith("broadcast")}
        assert seen[4] == theirs
        assert seen[5] == {**theirs, **ours}
        if hasattr(_training_epoch_loop(), "_broadcast_sigterm_tensor"):
            assert sum(theirs.values()) == 1


def _training_epoch_loop() -> type:
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    return _TrainingEpochLoop
