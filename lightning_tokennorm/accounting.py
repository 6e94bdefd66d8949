"""Leads one rank through its accumulation windows: agree (see `agreement`), scale, audit, record.

It knows the algebra and the exchange but no Trainer, no strategy and no DDP: whoever trains calls `report_window` as
soon as a coming window's batches are there, `start_window` before its first micro-batch, `start_micro_batch` before
each, `factor` before each backward and `record` at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_tokennorm.agreement import WindowAgreement, in_one_text
from lightning_tokennorm.counting import Count, TokenCounter, check_count, to_host
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.head_losses import HeadLosses, plain_value, sum_of_losses
from lightning_tokennorm.window import (
    HeadRecord,
    LossReduction,
    UpdateRecord,
    WindowPlan,
    total,
)

NOT_STEPPED = "`optimizer_step` of the module did not step the optimizer"
NO_TOKENS = "no rank has a supervised token in this window"
NOT_FINITE = "the gradients are not finite: the scaler skipped it"


class WindowAccounting(WindowAgreement):
    """The windows of one rank, one after the other.

    Args:
        exchange: Between all ranks that go through their windows together.
        count_tokens: Counts the supervised tokens of a batch.
        loss_reduction: What the training step returns.
        **agreement: As in `WindowAgreement`.
    """

    def __init__(
        self, exchange: WindowExchange, count_tokens: TokenCounter, *, loss_reduction: LossReduction, **agreement: Any
    ) -> None:
        super().__init__(exchange, count_tokens, **agreement)
        self._loss_reduction: LossReduction = loss_reduction
        # The window in hand; no plan before the first one, nor where the exchange of the next one failed.
        self._plan: WindowPlan | None = None
        self._losses: dict[int, tuple[Tensor, Count]] = {}
        self._head_losses = HeadLosses(self._weights, loss_reduction)
        self._ran_backward: set[int] = set()
        self._left_out: set[int] = set()
        self._outcome: str | None = NOT_STEPPED
        self._mismatches: list[str] = []
        self.micro_batch = -1
        """Index in its window of the micro-batch in hand."""
        self.stands_in = False
        """Whether the micro-batch in hand runs on a batch that stands in for one that this rank does not have."""

    def start_window(self, *, update: int, batch: Any = None) -> WindowPlan | None:
        """Go on to the next window, see `agree`."""
        self._plan = None
        plan = self.agree(update=update, batch=batch)
        if plan is None:
            return None
        self._losses, self._head_losses = {}, HeadLosses(self._weights, self._loss_reduction)
        self._ran_backward = set()
        self._left_out = set()
        self._outcome = NOT_STEPPED
        self._mismatches = []
        self._plan, self.micro_batch = plan, -1
        self.exchange.start()
        return plan

    def start_micro_batch(self, index: int, stands_in: bool = False) -> None:
        """Go on to the micro-batch with this index in the window.

        Args:
            index: Its index.
            stands_in: Whether it runs on a batch that stands in for one that this rank does not have.
        """
        self.micro_batch = index
        self.stands_in = stands_in

    @property
    def has_window(self) -> bool:
        """Whether there is a window in hand, or one that has been finished and not been recorded."""
        return self._plan is not None

    @property
    def has_begun(self) -> bool:
        """Whether the window in hand has a micro-batch in hand; not where it is planned only."""
        return self._plan is not None and self.micro_batch >= 0

    def drop_window(self) -> None:
        """Leave the window in hand without a record: nothing is trained on in it."""
        self._plan = None

    def window_in_hand(self, doing: str, accumulate: int) -> WindowPlan:
        """The plan of the window.

        Args:
            doing: What the plan is needed for, for the text of an error.
            accumulate: ``K`` as it is now.

        Raises:
            TokenNormError: There is no window, or ``K`` has changed since it started.
        """
        plan = self._plan
        if plan is None:
            raise TokenNormError(
                f"{doing} was called outside an accumulation window, so the number of supervised tokens is not known."
                " Leave the backward to Lightning, with batches from the Trainer's training loader."
            )
        if plan.accumulate != accumulate:
            raise TokenNormError(
                f"`accumulate_grad_batches` went from {plan.accumulate} to {accumulate} inside a window of"
                f" {plan.micro_batches} micro-batches. Change it between windows, as `GradientAccumulationScheduler`"
                " does at the start of an epoch."
            )
        return plan

    def num_tokens_in_hand(self) -> Count:
        """``n``: the supervised tokens of this rank's micro-batch in hand; 0 outside a window."""
        return 0 if self._plan is None else self._plan.tokens[self.micro_batch]

    def heads_in_hand(self) -> dict[str, Count]:
        """``n`` of each head in this rank's micro-batch in hand; empty with a single loss."""
        heads = {} if self._plan is None else self._plan.heads
        return {name: each.tokens[self.micro_batch] for name, each in heads.items()}

    @property
    def has_heads(self) -> bool:
        """Whether the window in hand has several losses."""
        return self._plan is not None and bool(self._plan.heads)

    @property
    def has_idle_head(self) -> bool:
        """Whether some loss of the micro-batch in hand has no token, so that it takes no part in the backward."""
        plan = self._plan
        if plan is None or not plan.heads:
            return self.num_tokens_in_hand() == 0
        return len(self._head_losses.live(plan, self.micro_batch)) < len(plan.heads)

    def combine(self, losses: Any, where: str) -> Tensor:
        """The weighted sum of the losses of the micro-batch in hand, see `HeadLosses.combine`."""
        assert self._plan is not None
        return self._head_losses.combine(self._plan, self.micro_batch, losses, where)

    @property
    def first_backward(self) -> bool:
        """Whether no micro-batch of the window has run its backward yet."""
        return not self._ran_backward

    @property
    def ran_backward(self) -> bool:
        """Whether the micro-batch in hand has run a backward."""
        return self.micro_batch in self._ran_backward

    def factor(self, loss: Tensor, divided_by: float, *, one_of_several: bool = False) -> float:
        """What the loss of the micro-batch in hand has to be multiplied by; 0.0 where it has no token.

        Args:
            loss: The loss as it is handed over: shape ``()``, or one element. Its sum goes into the record.
            divided_by: By what the caller has divided the loss of the training step.
            one_of_several: Whether a micro-batch may have several losses, each with a backward of its own.

        Raises:
            TokenNormError: The micro-batch has run its backward before, in a window of several: its gradient would be
                added again while the others' stay.
        """
        plan = self._plan
        assert plan is not None
        if self.ran_backward and plan.micro_batches > 1 and not one_of_several:
            raise TokenNormError(
                f"The backward of micro-batch {self.micro_batch + 1} of a window of {plan.micro_batches} was run again:"
                " the optimizer evaluates its closure several times (LBFGS, SAM), but only the last micro-batch is"
                " run again then. Use `accumulate_grad_batches=1` with it, or another optimizer."
            )
        self._ran_backward.add(self.micro_batch)
        factor = plan.factor(self.micro_batch, self._loss_reduction, divided_by)
        if plan.heads:
            return factor if self._head_losses.live(plan, self.micro_batch) else 0.0
        if factor:
            # one by micro-batch, since an optimizer may run its closure more than once
            weight = plan.loss_weight(self.micro_batch, self._loss_reduction, divided_by)
            key = len(self._losses) if one_of_several else self.micro_batch
            self._losses[key] = (plain_value(loss), weight)
        return factor

    def leave_out(self) -> None:
        """Leave the micro-batch in hand out of the window: it adds nothing, and its tokens are not part of ``N``.

        Only in a group of one, whose plan no other rank shares.
        """
        self._left_out.add(self.micro_batch)

    def take_left_out(self) -> float:
        """By what the window's gradients are to be multiplied, since micro-batches were left out of it.

        Returns:
            ``N`` as planned over ``N`` without them, where the plan is changed to the latter; 0.0 where no token is
            left.
        """
        plan, left_out = self._plan, self._left_out
        assert plan is not None
        if not left_out:
            return 1.0
        self._left_out = set()
        tokens = tuple(0 if index in left_out else count for index, count in enumerate(plan.tokens))
        left = total(tokens)
        self._plan = replace(plan, tokens=tokens, num_tokens=left, tokens_min=left, tokens_max=left)
        return plan.num_tokens / left if left else 0.0

    def finished_window(self, accumulate: int) -> WindowPlan:
        """The plan of the window whose last micro-batch is in hand.

        Raises:
            TokenNormError: It is not the last one.
        """
        plan = self.window_in_hand("`optimizer_step`", accumulate)
        if self.micro_batch != plan.micro_batches - 1:
            raise TokenNormError(
                f"The optimizer steps after micro-batch {self.micro_batch + 1} of a window of {plan.micro_batches}:"
                " the plan of the window no longer holds. Leave `accumulate_grad_batches` and the end of the epoch"
                " alone inside a window."
            )
        return plan

    def note_step(self, skipped_because: str | None) -> None:
        """Remember what came of a step on the window in hand: ``None`` where it was applied, else why it was not."""
        if self._outcome is not None:
            self._outcome = skipped_because

    @property
    def tokens_trained_on(self) -> Count:
        """``N`` of the window in hand where an optimizer has stepped on it, else 0."""
        return 0 if self._plan is None or self._outcome is not None else self._plan.num_tokens

    def take_record(self, device: torch.device) -> Callable[[], UpdateRecord]:
        """What went into the update of the window in hand, which is over; losses are added up where somebody asks."""
        plan, self._plan = self._plan, None
        assert plan is not None
        heads = self._head_losses.records(plan)
        return partial(_record, plan, self._losses, heads, self._update, self._outcome, device)

    def audit(self, output: Any, *, batch_idx: int, accumulate: int, update: int) -> None:
        """Compare the count that the loss of the micro-batch in hand was made with to the one counted ahead.

        Args:
            output: What the training step returned; without the key ``"num_tokens"`` there is nothing to compare.
            batch_idx: The batch's number in the epoch, for error texts.
            accumulate: ``K`` as it is now.
            update: The number of the update, for error texts.

        Raises:
            TokenNormError: On all ranks, at the window's last micro-batch: a count differs on one of them.
        """
        plan = self.window_in_hand("`training_step`", accumulate)
        used = output.get("num_tokens") if isinstance(output, Mapping) else None
        problem = None if used is None or self.stands_in else _count_problem(plan.tokens[self.micro_batch], used)
        if problem is not None:
            self._mismatches.append(f"batch {batch_idx}: {problem}.")
        if self.micro_batch < plan.micro_batches - 1:
            return
        if listed := in_one_text(self.exchange.gather_objects(" ".join(self._mismatches) or None)):
            raise TokenNormError(
                f"At update {update}, the tokens counted ahead are not those that `training_step` used. {listed} Usual"
                " reasons: the loss shifts labels and the counter does not, or the other way round"
                " (`SupervisedTokens(shift=...)`); another ignore index; labels that a transfer hook or"
                " `training_step` changes after they were counted.",
                together=True,
            )


def _record(
    plan: WindowPlan,
    losses: Mapping[int, tuple[Tensor, Count]],
    make_heads: Callable[[torch.device], tuple[dict[str, HeadRecord], Tensor]],
    index: int,
    skipped_because: str | None,
    device: torch.device,
) -> UpdateRecord:
    heads, weighted = make_heads(device)
    loss_sum = weighted if heads else sum_of_losses(losses.values(), device)
    return UpdateRecord(
        index=index,
        num_tokens=plan.num_tokens,
        micro_batches=plan.micro_batches,
        world_size=plan.world_size,
        tokens_min=plan.tokens_min,
        tokens_max=plan.tokens_max,
        loss_sum=loss_sum,
        applied=skipped_because is None,
        skipped_because=skipped_because,
        padded_micro_batches=plan.padded_micro_batches,
        heads=heads,
    )


def _count_problem(counted: Count, returned: Any) -> str | None:
    """How the count that a training step returned differs from the one counted ahead."""
    source = "`training_step` returned as `num_tokens`"
    try:
        (used,) = to_host([check_count(returned, source)], source)
    except (TypeError, ValueError) as error:  # to be raised by all ranks together
        return str(error)
    exact = isinstance(used, int) and isinstance(counted, int)
    agree = used == counted if exact else math.isclose(used, counted, rel_tol=1e-6)
    return None if agree else f"{counted} counted ahead, {used} used"
