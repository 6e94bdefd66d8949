"""`assert_partition_invariant`: the law, run on a user's own module and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import default_collate

from lightning_tokennorm.counting import Count, SupervisedTokens, TokenCounter, counter_for
from lightning_tokennorm.strategies import TokenNormDDP
from lightning_tokennorm.testing.causes import Probe, count_on_host, flat, likely_cause, possible_denominators
from lightning_tokennorm.testing.compare import compare, tolerances
from lightning_tokennorm.testing.failures import cause_of_failure, describe_missing_tokens
from lightning_tokennorm.testing.module import Named, build, listed
from lightning_tokennorm.testing.ranks import RankError, run_ranks
from lightning_tokennorm.testing.report import PartitionReport, SplitResult
from lightning_tokennorm.testing.splits import MicroBatch, Split, deal, make_batches
from lightning_tokennorm.testing.watch import Facts, Seen, fit


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

    All hooks of the module run, `configure_optimizers` and its schedules included. But its optimizer steps as plain
    SGD with a fixed learning rate, since an adaptive one hides wrong scales, and dropout is switched off. What the
    optimizer holds is compared; where `configure_optimizers` chooses none, all trainable parameters.

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
        ValueError: The check cannot be made: no samples, none with a supervised token, layers that mix samples, weights
            that differ from one ``make_module()`` to the next, a loss that differs from one run to the next.
        RuntimeError: A fit failed, or the data raised; the text says where, the cause if it is a known one, and has the
            traceback.

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
    case = _Case(
        make_module,
        samples,
        collate_fn or default_collate,
        make_strategy,
        getattr(probed_strategy, "count_tokens", None) or SupervisedTokens(),
        getattr(probed_strategy, "loss_reduction", "mean"),
    )
    case, facts, notes = _check_preconditions(case, allow_batch_dependent)
    can_blank = isinstance(case.counter, SupervisedTokens)
    if not can_blank:
        notes.append("no rank without tokens was tried: nothing says where a `count_tokens` of your own finds labels")
    default_rtol, default_atol = tolerances(facts.dtypes)
    rtol = default_rtol if rtol is None else rtol
    atol = default_atol if atol is None else atol

    splits = [deal(len(samples), w, k, micro_batch_size, blank=can_blank) for w in world_sizes for k in accumulate]
    references: list[tuple[Seen, list[Count]]] = _run(_fit_merged, 1, case, splits, facts=facts, timeout_s=600)[0]
    results, failures = [], []
    for split, (reference, num_tokens) in zip(splits, references, strict=True):
        ranks: list[Seen] = _run(_fit_split, split.world_size, case, split, facts=facts)
        comparison = compare(ranks, reference, rtol, atol)
        results.append(
            SplitResult(str(split), tuple(num_tokens), comparison.max_abs, comparison.rel_l2, comparison.wrong is None)
        )
        if comparison.wrong is not None:
            failures.append((split, comparison.wrong, ranks[0], reference))
    report = PartitionReport(tuple(results), rtol, atol, tuple(notes))
    if failures:
        raise AssertionError(_failure_text(case, facts, report, *failures[-1]))
    return report


def _strategy_maker(strategy: Strategy | Callable[[], Strategy] | None) -> Callable[[], Strategy]:
    if strategy is None:
        return TokenNormDDP
    # each process has its own copy of an object, and uses it for one fit
    return (lambda: strategy) if isinstance(strategy, Strategy) else strategy


def _run(
    body: Callable[..., Any], world_size: int, case: _Case, *args: Any, facts: Facts | None, timeout_s: float = 300
) -> list[Any]:
    """Run ranks; where they fail, say first what that means."""
    try:
        return run_ranks(body, world_size, case, *args, timeout_s=timeout_s)
    except RankError as error:
        where = next((f"with {arg}" for arg in args if isinstance(arg, Split)), "in one process, without any strategy")
        cause = cause_of_failure(str(error), facts)
        likely = f"Likely cause: {cause}\n" if cause else ""
        raise RankError(f"The fit failed {where}, so nothing could be compared.\n{likely}\n{error}") from None


def _check_preconditions(case: _Case, allow_batch_dependent: bool) -> tuple[_Case, Facts, list[str]]:
    """Look at what the check relies on; returns the case with the module's counter, facts, and notes."""
    if isinstance(case.counter, SupervisedTokens) and case.counter.shift == "auto":
        case = replace(case, counter=_run(_take_counter, 1, case, facts=None)[0])
    without_tokens, shift_shows = _run(_look_at_labels, 1, case, facts=None)[0]
    if without_tokens:
        raise ValueError(without_tokens)
    if differ := _run(_build_twice, 1, case, facts=None)[0]:
        raise ValueError(
            f"`make_module()` does not give the same weights each time: {listed(differ)} differ, although"
            " torch's seed was the same. Load them, or draw them from torch's generator."
        )
    facts, losses = _run(_fit_twice, 1, case, facts=None)[0]
    notes = ["plain SGD takes the place of the module's optimizer"]
    if facts.layers_with_dropout:
        layers = "1 layer" if facts.layers_with_dropout == 1 else f"{facts.layers_with_dropout} layers"
        notes.append(f"dropout is switched off in {layers} for the run")
    if not shift_shows:
        notes.append("no sample has a live first label, so a `shift` that does not fit the model would not show")
    if facts.not_optimised:
        notes.append(f"not compared, since no optimizer holds them: {listed(facts.not_optimised)}")
    if facts.batch_dependent:
        mixing = ", ".join(facts.batch_dependent)
        if not allow_batch_dependent:
            raise ValueError(
                f"These layers mix the samples of a batch, so no split leaves them alike: {mixing}. Put them into eval"
                " mode in `make_module`, replace them, or pass `allow_batch_dependent=True` and wide tolerances."
            )
        notes.append(f"layers that mix the samples of a batch are allowed: {mixing}")
    if losses[0] != losses[1] and losses[0] == losses[0]:
        raise ValueError(
            f"The loss is not deterministic: the same samples and weights gave {losses[0]!r} and {losses[1]!r}. Switch"
            " the randomness of the module off in `make_module`, and that of `collate_fn`."
        )
    return case, facts, notes


# ---- in the processes


def _take_counter(rank: int, world_size: int, case: _Case) -> TokenCounter:
    """The counter that fits the module, which `configure_model` may have built only in a fit."""
    module = build(case.make_module)
    with suppress(Exception):  # is told where the fits are run that the check is about
        fit(module, case.batches([MicroBatch((0,))]), strategy="auto")
    return counter_for(case.counter, module)


def _look_at_labels(rank: int, world_size: int, case: _Case) -> tuple[str | None, bool]:
    """Why there is nothing to train on, and whether the samples can tell a model that shifts labels from others."""
    batches = case.batches([MicroBatch((index,)) for index in range(len(case.samples))])
    if not any(count_on_host(case.counter, batch) for batch in batches):
        return describe_missing_tokens(case.counter, batches), True
    found = [possible_denominators(batch, case.counter, None) for batch in batches]
    return None, any(name.get("shifted") != name.get("unshifted") for name in found) or not any(found)


def _build_twice(rank: int, world_size: int, case: _Case) -> list[str]:
    first, second = build(case.make_module).state_dict(), build(case.make_module).state_dict()
    return [name for name, value in first.items() if isinstance(value, Tensor) and not _alike(value, second[name])]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _fit_twice(rank: int, world_size: int, case: _Case) -> tuple[Facts, list[float]]:
    """All samples in one batch, twice from the start: with other random numbers."""
    everything = MicroBatch(tuple(range(len(case.samples))))
    fits = [
        fit(build(case.make_module), [batch], strategy="auto", seed=seed)
        for seed, batch in enumerate(case.batches([everything, everything]))
    ]
    return fits[0].facts, [fits[0].losses[0], fits[1].losses[0]]


def _fit_merged(rank: int, world_size: int, case: _Case, splits: Sequence[Split]) -> list[tuple[Seen, list[Count]]]:
    """The reference: one process, one batch per window, none of this package's scaling."""
    references = []
    for split in splits:
        batches = case.merged_batches(split)
        num_tokens = [count_on_host(case.counter, batch) for batch in batches]  # before a step can change them
        # a window without tokens is no update
        divide_by = [count if case.loss_reduction == "sum" else float(count > 0) for count in num_tokens]
        seen = fit(build(case.make_module), batches, strategy="auto", divide_by=divide_by)
        references.append((seen, num_tokens))
    return references


def _fit_split(rank: int, world_size: int, case: _Case, split: Split) -> Seen:
    return fit(
        build(case.make_module),
        case.batches(split.ranks[rank]),
        strategy=case.make_strategy(),
        world_size=world_size,
        accumulate=split.accumulate,
    )


def _probe(rank: int, world_size: int, case: _Case, split: Split, window: int, parameters: Named | None) -> list[Probe]:
    """Each micro-batch of a window that keeps its labels, and last the merged window, alone from given parameters."""
    parts = [m for by_rank in split.windows[window] for m in by_rank if m.supervised]
    parts.append(MicroBatch(tuple(split.merged(window))))
    before, batches = case.batches(parts), case.batches(parts)
    seen = fit(build(case.make_module), batches, strategy="auto", learning_rate=0.0, start_from=parameters)
    return [
        Probe(
            flat(gradient),
            count_on_host(case.counter, untouched),
            count_on_host(case.counter, used),
            possible_denominators(untouched, case.counter, returned),
        )
        for gradient, untouched, used, returned in zip(seen.gradients, before, batches, seen.num_tokens, strict=True)
    ]


def _failure_text(
    case: _Case,
    facts: Facts,
    report: PartitionReport,
    split: Split,
    wrong: tuple[int, str],
    observed: Seen,
    reference: Seen,
) -> str:
    update, worst = wrong
    return (
        f"The gradient depends on how the tokens are split.\n\n{report}\n\n"
        f"{split}, update {update}: {worst}.\n"
        f"Likely cause: {_cause(case, facts, report, split, update, observed, reference)}"
    )


def _cause(
    case: _Case, facts: Facts, report: PartitionReport, split: Split, update: int, observed: Seen, reference: Seen
) -> str:
    if len(observed.gradients) != len(reference.gradients):
        return (
            "updates are missing or too many. Look for what ends the epoch early or changes `accumulate_grad_batches`:"
            " `trainer.should_stop`, `on_train_batch_start` that returns -1, a callback of `configure_callbacks`."
        )
    if observed.gradients[update].keys() != reference.gradients[update].keys():
        return "the module chooses what it trains by the number of ranks, the rank or the number of batches."
    if facts.unfrozen_late and split.world_size > 1:
        return (
            f"`configure_optimizers` unfreezes {listed(facts.unfrozen_late)}. DDP has wrapped the module by then"
            " and leaves their gradients as they are on each rank. Unfreeze in `__init__`, `setup` or"
            " `configure_model`."
        )
    before = reference.parameters[update - 1] if update else None
    *parts, merged = _run(_probe, 1, case, split, update, before, facts=facts)[0]
    return likely_cause(
        flat(observed.gradients[update]),
        flat(reference.gradients[update]),
        parts,
        merged,
        world_size=split.world_size,
        accumulate=split.accumulate,
        loss_reduction=case.loss_reduction,
        counter=case.counter,
        rtol=report.rtol,
    )
