"""Signals to one rank: noted in the handler, carried by the exchange, and acted upon by all ranks together."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl

from lightning_tokennorm import _compat


class Signals:
    """Which signals this rank has got.

    Args:
        trainer: The Trainer, before it registers its signal handlers.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.sigterm = False
        """Whether this rank was asked to end."""
        # Ranks get the signal before a requeue at different times: one that comes after all have acted is the same one.
        self._requeues_asked = self._requeues_done = 0
        self._restore: list[Callable[[], None]] = [
            _compat.defer_sigterm(trainer, self._note_sigterm),
            _compat.defer_requeue(trainer, self._note_requeue),
        ]

    @property
    def requeue(self) -> bool:
        """Whether this rank got the signal that a cluster sends before it requeues the job, and none has acted yet."""
        return self._requeues_asked > self._requeues_done

    def take_requeue(self) -> None:
        """All ranks act upon it now."""
        self._requeues_done += 1

    def restore(self) -> None:
        """Give Lightning its handlers back."""
        while self._restore:
            self._restore.pop()()

    def _note_sigterm(self) -> None:
        self.sigterm = True

    def _note_requeue(self) -> None:
        self._requeues_asked += 1
