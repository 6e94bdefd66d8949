"""The law on a small transformer, for any host: what a case is trained on, what has to come of it, what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.scalar_rig import make_trainer
from tests.helpers.tiny_lm import TinyModule, collate, flat, make_samples, num_supervised, reference

LR = 0.5
TOLERANCE = 1e-12
Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """What the ranks are trained on, and how."""

    lengths: tuple[int, ...] = (5, 5)
    """Micro-batches of each rank that holds data of its own."""
    accumulate: int = 3
    loss: str = "mean"
    """As `TinyModule` takes it: ``"mean"``, ``"sum"`` or ``"hand-written"``, whose mean over no token is NaN."""
    empty: tuple[tuple[int, int], ...] = ((0, 1), (1, 2))
    """Micro-batches without a token: rank and index."""
    stream: bool = False
    """Whether the number of batches is unknown; such a loader has a state to resume from."""
    stateful: bool = False
    """Whether a loader of known length has a state, too."""
    epochs: int = 1

    def micro_batches(self) -> list[list[list[Sample]]]:
        """The samples of each rank's micro-batches, one to three in each."""
        samples = iter(make_samples(3 * sum(self.lengths)))
        dealt = [
            [[next(samples) for _ in range(1 + (rank + index) % 3)] for index in range(length)]
            for rank, length in enumerate(self.lengths)
        ]
        for rank, index in self.empty:
            dealt[rank][index] = make_samples(2, empty=(0, 1))
        return dealt

    def windows(self) -> list[list[Sample]]:
        """The samples of each update."""
        dealt, windows = self.micro_batches(), []
        for start in range(0, max(self.lengths), self.accumulate):
            own = [rank[start : start + self.accumulate] for rank in dealt]
            windows.append([sample for each in own for micro_batch in each for sample in micro_batch])
        return windows * self.epochs


@lru_cache
def expected(case: Case) -> list[Tensor]:
    """The gradient of each update, from one process on the merged windows; zero where a window has no token."""
    windows = case.windows()
    gradients = iter(reference([each for each in windows if num_supervised(collate(each))], LR)[0])
    return [next(gradients) if num_supervised(collate(each)) else torch.zeros(()) for each in windows]


class Stream(IterableDataset[Any]):
    """Batches of an unknown number, with a state to resume from."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.position = 0
        self._resumed = False

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self.position = 0
        self._resumed = False
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self._resumed = state["position"], True


class SizedStream(Stream):
    """Its length is known."""

    def __len__(self) -> int:
        return len(self.batches)


def full_parameters(model: Any) -> Tensor:
    """The whole parameters of a model whose host keeps them in shards, on every rank."""
    if FullyShardedDataParallel.fsdp_modules(model):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return flat(model.parameters()).clone()
    return flat(getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()).clone()


class Module(TinyModule):
    """Without the records that `TinyModule` makes: whole gradients, which not every host has."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class Updates(Callback):
    """Takes the gradient of each update from what plain SGD made of it, since a host may keep it in shards."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self._before = torch.zeros(())
        self._updates = 0

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        self._before, self._updates = full_parameters(trainer.strategy.model), trainer.global_step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step > self._updates:
            self._updates = trainer.global_step
            after = full_parameters(trainer.strategy.model)
            self.gradients.append((self._before - after) / LR)
            self._before = after


def make_loader(rank: int, case: Case) -> Any:
    """A rank's loader; ranks beyond the case's hold the data of others, as copies do."""
    batches = [collate(samples) for samples in case.micro_batches()[rank % len(case.lengths)]]
    if case.stateful:
        return SizedStream(batches)
    return Stream(batches) if case.stream else DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fit(
    rank: int, world_size: int, case: Case, strategy: Any, module: Module | None = None, **options: Any
) -> list[Tensor]:
    """Train on a case, on this rank.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        case: The case.
        strategy: A strategy, or the name of one.
        module: The module; a `Module` by default.
        options: Of the Trainer, and ``ckpt_path``.

    Returns:
        The gradient of each update.
    """
    updates = Updates()
    ckpt_path = options.pop("ckpt_path", None)
    trainer = make_trainer(
        world_size,
        strategy=strategy,
        accumulate_grad_batches=options.pop("accumulate_grad_batches", case.accumulate),
        max_epochs=case.epochs,
        callbacks=[updates, *options.pop("callbacks", [])],
        **options,
    )
    trainer.fit(Module(case.loss, lr=LR) if module is None else module, make_loader(rank, case), ckpt_path=ckpt_path)
    return updates.gradients


def error(case: Case, gradients: list[Tensor]) -> float:
    """The largest difference to the gradients that one process gets; infinite where their number differs."""
    wanted = expected(case)
    if len(wanted) != len(gradients):
        return float("inf")
    pairs = zip(wanted, gradients, strict=True)
    return max(float("inf") if not each.isfinite().all() else (want - each).abs().max().item() for want, each in pairs)
