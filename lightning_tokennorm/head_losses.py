"""The losses of a window's heads: their weighted sum, whose gradient has each head's own denominator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tokennorm.counting import Count
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.heads import unknown_names, weighted_sum
from lightning_tokennorm.window import HeadRecord, LossReduction, WindowPlan

Term = tuple[Tensor, Count]
"""A loss as the step returned it, and what it is multiplied by to be the sum over its tokens."""


class HeadLosses:
    """The losses of one window on one rank.

    Args:
        weights: The weights of heads by their names; 1 where none is given.
        loss_reduction: What each loss is.
    """

    def __init__(self, weights: Mapping[str, float], loss_reduction: LossReduction) -> None:
        self._weights = weights
        self._loss_reduction: LossReduction = loss_reduction
        self._terms: dict[str, dict[int, Term]] = {}  # by head and micro-batch, whose step may run more than once

    def live(self, plan: WindowPlan, micro_batch: int) -> list[str]:
        """The heads that a micro-batch adds to the gradient of: those with a token there, and a weight."""
        return [name for name, each in plan.heads.items() if each.tokens[micro_batch] and self._weight(name)]

    def _weight(self, head: str) -> float:
        return self._weights.get(head, 1.0)

    def combine(self, plan: WindowPlan, micro_batch: int, losses: Any, where: str) -> Tensor:
        """The weighted sum of the losses of a micro-batch.

        Args:
            plan: The plan of the window.
            micro_batch: The index of the micro-batch in it.
            losses: A loss for each head, by its name: tensors of one element. Those of heads without a token in the
                micro-batch are not looked at, and may be missing.
            where: Which micro-batch it is, for error texts.

        Returns:
            Shape ``()``. Where no head is live, the plain sum: something with a graph whose value means nothing.

        Raises:
            TokenNormError: A name is not known, or the loss of a head with tokens is missing or not a loss.
        """
        if not plan.heads:
            raise TokenNormError(
                f"The step of {where} gave the losses of several heads, but `count_tokens` returns one count. Count"
                " each of them: `count_tokens=Heads(lm=SupervisedTokens(), ...)`."
            )
        if not isinstance(losses, Mapping):
            raise TokenNormError(
                f"The step of {where} gave {type(losses).__name__} as its losses, while `count_tokens` counts the heads"
                f" {', '.join(map(repr, plan.heads))}; expected a loss for each: `return {{'losses': {{'"
                f"{next(iter(plan.heads))}': loss, ...}}}}`."
            )
        if problem := unknown_names(losses, plan.heads):
            raise TokenNormError(f"The step of {where} gave a loss for {problem}.")
        for name, each in plan.heads.items():
            if tokens := each.tokens[micro_batch]:
                weight = tokens if self._loss_reduction == "mean" else 1
                loss = _checked(losses.get(name), f"as the loss of head {name!r}, which has {tokens} tokens in {where}")
                self._terms.setdefault(name, {})[micro_batch] = (plain_value(loss), weight)
        live = self.live(plan, micro_batch)
        if not live:
            given = (each for each in losses.values() if isinstance(each, Tensor) and each.numel() == 1)
            return sum((each.reshape(()) for each in given), torch.zeros(()))
        weights = [self._weight(name) for name in live]
        factors = [plan.head_factor(name, micro_batch, self._loss_reduction) for name in live]
        gradients = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        return weighted_sum([losses[name] for name in live], weights, gradients)

    def records(self, plan: WindowPlan) -> Callable[[torch.device], tuple[dict[str, HeadRecord], Tensor]]:
        """What each head adds to the update, made when somebody asks: its record, and the weighted sum."""
        terms = {name: list(each.values()) for name, each in self._terms.items()}

        def make(device: torch.device) -> tuple[dict[str, HeadRecord], Tensor]:
            made = {
                name: HeadRecord(each.num_tokens, sum_of_losses(terms.get(name, ()), device))
                for name, each in plan.heads.items()
            }
            weighted = sum_of_losses(((each.loss_sum, self._weight(name)) for name, each in made.items()), device)
            return made, weighted

        return make


def _checked(loss: Any, what: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TokenNormError(
            f"The step gave {got} {what}; expected a tensor of one element. To leave a head out of a batch, count 0"
            " for it."
        )
    return loss


def sum_of_losses(terms: Iterable[Term], device: torch.device) -> Tensor:
    """The sum of losses over their tokens: shape ``()``, float64."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for loss, weight in terms:
        loss_sum = loss_sum.add(loss, alpha=weight)  # cast, scaled and added in one kernel
    return loss_sum


def plain_value(loss: Tensor) -> Tensor:
    """The value of a loss: of one that is a DTensor (`loss_parallel`), which all ranks of the replica come by here."""
    loss = loss.detach()
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return loss.reshape(())
