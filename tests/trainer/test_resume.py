"""A run that is stopped anywhere and resumed equals the uninterrupted one: same windows, every sample once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tokennorm import TokenNormDDP, TokenNormError
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import ScalarModule, make_batch, make_trainer

LENGTH, ACCUMULATE = 8, 3  # windows of 3, 3 and 2


def batch(index: int) -> dict[str, Tensor]:
    return make_batch(1 + index % 4, float(index))


class Stream:
    """A stateful loader: of unknown length, or sized."""

    def __init__(self) -> None:
        self.position = 0
        self.resumed = False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self.resumed:
            self.position = 0
        self.resumed = False
        return self._rest()

    def _rest(self) -> Iterator[dict[str, Tensor]]:
        while self.position < LENGTH:
            self.position += 1
            # each rank has samples of its own
            yield batch(self.position - 1 + dist.get_rank() * 10)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.resumed = state["position"], True


class SizedStream(Stream):
    def __len__(self) -> int:
        return LENGTH


class Uneven(Stream):
    """Rank 0 has 2 batches, rank 1 all, rank 2 has 5."""

    def _rest(self) -> Iterator[dict[str, Tensor]]:
        while self.position < (2, LENGTH, 5)[dist.get_rank()]:
            self.position += 1
            yield batch(self.position - 1 + dist.get_rank() * 10)


class SizedUneven(Uneven):
    def __len__(self) -> int:
        return (2, LENGTH, 5)[dist.get_rank()]


class Indexed(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return batch(index)


def make_stateful_loader(kind: str) -> Any:
    if kind == "stream":
        return Stream()
    if kind == "sized":
        return SizedStream()
    if kind.startswith("uneven"):
        return SizedUneven() if kind == "uneven, sized" else Uneven()
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(5)
    return StatefulDataLoader(
        Indexed(), batch_size=None, shuffle=True, generator=generator, num_workers=2 if kind == "workers" else 0
    )


def epochs_of(kind: str) -> int:
    # torchdata draws another order for the epochs after the one that it resumes in
    return 1 if kind in ("torchdata", "workers") else 2


class Module(ScalarModule):
    """Remembers the values of each micro-batch that was trained on, and the parameter after each update."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.trained: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) * self.t  # quadratic, so that every update depends on those before it

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if not getattr(self.trainer.strategy, "micro_batch_is_padded", False):
            self.trained.append(batch["values"][0, 1].item())
        return super().training_step(batch, batch_idx)


class Saves(Callback):
    """Writes a checkpoint in a hook of one batch and stops there."""

    def __init__(self, path: Path, batch_idx: int, hook: str = "train") -> None:
        self.path, self.batch_idx, self.hook = path, batch_idx, hook

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.hook == "train":
            self._save(trainer)

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        if self.hook == "validation":
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        if self.hook == "epoch":
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch_idx:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def fit(kind: str, accumulate: int = ACCUMULATE, path: Any = None, world_size: int = 1, **options: Any) -> Module:
    module = Module()
    trainer = make_trainer(
        world_size,
        strategy=options.pop("strategy", None) or TokenNormDDP(),
        accumulate_grad_batches=accumulate,
        max_epochs=epochs_of(kind),
        num_sanity_val_steps=0,
        **options,
    )
    validation = [batch(0)] if "val_check_interval" in options else None
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(module, make_stateful_loader(kind), _List(validation) if validation else None, ckpt_path=path)
    return module


class _List:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def stop_and_resume(rank: int, world_size: int, folder: str, kind: str, hook: str) -> None:
    options: dict[str, Any] = {"world_size": world_size}
    if hook == "validation":
        options |= {"val_check_interval": 2, "check_val_every_n_epoch": None}
    whole = fit(kind, **options)
    assert len(whole.trained) == epochs_of(kind) * LENGTH
    for batch_idx in range(epochs_of(kind) * LENGTH - 1):
        if (hook == "validation" and batch_idx % 2 == 0) or (hook == "epoch" and batch_idx != LENGTH - 1):
            continue
        path = Path(folder) / f"{batch_idx}.ckpt"
        fit(kind, callbacks=[Saves(path, batch_idx, hook)], **options)
        resumed = fit(kind, path=path, **options)
        # windows end at batches 2, 5 and 7 of an epoch: what comes after the last one that is complete is done again
        in_epoch = batch_idx % LENGTH
        edges = [edge for edge in (0, 3, 6, 8) if edge <= in_epoch + 1]
        start = batch_idx - in_epoch + edges[-1]
        assert resumed.trained == whole.trained[start:], f"stopped after batch {batch_idx}"
        updates = len(resumed.parameters_after)
        assert resumed.parameters_after == whole.parameters_after[-updates:]
        assert resumed.trainer.global_step == whole.trainer.global_step == 3 * epochs_of(kind)
        stepped = resumed.trainer.fit_loop.epoch_loop._batches_that_stepped
        assert stepped == whole.trainer.fit_loop.epoch_loop._batches_that_stepped, f"stopped after batch {batch_idx}"


@pytest.mark.parametrize("kind", ["stream", "sized", "torchdata", "workers"])
def test_stopped_after_any_batch(kind: str, tmp_path: Path) -> None:
    run_ranks(stop_and_resume, 1, str(tmp_path), kind, "train", timeout_s=500)


def test_two_ranks_stopped_after_any_batch(tmp_path: Path) -> None:
    run_ranks(stop_and_resume, 2, str(tmp_path), "stream", "train", timeout_s=500)


def stop_and_resume_unevenly(rank: int, world_size: int, folder: str, kind: str) -> None:
    whole = fit(kind, world_size=world_size)
    for batch_idx in range(2 * LENGTH - 1):
        path = Path(folder) / f"{batch_idx}.ckpt"
        stopped = fit(kind, world_size=world_size, callbacks=[Saves(path, batch_idx)])
        resumed = fit(kind, path=path, world_size=world_size)
        # the epoch has as many batches as rank 1: windows end at its batches 2, 5 and 7
        updates = batch_idx // LENGTH * 3 + sum(batch_idx % LENGTH >= end for end in (2, 5, 7))
        assert resumed.parameters_after == whole.parameters_after[updates:], f"stopped after batch {batch_idx}"
        done_again = len(stopped.trained) + len(resumed.trained) - len(whole.trained)
        assert 0 <= done_again <= 2  # of the window that was not complete
        assert stopped.trained[: len(stopped.trained) - done_again] + resumed.trained == whole.trained
        assert resumed.trainer.global_step == 6


@pytest.mark.parametrize("kind", ["uneven, stream", "uneven, sized"])
def test_ranks_of_unequal_length_stopped_after_any_batch(kind: str, tmp_path: Path) -> None:
    run_ranks(stop_and_resume_unevenly, 3, str(tmp_path), kind, timeout_s=500)


def stop(rank: int, world_size: int, path: str, batch_idx: int) -> None:
    fit("stream", world_size=world_size, callbacks=[Saves(Path(path), batch_idx)])


def go_on(rank: int, world_size: int, path: str) -> int | str:
    try:
        return len(fit("stream", path=path, world_size=world_size).trained)
    except TokenNormError as error:
        return str(error)


def test_resume_with_another_number_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "epoch.ckpt")
    run_ranks(stop, 2, path, LENGTH - 1)
    assert run_ranks(go_on, 1, path) == [LENGTH]  # the second epoch
    path = str(tmp_path / "inside.ckpt")
    run_ranks(stop, 1, path, 2)
    for error in run_ranks(go_on, 2, path):
        assert "written inside an epoch, by 1 ranks; this run has 2" in error


def resume_a_torn_window(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    path = Path(folder) / "torn.ckpt"
    fit("sized", strategy=DDPStrategy(), world_size=world_size, callbacks=[Saves(path, 3)])  # 4 of 8, K = 3
    with pytest.raises(TokenNormError) as caught:
        fit("sized", path=path, world_size=world_size)
    return str(caught.value), len(fit("sized", accumulate=2, path=path, world_size=world_size).trained)


def test_a_window_torn_by_another_strategy_is_refused(tmp_path: Path) -> None:
    for error, trained in run_ranks(resume_a_torn_window, 2, str(tmp_path)):
        assert "the gradients of its first 1 micro-batches are lost with `accumulate_grad_batches=3`" in error
        assert trained == 4 + LENGTH  # 4 is a multiple of 2: nothing is lost


@pytest.mark.parametrize("kind", ["stream", "torchdata"])
def test_stopped_after_a_validation_inside_a_window(kind: str, tmp_path: Path) -> None:
    run_ranks(stop_and_resume, 1, str(tmp_path), kind, "validation", timeout_s=500)


@pytest.mark.parametrize("kind", ["stream", "sized"])
def test_stopped_at_the_end_of_an_epoch(kind: str, tmp_path: Path) -> None:
    run_ranks(stop_and_resume, 1, str(tmp_path), kind, "epoch")


def resume_with_another_k(rank: int, world_size: int, folder: str) -> list[list[float]]:
    path = Path(folder) / "edge.ckpt"
    fit("sized", callbacks=[Saves(path, 5)])  # two windows of three
    resumed = fit("sized", accumulate=4, path=path)
    return [record.micro_batches for record in resumed.records]


def test_resume_at_an_edge_with_another_k(tmp_path: Path) -> None:
    # Lightning steps at multiples of K: after 6 of 8 batches comes a window of 2, then two of 4
    assert run_ranks(resume_with_another_k, 1, str(tmp_path)) == [[2, 4, 4]]


def exchange_checkpoints(rank: int, world_size: int, folder: str) -> list[list[float]]:
    path = Path(folder) / "edge.ckpt"
    trained = []
    for first, second in ((TokenNormDDP, DDPStrategy), (DDPStrategy, TokenNormDDP)):
        fit("sized", strategy=first(), callbacks=[Saves(path, 5)])
        trained.append(fit("sized", strategy=second(), path=path).trained)
    return trained


def test_checkpoints_of_plain_lightning_and_the_other_way_round(tmp_path: Path) -> None:
    # two windows of three are done; what is left of the epoch, and the next one
    rest = [6.0, 7.0, *map(float, range(LENGTH))]
    assert run_ranks(exchange_checkpoints, 1, str(tmp_path)) == [[rest, rest]]


class ChangesBetweenWindows(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.accumulate_grad_batches = 3


def change_k_between_windows(rank: int, world_size: int) -> tuple[list[float], list[int]]:
    module = ScalarModule()
    trainer = make_trainer(1, strategy=TokenNormDDP(), accumulate_grad_batches=2, callbacks=[ChangesBetweenWindows()])
    batches = [make_batch(1, float(value)) for value in (1, 3, 5, 7, 9, 11)]
    trainer.fit(module, _List(batches))
    return module.gradients, [record.micro_batches for record in module.records]


def test_k_changed_between_windows_leaves_no_gradient_behind() -> None:
    # windows {1, 3}, {5} (the third batch is a multiple of the new K), {7, 9, 11}; Lightning alone would not clear the
    # first one's gradient, 2, before the second: 7
    gradients, sizes = run_ranks(change_k_between_windows, 1)[0]
    assert sizes == [2, 1, 3]
    assert gradients == pytest.approx([2.0, 5.0, 9.0], abs=1e-12)
