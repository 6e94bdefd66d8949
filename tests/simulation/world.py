"""A world: the data of each rank, and what happens while they are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, repr=False)
class World:
    """What the ranks have, and one or two things that happen.

    Where something happens "after" a number, that is the number of a micro-batch of the whole run. A moment is twice
    that number: even before the micro-batch is asked for, odd while it is trained on.
    """

    batches: tuple[str, ...]
    """Per rank, one character per batch: its tokens, or ``-`` for one that is ``None``."""
    accumulate: int = 1
    sized: tuple[bool, ...] = ()
    """Per rank, whether its loader has a length; empty where all have."""
    promises: int = 0
    """How many batches more than there are a loader with a length claims."""
    stateful: bool = False
    """Whether loaders have states; they return the very dict that they go on changing."""
    epochs: int = 1
    max_steps: int = -1
    uneven: str = "pad"
    on_empty: str = "skip"
    validate_every: int = 0
    loader_fails: tuple[int, int] | None = None
    """The rank and the batch that its loader raises at."""
    counter_fails: tuple[int, int] | None = None
    """The rank and the batch that cannot be counted."""
    sigterm: tuple[int, int] | None = None
    """The rank and the moment."""
    requeue: tuple[int, int] | None = None
    """The rank and the moment."""
    crash: tuple[int, int] | None = None
    """The rank that fails alone, and the micro-batch."""
    leave_at: int | None = None
    """The micro-batch at which `on_train_batch_start` returns -1, on all ranks."""
    change: tuple[int, int] | None = None
    """After which micro-batch ``K`` changes, and to what."""
    changes_alone: int | None = None
    """The only rank on which it does."""
    save_after: int | None = None
    """The micro-batch after which all ranks save."""
    saves_alone: int | None = None
    """The only rank that does."""
    resume: bool = False
    """Whether another run goes on from what was saved last, by an error too."""
    resume_accumulate: int | None = None
    """``K`` of that run, where it differs."""
    replica_size: int = 1
    """How many ranks are one model replica, as under tensor parallelism: they are given the same batches."""
    other_values: tuple[int, int] | None = None
    """The rank and the batch in which other values stand than in its copies', as many tokens though."""

    @property
    def world_size(self) -> int:
        return len(self.batches)

    def replica(self, rank: int) -> int:
        return rank // self.replica_size

    @property
    def copies(self) -> tuple[tuple[int, ...], ...] | None:
        """The ranks of each replica."""
        if self.replica_size == 1:
            return None
        starts = range(0, self.world_size, self.replica_size)
        return tuple(tuple(range(start, start + self.replica_size)) for start in starts)

    def is_sized(self, rank: int) -> bool:
        return not self.sized or self.sized[rank]

    def batch(self, rank: int, index: int) -> tuple[int, int, int] | None:
        """A batch: the replica whose it is, its index and its tokens."""
        tokens = self.batches[rank][index]
        return None if tokens == "-" else (self.replica(rank), index, int(tokens))

    def __repr__(self) -> str:
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(given)})"


def tokens_of(rank: int, length: int) -> str:
    """Different numbers of tokens for the batches of a rank."""
    return "".join(str(1 + (3 * rank + 2 * index) % 7) for index in range(length))


def quiet_worlds(world_size: int, longest: int, accumulates: tuple[int, ...] = (1, 2, 3)) -> Iterator[World]:
    """Worlds in which nothing happens: all lengths, ``K``, and mixes of loaders with a length and without."""
    for code in range((longest + 1) ** world_size):
        lengths = [code // (longest + 1) ** rank % (longest + 1) for rank in range(world_size)]
        batches = tuple(tokens_of(rank, length) for rank, length in enumerate(lengths))
        for accumulate in accumulates:
            for mix in range(2**world_size):
                sized = tuple(not mix >> rank & 1 for rank in range(world_size))
                yield World(batches, accumulate, () if all(sized) else sized)


def worlds_of_copies(quiet: World, replica_size: int) -> Iterator[World]:
    """Worlds around a quiet one of which each rank is a replica; and those in which the last rank is no copy."""
    for world in worlds_around(quiet):
        yield _copied(world, replica_size)
    copied = _copied(quiet, replica_size)
    last, batches = copied.world_size - 1, copied.batches[-1]
    for index in range(len(batches)):
        yield replace(copied, other_values=(last, index))
        other = batches[:index] + str(int(batches[index]) % 7 + 1) + batches[index + 1 :]
        yield replace(copied, batches=(*copied.batches[:last], other))
        yield replace(copied, batches=(*copied.batches[:last], batches[:index]), uneven="error")
        yield replace(copied, batches=(*copied.batches[:last], batches[:index]))


def _copied(world: World, replica_size: int) -> World:
    """The world with several ranks in the place of each; what happens to one rank happens to the last of them."""
    last = replica_size - 1
    moved: dict[str, Any] = {"replica_size": replica_size}
    for name in ("batches", "sized"):
        moved[name] = tuple(each for each in getattr(world, name) for _ in range(replica_size))
    for name in ("loader_fails", "counter_fails", "sigterm", "requeue", "crash"):
        if (happens := getattr(world, name)) is not None:
            moved[name] = (happens[0] * replica_size + last, happens[1])
    for name in ("changes_alone", "saves_alone"):
        if (rank := getattr(world, name)) is not None:
            moved[name] = rank * replica_size + last
    return replace(world, **moved)


def worlds_around(quiet: World) -> Iterator[World]:
    """That world, and all in which one thing happens in it, in one epoch and in two."""
    for epochs in (1, 2):
        yield from _disturbed(replace(quiet, epochs=epochs))


def _disturbed(quiet: World) -> Iterator[World]:
    longest = max(map(len, quiet.batches))
    yield quiet
    if longest:
        yield replace(quiet, promises=1)
        yield replace(quiet, uneven="error")
        yield replace(quiet, validate_every=1)
        yield replace(quiet, validate_every=2)
    for rank, batches in enumerate(quiet.batches):
        for index in range(len(batches)):
            for other in "-0":
                changed = (*quiet.batches[:rank], batches[:index] + other + batches[index + 1 :])
                world = replace(quiet, batches=changed + quiet.batches[rank + 1 :])
                yield world
                yield replace(world, on_empty="error")
            yield replace(quiet, counter_fails=(rank, index))
        for index in range(len(batches) + 1):
            yield replace(quiet, loader_fails=(rank, index))
    if longest:
        for other in "-0":  # no rank has a token in the windows of the first half, nor in any
            for upto in (1, (longest + 1) // 2, longest):
                yield replace(quiet, batches=tuple(other * min(upto, len(b)) + b[upto:] for b in quiet.batches))
        yield replace(quiet, batches=tuple(b[:1] + "-" * (len(b) - 1) for b in quiet.batches))
    yield from _later(quiet, longest)


def _later(quiet: World, longest: int) -> Iterator[World]:
    """What happens after some micro-batch of the run."""
    micro_batches = longest * quiet.epochs
    ranks = range(quiet.world_size)
    for max_steps in range(1, micro_batches + 1):
        yield replace(quiet, max_steps=max_steps)
        yield replace(quiet, max_steps=max_steps, stateful=True, resume=True)
    for rank in ranks:
        for moment in range(2 * micro_batches + 1) if micro_batches else ():
            yield replace(quiet, sigterm=(rank, moment), stateful=True, resume=True)
            yield replace(quiet, requeue=(rank, moment), stateful=True, resume=True)
            yield replace(quiet, sigterm=(rank, moment), max_steps=1, stateful=True, resume=True)
    for index in range(micro_batches):
        yield replace(quiet, leave_at=index)
        yield replace(quiet, save_after=index, validate_every=1)
        yield replace(quiet, save_after=index, stateful=True, resume=True)
        other = quiet.accumulate % 3 + 1
        yield replace(quiet, save_after=index, stateful=True, resume=True, resume_accumulate=other)
        for rank in ranks:
            yield replace(quiet, crash=(rank, index))
        for accumulate in range(1, 4):
            if accumulate == quiet.accumulate:
                continue
            yield replace(quiet, change=(index, accumulate))
            yield replace(quiet, change=(index, accumulate), max_steps=max(1, micro_batches // 2))
            for save in range(index, micro_batches) if quiet.epochs == 1 else ():
                change, there = (index, accumulate), {"stateful": True, "resume": True}
                yield replace(quiet, change=change, save_after=save, resume_accumulate=accumulate, **there)
            for rank, batches in enumerate(quiet.batches) if quiet.epochs == 1 else ():
                for fails in range(index + 1, len(batches) + 1):
                    yield replace(quiet, change=(index, accumulate), loader_fails=(rank, fails))
            if quiet.world_size > 1:
                for rank in ranks:
                    yield replace(quiet, change=(index, accumulate), changes_alone=rank)
        if quiet.world_size > 1:
            for rank in ranks:
                yield replace(quiet, save_after=index, saves_alone=rank)
    for rank, batches in enumerate(quiet.batches if longest else ()):
        for index in range(len(batches) + 1):
            yield replace(quiet, loader_fails=(rank, index), stateful=True, resume=True)
        for index in range(len(batches)):
            yield replace(quiet, counter_fails=(rank, index), stateful=True, resume=True)
    if quiet.world_size == 1 and longest:
        for index in range(micro_batches):
            other = quiet.accumulate % 3 + 1
            for accumulate in (None, other):
                yield replace(quiet, crash=(0, index), stateful=True, resume=True, resume_accumulate=accumulate)
