"""`TokenMeanMetric`: logs the loss per token, under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
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
from lightning_tokennorm.callbacks.stage_means import StageMeans
from lightning_tokennorm.counting import SupervisedTokens, TokenCounter, counter_for
from lightning_tokennorm.heads import ONE_LOSS, names_of
from lightning_tokennorm.metric import TokenMean
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
        self._window: dict[str, TokenMean] = {}  # this rank's sums over the window in hand, by head
        self._train = StageMeans("train", name, perplexity, {}, torch.device("cpu"))
        self._train_tokens = _StepValue()
        self._divided_by = 1  # K as it was when Lightning divided the last loss
        self._updates = 0  # as many as were seen
        self._exchanges_all = False
        self._has_step_values = False
        self._undo: Callable[[], None] = _nothing
        self._eval: list[StageMeans] = []  # per loader
        self._train_has_loss = False
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
        self._window = {}
        self._train = self._new_means("train", trainer, pl_module)
        self._batch = BatchSums(self._counter, self._reduction)
        self._updates, self._divided_by, self._has_step_values = trainer.global_step, 1, False
        self._undo()
        self._undo = _compat.watch_division_of_loss(trainer, self._note_division)
        self._exchanges_all = self._train_has_loss = False
        self._look_for_monitors(trainer, {"train_tokens", *self._train.main_keys})
        self._take_heads(trainer, names_of(self._counter) or ())
        show_short_names(trainer, *train_names(self._names))

    def _look_for_monitors(self, trainer: pl.Trainer, keys: Set[str]) -> None:
        of_an_update = {*keys, *(f"{key}_step" for key in keys)}
        self._exchanges_all |= is_monitored(trainer, of_an_update)
        warn_of_other_monitors(trainer, of_an_update)

    def _take_heads(self, trainer: pl.Trainer, heads: Iterable[str]) -> None:
        if self._train.take_heads(heads):
            self._look_for_monitors(trainer, self._train.logged.keys() - set(self._train.main_keys))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._train_has_loss and trainer.global_step:  # as modules do that optimize by themselves
            rank_zero_warn(
                f"`{type(pl_module).__name__}.training_step` returned no loss, so `TokenMeanMetric` has counted"
                " nothing. Return the loss, a tensor of one element, or a dict with the key 'loss'; with manual"
                " optimization, too."
            )
        self._undo()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._undo()

    def _note_division(self, divided_by: int) -> None:
        self._divided_by = divided_by

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window = {}  # one that the last epoch left unfinished was never stepped
        for key in self._train.logged:  # the bar shows the mean over the last epoch until here
            trainer.progress_bar_metrics.pop(f"{key}_epoch", None)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        known: Any = None
        if not self._given_counter:
            # The heads that all ranks know of, whether this one's batch has them or not.
            plan = getattr(getattr(trainer.strategy, "window", None), "plan", None)
            self._take_heads(trainer, () if plan is None else plan.heads or (ONE_LOSS,))
            known = getattr(trainer.strategy, "micro_batch_heads", None) or getattr(
                trainer.strategy, "micro_batch_tokens", None
            )
        if not getattr(trainer.strategy, "micro_batch_is_padded", False):
            self._batch.before_step(batch, known, counts=not _is_copy(trainer))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not getattr(trainer.strategy, "micro_batch_is_padded", False):
            device = _state_device(pl_module)
            sums = self._batch.after_step(outputs, batch, device)
            if sums is not None:
                self._train_has_loss = True
                if ONE_LOSS in sums:  # of which Lightning hands over what is divided by K
                    sums = {ONE_LOSS: (sums[ONE_LOSS][0] * self._divided_by, sums[ONE_LOSS][1])}
                refuse_unknown_heads(sums, names_of(self._counter), trainer)
                self._take_heads(trainer, sums)
                self._train.update(sums)
                for head, of_batch in sums.items():
                    self._window_of(head, device).update(*of_batch)
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
            of_window = {}
            for head in self._train.heads or (ONE_LOSS,):
                mean = self._window_of(head, _state_device(pl_module))
                with mean.sync_context():
                    # to the host, once: the progress bar reads the value at every micro-batch
                    of_window[head] = mean.loss_sum.cpu(), mean.count.cpu()
        self._log_update(pl_module, of_window)
        self._window = {}

    def _window_of(self, head: str, device: torch.device) -> TokenMean:
        if head not in self._window:
            self._window[head] = TokenMean().to(device)
        return self._window[head]

    def _log_update(self, pl_module: pl.LightningModule, sums: Mapping[str, tuple[Tensor, Tensor]] | None) -> None:
        """Log the sums of an update's window, or that there are none."""
        if not self._train.heads:  # no step has returned a loss
            self._train.take_heads((ONE_LOSS,))
        values = {} if sums is None else self._train.values_of(sums)
        for key, metric in self._train.logged.items():
            self._log(pl_module, key, metric, on_epoch=True, step_value=values.get(key))
        tokens = None if sums is None else sum(count for _, count in sums.values())
        self._log(pl_module, "train_tokens", self._train_tokens, on_epoch=False, step_value=tokens)
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
        self._batch.before_step(batch, counts=not _is_copy(trainer))

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
        self._eval[dataloader_idx].take_heads(sums)
        self._eval[dataloader_idx].update(sums)

    on_test_batch_end = on_validation_batch_end

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_eval("validation_step", trainer, pl_module)

    @override
    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_eval("test_step", trainer, pl_module)

    def _start_eval(self, stage: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_counter(trainer, pl_module)
        self._eval = [self._new_means(stage, trainer, pl_module) for _ in range(_compat.num_eval_loaders(trainer))]
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
        known = names_of(self._counter)
        seen = [known or each.heads for each in self._eval]
        for index, (means, heads) in enumerate(zip(self._eval, seen if known else all_names(seen), strict=True)):
            means.take_heads(heads or (ONE_LOSS,))
            suffix = _compat.loader_suffix(index) if len(self._eval) > 1 else ""
            for key, metric in means.logged.items():
                self._log(pl_module, key + suffix, metric, on_epoch=True)

    # ---- shared

    def _take_counter(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not in `setup`: what `configure_model` builds is not there yet, nor has the strategy looked at the module.
        counter = self._given_counter or getattr(trainer.strategy, "count_tokens", None) or SupervisedTokens()
        self._counter = counter_for(counter, pl_module)

    @property
    def _names(self) -> list[str]:
        return [self.name, "perplexity"] if self.perplexity else [self.name]

    def _new_means(self, stage: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> StageMeans:
        weights = getattr(trainer.strategy, "head_weights", None) or {}
        return StageMeans(stage, self.name, self.perplexity, weights, _state_device(pl_module))

    def _log(
        self, pl_module: pl.LightningModule, key: str, metric: Metric, *, on_epoch: bool, step_value: Any = _NO_STEP
    ) -> None:
        on_step = step_value is not _NO_STEP
        if on_step:
            _compat.set_step_value(metric, step_value)
        pl_module.log(
            key,
            metric,
            prog_bar=any(
                key.startswith(f"{stage}_{name}") for stage in ("train", "val", "test") for name in self._names
            ),
            on_step=on_step,
            on_epoch=on_epoch,
            batch_size=1,  # not used for metrics; given so that Lightning does not look for one in the batch
            add_dataloader_idx=False,
            metric_attribute=key,  # tells Lightning that this is not an attribute of the module
        )


def _is_copy(trainer: pl.Trainer) -> bool:
    """Whether another rank of the same model replica counts this rank's batches (tensor parallelism)."""
    return bool(getattr(trainer.strategy, "is_copy", False))


def all_names(names: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The names that some rank has seen, by loader; called by all ranks."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return names
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, names)
    return [tuple(sorted({name for rank in told for name in rank[index]})) for index in range(len(names))]


def refuse_unknown_heads(sums: Mapping[str, Any], known: tuple[str, ...] | None, trainer: pl.Trainer) -> None:
    """Refuse heads that other ranks may not know of, in whose exchange nobody would join."""
    if known is None and ONE_LOSS not in sums and not hasattr(trainer.strategy, "micro_batch_heads"):
        raise TypeError(
            f"`TokenMeanMetric` got counts of the heads {', '.join(sums)} from a counter that does not say their names"
            f" beforehand, under `{type(trainer.strategy).__name__}`, where ranks do not agree on them. Use"
            " `count_tokens=Heads(...)`."
        )


def _nothing() -> None:
    """Nothing to undo."""
