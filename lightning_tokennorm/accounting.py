"""Leads one rank through its accumulation windows: agree, scale, audit, record.

It knows the algebra and the exchange but no Trainer, no strategy and no DDP: whoever trains calls `report_window` as
soon as a coming window's batches are there, `start_window` before its first micro-batch, `start_micro_batch` before
each, `factor` before each backward and `record` at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from lightning_tokennorm.counting import Count, TokenCounter, check_count, to_host
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.window import LossReduction, RankReport, UpdateRecord, WindowPlan, disagreement, total


class WindowAccounting:
    """The windows of one rank, one after the other.

    Args:
        exchange: Between the ranks over which gradients are reduced.
        count_tokens: Counts the supervised tokens of a batch.
        loss_reduction: What the training step returns.
        on_empty: What a window without a token is: ``"skip"`` or ``"error"``.
        uneven: What ranks are whose data ends before the others': ``"pad"`` or ``"error"``.
        averaged: Whether the reduction leaves the ranks' mean of the gradients, else their sum.
    """

    def __init__(
        self,
        exchange: WindowExchange,
        count_tokens: TokenCounter,
        *,
        loss_reduction: LossReduction,
        on_empty: Literal["skip", "error"],
        uneven: Literal["pad", "error"],
        averaged: bool,
    ) -> None:
        self.exchange = exchange
        self._count_tokens = count_tokens
        self._loss_reduction: LossReduction = loss_reduction
        self._on_empty = on_empty
        self._pad = uneven == "pad"
        self._averaged = averaged
        # The window in hand; no plan before the first one, nor where the exchange of the next one failed.
        self._plan: WindowPlan | None = None
        # This rank's part of the window that was reported last.
        self._reported_tokens: tuple[Count, ...] = ()
        self._reported_failure: Exception | None = None
        self.micro_batch = -1
        """Index in its window of the micro-batch in hand."""
        self.stands_in = False
        """Whether the micro-batch in hand runs on a batch that stands in for one that this rank does not have."""
        self.padded_micro_batches = 0
        """Padded micro-batches of all windows so far, over all ranks."""
        self.asked_to_end = False
        """Whether some rank got a SIGTERM, as of the latest exchange."""
        self._losses: dict[int, Tensor] = {}
        self._mismatches: list[str] = []
        self.lent_batch: Any = None
        """A batch of another rank for the window in hand, where a rank has none."""

    def report_window(
        self,
        batches: Sequence[Any],
        accumulate: int,
        *,
        failure: Exception | None = None,
        borrows: bool = False,
        sigterm: bool = False,
    ) -> None:
        """Tell the other ranks what this one has for a coming window. Waits for nobody; every rank has to call this.

        Args:
            batches: This rank's batches, one per micro-batch and ``None`` for one without data; empty at the end of
                its data. They are counted here, in a row: after a forward the first count costs more than the others.
            accumulate: ``K``, by which each loss will be divided.
            failure: What went wrong on this rank while reading.
            borrows: Whether this rank has no batch on which it could run a micro-batch that has no data.
            sigterm: Whether this rank was asked to end.
        """
        tokens: tuple[Count, ...] = ()
        try:
            counts = [0 if batch is None else check_count(self._count_tokens(batch)) for batch in batches]
            tokens = to_host(counts)
        except Exception as error:  # to be raised when the window comes, by all ranks together
            failure = error
        self._reported_tokens, self._reported_failure = tokens, failure
        self.exchange.send(RankReport(total(tokens), len(batches), accumulate, failure is not None, borrows, sigterm))

    def goes_on(self) -> bool:
        """Whether some rank has reported anything but the end of its data: waits for all reports."""
        return any(report.micro_batches or report.refuses for report in self.exchange.receive())

    def start_window(self, *, update: int, batch: Any = None) -> WindowPlan | None:
        """Plan the window that all ranks have reported. Every rank has to call this alike.

        Args:
            update: The number of the update, for error texts.
            batch: A batch that this rank can lend to one that has none.

        Returns:
            The plan of the window; ``None`` at the end of all ranks' data.

        Raises:
            TokenNormError: On all ranks: a rank refuses, the ranks' windows do not fit together, or nobody has a token
                and that is an error.
        """
        self._plan = None
        reports = self.exchange.receive()
        self.asked_to_end = any(report.sigterm for report in reports)
        # From here on every rank holds the same reports and decides the same.
        if any(report.refuses for report in reports):
            self._refuse_together(self._reported_failure, update)
        if problem := disagreement(reports, pad=self._pad):
            raise TokenNormError(f"At update {update}, {problem}")
        if not any(report.micro_batches for report in reports):  # the data of all ranks has ended
            return None
        plan = WindowPlan.agreed(reports, self._reported_tokens, averaged=self._averaged)
        if plan.num_tokens == 0 and self._on_empty == "error":
            raise TokenNormError(
                f"At update {update}, the window of {plan.micro_batches} micro-batches has no supervised token on any"
                f' of {plan.world_size} ranks. Look at the labels, or use `on_empty="skip"`.'
            )
        self._plan = plan
        self._losses = {}
        self._mismatches = []
        self.padded_micro_batches += plan.padded_micro_batches
        self.lent_batch = self._lend(reports, batch, update)
        return plan

    def _lend(self, reports: Sequence[RankReport], batch: Any, update: int) -> Any:
        """A batch of the first rank that has one, where another rank has none; else ``None``."""
        if not any(report.borrows for report in reports):
            return None
        lenders = [rank for rank, report in enumerate(reports) if not report.borrows]
        if not lenders:
            raise TokenNormError(
                f"At update {update}, no rank has a batch to run its forward on: the loaders yield only None. Yield"
                " batches; one without supervised tokens contributes nothing."
            )
        return self.exchange.lend(batch, lenders[0])

    def start_micro_batch(self, index: int, stands_in: bool = False) -> None:
        """Go on to the micro-batch with this index in the window.

        Args:
            index: Its index.
            stands_in: Whether it runs on a batch that stands in for one that this rank does not have.
        """
        self.micro_batch = index
        self.stands_in = stands_in

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

    def factor(self, loss: Tensor, accumulate: int) -> float:
        """What the loss of the micro-batch in hand has to be multiplied by; 0.0 where it has no token.

        Args:
            loss: The loss as it is handed over, divided by ``K``: shape ``()``. Its sum goes into the record.
            accumulate: ``K`` as it is now.
        """
        plan = self.window_in_hand("`backward`", accumulate)
        factor = plan.factor(self.micro_batch, self._loss_reduction)
        if factor:
            # by micro-batch, since an optimizer may run its closure more than once
            self._losses[self.micro_batch] = loss.detach()
        return factor

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

    def record(
        self, plan: WindowPlan, *, index: int, skipped_because: str | None, device: torch.device
    ) -> Callable[[], UpdateRecord]:
        """What went into the update of the window in hand; its losses are added up where somebody asks."""
        return partial(_record, plan, self._losses, self._loss_reduction, index, skipped_because, device)

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
        if listed := self._gather_listed(" ".join(self._mismatches) or None):
            raise TokenNormError(
                f"At update {update}, the tokens counted ahead are not those that `training_step` used. {listed} Usual"
                " reasons: the loss shifts labels and the counter does not, or the other way round"
                " (`SupervisedTokens(shift=...)`); another ignore index; labels that a transfer hook or"
                " `training_step` changes after they were counted."
            )

    def _refuse_together(self, failure: Exception | None, update: int) -> NoReturn:
        listed = self._gather_listed(None if failure is None else f"{type(failure).__name__}: {failure}")
        raise TokenNormError(f"At update {update}, the coming micro-batches cannot be used. {listed}") from failure

    def _gather_listed(self, reason: str | None) -> str:
        """What ranks have to say, in one text that is the same on all of them; empty where nobody has."""
        reasons = self.exchange.gather_objects(reason)
        return " ".join(f"Rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)


def _record(
    plan: WindowPlan,
    losses: Mapping[int, Tensor],
    loss_reduction: LossReduction,
    index: int,
    skipped_because: str | None,
    device: torch.device,
) -> UpdateRecord:
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for micro_batch, loss in losses.items():
        # cast, scaled and added in one kernel
        loss_sum = loss_sum.add(loss, alpha=plan.loss_weight(micro_batch, loss_reduction))
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
