"""`TokenMeanMetric`: logs the loss per token, under any strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_tokennorm import _compat
from lightning_tokennorm.counting import SupervisedTokens, TokenCounter, check_count, counter_for
from lightning_tokennorm.metric import TokenMean, TokenPerplexity, token_mean
from lightning_tokennorm.window import LossReduction

_NO_STEP = object()


class TokenMeanMetric(Callback):
    """A callback that logs the loss per token: ``sum S / sum N`` over tokens, never a mean of means.

    It reads the loss that ``training_step``, ``validation_step`` and ``test_step`` return (a tensor, or a mapping with
    the key ``"loss"``) and counts the tokens of their batch. Logged are

    ========================  =====================================================================================
    ``train_<name>``          one value per optimizer update over its window and all ranks (``_step``), and one over
                              the epoch (``_epoch``), by Lightning's usual rule for names; in the progress bar
    ``train_tokens``          the supervised tokens of the update over its window and all ranks
    ``val_<name>``            over all validation batches and ranks (with several loaders one value each)
    ``test_<name>``           the same for test batches
    ``<stage>_perplexity``    with ``perplexity=True``: ``exp`` of each of the above, under the same rules
    ========================  =====================================================================================

    The factors by which `TokenNormDDP` scales the training loss never enter. Values of an update are exchanged between
    ranks only where Lightning logs it (``Trainer(log_every_n_steps=...)``); the other updates cost no collective and no
    synchronisation of the device. A NaN loss stays visible; a stage without any token logs NaN.

    Lightning's own sampler repeats samples where a data set does not divide by the number of ranks, and a repeated
    sample counts twice: give validation data that divides, or a sampler of your own.

    Args:
        name: What the keys say after the stage.
        count_tokens: Counts the supervised tokens of a batch. Default: the strategy's counter where it has one
            (`TokenNormDDP`), else `SupervisedTokens()`, which looks at the module.
        loss_reduction: Whether the steps return the ``"mean"`` over their batch's tokens or their ``"sum"``. Default:
            the strategy's where it has one, else ``"mean"``.
        perplexity: Whether to log the perplexity, too.

    Raises:
        TypeError: ``count_tokens`` is not callable, or ``name`` is not a string.
        ValueError: ``loss_reduction`` is neither ``"mean"``, ``"sum"`` nor ``None``.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tokennorm import TokenMeanMetric
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[TokenMeanMetric()])  # any strategy
    """

    def __init__(
        self,
        name: str = "loss_per_token",
        *,
        count_tokens: TokenCounter | None = None,
        loss_reduction: LossReduction | None = None,
        perplexity: bool = False,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"`TokenMeanMetric(name=...)` got {name!r}; expected a string.")
        if count_tokens is not None and not callable(count_tokens):
            raise TypeError(
                f"`TokenMeanMetric(count_tokens=...)` got {count_tokens!r}; expected a callable that takes a batch and"
                " returns its number of supervised tokens."
            )
        if loss_reduction not in (None, "mean", "sum"):
            raise ValueError(
                f"`TokenMeanMetric(loss_reduction=...)` got {loss_reduction!r}; expected 'mean', 'sum' or None (as the"
                " strategy has it)."
            )
        self.name = name
        self.perplexity = perplexity
        self._given_counter = count_tokens
        self._given_reduction = loss_reduction
        self._counter: TokenCounter = SupervisedTokens()
        self._reduction: LossReduction = "mean"
        self._window = TokenMean()  # this rank's sums over the window in hand
        self._train: dict[str, TokenMean] = {}
        self._train_tokens = _StepValue()
        self._eval: list[dict[str, TokenMean]] = []  # per loader
        self._eval_has_loss = True

    @property
    @override
    def state_key(self) -> str:
        """Tells several of these callbacks apart in a checkpoint."""
        return self._generate_state_key(name=self.name)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Duck-typed on purpose: under any other strategy the same callback shows what that strategy does.
        self._reduction = self._given_reduction or getattr(trainer.strategy, "loss_reduction", None) or "mean"

    # ---- training

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_counter(trainer, pl_module)
        self._window = TokenMean().to(_state_device(pl_module))
        self._train = self._new_metrics("train", pl_module)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window.reset()  # a window that the last epoch left unfinished was never stepped

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning hands over the loss divided by K, and nothing else done to it.
        divided_by = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        if not getattr(trainer.strategy, "micro_batch_is_padded", False):
            self._add([self._window, *self._train.values()], pl_module, outputs, batch, divided_by)
        if _compat.is_accumulating(trainer):
            return
        # The ranks' sums are exchanged only where the value is logged. Elsewhere there is no step value, lest an older
        # one be logged again as if it were this update's.
        step_values: dict[str, Tensor] = {}
        num_tokens = None
        if _compat.logs_this_update(trainer):
            with self._window.sync_context():
                # to the host, once: the progress bar reads the value at every micro-batch
                loss_sum, num_tokens = self._window.loss_sum.cpu(), self._window.count.cpu()
            step_values = self._by_key("train", token_mean(loss_sum, num_tokens))
        for key, metric in self._train.items():
            self._log(pl_module, key, metric, on_epoch=True, step_value=step_values.get(key))
        self._log(pl_module, "train_tokens", self._train_tokens, on_epoch=False, step_value=num_tokens)
        self._window.reset()

    # ---- validation and test

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_eval("val", trainer, pl_module)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_eval("test", trainer, pl_module)

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._eval_has_loss &= self._add(self._eval[dataloader_idx].values(), pl_module, outputs, batch)

    on_test_batch_end = on_validation_batch_end

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_eval("validation_step", trainer, pl_module)

    @override
    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_eval("test_step", trainer, pl_module)

    def _start_eval(self, stage: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_counter(trainer, pl_module)
        self._eval = [self._new_metrics(stage, pl_module) for _ in range(_compat.num_eval_loaders(trainer))]
        self._eval_has_loss = True

    def _end_eval(self, step: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._eval_has_loss:
            rank_zero_warn(
                f"`{type(pl_module).__name__}.{step}` returned no loss for some batches, so `TokenMeanMetric` does not"
                " count them. Return the loss, or a dict with the key 'loss'."
            )
        # On every rank, also one without a batch: Lightning exchanges the sums of what is logged here.
        for index, metrics in enumerate(self._eval):
            suffix = _compat.loader_suffix(index) if len(self._eval) > 1 else ""
            for key, metric in metrics.items():
                self._log(pl_module, key + suffix, metric, on_epoch=True)

    # ---- shared

    def _take_counter(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not in `setup`: what `configure_model` builds is not there yet, nor has the strategy looked at the module.
        counter = self._given_counter or getattr(trainer.strategy, "count_tokens", None) or SupervisedTokens()
        self._counter = counter_for(counter, pl_module)

    def _new_metrics(self, stage: str, pl_module: pl.LightningModule) -> dict[str, TokenMean]:
        kinds: dict[str, type[TokenMean]] = {f"{stage}_{self.name}": TokenMean}
        if self.perplexity:
            kinds[f"{stage}_perplexity"] = TokenPerplexity
        return {key: kind().to(_state_device(pl_module)) for key, kind in kinds.items()}

    def _by_key(self, stage: str, mean: Tensor) -> dict[str, Tensor]:
        return {f"{stage}_{self.name}": mean, f"{stage}_perplexity": mean.exp()}

    def _add(
        self,
        metrics: Iterable[TokenMean],
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        divided_by: int = 1,
    ) -> bool:
        """Add a batch to metrics; without a loss to add, return False."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            return False
        num_tokens = check_count(self._counter(batch))
        loss_sum = loss.detach().to(_state_device(pl_module)).double() * divided_by
        if self._reduction == "mean":
            loss_sum = loss_sum * num_tokens
        # The mean over no token is NaN, and NaN * 0 is NaN: the sum over none is replaced by 0, not multiplied.
        if isinstance(num_tokens, Tensor):
            loss_sum = torch.where(num_tokens > 0, loss_sum, 0.0)  # on the device, without waiting for it
        elif num_tokens == 0:
            loss_sum = torch.zeros_like(loss_sum)
        for metric in metrics:
            metric.update(loss_sum, num_tokens)
        return True

    def _log(
        self, pl_module: pl.LightningModule, key: str, metric: Metric, *, on_epoch: bool, step_value: Any = _NO_STEP
    ) -> None:
        on_step = step_value is not _NO_STEP
        if on_step:
            _compat.set_step_value(metric, step_value)
        pl_module.log(
            key,
            metric,
            prog_bar=key != "train_tokens",
            on_step=on_step,
            on_epoch=on_epoch,
            batch_size=1,  # not used for metrics; given so that Lightning does not look for one in the batch
            add_dataloader_idx=False,
            metric_attribute=key,  # tells Lightning that this is not an attribute of the module
        )


class _StepValue(Metric):
    """Holds a value that is logged by step and has no meaning over an epoch."""

    def update(self) -> None:
        """Nothing is accumulated."""

    def compute(self) -> Tensor:
        """There is no value over an epoch."""
        return torch.tensor(torch.nan)


def _state_device(pl_module: pl.LightningModule) -> torch.device:
    # float64 sums live beside the loss, except on a device that has no float64
    return torch.device("cpu") if pl_module.device.type == "mps" else pl_module.device
