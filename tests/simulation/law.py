"""What is right: what every world has to come to, worked out window by window without the code that is tested."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_tokennorm import TokenNormError
from tests.simulation.loop import CrashError, Outcome, SimulatedRank, Update, simulate, simulate_resumed, value
from tests.simulation.world import World

CLOSED = "Connection closed"
"""What a transport says where another rank has ended."""


@dataclass(frozen=True)
class Place:
    """Where in a run its windows go on."""

    epoch: int = 0
    begun: int = 0
    """Micro-batches of the epoch before."""
    updates: int = 0


@dataclass
class Expected:
    """What a run has to come to."""

    started_at: Place
    updates: list[list[Update]] = field(default_factory=list)
    """Per update, what goes into it on each rank."""
    ends: str = "normally"
    """Or ``together``: all ranks raise the same at the update that needs it; ``each``: all raise at the same
    micro-batch; ``alone``: one rank fails, and nobody is left waiting; ``by signal``."""
    says: tuple[str, ...] = ()
    """What the error has to say."""
    saved_at: Place | None = None
    """From where a run that is resumed goes on."""
    last: int = 0
    """Where in its epoch the last update ends at most."""


def expect(world: World, start: Place = Place()) -> Expected:
    """Work out what is right for a world."""
    return _Reckoning(world, start).run()


class _Reckoning:
    def __init__(self, world: World, start: Place) -> None:
        self.world = world
        self.accumulate = world.accumulate
        self.at = start
        self.ordinal = 0
        self.expected = Expected(start)
        self.requeued = False
        self.has_changed_alone = self.has_saved_alone = False
        self.lengths = [len(batches) for batches in world.batches]
        # a loader with a length is never asked for more than it claims
        self.claims = [
            length + (world.promises if length else 0) if world.is_sized(rank) else math.inf
            for rank, length in enumerate(self.lengths)
        ]

    def run(self) -> Expected:
        world, expected = self.world, self.expected
        if max(self.claims) == 0:
            return expected
        while self.at.epoch < world.epochs and not self._has_stepped_enough() and self._run_epoch():
            if not self._has_stepped_enough():
                self.at = Place(self.at.epoch + 1, 0, self.at.updates)
        if expected.ends == "normally":
            self._end_training()
        if expected.saved_at is None:
            expected.saved_at = self.at
        return expected

    def _end_training(self) -> None:
        if self.has_saved_alone:
            self._end_alone()
        elif self._has_come(self.world.sigterm):
            self._end("by signal")
        elif self._has_come(self.world.requeue) and not self.requeued:
            self.expected.saved_at = self.at

    def _has_come(self, signalled: tuple[int, int] | None) -> bool:
        return signalled is not None and signalled[1] < 2 * self.ordinal

    def _has_stepped_enough(self) -> bool:
        return self.at.updates >= self.world.max_steps != -1

    def _end(self, how: str, *says: str) -> bool:
        self.expected.ends, self.expected.says = how, says
        return False

    def _end_alone(self) -> bool:
        if self.has_saved_alone:
            return self._end("alone", "saves a full checkpoint")
        return self._end("alone", "`accumulate_grad_batches`" if self.has_changed_alone else CLOSED)

    def _run_epoch(self) -> bool:
        """Whether the run goes on after it."""
        world = self.world
        first = True
        while not self._has_stepped_enough():
            begun = self.at.begun
            if begun >= max(self.claims):
                return True
            size = self.accumulate - begun % self.accumulate
            reported_at = self.ordinal if first else self.ordinal - 1
            if changed := world.change is not None and world.change[0] == self.ordinal - 1:
                reported_at = self.ordinal  # anew
            window = range(begun, begun + size)
            if reasons := self._reasons(window):
                return self._end("together", f"At update {self.at.updates}, the coming micro-batches", *reasons)
            own = [[i for i in window if i < length] for length in self.lengths]
            if pair := differing_copies(world, window):
                return self._end("together", f"At update {self.at.updates}, ranks {pair} are one model replica")
            micro_batches = max(map(len, own))
            if micro_batches and (self.has_changed_alone or self.has_saved_alone):
                return self._end_alone()
            if world.uneven == "error" and len(set(map(len, own))) > 1:
                return self._end("together", f"At update {self.at.updates}, the ranks disagree on the number of micro-")
            requeue, sigterm = (self._is_seen(each, reported_at) for each in (world.requeue, world.sigterm))
            if not micro_batches:
                if (first or changed) and sigterm:
                    return self._end("by signal")
                return True
            batches = [[i for i in mine if world.batch(rank, i)] for rank, mine in enumerate(own)]
            counted = range(0, world.world_size, world.replica_size)  # one rank of each replica
            tokens = [sum(world.batch(rank, i)[2] for i in batches[rank]) for rank in counted]
            if not sum(tokens) and world.on_empty == "error":
                return self._end(
                    "together", f"At update {self.at.updates}, the window of {micro_batches} micro-batches has"
                )
            if world.world_size > 1 and not any(row[: begun + size].strip("-") for row in world.batches):
                return self._end("together", f"At update {self.at.updates}, no rank has a batch to run its forward on")
            if requeue and not self.requeued:
                self.requeued, self.expected.saved_at = True, self.at
            if sigterm:
                return self._end("by signal")
            if not self._train(micro_batches):
                return self.expected.ends == "normally"
            self._update(batches, begun + micro_batches, sum(tokens))
            self.expected.last = begun + size
            first = False
        return True

    def _reasons(self, window: range) -> list[str]:
        """Why ranks cannot use the batches of a window."""
        reasons = []
        for rank, claims in enumerate(self.claims):
            if (at := self.world.loader_fails) and at[0] == rank and at[1] in window and at[1] < claims:
                reasons.append(
                    f"Rank {rank}: OSError: disk gone" if self.world.world_size > 1 else "OSError: disk gone"
                )
            if (at := self.world.counter_fails) and at[0] == rank and at[1] in window:
                reasons.append("UncountableError: no labels")
        return reasons

    def _is_seen(self, signalled: tuple[int, int] | None, reported_at: int) -> bool:
        return signalled is not None and signalled[1] <= 2 * reported_at

    def _train(self, micro_batches: int) -> bool:
        """Whether the window comes to its update."""
        world = self.world
        for index in range(micro_batches):
            if index and (self.has_changed_alone or self.has_saved_alone):
                return self._end_alone()
            if index and world.change is not None and world.change[0] == self.ordinal - 1:
                return self._end("each", "`accumulate_grad_batches` went from")
            if world.leave_at == self.ordinal:
                self.ordinal += 1
                return False
            if world.crash is not None and world.crash[1] == self.ordinal:
                return self._end_alone()
            if world.save_after == self.ordinal:
                self.has_saved_alone = world.saves_alone is not None
                self.expected.saved_at = self.at
            if world.change is not None and world.change[0] == self.ordinal and world.changes_alone is not None:
                self.has_changed_alone = world.change[1] != self.accumulate
            self.ordinal += 1
        return True

    def _update(self, batches: list[list[int]], begun: int, num_tokens: int) -> None:
        world, expected = self.world, self.expected
        counted = range(0, world.world_size, world.replica_size)
        total = sum(world.batch(r, i)[2] * value(world.replica(r), i) for r in counted for i in batches[r])
        gradient = total / num_tokens if num_tokens else 0.0
        expected.updates.append([Update(self.at.epoch, tuple(mine), num_tokens, gradient) for mine in batches])
        self.at = Place(self.at.epoch, begun, self.at.updates + 1)
        if world.save_after == self.ordinal - 1:
            expected.saved_at = self.at
        if world.change is not None and world.change[0] == self.ordinal - 1:
            self.accumulate = world.change[1]


def differing_copies(world: World, window: range) -> str:
    """The ranks of the first replica whose copies differ in a window; empty where all agree."""
    for ranks in world.copies or ():
        held = {world.batches[rank][window.start : window.stop] for rank in ranks}
        other = world.other_values
        if len(held) > 1 or (other is not None and other[0] in ranks and other[1] in window):
            return ", ".join(map(str, ranks))
    return ""


def check(world: World) -> str | None:
    """Simulate a world, and what resumes from it.

    Returns:
        What is wrong; ``None`` where all is right.
    """
    expected, outcome = expect(world), simulate(world)
    problem = compare(world, expected, outcome)
    if problem is not None or not world.resume:
        return problem
    if world.world_size > 1 and expected.ends not in ("normally", "by signal", "together"):
        return None  # after an error ranks cannot tell each other where they are
    resumed = simulate_resumed(world, outcome)
    problem = compare(resumed[0], expect(resumed[0], expected.saved_at), resumed[1])
    return None if problem is None else f"resumed: {problem}"


def compare(world: World, expected: Expected, outcome: Outcome) -> str | None:
    """What of an outcome is wrong; ``None`` where all is right."""
    if outcome.verdict is not None:
        return outcome.verdict
    for rank, (simulated, raised) in enumerate(zip(outcome.ranks, outcome.raised, strict=True)):
        if not _ends_right(world, expected, rank, raised):
            return f"rank {rank} ends with {raised!r}; right is: {expected.ends} {' '.join(expected.says)}"
        right = [each[rank] for each in expected.updates]
        if len(right) != len(simulated.updates) or not all(map(agree, right, simulated.updates)):
            return f"rank {rank} is trained by {simulated.updates}; right is {right}"
        if simulated.trainer.global_step != expected.started_at.updates + len(right):
            return f"rank {rank} is at step {simulated.trainer.global_step}"
        if expected.ends == "normally" and simulated.records < len(right):
            return f"rank {rank} has {simulated.records} records of {len(right)} updates"
        if problem := _reads_too_much(world, expected, simulated):
            return f"rank {rank} {problem}"
    return None


def _ends_right(world: World, expected: Expected, rank: int, raised: BaseException | None) -> bool:
    if expected.ends == "normally":
        return raised is None
    if expected.ends == "by signal":
        return isinstance(raised, SIGTERMException)
    if expected.ends == "alone":
        if world.crash is not None and world.crash[0] == rank:
            return isinstance(raised, CrashError)
        return CLOSED in str(raised) or (isinstance(raised, TokenNormError) and expected.says[0] in str(raised))
    together = expected.ends == "together"
    return (
        isinstance(raised, TokenNormError)
        and raised.together == together
        and all(part in str(raised) for part in expected.says)
    )


def agree(right: Update, got: Update) -> bool:
    """Whether an update is what is right."""
    return (right.epoch, right.batches, right.num_tokens) == (got.epoch, got.batches, got.num_tokens) and math.isclose(
        right.gradient, got.gradient, rel_tol=1e-12, abs_tol=0
    )


def _reads_too_much(world: World, expected: Expected, simulated: SimulatedRank) -> str | None:
    source, rank = simulated.source, simulated.rank
    for asked in source.asked:
        if world.is_sized(rank) and asked > len(source):
            return f"asks for batch {asked - 1}, beyond the length that its loader has"
    stepped_enough = expected.ends == "normally" and len(expected.updates) == world.max_steps
    # where K changes, windows end earlier than what had been read for them
    if stepped_enough and world.change is None and source.asked[-1] > expected.last:
        return f"asks for batch {source.asked[-1] - 1}, where `max_steps` ends with batch {expected.last - 1}"
    if world.change is None and world.save_after is None and not world.resume:
        windows = len(expected.updates)
        if source.states_asked > windows + 2 * world.epochs:
            return f"asks for {source.states_asked} states in {windows} windows"
    return None
