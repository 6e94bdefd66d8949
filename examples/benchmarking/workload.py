"""What every contestant trains: one causal transformer, one set of micro-batches, one optimizer, and how much of it.

The model returns the mean loss of a micro-batch, as a user's model does. Handed `num_items_in_batch` it returns the
loss sum over that number instead: the convention of Hugging Face's Trainer, which a loop by hand can use as well.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from benchmarking.presets import Precision, Size

IGNORE = -100
"""Label of a position that is not supervised."""
POOL_ROWS = 64
"""Rows that a long run's micro-batches are cut from, over and over."""

Batch = dict[str, Tensor]


class Block(nn.Module):
    """Causal self-attention and a feed-forward network of four times the width, both behind a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.ffn = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states of shape ``[rows, length, hidden]`` to the next ones."""
        rows, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, hidden))
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """A causal language model without dropout, so that every split of the rows is the same function.

    Args:
        size: The model.
        sleep_s: How long a forward takes besides, in seconds, and without the CPU: as if a device computed.
    """

    def __init__(self, size: Size, sleep_s: float = 0.0) -> None:
        super().__init__()
        self.sleep_s = sleep_s
        self.embed = nn.Embedding(size.vocabulary, size.hidden)
        self.position = nn.Embedding(size.length, size.hidden)
        self.blocks = nn.Sequential(*(Block(size.hidden, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        for embedding in (self.embed, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    # Hugging Face's Trainer hands over `num_items_in_batch` where there are open keywords.
    def forward(self, input_ids: Tensor, labels: Tensor, **loss_options: Any) -> dict[str, Tensor]:
        """The loss, from ids and labels of shape ``[rows, length]`` that line up."""
        if self.sleep_s:
            time.sleep(self.sleep_s)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.blocks(self.embed(input_ids) + self.position(positions))
        logits = self.head(self.norm(x)).flatten(0, 1)
        return {"loss": token_loss(logits, labels.flatten(), loss_options.get("num_items_in_batch"))}


class NoOp(nn.Module):
    """A model with next to nothing to compute: what is left of the time of a micro-batch is the trainer's.

    Args:
        sleep_s: How long a forward takes all the same, in seconds, and without the CPU.
    """

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.sleep_s = sleep_s

    def forward(self, input_ids: Tensor, labels: Tensor, **loss_options: Any) -> dict[str, Tensor]:
        """A loss of zero."""
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return {"loss": self.weight * 1.0}


def token_loss(logits: Tensor, labels: Tensor, num_tokens: Tensor | None) -> Tensor:
    """The mean over the supervised tokens, or their sum over `num_tokens`; not narrower than float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if num_tokens is None:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE)
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / num_tokens


def make_rows(num_rows: int, size: Size) -> Batch:
    """Rows of random ids that predict the next one; every eighth pattern of masked ends comes again.

    Row ``i`` of 512 positions has its last ``31 * (i % 8)`` targets masked, and shorter rows in proportion: of eight
    such rows 3228 of 4096 targets are supervised, and the split of rows decides what a micro-batch's mean is over.
    """
    ids = torch.randint(size.vocabulary, (num_rows, size.length + 1), generator=torch.Generator().manual_seed(2026))
    labels = ids[:, 1:].clone()
    for row in range(num_rows):
        masked = 31 * (row % 8) * size.length // 512
        labels[row, size.length - masked :] = IGNORE
    return {"input_ids": ids[:, :-1].clone(), "labels": labels}


class MicroBatches(Dataset[Batch]):
    """Micro-batches cut from rows in order, over and over; item ``i`` belongs to rank ``i % W``.

    Args:
        rows: The rows, a multiple of `micro_batch` of them.
        micro_batch: Rows per micro-batch.
        count: Micro-batches in all, of all ranks.
        load_s: How long a micro-batch takes to load, in seconds.
    """

    def __init__(self, rows: Batch, micro_batch: int, count: int, load_s: float = 0.0) -> None:
        parts = {name: value.split(micro_batch) for name, value in rows.items()}
        self.items = [{name: part[index] for name, part in parts.items()} for index in range(len(parts["labels"]))]
        self.count = count
        self.load_s = load_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        if self.load_s:
            time.sleep(self.load_s)
        return self.items[index % len(self.items)]


@dataclass(frozen=True)
class Place:
    """The process that fits, and the processes that fit with it."""

    rank: int
    world_size: int
    ranks_per_node: int
    device: torch.device


@dataclass(frozen=True)
class Job:
    """One fit, the same for every contestant."""

    place: Place
    size: Size | None
    """The transformer; None is the model that does nothing."""
    rows: Batch
    micro_batch: int
    """Rows per micro-batch."""
    accumulate: int
    """Micro-batches per update and rank (K)."""
    windows: int
    """Windows that are begun. The last only ends the time of the one before it: the fit stops within."""
    precision: Precision = "32-true"
    sleep_s: float = 0.0
    """How long a forward sleeps, in seconds."""
    load_s: float = 0.0
    """How long a micro-batch takes to load, in seconds; where it takes time a worker process loads."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.place.device

    @property
    def world_size(self) -> int:
        """Ranks that share an update (W)."""
        return self.place.world_size

    @property
    def tokens_per_update(self) -> int:
        """Positions of an update's rows over all ranks, supervised or not."""
        return self.world_size * self.accumulate * self.micro_batch * self.rows["labels"].shape[1]

    @property
    def num_workers(self) -> int:
        """Worker processes of a rank's loader."""
        return 1 if self.load_s else 0

    def new_model(self) -> nn.Module:
        """The model with its first weights, the same on every call and rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(42)
            return NoOp(self.sleep_s) if self.size is None else Transformer(self.size, self.sleep_s)

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, neither fused nor foreach, as the reference numbers have it."""
        return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def dataset(self) -> MicroBatches:
        """The micro-batches of all ranks; there are more, so that nobody sees the end of the data and shuts down."""
        count = self.world_size * self.accumulate * (self.windows + 2)
        return MicroBatches(self.rows, self.micro_batch, count, self.load_s)

    def loader(self) -> DataLoader[Any]:
        """This rank's micro-batches."""
        dataset = self.dataset()
        share = range(self.place.rank, len(dataset), self.world_size)
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=share,
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of a forward."""
        if self.precision == "32-true":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def first_window(self) -> list[Batch]:
        """The micro-batches of the first update, of all ranks."""
        dataset = MicroBatches(self.rows, self.micro_batch, self.world_size * self.accumulate)
        return [{name: value.to(self.device) for name, value in dataset[i].items()} for i in range(len(dataset))]


def merged_gradient(job: Job, *, double: bool) -> Tensor:
    """The gradient of the first update in one process, ``(sum of all tokens' loss gradients) / N``, flat.

    Args:
        job: Whose first window is meant.
        double: In float64, micro-batch by micro-batch; else in the job's precision, all rows in one batch.
    """
    model = job.new_model().to(job.device, torch.float64 if double else torch.float32)
    window = job.first_window()
    if double:
        num_tokens = sum((batch["labels"] != IGNORE).sum() for batch in window)
        for batch in window:
            model(**batch, num_items_in_batch=num_tokens)["loss"].backward()
    else:
        merged = {name: torch.cat([batch[name] for batch in window]) for name in window[0]}
        with job.autocast():
            loss = model(**merged)["loss"]
        loss.backward()
    return flat_gradient(model)


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients of a model, whole where they lie in shards, in one vector of float64, on the CPU."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        gradients = [parameter.grad for parameter in model.parameters()]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients if each is not None]
        return torch.cat([gradient.detach().flatten().double().cpu() for gradient in whole])
