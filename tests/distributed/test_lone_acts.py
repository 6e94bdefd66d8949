"""What one rank does alone between or inside windows: told soon, on all ranks, and never a hang or an abort."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_tokennorm import TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R1, ScalarModule, make_batch, make_loader, make_trainer

# ---- K that one rank changes


class SetsAccumulation(Callback):
    def __init__(self, after: dict[int, int]) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.accumulate_grad_batches = self.after.get(batch_idx, trainer.accumulate_grad_batches)


def fit_with_changing_accumulation(
    rank: int, world_size: int, changes: list[dict[int, int]], epochs: int, max_steps: int
) -> tuple[str, list[float]]:
    module = ScalarModule()
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        max_epochs=epochs,
        max_steps=max_steps,
        callbacks=[SetsAccumulation(changes[rank])],
    )
    try:
        trainer.fit(module, make_loader(R1[rank] * 3))  # nine batches: three windows of R1
    except RuntimeError as error:
        return str(error), module.gradients
    return "went to its end", module.gradients


@pytest.mark.parametrize("accumulate", [2, 4], ids=["less", "more"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("after", "epochs", "max_steps"),
    [
        pytest.param(5, 1, -1, id="before the last window of the epoch"),
        pytest.param(2, 1, -1, id="before a middle window"),
        pytest.param(2, 1, 2, id="before the last of max_steps"),
        pytest.param(8, 2, -1, id="between epochs"),
    ],
)
def test_accumulation_that_one_rank_changes(
    after: int, epochs: int, max_steps: int, rank: int, accumulate: int
) -> None:
    changes: list[dict[int, int]] = [{}, {}]
    changes[rank] = {after: accumulate}
    for error, gradients in run_ranks(fit_with_changing_accumulation, 2, changes, epochs, max_steps):
        assert "`accumulate_grad_batches` differs between ranks" in error
        assert f"rank {rank} has " in error
        # nothing wrong was stepped on, nor did anybody wait for the timeout, which the error would name instead
        assert set(gradients) == {1.75}
        assert "Timed out" not in error


@pytest.mark.parametrize(("after", "epochs", "max_steps"), [(5, 1, -1), (2, 1, 3)])
def test_accumulation_that_all_ranks_change(after: int, epochs: int, max_steps: int) -> None:
    for error, gradients in run_ranks(fit_with_changing_accumulation, 2, [{after: 1}] * 2, epochs, max_steps):
        assert error == "went to its end"
        # R1 column by column: (3 + 4) / (3 + 2) = 1.4, (5 + 10) / (1 + 10) = 15 / 11, (8 + 12) / (4 + 4) = 2.5
        singly = [1.4, 15 / 11, 2.5]
        expected = [1.75] * ((after + 1) // 3) + singly
        assert gradients == pytest.approx(expected[: max_steps if max_steps > 0 else None], rel=1e-12)


# ---- checkpoints that one rank saves


class Stateful:
    position = 0

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        while self.position < 9:
            self.position += 1
            yield make_batch(*(R1[self.rank] * 3)[self.position - 1])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


HOOKS = {
    "inside a window": ("on_train_batch_end", 3),
    "after a window": ("on_train_batch_end", 5),
    "in the step": ("training_step", 4),
    "before the optimizer steps": ("on_before_optimizer_step", 5),
    "in the validation": ("on_validation_epoch_end", None),
    "after the epoch": ("on_train_epoch_end", None),
    "at the start": ("on_train_start", None),
    "at the end": ("on_train_end", None),
}


class Saves(ScalarModule):
    """Saves where it is told to: by the strategy on one rank, or by the Trainer on all."""

    def __init__(self, rank: int, where: str, weights_only: bool, lone: bool, folder: str) -> None:
        super().__init__(lr=0.01)
        self.rank, self.weights_only, self.lone, self.folder = rank, weights_only, lone, folder
        self.saved: list[str] = []
        self.hook, self.batch = HOOKS.get(where, ("", None))

    def reach(self, hook: str, batch: int | None = None) -> None:
        if hook == self.hook and batch == self.batch and not self.trainer.sanity_checking:
            self.save()

    def save(self) -> None:
        path = f"{self.folder}/{'lone' if self.lone else 'all'}.ckpt"
        if not self.lone:
            self.trainer.save_checkpoint(path, weights_only=self.weights_only)
        elif self.rank == 0:
            checkpoint = self.trainer._checkpoint_connector.dump_checkpoint(self.weights_only)
            self.trainer.strategy.save_checkpoint(checkpoint, path)
        self.saved.append(path)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.reach("training_step", batch_idx)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.reach("on_train_batch_end", batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.reach("on_before_optimizer_step", self.trainer.fit_loop.batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.reach("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        self.reach("on_train_epoch_end")

    def on_train_start(self) -> None:
        self.reach("on_train_start")

    def on_train_end(self) -> None:
        self.reach("on_train_end")


def fit_and_save(
    rank: int, world_size: int, wheres: list[str], weights_only: bool, lone: bool, stateful: bool, folder: str
) -> list[str]:
    return [fit_and_save_at(rank, world_size, where, weights_only, lone, stateful, folder) for where in wheres]


def fit_and_save_at(
    rank: int, world_size: int, where: str, weights_only: bool, lone: bool, stateful: bool, folder: str
) -> str:
    module = Saves(rank, where, weights_only, lone, folder)
    make = partial(Stateful, rank) if stateful else partial(make_loader, R1[rank] * 3)
    options = {"accumulate_grad_batches": 3, "num_sanity_val_steps": 0, "val_check_interval": 9}
    trainer = make_trainer(world_size, strategy=TokenNormDDP(), **options)
    try:
        trainer.fit(module, make(), make_loader(R1[rank]))
        if where == "after the fit":
            module.save()
    except RuntimeError as error:
        return str(error)
    # all three windows are stepped on, and every rank is where the others are
    assert [record.index for record in module.records] == [0, 1, 2], module.records
    assert module.gradients == pytest.approx([1.75] * 3, rel=1e-12)
    if rank == 0 or not lone:
        path = module.saved[0]
        saved = torch.load(path, weights_only=False)
        assert "t" in saved["state_dict"]
        if not weights_only and where != "after the fit":  # it goes on, from the edge of a window on
            resumed = Saves(rank, "", False, False, folder)
            if not lone:
                strategy = TokenNormDDP()
                make_trainer(world_size, strategy=strategy, **options).fit(
                    resumed, make(), make_loader(R1[rank]), ckpt_path=path
                )
                assert resumed.t.item() == module.t.item(), where
    return "saved"


EVERYWHERE = [*HOOKS, "after the fit"]


@pytest.mark.parametrize("stateful", [False, True], ids=["sized", "stateful"])
def test_weights_that_one_rank_saves(stateful: bool, tmp_path: Any) -> None:
    for ended in run_ranks(fit_and_save, 2, EVERYWHERE, True, True, stateful, str(tmp_path)):
        assert dict(zip(EVERYWHERE, ended, strict=True)) == dict.fromkeys(EVERYWHERE, "saved")


@pytest.mark.parametrize("stateful", [False, True], ids=["sized", "stateful"])
def test_checkpoints_that_all_ranks_save(stateful: bool, tmp_path: Any) -> None:
    for ended in run_ranks(fit_and_save, 2, EVERYWHERE, False, False, stateful, str(tmp_path)):
        assert dict(zip(EVERYWHERE, ended, strict=True)) == dict.fromkeys(EVERYWHERE, "saved")


@pytest.mark.parametrize("stateful", [False, True], ids=["sized", "stateful"])
@pytest.mark.parametrize("where", HOOKS)
def test_full_checkpoint_that_one_rank_saves(where: str, stateful: bool, tmp_path: Any) -> None:
    for rank, (error,) in enumerate(run_ranks(fit_and_save, 2, [where], False, True, stateful, str(tmp_path))):
        alone = "Rank 0 saves a full checkpoint alone (`Strategy.save_checkpoint`)"
        others = "rank 0 saves a full checkpoint while others train"
        assert alone in error or (rank == 1 and others in error), error
        assert "Call `trainer.save_checkpoint` on all ranks; one with weights only can be saved by one." in error


def test_full_checkpoint_that_one_rank_saves_after_the_fit(tmp_path: Any) -> None:
    for (ended,) in run_ranks(fit_and_save, 2, ["after the fit"], False, True, True, str(tmp_path)):
        assert ended == "saved"
