"""Between the Trainer's fit loop and a rank's windows: what the fetcher asks, answered from the Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tokennorm import _compat
from lightning_tokennorm.accounting import WindowAccounting
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.lookahead import LookaheadFetcher
from lightning_tokennorm.strategies import checkpoints
from lightning_tokennorm.strategies.manual import WindowInHand
from lightning_tokennorm.strategies.signals import Signals


class WindowFeed:
    """Feeds the fit loop of one `fit` with batches, window by window; a `WindowOwner`.

    In place before any hook of the user's runs: Lightning sets its loaders up as soon as one asks for their lengths
    (`Trainer.estimated_stepping_batches`).

    Args:
        trainer: The Trainer, at the start of `fit`.
        close_window: Called before a window starts: the one before is over.
        find_problem: Says what makes training on this rank impossible as it stands, if anything.
    """

    def __init__(
        self, trainer: pl.Trainer, *, close_window: Callable[[], None], find_problem: Callable[[], str | None]
    ) -> None:
        self.trainer = trainer
        self.exchange = WindowExchange()
        """Between the ranks; alone until `connect`."""
        self.windows: WindowAccounting | None = None
        """The windows; set when the strategy is set up."""
        self.signals: Signals | None = None
        """Set where ranks act upon signals together."""
        self.fetcher: LookaheadFetcher | None = None
        """Set when Lightning sets its loaders up."""
        self.start = checkpoints.Start()
        """Where the run goes on that is resumed."""
        self._close_window = close_window
        self._find_problem = find_problem
        self._connected = False
        self._took_too_early = False
        self.window: WindowInHand | None = None
        """The window in hand; ``None`` before the first."""
        self._is_by_hand = False
        self._updates_before = 0  # this fit, under manual optimization
        self._restore_accumulation: Callable[[], None] = lambda: None
        self._restore_fetcher = _compat.replace_fetcher(trainer, self._new_fetcher, self._agree_on_length)

    def connect(self, exchange: WindowExchange) -> None:
        """Go on with an exchange between the ranks, as soon as there is one."""
        self.exchange = exchange
        if self._took_too_early:  # in `configure_callbacks`, when processes did not know each other
            _compat.forget_loaders(self.trainer)
        self._took_too_early, self._connected = False, True

    def accumulate_by_hand(self, accumulate: int) -> None:
        """Let windows have this length under manual optimization, where Lightning itself allows 1 only.

        Its loops go by the Trainer's number: when gradients are cleared for a validation, and what loggers count.
        """
        self._restore_accumulation = partial(setattr, self.trainer, "accumulate_grad_batches", 1)
        self.trainer.accumulate_grad_batches = accumulate
        self._is_by_hand = True

    def close(self) -> None:
        """Give Lightning its own fetcher, handlers and number of micro-batches back."""
        self._restore_fetcher()
        self._restore_accumulation()
        if self.signals is not None:
            self.signals.restore()

    def _new_fetcher(self) -> LookaheadFetcher:
        self.fetcher = LookaheadFetcher(self)
        return self.fetcher

    def _agree_on_length(self, length: int | None) -> int | None:
        self._took_too_early |= not self._connected
        lengths = self.exchange.gather_objects(length)
        return None if None in lengths else max(lengths)

    # ---- what the fetcher asks

    @property
    def accumulate(self) -> int:
        """``K``; 1 where Lightning runs forwards only, as weight averaging does to renew statistics."""
        return 1 if _compat.skips_backward(self.trainer) else self.trainer.accumulate_grad_batches

    @property
    def length(self) -> float:
        return self.trainer.fit_loop.max_batches

    @property
    def windows_left(self) -> float:
        # With manual optimization a window can step several times: then this is more than there are.
        return math.inf if self.trainer.max_steps == -1 else self.trainer.max_steps - self.trainer.global_step

    @property
    def updates_to_keep(self) -> int | None:
        """The updates that a checkpoint leads to, where Lightning does not count them."""
        assert self.fetcher is not None
        return self.updates - bool(self.fetcher.unfinished) if self._is_by_hand else None

    @property
    def updates(self) -> int:
        """The updates so far, for which loggers count windows: under manual optimization one may have several steps."""
        if not self._is_by_hand:
            return self.trainer.global_step
        return self._updates_before + self._windows.windows

    def has_trained_on(self, micro_batches: int) -> bool:
        return _compat.micro_batches_done(self.trainer) == micro_batches

    def take_start(self) -> tuple[bool, int]:
        start, self.start = self.start, checkpoints.Start()
        if self._is_by_hand and not self._windows.windows:
            self._updates_before = _compat.logged_step(self.trainer) if start.updates is None else start.updates
        if start.anywhere:
            assert self.fetcher is not None
            checkpoints.refuse_torn_window(int(self.fetcher.fetched) % self.accumulate, self.accumulate)
        return start.ended, start.skip

    def report_window(self, batches: Sequence[Any], accumulate: int, failure: Exception | None, borrows: bool) -> None:
        if failure is None and (problem := self._find_problem()):
            failure = TokenNormError(problem)
        signals = self.signals
        self._windows.report_window(
            batches,
            accumulate,
            failure=failure,
            borrows=borrows,
            sigterm=signals is not None and signals.sigterm,
            requeue=signals is not None and signals.requeue,
        )

    def goes_on(self) -> bool:
        return self._windows.goes_on()

    def start_window(self, batch: Any) -> tuple[int, Any]:
        windows = self._windows
        _compat.align_logged_step(self.trainer, self.updates)
        self._close_window()
        plan = windows.start_window(update=self.trainer.global_step, batch=batch)
        if problem := self._find_problem():  # since the report, on all ranks that run the same code
            raise TokenNormError(f"At update {self.trainer.global_step}: {problem}")
        if windows.empty_windows == 1 and plan is not None and plan.num_tokens == 0:
            rank_zero_warn(
                f"At update {self.trainer.global_step}, no rank has a supervised token in any of the"
                f" {plan.micro_batches} micro-batches of the window: it is left out, no parameter changes. If that is"
                " not what the data should be, look at the labels and at `count_tokens`; `on_empty='error'` raises."
            )
        self.window = None if plan is None else WindowInHand(plan, windows)
        if windows.asked_to_requeue:
            self._save_and_requeue()
        if windows.asked_to_end:
            _compat.end_by_sigterm(self.trainer)
        return (0 if plan is None else plan.micro_batches), windows.lent_batch

    def end_training(self) -> None:
        """Act upon a signal that came too late for a window; called by all ranks together."""
        if self.signals is None:
            return
        told = self.exchange.gather_objects((self.signals.requeue, self.signals.sigterm))
        if any(requeue for requeue, _ in told):
            self._save_and_requeue()
        if any(sigterm for _, sigterm in told):
            self._windows.asked_to_end = True  # all ranks save what follows from it together
            _compat.end_by_sigterm(self.trainer)

    def _save_and_requeue(self) -> None:
        if self.signals is not None:
            self.signals.take_requeue()
            _compat.save_and_requeue(self.trainer)

    def start_micro_batch(self, index: int, stands_in: bool) -> None:
        self._windows.start_micro_batch(index, stands_in)

    @property
    def _windows(self) -> WindowAccounting:
        assert self.windows is not None
        return self.windows
