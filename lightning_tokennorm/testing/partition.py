"""`assert_partition_invariant`: the law, run on a user's own module and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import default_collate

from lightning_tokennorm.counting import Count, SupervisedTokens
from lightning_tokennorm.testing.causes import flat, likely_cause
from lightning_tokennorm.testing.compare import DIFFER, compare, tolerances
from lightning_tokennorm.testing.fits import Case, fit_merged, fit_split, probe, run
from lightning_tokennorm.testing.hosts import StrategyLike, host_of
from lightning_tokennorm.testing.module import listed
from lightning_tokennorm.testing.preconditions import check_preconditions
from lightning_tokennorm.testing.report import PartitionReport, SplitResult
from lightning_tokennorm.testing.splits import Split, deal
from lightning_tokennorm.testing.watch import Facts, Seen


def assert_partition_invariant(
    make_module: Callable[[], pl.LightningModule],
    samples: Sequence[Any],
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    world_sizes: Sequence[int] | None = None,
    accumulate: Sequence[int] = (1, 2, 3),
    micro_batch_size: int = 2,
    strategy: StrategyLike = None,
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
        world_sizes: Numbers of ranks to try. Default: 1 and 2; for a strategy whose mesh has a size, what that needs.
        accumulate: Numbers of micro-batches per window to try.
        micro_batch_size: Most samples in a micro-batch; there are smaller ones, too.
        strategy: The strategy, its name, or a class or function that makes it. Default: `TokenNormDDP()`. Another than
            one of this package shows what that one does. A mesh whose sizes are ``"auto"`` has two tensor-parallel
            ranks where the number of ranks is even and at least 4, else one.
        rtol: Relative tolerance of a parameter's gradient, in the L2 norm. Default: 1e-9 for float64 parameters, 1e-4
            for float32, 5e-2 below.
        atol: Absolute tolerance, added to it. Default: 1e-12, 1e-6, 1e-3.
        allow_batch_dependent: Whether to go on with layers that mix the samples of a batch (BatchNorm).

    Returns:
        The report; ``print`` it for a table.

    Raises:
        AssertionError: A split differs. The text has the table, names the split, the update and the worst parameter,
            and the likely cause.
        ValueError: The proof cannot be made: no samples, none with a supervised token, layers that mix samples, weights
            that differ from one ``make_module()`` to the next, a loss that differs from one run to the next, a strategy
            that runs on other devices only or needs another number of ranks.
        TypeError: ``strategy`` is none.
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
    host = host_of(strategy)
    ranks = [host.data_of(w) for w in (host.default_world_sizes if world_sizes is None else world_sizes)]
    case = Case(
        make_module,
        samples,
        collate_fn or default_collate,
        host,
        getattr(host.probe, "count_tokens", None) or SupervisedTokens(),
        getattr(host.probe, "loss_reduction", "mean"),
    )
    case, facts, notes = check_preconditions(case, allow_batch_dependent)
    can_blank = isinstance(case.counter, SupervisedTokens)
    if not can_blank:
        notes.append("no rank without tokens was tried: nothing says where a `count_tokens` of your own finds labels")
    splits = [deal(len(samples), each, k, micro_batch_size, blank=can_blank) for each in ranks for k in accumulate]
    references: list[tuple[Seen, list[Count]]] = run(fit_merged, 1, case, splits, facts=facts, timeout_s=600)[0]
    runs: list[list[Seen]] = [
        run(fit_split, len(split.data_of), case, split, reference.start, facts=facts)
        for split, (reference, _) in zip(splits, references, strict=True)
    ]
    default_rtol, default_atol = tolerances(facts.dtypes.union(*(seen[0].facts.dtypes for seen in runs)))
    rtol = default_rtol if rtol is None else rtol
    atol = default_atol if atol is None else atol
    if host.has_mesh and any(_drawn_otherwise(seen[0], ref) for seen, (ref, _) in zip(runs, references, strict=True)):
        notes.append("all splits start from the weights of one process: on a mesh the module draws others")
    results, failures = [], []
    for split, (reference, num_tokens), seen in zip(splits, references, runs, strict=True):
        comparison = compare(seen, reference, rtol, atol)
        results.append(
            SplitResult(str(split), tuple(num_tokens), comparison.max_abs, comparison.rel_l2, comparison.wrong is None)
        )
        if comparison.wrong is not None:
            failures.append((split, comparison.wrong, seen[0], reference))
    report = PartitionReport(tuple(results), rtol, atol, tuple(notes))
    if failures:
        raise AssertionError(_failure_text(case, facts, report, *failures[-1]))
    return report


def _drawn_otherwise(observed: Seen, reference: Seen) -> list[str]:
    """The weights with which a module does not start as in one process."""
    start = observed.start
    return [name for name, value in reference.start.items() if name in start and not value.equal(start[name])]


def _failure_text(
    case: Case,
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
        f"Likely cause: {_cause(case, facts, report, split, update, worst, observed, reference)}"
    )


def _cause(
    case: Case,
    facts: Facts,
    report: PartitionReport,
    split: Split,
    update: int,
    worst: str,
    observed: Seen,
    reference: Seen,
) -> str:
    if len(observed.gradients) != len(reference.gradients):
        return (
            "updates are missing or too many. Look for what ends the epoch early or changes `accumulate_grad_batches`:"
            " `trainer.should_stop`, `on_train_batch_start` that returns -1, a callback of `configure_callbacks`."
        )
    if observed.gradients[update].keys() != reference.gradients[update].keys():
        return "the module chooses what it trains by the number of ranks, the rank or the number of batches."
    if facts.unfrozen_late and split.world_size > 1 and case.host.wrapper == "DDP":
        return (
            f"`configure_optimizers` unfreezes {listed(facts.unfrozen_late)}. DDP has wrapped the module by then"
            " and leaves their gradients as they are on each rank. Unfreeze in `__init__`, `setup` or"
            " `configure_model`."
        )
    if (moved := _drawn_otherwise(observed, reference)) and not case.host.has_mesh:
        return (
            f"the module starts from other weights than in one process: {listed(moved)}. What is drawn after"
            f" {case.host.wrapper} has wrapped the module depends on the ranks; draw or load it before, in `__init__`."
        )
    if DIFFER in worst:
        return (
            f"the ranks do not train on one gradient. A parameter is outside of what {case.host.wrapper} has,"
            " gradients are reduced over a part of the ranks, or something depends on the rank: weights that are drawn,"
            " a hook that changes parameters or gradients."
        )
    before = reference.parameters[update - 1] if update else None
    *parts, merged = run(probe, 1, case, split, update, before, facts=facts)[0]
    return likely_cause(
        flat(observed.gradients[update]),
        flat(reference.gradients[update]),
        parts,
        merged,
        host=case.host,
        world_size=split.world_size,
        copies=split.copies,
        accumulate=split.accumulate,
        loss_reduction=case.loss_reduction,
        counter=case.counter,
        rtol=report.rtol,
    )
