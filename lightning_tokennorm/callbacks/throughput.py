"""`TokenThroughput`: logs tokens per second over all ranks, padding left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_tokennorm.callbacks.batch_tokens import adds_nothing
from lightning_tokennorm.callbacks.per_update import PerUpdate
from lightning_tokennorm.counting import Count, TokenCounter, check_count

SUPERVISED = "train_supervised_tokens_per_sec"
ALL = "train_tokens_per_sec"


class _Sums(Metric):
    """Supervised tokens, all tokens, seconds and 1, summed over ranks in one collective."""

    full_state_update = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, index: int, value: Count | Tensor) -> None:
        self.sums[index] += value.to(self.sums) if isinstance(value, Tensor) else value

    def compute(self) -> Tensor:
        seconds, ranks = self.sums[2:]
        per_second: Tensor = self.sums[:2] / (seconds / ranks)
        return per_second


class TokenThroughput(PerUpdate):
    """A callback that logs tokens per second of training, over all ranks and under any strategy.

    ===================================  ==========================================================================
    ``train_supervised_tokens_per_sec``  tokens that enter the loss
    ``train_tokens_per_sec``             tokens that the model reads: padding is left out
    ===================================  ==========================================================================

    Each value is a mean over the time since the value before it: from one logged update to the next
    (``Trainer(log_every_n_steps=...)``), loading and the exchange between ranks included, validation left out. Only
    there ranks exchange anything (one collective), and only there the device is waited for. Micro-batches that ranks
    run without data of their own add nothing. Lightning's `ThroughputMonitor`, which counts batches and samples, can
    be used beside it.

    Args:
        count_tokens: Counts the supervised tokens of a batch. Default: the strategy's counter where it has one, else
            `SupervisedTokens()`, which looks at the module.
        count_all_tokens: Counts the tokens of a batch without padding. Default: positions that ``attention_mask`` does
            not mask, else, without one, all of ``input_ids``; where a batch has neither, the second value is not
            logged and a warning says so.

    Raises:
        TypeError: A counter is not callable.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tokennorm import TokenThroughput
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[TokenThroughput()])  # any strategy
    """

    names = (SUPERVISED, ALL)

    def __init__(
        self, *, count_tokens: TokenCounter | None = None, count_all_tokens: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(count_tokens)
        if count_all_tokens is not None and not callable(count_all_tokens):
            raise TypeError(
                f"`TokenThroughput(count_all_tokens=...)` got {count_all_tokens!r}; expected a callable that takes a"
                " batch and returns its number of tokens without padding."
            )
        self._count_all = count_all_tokens or tokens_without_padding
        self._sums = _Sums()
        self._since = 0.0
        self._paused_at = 0.0
        self._misses_all = False

    @override
    def start(self, device: torch.device) -> None:
        self._sums = _Sums().to(device)
        self._since, self._misses_all = time.perf_counter(), False

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if adds_nothing(trainer):
            return
        tokens = self._count_all(batch)
        if tokens is not None:
            self._sums.update(1, check_count(tokens, "`count_all_tokens` returned"))
        elif not self._misses_all:
            self._misses_all = True
            rank_zero_warn(
                f"`TokenThroughput` found neither `attention_mask` nor `input_ids` in a batch, so {ALL!r} is not"
                " logged. Give it `count_all_tokens`, which takes a batch and returns its tokens without padding."
            )

    @override
    def add(self, tokens: Count | Tensor) -> None:
        self._sums.update(0, tokens)

    @override
    def values(self) -> Mapping[str, Tensor | None]:
        self._sums.sums.cpu()  # waits for the device, which has all that came before to do
        now = time.perf_counter()
        self._sums.update(2, now - self._since)
        self._sums.update(3, 1)
        supervised, tokens = self._sums.compute().cpu()
        self._sums.reset()
        self._since = now
        return {SUPERVISED: supervised, ALL: None if self._misses_all else tokens}

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._sums.sums.cpu()
        self._paused_at = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since += time.perf_counter() - self._paused_at


def tokens_without_padding(batch: Any) -> int | Tensor | None:
    """The tokens that a Hugging Face model reads of a batch; ``None`` where the batch does not say.

    Args:
        batch: A mapping, or an object with attributes.

    Returns:
        An ``int`` on the CPU; on another device a 0-dim tensor there, so that nothing waits for it.

    Example:
        >>> tokens_without_padding({"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])})
        4
        >>> tokens_without_padding({"input_ids": torch.zeros(2, 4)})
        8
    """
    mask, ids = (
        batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        for name in ("attention_mask", "input_ids")
    )
    if isinstance(mask, Tensor) and mask.dim() <= 2:  # one of more dimensions says who sees whom
        count = torch.count_nonzero(mask)
        return int(count) if count.device.type == "cpu" else count
    return ids.numel() if isinstance(ids, Tensor) else None
