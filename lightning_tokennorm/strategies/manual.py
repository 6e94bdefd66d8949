"""Manual optimization: a module that runs its own backwards and steps, and must not lose a gradient between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tokennorm.accounting import WindowAccounting
from lightning_tokennorm.counting import Count
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.window import WindowPlan


@dataclass(frozen=True)
class WindowInHand:
    """The accumulation window that a `training_step` belongs to."""

    plan: WindowPlan
    """What all ranks agree on."""
    accounting: WindowAccounting
    """The windows of this rank."""

    @property
    def num_tokens(self) -> Count:
        """``N``: the supervised tokens of all its micro-batches on all ranks."""
        return self.plan.num_tokens

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch in hand is its last: the optimizers step after its backward."""
        return self.accounting.micro_batch == len(self) - 1

    def __len__(self) -> int:
        """The number of its micro-batches, the same on all ranks."""
        return self.plan.micro_batches


def refuse_wrong_place_of_accumulation(automatic: bool, given: int | None, strategy: str) -> None:
    """Refuse an accumulation that the strategy was told of where it is the Trainer's.

    Raises:
        MisconfigurationException: It was.
    """
    if automatic and given is not None:
        raise MisconfigurationException(
            f"`{strategy}(accumulate_grad_batches={given})` got with automatic optimization; it is for modules with"
            f" `automatic_optimization = False`. Set it on the Trainer: `Trainer(accumulate_grad_batches={given})`."
        )


class ManualOptimization:
    """Sees to it that all gradients of a window come from `manual_backward`, and are there when an optimizer steps.

    Args:
        model: The model as it is wrapped.
        optimizers: Those that the module steps.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._in_backward = False
        self._was_raw = False
        self._handles = [
            each.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
            for each in model.parameters()
            if each.requires_grad
        ]
        self._added: dict[int, _Added] = {}  # to the gradients of which optimizer, by its `id`
        self._stepped: set[int] = set()  # in the window in hand

    def close(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()

    def _note_gradient(self, parameter: Tensor) -> None:
        self._was_raw |= not self._in_backward

    @contextmanager
    def backward(self, windows: WindowAccounting, where: str, *, has_tokens: bool) -> Iterator[None]:
        """A context for one backward.

        Args:
            windows: The windows of this rank.
            where: Which micro-batch it is, for error texts.
            has_tokens: Whether the micro-batch has supervised tokens.

        Raises:
            TokenNormError: The gradients of earlier micro-batches are gone, or those of the window before are not.
        """
        if windows.first_backward:
            self._refuse_what_is_left(where)
            self._added, self._stepped = {}, set()
        self._refuse_what_is_gone(windows.micro_batch, where)
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
        if has_tokens:
            for each in self._optimizers:
                before = self._added.get(id(each))
                added = _Added.to(each, windows.micro_batch if before is None else before.since)
                if added is not None:
                    self._added[id(each)] = added

    def _refuse_what_is_left(self, where: str) -> None:
        if len(self._optimizers) > 1 and self._stepped:
            return  # what an optimizer left aside has from another one's loss is cleared before its own
        for added in self._added.values():
            gradient = added.parameter.grad
            if gradient is not None and _has_value(gradient):
                raise TokenNormError(
                    f"The gradients of the window before are still there at {where}, the first backward of a new"
                    " window, and would be added to its own, though they are divided by another `N`. Call"
                    " `optimizer.zero_grad()` after each step. If the module adds several micro-batches up, say so"
                    " (`accumulate_grad_batches=...` of the strategy), and step where"
                    " `self.trainer.strategy.window.is_last`, without dividing the loss by their number."
                )

    def _refuse_what_is_gone(self, micro_batch: int, where: str) -> None:
        for each in self._optimizers:
            added = self._added.get(id(each))
            if added is not None and added.since < micro_batch and id(each) not in self._stepped:
                if not added.is_gone(each):
                    continue
                raise TokenNormError(
                    f"Before {where}, the gradients of earlier micro-batches of the window were cleared, whose tokens"
                    " are counted in `N`. Call `optimizer.zero_grad()` after the step only, where"
                    " `self.trainer.strategy.window.is_last`; of several optimizers let"
                    " `toggle_optimizer` keep the gradients apart."
                )

    def note_step(self, optimizer: Any, window: WindowInHand) -> None:
        """Take note of a step.

        Args:
            optimizer: The optimizer that is about to step.
            window: The window in hand.

        Raises:
            TokenNormError: The window is not over, or the optimizer has stepped on it.
        """
        if not window.is_last:
            raise TokenNormError(
                f"An optimizer steps after micro-batch {window.accounting.micro_batch + 1} of a window of"
                f" {len(window)}, of which the later ones would be missing. Step after the last one:"
                " `if self.trainer.strategy.window.is_last:`."
            )
        if id(optimizer) in self._stepped and len(window) > 1:
            raise TokenNormError(
                f"An optimizer steps a second time on a window of {len(window)} micro-batches, of which only the last"
                " one can be run again. Step once per window, or use `accumulate_grad_batches=1`."
            )
        self._stepped.add(id(optimizer))

    def end_micro_batch(self, window: WindowInHand, *, ran: bool, waits: bool, where: str) -> None:
        """Check what the training step has made of its micro-batch.

        Args:
            window: The window in hand.
            ran: Whether it ran `manual_backward`.
            waits: Whether other ranks wait for its backward.
            where: Which micro-batch it is, for error texts.

        Raises:
            TokenNormError: It ran a backward of its own, or none where one is needed.
        """
        was_raw, self._was_raw = self._was_raw, False
        if was_raw:
            raise TokenNormError(
                f"`training_step` ran a backward of its own for {where}, such as `loss.backward()`, so its tokens do"
                " not have the weight of the others. Call `self.manual_backward(loss)`."
            )
        counts = window.accounting.num_tokens_in_hand() > 0 and (waits or len(window) > 1)
        if not ran and (counts or (waits and window.num_tokens > 0)):
            raise TokenNormError(
                f"`training_step` did not call `self.manual_backward(loss)` for {where}, while"
                f" {'its tokens are counted in `N`' if counts else 'other ranks wait for its backward'}. Call it for"
                " every batch, in place of `loss.backward()`; to leave a batch out, set its labels to -100."
            )


@dataclass(frozen=True)
class _Added:
    """That a backward has added to the gradients of an optimizer."""

    since: int
    """The micro-batch that was the first to."""
    parameter: Tensor
    """One of those that have a gradient."""
    gradient: Tensor
    version: int

    @classmethod
    def to(cls, optimizer: Any, since: int) -> _Added | None:
        for each in _parameters(optimizer):
            if each.grad is not None:
                return cls(since, each, each.grad, each.grad._version)
        return None

    def is_gone(self, optimizer: Any) -> bool:
        """Whether the gradients have been cleared since; read only where something was done to them."""
        gradient = self.parameter.grad
        if gradient is None:
            return True
        if gradient is self.gradient and gradient._version == self.version:
            return False
        return not any(each.grad is not None and _has_value(each.grad) for each in _parameters(optimizer))


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _has_value(gradient: Tensor) -> bool:
    local: Any = getattr(gradient, "to_local", lambda: gradient)()  # of shards this rank's alone: nobody else asks
    return bool(torch.count_nonzero(local))
