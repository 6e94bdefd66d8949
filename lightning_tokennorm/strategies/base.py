"""What the strategies of this package share: a mixin that goes before one of Lightning's own strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tokennorm import _compat
from lightning_tokennorm.accounting import NO_TOKENS, NOT_FINITE
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.grad_scaler import noting_steps, one_update, unscaled_before_step
from lightning_tokennorm.gradients import scale_gradients, zero_gradients
from lightning_tokennorm.strategies import failures
from lightning_tokennorm.strategies.lifecycle import FitLifecycle
from lightning_tokennorm.strategies.manual import ManualOptimization
from lightning_tokennorm.strategies.refusals import refuse_output_without_gradient
from lightning_tokennorm.strategies.steps import Trace, around_training_step, loss_of
from lightning_tokennorm.window import WindowPlan


class TokenNormStrategy(FitLifecycle):
    """Gives every supervised token of an update the same weight, under the strategy that follows it.

    At the start of each accumulation window the supervised tokens of all its micro-batches on all ranks are counted
    and exchanged (``N``), and each micro-batch's loss is rescaled before its backward, so that the update uses
    ``(sum over all tokens of their loss gradients) / N``. See `lightning_tokennorm.window` for the algebra.

    A host says over which ranks it reduces gradients and by what it divides their sum (`_reduction`), and may look at
    each backward (`_start_backward`, `_check_backward`), and repair what a step without tokens returned
    (`_give_way_to_parameters`).
    """

    def _give_way_to_parameters(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        """What a step without tokens returned, with a loss whose backward every rank can run."""
        return output

    def _waits_in_backward(self, *, is_last: bool) -> bool:
        """Whether ranks wait for each other in the backward of a micro-batch."""
        return is_last and self._feed_in_use.exchange.world_size > 1

    def _start_backward(self) -> None:
        """Look at the parameters before a backward of a micro-batch with tokens."""

    def _check_backward(self, loss: Tensor, where: str) -> None:
        """Refuse a backward that has not reached the parameters."""

    # ---- the window: agree, scale, step, record

    def _where(self) -> str:
        feed = self._feed_in_use
        return f"batch {feed.trainer.fit_loop.batch_idx} on rank {feed.exchange.rank}"

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        moved, feed = super().batch_to_device(batch, device, dataloader_idx), self._feed
        if feed is None or not feed.trainer.training or _compat.skips_backward(feed.trainer):
            return moved
        self._has_no_batch = moved is None
        if not self._has_no_batch:
            return moved
        # Lightning leaves a micro-batch without a batch out, and with it the end of its window.
        windows = self._windows
        if windows.num_tokens_in_hand() and (feed.exchange.world_size > 1 or windows.has_heads):
            raise TokenNormError(
                f"A transfer hook returned None for batch {feed.trainer.fit_loop.batch_idx + 1} on rank"
                f" {feed.exchange.rank}, whose {windows.num_tokens_in_hand()} supervised tokens the ranks have counted"
                " already. To leave a batch out, drop it in the loader, which may yield None, or set its labels to"
                " -100 there."
            )
        windows.start_micro_batch(windows.micro_batch, stands_in=True)
        return batch if batch is not None else {}

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        feed, windows = self._feed_in_use, self._windows
        if _compat.skips_backward(feed.trainer):
            windows.drop_window()  # of which there is nothing to record
            assert self.lightning_module is not None
            with around_training_step(self.lightning_module, self._step_forward_only):
                return super().training_step(*args, **kwargs)
        if self._has_no_batch and feed.exchange.world_size == 1:
            windows.leave_out()
            return None
        if self._manual is not None:
            return self._training_step_by_hand(self._manual, *args, **kwargs)
        output = self._run_training_step(*args, **kwargs)
        if output is None and feed.exchange.world_size == 1:
            windows.leave_out()  # Lightning's way to leave a batch out, in one process
            return output
        if isinstance(output, Mapping) and "losses" in output and "loss" not in output:
            windows.combine(output["losses"], self._where())  # which says what is wrong
        refuse_output_without_gradient(output, rank=feed.exchange.rank, batch_idx=feed.trainer.fit_loop.batch_idx)
        self._audit(output)
        return output

    def _run_training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        try:
            if not (self._windows.has_heads or self._windows.has_idle_head):
                return super().training_step(*args, **kwargs)
            assert self.lightning_module is not None
            with around_training_step(self.lightning_module, self._step_inside_forward):
                return super().training_step(*args, **kwargs)
        except RuntimeError as error:
            failures.name_failed_rank(error, self._feed_in_use.exchange)
            raise

    def _training_step_by_hand(self, manual: ManualOptimization, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        windows, window = self._windows, self.window
        assert window is not None
        scaler = getattr(self.precision_plugin, "scaler", None)
        try:
            with one_update(scaler) if len(window) > 1 else nullcontext():
                output = self._run_training_step(*args, **kwargs)
        finally:
            self._undo_trace()
        waits = self._waits_in_backward(is_last=window.is_last)
        manual.end_micro_batch(window, ran=windows.ran_backward, waits=waits, where=self._where())
        self._audit(output)
        return output

    def _audit(self, output: STEP_OUTPUT) -> None:
        if self._options.audit:
            trainer = self._feed_in_use.trainer
            self._windows.audit(
                output,
                batch_idx=trainer.fit_loop.batch_idx,
                accumulate=trainer.accumulate_grad_batches,
                update=trainer.global_step,
            )

    def _undo_trace(self) -> None:
        if self._trace is not None:
            self._trace.undo()
            self._trace = None

    def _step_forward_only(self, step: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        if not self._windows.stands_in:
            return step()
        assert self.lightning_module is not None
        trace = Trace(self.lightning_module, self._feed_in_use.trainer)
        output = step()
        trace.undo()
        return output

    def _step_inside_forward(self, step: partial[STEP_OUTPUT]) -> STEP_OUTPUT:
        if self._windows.stands_in:
            assert self.lightning_module is not None
            self._trace = Trace(self.lightning_module, self._feed_in_use.trainer)
        if self._manual is not None:
            return step()
        output = self._with_one_loss(None if self._has_no_batch else step())
        return self._give_way_to_parameters(output) if self._windows.has_idle_head else output

    def _with_one_loss(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        """What a step returned, with one loss for all heads; those themselves without a graph, for whoever looks on."""
        windows = self._windows
        losses = output.get("losses") if isinstance(output, Mapping) else None
        if not windows.has_heads or (losses is None and windows.num_tokens_in_hand() == 0):
            return output
        loss = windows.combine(output if losses is None else losses, self._where())
        assert isinstance(output, Mapping)
        assert isinstance(losses, Mapping)
        seen = {name: each.detach() if isinstance(each, Tensor) else each for name, each in losses.items()}
        return {**output, "loss": loss, "losses": seen}

    @override
    def backward(self, closure_loss: Any, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # The factor has to be on the loss before the precision plugin's scale, hence here: what `pre_backward`
        # returns is dropped. `closure_loss` is not changed in place, it is what callbacks see in `outputs`.
        trainer, windows = self._feed_in_use.trainer, self._windows
        accumulate = trainer.accumulate_grad_batches
        plan = windows.window_in_hand("`backward`", accumulate)
        manual = self._manual
        scaler = getattr(self.precision_plugin, "scaler", None)
        if windows.first_backward or (manual is not None and plan.micro_batches == 1):  # which may step several times
            self._scale.start_window(scaler, self.root_device)
            if optimizer is not None and trainer.fit_loop.batch_idx % accumulate:
                # Lightning clears gradients where the batch index is a multiple of K, and a window starts elsewhere
                # when K has changed in between: those of the last window would be in this one, too.
                optimizer.zero_grad()
        self._refuse_moved_scale(scaler)
        with ExitStack() as stack:
            if manual is None:
                factor = windows.factor(closure_loss, accumulate)
            else:
                has_tokens = windows.num_tokens_in_hand() > 0
                stack.enter_context(manual.backward(windows, self._where(), has_tokens=has_tokens))
                if self.window is not None and not self.window.is_last:
                    stack.enter_context(self.block_backward_sync())
                if isinstance(closure_loss, Mapping):  # a loss for each head
                    closure_loss = windows.combine(closure_loss, self._where())
                factor = windows.factor(closure_loss, 1, one_of_several=True)
                if windows.has_idle_head:
                    closure_loss = loss_of(self._give_way_to_parameters(closure_loss))
            result = self._scaled_backward(closure_loss, factor, optimizer, *args, **kwargs)
        self._refuse_moved_scale(scaler)  # by a hook that ran after the backward, maybe the window's last one
        return result

    def _scaled_backward(
        self, closure_loss: Tensor, factor: float, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        loss = closure_loss * factor
        try:
            if factor:
                self._start_backward()
                result = super().backward(loss, optimizer, *args, **kwargs)
                self._check_backward(loss, self._where())
            else:
                with zero_gradients(loss):
                    result = super().backward(loss, optimizer, *args, **kwargs)
        except RuntimeError as error:
            failures.name_failed_rank(error, self._feed_in_use.exchange)
            raise
        finally:
            if self._manual is None:
                self._undo_trace()
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
        if _compat.skips_backward(self._feed_in_use.trainer):
            return closure()  # what gradients there are have been stepped on
        windows, manual = self._windows, self._manual
        if manual is not None and self.window is not None:
            manual.note_step(optimizer, self.window)
        plan: WindowPlan = windows.finished_window(self._feed_in_use.trainer.accumulate_grad_batches)
        if plan.num_tokens == 0:
            # Not even a step with zero gradients: weight decay and momentum would still move the parameters. The
            # closure runs all the same, so that DDP and Lightning see a window like any other.
            windows.note_step(NO_TOKENS)
            return closure()

        def run_closure() -> Any:
            result = closure()
            factor = windows.take_left_out()
            if factor == 0:
                raise _NothingToStepOnError
            if factor != 1:
                scale_gradients((each for group in optimizer.param_groups for each in group["params"]), factor)
            # what stands for a loss: of a batch that was left out Lightning has none, and would not step at all
            return torch.zeros(()) if result is None and manual is None else result

        try:
            with unscaled_before_step(optimizer), noting_steps(optimizer, self.precision_plugin) as has_stepped:
                result = super().optimizer_step(optimizer, run_closure, model, **kwargs)
        except _NothingToStepOnError:
            windows.note_step(NO_TOKENS)
            return None
        windows.note_step(None if has_stepped() else NOT_FINITE)
        return result


class _NothingToStepOnError(Exception):
    """No micro-batch of the window is left."""
