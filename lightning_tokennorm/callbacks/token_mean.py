"""`TokenMeanMetric`: logs the loss per token, under any strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_tokennorm import _compat
from lightning_tokennorm.callbacks.bars import eval_names, show_short_names, train_names
from lightning_tokennorm.callbacks.batch_sums import BatchSums
from lightning_tokennorm.callbacks.monitors import is_monitored, warn_of_other_monitors
from lightning_tokennorm.callbacks.per_update import StepValue as _StepValue
from lightning_tokennorm.callbacks.per_update import state_device as _state_device
from lightning_tokennorm.counting import SupervisedTokens, TokenCounter, counter_for
from lightning_tokennorm.metric import TokenMean, TokenPerplexity, token_mean
from lightning_tokennorm.window import LossReduction

_NO_STEP = object()


class TokenMeanMetric(Callback):
    """A callback that logs the loss per token: ``sum S / sum N`` over tokens, never a mean of means.

    It reads the loss that ``training_step``, ``validation_step`` and ``test_step`` return (a tensor of one element, or
    a mapping with the key ``"loss"``) and counts the tokens of their batch before the step can change it. Logged are

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
    synchronisation of the device. Where a `ModelCheckpoint`, an `EarlyStopping` or a plateau scheduler monitors the
    value of an update, every update is exchanged, so that none of them finds an older one. A NaN loss stays visible; a
    stage without any token logs NaN.

    Progress bars show short names: ``loss/tok`` for the latest update that was logged, in its place ``epoch/tok`` at an
    epoch's end, ``val/tok``.

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
        self._batch = BatchSums(self._counter, self._reduction)
        self._window = TokenMean()  # this rank's sums over the window in hand
        self._train: dict[str, TokenMean] = {}
        self._train_tokens = _StepValue()
        self._divided_by = 1  # K as it was when Lightning divided the last loss
        self._updates = 0  # as many as were seen
        self._exchanges_all = False
        self._has_step_values = False
        self._undo: Callable[[], None] = _nothing
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
        self._batch = BatchSums(self._counter, self._reduction)
        self._updates, self._divided_by, self._has_step_values = trainer.global_step, 1, False
        self._undo()
        self._undo = _compat.watch_division_of_loss(trainer, self._note_division)
        of_an_update = {"train_tokens", *self._train, *(f"{key}_step" for key in self._train)}
        self._exchanges_all = is_monitored(trainer, of_an_update)
        warn_of_other_monitors(trainer, of_an_update)
        show_short_names(trainer, *train_names(self._names))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._undo()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._undo()

    def _note_division(self, divided_by: int) -> None:
        self._divided_by = divided_by

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window.reset()  # a window that the last epoch left unfinished was never stepped
        for key in self._train:  # the bar shows the mean over the last epoch until here
            trainer.progress_bar_metrics.pop(f"{key}_epoch", None)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not getattr(trainer.strategy, "micro_batch_is_padded", False):
            known = None if self._given_counter else getattr(trainer.strategy, "micro_batch_tokens", None)
            self._batch.before_step(batch, 0 if _is_copy(trainer) else known)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not getattr(trainer.strategy, "micro_batch_is_padded", False):
            sums = self._batch.after_step(outputs, batch, _state_device(pl_module))
            if sums is not None:
                # Lightning hands over the loss divided by K, and nothing else done to it.
                loss_sum = sums[0] * self._divided_by
                for metric in (self._window, *self._train.values()):
                    metric.update(loss_sum, sums[1])
        # Whether the window ended is what Lightning did, not what K says by now: any hook may have changed it.
        ended, self._updates = trainer.global_step != self._updates, trainer.global_step
        if not pl_module.automatic_optimization:
            # where a window may have any number of steps, so only a strategy that knows of windows can tell
            ended = getattr(getattr(trainer.strategy, "window", None), "is_last", True)
        if not ended:
            if self._has_step_values:  # lest Lightning, where K has changed, write them again as the next update's
                self._log_update(pl_module, None)
            return
        # The ranks' sums are exchanged only where the value is logged or looked at. Elsewhere there is no step value,
        # lest an older one be logged again as if it were this update's.
        of_window = None
        if self._exchanges_all or _compat.logs_this_update(trainer):
            with self._window.sync_context():
                # to the host, once: the progress bar reads the value at every micro-batch
                of_window = self._window.loss_sum.cpu(), self._window.count.cpu()
        self._log_update(pl_module, of_window)
        self._window.reset()

    def _log_update(self, pl_module: pl.LightningModule, sums: tuple[Tensor, Tensor] | None) -> None:
        """Log the sums of an update's window, or that there are none."""
        values = {} if sums is None else self._by_key("train", token_mean(*sums))
        for key, metric in self._train.items():
            self._log(pl_module, key, metric, on_epoch=True, step_value=values.get(key))
        self._log(
            pl_module, "train_tokens", self._train_tokens, on_epoch=False, step_value=None if sums is None else sums[1]
        )
        self._has_step_values = sums is not None

    # ---- validation and test

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_eval("val", trainer, pl_module)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_eval("test", trainer, pl_module)

    @override
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._batch.before_step(batch, 0 if _is_copy(trainer) else None)

    on_test_batch_start = on_validation_batch_start

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
        sums = self._batch.after_step(outputs, batch, _state_device(pl_module))
        if sums is None:
            self._eval_has_loss = False
            return
        for metric in self._eval[dataloader_idx].values():
            metric.update(*sums)

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
        self._batch = BatchSums(self._counter, self._reduction)
        self._eval_has_loss = True
        loaders = range(len(self._eval)) if len(self._eval) > 1 else ()
        show_short_names(trainer, eval_names(stage, self._names, {_compat.loader_suffix(i): f"/{i}" for i in loaders}))

    def _end_eval(self, step: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._eval_has_loss:
            rank_zero_warn(
                f"`{type(pl_module).__name__}.{step}` returned no loss for some batches, so `TokenMeanMetric` does not"
                " count them. Return the loss, a tensor of one element, or a dict with the key 'loss'."
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

    @property
    def _names(self) -> list[str]:
        return [self.name, "perplexity"] if self.perplexity else [self.name]

    def _new_metrics(self, stage: str, pl_module: pl.LightningModule) -> dict[str, TokenMean]:
        kinds = dict(zip(self._names, (TokenMean, TokenPerplexity), strict=False))
        return {f"{stage}_{name}": kind().to(_state_device(pl_module)) for name, kind in kinds.items()}

    def _by_key(self, stage: str, mean: Tensor) -> dict[str, Tensor]:
        return {f"{stage}_{self.name}": mean, f"{stage}_perplexity": mean.exp()}

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


def _is_copy(trainer: pl.Trainer) -> bool:
    """Whether another rank of the same model replica counts this rank's batches (tensor parallelism)."""
    return bool(getattr(trainer.strategy, "is_copy", False))


def _nothing() -> None:
    """Nothing to undo."""
