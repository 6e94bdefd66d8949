"""`TokenNormDDP`: DDP in which every supervised token of an update has the same weight."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tokennorm import _compat, resume
from lightning_tokennorm.accounting import WindowAccounting
from lightning_tokennorm.comm_hooks import HookReduces, what_hook_leaves
from lightning_tokennorm.counting import SupervisedTokens, TokenCounter, counter_for, describe_counter
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.exchange import WindowExchange, is_of_a_collective
from lightning_tokennorm.grad_scaler import ConstantScale, unscaled_before_step
from lightning_tokennorm.gradients import zero_gradients
from lightning_tokennorm.lookahead import LookaheadFetcher
from lightning_tokennorm.refusals import (
    refuse_changed_ddp,
    refuse_hook_over_another_group,
    refuse_module,
    refuse_output_without_gradient,
)
from lightning_tokennorm.window import LossReduction, UpdateRecord


class TokenNormDDP(DDPStrategy):
    """A `DDPStrategy` whose gradient does not depend on how the tokens are split over ranks and micro-batches.

    At the start of each accumulation window the supervised tokens of all its micro-batches on all ranks are counted
    and exchanged (``N``), and each micro-batch's loss is rescaled before its backward, so that the update uses
    ``(sum over all tokens of their loss gradients) / N``. See `lightning_tokennorm.window` for the algebra.

    Args:
        count_tokens: Counts the supervised tokens of a batch as the loader yields it: a callable that takes the batch
            and returns an int, a float (a sum of token weights) or a 0-dim tensor. Default: `SupervisedTokens()`.
        loss_reduction: What ``training_step`` returns: ``"mean"`` over the micro-batch's supervised tokens, or their
            ``"sum"``.
        counting: ``"lookahead"``: count before the forward, on the host, by reading ahead in the loader.
        on_empty: What happens to a window in which no rank has a token: ``"skip"`` leaves parameters and optimizer
            state untouched on all ranks (``global_step`` and LR schedulers advance, as after an AMP overflow);
            ``"error"`` raises on all ranks before any backward.
        uneven: What happens where ranks have different numbers of micro-batches: ``"pad"`` lets ranks whose data has
            ended go on with micro-batches that contribute nothing, so that every batch of every rank is trained on;
            ``"error"`` raises on all ranks at the exchange.
        audit: Whether to compare, for each micro-batch whose ``training_step`` returns
            ``{"loss": ..., "num_tokens": ...}``, that count with the one from the look-ahead. Where they differ, all
            ranks raise before the update. Costs a synchronisation per micro-batch and a collective per window.
        ddp_hook_reduces: What a ``ddp_comm_hook`` leaves of the ranks' gradients, ``"mean"`` or ``"sum"``. Known for
            torch's averaging hooks; any other has to be declared, lest every update be ``W`` times off.
        **ddp_kwargs: Passed on to `DDPStrategy`, and by it to `torch.nn.parallel.DistributedDataParallel`.

    Raises:
        TypeError: ``count_tokens`` is not callable.
        ValueError: Another option has a value that is not listed above, or a ``ddp_comm_hook`` is neither known nor
            declared.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
        >>> trainer = Trainer(
        ...     accelerator="cpu",
        ...     devices=2,
        ...     accumulate_grad_batches=4,
        ...     logger=False,
        ...     strategy=TokenNormDDP(),
        ...     callbacks=[TokenMeanMetric()],
        ... )
        >>> trainer.strategy.loss_reduction
        'mean'
    """

    agree_on_sigterm: bool = True
    """Whether a SIGTERM on any rank ends the training of all ranks at the start of the same window.

    Lightning's own way (``False``, to be set before `Trainer.fit`) broadcasts rank 0's flag before each micro-batch and
    waits for it.
    """

    def __init__(
        self,
        *,
        count_tokens: TokenCounter | None = None,
        loss_reduction: LossReduction = "mean",
        counting: Literal["lookahead"] = "lookahead",
        on_empty: Literal["skip", "error"] = "skip",
        uneven: Literal["pad", "error"] = "pad",
        audit: bool = False,
        ddp_hook_reduces: HookReduces | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        if count_tokens is not None and not callable(count_tokens):
            raise TypeError(
                f"`TokenNormDDP(count_tokens=...)` got {count_tokens!r}; expected a callable that takes a batch and"
                " returns its number of supervised tokens."
            )
        _check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        _check_choice("counting", counting, ("lookahead",))
        _check_choice("on_empty", on_empty, ("skip", "error"))
        _check_choice("uneven", uneven, ("pad", "error"))
        _check_choice("audit", audit, (False, True))
        _check_choice("ddp_hook_reduces", ddp_hook_reduces, (None, "mean", "sum"))
        self._comm_hook, self._comm_state = ddp_kwargs.get("ddp_comm_hook"), ddp_kwargs.get("ddp_comm_state")
        self._hook_leaves = what_hook_leaves(
            self._comm_hook, ddp_kwargs.get("ddp_comm_wrapper"), self._comm_state, ddp_hook_reduces
        )
        if ddp_kwargs.get("static_graph") and self._hook_leaves == "sum":
            raise ValueError(
                "`static_graph=True` got with a `ddp_comm_hook` that leaves the ranks' sum; expected one that leaves"
                " their mean: the first micro-batch is reduced twice there, which only a mean survives."
            )
        super().__init__(**ddp_kwargs)
        self._given_counter: TokenCounter = SupervisedTokens() if count_tokens is None else count_tokens
        self._count_tokens = self._given_counter
        self._loss_reduction: LossReduction = loss_reduction
        self._counting = counting
        self._on_empty = on_empty
        self._uneven = uneven
        self._audit = audit
        self._last_update: UpdateRecord | None = None
        self._make_last_update: Callable[[], UpdateRecord] | None = None
        self._optimizer_stepped = False
        self._ran_backward = False
        self._scale = ConstantScale()
        # What exists only while fitting.
        self._windows = self._new_windows(WindowExchange())
        self._trainer: pl.Trainer | None = None
        self._fetcher: LookaheadFetcher | None = None
        self._got_sigterm = False
        self._starts_ended = self._starts_anywhere = False  # what a checkpoint says of the first window
        self._left_off_at: resume.Progress | None = None
        self._undo_at_teardown: list[Callable[[], None]] = []

    @property
    def count_tokens(self) -> TokenCounter:
        """The counter of supervised tokens: a batch goes in, its count comes out.

        From the start of a fit on it is the one for the module that is fitted (`SupervisedTokens(shift="auto")`).
        """
        return self._count_tokens

    @property
    def loss_reduction(self) -> LossReduction:
        """What ``training_step`` is taken to return: ``"mean"`` or ``"sum"``."""
        return self._loss_reduction

    @property
    def last_update(self) -> UpdateRecord | None:
        """The record of the latest optimizer update, skipped ones too; ``None`` before the first.

        A new one is there when ``on_train_batch_end`` runs for the last micro-batch of a window.
        """
        if self._make_last_update is not None:
            self._last_update, self._make_last_update = self._make_last_update(), None
        return self._last_update

    @property
    def micro_batch_is_padded(self) -> bool:
        """Whether the micro-batch in hand is only run for the other ranks' sake, on a batch seen before.

        Its gradient is zero. What ``training_step`` logs by itself it can leave out where this is true.
        """
        return self._windows.stands_in

    # ---- set-up and teardown

    @override
    def setup_environment(self) -> None:
        try:
            super().setup_environment()
        except BaseException:
            # Those that this process has launched would wait for it at the rendezvous, in vain.
            if self.launcher is not None:
                self.launcher.kill(signal.SIGKILL)
            raise

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._count_tokens = counter_for(self._given_counter, self.lightning_module if fitting else None)
        if fitting:
            self._refuse_impossible_setup()
        super().setup(trainer)
        if not fitting:
            return
        # N and W have to come from the group that DDP averages over.
        assert isinstance(self.model, DistributedDataParallel)
        group = self.model.process_group
        refuse_hook_over_another_group(self._comm_hook, self._comm_state, group)
        _compat.register_comm_hook(self)
        self._windows = self._new_windows(WindowExchange.spanning(group, _compat.process_group_timeout(self)))
        self._trainer = trainer
        self._undo_at_teardown.append(_compat.replace_fetcher(trainer, self._new_fetcher, self._agree_on_length))
        if self.optimizers:
            self._undo_at_teardown.append(self.optimizers[0].register_step_post_hook(self._note_step).remove)
        self._last_update = self._make_last_update = self._left_off_at = None
        self._ran_backward = self._got_sigterm = False
        if self.agree_on_sigterm:
            self._undo_at_teardown.append(_compat.defer_sigterm(trainer, self._note_sigterm))

    def _refuse_impossible_setup(self) -> None:
        assert self.lightning_module is not None
        refuse_module(self.lightning_module)
        if self.handles_gradient_accumulation:
            raise MisconfigurationException(
                f"`{type(self).__name__}.handles_gradient_accumulation` is True, so losses would be divided by"
                " `accumulate_grad_batches` twice or not at all. Leave accumulation to the Trainer."
            )

    def _new_windows(self, exchange: WindowExchange) -> WindowAccounting:
        return WindowAccounting(
            exchange,
            self._count_tokens,
            loss_reduction=self._loss_reduction,
            on_empty=self._on_empty,
            uneven=self._uneven,
            averaged=self._hook_leaves == "mean",
        )

    def _new_fetcher(self) -> LookaheadFetcher:
        trainer = self._trainer
        assert trainer is not None

        def report_window(batches: Sequence[Any], accumulate: int, failure: Exception | None, borrows: bool) -> None:
            self._windows.report_window(
                batches, accumulate, failure=failure, borrows=borrows, sigterm=self._got_sigterm
            )

        def start_window(batch: Any) -> tuple[int, Any]:
            _compat.align_logged_step(trainer)
            if self._starts_anywhere:
                resume.refuse_torn_window(fetcher.fetched % self._accumulate, self._accumulate)
                self._starts_anywhere = False
            plan = self._windows.start_window(update=self._update_index, batch=batch)
            if self._windows.asked_to_end:
                _compat.end_by_sigterm(trainer)
            return (0 if plan is None else plan.micro_batches), self._windows.lent_batch

        self._fetcher = fetcher = LookaheadFetcher(
            accumulate=lambda: self._accumulate,
            length=lambda: trainer.fit_loop.max_batches,
            report_window=report_window,
            goes_on=self._windows.goes_on,
            start_window=start_window,
            start_micro_batch=self._windows.start_micro_batch,
            ended=self._starts_ended,
        )
        self._starts_ended = False
        return fetcher

    def _agree_on_length(self, length: int | None) -> int | None:
        lengths = self._windows.exchange.gather_objects(length)
        return None if None in lengths else max(lengths)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        refuse_changed_ddp(self.model, self._comm_hook)
        rank_zero_info(
            f"TokenNormDDP: every supervised token weighs the same over W={self._windows.exchange.world_size} ranks and"
            f" K={self._accumulate} micro-batches per update (counting={self._counting!r},"
            f" loss_reduction={self._loss_reduction!r}). Counted: {describe_counter(self._count_tokens)}."
        )

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._left_off_at = self._progress(together=True)  # for a checkpoint after the fit
        if padded := self._windows.padded_micro_batches:
            rank_zero_info(
                f"TokenNormDDP: the ranks had unequal numbers of batches; {padded} micro-batches without data were"
                " run in all, which contribute nothing."
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._windows.exchange.world_size == 1 or self._fetcher is None:
            return
        if is_of_a_collective(exception) or is_of_a_collective(exception.__cause__):
            # which stands in the error already where this package was waiting
            said = None if isinstance(exception, TokenNormError) else self._windows.exchange.announced()
            if sys.version_info >= (3, 11) and said is not None:
                exception.add_note(f"Another rank has ended. {said}")
            return
        where = f"rank {self._windows.exchange.rank}, batch {self._batch_idx}, update {self._update_index}"
        what = str(exception).removesuffix(".")
        self._windows.exchange.announce(
            f"The first to fail was {where}: {type(exception).__name__}: {what}. Mend what its own traceback shows; the"
            " run can go on from its last checkpoint."
        )
        if sys.version_info >= (3, 11):
            exception.add_note(f"This was {where}.")

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        # `OnExceptionCheckpoint` saves, and Lightning waits for all ranks then.
        if not self._ends_alone:
            super().barrier(*args, **kwargs)

    @property
    def _ends_alone(self) -> bool:
        # After an error, of this rank or of another one: nobody must wait, the others may be in another collective.
        return self._trainer is not None and self._trainer.interrupted and not self._windows.asked_to_end

    def _name_failed_rank(self, error: RuntimeError) -> None:
        # A collective of DDP's that fails because another rank has failed says only that a connection was closed.
        if is_of_a_collective(error) and (said := self._windows.exchange.announced()) is not None:
            raise TokenNormError(f"Another rank has ended inside a window. {said}") from error

    @override
    def teardown(self) -> None:
        if self._left_off_at is None and self._fetcher is not None and self._fetcher.iterator is not None:
            self._left_off_at = self._progress(together=False)
        while self._undo_at_teardown:
            self._undo_at_teardown.pop()()
        self._trainer = self._fetcher = None
        self._windows = self._new_windows(WindowExchange())
        self._starts_ended = self._starts_anywhere = False
        super().teardown()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        # Batches that wait here are still to come, and a window that is not complete is done again whole.
        progress = self._progress(not self._ends_alone) if self._fetcher is not None else self._left_off_at
        if progress is not None and _compat.has_progress(checkpoint):
            resume.write(checkpoint, progress)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _progress(self, together: bool) -> resume.Progress:
        fetcher, exchange = self._fetcher, self._windows.exchange
        assert fetcher is not None
        states = fetcher.resume_states()
        # Loaders are told apart by the rank in the world, of which DDP's group may be a part.
        together &= exchange.world_size == self.world_size
        return resume.Progress(
            states=states,
            unfinished=fetcher.unfinished,
            stream_has_ended=bool(fetcher.done) and fetcher.length is None,
            positions=exchange.gather_objects(resume.position(states, fetcher.ended)) if together else None,
        )

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if fitting and _compat.has_progress(checkpoint):
            self._starts_ended = resume.take_position(checkpoint, self.global_rank, self.world_size)
            self._starts_anywhere = not resume.is_marked(checkpoint)
            if resume.lacks_positions(checkpoint) and self.world_size > 1:
                rank_zero_warn(
                    "The checkpoint holds rank 0's loader states only, and all ranks go on from those: it was written"
                    " after an error, when ranks could not wait for each other, or DDP's group is a part of the world."
                    " Where ranks have states of their own, resume from a checkpoint of a regular update."
                )
        return checkpoint

    # ---- the window: agree, scale, step, record

    @property
    def _accumulate(self) -> int:
        return 0 if self._trainer is None else self._trainer.accumulate_grad_batches

    @property
    def _batch_idx(self) -> int:
        return 0 if self._trainer is None else self._trainer.fit_loop.batch_idx

    @property
    def _update_index(self) -> int:
        return 0 if self._trainer is None else self._trainer.global_step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        try:
            output = super().training_step(*args, **kwargs)
        except RuntimeError as error:
            self._name_failed_rank(error)
            raise
        refuse_output_without_gradient(output, rank=self._windows.exchange.rank, batch_idx=self._batch_idx)
        if self._audit:
            position = {"batch_idx": self._batch_idx, "accumulate": self._accumulate, "update": self._update_index}
            self._windows.audit(output, **position)
        return output

    @override
    def block_backward_sync(self) -> Any:  # a context manager
        # DDP learns a static graph in its very first backward, which therefore must not run under `no_sync`: torch
        # fails an assertion of its own there. Reducing that micro-batch at once is exact: the window's last backward
        # averages it again, and the average of what all ranks share is what they share.
        if getattr(self.model, "static_graph", False) and not self._ran_backward:
            return nullcontext()
        return super().block_backward_sync()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # The factor has to be on the loss before the precision plugin's scale, hence here: what `pre_backward`
        # returns is dropped. `closure_loss` is not changed in place, it is what callbacks see in `outputs`.
        factor = self._windows.factor(closure_loss, self._accumulate)
        self._ran_backward = True
        scaler = getattr(self.precision_plugin, "scaler", None)
        if self._windows.micro_batch == 0:
            self._scale.start_window(scaler, closure_loss.device)
            if optimizer is not None and self._batch_idx % self._accumulate:
                # Lightning clears gradients where the batch index is a multiple of K, and a window starts elsewhere
                # when K has changed in between: those of the last window would be in this one, too.
                optimizer.zero_grad()
        self._refuse_moved_scale(scaler)
        assert self.lightning_module is not None
        without = nullcontext() if factor else zero_gradients(self.lightning_module.parameters())
        try:
            with without:
                result = super().backward(closure_loss * factor, optimizer, *args, **kwargs)
        except RuntimeError as error:
            self._name_failed_rank(error)
            raise
        self._refuse_moved_scale(scaler)  # by a hook that ran after the backward, maybe the window's last one
        return result

    def _refuse_moved_scale(self, scaler: Any) -> None:
        if self._scale.has_moved(scaler):
            raise TokenNormError(
                f"The scale of the GradScaler has changed inside a window, seen at its micro-batch"
                f" {self._windows.micro_batch + 1}: its gradients are added up and have to be on one scale. Something"
                " called `GradScaler.update` or `load_state_dict`, a callback or your module: leave that to Lightning,"
                " which updates the scale once per window."
            )

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        plan = self._windows.finished_window(self._accumulate)
        skipped_because = None
        if plan.num_tokens == 0:
            # Not even a step with zero gradients: weight decay and momentum would still move the parameters. The
            # closure runs all the same, so that DDP and Lightning see a window like any other.
            result = closure()
            skipped_because = "no rank has a supervised token in this window"
        else:
            self._optimizer_stepped = False
            with unscaled_before_step(optimizer):
                result = super().optimizer_step(optimizer, closure, model, **kwargs)
            if not self._optimizer_stepped:
                skipped_because = "the gradients are not finite: the scaler skipped it"
        if self._fetcher is not None:
            self._fetcher.stepped = True
        self._make_last_update = self._windows.record(
            plan, index=self._update_index, skipped_because=skipped_because, device=self.root_device
        )
        return result

    def _note_step(self, *_: Any) -> None:
        self._optimizer_stepped = True

    def _note_sigterm(self) -> None:
        self._got_sigterm = True

    # ---- names

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of this family; a name that is already taken is left as it is."""
        for name, start_method in (
            ("tokennorm_ddp", "popen"),
            ("tokennorm_ddp_spawn", "spawn"),
            ("tokennorm_ddp_fork", "fork"),
            ("tokennorm_ddp_notebook", "fork"),
        ):
            if name not in strategy_registry:
                strategy_registry.register(
                    name,
                    cls,
                    description=f"DDP with token-normalised gradients and `start_method` '{start_method}'",
                    start_method=start_method,
                )


def _check_choice(option: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        expected = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"`TokenNormDDP({option}=...)` got {value!r}; expected {expected}.")
