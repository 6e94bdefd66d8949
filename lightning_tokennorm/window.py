"""The accumulation window: what all ranks know of it before its first backward, and the factors that follow.

The law. Rank ``r``'s micro-batch ``k`` has ``n[r, k]`` supervised tokens with loss sum ``S[r, k]``. With ``N`` the sum
of all ``n[r, k]`` over the window and the ``W`` ranks, one update uses the gradient ``sum(grad S[r, k]) / N``.

What stands between the user's loss and that gradient: Lightning divides every training loss by
``K = accumulate_grad_batches`` (also in a short last window), backward adds the micro-batches up, and DDP divides the
ranks' sum by ``W``. So the loss that Lightning hands over has to be multiplied by

    K * W / N              where ``training_step`` returned the sum ``S``
    K * W * n[r, k] / N    where it returned the mean ``S / n[r, k]``

and where a communication hook leaves the ranks' sum instead of DDP's average, ``W`` drops out of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor

from lightning_tokennorm.counting import Count

LossReduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True)
class RankReport:
    """What one rank says of its coming window: one row of the exchange."""

    num_tokens: Count
    """Supervised tokens of this rank's micro-batches in the window."""
    micro_batches: int
    """Micro-batches that this rank has for the window, at most `accumulate`."""
    accumulate: int
    """``K``: micro-batches per window where there are enough."""
    refuses: bool = False
    """Whether this rank cannot go on; the reasons are exchanged afterwards."""
    borrows: bool = False
    """Whether this rank has never had a batch, so that it needs one of another rank to run a padded micro-batch on."""
    sigterm: bool = False
    """Whether this rank was asked to end (SIGTERM)."""
    requeue: bool = False
    """Whether this rank got the signal that a cluster sends before it requeues the job."""
    meets: bool = False
    """Whether this is no report of a window: the rank waits for the others to gather what a checkpoint needs."""
    leaves: bool = False
    """Whether this is no report of a window: the rank has left the training before its end, and reports no more."""
    fingerprint: int = 0
    """What the batches look like, where other ranks have to hold the same ones."""
    names_heads: bool = False
    """Whether this rank counts heads that the ranks have not agreed upon: their names are exchanged afterwards."""
    heads: tuple[Count, ...] = ()
    """Tokens of each head that the ranks have agreed upon, in the order of their names."""


@dataclass(frozen=True)
class HeadPlan:
    """What a window is for one of several losses."""

    num_tokens: Count
    """``N`` of this head."""
    tokens: tuple[Count, ...]
    """``n[r, k]`` of this head and rank, one per micro-batch."""


@dataclass(frozen=True)
class WindowPlan:
    """A window that all ranks agree on. Made once, before its first backward, and never changed.

    Example:
        >>> from lightning_tokennorm.window import RankReport, WindowPlan
        >>> ranks = [RankReport(8, 3, 3), RankReport(16, 3, 3)]
        >>> plan = WindowPlan.agreed(ranks, tokens=(3, 1, 4))
        >>> plan.num_tokens
        24
        >>> plan.factor(0, "mean", 3)  # K * W * n / N = 3 * 2 * 3 / 24
        0.75
    """

    num_tokens: Count
    """``N``: supervised tokens of the window over all micro-batches and ranks."""
    world_size: int
    """``W``: ranks over which DDP averages."""
    accumulate: int
    """``K``: micro-batches per window where there are enough."""
    tokens: tuple[Count, ...]
    """``n[r, k]`` of this rank, one per micro-batch; 0 for padded ones."""
    padded_micro_batches: int
    """Micro-batches that ranks run without data of their own, over all ranks."""
    tokens_min: Count
    """The smallest number of tokens that a rank has in the window."""
    tokens_max: Count
    """The largest number of tokens that a rank has in the window."""
    ranks_divided_by: float
    """By what the reduction divides the sum over ranks: ``W``, or 1 where a communication hook leaves the sum."""
    heads: Mapping[str, HeadPlan] = field(default_factory=dict)
    """By name, where there are several losses; `num_tokens` and `tokens` are the sums over them."""

    @classmethod
    def agreed(
        cls,
        reports: Sequence[RankReport],
        tokens: tuple[Count, ...],
        *,
        ranks_divided_by: float | None = None,
        heads: Mapping[str, tuple[Count, ...]] | None = None,
    ) -> WindowPlan:
        """The plan that follows from the reports of all ranks, which agree on ``K``.

        The window is as long as the longest rank's: the others are padded with micro-batches without tokens.

        Args:
            reports: One report per rank, the same list on every rank.
            tokens: ``n[r, k]`` of this rank's own micro-batches.
            ranks_divided_by: By what the reduction divides the sum over ranks; ``None`` for their number.
            heads: ``n[r, k]`` of this rank's own micro-batches for each head, in the order of the reports'.
        """
        per_rank = [report.num_tokens for report in reports]
        micro_batches = max(report.micro_batches for report in reports)
        padding = (0,) * (micro_batches - len(tokens))
        return cls(
            num_tokens=total(per_rank),
            world_size=len(reports),
            accumulate=reports[0].accumulate,
            tokens=tokens + padding,
            padded_micro_batches=sum(micro_batches - report.micro_batches for report in reports),
            tokens_min=min(per_rank),
            tokens_max=max(per_rank),
            ranks_divided_by=len(reports) if ranks_divided_by is None else ranks_divided_by,
            heads={
                name: HeadPlan(total(report.heads[index] for report in reports), own + padding)
                for index, (name, own) in enumerate((heads or {}).items())
            },
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the window on this rank (the same number on every rank)."""
        return len(self.tokens)

    def factor(self, micro_batch: int, loss_reduction: LossReduction, divided_by: float) -> float:
        """What the loss that is handed over is multiplied by before its backward.

        Args:
            micro_batch: The index ``k`` of the micro-batch in the window.
            loss_reduction: Whether ``training_step`` returned the mean over the micro-batch's tokens or their sum.
            divided_by: By what the loss was divided before: ``K`` by Lightning.

        Returns:
            The factor; 0.0 for a micro-batch without tokens, whose loss says nothing whatever its value is.
        """
        if self.tokens[micro_batch] == 0:
            return 0.0
        if self.heads:  # whose own factors are in the gradient of their sum
            return divided_by * self.ranks_divided_by
        return self.loss_weight(micro_batch, loss_reduction, divided_by) * self.ranks_divided_by / self.num_tokens

    def head_factor(self, head: str, micro_batch: int, loss_reduction: LossReduction) -> float:
        """What the gradient of a head's loss is multiplied by, besides what is done to the sum of all heads.

        Args:
            head: Its name.
            micro_batch: The index ``k`` of the micro-batch in the window.
            loss_reduction: Whether the loss is the mean over the head's tokens or their sum.
        """
        plan = self.heads[head]
        tokens = plan.tokens[micro_batch]
        return (tokens if loss_reduction == "mean" else 1) / plan.num_tokens if tokens else 0.0

    def loss_weight(self, micro_batch: int, loss_reduction: LossReduction, divided_by: float) -> Count:
        """What the loss that is handed over is multiplied by to be ``S[r, k]``.

        Args:
            micro_batch: The index ``k`` of the micro-batch in the window; it has at least one token.
            loss_reduction: Whether ``training_step`` returned the mean over the micro-batch's tokens or their sum.
            divided_by: By what the loss was divided before: ``K`` by Lightning.
        """
        return divided_by * (self.tokens[micro_batch] if loss_reduction == "mean" else 1)


@dataclass(frozen=True)
class HeadRecord:
    """What one of several losses added to an update."""

    num_tokens: Count
    """``N`` of this head: its tokens over the window's micro-batches and all ranks."""
    loss_sum: Tensor
    """Sum of the losses of this rank's tokens: shape ``()``, float64, detached, on the rank's device."""


@dataclass(frozen=True)
class UpdateRecord:
    """What went into one optimizer update."""

    index: int
    """The update's number: ``trainer.global_step`` before it."""
    num_tokens: Count
    """``N``: supervised tokens over the window's micro-batches and all ranks."""
    micro_batches: int
    """Micro-batches of the window per rank."""
    world_size: int
    """``W``: ranks over which DDP averages."""
    tokens_min: Count
    """The smallest number of tokens that a rank had."""
    tokens_max: Count
    """The largest number of tokens that a rank had."""
    loss_sum: Tensor
    """Sum of the losses of this rank's tokens: shape ``()``, float64, detached, on the rank's device."""
    applied: bool
    """Whether the optimizer stepped."""
    skipped_because: str | None
    """Why it did not, else ``None``."""
    padded_micro_batches: int = 0
    """Micro-batches of the window, over all ranks, that had no data: their ranks' loaders had ended."""
    heads: Mapping[str, HeadRecord] = field(default_factory=dict)
    """By name, where there are several losses; `num_tokens` is the sum over them, `loss_sum` their weighted sum."""


def total(counts: Iterable[Count]) -> Count:
    """The sum of counts: exact for ints, correctly rounded (whatever the order) where there is a float."""
    counts = list(counts)
    return sum(counts) if all(isinstance(count, int) for count in counts) else math.fsum(counts)


def differing_accumulation(reports: Sequence[RankReport]) -> str | None:
    """Say that ranks do not have the same ``K``.

    Args:
        reports: One report per rank, the same list on every rank: so all ranks come to the same answer.

    Returns:
        A sentence that names the ranks, what each has and what to change; ``None`` where the ranks agree.
    """
    if len({report.accumulate for report in reports}) == 1:
        return None
    return (
        f"`accumulate_grad_batches` differs between ranks: {_by_rank(r.accumulate for r in reports)}."
        " Give every rank the same value."
    )


def uneven_windows(reports: Sequence[RankReport]) -> str | None:
    """Say that ranks do not have the same number of micro-batches for a window; as `differing_accumulation`."""
    if len({report.micro_batches for report in reports}) == 1:
        return None
    return (
        "the ranks disagree on the number of micro-batches in this window:"
        f" {_by_rank(r.micro_batches for r in reports)}. Every rank has to yield the same number of batches per epoch:"
        " use a DistributedSampler, or cut the longer streams (`limit_train_batches` is one way), or pad the shorter"
        ' ones with `uneven="pad"`.'
    )


def differing_copies(reports: Sequence[RankReport], copies: Sequence[Sequence[int]]) -> str | None:
    """Say which ranks have to hold the same batches and do not.

    Args:
        reports: One report per rank, the same list on every rank.
        copies: The ranks of each model replica.

    Returns:
        A sentence that names the ranks, what each has and what to change; ``None`` where all copies agree.
    """
    for ranks in copies:
        held = [reports[rank] for rank in ranks]
        looks = {(each.num_tokens, each.heads, each.micro_batches, each.borrows, each.fingerprint) for each in held}
        if len(looks) == 1:
            continue
        told = ", ".join(
            f"rank {rank} has {each.num_tokens} tokens in {each.micro_batches} micro-batches"
            for rank, each in zip(ranks, held, strict=True)
        )
        alike = len({(each.num_tokens, each.micro_batches) for each in held}) == 1
        return (
            f"ranks {', '.join(map(str, ranks))} are one model replica and have to be given the same batches, but"
            f" {told}{', in which other values stand' if alike else ''}. Deal data out by replicas, as Lightning's"
            " sampler does (`Trainer.strategy.distributed_sampler_kwargs`), shuffle with one seed, and leave nothing"
            " that is random to the loader of one rank. If each rank has a slice of its own, it is"
            " `TokenNormModelParallel(tokens_over=...)` that says so, or a mesh without tensor parallelism."
        )
    return None


def _by_rank(values: Iterable[object]) -> str:
    return ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
