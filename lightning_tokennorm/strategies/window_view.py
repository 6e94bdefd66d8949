"""What a strategy shows of its windows: to modules, callbacks and users, while it fits and after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning.pytorch.strategies import ParallelStrategy

from lightning_tokennorm import _compat
from lightning_tokennorm.accounting import WindowAccounting
from lightning_tokennorm.counting import Count, TokenCounter
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.grad_scaler import ConstantScale
from lightning_tokennorm.strategies import checkpoints
from lightning_tokennorm.strategies.feed import WindowFeed
from lightning_tokennorm.strategies.manual import ManualOptimization, WindowInHand
from lightning_tokennorm.strategies.options import Options
from lightning_tokennorm.strategies.steps import Trace
from lightning_tokennorm.window import LossReduction, UpdateRecord, total


class WindowView(ParallelStrategy):
    """The options of a strategy, and what is known of its windows. Arguments as of `TokenNormDDP`."""

    def __init__(
        self,
        *,
        count_tokens: TokenCounter | None = None,
        loss_reduction: LossReduction = "mean",
        counting: Literal["lookahead"] = "lookahead",
        on_empty: Literal["skip", "error"] = "skip",
        uneven: Literal["pad", "error"] = "pad",
        audit: bool = False,
        head_weights: Mapping[str, float] | None = None,
        accumulate_grad_batches: int | None = None,
        **host_kwargs: Any,
    ) -> None:
        self._options = Options.checked(
            type(self).__name__,
            count_tokens=count_tokens,
            loss_reduction=loss_reduction,
            counting=counting,
            on_empty=on_empty,
            uneven=uneven,
            audit=audit,
            head_weights=head_weights,
            accumulate_grad_batches=accumulate_grad_batches,
        )
        super().__init__(**host_kwargs)
        _compat.warn_of_other_namespace(frames=2)
        self._counter = self._options.count_tokens
        self._last_update: UpdateRecord | None = None
        self._make_last_update: Callable[[], UpdateRecord] | None = None
        self._scale = ConstantScale()
        self._trace: Trace | None = None  # of a forward that has to be undone
        self._left_off_at: checkpoints.Progress | None = None
        self._feed: WindowFeed | None = None  # there while fitting
        self._tokens_seen: Count = 0
        self._has_no_batch = False  # a transfer hook returned None
        self._manual: ManualOptimization | None = None  # there while fitting a module that optimizes by itself

    @property
    def count_tokens(self) -> TokenCounter:
        """The counter of supervised tokens: a batch goes in, its count comes out. While fitting that of the module."""
        return self._counter

    @property
    def loss_reduction(self) -> LossReduction:
        """What ``training_step`` is taken to return: ``"mean"`` or ``"sum"``."""
        return self._options.loss_reduction

    @property
    def last_update(self) -> UpdateRecord | None:
        """The record of the latest optimizer update, skipped ones too; ``None`` before the first.

        A new one is there when ``on_train_batch_end`` runs for the last micro-batch of a window.
        """
        self._close_window()
        if self._make_last_update is not None:
            self._last_update, self._make_last_update = self._make_last_update(), None
        return self._last_update

    @property
    def tokens_seen(self) -> Count:
        """The supervised tokens of all updates that were applied, over all ranks; a resumed run goes on counting.

        The clock of a schedule by tokens: it depends on neither ``W``, ``K`` nor the size of batches.
        """
        self._close_window()
        return self._tokens_seen

    @property
    def micro_batch_is_padded(self) -> bool:
        """Whether the micro-batch in hand is only run for the other ranks' sake, on a batch seen before.

        Its gradient is zero, and what its forward changes or logs is put back.
        """
        return self._feed is not None and self._feed.windows is not None and self._feed.windows.stands_in

    @property
    def micro_batch_tokens(self) -> Count | None:
        """``n``: the supervised tokens of this rank's micro-batch in hand, counted ahead; ``None`` outside a window."""
        if self._feed is None or self._feed.windows is None or not self._feed.windows.has_window:
            return None
        return self._feed.windows.num_tokens_in_hand()

    @property
    def micro_batch_heads(self) -> dict[str, Count] | None:
        """``n`` of each head in this rank's micro-batch in hand; ``None`` with a single loss, or outside a window."""
        if self.micro_batch_tokens is None:
            return None
        return self._windows.heads_in_hand() or None

    @property
    def head_weights(self) -> Mapping[str, float]:
        """The weights of heads; 1 where none is given."""
        return self._options.head_weights

    @property
    def window(self) -> WindowInHand | None:
        """The accumulation window in hand, with ``is_last`` and ``num_tokens``; ``None`` outside of training.

        For manual optimization: a ``training_step`` lets its optimizers step where ``is_last`` is true.
        """
        return None if self._feed is None else self._feed.window

    @property
    def _feed_in_use(self) -> WindowFeed:
        if self._feed is None:
            raise TokenNormError(
                f"`{type(self).__name__}` was asked to train outside `Trainer.fit`, so the number of supervised tokens"
                " is not known. Leave the step, the backward and the update to Lightning."
            )
        return self._feed

    @property
    def _windows(self) -> WindowAccounting:
        windows = self._feed_in_use.windows
        assert windows is not None
        return windows

    def _close_window(self) -> None:
        """Make the record of the window in hand, if it is over: whatever optimizer and module have made of it."""
        feed = self._feed
        if feed is None or feed.windows is None or not feed.windows.has_begun or feed.fetcher is None:
            return
        if not feed.fetcher.unfinished:
            self._tokens_seen = total([self._tokens_seen, feed.windows.tokens_trained_on])
            self._make_last_update = feed.windows.take_record(self.root_device)
