"""The options of the strategies: checked in the constructor, where the name that was typed is still in sight."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any, Literal

from lightning_tokennorm.counting import SupervisedTokens, TokenCounter
from lightning_tokennorm.heads import check_weights
from lightning_tokennorm.window import LossReduction


@dataclass(frozen=True)
class Options:
    """What a user chose, the same for all strategies of this package."""

    count_tokens: TokenCounter
    loss_reduction: LossReduction
    counting: Literal["lookahead"]
    on_empty: Literal["skip", "error"]
    uneven: Literal["pad", "error"]
    audit: bool
    head_weights: Mapping[str, float]
    accumulate_grad_batches: int | None

    @classmethod
    def checked(
        cls,
        strategy: str,
        *,
        count_tokens: TokenCounter | None,
        loss_reduction: LossReduction,
        counting: Literal["lookahead"],
        on_empty: Literal["skip", "error"],
        uneven: Literal["pad", "error"],
        audit: bool,
        head_weights: Mapping[str, float] | None,
        accumulate_grad_batches: int | None,
    ) -> Options:
        """The options, after a check.

        Args:
            strategy: The name of the strategy, for error texts.
            count_tokens: As in `TokenNormDDP`; and so are the others.
            loss_reduction: See there.
            counting: See there.
            on_empty: See there.
            uneven: See there.
            audit: See there.
            head_weights: See there.
            accumulate_grad_batches: See there.

        Raises:
            TypeError: ``count_tokens`` is not callable, or another option has a value of another type.
            ValueError: Another option has a value that it does not know.
        """
        if count_tokens is not None and not callable(count_tokens):
            raise TypeError(
                f"`{strategy}(count_tokens=...)` got {count_tokens!r}; expected a callable that takes a batch and"
                " returns its number of supervised tokens."
            )
        check_choice(strategy, "loss_reduction", loss_reduction, ("mean", "sum"))
        check_choice(strategy, "counting", counting, ("lookahead",))
        check_choice(strategy, "on_empty", on_empty, ("skip", "error"))
        check_choice(strategy, "uneven", uneven, ("pad", "error"))
        check_choice(strategy, "audit", audit, (False, True))
        if accumulate_grad_batches is not None:
            text = f"`{strategy}(accumulate_grad_batches=...)` got {accumulate_grad_batches!r}; expected a whole number"
            if not isinstance(accumulate_grad_batches, int) or isinstance(accumulate_grad_batches, bool):
                raise TypeError(f"{text}, the micro-batches of a window under manual optimization.")
            if accumulate_grad_batches < 1:
                raise ValueError(f"{text} from 1 on.")
        counter = SupervisedTokens() if count_tokens is None else count_tokens
        weights = check_weights(strategy, head_weights, counter)
        return cls(counter, loss_reduction, counting, on_empty, uneven, audit, weights, accumulate_grad_batches)


def check_choice(strategy: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise a ValueError where an option has none of its values."""
    if value not in choices:
        expected = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{strategy}({option}=...)` got {value!r}; expected {expected}.")


def refuse_unknown(strategy: type, given: Mapping[str, Any], takers: tuple[Callable[..., Any], ...]) -> None:
    """Refuse an option that nobody would take: the host fails with it much later, in its own words.

    Args:
        strategy: The strategy, for error texts.
        given: The options that are passed on.
        takers: Whom they are passed on to.

    Raises:
        TypeError: One of them is unknown; the text has the nearest name that is known.
    """
    package = __name__.partition(".")[0]
    # a user's subclass has taken its own by now, and what comes after this package's may be a user's as well
    takes = list(dropwhile(lambda each: not each.__module__.startswith(f"{package}."), strategy.__mro__))
    own = [vars(each).get("__init__") for each in takes]
    known = {
        name
        for function in (*filter(None, own), *takers)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    } - {"self", "module"}
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean `{nearest[0]}`?" if nearest else f" Known are {', '.join(sorted(known))}."
            raise TypeError(f"`{strategy.__name__}({name}=...)` is not an option.{hint}")
