"""The contestants: each fits the same `Job` and tells a `Probe` when a window starts and when its gradient is complete.

All but plain DDP promise the same law: every supervised token of an update weighs the same.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarking.workload import IGNORE, Batch, Job
from lightning_tokennorm import SupervisedTokens, TokenNormDDP

PLAIN = "DDPStrategy"
TOKENNORM = "TokenNormDDP"
SIGTERM_KEPT = "TokenNormDDP, Lightning's SIGTERM broadcast kept"
BY_HAND = "torch DDP by hand"
HUGGING_FACE = "Hugging Face Trainer"


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Probe:
    """What a contestant calls while it fits."""

    window_starts: Callable[[], None] = _nothing
    """With the first micro-batch of each window in hand."""
    before_step: Callable[[nn.Module], None] = _nothing
    """With the model, when its gradients are complete."""


@dataclass(frozen=True)
class Contestant:
    """A name and a way to fit a job."""

    name: str
    fit: Callable[[Job, Probe], None]


def contestants() -> list[Contestant]:
    """All that can be measured with what is installed."""
    ours = partial(TokenNormDDP, count_tokens=SupervisedTokens(shift=0))
    found = [
        Contestant(PLAIN, partial(fit_lightning, DDPStrategy)),
        Contestant(TOKENNORM, partial(fit_lightning, ours)),
        Contestant(SIGTERM_KEPT, partial(fit_lightning, partial(with_lightnings_sigterm, ours))),
        Contestant(BY_HAND, fit_by_hand),
    ]
    if find_spec("transformers") and find_spec("accelerate"):
        found.append(Contestant(HUGGING_FACE, fit_hugging_face))
    return found


def with_lightnings_sigterm(make_strategy: Callable[[], TokenNormDDP]) -> TokenNormDDP:
    """A strategy that leaves Lightning's broadcast before every micro-batch as it is."""
    strategy = make_strategy()
    strategy.agree_on_sigterm = False
    return strategy


def named(*names: str) -> list[Contestant]:
    """Those of the contestants, in this order."""
    by_name = {contestant.name: contestant for contestant in contestants()}
    return [by_name[name] for name in names]


# ---- Lightning


class CausalLM(pl.LightningModule):
    """An ordinary module that returns the mean loss of its micro-batch."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.new_model()
        self.job = job

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean over the supervised tokens."""
        loss: Tensor = self.model(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The job's."""
        return self.job.new_optimizer(self.model)


class ProbeCallback(pl.Callback):
    """Lightning's hooks to the probe's."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: D102
        window, micro_batch = divmod(batch_idx, trainer.accumulate_grad_batches)
        if micro_batch == 0:
            self.probe.window_starts()
            trainer.should_stop = window == pl_module.job.windows - 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: D102
        self.probe.before_step(pl_module.model)


def fit_lightning(strategy: Callable[..., DDPStrategy], job: Job, probe: Probe) -> None:
    """Fit with a Trainer, on the ranks that exist already."""
    quieten()
    trainer = pl.Trainer(
        accelerator="gpu" if job.device.type == "cuda" else "cpu",
        devices=job.place.ranks_per_node,
        num_nodes=job.world_size // job.place.ranks_per_node,
        precision=job.precision,
        strategy=strategy(),
        accumulate_grad_batches=job.accumulate,
        max_epochs=1,
        callbacks=[ProbeCallback(probe)],
        use_distributed_sampler=False,  # the loader has this rank's share
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(CausalLM(job), job.loader())


def quieten() -> None:
    """Keep the advice of the trainers out of the progress lines: hundreds of fits would repeat it."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


# ---- by hand


def fit_by_hand(job: Job, probe: Probe) -> None:
    """What the law costs without a trainer around it: the limit.

    It reads ahead as far as it has to and no faster than it trains, sends one number per window and waits for no
    device.
    """
    device_ids = [job.device.index] if job.device.type == "cuda" else None
    model = DistributedDataParallel(job.new_model().to(job.device), device_ids=device_ids)
    optimizer = job.new_optimizer(model)
    for number, (num_tokens, window) in enumerate(windows(job.loader(), job.accumulate)):
        total = torch.full((), float(num_tokens), device=job.device)
        dist.all_reduce(total)
        share = total / job.world_size  # DDP divides the ranks' sum by W
        for index, batch in enumerate(window):
            batch = {name: value.to(job.device, non_blocking=True) for name, value in batch.items()}
            if index == 0:
                probe.window_starts()
                if number == job.windows - 1:
                    return
            last = index == job.accumulate - 1
            synced: AbstractContextManager[None] = nullcontext() if last else model.no_sync()
            with synced:
                with job.autocast():
                    loss = model(**batch, num_items_in_batch=share)["loss"]
                loss.backward()
        probe.before_step(model.module)
        optimizer.step()
        optimizer.zero_grad()


def windows(loader: Any, accumulate: int) -> Iterator[tuple[int, Iterator[Batch]]]:
    """Each window's number of supervised tokens and its micro-batches; serving one reads one of the next window."""
    coming = iter(loader)
    ahead = deque(islice(coming, accumulate))

    def serve(size: int) -> Iterator[Batch]:
        for _ in range(size):
            batch = ahead.popleft()
            ahead.extend(islice(coming, 1))
            yield batch

    while ahead:
        yield sum(int((batch["labels"] != IGNORE).sum()) for batch in ahead), serve(len(ahead))


# ---- Hugging Face


def _only_item(items: list[Batch]) -> Batch:
    (item,) = items
    return item


def fit_hugging_face(job: Job, probe: Probe) -> None:
    """Fit with Hugging Face's Trainer and what it has for the same law, left at its defaults where the job allows."""
    import transformers

    quieten()
    transformers.logging.set_verbosity_error()

    class Callback(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            probe.window_starts()
            control.should_training_stop = state.global_step == job.windows - 1

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            probe.before_step(kwargs["model"])

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return range(len(self.train_dataset))  # accelerate gives every W-th micro-batch to a rank

    model = job.new_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            average_tokens_across_devices=True,
            per_device_train_batch_size=1,  # the data set's items are micro-batches already
            gradient_accumulation_steps=job.accumulate,
            max_steps=job.windows,
            bf16=job.precision == "bf16-mixed",
            use_cpu=job.device.type == "cpu",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            dataloader_num_workers=job.num_workers,
            dataloader_pin_memory=job.device.type == "cuda",
            ddp_find_unused_parameters=False,
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = InOrder(
            model,
            arguments,
            train_dataset=job.dataset(),
            data_collator=_only_item,
            optimizers=(job.new_optimizer(model.to(job.device)), None),
            callbacks=[Callback()],
        )
        trainer.remove_callback(transformers.PrinterCallback)  # prints a summary at the end
        trainer.train()
