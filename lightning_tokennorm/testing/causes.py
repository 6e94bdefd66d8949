"""From a wrong gradient to its likely cause: each mistake of this trade leaves a fingerprint.

With ``g[j]`` the gradient of the loss that ``training_step`` returns for micro-batch ``j`` alone, and ``G`` the one for
the merged window, a mean over ``m`` tokens obeys ``sum(m[j] * g[j]) = M * G``, whatever the tokens are. So what the
loss is really a mean over can be found out by trying what it might be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_tokennorm.counting import Count, SupervisedTokens, TokenCounter, check_count, rows_of, to_host
from lightning_tokennorm.testing.hosts import Host
from lightning_tokennorm.testing.module import as_real

_TOLERANCE = (1e-3, 5e-2)
"""Least and greatest relative L2 distance at which two gradients are taken for the same: fingerprints differ more."""

_NAMES = {
    "shifted": "the live labels after a shift of 1",
    "unshifted": "the live labels without a shift",
    "positions": "all positions, ignored ones too",
    "shifted positions": "all positions after a shift of 1, ignored ones too",
    "rows": "the rows of the batch",
    "attention mask": "the positions of the attention mask",
    "returned": "the `num_tokens` that it returns",
}


@dataclass(frozen=True)
class Probe:
    """One batch run alone."""

    gradient: Tensor
    """Of the returned loss with respect to all trainable parameters: flat, float64."""
    counted: Count
    """What `count_tokens` makes of the batch before the step."""
    counted_after: Count
    """The same after the step: it differs where the step changes labels in place."""
    denominators: Mapping[str, float]
    """What the loss might be a mean over, by name."""


def possible_denominators(batch: Any, counter: TokenCounter, returned: Any) -> dict[str, float]:
    """What a loss over this batch might be a mean over.

    Args:
        batch: The batch.
        counter: The strategy's counter; one of `SupervisedTokens` knows where the labels are.
        returned: ``num_tokens`` as `training_step` returned it, or ``None``.
    """
    known = counter if isinstance(counter, SupervisedTokens) else SupervisedTokens()
    found: dict[str, float] = {} if returned is None else {"returned": float(returned)}
    try:
        labels = known.find_labels(batch)
    except ValueError:
        return found
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        return found
    rows = [(row, row != known.ignore_index) for row in rows_of(labels)]
    found |= {
        "unshifted": float(sum(live.sum() for _, live in rows)),
        "positions": float(labels.numel()),
        "rows": float(labels.size(0)),
    }
    if labels.dim() > 1:
        found |= {
            "shifted": float(sum(live[..., 1:].sum() for _, live in rows)),
            "shifted positions": float(sum(row[..., 1:].numel() for row, _ in rows)),
        }
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else getattr(batch, "attention_mask", None)
    if isinstance(mask, Tensor):
        found["attention mask"] = float(mask.sum())
    return found


def count_on_host(counter: TokenCounter, batch: Any) -> Count:
    """What a counter makes of a batch, as a number."""
    return to_host([check_count(counter(batch))])[0]


def likely_cause(
    observed: Tensor,
    expected: Tensor,
    parts: Sequence[Probe],
    merged: Probe,
    *,
    host: Host,
    world_size: int,
    copies: int,
    accumulate: int,
    loss_reduction: str,
    counter: TokenCounter,
    rtol: float,
) -> str:
    """Say in a sentence what most likely went wrong with one update.

    Args:
        observed: The update's gradient: flat, float64.
        expected: The gradient of one process on the merged window: flat, float64.
        parts: The micro-batches of the window on all ranks, those without tokens left out.
        merged: The merged window.
        host: The strategy.
        world_size: ``W``.
        copies: Ranks that share a replica of the module.
        accumulate: ``K``.
        loss_reduction: What the strategy takes the loss for.
        counter: The strategy's counter.
        rtol: Relative tolerance of the comparison: parameters of low precision blur the fingerprints.
    """
    same = partial(_same, tolerance=min(max(rtol, _TOLERANCE[0]), _TOLERANCE[1]))
    counted = sum(part.counted for part in parts)
    if any(part.counted != part.counted_after for part in parts):
        before, after = next((p.counted, p.counted_after) for p in parts if p.counted != p.counted_after)
        return (
            f"`training_step` changes the labels after they were counted ({before} tokens before it, {after} after)."
            " Change them in the data set or the collate function, or count what the step will use."
        )
    if abs(counted - merged.counted) > 1e-6 * max(1, merged.counted):
        return (
            f"`count_tokens` depends on how samples are batched: {counted} for the micro-batches, {merged.counted} for"
            " the merged window. Padding may be counted."
        )
    if merged.counted == 0:
        return (
            "no sample of this window has a supervised token, and the strategy made an update of it: the mean over no"
            f" token is NaN. `{host.ours}` skips such an update."
        )
    if not observed.isfinite().all() and any(part.counted == 0 for part in parts):
        return (
            "a micro-batch without supervised tokens, whose mean loss is NaN, and the strategy lets its gradient in."
            f" `{host.ours}` gives it no weight."
        )
    numbers = {"W": world_size, "K": accumulate, "T": copies}
    factors = {key: factor for name, n in numbers.items() for key, factor in ((name, n), (f"1/{name}", 1 / n))}
    for name, factor in factors.items():
        if factor != 1 and same(observed, factor * expected):
            of = ", the number of ranks that share a replica" if name.endswith("T") else ""
            return (
                f"the gradient is {name} = {factor:g} times the right one{of}. One component divides or multiplies by"
                f" {name.removeprefix('1/')} and another does so, too, or none does: {host.what_scales}, a loss that is"
                " already divided, a strategy of your own."
            )
    if same(observed, expected):
        return (
            "it is nearly the right gradient, as rounding leaves it: check in float64, or pass a larger `rtol`. Else a"
            " small part of the loss is not a mean over tokens."
        )
    if same(observed, sum(part.gradient for part in parts) / (world_size * accumulate)):
        return (
            "it is the mean of the micro-batches' means: tokens in small micro-batches weigh more. This is what plain"
            f" `{host.plain}` and gradient accumulation do; use `{host.ours}`."
        )
    weighted = sum(_times(part.counted if loss_reduction == "mean" else 1, part.gradient) for part in parts) / counted
    if loss_reduction == "mean" and same(observed, weighted):
        # The strategy weighted by its counts, so the loss is a mean over something else.
        counts = _describe_counter(counter, parts)
        fitting = [
            _NAMES[name]
            for name, of_merged in merged.denominators.items()
            if all(name in part.denominators for part in parts)
            and same(sum(_times(part.denominators[name], part.gradient) for part in parts), of_merged * expected)
        ]
        if fitting:  # several where they are proportional, as rows and positions are without padding
            return (
                f"the loss is a mean over {'; or '.join(fitting)}, but `count_tokens` counts {counts}. Let both mean"
                " the same: return the mean over the supervised tokens, or pass a `count_tokens` that fits"
                " (`SupervisedTokens(shift=...)`)."
            )
        return (
            f"the loss is a mean over other tokens than `count_tokens` counts ({counts}): labels changed in"
            " `training_step` or in a transfer hook, another ignore index, a loss term of another kind, or a sum"
            " (`loss_reduction='sum'`)."
        )
    return (
        "none of the known ones. Look for randomness, for layers that mix samples, for what the module keeps from one"
        " micro-batch to the next (buffers, counters), and for a loss that depends on more than the tokens of its own"
        " micro-batch."
    )


def _describe_counter(counter: TokenCounter, parts: Sequence[Probe]) -> str:
    for name in ("shifted", "unshifted"):
        if isinstance(counter, SupervisedTokens) and all(p.denominators.get(name) == p.counted for p in parts):
            return _NAMES[name]
    return "something else"


def _times(weight: float, gradient: Tensor) -> Tensor:
    # a micro-batch without weight says nothing, also where its gradient is NaN
    return weight * gradient if weight else torch.zeros_like(gradient)


def _same(a: Any, b: Any, tolerance: float) -> bool:
    return bool((a - b).norm() <= tolerance * b.norm())


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    """Gradients by name as one float64 vector, in an order that does not depend on the host."""
    return torch.cat([as_real(gradients[name]).flatten() for name in sorted(gradients)])
