"""Ranks without processes: threads that pass a baton, and what stands in for `torch.distributed`.

Ranks meet in collectives only, so one order of running them is as good as any other: a rank runs until it has to wait,
and then one goes on that need not. Each group keeps the sequence of its operations. Another kind of operation at the
same place is a mismatch, and where nobody can go on is a deadlock; both end the simulation with a verdict.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as real


class Stopped(BaseException):
    """The verdict has been reached; not an `Exception`, so that no code takes it for a failure of its own."""


class Operation:
    """A collective: what each rank brings to it."""

    __slots__ = ("brought", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.brought: dict[int, Any] = {}


class SimulatedRanks:
    """Runs one function per rank.

    Args:
        world_size: How many.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rank = 0
        """Whose turn it is."""
        self.verdict: str | None = None
        """Why the ranks cannot go on, if they cannot."""
        self._operations: dict[str, list[Operation]] = {}
        self._places: dict[tuple[str, int], int] = {}
        self._waits_for: list[Operation | None] = [None] * world_size
        self._asks: set[int] = set()  # ranks that look from time to time whether they still have to wait
        self._events = 0
        self._ended: set[int] = set()
        self._batons = [_taken_lock() for _ in range(world_size)]
        self._over = _taken_lock()

    def run(self, body: Callable[[int], Any]) -> list[BaseException | None]:
        """Run `body` on every rank.

        Returns:
            What each rank raised.
        """
        raised: list[BaseException | None] = [None] * self.world_size

        def run_rank(rank: int) -> None:
            self._take_over(rank)
            try:
                if self.verdict is None:
                    body(rank)
            except BaseException as error:
                raised[rank] = error
            self._ended.add(rank)
            self._events += 1
            if len(self._ended) == self.world_size:
                self._over.release()
            else:
                self._pass_on(rank)

        for rank in range(self.world_size):
            threading.Thread(target=run_rank, args=(rank,), daemon=True).start()
        self._batons[0].release()
        self._over.acquire()
        if self.verdict is None:
            for group in self._operations:
                places = [self._places.get((group, rank), 0) for rank in range(self.world_size)]
                if len(set(places)) > 1 and not any(raised):
                    self.verdict = f"the ranks have called {places} operations of the group {group!r}"
        return raised

    def post(self, group: str, kind: str, payload: Any) -> Operation:
        """Come to the next operation of a group, without waiting for the others."""
        place = self._places.get((group, self.rank), 0)
        self._places[group, self.rank] = place + 1
        operations = self._operations.setdefault(group, [])
        if place == len(operations):
            operations.append(Operation(kind))
        operation = operations[place]
        if operation.kind != kind:
            other = next(iter(operation.brought))
            self.stop(f"mismatch: operation {place} of {group!r} is {operation.kind} on rank {other}, {kind} here")
        operation.brought[self.rank] = payload
        self._events += 1
        if len(operation.brought) == self.world_size:
            # Only now, since a transport may read what it sends as late as this.
            operation.brought = {rank: _snapshot(each) for rank, each in operation.brought.items()}
        return operation

    def wait(self, operation: Operation) -> list[Any]:
        """Wait until all ranks have come; what they brought, in their order."""
        me = self.rank
        while len(operation.brought) < self.world_size:
            if self._is_broken(operation):
                raise RuntimeError("[gloo/transport] Connection closed by peer")
            self._waits_for[me] = operation
            self._pass_on(me)
            self._take_over(me)
            self._waits_for[me] = None
            if self.verdict is not None:
                raise Stopped
        return [operation.brought[rank] for rank in range(self.world_size)]

    def ask(self, operation: Operation) -> None:
        """Let the others go on as far as they can, on a rank that looks from time to time whether it has to wait."""
        me, before = self.rank, self._events
        if self.is_over(operation):
            return
        self._waits_for[me] = operation
        self._asks.add(me)
        self._pass_on(me)
        self._take_over(me)
        self._asks.discard(me)
        self._waits_for[me] = None
        if self._events == before:
            self.stop(f"deadlock: rank {me} asks in vain whether it has to wait in {operation.kind}")
        if self.verdict is not None:
            raise Stopped

    def meet(self, group: str, kind: str, payload: Any = None) -> list[Any]:
        """Come to an operation and wait for the others."""
        return self.wait(self.post(group, kind, payload))

    def is_over(self, operation: Operation) -> bool:
        """Whether nobody has to wait for it any more: all have come, or some never will."""
        return len(operation.brought) == self.world_size or self._is_broken(operation)

    def _is_broken(self, operation: Operation) -> bool:
        return any(rank not in operation.brought for rank in self._ended)

    def _take_over(self, rank: int) -> None:
        self._batons[rank].acquire()
        self.rank = rank

    def _can_go_on(self, rank: int) -> bool:
        operation = self._waits_for[rank]
        return operation is None or self.is_over(operation)

    def _pass_on(self, me: int) -> None:
        others = [(me + step) % self.world_size for step in range(1, self.world_size)]
        alive = [rank for rank in others if rank not in self._ended]
        ready = [rank for rank in alive if self._can_go_on(rank)]
        if not ready:  # those that ask do so when nobody else can go on
            ready = [rank for rank in (*alive, me) if rank in self._asks]
        if self.verdict is None and not ready:
            self.stop("deadlock: " + ", ".join(self._describe(rank) for rank in range(self.world_size)), me)
        to = (ready or alive or [me])[0]
        self._batons[to].release()

    def _describe(self, rank: int) -> str:
        operation = self._waits_for[rank]
        return f"rank {rank} " + ("has ended" if rank in self._ended else f"waits in {operation and operation.kind}")

    def stop(self, verdict: str, me: int | None = None) -> None:
        """End the simulation."""
        self.verdict = self.verdict or verdict
        if me is None or me not in self._ended:
            raise Stopped


class Distributed:
    """`torch.distributed` as `lightning_tokennorm.exchange` uses it.

    Args:
        ranks: The ranks that it connects.
    """

    DistError = real.DistError
    ProcessGroup = real.ProcessGroup

    def __init__(self, ranks: SimulatedRanks) -> None:
        self._ranks = ranks
        self._in_flight: dict[int, torch.Tensor] = {}  # by `id`
        kept: dict[str, bytes] = {}
        store = SimpleNamespace(
            check=lambda keys: all(key in kept for key in keys),
            get=kept.__getitem__,
            set=lambda key, value: kept.update({key: value.encode()}),
        )
        self.distributed_c10d = SimpleNamespace(_get_default_store=lambda: store)

    def get_rank(self, group: Any) -> int:
        return self._ranks.rank

    def get_world_size(self, group: Any) -> int:
        return self._ranks.world_size

    def get_global_rank(self, group: Any, rank: int) -> int:
        return rank

    def all_gather(self, outputs: list[torch.Tensor], row: torch.Tensor, group: Any, async_op: bool) -> SimpleNamespace:
        rank = self._ranks.rank
        if id(row) in self._in_flight:
            self._ranks.stop(f"rank {rank} sends a row out of a buffer that is on its way")
        operation = self._ranks.post("exchange", "all_gather of rows", row)
        self._in_flight[id(row)] = row

        def wait() -> None:
            self._in_flight.pop(id(row), None)
            for output, brought in zip(outputs, self._ranks.wait(operation), strict=True):
                output.copy_(brought)

        asked = False

        def is_completed() -> bool:
            nonlocal asked
            if asked:  # the first time as early as can be
                self._ranks.ask(operation)
            asked = True
            return self._ranks.is_over(operation)

        return SimpleNamespace(wait=wait, is_completed=is_completed)

    def all_gather_object(self, outputs: list[Any], item: Any, group: Any) -> None:
        brought = self._ranks.meet("exchange", "all_gather_object", pickle.dumps(item))
        outputs[:] = [pickle.loads(each) for each in brought]

    def broadcast_object_list(self, parcel: list[Any], src: int, group: Any) -> None:
        parcel[0] = self._ranks.meet("exchange", f"broadcast from {src}", parcel[0])[src]


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _snapshot(payload: Any) -> Any:
    return payload.clone() if isinstance(payload, torch.Tensor) else payload
