"""From a batch to its number of supervised tokens."""

from __future__ import annotations

import copy
import functools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_tokennorm.hf_models import label_shift

IGNORE_INDEX = -100
"""The label that takes a position out of the loss, as in ``torch.nn.functional.cross_entropy``."""

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

Count: TypeAlias = int | float
"""A number of supervised tokens; a float is a sum of token weights."""

TokenCounter: TypeAlias = Callable[[Any], Any]
"""A callable that takes a batch as the loader yields it and returns its count: an int, a float or a 0-dim tensor.

The type does not say so: LightningCLI would take a callable that returns a class for a factory of its instances.
"""


@dataclass(frozen=True)
class SupervisedTokens:
    """Counts the labels of a batch that enter the loss.

    With ``labels`` of shape ``[..., seq_len]`` the count is the number of entries of ``labels[..., shift:]`` that
    differ from ``ignore_index``. Only the labels are looked at: a padded position counts when its label is live,
    exactly as it does in the loss.

    Args:
        labels: Where the labels are: a key of a mapping (``dict``, ``BatchEncoding``), an attribute of an object, or
            the index into a tuple or list.
        ignore_index: The label of positions without supervision.
        shift: How many leading positions of the last dimension the loss never predicts. 1 where the model shifts
            labels against logits (Hugging Face causal LMs), 0 where labels already line up with the logits (its
            encoder-decoder, masked-LM and classification models). ``"auto"`` looks at the module when a fit starts
            (`for_module`); without a Hugging Face model in it, or called by itself, it is 1.

    Raises:
        TypeError: ``labels`` is neither ``str`` nor ``int``, or another argument is not an ``int``.
        ValueError: ``shift`` is negative, or another text than ``"auto"``.

    Example:
        >>> import torch
        >>> batch = {"labels": torch.tensor([[7, 8, 9, -100], [7, 8, -100, -100]])}
        >>> SupervisedTokens()(batch)  # 8, 9 and 8: position 0 is never predicted
        3
        >>> SupervisedTokens(shift=0)(batch)
        5
        >>> SupervisedTokens(labels=1)((torch.zeros(2, 4), batch["labels"]))
        3
    """

    labels: str | int = "labels"
    ignore_index: int = IGNORE_INDEX
    shift: int | Literal["auto"] = "auto"
    decided_by: str = field(default="", init=False, repr=False, compare=False)
    """Why ``shift="auto"`` became this shift: the model that means it. Empty where the shift was given."""
    counts: ClassVar[str] = ""
    """What is counted, in words that go before "labels"."""

    def __post_init__(self) -> None:
        own_name = type(self).__name__
        check_place(self.labels, own_name, "labels")
        for name in ("ignore_index", "shift"):
            value = getattr(self, name)
            if (isinstance(value, bool) or not isinstance(value, int)) and (name, value) != ("shift", "auto"):
                error = ValueError if name == "shift" and isinstance(value, str) else TypeError
                expected = "an int or 'auto'" if name == "shift" else "an int"
                raise error(f"`{own_name}({name}=...)` got {value!r}; expected {expected}.")
        if self._shift < 0:
            raise ValueError(
                f"`{own_name}(shift=...)` got {self.shift}; expected 1 (the model shifts), 0 (labels line up) or"
                " 'auto'."
            )

    def for_module(self, module: nn.Module) -> SupervisedTokens:
        """This counter with the shift that a module means, where it is left to be found out (``shift="auto"``).

        The outermost Hugging Face models in the module decide; `lightning_tokennorm.hf_models.label_shift` says how.

        Args:
            module: The module that is trained.

        Raises:
            ValueError: Several models in it are trained that do not mean the same.

        Example:
            >>> import torch
            >>> SupervisedTokens().for_module(torch.nn.Linear(2, 2))
            SupervisedTokens(labels='labels', ignore_index=-100, shift=1)
        """
        if self.shift != "auto":
            return self
        resolved = copy.copy(self)
        shift, reason = label_shift(module)
        object.__setattr__(resolved, "shift", shift)
        object.__setattr__(resolved, "decided_by", reason)
        return resolved

    def __call__(self, batch: Any) -> int | Tensor:
        """Count the supervised tokens of one micro-batch.

        Args:
            batch: The micro-batch, as the loader yields it or after its transfer to a device.

        Returns:
            An ``int`` for labels on the CPU; for labels on another device a 0-dim int64 tensor on that device, so
            that counting never waits for it.

        Raises:
            TypeError: The labels are not a tensor of integers.
            ValueError: The batch holds no such labels, or they are one-dimensional while ``shift`` is not 0.
        """
        num_tokens = functools.reduce(operator.add, map(self._count_live, rows_of(self.labels_of(batch))))
        return int(num_tokens) if num_tokens.device.type == "cpu" else num_tokens

    def labels_of(self, batch: Any) -> Tensor:
        """The labels of a batch, after a check.

        Raises:
            TypeError: The labels are not a tensor of integers.
            ValueError: The batch holds no such labels, or they are one-dimensional while ``shift`` is not 0.
        """
        labels, name = self.find_labels(batch), type(self).__name__
        if not isinstance(labels, Tensor) or labels.dtype not in _INTEGERS:
            raise TypeError(
                f"`{name}` found {describe_value(labels)} at {self._where()}; expected a tensor of integer labels."
                " Pass your own `count_tokens` for other kinds of targets."
            )
        if not labels.dim():
            raise ValueError(
                f"`{name}(shift={self._shift})` found {describe_value(labels)} at {self._where()}; expected shape"
                " [batch_size] or [..., seq_len]."
            )
        if self._shift and labels.dim() < 2:
            decided_by = self.decided_by or ("called without a module" if self.shift == "auto" else "")
            auto = f" (`shift='auto'` means {self._shift} here: {decided_by}.)" if decided_by else ""
            raise ValueError(
                f"`{name}(shift={self._shift})` found {describe_value(labels)} at {self._where()}; expected shape"
                " [..., seq_len] with at least two dimensions, since nothing says where the rows of one-dimensional"
                " labels end. Use `shift=0` if the labels already line up with the logits, else your own"
                f" `count_tokens`.{auto}"
            )
        return labels

    def live(self, labels: Tensor) -> Tensor:
        """Which of the labels that are predicted enter the loss: those of one row, or of all that are not nested."""
        return labels[..., self._shift :] != self.ignore_index

    def _count_live(self, labels: Tensor) -> Tensor:
        return torch.count_nonzero(self.live(labels))

    def find_labels(self, batch: Any) -> Any:
        """The labels of a batch, as they are.

        Args:
            batch: The micro-batch.

        Raises:
            ValueError: The batch holds no such labels.
        """
        return find_in(batch, self.labels, type(self).__name__, "labels")

    @property
    def _shift(self) -> int:
        return 1 if self.shift == "auto" else self.shift

    def _where(self) -> str:
        return f"`labels={self.labels!r}`"


def check_place(where: Any, counter: str, argument: str) -> None:
    """Check an argument that says where in a batch something is, as `find_in` takes it.

    Raises:
        TypeError: It is neither ``str`` nor ``int``.
    """
    if isinstance(where, bool) or not isinstance(where, (str, int)):
        raise TypeError(
            f"`{counter}({argument}=...)` got {where!r}; expected a key or attribute name (str) or an index into the"
            " batch (int)."
        )


def find_in(batch: Any, where: str | int, counter: str, argument: str, what: str = "") -> Any:
    """A part of a batch: by a key of a mapping, an attribute of an object, or an index into a tuple or list.

    Args:
        batch: The micro-batch.
        where: The key, attribute or index.
        counter: The counter that looks for it, for error texts.
        argument: Which of its arguments says where.
        what: What is looked for, where the argument has another name.

    Raises:
        ValueError: There is none.
    """
    try:
        if isinstance(where, int):
            if isinstance(batch, (Mapping, str)):
                raise TypeError
            return batch[where]
        return batch[where] if isinstance(batch, Mapping) else getattr(batch, where)
    except (KeyError, IndexError, AttributeError, TypeError):
        what = what or argument
        raise ValueError(
            f"`{counter}` found no {what} at `{argument}={where!r}`. The batch is {_describe_batch(batch)}."
            f" Point `{counter}({argument}=...)` at the {what}, or pass your own `count_tokens` to the strategy."
        ) from None


def counter_for(counter: TokenCounter, module: nn.Module | None) -> TokenCounter:
    """The counter that fits a module: `SupervisedTokens(shift="auto")` made concrete, any other one as it is.

    Args:
        counter: The counter that was asked for.
        module: The module that is trained, ``None`` where it is not known yet.

    Raises:
        ValueError: As `SupervisedTokens.for_module`.
    """
    for_module = getattr(counter, "for_module", None)
    return counter if module is None or for_module is None else for_module(module)


def describe_counter(counter: TokenCounter) -> str:
    """What a counter counts and why, in a few words.

    Example:
        >>> describe_counter(SupervisedTokens(shift=1))
        'labels after a shift of 1: as given'
        >>> describe_counter(len)
        'what `len` returns'
    """
    if (describe := getattr(counter, "describe", None)) is not None:
        return str(describe())
    if not isinstance(counter, SupervisedTokens):
        return f"what `{getattr(counter, '__qualname__', type(counter).__name__)}` returns"
    labels = f"{counter.counts} labels" if counter.counts else "labels"
    labels = labels if counter.labels == "labels" else f"{labels} at {counter.labels!r}"
    if counter.shift == "auto":
        return f"{labels}, shifted as the module means it"
    shifted = f"after a shift of {counter.shift}" if counter.shift else "without a shift"
    return f"{labels} {shifted}: {counter.decided_by or 'as given'}"


def rows_of(labels: Tensor) -> Sequence[Tensor]:
    """The parts of labels whose last dimension can be cut: the rows of a nested tensor, else the labels at once."""
    return labels.unbind() if labels.is_nested else (labels,)


_SMALLEST_COUNT = 2.0**-100
"""The least count that is not 0: what is left of a loss divided by less does not fit into float32."""

COUNTER_RETURNED = "`count_tokens` returned"
"""Who a count is from, in the text of an error."""


def check_count(value: Any, source: str = COUNTER_RETURNED) -> Count | Tensor:
    """Check the type of a count, without waiting for a device.

    Args:
        value: What is to be a count.
        source: Who it is from, for the text of an error.

    Returns:
        The value; 0-dim CPU tensors and NumPy scalars as Python numbers.

    Raises:
        TypeError: The value is not one number.
    """
    if not isinstance(value, Tensor) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a NumPy scalar, which may be no Python number, or an array of no dimension
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype is not torch.bool and not value.is_complex():
        return value.item() if value.device.type == "cpu" else value.detach()
    if isinstance(value, Mapping):
        raise TypeError(
            f"{source} counts of several heads, {describe_value(value)}; expected one number. Heads are for strategies"
            " and loops of `lightning_tokennorm`, and for `TokenMeanMetric`."
        )
    if not isinstance(value, (bool, Tensor)):
        if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
            return float(value)
        with suppress(TypeError):
            return operator.index(value)
    raise TypeError(
        f"{source} {describe_value(value)}; expected the number of supervised tokens of the batch as an"
        " int, a float (a sum of token weights) or a 0-dim tensor."
    )


def to_host(counts: Sequence[Count | Tensor], source: str = COUNTER_RETURNED) -> tuple[Count, ...]:
    """Bring the counts of a window to the host, in one transfer for all that live on a device.

    Args:
        counts: One count per micro-batch, as `check_count` returns them; tensors are 0-dim.
        source: Who they are from, for the text of an error.

    Returns:
        The counts as finite Python numbers that are not negative.

    Raises:
        ValueError: A count is negative, infinite or NaN, does not fit into 64 bits, or is so small that what is divided
            by it overflows.
    """
    on_device = [count for count in counts if isinstance(count, Tensor)]
    # float64 holds every integer up to 2**53 exactly: far above what one micro-batch can hold
    fetched = iter(torch.stack([count.double() for count in on_device]).tolist() if on_device else ())
    host: list[Count] = []
    for count in counts:
        number: Count = count if not isinstance(count, Tensor) else next(fetched)
        if isinstance(count, Tensor) and not count.is_floating_point():
            number = int(number)
        if not math.isfinite(number) or number < 0 or number >= 2**63:
            raise ValueError(f"{source} {number}; expected a finite count from 0 up to 2**63.")
        if 0 < number < _SMALLEST_COUNT:
            raise ValueError(
                f"{source} {number}; expected 0 or a count from 2**-100 (7.9e-31) upwards: what is divided by less"
                " overflows. Return 0 for a batch that is to weigh nothing, or scale all token weights up."
            )
        host.append(number)
    if sum(host) >= 2**63:
        raise ValueError(f"{source} {sum(host)} in all for one window; expected less than 2**63.")
    return tuple(host)


def describe_value(value: Any) -> str:
    """What a value is, for the text of an error: shape and type of a tensor, else itself and its type."""
    if isinstance(value, Tensor) and value.is_nested:
        return f"a nested tensor of {value.size(0)} rows and dtype {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _describe_batch(batch: Any) -> str:
    """What a batch holds, for the text of an error: names or positions, and the shape of each part."""
    parts: dict[Any, Any]
    if isinstance(batch, Mapping):
        parts = dict(batch)
    elif isinstance(batch, (tuple, list)):
        parts = dict(enumerate(batch))
    elif hasattr(batch, "__dict__") and not isinstance(batch, Tensor):
        parts = vars(batch)
    else:
        return describe_value(batch)
    listed = ", ".join(f"{key!r}: {describe_value(part)}" for key, part in list(parts.items())[:20])
    more = f", and {len(parts) - 20} more" if len(parts) > 20 else ""
    return f"a {type(batch).__name__} that holds {{{listed}{more}}}"
