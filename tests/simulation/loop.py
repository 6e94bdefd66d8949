"""What Lightning's loops and the strategy do on one rank, around the real fetcher, accounting, exchange and feed.

Only the order of things that concern the windows: fetch, train, step, hooks at a batch's end, validation, resume.
"""

from __future__ import annotations

import copy
import itertools
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.loops.progress import _BatchProgress, _Progress
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_tokennorm import exchange as exchange_module
from lightning_tokennorm.accounting import WindowAccounting
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.strategies import checkpoints
from lightning_tokennorm.strategies.feed import WindowFeed
from lightning_tokennorm.strategies.signals import Signals
from tests.simulation.ranks import Distributed, SimulatedRanks
from tests.simulation.world import World

LOSS = torch.tensor(1.0)


class CrashError(Exception):
    """A rank's own fault."""


class UncountableError(Exception):
    """Raised by the counter."""


@dataclass(frozen=True)
class Update:
    """What went into an update on one rank."""

    epoch: int
    batches: tuple[int, ...]
    """The indices of the rank's own batches that were trained on."""
    num_tokens: float
    gradient: float


class Source:
    """A rank's loader. Its state is the dict that it goes on changing."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.asked: list[int] = []
        """Per epoch, the batches that it was asked for, beyond its end too."""
        self.states_asked = 0
        self._state = {"next": 0}
        self._start = 0
        if world.is_sized(rank):
            length = len(world.batches[rank]) + (world.promises if world.batches[rank] else 0)
            self._become("__len__", lambda self: length)
        if world.stateful:
            self._become("state_dict", Source._state_dict)
            self._become("load_state_dict", Source._load_state_dict)

    def _become(self, name: str, method: Any) -> None:
        # on a class of its own: whether a loader has a length or a state is asked of its type
        self.__class__ = type("Source", (self.__class__,), {name: method})

    def __iter__(self) -> Iterator[Any]:
        self.asked.append(self._start)
        self._state["next"], self._start = self._start, 0
        return self

    def __next__(self) -> Any:
        index = self._state["next"]
        self.asked[-1] = max(self.asked[-1], index + 1)
        if (self.rank, index) == self.world.loader_fails:
            raise OSError("disk gone")
        if index >= len(self.world.batches[self.rank]):
            raise StopIteration
        self._state["next"] = index + 1
        batch = self.world.batch(self.rank, index)
        if batch is None or self.world.replica_size == 1:
            return batch
        return (*batch, torch.tensor([*batch, (self.rank, index) == self.world.other_values]))  # to be compared

    def _state_dict(self) -> dict[str, int]:
        self.states_asked += 1
        return self._state

    def _load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["next"]


class Connector:
    """Lightning's signal connector, as far as it is touched."""

    received_sigterm = False

    def __init__(self, rank: SimulatedRank) -> None:
        self._rank = rank

    def _sigterm_notifier_fn(self, signum: int, frame: Any) -> None:
        raise AssertionError("a SIGTERM has to be noted only")

    def _slurm_sigusr_handler_fn(self, signum: int, frame: Any) -> None:
        self._rank.save()  # and the job is requeued


class SimulatedRank:
    """One rank of a fit.

    Args:
        world: What it has, and what happens to it.
        rank: Which one it is.
        ranks: All of them.
        checkpoint: What it goes on from.
    """

    def __init__(self, world: World, rank: int, ranks: SimulatedRanks, checkpoint: dict[str, Any] | None) -> None:
        self.world, self.rank, self.ranks = world, rank, ranks
        self.updates: list[Update] = []
        self.records = 0
        self.saved: dict[str, Any] | None = None
        self.ordinal = 0
        """Micro-batches of the run before the one in hand."""
        self.source = Source(world, rank)
        self._checkpoint = checkpoint
        self._batches, self._epochs = _BatchProgress(), _Progress()
        epoch_loop = SimpleNamespace(batch_progress=self._batches, _batches_that_stepped=0)
        self.trainer: Any = SimpleNamespace(
            accumulate_grad_batches=world.accumulate,
            max_steps=world.max_steps,
            global_step=0,
            strategy=SimpleNamespace(launcher=None),
            fit_loop=SimpleNamespace(
                epoch_loop=epoch_loop,
                setup_data=lambda: None,
                _load_combined_loader_states=lambda: None,
                _skip_backward=False,
            ),
        )
        self.trainer._signal_connector = self._connector = Connector(self)

    # ---- what the strategy does

    def _set_up(self) -> None:
        world, trainer = self.world, self.trainer
        group = SimpleNamespace(group_name="simulated") if world.world_size > 1 else None
        exchange = WindowExchange(group)  # type: ignore[arg-type]
        feed = self._feed = WindowFeed(trainer, close_window=self._close_window, find_problem=lambda: None)
        feed.connect(exchange)
        self._windows = feed.windows = WindowAccounting(
            exchange,
            self._count,
            loss_reduction="mean",
            on_empty=world.on_empty,  # type: ignore[arg-type]
            uneven=world.uneven,  # type: ignore[arg-type]
            copies=world.copies,
        )
        feed.signals = Signals(trainer)
        states = None
        if self._checkpoint is not None:
            checkpoint = copy.deepcopy(self._checkpoint)
            feed.start = checkpoints.take_start(checkpoint, self.rank, world.world_size)
            states = self._restore(checkpoint)
        # what Lightning's `FitLoop.setup_data` does
        loader = CombinedLoader(self.source, "max_size_cycle")
        own = len(self.source) if world.is_sized(self.rank) else None  # type: ignore[arg-type]
        agreed = feed._agree_on_length(own)
        loader.limits = [float("inf") if agreed is None else own]
        if states:
            loader._load_state_dicts(states)
        trainer.fit_loop.max_batches = float("inf") if agreed is None else agreed
        self._fetcher = feed._new_fetcher()
        self._fetcher.setup(loader)
        iter(self._fetcher)

    def _count(self, batch: tuple[int, int, int]) -> int:
        if (self.rank, batch[1]) == self.world.counter_fails:
            raise UncountableError("no labels")
        return batch[2]

    def _close_window(self) -> None:
        if self._windows.has_window and not self._fetcher.unfinished:
            self._windows.take_record(torch.device("cpu"))
            self.records += 1

    def save(self) -> None:
        self._write(self._progress(checkpoints.A_CHECKPOINT))

    def _progress(self, purpose: str, *, together: bool = True) -> checkpoints.Progress:
        return checkpoints.take_progress(self._fetcher, self._feed.exchange, purpose, together=together)

    def _write(self, progress: checkpoints.Progress) -> None:
        states = {"combined_loader": [{"next": -1}]} if self.world.stateful else {}  # those of now are not meant
        loops = {
            "state_dict": states,
            "epoch_loop.batch_progress": self._batches.state_dict(),
            "epoch_progress": self._epochs.state_dict(),
        }
        checkpoint = {"loops": {"fit_loop": loops}, "global_step": self.trainer.global_step}
        checkpoints.write(checkpoint, progress, 0)
        self.saved = copy.deepcopy(checkpoint)

    # ---- what Lightning's loops do

    def fit(self) -> None:
        self._set_up()
        try:
            if self.trainer.fit_loop.max_batches == 0:
                return
            while not self._is_done():
                self._run_epoch()
            progress = self._progress(checkpoints.THE_END)
            if self.world.resume and self.saved is None:
                self._write(progress)
            self._feed.end_training()
        except (Exception, SIGTERMException) as error:  # `OnExceptionCheckpoint` saves
            together = self._windows.asked_to_end or getattr(error, "together", False)
            self._write(self._progress(checkpoints.A_CHECKPOINT, together=together))
            raise

    def _restore(self, checkpoint: dict[str, Any]) -> Any:
        self.trainer.global_step = checkpoint["global_step"]
        loops, batches, epochs = checkpoint["loops"]["fit_loop"], self._batches, self._epochs
        batches.load_state_dict(loops["epoch_loop.batch_progress"])
        epochs.load_state_dict(loops["epoch_progress"])
        return loops["state_dict"].get("combined_loader")

    def _restart(self) -> None:
        """Go on from the counters of a checkpoint, as Lightning does."""
        batches, epochs, total = self._batches, self._epochs, self._batches.total
        at_batch_end = total.ready == total.started == total.processed == total.completed + 1
        if at_batch_end and batches.is_last_batch:
            epochs.increment_processed()
            epochs.increment_completed()
        if at_batch_end:
            batches.increment_completed()
            if batches.current.completed >= self.trainer.fit_loop.max_batches:
                batches.reset_on_run()
        batches.reset_on_restart()

    @property
    def _is_in_epoch(self) -> bool:
        total = self._epochs.total
        return total.started == total.ready == total.processed + 1

    def _is_done(self) -> bool:
        return self._has_stepped_enough() or self._epochs.current.processed >= self.world.epochs

    def _has_stepped_enough(self) -> bool:
        return self.trainer.global_step >= self.trainer.max_steps != -1

    def _is_last(self) -> bool:
        return self._batches.is_last_batch or self._batches.current.ready == self.trainer.fit_loop.max_batches

    def _run_epoch(self) -> None:
        # Lightning does not take it for a restart where the epoch of the checkpoint was over.
        goes_on = self._checkpoint is not None and self._is_in_epoch
        self._checkpoint = None
        if goes_on:
            self._restart()
            if self._is_done():
                return
        if not self._is_in_epoch:
            self._epochs.increment_ready()
            self._epochs.increment_started()
        if not goes_on:
            self._batches.reset_on_run()
            if self._epochs.current.processed > 0:
                iter(self._fetcher)
        self._fetcher.fetched += self._batches.current.ready
        self._own: list[int] = []
        while goes_on or not (self._has_stepped_enough() or self._is_last()):
            goes_on = False
            try:
                self._advance()
            except StopIteration:
                break
            every = self.world.validate_every
            if every and (self._batches.current.ready % every == 0 or self._is_last()):
                self.ranks.meet("host", "validation")
        if self.world.validate_every:
            self.ranks.meet("host", "end of epoch")
        self._epochs.increment_processed()
        self._epochs.increment_completed()

    def _advance(self) -> None:
        world = self.world
        self._signal(2 * self.ordinal)
        batch, _, _ = next(self._fetcher)
        assert batch is not None or world.world_size == 1, "a batch that is None was served"
        self._batches.is_last_batch = self._fetcher.done
        self._batches.increment_ready()
        if world.leave_at == self.ordinal:
            self._batches.increment_by(0, is_last_batch=True)
            self._batches.increment_processed()
            self.ordinal += 1
            raise StopIteration
        self._batches.increment_started()
        self._signal(2 * self.ordinal + 1)
        if world.crash == (self.rank, self.ordinal):
            raise CrashError
        self._train_on(batch)
        self._batches.increment_processed()
        self._end_batch()
        self._batches.increment_completed()
        self.ordinal += 1

    def _train_on(self, batch: tuple[int, int, int]) -> None:
        trainer, windows = self.trainer, self._windows
        accumulate = trainer.accumulate_grad_batches
        if not windows.stands_in:
            assert batch[0] == self.world.replica(self.rank), "a batch of another rank was served as an own one"
            self._own.append(batch[1])
        windows.window_in_hand("`backward`", accumulate)
        if windows.first_backward:
            self._gradient = 0.0
        if factor := windows.factor(LOSS, accumulate):
            self._gradient += factor * value(*batch[:2]) / accumulate
        if self._batches.current.ready % accumulate and not self._is_last():
            return
        plan = windows.finished_window(accumulate)
        gradient = sum(self.ranks.meet("host", "all-reduce of gradients", self._gradient)) / self.world.world_size
        windows.note_step(None)
        trainer.global_step += 1
        update = Update(self._epochs.current.processed, tuple(self._own), plan.num_tokens, gradient)
        self.updates.append(update)
        self._own = []

    def _end_batch(self) -> None:
        world = self.world
        self._close_window()  # as whoever asks for the record does
        if world.change is not None and world.change[0] == self.ordinal and world.changes_alone in (None, self.rank):
            self.trainer.accumulate_grad_batches = world.change[1]
        if world.save_after == self.ordinal and world.saves_alone in (None, self.rank):
            self.save()

    def _signal(self, moment: int) -> None:
        if self.world.sigterm == (self.rank, moment):
            self._connector._sigterm_notifier_fn(signal.SIGTERM, None)
        if self.world.requeue == (self.rank, moment):
            self._connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)


def value(rank: int, index: int) -> float:
    """The mean gradient of a batch's tokens."""
    return 1.0 + rank + 2 * index


@dataclass
class Outcome:
    """How a world went."""

    ranks: list[SimulatedRank]
    raised: list[BaseException | None]
    verdict: str | None


def simulate(world: World, checkpoint: dict[str, Any] | None = None) -> Outcome:
    """Run a world to its end."""
    ranks = SimulatedRanks(world.world_size)
    each = [SimulatedRank(world, rank, ranks, checkpoint) for rank in range(world.world_size)]
    with connected(ranks):
        raised = ranks.run(lambda rank: each[rank].fit())
    return Outcome(each, raised, ranks.verdict)


def simulate_resumed(world: World, outcome: Outcome) -> tuple[World, Outcome]:
    """Run what goes on from the checkpoint of a world, in which nothing happens any more; rank 0's, as on a disk."""
    checkpoint = outcome.ranks[0].saved
    assert checkpoint is not None
    accumulate = world.resume_accumulate or world.accumulate
    kept = {name: getattr(world, name) for name in ("batches", "sized", "promises", "epochs", "replica_size")}
    quiet = World(**kept, accumulate=accumulate, stateful=True)
    return quiet, simulate(quiet, checkpoint)


@contextmanager
def connected(ranks: SimulatedRanks) -> Iterator[None]:
    clock = SimpleNamespace(sleep=lambda seconds: None, monotonic=itertools.count().__next__)
    numbers = exchange_module._EXCHANGES
    exchange_module.dist, exchange_module.time = Distributed(ranks), clock  # type: ignore[assignment]
    exchange_module._EXCHANGES = _Numbers(ranks)  # type: ignore[assignment]
    try:
        yield
    finally:
        exchange_module.dist, exchange_module.time = torch.distributed, time
        exchange_module._EXCHANGES = numbers


class _Numbers:
    """Counts on each rank by itself, as processes do."""

    def __init__(self, ranks: SimulatedRanks) -> None:
        self._ranks = ranks
        self._given: Counter[int] = Counter()

    def __next__(self) -> int:
        self._given[self._ranks.rank] += 1
        return self._given[self._ranks.rank]
