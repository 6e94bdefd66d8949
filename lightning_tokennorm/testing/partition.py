"""`assert_partition_invariant`: the law, run on a user's own module and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import default_collate

from lightning_tokennorm.counting import Count, SupervisedTokens, TokenCounter, counter_for
from lightning_tokennorm.strategies import TokenNormDDP
from lightning_tokennorm.testing.causes import Probe, count_on_host, flat, likely_cause, possible_denominators
from lightning_tokennorm.testing.ranks import run_ranks
from lightning_tokennorm.testing.splits import MicroBatch, Split, deal, make_batches
from lightning_tokennorm.testing.watch import (
    Named,
    Seen,
    batch_dependent_layers,
    fit,
    load_parameters,
    parameters_of,
    prepare,
)

_TOLERANCES = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-6)}
"""Relative and absolute tolerance by the type of the parameters; both far below what any known mistake leaves."""
_LOW_PRECISION = (5e-2, 1e-3)


@dataclass(frozen=True)
class SplitResult:
    """How far one split is from one process on the merged windows."""

    split: str
    """Ranks, micro-batches and what is special about them."""
    num_tokens: tuple[Count, ...]
    """``N`` of each update."""
    max_abs_error: float
    """Greatest absolute error of a gradient or a parameter, over all updates."""
    rel_l2_error: float
    """Greatest relative L2 error of the gradient of one parameter, over all updates."""
    ok: bool
    """Whether both are within the tolerances, and the parameters of all ranks are bitwise equal."""


@dataclass(frozen=True)
class PartitionReport:
    """What `assert_partition_invariant` found; printed, it is a small table."""

    results: tuple[SplitResult, ...]
    """One entry per split."""
    rtol: float
    """Relative tolerance."""
    atol: float
    """Absolute tolerance."""
    notes: tuple[str, ...]
    """What was changed about the module for the run, and what could not be tried."""

    def __str__(self) -> str:
        rows = [("split", "N per update", "max abs", "rel L2", "")]
        for result in self.results:
            tokens = " ".join(f"{count:g}" for count in result.num_tokens)
            errors = f"{result.max_abs_error:.1e}", f"{result.rel_l2_error:.1e}"
            rows.append((result.split, tokens, *errors, "ok" if result.ok else "WRONG"))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "-" * max(map(len, lines)))
        lines.append(f"tolerances: relative {self.rtol:g}, absolute {self.atol:g}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


@dataclass(frozen=True)
class _Case:
    """What all processes have to know."""

    make_module: Callable[[], pl.LightningModule]
    samples: Sequence[Any]
    collate_fn: Callable[[list[Any]], Any]
    make_strategy: Callable[[], Strategy]
    counter: TokenCounter
    loss_reduction: str

    def batches(self, micro_batches: Sequence[MicroBatch]) -> list[Any]:
        return make_batches(micro_batches, self.samples, self.collate_fn, self._clear_labels)

    def _clear_labels(self, batch: Any) -> None:
        assert isinstance(self.counter, SupervisedTokens)
        self.counter.find_labels(batch).fill_(self.counter.ignore_index)

    def merged_batches(self, split: Split) -> list[Any]:
        return self.batches([MicroBatch(tuple(split.merged(window))) for window in range(len(split.windows))])


def assert_partition_invariant(
    make_module: Callable[[], pl.LightningModule],
    samples: Sequence[Any],
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    world_sizes: Sequence[int] = (1, 2),
    accumulate: Sequence[int] = (1, 2, 3),
    micro_batch_size: int = 2,
    strategy: Strategy | Callable[[], Strategy] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    allow_batch_dependent: bool = False,
) -> PartitionReport:
    """Check that a module's updates do not depend on how their tokens are split over ranks and micro-batches.

    For each number of ranks and micro-batches the samples are dealt to ragged micro-batches, with a short last window
    and a rank without tokens, and a real Trainer fits the module on them, in CPU processes over gloo. Every update's
    gradient and the parameters after it are compared with one process that gets the merged window in one batch,
    without this package.

    The module's optimizer is replaced by plain SGD (an adaptive one hides wrong scales) and dropout is switched off.

    Args:
        make_module: Builds the module, with the same weights each time when torch's seed is the same.
        samples: The samples of a data set, a dozen is enough. All are used in each split.
        collate_fn: Makes a batch of a list of samples. Default: `torch.utils.data.default_collate`.
        world_sizes: Numbers of ranks to try.
        accumulate: Numbers of micro-batches per window to try.
        micro_batch_size: Most samples in a micro-batch; there are smaller ones, too.
        strategy: The strategy or a function that makes it. Default: `TokenNormDDP()`. Another than `TokenNormDDP` shows
            what that one does.
        rtol: Relative tolerance of a parameter's gradient, in the L2 norm. Default: 1e-9 for float64 parameters, 1e-4
            for float32, 5e-2 below.
        atol: Absolute tolerance, added to it. Default: 1e-12, 1e-6, 1e-3.
        allow_batch_dependent: Whether to go on with layers that mix the samples of a batch (BatchNorm).

    Returns:
        The report; ``print`` it for a table.

    Raises:
        AssertionError: A split differs. The text has the table, names the split, the update and the worst parameter,
            and the likely cause.
        ValueError: The check cannot be made: no samples, layers that mix samples, weights that differ from one
            ``make_module()`` to the next, a loss that differs from one run to the next.
        RuntimeError: The module or its data raised in one of the processes; the text has the traceback.

    Example:
        >>> import torch, lightning.pytorch as pl
        >>> from lightning_tokennorm.testing import assert_partition_invariant
        >>> class Tiny(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.logits = torch.nn.Embedding(5, 5, dtype=torch.float64)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         logits = self.logits(batch["input_ids"])[:, :-1]
        ...         return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        >>> ids = torch.arange(24).view(6, 4) % 5
        >>> samples = [
        ...     {"input_ids": row, "labels": row.where(torch.arange(4) > i % 3, -100)} for i, row in enumerate(ids)
        ... ]
        >>> report = assert_partition_invariant(Tiny, samples, world_sizes=(2,), accumulate=(2,))
        >>> report.results[0].ok
        True
    """
    if not samples:
        raise ValueError("`assert_partition_invariant(samples=...)` got no sample; expected about a dozen.")
    make_strategy = _strategy_maker(strategy)
    probed_strategy = make_strategy()
    module, layers_with_dropout = prepare(make_module)
    case = _Case(
        make_module,
        samples,
        collate_fn or default_collate,
        make_strategy,
        counter_for(getattr(probed_strategy, "count_tokens", None) or SupervisedTokens(), module),
        getattr(probed_strategy, "loss_reduction", "mean"),
    )
    notes = _check_preconditions(case, module, layers_with_dropout, allow_batch_dependent)
    can_blank = isinstance(case.counter, SupervisedTokens)
    if not can_blank:
        notes.append("no rank without tokens was tried: nothing says where a `count_tokens` of your own finds labels")
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    tolerances = [_TOLERANCES.get(dtype, _LOW_PRECISION) for dtype in dtypes]
    rtol = max(relative for relative, _ in tolerances) if rtol is None else rtol
    atol = max(absolute for _, absolute in tolerances) if atol is None else atol

    splits = [deal(len(samples), w, k, micro_batch_size, blank=can_blank) for w in world_sizes for k in accumulate]
    references: list[tuple[Seen, list[Count]]] = run_ranks(_fit_merged, 1, case, splits, timeout_s=600)[0]
    results, failures = [], []
    for split, (reference, num_tokens) in zip(splits, references, strict=True):
        ranks: list[Seen] = run_ranks(_fit_split, split.world_size, case, split, timeout_s=300)
        comparison = _compare(ranks, reference, rtol, atol)
        results.append(
            SplitResult(str(split), tuple(num_tokens), comparison.max_abs, comparison.rel_l2, comparison.wrong is None)
        )
        if comparison.wrong is not None:
            failures.append((split, comparison.wrong, ranks[0], reference))
    report = PartitionReport(tuple(results), rtol, atol, tuple(notes))
    if failures:
        raise AssertionError(_failure_text(case, report, *failures[-1]))
    return report


def _strategy_maker(strategy: Strategy | Callable[[], Strategy] | None) -> Callable[[], Strategy]:
    if strategy is None:
        return TokenNormDDP
    # each process has its own copy of an object, and uses it for one fit
    return (lambda: strategy) if isinstance(strategy, Strategy) else strategy


def _check_preconditions(
    case: _Case, module: pl.LightningModule, layers_with_dropout: int, allow_batch_dependent: bool
) -> list[str]:
    """Look at what the check relies on; returns notes for the report."""
    notes = ["plain SGD takes the place of the module's optimizer"]
    if layers_with_dropout:
        notes.append(f"dropout is switched off in {layers_with_dropout} layers for the run")
    if mixing := batch_dependent_layers(module):
        listed = ", ".join(mixing)
        if not allow_batch_dependent:
            raise ValueError(
                f"These layers mix the samples of a batch, so no split leaves them alike: {listed}. Put them into eval"
                " mode in `make_module`, replace them, or pass `allow_batch_dependent=True` and wide tolerances."
            )
        notes.append(f"layers that mix the samples of a batch are allowed: {listed}")
    again, _ = prepare(case.make_module)
    differ = [
        name
        for (name, a), b in zip(module.state_dict().items(), again.state_dict().values(), strict=True)
        if isinstance(a, Tensor) and not torch.equal(a, b)
    ]
    if differ:
        raise ValueError(
            f"`make_module()` does not give the same weights each time: {', '.join(differ[:5])} differ, although"
            " torch's seed was the same. Load them, or draw them from torch's generator."
        )
    everything = MicroBatch(tuple(range(len(case.samples))))
    losses = run_ranks(_fit_twice, 1, case, everything, timeout_s=300)[0]
    if losses[0] != losses[1] and losses[0] == losses[0]:
        raise ValueError(
            f"`training_step` is not deterministic: the same batch and weights gave the losses {losses[0]!r} and"
            f" {losses[1]!r}. Switch the randomness off in `make_module`."
        )
    return notes


# ---- in the processes


def _fit_twice(rank: int, world_size: int, case: _Case, everything: MicroBatch) -> list[float]:
    module, _ = prepare(case.make_module)
    batches = case.batches([everything, everything])
    return fit(module, batches, strategy="auto", learning_rate=0.0).losses


def _fit_merged(rank: int, world_size: int, case: _Case, splits: Sequence[Split]) -> list[tuple[Seen, list[Count]]]:
    """The reference: one process, one batch per window, none of this package's scaling."""
    references = []
    for split in splits:
        module, _ = prepare(case.make_module)
        batches = case.merged_batches(split)
        num_tokens = [count_on_host(case.counter, batch) for batch in batches]  # before a step can change them
        divide_by = num_tokens if case.loss_reduction == "sum" else None
        seen = fit(module, batches, strategy="auto", divide_by=divide_by)
        references.append((seen, num_tokens))
    return references


def _fit_split(rank: int, world_size: int, case: _Case, split: Split) -> Seen:
    module, _ = prepare(case.make_module)
    return fit(
        module,
        case.batches(split.ranks[rank]),
        strategy=case.make_strategy(),
        world_size=world_size,
        accumulate=split.accumulate,
    )


def _probe(rank: int, world_size: int, case: _Case, split: Split, window: int, parameters: Named) -> list[Probe]:
    """Each micro-batch of a window that has tokens, and last the merged window, run alone from given parameters."""
    parts = [m for by_rank in split.windows[window] for m in by_rank if m.supervised]
    parts.append(MicroBatch(tuple(split.merged(window))))
    before, batches = case.batches(parts), case.batches(parts)
    module, _ = prepare(case.make_module)
    load_parameters(module, parameters)
    seen = fit(module, batches, strategy="auto", learning_rate=0.0)
    return [
        Probe(
            flat(gradient),
            count_on_host(case.counter, untouched),
            count_on_host(case.counter, used),
            possible_denominators(untouched, case.counter, returned),
        )
        for gradient, untouched, used, returned in zip(seen.gradients, before, batches, seen.num_tokens, strict=True)
    ]


# ---- comparison


@dataclass(frozen=True)
class _Comparison:
    max_abs: float
    rel_l2: float
    wrong: tuple[int, str] | None
    """The first update that is off, and what is worst about it."""


def _compare(ranks: Sequence[Seen], reference: Seen, rtol: float, atol: float) -> _Comparison:
    max_abs = rel_l2 = 0.0
    wrong: tuple[int, str] | None = None
    if len(ranks[0].gradients) != len(reference.gradients):
        text = f"{len(ranks[0].gradients)} updates instead of {len(reference.gradients)}"
        return _Comparison(float("inf"), float("inf"), (0, text))
    for update, expected in enumerate(reference.gradients):
        worst, worst_text = 0.0, ""
        for name, gradient in expected.items():
            error = (ranks[0].gradients[update][name] - gradient).double()
            norm, size = error.norm().item(), gradient.double().norm().item()
            after = (ranks[0].parameters[update][name] - reference.parameters[update][name]).abs().max().item()
            max_abs = _worse(max_abs, error.abs().max().item(), after)
            # how many times the tolerance: NaN is worse than anything
            excess = _worse(0.0, norm / (rtol * size + atol * gradient.numel() ** 0.5), after / (rtol * size + atol))
            if size > atol:
                rel_l2 = _worse(rel_l2, norm / size)
            if excess > worst or excess != excess:
                worst = excess
                worst_text = f"worst in {name!r}: relative L2 error {norm / size if size else norm:.2e}"
        if len({seen.digests[update] for seen in ranks}) > 1:
            worst, worst_text = float("inf"), "the parameters differ between ranks"
        if wrong is None and not worst <= 1:
            wrong = (update, worst_text)
    return _Comparison(max_abs, rel_l2, wrong)


def _worse(*values: float) -> float:
    return float("nan") if any(value != value for value in values) else max(values)


def _failure_text(
    case: _Case, report: PartitionReport, split: Split, wrong: tuple[int, str], observed: Seen, reference: Seen
) -> str:
    update, worst = wrong
    if update >= len(observed.gradients):
        cause = "updates are missing"
    else:
        before = reference.parameters[update - 1] if update else parameters_of(prepare(case.make_module)[0])
        *parts, merged = run_ranks(_probe, 1, case, split, update, before, timeout_s=300)[0]
        cause = likely_cause(
            flat(observed.gradients[update]),
            flat(reference.gradients[update]),
            parts,
            merged,
            world_size=split.world_size,
            accumulate=split.accumulate,
            loss_reduction=case.loss_reduction,
            counter=case.counter,
        )
    return (
        f"The gradient depends on how the tokens are split.\n\n{report}\n\n"
        f"{split}, update {update}: {worst}.\nLikely cause: {cause}"
    )
