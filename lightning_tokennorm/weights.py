"""`token_weight_report`: how unevenly plain DDP weighs the tokens of some data, from counts alone.

Plain DDP averages the ranks' averages of micro-batch means, so a token of a micro-batch with ``n`` tokens weighs
``1 / (K W n)`` in its update, where every token should weigh ``1 / N``. Lightning divides by the full ``K`` in a short
window as well. Nothing is trained here, and no process group is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_tokennorm.counting import Count, SupervisedTokens, TokenCounter, check_count, to_host
from lightning_tokennorm.errors import words_of
from lightning_tokennorm.pictures import new_figure
from lightning_tokennorm.window import total

_WINDOWS_SHOWN = 12


def token_weight_report(
    loader: Iterable[Any],
    *,
    accumulate: int,
    world_size: int = 1,
    count_tokens: TokenCounter | None = None,
    windows: int | None = None,
) -> TokenWeightReport:
    """How plain DDP would weigh each supervised token of a loader's batches, against the ``1 / N`` that is right.

    Args:
        loader: The micro-batches of all ranks, read on one process: batch ``i`` is of rank ``i % world_size``. Any
            iterable, read once; one without an end needs ``windows``. ``None`` stands for a micro-batch without tokens.
        accumulate: ``K``: micro-batches per update and rank (``Trainer(accumulate_grad_batches=...)``).
        world_size: ``W``: the number of ranks.
        count_tokens: Counts the supervised tokens of a batch. Default: `SupervisedTokens()`, which shifts labels by 1;
            give ``SupervisedTokens(shift=0)``, or ``SupervisedTokens().for_module(model)``, where the model does not.
        windows: How many windows to read, each of ``K * W`` batches; ``None`` for all.

    Returns:
        The report: its numbers are attributes, ``print`` shows them as a table and ``plot(path)`` draws them.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A number is below 1, a batch cannot be counted (the error names it), or there is no token at all.

    Example:
        >>> counts = [3, 2, 1, 10, 4, 4]  # two ranks, three micro-batches each: 3, 1, 4 and 2, 10, 4 tokens
        >>> report = token_weight_report(counts, accumulate=3, world_size=2, count_tokens=lambda batch: batch)
        >>> report.lightest, report.heaviest  # 24 / (3 * 2 * n) for n = 10 and n = 1
        (0.4, 4.0)
    """
    for name, value in (("accumulate", accumulate), ("world_size", world_size), ("windows", windows)):
        _check_whole(name, value, optional=name == "windows")
    if count_tokens is not None and not callable(count_tokens):
        raise TypeError(
            f"`token_weight_report(count_tokens=...)` got {count_tokens!r}; expected a callable that takes a batch and"
            " returns its number of supervised tokens."
        )
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TypeError(
            f"`token_weight_report` got {loader!r} as its loader; expected an iterable of batches, such as a"
            " DataLoader."
        )
    size = accumulate * world_size
    counts = _counted(
        islice(loader, None if windows is None else windows * size),
        SupervisedTokens() if count_tokens is None else count_tokens,
    )
    read: list[WindowWeights] = []
    while tokens := tuple(islice(counts, size)):
        read.append(WindowWeights(accumulate, world_size, tokens))
    if not any(window.num_tokens for window in read):
        found = f"{sum(window.micro_batches for window in read)} batches without a single supervised token"
        raise ValueError(
            f"`token_weight_report` found {found if read else 'no batch in its loader'}: there is nothing to weigh."
            " Look at one batch, and at `count_tokens`; an iterator that was read before is empty."
        )
    return TokenWeightReport(accumulate, world_size, tuple(read))


class _Weighed:
    """What can be said of tokens, each with its weight relative to ``1 / N``. NaN over no token."""

    @cached_property
    def _parts(self) -> Sequence[tuple[Count, float]]:
        """For each micro-batch with tokens how many they are, and the relative weight of each."""
        raise NotImplementedError

    @property
    def num_tokens(self) -> Count:
        """``N``: supervised tokens, or the sum of their weights where counts are floats."""
        return total(n for n, _ in self._parts)

    @property
    def lightest(self) -> float:
        """The least relative weight of a token: 1 is right."""
        return min((weight for _, weight in self._parts), default=float("nan"))

    @property
    def heaviest(self) -> float:
        """The greatest relative weight of a token: 1 is right."""
        return max((weight for _, weight in self._parts), default=float("nan"))

    @property
    def share_off_by_two(self) -> float:
        """The share of tokens that weigh more than twice what they should, or less than half."""
        return self._share(n for n, weight in self._parts if weight > 2 or weight < 0.5)

    @property
    def effective_fraction(self) -> float:
        """1 over the mean squared relative weight of a token.

        Where the weights add up to 1 (`WindowWeights.total_weight`), that is the effective sample size as a fraction
        of ``N``: the gradient is as noisy as one of so many tokens that weigh the same.
        """
        mean_square = self._share(n * weight**2 for n, weight in self._parts)
        return 1 / mean_square if mean_square else float("nan")

    @property
    def long_answer_shrinkage(self) -> float:
        """By how much the tokens of long answers weigh too little: 0.6 where they weigh 0.4 of what they should.

        Long is a micro-batch with more tokens than ``N / (K W)``, its window's average: those whose tokens weigh less
        than ``1 / N``. The mean is over their tokens; 0 where there is none.
        """
        light = [(n, weight) for n, weight in self._parts if weight < 1]
        return 1 - total(n * weight for n, weight in light) / total(n for n, _ in light) if light else 0.0

    def _share(self, parts: Iterable[Count]) -> float:
        return total(parts) / self.num_tokens if self.num_tokens else float("nan")


@dataclass(frozen=True)
class WindowWeights(_Weighed):
    """The tokens of one update under plain DDP."""

    accumulate: int
    """``K``, by which Lightning divides each loss, also where the window is shorter."""
    world_size: int
    """``W``: ranks over which DDP averages."""
    tokens: tuple[Count, ...]
    """``n``: supervised tokens by micro-batch, rank after rank; fewer than ``K * W`` in a short window."""

    @cached_property
    def _parts(self) -> Sequence[tuple[Count, float]]:
        num_tokens, divided_by = total(self.tokens), self.accumulate * self.world_size
        return [(n, num_tokens / (divided_by * n)) for n in self.tokens if n]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all ranks."""
        return len(self.tokens)

    @property
    def empty_micro_batches(self) -> int:
        """Micro-batches without a supervised token."""
        return sum(not n for n in self.tokens)

    @property
    def total_weight(self) -> float:
        """What the weights of all tokens add up to: below 1 where micro-batches are empty or missing."""
        return len(self._parts) / (self.accumulate * self.world_size)


@dataclass(frozen=True)
class TokenWeightReport(_Weighed):
    """What `token_weight_report` has found, over all tokens of all windows. ``print`` shows it as a table."""

    accumulate: int
    """``K``."""
    world_size: int
    """``W``."""
    windows: tuple[WindowWeights, ...]
    """The same numbers by window, in the order of the updates."""

    @cached_property
    def _parts(self) -> Sequence[tuple[Count, float]]:
        return [part for window in self.windows for part in window._parts]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all ranks and windows."""
        return sum(window.micro_batches for window in self.windows)

    @property
    def empty_micro_batches(self) -> int:
        """Micro-batches without a supervised token: under plain DDP they take up a share of the update."""
        return sum(window.empty_micro_batches for window in self.windows)

    def __str__(self) -> str:
        rows = [
            ("windows (updates)", f"{len(self.windows)}"),
            ("micro-batches", f"{self.micro_batches}, {self.empty_micro_batches} without a supervised token"),
            ("supervised tokens", str(self.num_tokens)),
            ("lightest token", f"{self.lightest:.3g}"),
            ("heaviest token", f"{self.heaviest:.3g}"),
            ("off by more than 2x", f"{self.share_off_by_two:.1%} of tokens"),
            ("effective sample size", f"{self.effective_fraction:.1%} of tokens"),
            ("long answers weigh", f"{self.long_answer_shrinkage:.1%} too little"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [
            "Weight of a supervised token under plain DDP, relative to 1/N"
            f" (K={self.accumulate}, W={self.world_size}; 1 is right)",
            *(f"  {name:<{width}}  {value}" for name, value in rows),
            "",
            f"  {'window':>6} {'micro-batches':>13} {'empty':>5} {'tokens':>8} {'lightest':>8} {'heaviest':>8}"
            f" {'off by 2x':>9} {'effective':>9} {'long answers':>12}",
        ]
        for index, window in enumerate(self.windows[:_WINDOWS_SHOWN]):
            line = f"  {index:>6} {window.micro_batches:>13} {window.empty_micro_batches:>5} {window.num_tokens:>8g}"
            if window.num_tokens:
                line += (
                    f" {window.lightest:>8.3g} {window.heaviest:>8.3g} {window.share_off_by_two:>9.1%}"
                    f" {window.effective_fraction:>9.1%} {-window.long_answer_shrinkage:>12.1%}"
                )
            lines.append(line)
        if more := len(self.windows[_WINDOWS_SHOWN:]):
            lines.append(f"  ... and {more} more windows (`report.windows`)")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draw how many tokens have which weight, and the range of weights by window.

        Args:
            path: The picture's file; its suffix says the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = new_figure("`TokenWeightReport.plot`", figsize=(8, 6))
        histogram, by_window = figure.subplots(2, 1)
        # bins of an eighth of a doubling, with edges at 1/2, 1 and 2
        first, last = math.floor(8 * math.log2(self.lightest)), math.floor(8 * math.log2(self.heaviest)) + 1
        histogram.hist(
            [weight for _, weight in self._parts],
            bins=[2 ** (edge / 8) for edge in range(min(first, -10), max(last, 10) + 1)],
            weights=[n / self.num_tokens for n, _ in self._parts],
            color="tab:blue",
        )
        histogram.set_xscale("log", base=2)
        histogram.xaxis.set_major_formatter("{x:g}")
        histogram.set_xlabel("weight of a token, relative to 1/N")
        histogram.set_ylabel("share of tokens")
        histogram.set_title(
            f"Token weights under plain DDP (K={self.accumulate}, W={self.world_size}):"
            f" {self.share_off_by_two:.0%} of tokens off by more than 2x"
        )
        shown = [(index, window) for index, window in enumerate(self.windows) if window.num_tokens]
        indices = [index for index, _ in shown]
        lightest, heaviest = [window.lightest for _, window in shown], [window.heaviest for _, window in shown]
        by_window.vlines(indices, lightest, heaviest, color="tab:blue", label="lightest to heaviest token")
        for ends in (lightest, heaviest):  # a window whose tokens weigh the same has no height
            by_window.plot(indices, ends, "_", color="tab:blue")
        by_window.set_yscale("log", base=2)
        by_window.yaxis.set_major_formatter("{x:g}")
        by_window.set_ylabel("weight of a token,\nrelative to 1/N")
        by_window.set_xlabel("window (update)")
        by_window.xaxis.get_major_locator().set_params(integer=True)
        for draw_line, named in ((histogram.axvline, False), (by_window.axhline, True)):
            draw_line(1, color="black", linewidth=1, label="right" if named else None)
            draw_line(0.5, color="black", linewidth=1, linestyle=":", label="off by 2x" if named else None)
            draw_line(2, color="black", linewidth=1, linestyle=":")
        by_window.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize="small", frameon=False)
        figure.savefig(path, dpi=120)


def _counted(batches: Iterable[Any], count_tokens: TokenCounter) -> Iterator[Count]:
    for index, batch in enumerate(batches):
        try:
            (count,) = to_host([0 if batch is None else check_count(count_tokens(batch))])
        except Exception as error:
            raise ValueError(
                f"`token_weight_report` could not count batch {index} of its loader: {words_of(error)}. Look at that"
                " batch, and at `count_tokens`."
            ) from error
        yield count


def _check_whole(name: str, value: Any, *, optional: bool) -> None:
    if value is None and optional:
        return
    expected = "a whole number from 1 upwards" + (", or None for all" if optional else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`token_weight_report({name}=...)` got {value!r}; expected {expected}.")
    if value < 1:
        raise ValueError(f"`token_weight_report({name}=...)` got {value}; expected {expected}.")
