"""How ranks agree on their next window: each says what it has for it, and all make the same plan or refuse together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal, NoReturn

from lightning_tokennorm.counting import Count, TokenCounter, to_host
from lightning_tokennorm.errors import RaisedElsewhere, TokenNormError, text_of, words_of
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.fingerprint import fingerprint
from lightning_tokennorm.heads import ONE_LOSS, by_head, unknown_names
from lightning_tokennorm.window import (
    RankReport,
    WindowPlan,
    differing_accumulation,
    differing_copies,
    total,
    uneven_windows,
)

FIRST_WINDOWS = 50
"""After this many windows without a single token the training is refused: the labels cannot be right."""


class WindowAgreement:
    """One rank's part in it.

    Args:
        exchange: Between all ranks that go through their windows together.
        count_tokens: Counts the supervised tokens of a batch.
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
        self._on_empty = on_empty
        self._pad = uneven == "pad"
        self.world_size = len(self._copies)
        """``W``: the number of ranks whose batches are counted."""
        self._ranks_divided_by = self.world_size if ranks_divided_by is None else ranks_divided_by
        # This rank's part of the window that was reported last.
        self._reported_tokens: tuple[Count, ...] = ()
        self._reported_heads: Mapping[str, tuple[Count, ...]] = {}
        self._reported_failure: Exception | None = None
        self._update = 0
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

    def agree(self, *, update: int, batch: Any = None) -> WindowPlan | None:
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
        self._update = update
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
        self.padded_micro_batches += plan.padded_micro_batches
        self.lent_batch = self._lend(reports, batch, update)
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

    def _refuse_together(self, failure: Exception | None, update: int) -> NoReturn:
        own, shown = None, None
        if failure is not None:
            own = f"{words_of(failure)}."
            # What a user's own code raised is shown where it did; the words of this package's are all there is to see.
            shown = None if _is_of_this_package(failure) else text_of(failure)
        self._refuse_to_go_on_without(self.exchange.who_left(), update)  # who has reported the window, and is gone
        reasons = self.exchange.gather_objects((own, shown))
        elsewhere = next((RaisedElsewhere(rank, text) for rank, (_, text) in enumerate(reasons) if text), None)
        listed = in_one_text([reason for reason, _ in reasons])
        text = f"At update {update}, the coming micro-batches cannot be used. {listed}"
        raise TokenNormError(text, together=True) from (failure if shown else elsewhere)


def in_one_text(reasons: Sequence[str | None]) -> str:
    """What ranks have to say, in one text; empty where nobody has."""
    if len(reasons) > 1 and reasons[0] is not None and len(set(reasons)) == 1:
        return f"All ranks: {reasons[0]}"
    return " ".join(f"Rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)


def _is_of_this_package(error: BaseException) -> bool:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return not frames or Path(frames[-1].f_code.co_filename).is_relative_to(Path(__file__).parent)
