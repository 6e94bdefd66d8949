"""What a checkpoint says, besides Lightning's own, so that every rank goes on where it was.

Lightning saves the loader states of rank 0 and gives them to all ranks. Ranks whose data differ in length, or whose
loaders are each in a state of their own, need their own back. Plain containers, so that any Trainer can load the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_tokennorm import _compat
from lightning_tokennorm.counting import Count
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.lookahead import LookaheadFetcher

KEY = "lightning_tokennorm"
A_CHECKPOINT, THE_END = "a checkpoint", "the end of training"
"""What ranks tell each other for how far they have come."""


@dataclass(frozen=True)
class Start:
    """Where a run that is resumed goes on, besides the states of its loaders."""

    ended: bool = False
    """Whether this rank's data of the epoch had ended while other ranks had more."""
    skip: int = 0
    """Batches to leave out after the loaders' states."""
    anywhere: bool = False
    """Whether the checkpoint is not of this package, so that it may have been written inside a window."""
    updates: int | None = None
    """Updates so far, under manual optimization."""


@dataclass(frozen=True)
class Progress:
    """How far a rank has come, at the last edge of a window."""

    states: list[Any]
    """The states of its loaders to go on from; empty where none has one, or the next epoch starts afresh."""
    skip: int
    """Batches to leave out after these states."""
    edge: int
    """Micro-batches of the epoch before that edge; the gradients of later ones are gone with the process."""
    stream_has_ended: bool
    """Whether the epoch is over and its length was not known before."""
    positions: list[dict[str, Any]] | None
    """The `position` of each rank; ``None`` where they could not be gathered."""
    updates: int | None = None
    """The updates so far, where Lightning does not count them."""


def take_progress(
    fetcher: LookaheadFetcher, exchange: WindowExchange, purpose: str, *, together: bool, updates: int | None = None
) -> Progress:
    """How far this rank has come, and where each of the others is.

    Args:
        fetcher: What serves its batches.
        exchange: Between the ranks.
        purpose: What for; the same on all ranks.
        together: Whether all ranks ask, so that they can tell each other.
        updates: The updates so far, where Lightning does not count them.

    Raises:
        TokenNormError: Others do not.
    """
    origin = fetcher.resume_from()
    positions = None
    if together:
        mine = {"states": list(origin.states), "skip": origin.skip, "ended": fetcher.ended}
        told = exchange.gather_objects((purpose, mine)) if exchange.meet() else []
        if {each for each, _ in told} != {purpose}:
            saves = [rank for rank, (each, _) in enumerate(told) if each == A_CHECKPOINT]
            if purpose != A_CHECKPOINT and not saves:
                raise TokenNormError(f"Rank {exchange.rank} has come to {purpose}, and other ranks have not.")
            raise TokenNormError(
                f"Rank {saves[0] if saves else exchange.rank} saves a full checkpoint alone"
                " (`Strategy.save_checkpoint`), but where each rank goes on is a part of it, and only that rank can"
                " tell. Call `trainer.save_checkpoint` on all ranks; one with weights only can be saved by one."
            )
        positions = [position for _, position in told]
    return Progress(
        states=list(origin.states),
        skip=origin.skip,
        edge=int(fetcher.fetched) - fetcher.unfinished,
        stream_has_ended=fetcher.stream_has_ended,
        positions=positions,
        updates=updates,
    )


def write(checkpoint: dict[str, Any], progress: Progress, tokens_seen: Count) -> None:
    """Let a checkpoint lead back to the edge of a window, on every rank.

    Args:
        checkpoint: The checkpoint, before it is written. Lightning's dict speaks of all batches that were read.
        progress: How far this rank has come.
        tokens_seen: The tokens of all updates so far.
    """
    _compat.rewind_checkpoint(checkpoint, progress.states, progress.edge, stream_has_ended=progress.stream_has_ended)
    checkpoint[KEY] = {"positions": progress.positions, "skip": progress.skip, "tokens_seen": tokens_seen}
    if progress.updates is not None:
        checkpoint[KEY]["updates"] = progress.updates


def tokens_seen(checkpoint: Mapping[str, Any]) -> Count:
    """The tokens of all updates before a checkpoint; 0 where it does not say."""
    count: Count = checkpoint.get(KEY, {}).get("tokens_seen", 0)
    return count


def is_marked(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the checkpoint was written here, and thus at the edge of a window."""
    return KEY in checkpoint


def lacks_positions(checkpoint: Mapping[str, Any]) -> bool:
    """Whether it holds states of loaders, but not those of all ranks."""
    return is_marked(checkpoint) and checkpoint[KEY]["positions"] is None and _compat.has_loader_states(checkpoint)


def take_start(checkpoint: dict[str, Any], rank: int, world_size: int) -> Start:
    """Put a rank's own loader states where Lightning looks for them.

    Args:
        checkpoint: The checkpoint, as it was read.
        rank: This rank.
        world_size: ``W`` of this run.

    Returns:
        Where this rank goes on.

    Raises:
        TokenNormError: The loaders were inside an epoch on another number of ranks. All ranks read the same file, so
            all raise.
    """
    ours = checkpoint.get(KEY, {})
    positions, updates = ours.get("positions"), ours.get("updates")
    if positions is None:
        return Start(skip=ours.get("skip", 0), anywhere=not is_marked(checkpoint), updates=updates)
    if len(positions) == world_size:
        mine = positions[rank]
        _compat.set_loader_states(checkpoint, mine["states"])
        return Start(ended=bool(mine["ended"]), skip=mine.get("skip", 0), updates=updates)
    if any(each["states"] or each["ended"] for each in positions):
        raise TokenNormError(
            f"The checkpoint was written inside an epoch, by {len(positions)} ranks; this run has {world_size}. The"
            " state of a loader on one of them does not say which samples another number of ranks has left. Resume"
            f" with {len(positions)} ranks, or from a checkpoint at the end of an epoch."
        )
    return Start(updates=updates)


def refuse_torn_window(begun: int, accumulate: int) -> None:
    """Refuse to start inside a window, from a checkpoint that was not written here.

    Args:
        begun: Micro-batches of the window that are done.
        accumulate: ``K``.

    Raises:
        TokenNormError: There are some. All ranks read the same file, so all raise.
    """
    if begun:
        raise TokenNormError(
            f"The checkpoint was written inside an accumulation window, by another strategy: the gradients of its first"
            f" {begun} micro-batches are lost with `accumulate_grad_batches={accumulate}`. Resume with a value that"
            " divides the number of batches done, or from a checkpoint after an update."
        )
