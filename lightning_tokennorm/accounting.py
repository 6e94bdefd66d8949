"""Leads one rank through its accumulation windows: agree, scale, audit, record.

It knows the algebra and the exchange but no Trainer, no strategy and no DDP: whoever trains calls `report_window` as
soon as a coming window's batches are there, `start_window` before its first micro-batch, `start_micro_batch` before
each, `factor` before each backward and `record` at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from lightning_tokennorm.counting import Count, TokenCounter, check_count, to_host
from lightning_tokennorm.errors import RaisedElsewhere, TokenNormError, text_of, words_of
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.fingerprint import fingerprint
from lightning_tokennorm.head_losses import HeadLosses, plain_value, sum_of_losses
from lightning_tokennorm.heads import ONE_LOSS, by_head, unknown_names
from lightning_tokennorm.window import (
    HeadRecord,
    LossReduction,
    RankReport,
    UpdateRecord,
    WindowPlan,
    differing_accumulation,
    differing_copies,
    total,
    uneven_windows,
)

FIRST_WINDOWS = 50
"""After this many windows without a single token the training is refused: the labels cannot be right."""

NOT_STEPPED = "`optimizer_step` of the module did not step the optimizer"
NO_TOKENS = "no rank has a supervised token in this window"
NOT_FINITE = "the gradients are not finite: the scaler skipped it"


class WindowAccounting:
    """The windows of one rank, one after the other.

    Args:
        exchange: Between all ranks that go through their windows together.
        count_tokens: Counts the supervised tokens of a batch.
        loss_reduction: What the training step returns.
        on_empty: What a window without a token is: ``"skip"`` or ``"error"``.
        uneven: What ranks are whose data ends before the others': ``"pad"`` or ``"error"``.
        ranks_divided_by: By what the reduction over ranks divides the sum of their gradients; ``None`` for ``W``.
        head_weights: The weights of several losses by their names; 1 where none is given.
        copies: The ranks of each model replica, where several hold the same batches: one of each is counted. ``None``
            where every rank has batches of its own.
    """

    def __init__(
        self,
        exchange: WindowExchange,
        count_tokens: TokenCounter,
        *,
        loss_reduction: LossReduction,
        on_empty: Literal["skip", "error"],
        uneven: Literal["pad", "error"],
        ranks_divided_by: float | None = None,
        copies: Sequence[Sequence[int]] | None = None,
        head_weights: Mapping[str, float] | None = None,
    ) -> None:
        self.exchange = exchange
        self._copies = [(rank,) for rank in range(exchange.world_size)] if copies is None else copies
        self._has_copies = len(self._copies) < exchange.world_size
        self._count_tokens = count_tokens
        self._weights = dict(head_weights or {})
        self._heads: tuple[str, ...] = ()  # that the ranks have agreed upon
        self._loss_reduction: LossReduction = loss_reduction
        self._on_empty = on_empty
        self._pad = uneven == "pad"
        self.world_size = len(self._copies)
        """``W``: the number of ranks whose batches are counted."""
        self._ranks_divided_by = self.world_size if ranks_divided_by is None else ranks_divided_by
        # The window in hand; no plan before the first one, nor where the exchange of the next one failed.
        self._plan: WindowPlan | None = None
        self._update = 0
        self._losses: dict[int, tuple[Tensor, Count]] = {}
        self._head_losses = HeadLosses(self._weights, loss_reduction)
        self._ran_backward: set[int] = set()
        self._left_out: set[int] = set()
        self._outcome: str | None = NOT_STEPPED
        self._mismatches: list[str] = []
        # This rank's part of the window that was reported last.
        self._reported_tokens: tuple[Count, ...] = ()
        self._reported_heads: Mapping[str, tuple[Count, ...]] = {}
        self._reported_failure: Exception | None = None
        self.micro_batch = -1
        """Index in its window of the micro-batch in hand."""
        self.stands_in = False
        """Whether the micro-batch in hand runs on a batch that stands in for one that this rank does not have."""
        self.windows = 0
        """Windows so far."""
        self.empty_windows = 0
        """Those of them in which no rank had a token."""
        self.padded_micro_batches = 0
        """Padded micro-batches of all windows so far, over all ranks."""
        self.asked_to_end = False
        """Whether some rank got a SIGTERM, as of the latest exchange."""
        self.asked_to_requeue = False
        """Whether some rank got the signal before a requeue, as of the latest exchange."""
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
        requeue: bool = False,
    ) -> None:
        """Tell the other ranks what this one has for a coming window. Waits for nobody; every rank has to call this.

        Args:
            batches: This rank's batches, one per micro-batch and ``None`` for one without data; empty at the end of
                its data. They are counted here, in a row: after a forward the first count costs more than the others.
            accumulate: ``K``, by which each loss will be divided.
            failure: What went wrong on this rank while reading.
            borrows: Whether this rank has no batch on which it could run a micro-batch that has no data.
            sigterm: Whether this rank was asked to end.
            requeue: Whether this rank got the signal before a requeue.
        """
        tokens: tuple[Count, ...] = ()
        heads: Mapping[str, tuple[Count, ...]] = {}
        looks = 0
        try:
            tokens, heads = self._count(batches)
            for batch in batches if self._has_copies else ():
                looks = fingerprint(batch, looks)
        except Exception as error:  # to be raised when the window comes, by all ranks together
            failure = error
        self._reported_tokens, self._reported_heads, self._reported_failure = tokens, heads, failure
        report = RankReport(
            total(tokens),
            len(batches),
            accumulate,
            refuses=failure is not None,
            borrows=borrows,
            sigterm=sigterm,
            requeue=requeue,
            fingerprint=looks,
            names_heads=not set(heads) <= {*self._heads, *(() if self._heads else (ONE_LOSS,))},
            heads=self._in_order(heads),
        )
        self.exchange.send(report)

    def _count(self, batches: Sequence[Any]) -> tuple[tuple[Count, ...], Mapping[str, tuple[Count, ...]]]:
        """The tokens of each micro-batch: those of all losses, and by their names."""
        counted = [{} if batch is None else by_head(self._count_tokens(batch)) for batch in batches]
        names = sorted({name for each in counted for name in each})
        host = iter(to_host([each.get(name, 0) for name in names for each in counted]))
        heads = {name: tuple(next(host) for _ in counted) for name in names}
        return tuple(total(column) for column in zip(*heads.values(), strict=True)) or (0,) * len(batches), heads

    def _in_order(self, heads: Mapping[str, tuple[Count, ...]]) -> tuple[Count, ...]:
        """This rank's tokens of a window for each head that the ranks have agreed upon."""
        return tuple(total(heads.get(name, ())) for name in self._heads)

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
        self.asked_to_requeue = any(report.requeue for report in reports)
        # From here on every rank holds the same reports and decides the same.
        self._refuse_to_go_on_without([rank for rank, report in enumerate(reports) if report.leaves], update)
        if alone := [rank for rank, report in enumerate(reports) if report.meets]:
            raise TokenNormError(
                f"At update {update}, rank {alone[0]} saves a full checkpoint while others train. Call"
                " `trainer.save_checkpoint` on all ranks; one with weights only can be saved by one."
            )
        if problem := differing_accumulation(reports):
            # First of all: a rank that changes its K alone, between windows, is the only one to see this now. The
            # others hear of it when they report their next window, and would not join in anything before.
            raise TokenNormError(f"At update {update}, {problem}", together=not self.windows)
        if any(report.refuses for report in reports):
            self._refuse_together(self._reported_failure, update)
        if any(report.names_heads for report in reports):
            reports = self._agree_on_heads(reports, update)
        if problem := differing_copies(reports, self._copies):
            raise TokenNormError(f"At update {update}, {problem}", together=True)
        if not self._pad and (problem := uneven_windows(reports)):
            raise TokenNormError(f"At update {update}, {problem}", together=True)
        if not any(report.micro_batches for report in reports):  # the data of all ranks has ended
            return None
        counted = [reports[ranks[0]] for ranks in self._copies]
        none = (0,) * len(self._reported_tokens)
        plan = WindowPlan.agreed(
            counted,
            self._reported_tokens,
            ranks_divided_by=self._ranks_divided_by,
            heads={name: self._reported_heads.get(name, none) for name in self._heads},
        )
        self.windows += 1
        if plan.num_tokens == 0:
            self.empty_windows += 1
            self._refuse_empty_window(plan, update)
        self._losses, self._head_losses = {}, HeadLosses(self._weights, self._loss_reduction)
        self._ran_backward = set()
        self._left_out = set()
        self._outcome = NOT_STEPPED
        self._mismatches = []
        self.padded_micro_batches += plan.padded_micro_batches
        self.lent_batch = self._lend(reports, batch, update)
        self._plan, self._update = plan, update
        self.exchange.start()
        return plan

    def _agree_on_heads(self, reports: Sequence[RankReport], update: int) -> list[RankReport]:
        """Exchange the names of the heads, which may differ between ranks; called by all of them.

        Returns:
            The reports, with a count for each head that some rank has counted so far.

        Raises:
            TokenNormError: On all ranks: some count one loss and some count heads, or a weight is given for a head that
                nobody counts.
        """
        self._refuse_to_go_on_without(self.exchange.who_left(), update)  # who has reported the window, and is gone
        told = self.exchange.gather_objects({name: total(counts) for name, counts in self._reported_heads.items()})
        names = {name for counts in told for name in counts} | set(self._heads)
        if ONE_LOSS in names:
            alone = next(rank for rank, counts in enumerate(told) if ONE_LOSS in counts)
            raise TokenNormError(
                f"At update {update}, rank {alone} counts one loss, and others count the heads"
                f" {', '.join(repr(name) for name in sorted(names - {ONE_LOSS}))}. Let `count_tokens` return a mapping"
                " of the same names for every batch, with 0 for heads that a batch has no tokens of.",
                together=True,
            )
        if problem := unknown_names(self._weights, sorted(names)):
            raise TokenNormError(f"`head_weights` names {problem}.", together=True)
        self._heads = tuple(sorted(names))
        self.exchange.widen(len(self._heads))
        return [
            replace(report, heads=tuple(counts.get(name, 0) for name in self._heads))
            for report, counts in zip(reports, told, strict=True)
        ]

    def refuse_to_wait_in_vain(self) -> None:
        """Make sure that no rank has left; called by all ranks before something of the host's that waits for them.

        Raises:
            TokenNormError: On all ranks that are still there: some have left.
        """
        self._refuse_to_go_on_without(self.exchange.who_left(), self._update)

    def _refuse_to_go_on_without(self, ranks: Sequence[int], update: int) -> None:
        if ranks:
            said = self.exchange.announced() or (
                "Leave on all ranks at the same point: decide from what all of them know, such as `num_tokens` or a"
                " value that they have reduced."
            )
            raise TokenNormError(
                f"At update {update}, rank {ranks[0]} has left the windows before their end, while others go on."
                f" {said}",
                together=True,
            )

    def _refuse_empty_window(self, plan: WindowPlan, update: int) -> None:
        if self._on_empty == "error":
            raise TokenNormError(
                f"At update {update}, the window of {plan.micro_batches} micro-batches has no supervised token on any"
                f' of {plan.world_size} ranks. Look at the labels, or use `on_empty="skip"`.',
                together=True,
            )
        if self.windows == self.empty_windows == FIRST_WINDOWS:
            raise TokenNormError(
                f"None of the first {FIRST_WINDOWS} windows has a single supervised token on any rank, so"
                " nothing would be trained on: every label is ignored, or the counter looks for them"
                " elsewhere. Look at one batch, and at `count_tokens`.",
                together=True,
            )

    def _lend(self, reports: Sequence[RankReport], batch: Any, update: int) -> Any:
        """A batch of the first rank that has one, where another rank has none; else ``None``."""
        if len(reports) == 1 or not any(report.borrows for report in reports):
            return None  # alone, nobody waits for a forward
        lenders = [rank for rank, report in enumerate(reports) if not report.borrows]
        if not lenders:
            raise TokenNormError(
                f"At update {update}, no rank has a batch to run its forward on: the loaders yield only None. Yield"
                " batches; one without supervised tokens contributes nothing.",
                together=True,
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

    @property
    def has_window(self) -> bool:
        """Whether there is a window in hand, or one that has been finished and not been recorded."""
        return self._plan is not None

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
        if listed := _listed(self.exchange.gather_objects(" ".join(self._mismatches) or None)):
            raise TokenNormError(
                f"At update {update}, the tokens counted ahead are not those that `training_step` used. {listed} Usual"
                " reasons: the loss shifts labels and the counter does not, or the other way round"
                " (`SupervisedTokens(shift=...)`); another ignore index; labels that a transfer hook or"
                " `training_step` changes after they were counted.",
                together=True,
            )

    def _refuse_together(self, failure: Exception | None, update: int) -> NoReturn:
        own, shown = None, None
        if failure is not None:
            own = f"{words_of(failure)}."
            # What a user's own code raised is shown where it did; the words of this package's are all there is to see.
            shown = None if _is_of_this_package(failure) else text_of(failure)
        self._refuse_to_go_on_without(self.exchange.who_left(), update)  # who has reported the window, and is gone
        reasons = self.exchange.gather_objects((own, shown))
        elsewhere = next((RaisedElsewhere(rank, text) for rank, (_, text) in enumerate(reasons) if text), None)
        listed = _listed([reason for reason, _ in reasons])
        text = f"At update {update}, the coming micro-batches cannot be used. {listed}"
        raise TokenNormError(text, together=True) from (failure if shown else elsewhere)


def _listed(reasons: Sequence[str | None]) -> str:
    """What ranks have to say, in one text; empty where nobody has."""
    if len(reasons) > 1 and reasons[0] is not None and len(set(reasons)) == 1:
        return f"All ranks: {reasons[0]}"
    return " ".join(f"Rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)


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


def _is_of_this_package(error: BaseException) -> bool:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return not frames or Path(frames[-1].f_code.co_filename).is_relative_to(Path(__file__).parent)


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
