"""Several losses with a denominator each: the heads of a model.

Head ``h`` of rank ``r`` and micro-batch ``k`` has ``n[h, r, k]`` tokens with loss sum ``S[h, r, k]``. With ``N[h]`` the
sum of its counts over window and ranks, and ``w[h]`` its weight, one update uses the gradient

    sum over h of w[h] * sum over r, k of grad S[h, r, k] / N[h]

A loss per micro-batch without tokens (a regulariser, a balance of experts) is a head whose count is 1.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tokennorm.counting import (
    COUNTER_RETURNED,
    Count,
    TokenCounter,
    check_count,
    counter_for,
    describe_counter,
)


class Heads:
    """Counts the tokens of several losses, each with a counter of its own.

    Args:
        **counters: The counter of each head, by the name that ``training_step`` returns its loss under.

    Raises:
        TypeError: A counter is not callable.
        ValueError: There is none.

    Example:
        >>> from lightning_tokennorm import SupervisedTokens
        >>> heads = Heads(lm=SupervisedTokens(shift=1), mtp=SupervisedTokens(shift=2))
        >>> heads({"labels": torch.tensor([[7, 8, 9, -100], [7, 8, 9, 10]])})
        {'lm': 5, 'mtp': 3}
    """

    def __init__(self, **counters: TokenCounter) -> None:
        if not counters:
            raise ValueError("`Heads()` got no counter; expected one for each head, `Heads(lm=SupervisedTokens())`.")
        for name, counter in counters.items():
            if not callable(counter):
                raise TypeError(
                    f"`Heads({name}=...)` got {counter!r}; expected a callable that takes a batch and returns the"
                    " number of tokens of that head's loss."
                )
        self.counters: Mapping[str, TokenCounter] = dict(counters)
        """The counter of each head."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        """The count of each head, as its counter returns it."""
        return {name: counter(batch) for name, counter in self.counters.items()}

    def __repr__(self) -> str:
        return f"Heads({', '.join(f'{name}={counter!r}' for name, counter in self.counters.items())})"

    def for_module(self, module: nn.Module) -> Heads:
        """These counters as they fit a module, see `SupervisedTokens.for_module`."""
        return Heads(**{name: counter_for(counter, module) for name, counter in self.counters.items()})

    def describe(self) -> str:
        """What each head counts."""
        return "; ".join(f"{name}: {describe_counter(counter)}" for name, counter in self.counters.items())


def check_weights(owner: str, weights: Any, counter: Any) -> dict[str, float]:
    """The weights of heads, after a check.

    Args:
        owner: Whose option ``head_weights`` is, for error texts.
        weights: The weights by the names of the heads; ``None`` for none.
        counter: The counter; the heads of a `Heads` are known before any batch is.

    Raises:
        TypeError: They are no mapping of names to numbers.
        ValueError: A weight is negative or not finite, or of a head that is not counted.
    """
    if weights is None:
        return {}
    expected = "expected a mapping of the names of heads to numbers, such as {'mtp': 0.3}"
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise TypeError(f"`{owner}(head_weights=...)` got {weights!r}; {expected}.")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise TypeError(f"`{owner}(head_weights=...)` got {weight!r} for {name!r}; {expected}.")
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"`{owner}(head_weights=...)` got {weight!r} for {name!r}; expected a finite number >= 0.")
    if isinstance(counter, Heads) and (problem := unknown_names(weights, counter.counters)):
        raise ValueError(f"`{owner}(head_weights=...)` names {problem}.")
    return {name: float(weight) for name, weight in weights.items()}


def unknown_names(given: Iterable[str], known: Iterable[str]) -> str | None:
    """Say which of the names are not known, and what is; ``None`` where all are."""
    known = list(known)
    unknown = [name for name in given if name not in known]
    if not unknown:
        return None
    nearest = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{unknown[0]!r}, while the heads that are counted are {', '.join(map(repr, known)) or 'none'}{hint}"


ONE_LOSS = ""
"""The name of a single loss, where there are no heads."""


def by_head(counted: Any, source: str = COUNTER_RETURNED) -> dict[str, Count | Tensor]:
    """What a counter returned, by heads: a single count is that of `ONE_LOSS`.

    Args:
        counted: A count, or a mapping of names to counts.
        source: Who it is from, for the text of an error.

    Raises:
        TypeError: It is neither.
    """
    if not isinstance(counted, Mapping):
        return {ONE_LOSS: check_count(counted, source)}
    for name in counted:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{source} counts of several heads, one of them named {name!r}; expected names as texts.")
    return {name: check_count(count, f"{source} for {name!r}") for name, count in counted.items()}


class _WeightedSum(torch.autograd.Function):
    """A sum of losses with one set of weights for its value, and another for its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Sequence[float], gradients: Sequence[float], *losses: Tensor) -> Tensor:
        ctx.gradients = gradients
        total: Any = sum(weight * loss for weight, loss in zip(values, losses, strict=True))
        return total  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (None, None, *(gradient * weight for weight in ctx.gradients))


def weighted_sum(losses: Sequence[Tensor], values: Sequence[float], gradients: Sequence[float]) -> Tensor:
    """The sum of the losses times `values`, whose gradient is that of the sum of the losses times `gradients`.

    What a user sees of the losses is in the units that he knows, and a backward has the factors that the law asks for.

    Args:
        losses: Tensors of one element.
        values: One factor for each.
        gradients: One factor for each.

    Returns:
        Shape ``()``.

    Example:
        >>> a, b = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
        >>> total = weighted_sum([a, b], [1.0, 0.5], [10.0, 20.0])
        >>> total.backward()
        >>> total.item(), a.grad.item(), b.grad.item()
        (1.5, 10.0, 20.0)
    """
    total: Tensor = _WeightedSum.apply(values, gradients, *(loss.reshape(()) for loss in losses))  # type: ignore[no-untyped-call]
    return total
