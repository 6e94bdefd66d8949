"""What waits in the look-ahead is a reference to something that the user's loader may go on changing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_tokennorm import TokenNormDDP
from tests.helpers.launch import RankError, run_ranks
from tests.helpers.scalar_rig import R2, ScalarModule, make_batch, make_loader, make_trainer


class Refilling:
    """Fills the same tensors anew for each batch; https://github.com/NVIDIA/DALI/issues/1375."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        batch = make_batch(1, 0.0)
        for value in (1.0, 5.0, 3.0, 8.0):
            batch["values"].fill_(value)
            yield batch

    def __len__(self) -> int:
        return 4


def fit_refilling(rank: int, world_size: int) -> None:
    loader: Any = Refilling() if rank == 1 else make_loader([(1, 1)] * 4)
    make_trainer(world_size, accumulate_grad_batches=2, strategy=TokenNormDDP()).fit(ScalarModule(), loader)


def test_reused_memory_is_refused_by_all_ranks_before_the_first_update() -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(fit_refilling, 2)
    for rank in range(2):
        own = str(raised.value).split(f"rank {rank} raised")[1]
        assert "At update 0, the coming micro-batches cannot be used. Rank 1: TokenNormError: The loader has" in own
        assert "`tensor.clone()`" in own


class LiveState(IterableDataset[dict[str, Tensor]]):
    """Its state is one dict that it goes on changing; https://github.com/huggingface/datasets/pull/8387."""

    def __init__(self) -> None:
        self.state = {"next": 0}
        self.asked = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.state["next"] < 9:
            self.state["next"] += 1
            yield make_batch(1, self.state["next"] - 1.0)
        self.state["next"] = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Records(ScalarModule):
    def __init__(self, save: Path | None = None) -> None:
        super().__init__()
        self.save, self.values = save, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(int(batch["values"][0, 1]))
        if self.save is not None and batch_idx == 2:
            self.trainer.save_checkpoint(self.save)


@pytest.mark.parametrize("wrapped", [False, True], ids=["loader", "torchdata"])
def test_a_state_that_goes_on_changing(wrapped: bool, tmp_path: Path) -> None:
    def fit(module: Records, **options: Any) -> LiveState:
        data = LiveState()
        loader = StatefulDataLoader(data, batch_size=None, num_workers=0) if wrapped else data
        make_trainer(1, accumulate_grad_batches=3, strategy=TokenNormDDP()).fit(module, loader, **options)
        return data

    data = fit(Records(tmp_path / "saved.ckpt"))
    if not wrapped:
        assert data.asked <= 3 + 2  # a window each, at the end of the stream, and Lightning's own for the checkpoint
    resumed = Records()
    fit(resumed, ckpt_path=tmp_path / "saved.ckpt")
    assert resumed.values == [3, 4, 5, 6, 7, 8]


def test_two_fits_from_one_iterator_lose_nothing() -> None:
    source = iter([make_batch(1, float(value)) for value in range(8)])

    class Once(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return source

    values = []
    for _ in range(2):
        module = Records()
        trainer = make_trainer(1, accumulate_grad_batches=2, max_steps=2, strategy=TokenNormDDP())
        trainer.fit(module, torch.utils.data.DataLoader(Once(), batch_size=None))
        values += module.values
    assert values == list(range(8))


class OneElement(ScalarModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).reshape(1)


def test_a_loss_of_one_element_has_a_sum_without_dimensions() -> None:
    module = OneElement()
    make_trainer(1, accumulate_grad_batches=3, strategy=TokenNormDDP()).fit(module, make_loader(R2[0]))
    # t = 1: the sum of the losses is the sum of n * x, 3 + 5 + 8 in the first window
    assert module.records[0].loss_sum.shape == ()
    assert module.records[0].loss_sum.item() == 16
