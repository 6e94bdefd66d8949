"""The protocol between ranks, searched through: worlds of few batches, in each of which one or two things happen.

The real fetcher, accounting, exchange, feed and checkpoints run on simulated ranks (`ranks`), under what Lightning's
loops do (`loop`), and each world (`world`) has to come to what is right (`law`): no deadlock, no mismatch of
collectives, no batch lost or doubled, the right N and gradient in each update, and an error at the update that needs
it, on all ranks. It cannot see Lightning's own hooks, DDP's reducer, or tensors that share memory.

The suite takes a sample; all worlds: ``make test ARGS="tests/simulation --simulate-all"``. A world that fails is
printed as it has to be written to be added to `FOUND`.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterable, Iterator

import pytest

from tests.simulation import law
from tests.simulation.by_hand import HandWorld, check_by_hand, worlds_by_hand
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.world import World, quiet_worlds, worlds_around, worlds_of_copies

GOES_ON = {"stateful": True, "resume": True}

FOUND = [
    # went wrong once: the tail of a stream at the last step was not stepped on,
    World(("1",), 2, (False,), max_steps=1),
    World(("135", "4"), 2, (False, False), max_steps=2),
    # a rank with a batch in hand and only None to come had none to run its forward on,
    World(("1-",)),
    World(("1--", "4--"), epochs=2),
    # and rank 0's own length made the next epoch start elsewhere after a resume
    World(("1", "4"), sized=(True, False), stateful=True, epochs=2, save_after=0, resume=True),
    # each rank's place was not saved where a SIGTERM came in the last window,
    World(("13", "4"), sized=(False, False), max_steps=1, sigterm=(1, 1), **GOES_ON),
    # the last window of a stream that failed was taken for one that is over,
    World(("1357",), 2, (False,), crash=(0, 3), resume_accumulate=3, **GOES_ON),
    # one rank alone changed K before the last window of an epoch
    World(("13", "46"), change=(0, 2), changes_alone=0),
    # and was told that its batches differ from its copies', as if all ranks had refused that
    World(("13", "13", "46", "46"), change=(0, 2), changes_alone=1, replica_size=2),
    # a loop by hand asked a rank that had left for what its loader had failed with,
    HandWorld(("135", "46"), loader_fails=(1, 2), leaves=(0, 1), way="after the backward"),
    # and the word of one that left after the last window stayed there for the next pass
    HandWorld(("13", "4"), 2, leaves=(1, 1), way="after the backward"),
]
"""Worlds that went wrong: add what a search prints."""

TELLING = [
    *FOUND,
    World(("",), sized=(False,)),
    World(("135", "46"), 2, promises=1, validate_every=2),
    World(("135", "4"), 2, epochs=2, leave_at=1),
    World(("13", "0-"), on_empty="error"),
    World(("13", "", "72"), sized=(False, False, True), epochs=2, uneven="error"),
    # failures
    World(("13", "461"), 2, (False, True), counter_fails=(1, 2)),
    World(("13", "46"), 2, (False, False), loader_fails=(1, 2)),
    World(("135", "46"), 2, (False, True), loader_fails=(0, 3), change=(1, 1)),
    World(("13",), 3, epochs=2, crash=(0, 3), **GOES_ON),
    # K changes
    World(("135", "4"), 2, (True, False), change=(1, 3)),
    World(("1", "461"), 3, (False, False), epochs=2, max_steps=3, change=(2, 2)),
    World(("135", "4"), sized=(False, False), epochs=2, change=(3, 2), changes_alone=0),
    World(("135", ""), save_after=0, resume_accumulate=2, **GOES_ON),
    World(("1", "4613"), 2, (False, False), change=(1, 1), save_after=2, resume_accumulate=1, **GOES_ON),
    World(("13", "46", ""), 2, change=(0, 3), save_after=0, resume_accumulate=3, **GOES_ON),
    # one rank saves alone
    World(("13", "46"), save_after=0, saves_alone=1),
    World(("13", "46"), 3, epochs=2, save_after=1, saves_alone=0),
    World(("135", ""), 3, epochs=2, save_after=3, saves_alone=0),
    # all save
    World(("13", "4613"), 2, (False, False), save_after=2, **GOES_ON),
    World(("", "461"), 3, (False, False), epochs=2, save_after=0, **GOES_ON),
    World(("1", "461"), sized=(False, False), save_after=0, resume_accumulate=2, **GOES_ON),
    World(("13", "46", ""), sized=(True, False, True), epochs=2, save_after=1, resume_accumulate=2, **GOES_ON),
    World(("13", "461"), sized=(False, True), epochs=2, max_steps=1, **GOES_ON),
    # signals
    World(("13", "46", ""), sized=(False, False, False), epochs=2, sigterm=(0, 0), **GOES_ON),
    World(("", "46", "7"), sized=(True, False, False), epochs=2, sigterm=(2, 5), **GOES_ON),
    World(("135", "4613"), 3, (True, False), epochs=2, sigterm=(1, 11), **GOES_ON),
    World(("13", "46"), requeue=(1, 3), **GOES_ON),
    World(("135", "46"), 2, epochs=2, requeue=(1, 7), **GOES_ON),
    World(("", "4", ""), 3, (False, False, False), epochs=2, requeue=(0, 0), **GOES_ON),
    World(("1", "4613"), 2, (False, False), epochs=2, requeue=(0, 1), **GOES_ON),
    # what one rank refuses, from which all go on
    World(("135", "46"), 2, (False, False), loader_fails=(0, 2), **GOES_ON),
    # copies, which agree and which do not
    World(("13", "13", "461", "461"), 2, epochs=2, replica_size=2),
    World(("135", "135", "4", "4"), 2, (False,) * 4, save_after=2, replica_size=2, **GOES_ON),
    World(("13", "13", "46", "47"), replica_size=2),
    World(("13", "13", "46", "46"), 2, other_values=(3, 1), replica_size=2),
    World(("13", "1"), 2, replica_size=2),
    World(("13", "13", "46", "46"), counter_fails=(3, 1), replica_size=2),
    # loops by hand
    HandWorld(("135", "4"), 2, host="sharded"),
    HandWorld(("100", "4"), 1, loader_fails=(0, 2)),
    HandWorld(("13", "13", "46", "46"), 2, host="sharded", replica_size=2),
    *(
        HandWorld(("135", "461"), 2, host=host, leaves=(rank, index), way=way)
        for host, rank, index, way in (
            ("ddp", 1, 0, "before the forward"),
            ("ddp", 0, 1, "before the backward"),
            ("sharded", 1, 0, "before the backward"),
            ("sharded", 0, 1, "after the backward"),
            ("sharded", 1, 0, "by an error"),
            ("ddp", 1, 0, "without a backward"),
            ("sharded", 0, 1, "without a backward"),
        )
    ),
    HandWorld(("13", "46"), leaves=(0, 0), way="after the backward", all_leave=True),
    HandWorld(("101", "401"), leaves=(1, 0), way="after the backward"),
    HandWorld(("13", ""), 1, leaves=(0, 0), way="after the backward"),
]
"""Worlds of which each mutant of the protocol gets at least one wrong."""

SIZES = [(1, 5), (2, 4), (3, 2)]
"""Numbers of ranks, and the longest of their data."""

HAND_SIZES = [(1, 3), (2, 3), (3, 2)]

SAMPLE, FROM_EACH = (36, 60, 40), 15
"""Of how many quiet worlds of a size the suite looks at how many that are like it but for what happens."""


@pytest.fixture(autouse=True)
def _one_core() -> Iterator[None]:
    """Simulated ranks take turns: on one core a turn takes half as long as across two."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # windows without a token are named
        yield
    os.sched_setaffinity(0, cores)


def check(world: World) -> str | None:
    return check_by_hand(world) if isinstance(world, HandWorld) else law.check(world)


def search(worlds: Iterable[World]) -> list[str]:
    """The first world in which something goes wrong, and what; empty where all is right."""
    for world in worlds:
        if problem := check(world):
            return [repr(world), problem]
    return []


def expect_all_right(worlds: Iterable[World]) -> None:
    if wrong := search(worlds):
        pytest.fail("\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("world", TELLING, ids=repr)
def test_telling_worlds(world: World) -> None:
    expect_all_right([world])


@pytest.mark.parametrize(("world_size", "longest"), SIZES)
def test_worlds(world_size: int, longest: int) -> None:
    chance = random.Random(world_size)
    quiet_ones = chance.sample(list(quiet_worlds(world_size, longest)), SAMPLE[world_size - 1])
    around = [list(worlds_around(quiet)) for quiet in quiet_ones]
    expect_all_right(world for worlds in around for world in chance.sample(worlds, min(FROM_EACH, len(worlds))))


def copied_and_by_hand() -> Iterator[list[World]]:
    """Lists of worlds with copies, and of loops by hand."""
    for replicas, longest in ((1, 3), (2, 2)):
        for quiet in quiet_worlds(replicas, longest):
            yield list(worlds_of_copies(quiet, 2))
    for world_size, longest in HAND_SIZES:
        for quiet in quiet_worlds(world_size, longest):
            if not quiet.sized:  # to which a loop by hand makes no difference
                yield list(worlds_by_hand(quiet))


def test_copies_and_loops_by_hand() -> None:
    chance = random.Random(5)
    expect_all_right(world for worlds in copied_and_by_hand() for world in chance.sample(worlds, min(2, len(worlds))))


@pytest.mark.timeout(0)
def test_all_copies_and_loops_by_hand(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--simulate-all"):
        pytest.skip("takes minutes: --simulate-all")
    expect_all_right(dict.fromkeys(world for worlds in copied_and_by_hand() for world in worlds))


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("world_size", "longest"), SIZES)
def test_all_worlds(request: pytest.FixtureRequest, world_size: int, longest: int) -> None:
    if not request.config.getoption("--simulate-all"):
        pytest.skip("takes minutes: --simulate-all")
    worlds = (world for quiet in quiet_worlds(world_size, longest) for world in worlds_around(quiet))
    expect_all_right(dict.fromkeys(worlds))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant: Mutant) -> None:
    with mutant.applied():
        assert search(TELLING), f"nobody notices that {mutant.name}"
