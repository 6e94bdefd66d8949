"""Loops by hand: what `token_windows` does on simulated ranks, which may leave it early, and what is right then.

The real loop, fetcher, accounting and exchange run around hosts that wait for each other as DDP does, in the last
backward of a window, or as sharded models do, in every forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lightning_tokennorm import TokenNormError
from lightning_tokennorm.accounting import WindowAccounting
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.loops import _Loop, _windows
from lightning_tokennorm.syncing import Syncing
from lightning_tokennorm.window import RankReport
from tests.simulation.law import agree, differing_copies
from tests.simulation.loop import Source, UncountableError, Update, connected, value
from tests.simulation.ranks import SimulatedRanks
from tests.simulation.world import World

WAYS = ("before the forward", "before the backward", "after the backward", "by an error", "without a backward")
HOSTS = ("ddp", "sharded")


class OwnError(Exception):
    """Ends a loop."""


@dataclass(frozen=True, repr=False)
class HandWorld(World):
    """A world whose ranks are trained by hand: one pass over the data, in which nothing else than this happens."""

    host: str = "ddp"
    leaves: tuple[int, int] | None = None
    """The rank that leaves the loop, and at which of the micro-batches that it gets."""
    way: str = WAYS[0]
    all_leave: bool = False
    """Whether all ranks do."""


class Host(Syncing):
    """A model whose host waits for the other ranks in its forwards and backwards."""

    def __init__(self, world: HandWorld, ranks: SimulatedRanks, model: nn.Module) -> None:
        super().__init__(model)
        self._shards, self._ranks = world.host == "sharded", ranks
        (self._weight,) = model.parameters()
        self.is_last = False
        self.gradient = 0.0
        """What has been reduced."""

    @contextmanager
    def held_back(self) -> Iterator[None]:
        self.is_last = False
        yield

    @contextmanager
    def let_through(self) -> Iterator[None]:
        self.is_last = True
        yield

    def waits_in_forward(self) -> bool:
        return self._shards

    def waits_in_backward(self, *, is_last: bool) -> bool:
        return self._shards or is_last

    def forward(self) -> None:
        if self.waits_in_forward():
            self._ranks.meet("host", "forward")

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if self.waits_in_backward(is_last=self.is_last):
            assert self._weight.grad is not None
            told = self._ranks.meet("host", "backward", self._weight.grad.item())
            self._weight.grad = None
            self.gradient += sum(told) / self._ranks.world_size


class HandRank:
    """One rank of a loop by hand."""

    def __init__(self, world: HandWorld, rank: int, ranks: SimulatedRanks) -> None:
        self.world, self.rank, self.ranks = world, rank, ranks
        self.updates: list[Update] = []
        self.source = Source(world, rank)

    def fit(self) -> None:
        """Go through the loop, and then on elsewhere, where all ranks meet."""
        error: Exception | None = None
        try:
            self._go_through()
        except Exception as raised:
            error = raised
        self.ranks.meet("elsewhere", "barrier")
        after = self._new_exchange()  # of another pass over the data, which is to find nothing of this one's
        after.send(RankReport(1, 1, 1))
        assert [each.num_tokens for each in after.receive()] == [1] * self.world.world_size
        if error is not None:
            raise error

    def _go_through(self) -> None:
        world = self.world
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        host = Host(world, self.ranks, model)
        accounting = WindowAccounting(
            self._new_exchange(),
            self._count,
            loss_reduction="mean",
            on_empty=world.on_empty,  # type: ignore[arg-type]
            uneven=world.uneven,  # type: ignore[arg-type]
            copies=world.copies,
        )
        got = itertools.count()
        for window in _windows(_Loop(self.source, world.accumulate, 1, accounting, host)):
            own: list[int] = []
            host.gradient = 0.0
            for batch in window:
                if not accounting.stands_in:
                    own.append(batch[1])
                leaves = world.leaves is not None and next(got) == world.leaves[1]
                leaves = leaves and (world.all_leave or self.rank == world.leaves[0])  # type: ignore[index]
                way = world.way if leaves else ""
                if way == "before the forward":
                    return
                with window.no_sync():
                    host.forward()
                    if way == "by an error":
                        raise OwnError("disk full")
                    if way == "without a backward":
                        continue
                    if way == "before the backward":
                        return
                    loss = model(torch.ones(1, dtype=torch.float64)).sum() * value(*batch[:2])
                    window.backward(loss, host.backward)
                if window.is_last:
                    self.updates.append(Update(0, tuple(own), window.num_tokens, host.gradient))
                if leaves:
                    return

    def _new_exchange(self) -> WindowExchange:
        group = SimpleNamespace(group_name="simulated") if self.world.world_size > 1 else None
        return WindowExchange(group)  # type: ignore[arg-type]

    def _count(self, batch: tuple[int, int, int]) -> int:
        if (self.rank, batch[1]) == self.world.counter_fails:
            raise UncountableError("no labels")
        return batch[2]


def check_by_hand(world: HandWorld) -> str | None:
    """Simulate a loop by hand; what is wrong, ``None`` where all is right."""
    ranks = SimulatedRanks(world.world_size)
    each = [HandRank(world, rank, ranks) for rank in range(world.world_size)]
    with connected(ranks):
        raised = ranks.run(lambda rank: each[rank].fit())
    if ranks.verdict is not None:
        return ranks.verdict
    expected = expect_by_hand(world)
    for rank, error in enumerate(raised):
        if not _ends_right(world, rank, error, expected):
            return f"rank {rank} ends with {error!r}; right is: {expected}"
        right, got = [of_all[rank] for of_all in expected.updates], each[rank].updates
        if len(right) != len(got) or not all(map(agree, right, got)):
            return f"rank {rank} is trained by {got}; right is {right}"
    return None


def _ends_right(world: HandWorld, rank: int, error: BaseException | None, expected: Expected) -> bool:
    if expected.left and (world.all_leave or rank == world.leaves[0]):  # type: ignore[index]
        if world.way == "by an error":
            return isinstance(error, OwnError)
        if world.way == "without a backward":
            return isinstance(error, TokenNormError) and "no `window.backward` for micro-batch" in str(error)
        return error is None
    if expected.says is None:
        return error is None
    return isinstance(error, TokenNormError) and error.together and all(each in str(error) for each in expected.says)


@dataclass
class Expected:
    """What ranks have to come to."""

    updates: list[list[Update]] = field(default_factory=list)
    """Per update, what goes into it on each rank."""
    left: bool = False
    """Whether ranks have left the loop early."""
    says: tuple[str, ...] | None = None
    """What is in the error of those that have not, if there is one."""


def expect_by_hand(world: HandWorld) -> Expected:
    """Work out what is right for a world."""
    expected = Expected()
    lengths = [len(batches) for batches in world.batches]
    counted = range(0, world.world_size, world.replica_size)
    got = 0
    for number, begun in enumerate(range(0, max(lengths) + world.accumulate, world.accumulate)):
        window = range(begun, begun + world.accumulate)
        own = [[i for i in window if i < length] for length in lengths]
        micro_batches = max(map(len, own))
        tokens = [world.batch(rank, i)[2] for rank in counted for i in own[rank]]  # type: ignore[index]
        expected.says = _refused(world, window, number, own, sum(tokens))
        if expected.left and world.all_leave:
            expected.says = None
            break
        if expected.says is not None:
            if expected.left and "cannot be used" in expected.says[0]:
                expected.says = _who_left(world)  # whoever has left cannot say why it does not go on
            break
        if not micro_batches:
            if expected.left:
                expected.says = _who_left(world)
            break
        if not sum(tokens):
            continue
        if expected.left:
            expected.says = _who_left(world)
            break
        leaves_here = world.leaves is not None and got <= world.leaves[1] < got + micro_batches
        if leaves_here:
            expected.left = True
            if world.leaves[1] < got + micro_batches - 1 or world.way != "after the backward":  # type: ignore[index]
                expected.says = _who_left(world)
                break
        got += micro_batches
        total = sum(world.batch(r, i)[2] * value(world.replica(r), i) for r in counted for i in own[r])  # type: ignore[index]
        expected.updates.append([Update(0, tuple(mine), sum(tokens), total / sum(tokens)) for mine in own])
    return expected


def _who_left(world: HandWorld) -> tuple[str, ...]:
    said = {"by an error": "OwnError: disk full", "without a backward": "no `window.backward` for micro-batch"}
    return (f"rank {world.leaves[0]} has left the windows", said.get(world.way, ""))  # type: ignore[index]


def _refused(world: World, window: range, number: int, own: list[list[int]], num_tokens: int) -> tuple[str, ...] | None:
    """What all ranks refuse a window with."""
    reasons = []
    for fails, text in ((world.loader_fails, "OSError: disk gone"), (world.counter_fails, "UncountableError: no lab")):
        if fails is not None and fails[1] in window:
            reasons.append(text)
    if reasons:
        return (f"At update {number}, the coming micro-batches cannot be used", *reasons)
    if pair := differing_copies(world, window):
        return (f"At update {number}, ranks {pair} are one model replica",)
    if world.uneven == "error" and len(set(map(len, own))) > 1:
        return (f"At update {number}, the ranks disagree on the number of micro-",)
    if any(own) and not num_tokens and world.on_empty == "error":
        return (f"At update {number}, the window of {max(map(len, own))} micro-batches has",)
    return None


def worlds_by_hand(quiet: World) -> Iterator[HandWorld]:
    """Loops by hand over the data of a quiet world, undisturbed, and with each rank leaving at each point."""
    for host in HOSTS:
        world = HandWorld(quiet.batches, quiet.accumulate, host=host, replica_size=quiet.replica_size)
        yield world
        for rank, batches in enumerate(world.batches):
            for index in range(len(batches) + 1):
                yield replace(world, loader_fails=(rank, index))
            for index in range(len(batches)):
                yield replace(world, counter_fails=(rank, index))
                for others in ({}, {"on_empty": "error"}, {"uneven": "error"}):
                    empty = (*world.batches[:rank], batches[:index] + "0" + batches[index + 1 :])
                    yield replace(world, batches=empty + world.batches[rank + 1 :], **others)
            yield from _left_early(world, rank)


def _left_early(world: HandWorld, rank: int) -> Iterator[HandWorld]:
    longest = max(map(len, world.batches))
    for index in range(longest):
        for way in WAYS:
            for everyone in (False, True):
                left = replace(world, leaves=(rank, index), way=way, all_leave=everyone)
                yield left
                other = (rank + 1) % world.world_size
                for fails in range(index + 1, len(world.batches[other]) + 1):
                    yield replace(left, loader_fails=(other, fails))
                zeros = tuple(each[: index + 1] + "0" * len(each[index + 1 :]) for each in world.batches)
                yield replace(left, batches=zeros)
