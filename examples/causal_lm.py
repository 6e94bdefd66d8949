"""The Lightning side of the fine-tuning example: module, data, progress bar, one run.

Everything about the weight of a token is in the two lines marked below. The module is an ordinary one that returns
the mean loss of its micro-batch.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from chat_data import IGNORE_INDEX, Sample
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from options import InputError, Options
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP


class CausalLM(LightningModule):
    """Any Hugging Face causal language model.

    Args:
        model: The model; its forward returns the mean loss over the supervised tokens of the micro-batch.
        lr: Learning rate of AdamW.
    """

    def __init__(self, model: PreTrainedModel, lr: float) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.validated_after = -1
        """Number of updates that the last validation came after."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean loss of a micro-batch, as in any other module."""
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean loss of a micro-batch; `TokenMeanMetric` makes the mean over all tokens of it."""
        return self.training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Log validation at the number of updates done (Lightning would take one less in the middle of a fit)."""
        self.validated_after = self.trainer.global_step
        self.log("step", float(self.validated_after), sync_dist=True)  # the same on all ranks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with a constant learning rate."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr, weight_decay=0.0)


class ChatData(LightningDataModule):
    """Padded micro-batches of the samples, shared out to the ranks.

    Args:
        training: Samples to train on; a rank sees each of its own once per epoch.
        validation: Samples to validate on.
        micro_batch: Samples per micro-batch.
        pad_id: Token id for padding; attention never looks at it.
        seed: Seed of the training order.
    """

    def __init__(
        self, training: Sequence[Sample], validation: Sequence[Sample], micro_batch: int, pad_id: int, seed: int
    ) -> None:
        super().__init__()
        self.training = training
        self.validation = validation
        self.micro_batch = micro_batch
        self.pad_id = pad_id
        self.seed = seed

    def train_dataloader(self) -> DataLoader[Any]:
        """This rank's share, in another order in each epoch."""
        return self._train_loader(*self._ranks())

    def micro_batches_of_all_ranks(self, world_size: int) -> Iterator[dict[str, Tensor]]:
        """The micro-batches of the first epoch, of one rank after the other: as `token_weight_report` takes them."""
        for each_rank in zip(*(self._train_loader(world_size, rank) for rank in range(world_size)), strict=True):
            yield from each_rank

    def _train_loader(self, world_size: int, rank: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            self.training,  # type: ignore[arg-type]
            num_replicas=world_size,
            rank=rank,
            seed=self.seed,
            drop_last=True,  # else it repeats samples to make the ranks even
        )
        return self._loader(self.training, sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        """This rank's share: every sample on exactly one rank, so the loss is the same for any number of ranks."""
        world_size, rank = self._ranks()
        return self._loader(self.validation[rank::world_size])

    def _ranks(self) -> tuple[int, int]:
        assert self.trainer is not None
        return self.trainer.world_size, self.trainer.global_rank

    def _loader(self, samples: Sequence[Sample], sampler: DistributedSampler[Any] | None = None) -> DataLoader[Any]:
        return DataLoader(
            samples,  # type: ignore[arg-type]
            batch_size=self.micro_batch,
            sampler=sampler,
            collate_fn=lambda micro_batch: collate(micro_batch, self.pad_id),
        )


def collate(samples: Sequence[Sample], pad_id: int) -> dict[str, Tensor]:
    """A micro-batch, padded on the right to its longest sample.

    Args:
        samples: The samples of the micro-batch.
        pad_id: Token id for padding.

    Returns:
        `input_ids`, `attention_mask` and `labels`, each int64 of shape `[samples, tokens]`.
    """
    length = max(len(sample.input_ids) for sample in samples)

    def padded(rows: list[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (length - len(row)) for row in rows])

    return {
        "input_ids": padded([sample.input_ids for sample in samples], pad_id),
        "attention_mask": padded([[1] * len(sample.input_ids) for sample in samples], 0),
        "labels": padded([sample.labels for sample in samples], IGNORE_INDEX),
    }


class Throughput(Callback):
    """Counts the tokens that were trained on, padding left out, and the time that took, validation left out."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of all ranks, known after the training."""
        self.seconds = 0.0
        """Time from the first micro-batch to the last."""
        self._since = 0.0
        self._local_tokens = torch.zeros((), dtype=torch.int64)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self._local_tokens = self._local_tokens.to(pl_module.device)
        self._since = time.monotonic()

    def on_train_batch_end(  # noqa: D102
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._local_tokens += batch["attention_mask"].sum()  # stays on the device: nothing waits for it

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        if trainer.state.fn == TrainerFn.FITTING:
            self.seconds += time.monotonic() - self._since

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self._since = time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self.seconds += time.monotonic() - self._since
        self.tokens = int(trainer.strategy.reduce(self._local_tokens, reduce_op="sum"))


class LossBar(TQDMProgressBar):
    """Lightning's progress bar, made to count to the right end, and without the empty version number of the run."""

    @property
    def total_train_batches(self) -> int | float:
        """Micro-batches of this epoch; Lightning takes the updates that remain for micro-batches."""
        remaining = (self.trainer.max_steps - self.trainer.global_step) * self.trainer.accumulate_grad_batches
        return min(self.trainer.num_training_batches, remaining)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:  # noqa: D102
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}


@dataclass(frozen=True)
class Outcome:
    """What one run has to tell beside the files that it wrote."""

    world_size: int
    """Number of ranks."""
    on_gpu: bool
    """Whether the ranks had a GPU each."""
    tokens_per_second: float
    """All tokens of all ranks without padding, validation left out."""
    training_seconds: float
    """Time in the training loop, validation left out."""
    answer_before: str
    """The model's answer to the first validation prompt, before the training; empty on other ranks than zero."""
    answer_after: str
    """The same after it."""
    is_rank_zero: bool
    """Whether this process is the one that writes."""


def num_devices(options: Options) -> int:
    """Number of ranks to use.

    Raises:
        InputError: The options do not fit this machine.
    """
    gpus = torch.cuda.device_count()
    if gpus and options.devices is not None and options.devices > gpus:
        raise InputError(f"--devices {options.devices}: expected at most {gpus}, the number of GPUs here")
    if not gpus and options.precision == "16-mixed":
        raise InputError("--precision 16-mixed: needs a GPU, expected 32-true or bf16-mixed")
    return options.devices or gpus or 2


def finetune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    training: Sequence[Sample],
    validation: Sequence[Sample],
    devices: int,
    options: Options,
) -> Outcome:
    """Validate, train, validate.

    Args:
        model: The model, changed in place.
        tokenizer: Its tokenizer.
        training: Samples to train on.
        validation: Samples to validate on, at least one per rank.
        devices: Number of ranks.
        options: What the user asked for; the run's folder gets `metrics.csv` and `hparams.yaml`.
    """
    _quieten_lightning()
    seed_everything(options.seed, verbose=False)  # for models with dropout
    on_gpu = torch.cuda.is_available()
    module = CausalLM(model, options.lr)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    data = ChatData(training, validation, options.micro_batch, int(pad_id), options.seed)
    logger = CSVLogger(options.output.parent, name=options.output.name, version="", flush_logs_every_n_steps=1)
    throughput = Throughput()
    micro_batches = math.ceil(len(training) // devices / options.micro_batch)
    trainer = Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=devices,
        precision=options.precision or ("bf16-mixed" if on_gpu else "32-true"),  # type: ignore[arg-type]
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        max_steps=options.steps,
        # the epoch ends with the run, where it would be longer: so the progress bar counts to the end of the run
        limit_train_batches=min(micro_batches, options.steps * options.accumulate),
        val_check_interval=options.accumulate * math.ceil(options.steps / 2),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        # these two lines make every supervised token weigh the same, and show the loss per token
        strategy=TokenNormDDP(gradient_as_bucket_view=True),
        callbacks=[TokenMeanMetric(), throughput, LossBar()],
        use_distributed_sampler=False,  # `ChatData` shares the samples out
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,  # the model is saved as Hugging Face has it, at the end
        enable_model_summary=False,
    )
    logger.log_hyperparams({name: str(value) for name, value in vars(options).items()})

    answer_before = answer(model, tokenizer, validation[0], trainer)
    losses = trainer.validate(module, data, verbose=False)[0]
    if trainer.is_global_zero:
        print(f"Validation loss per token before the training: {losses['val_loss_per_token']:.4f}", flush=True)
    trainer.fit(module, data)
    if module.validated_after != trainer.global_step:
        trainer.validate(module, data, verbose=False)
    return Outcome(
        world_size=trainer.world_size,
        on_gpu=on_gpu,
        tokens_per_second=throughput.tokens / throughput.seconds,
        training_seconds=throughput.seconds,
        answer_before=answer_before,
        answer_after=answer(model, tokenizer, validation[0], trainer),
        is_rank_zero=trainer.is_global_zero,
    )


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample, trainer: Trainer) -> str:
    """The model's own first answer in place of the one in the sample, at most 48 tokens of it; rank zero only.

    Each token is the most likely one, so that the answers before and after the training can be compared.
    """
    if not trainer.is_global_zero:
        return ""
    device = trainer.strategy.root_device
    model.to(device).eval()  # type: ignore[arg-type]
    prompt = torch.tensor([sample.input_ids[: sample.first_answer]], device=device)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize)
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(48, context - prompt.shape[1]),
            do_sample=False,
        )
    model.train()
    return str(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)).strip()


def _quieten_lightning() -> None:
    # advice that does not fit here: the samples lie in memory
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Lightning calls what newer versions of torch would like to be called otherwise
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*", category=FutureWarning)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not any(text in record.getMessage() for text in ("TPU available", "litlogger", "litmodels"))
    )
