"""Ranks with unequal numbers of batches: padded until all are done, or refused by all together; never a hang."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP, TokenNormError
from tests.helpers import scalar_rig as rig
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R1, R2, ScalarModule, Table

TOLERANCE = 1e-12

FIVE_AND_SIX: Table = [R2[0], [*R2[1], (1, 1)]]
# R1, then rank 0's (3, 1), (1, 5) beside rank 1's (2, 2), (10, 1), (1, 1): (8 + 15) / (4 + 13) = 23 / 17
FIVE_AND_SIX_GRADIENTS = [1.75, 23 / 17]


class Counts(ScalarModule):
    """Counts what runs on each rank besides the law."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trained: list[float] = []
        self.padded = self.validations = self.epoch_ends = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(self.trainer.strategy, TokenNormDDP)
        self.padded += self.trainer.strategy.micro_batch_is_padded  # in the step it would be put back

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch["values"][0, 0].item())  # put back where the micro-batch is padded
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "num_tokens": (batch["labels"][:, 1:] != -100).sum()}

    def on_validation_epoch_end(self) -> None:
        dist.barrier()  # meets the other ranks only where they validate at the same time
        self.validations += 1

    def on_train_epoch_end(self) -> None:
        dist.barrier()
        self.epoch_ends += 1


def fit(
    rank: int, world_size: int, table: Table, accumulate: int, sized: Any, options: dict[str, Any], uneven: str = "pad"
) -> dict[str, Any]:
    module = Counts("mean", 1.0, 0.0)
    sized = sized[rank] if isinstance(sized, list) else sized
    trainer = rig.make_trainer(
        world_size,
        strategy=TokenNormDDP(uneven=uneven, audit=options.pop("audit", False)),  # type: ignore[arg-type]
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        callbacks=[TokenMeanMetric()],
        **options,
    )
    error = None
    try:
        trainer.fit(module, rig.make_loader(table[rank], sized=sized), rig.make_loader(R1[rank % 2]))
    except TokenNormError as caught:
        error = str(caught)
    return {
        "gradients": module.gradients,
        "records": module.records,
        "trained": module.trained,
        "padded": module.padded,
        "validations": module.validations,
        "epoch_ends": module.epoch_ends,
        "steps": trainer.global_step,
        "logged": {key: value.item() for key, value in trainer.callback_metrics.items()},
        "error": error,
    }


@pytest.mark.parametrize("sized", [True, False, [True, False]], ids=["sized", "stream", "mixed"])
def test_every_batch_of_every_rank_is_trained_on(sized: Any) -> None:
    results = run_ranks(fit, 2, FIVE_AND_SIX, 3, sized, {"max_epochs": 2})
    for rank, result in enumerate(results):
        assert result["error"] is None
        assert result["gradients"] == pytest.approx(FIVE_AND_SIX_GRADIENTS * 2, abs=TOLERANCE)
        assert result["trained"] == [value for _, value in FIVE_AND_SIX[rank]] * 2
        assert result["padded"] == (2 if rank == 0 else 0)  # one at each epoch's end
        assert [record.padded_micro_batches for record in result["records"]] == [0, 1, 0, 1]
        assert [record.num_tokens for record in result["records"]] == [24, 17] * 2
        assert (result["steps"], result["epoch_ends"], result["validations"]) == (4, 2, 2)
        # theta is 1, so the loss per token is the mean of the values: what is padded is not in it
        assert result["logged"]["train_loss_per_token_epoch"] == pytest.approx((42 + 23) / (24 + 17), abs=TOLERANCE)
        assert result["logged"]["train_loss_per_token_step"] == pytest.approx(23 / 17, abs=TOLERANCE)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
@pytest.mark.parametrize(
    ("lengths", "accumulate"),
    [
        ((1, 9), 3),  # far fewer
        ((3, 6), 3),  # a rank ends at a window's edge
        ((1, 4), 4),  # 1 and K in one window
        ((7, 2), 1),
        ((4, 6), 8),  # K beyond both
        ((0, 5), 3),  # none at all from the start: it borrows a batch
        ((5, 0), 2),
    ],
)
def test_lengths(lengths: tuple[int, int], accumulate: int, sized: bool) -> None:
    # rank r's i-th micro-batch has i + 1 + r tokens of value i + 1
    table = [[(i + 1 + rank, i + 1.0) for i in range(length)] for rank, length in enumerate(lengths)]
    longest = max(lengths)
    expected, padded = [], []
    for start in range(0, longest, accumulate):
        window = [row[start : start + accumulate] for row in table]
        live = [micro_batch for row in window for micro_batch in row]
        expected.append(sum(n * x for n, x in live) / sum(n for n, _ in live))
        padded.append(sum(max(map(len, window)) - len(row) for row in window))
    for rank, result in enumerate(run_ranks(fit, 2, table, accumulate, sized, {"max_epochs": 2})):
        assert result["error"] is None
        assert result["gradients"] == pytest.approx(expected * 2, abs=TOLERANCE)
        assert result["trained"] == [value for _, value in table[rank]] * 2
        assert result["padded"] == 2 * (longest - lengths[rank])
        assert [record.padded_micro_batches for record in result["records"]] == padded * 2
        assert (result["epoch_ends"], result["validations"]) == (2, 2)


def test_three_ranks_and_the_audit() -> None:
    # 4, 1 and 0 batches, K = 2: (1*1 + 2*2 + 5*7) / 8, then (3*3 + 4*4) / 7; the audit leaves out what is padded
    table: Table = [[(1, 1), (2, 2), (3, 3), (4, 4)], [(5, 7)], []]
    for result in run_ranks(fit, 3, table, 2, False, {"audit": True}):
        assert result["error"] is None
        assert result["gradients"] == pytest.approx([5.0, 25 / 7], abs=TOLERANCE)
        assert [record.padded_micro_batches for record in result["records"]] == [1 + 2, 2 + 2]


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 5])
def test_validation_stays_aligned(interval: int) -> None:
    # 4 and 6 batches, K = 4: validation after every `interval` batches, also after rank 0's data has ended
    table: Table = [[(1, 1)] * 4, [(2, 2)] * 6]
    for result in run_ranks(fit, 2, table, 4, False, {"val_check_interval": interval}):
        assert result["error"] is None
        assert result["gradients"] == pytest.approx([20 / 12, 2.0], abs=TOLERANCE)
        assert result["validations"] == 6 // interval


def test_fraction_of_the_longest_rank() -> None:
    # sized, 4 and 6 batches: half of 6 on both ranks
    table: Table = [[(1, 1)] * 4, [(2, 2)] * 6]
    for result in run_ranks(fit, 2, table, 2, True, {"val_check_interval": 0.5}):
        assert (result["error"], result["validations"], result["steps"]) == (None, 2, 3)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
@pytest.mark.parametrize(
    ("table", "done", "text"),
    [
        # 5 and 6 batches, K = 3: the second window has 2 and 3 micro-batches
        (FIVE_AND_SIX, [1.75], "rank 0 has 2, rank 1 has 3"),
        # 3 and 6: rank 0 must not go to its epoch's end while rank 1 waits for it in the second window
        ([R1[0], [*R1[1], *R1[1]]], [1.75], "rank 0 has 0, rank 1 has 3"),
        ([[], R1[1]], [], "rank 0 has 0, rank 1 has 3"),
    ],
    ids=["inside", "at an edge", "none at all"],
)
def test_error_on_all_ranks_where_asked_for(table: Table, done: list[float], text: str, sized: bool) -> None:
    for result in run_ranks(fit, 2, table, 3, sized, {}, "error"):
        assert text in result["error"]
        assert result["gradients"] == pytest.approx(done, abs=TOLERANCE)


class Nones:
    """A stream that yields ``None`` where a rank's table does."""

    def __init__(self, micro_batches: list[Any]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[Any]:
        return (each and rig.make_batch(*each) for each in self.micro_batches)


def fit_with_nones(rank: int, world_size: int, table: list[list[Any]], accumulate: int) -> dict[str, Any]:
    module = Counts()
    trainer = rig.make_trainer(world_size, strategy=TokenNormDDP(), accumulate_grad_batches=accumulate)
    error = None
    try:
        trainer.fit(module, Nones(table[rank]))
    except TokenNormError as caught:
        error = str(caught)
    return {"gradients": module.gradients, "padded": module.padded, "error": error}


def test_batches_that_are_none_weigh_nothing() -> None:
    # K = 2: (1*1 + 2*3) / 3; then rank 0 has only None: 3*4 / 3
    table = [[None, (1, 1), None, None], [(2, 3), None, None, (3, 4)]]
    results = run_ranks(fit_with_nones, 2, table, 2)
    for result in results:
        assert result["error"] is None
        assert result["gradients"] == pytest.approx([7 / 3, 4.0], abs=TOLERANCE)
    # a single process, None first and last
    (result,) = run_ranks(fit_with_nones, 1, [[None, (1, 2), (3, 4), None]], 2)
    assert result["gradients"] == pytest.approx([2.0, 4.0], abs=TOLERANCE)


def test_nothing_but_none_is_an_error_on_all_ranks() -> None:
    for result in run_ranks(fit_with_nones, 2, [[None], [None, None]], 2):
        assert "no rank has a batch to run its forward on" in result["error"]


class Unpicklable(dict[str, Any]):
    def __reduce__(self) -> Any:
        raise TypeError("a batch with an open file")


class Wraps(Nones):
    def __iter__(self) -> Iterator[Any]:
        return (Unpicklable(batch) for batch in super().__iter__())


def fit_with_unpicklable(rank: int, world_size: int) -> str | None:
    trainer = rig.make_trainer(world_size, strategy=TokenNormDDP())
    try:
        trainer.fit(Counts(), Wraps([(1, 1)] if rank else []))
    except TokenNormError as caught:
        return str(caught)
    return None


def test_a_batch_that_cannot_be_lent_is_an_error_on_all_ranks() -> None:
    for error in run_ranks(fit_with_unpicklable, 2):
        assert error is not None
        assert "rank 1's cannot be pickled" in error
        assert "a batch with an open file" in error


class PopsItsLabels(Counts):
    """Changes its batch, as much code does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        batch["labels"].fill_(-100)
        batch.clear()
        return loss

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch  # in place all the way


def fit_with_changed_batches(rank: int, world_size: int, lengths: list[int]) -> list[float]:
    module = PopsItsLabels()
    trainer = rig.make_trainer(world_size, strategy=TokenNormDDP(), accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(rig.Stream([(1, 1)] * lengths[rank]), batch_size=None))
    return module.gradients


@pytest.mark.parametrize("fewer", [1, 2], ids=["inside a window", "at an edge"])
def test_a_step_that_changes_its_batch_can_be_padded(fewer: int) -> None:
    assert run_ranks(fit_with_changed_batches, 2, [fewer, 5]) == [[1.0] * 3] * 2


class Breaks(Nones):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise OSError("the disk is gone")


def fit_with_broken_loader(rank: int, world_size: int) -> tuple[str, list[float]]:
    module = Counts()
    trainer = rig.make_trainer(world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3)
    kind = Breaks if rank == world_size - 1 else Nones
    with pytest.raises(TokenNormError) as caught:
        trainer.fit(module, kind(R1[rank]))
    return str(caught.value), module.gradients


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loader_that_fails_where_a_window_ends(world_size: int) -> None:
    # where the data of the other rank ends: neither takes it for the end of the epoch
    for error, gradients in run_ranks(fit_with_broken_loader, world_size):
        assert f"Rank {world_size - 1}: OSError: the disk is gone" in error
        assert len(gradients) == 1


def fit_and_tell(rank: int, world_size: int) -> int:
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch").addHandler(handler)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addHandler(handler)
    trainer: pl.Trainer = rig.make_trainer(world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3, max_epochs=2)
    trainer.fit(Counts(), rig.make_loader(FIVE_AND_SIX[rank], sized=False))
    # a record comes by once for each of the loggers that it passes
    return len({id(record) for record in said if "2 micro-batches without data" in record.getMessage()})


def test_rank_zero_says_once_how_many_were_padded() -> None:
    assert run_ranks(fit_and_tell, 2) == [1, 0]


# ---- ranks with unequal accumulation


class ChangesAccumulation(Counts):
    """Changes `accumulate_grad_batches` after the second window, where it is told so."""

    def __init__(self, accumulate: int | None) -> None:
        super().__init__()
        self.accumulate = accumulate

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 5 and self.accumulate is not None:
            self.trainer.accumulate_grad_batches = self.accumulate


def fit_with_unequal_accumulation(rank: int, world_size: int, start: list[int], later: list[int | None]) -> Any:
    module = ChangesAccumulation(later[rank])
    trainer = rig.make_trainer(
        world_size, strategy=TokenNormDDP(timeout=timedelta(seconds=60)), accumulate_grad_batches=start[rank]
    )
    try:
        trainer.fit(module, rig.make_loader(R2[rank] * 3))
    except TokenNormError as error:
        return str(error), module.gradients
    return None, module.gradients


def test_unequal_accumulation_is_an_error_on_all_ranks() -> None:
    for error, gradients in run_ranks(fit_with_unequal_accumulation, 2, [3, 2], [None, None]):
        assert "`accumulate_grad_batches` differs between ranks: rank 0 has 3, rank 1 has 2" in error
        assert gradients == []


def test_accumulation_that_one_rank_changes_between_windows() -> None:
    # it raises with the other's next report, or sees that the other has gone on without one; the other, in the window,
    # when that rank has ended
    results = run_ranks(fit_with_unequal_accumulation, 2, [3, 3], [None, 1])
    for error, gradients in results:
        assert "`accumulate_grad_batches` differs between ranks" in error
        assert "rank 1 has " in error  # its value, or that it has changed it
        assert len(gradients) == 2
    assert results[0][0].startswith("Another rank has ended inside a window. The first to fail was rank 1")
