"""From the constructor to the teardown: what the strategies of this package share besides the step itself."""

from __future__ import annotations

import signal
import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_tokennorm import _compat
from lightning_tokennorm.accounting import WindowAccounting
from lightning_tokennorm.counting import counter_for, describe_counter
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.reduction import Reduction
from lightning_tokennorm.strategies import checkpoints, failures
from lightning_tokennorm.strategies.feed import WindowFeed
from lightning_tokennorm.strategies.manual import (
    ManualOptimization,
    refuse_wrong_place_of_accumulation,
)
from lightning_tokennorm.strategies.refusals import refuse_module
from lightning_tokennorm.strategies.signals import Signals
from lightning_tokennorm.strategies.window_view import WindowView


class FitLifecycle(WindowView):
    """Puts the look-ahead, the exchange and the windows of a fit in their places, and takes them away again.

    Also what ranks owe each other on the way: checkpoints that lead back to the edge of a window on every rank, and
    word of who was the first to fail.
    """

    agree_on_sigterm: bool = True
    """Whether a SIGTERM on any rank ends the training of all ranks at the start of the same window.

    Lightning's own way (``False``, to be set before `Trainer.fit`) broadcasts rank 0's flag before each micro-batch and
    waits for it. The signal before a requeue on a SLURM cluster is treated alike.
    """

    # ---- what a host says

    def _reduction(self) -> Reduction:
        """Over which ranks gradients are reduced; known once the processes know each other."""
        raise NotImplementedError

    def _check_setup(self) -> None:
        """Refuse what cannot work; the model is wrapped."""

    def _find_problem(self) -> str | None:
        """What makes training impossible as it stands, looked at before each window."""
        return None

    # ---- set-up and teardown

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        trainer = _compat.trainer_of(model)
        if self._feed is not None:  # a fit that ended before its teardown
            self._feed.close()
            self._feed = None
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self._feed = WindowFeed(trainer, close_window=self._close_window, find_problem=self._find_problem)

    @override
    def setup_environment(self) -> None:
        try:
            super().setup_environment()
        except BaseException:
            # Those that this process has launched would wait for it at the rendezvous, in vain.
            if self.launcher is not None:
                self.launcher.kill(signal.SIGKILL)
            raise
        if self._feed is not None:
            assert self.lightning_module is not None
            if not self.lightning_module.automatic_optimization:
                self._feed.accumulate_by_hand(self._options.accumulate_grad_batches or 1)
            self._feed.connect(self._new_exchange(self._reduction()))

    def _new_exchange(self, reduction: Reduction) -> WindowExchange:
        return WindowExchange.spanning(reduction.group, _compat.process_group_timeout(self))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._refuse_impossible_setup()
            self._counter = counter_for(self._options.count_tokens, self.lightning_module)
        super().setup(trainer)
        if not fitting:
            return
        self._check_setup()
        assert self.lightning_module is not None
        assert self.model is not None
        if not self.lightning_module.automatic_optimization:
            self._manual = ManualOptimization(self.model, self.optimizers)
        feed, reduction = self._feed_in_use, self._reduction()
        feed.windows = WindowAccounting(
            feed.exchange,
            self._counter,
            loss_reduction=self.loss_reduction,
            on_empty=self._options.on_empty,
            uneven=self._options.uneven,
            ranks_divided_by=reduction.divided_by,
            copies=reduction.copies,
            head_weights=self._options.head_weights,
        )
        if self.agree_on_sigterm:
            feed.signals = Signals(trainer)
        self._last_update = self._make_last_update = self._left_off_at = None
        rank_zero_info(
            f"{type(self).__name__}: every supervised token weighs the same over W={feed.windows.world_size} ranks and"
            f" K={_compat.describe_accumulation(trainer)} micro-batches per update"
            f" (counting={self._options.counting!r}, loss_reduction={self.loss_reduction!r})."
            f" Counted: {describe_counter(self._counter)}."
        )

    def _refuse_impossible_setup(self) -> None:
        assert self.lightning_module is not None
        name, automatic = type(self).__name__, self.lightning_module.automatic_optimization
        refuse_module(self.lightning_module, name)
        refuse_wrong_place_of_accumulation(automatic, self._options.accumulate_grad_batches, name)
        if self.handles_gradient_accumulation:
            raise MisconfigurationException(
                f"`{type(self).__name__}.handles_gradient_accumulation` is True, so losses would be divided by"
                " `accumulate_grad_batches` twice or not at all. Leave accumulation to the Trainer."
            )

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._left_off_at = None  # of a run inside this one, the learning rate finder's for example

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        windows = self._windows
        self._left_off_at = self._progress(checkpoints.THE_END, together=True)  # for a checkpoint after the fit
        if windows.empty_windows:
            rank_zero_warn(
                f"{windows.empty_windows} of {windows.windows} windows had no supervised token on any rank."
                f" Updates made: {windows.windows - windows.empty_windows}."
            )
        if padded := windows.padded_micro_batches:
            rank_zero_info(
                f"{type(self).__name__}: the ranks had unequal numbers of batches; {padded} micro-batches without data"
                " were run in all, which contribute nothing."
            )
        self._feed_in_use.end_training()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._feed is not None and self._feed.fetcher is not None:
            trainer, exchange = self._feed.trainer, self._feed.exchange
            where = f"rank {exchange.rank}, batch {trainer.fit_loop.batch_idx}, update {trainer.global_step}"
            failures.tell(exception, exchange, where)

    # `OnExceptionCheckpoint` and `ModelCheckpoint(save_on_exception=True)` save, where Lightning waits for all ranks.

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._ends_alone:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._ends_alone else super().broadcast(obj, src)  # type: ignore[safe-super]

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._ends_alone else super().reduce_boolean_decision(decision, all)

    @property
    def _ends_alone(self) -> bool:
        # After an error, of this rank or of another one: nobody must wait, the others may be in another collective.
        feed = self._feed
        if feed is None or not feed.trainer.interrupted or (feed.windows and feed.windows.asked_to_end):
            return False
        error = sys.exc_info()[1]  # what Lightning is handling; it tells its callbacks of it before its strategy
        raised_by_all = isinstance(error, TokenNormError) and error.together
        return not (raised_by_all and feed.exchange.world_size == self.world_size)

    @override
    def teardown(self) -> None:
        feed = self._feed
        if feed is not None:
            if self._left_off_at is None and feed.fetcher is not None and feed.fetcher.iterator is not None:
                self._left_off_at = self._progress("teardown", together=False)
            self._close_window()
            feed.close()
        if self._manual is not None:
            self._manual.close()
        self._feed = self._trace = self._manual = None
        super().teardown()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        # Batches that wait here are still to come, and a window that is not complete is done again whole.
        if _compat.has_progress(checkpoint):
            progress = self._left_off_at
            if self._feed is not None and self._feed.fetcher is not None:
                progress = self._progress(checkpoints.A_CHECKPOINT, together=not self._ends_alone)
            if progress is not None:
                checkpoints.write(checkpoint, progress, self.tokens_seen)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _progress(self, purpose: str, *, together: bool) -> checkpoints.Progress:
        feed = self._feed_in_use
        assert feed.fetcher is not None
        # Loaders are told apart by the rank in the world, of which the group may be a part.
        together &= feed.exchange.world_size == self.world_size
        return checkpoints.take_progress(
            feed.fetcher, feed.exchange, purpose, together=together, updates=feed.updates_to_keep
        )

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        if self._feed is not None and _compat.has_progress(checkpoint):
            self._tokens_seen = checkpoints.tokens_seen(checkpoint)
            self._feed.start = checkpoints.take_start(checkpoint, self.global_rank, self.world_size)
            if checkpoints.lacks_positions(checkpoint) and self.world_size > 1:
                rank_zero_warn(
                    "The checkpoint holds rank 0's loader states only, and all ranks go on from those: it was written"
                    " after an error, when ranks could not wait for each other, or the group that shares gradients is a"
                    " part of the world. Where ranks have states of their own, resume from a checkpoint of a regular"
                    " update."
                )
        return checkpoint
