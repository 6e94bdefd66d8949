"""Mutations of the protocol. Each is one change of one function, made in place for as long as a test needs it.

Two more changes were tried that nothing can notice: to lend the coming batch only and not the one that is kept (a rank
that keeps one has lent it before any other rank can ask again), and to take a stand-in's place from what waits
(nothing waits on a rank whose data has ended).
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_tokennorm import window
from lightning_tokennorm.accounting import WindowAccounting
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.lookahead import LookaheadFetcher
from lightning_tokennorm.loops import _Loop
from lightning_tokennorm.strategies import checkpoints
from lightning_tokennorm.strategies.feed import WindowFeed


@dataclass(frozen=True)
class Mutant:
    """A change of a function's source text."""

    name: str
    function: Callable[..., Any]
    before: str
    after: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the changed code in place of the function's own."""
        source = textwrap.dedent(inspect.getsource(self.function))
        if source.count(self.before) != 1:
            raise LookupError(
                f"{self.function.__qualname__} has changed: it has {self.before!r} not once; adapt the mutant"
            )
        flags = __future__.annotations.compiler_flag
        code = compile(source.replace(self.before, self.after), "<mutant>", "exec", flags)
        place: dict[str, Any] = {}
        exec(code, self.function.__globals__, place)
        (mutated,) = place.values()
        own = self.function.__code__
        self.function.__code__ = getattr(mutated, "__func__", getattr(mutated, "fget", mutated)).__code__
        try:
            yield
        finally:
            self.function.__code__ = own


Fetcher, Accounting, Exchange, Plan = LookaheadFetcher, WindowAccounting, WindowExchange, window.WindowPlan

MUTANTS = [
    # when rows are sent
    Mutant(
        "the end of an epoch is not reported",
        Fetcher._look_beyond,
        "        self._owner.report_window([], accumulate, None, False)\n",
        "",
    ),
    Mutant(
        "a window is not reported anew where K has changed",
        Fetcher._open_window,
        "self._reported_for != accumulate",
        "self._reported_for is None",
    ),
    Mutant(
        "a window is always reported anew",
        Fetcher._open_window,
        "self._reported_for != accumulate",
        "True",
    ),
    Mutant(
        "a row is sent over one that is on its way",
        Exchange.send,
        "    self._wait()",
        "    pass",
    ),
    # what they say
    Mutant(
        "a failure is raised a window early",
        Fetcher._report,
        "self._failure if len(batches) < size else None",
        "self._failure",
    ),
    Mutant(
        "nobody ever borrows",
        Fetcher._report,
        "borrows = self._stand_in is None and",
        "borrows = False and",
    ),
    Mutant(
        "a window that starts elsewhere is not shorter",
        Fetcher._size,
        "accumulate - int(self.fetched) % accumulate",
        "accumulate",
    ),
    Mutant(
        "a window has one micro-batch more",
        Fetcher._size,
        "accumulate - int(self.fetched) % accumulate",
        "accumulate - int(self.fetched) % accumulate + 1",
    ),
    # what ranks make of them
    Mutant(
        "the table of the first window is used for all",
        Exchange.receive,
        "if self._on_its_way is not None:",
        "if self._on_its_way is not None and not self._reports:",
    ),
    Mutant(
        "a rank goes on whatever the others say",
        Accounting.goes_on,
        "any(report.micro_batches or report.refuses for report in self.exchange.receive())",
        "True",
    ),
    Mutant(
        "a rank ends with its own data",
        Fetcher._look_beyond,
        "not self._ahead and not self._owner.goes_on()",
        "not self._ahead",
    ),
    Mutant(
        "an error at the end of all data is not heard of",
        Accounting.goes_on,
        "report.micro_batches or report.refuses",
        "report.micro_batches",
    ),
    Mutant(
        "a rank refuses alone",
        Accounting.agree,
        "any(report.refuses for report in reports)",
        "self._reported_failure is not None",
    ),
    Mutant(
        "K may differ",
        window.differing_accumulation,
        "len({report.accumulate for report in reports}) == 1",
        "True",
    ),
    Mutant(
        "ranks may always be uneven",
        window.uneven_windows,
        "if len(",
        "if True or len(",
    ),
    Mutant(
        "N is the own count times W",
        Plan.agreed.__func__,  # type: ignore[attr-defined]
        "num_tokens=total(per_rank)",
        "num_tokens=total(tokens) * len(reports)",
    ),
    Mutant(
        "a window is as long as the shortest rank's",
        Plan.agreed.__func__,  # type: ignore[attr-defined]
        "max(report.micro_batches for report in reports)",
        "min(report.micro_batches for report in reports)",
    ),
    # copies
    Mutant(
        "copies are not compared",
        window.differing_copies,
        "for ranks in copies:",
        "for ranks in ():",
    ),
    Mutant(
        "only the counts of copies are compared",
        window.differing_copies,
        "each.borrows, each.fingerprint) for",
        "each.borrows) for",
    ),
    Mutant(
        "batches of copies are not looked at",
        Accounting.report_window,
        "batches if self._has_copies else ()",
        "()",
    ),
    Mutant(
        "each copy is counted",
        Accounting.agree,
        "[reports[ranks[0]] for ranks in self._copies]",
        "reports",
    ),
    # loops by hand
    Mutant(
        "a rank leaves without a word",
        Exchange.leave,
        "self.send(RankReport(0, 0, 0, leaves=True))",
        "pass",
    ),
    Mutant(
        "whoever has left is not asked for",
        Accounting.refuse_to_wait_in_vain,
        "self.exchange.who_left()",
        "[]",
    ),
    Mutant(
        "only what has been reported is looked at",
        Exchange.who_left,
        "if not any(report.leaves for report in reports):",
        "if False:",
    ),
    Mutant(
        "the answers are taken for the next window",
        Exchange.who_left,
        "self._reports, reports = reports, answers",
        "reports = answers",
    ),
    Mutant(
        "a window starts without who has left",
        Accounting.agree,
        "[rank for rank, report in enumerate(reports) if report.leaves]",
        "[]",
    ),
    Mutant(
        "a rank that has left is asked for its reasons",
        Accounting._refuse_together,
        "    self._refuse_to_go_on_without(self.exchange.who_left(), update)",
        "    pass",
    ),
    Mutant(
        "a pass ends without a look at who has left",
        _Loop.next_window,
        "self.accounting.refuse_to_wait_in_vain()",
        "pass",
    ),
    Mutant(
        "who leaves with all others tells them",
        _Loop.leave,
        "if isinstance(error, TokenNormError) and error.together:",
        "if False:",
    ),
    Mutant(
        "an error that ends a loop is not told",
        _Loop.leave,
        "failures.tell(error, self.accounting.exchange, self._where())",
        "pass",
    ),
    Mutant(
        "a window may be left early",
        _Loop.next_batch,
        "if not self._has_run_backward:",
        "if False:",
    ),
    # signals
    Mutant(
        "a SIGTERM ends one rank",
        Accounting.agree,
        "any(report.sigterm for report in reports)",
        "reports[self.exchange.rank].sigterm",
    ),
    Mutant(
        "one rank saves before a requeue",
        Accounting.agree,
        "any(report.requeue for report in reports)",
        "reports[self.exchange.rank].requeue",
    ),
    Mutant(
        "a requeue is acted upon again and again",
        WindowFeed._save_and_requeue,
        "        self.signals.take_requeue()\n",
        "",
    ),
    Mutant(
        "a SIGTERM in the last window ends one rank",
        WindowFeed.end_training,
        "any(sigterm for _, sigterm in told)",
        "self.signals.sigterm",
    ),
    Mutant(
        "a requeue in the last window is one rank's",
        WindowFeed.end_training,
        "any(requeue for requeue, _ in told)",
        "self.signals.requeue",
    ),
    # stand-ins
    Mutant(
        "a stand-in passes for an own batch",
        Fetcher.__next__,
        "start_micro_batch(self._served, stands_in)",
        "start_micro_batch(self._served, False)",
    ),
    Mutant(
        "a stand-in takes the place of an own batch",
        Fetcher.__next__,
        "self._served < self._own",
        "self._served + 1 < self._own",
    ),
    Mutant(
        "a batch that was lent is not used",
        WindowFeed.start_window,
        "windows.lent_batch",
        "None",
    ),
    Mutant(
        "a batch that only None follows is not kept",
        Fetcher._look_beyond,
        "all(read.item[0] is None for read in self._ahead)",
        "not self._ahead",
    ),
    # limits
    Mutant(
        "no limit on steps at a window's end",
        Fetcher._look_beyond,
        "ends or self._owner.windows_left <= 1",
        "ends",
    ),
    Mutant(
        "no limit on steps in reading ahead",
        Fetcher.__next__,
        "(self._owner.windows_left - 1) * accumulate",
        "99",
    ),
    Mutant(
        "a step too many is read for",
        Fetcher.__next__,
        "(self._owner.windows_left - 1) * accumulate",
        "self._owner.windows_left * accumulate",
    ),
    Mutant(
        "a loader is asked beyond its length",
        Fetcher._read_ahead,
        "depth = min(depth, self.length - self.fetched)",
        "pass",
    ),
    Mutant(
        "a short window at the last step is not the end",
        Fetcher._look_beyond,
        "ends or self.fetched % accumulate != 0",
        "ends",
    ),
    # saves that one rank makes alone
    Mutant(
        "a rank that saves alone is taken for one without data",
        Accounting.agree,
        "if report.meets]",
        "if False]",
    ),
    Mutant(
        "ranks that save need not meet",
        checkpoints.take_progress,
        "if exchange.meet() else []",
        "",
    ),
    Mutant(
        "the meeting is taken for the next window",
        Exchange.meet,
        "    self._reports = reports\n",
        "",
    ),
    Mutant(
        "every meeting is taken for one",
        Exchange.meet,
        "return met",
        "return True",
    ),
    # resumes
    Mutant(
        "a state is taken after the read",
        Fetcher._read_ahead,
        "            origin = self._next_origin(accumulate)\n            item = _compat.profiled_read(self)\n",
        "            item = _compat.profiled_read(self)\n            origin = self._next_origin(accumulate)\n",
    ),
    Mutant(
        "a state is not copied",
        Fetcher._here,
        "_copy(loader.state_dict())",
        "loader.state_dict()",
    ),
    Mutant(
        "batches after a state are not left out",
        Fetcher._next_origin,
        "self._origin.skip + 1",
        "self._origin.skip",
    ),
    Mutant(
        "a state is asked for at each batch",
        Fetcher._next_origin,
        "starts_window or",
        "True or",
    ),
    Mutant(
        "a window in hand is not done again",
        Fetcher.resume_from,
        "if self.unfinished:",
        "if False:",
    ),
    Mutant(
        "a batch that waits is lost",
        Fetcher.resume_from,
        "if self._ahead:",
        "if False:",
    ),
    Mutant(
        "a window whose last batch failed is over",
        Fetcher.unfinished.fget,  # type: ignore[attr-defined]
        "and self._owner.has_trained_on(int(self.fetched))",
        "",
    ),
    Mutant(
        "a checkpoint leads to the batch in hand",
        checkpoints.take_progress,
        "int(fetcher.fetched) - fetcher.unfinished",
        "int(fetcher.fetched)",
    ),
    Mutant(
        "a rank without data in the window in hand has not ended",
        Fetcher.ended.fget,  # type: ignore[attr-defined]
        "return self._own == 0",
        "return False",
    ),
    Mutant(
        "a rank that has read all of its data has ended",
        Fetcher.ended.fget,  # type: ignore[attr-defined]
        "used_up and not self._ahead and",
        "used_up and",
    ),
    Mutant(
        "a rank that had ended starts again",
        Fetcher._take_start,
        "self._exhausted |= ended",
        "pass",
    ),
    Mutant(
        "batches before the place to go on from are not left out",
        Fetcher._take_start,
        "self._skip += skip",
        "pass",
    ),
    Mutant(
        "the last window of a stream is over before its end",
        Fetcher.stream_has_ended.fget,  # type: ignore[attr-defined]
        "and not self.unfinished",
        "",
    ),
    Mutant(
        "the end of a stream is known by the own loader",
        Fetcher.stream_has_ended.fget,  # type: ignore[attr-defined]
        "math.isinf(self._owner.length)",
        "self.length is None",
    ),
]
