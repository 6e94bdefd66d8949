"""`TokenNormFSDP` on real processes: the law for each way to shard, and where sharding makes a difference.

Most cases share one pair of processes: to start them takes longer than to train.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import wrap

from lightning_tokennorm import TokenNormFSDP
from tests.helpers import law
from tests.helpers.launch import run_ranks
from tests.helpers.law import Case, Module
from tests.helpers.tiny_lm import num_supervised

BLOCKS: dict[str, Any] = {"auto_wrap_policy": {nn.TransformerEncoderLayer}}
PIECES: dict[str, Any] = {"auto_wrap_policy": {nn.TransformerEncoderLayer, nn.Embedding}}
ONCE: dict[str, Any] = {"sync_each_micro_batch": False}
HAND = "hand-written"
UNEVEN = {"lengths": (5, 2), "empty": ((0, 1),)}
EMPTY_RANK = {"empty": tuple((1, index) for index in range(5))}
EMPTY_WINDOW = {"empty": tuple((rank, index) for rank in range(2) for index in range(3))}


class Float64(FSDPPrecision):
    """Lightning's plugin casts to float32, in which the law cannot be seen to 1e-12."""

    def __init__(self) -> None:
        super().__init__("32-true")
        self._desired_input_dtype = torch.float64

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        return MixedPrecision(torch.float64, torch.float64, torch.float64)


class PlainFSDP(FSDPStrategy):
    """Lightning's own on the CPU, for which it passes a device that torch refuses."""

    def _setup_model(self, model: Any) -> Any:
        model = FullyShardedDataParallel(
            model,
            device_id=self.root_device,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            **self.kwargs,
        )
        self.kwargs.pop("auto_wrap_policy", None)
        return super()._setup_model(model)


class FlatOptimizer(Module):
    """As `use_orig_params=False` wants it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=self.lr)


class WithoutLabels(Module):
    """Treats a batch without labels in one of the ways that people write."""

    def __init__(self, way: str) -> None:
        super().__init__(lr=law.LR)
        self.way = way

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if num_supervised(batch):
            return super().training_step(batch, batch_idx)
        if "forward" in self.way:
            self.model(batch["input_ids"])
        zero = torch.zeros((), dtype=torch.float64, requires_grad="leaf" in self.way)
        return None if "none" in self.way else {"loss": zero} if "dict" in self.way else zero


class WrapsItself(Module):
    """Wraps parts of itself in `configure_model`, so that the whole is not wrapped."""

    def __init__(self, parts: str = "all") -> None:
        super().__init__(lr=law.LR)
        self.parts = parts

    def configure_model(self) -> None:
        self.model.block = wrap(self.model.block)
        if self.parts == "all":
            self.model.embed, self.model.head = wrap(self.model.embed), wrap(self.model.head)


MODULES = {"FlatOptimizer": FlatOptimizer, "WrapsItself": WrapsItself}

LAW: dict[str, tuple[Case, dict[str, Any], str]] = {
    "K=1": (Case(accumulate=1), {}, ""),
    "K=1, once": (Case(accumulate=1, loss=HAND), {**BLOCKS, **ONCE}, ""),
    "K=2, sum": (Case(accumulate=2, loss="sum"), BLOCKS, ""),
    "K=2, sum, stream, once": (Case(accumulate=2, loss="sum", stream=True), {**PIECES, **ONCE}, ""),
    "K=3, sum": (Case(loss="sum"), {}, ""),
    "K=3": (Case(loss=HAND), PIECES, ""),
    "K=3, stream": (Case(loss=HAND, stream=True), BLOCKS, ""),
    "K=3, once": (Case(loss=HAND), {**BLOCKS, **ONCE}, ""),
    "K=3, one unit, once": (Case(loss=HAND), ONCE, ""),
    "rank without a token": (Case(loss=HAND, **EMPTY_RANK), {**BLOCKS, **ONCE}, ""),
    "window without a token": (Case(loss=HAND, **EMPTY_WINDOW), BLOCKS, ""),
    "unequal ranks": (Case(loss=HAND, **UNEVEN), BLOCKS, ""),
    "unequal ranks, once": (Case(**UNEVEN), {**PIECES, **ONCE}, ""),
    "unequal streams": (Case(**UNEVEN, stream=True), {}, ""),
    "gradients sharded": (Case(loss=HAND), {"sharding_strategy": "SHARD_GRAD_OP", **BLOCKS}, ""),
    "gradients sharded, unequal, once": (
        Case(loss=HAND, **UNEVEN),
        {"sharding_strategy": "SHARD_GRAD_OP", **BLOCKS, **ONCE},
        "",
    ),
    "nothing sharded": (Case(loss=HAND, **UNEVEN), {"sharding_strategy": "NO_SHARD", **BLOCKS}, ""),
    "nothing sharded, once": (Case(loss=HAND), {"sharding_strategy": "NO_SHARD", **BLOCKS, **ONCE}, ""),
    "flat parameters": (Case(loss=HAND), {"use_orig_params": False, **BLOCKS}, "FlatOptimizer"),
    "flat parameters, unequal, once": (
        Case(**UNEVEN),
        {"use_orig_params": False, **BLOCKS, **ONCE},
        "FlatOptimizer",
    ),
    "checkpoints": (
        Case(loss=HAND),
        {"activation_checkpointing_policy": {nn.TransformerEncoderLayer}, **BLOCKS},
        "",
    ),
    "wraps itself": (Case(), {}, "WrapsItself"),
    "wraps itself, unequal, once": (Case(**UNEVEN), ONCE, "WrapsItself"),
}
for way in ("forward, dict", "forward, none", "forward, leaf", "dict", "none"):
    LAW[f"no labels: {way}"] = (Case(lengths=(4, 4), empty=((0, 1), (1, 2), (1, 3))), BLOCKS, f"way:{way}")
LAW["no labels: one unit"] = (Case(empty=((0, 0), (1, 2))), {}, "way:zero")
LAW["no labels: once"] = (Case(empty=((0, 1), (1, 2), (1, 4))), {**PIECES, **ONCE}, "way:zero")


def make_module(name: str, case: Case) -> Module:
    if name.startswith("way:"):
        return WithoutLabels(name.removeprefix("way:"))
    module = MODULES.get(name, Module)()
    module.loss_kind, module.lr = case.loss, law.LR
    return module


def fit_all(rank: int, world_size: int, cases: dict[str, tuple[Case, dict[str, Any], str]]) -> dict[str, list[Tensor]]:
    """The gradients of each case."""
    gradients = {}
    for name, (case, options, module) in cases.items():
        strategy = TokenNormFSDP(loss_reduction="sum" if case.loss == "sum" else "mean", **options)
        try:
            gradients[name] = law.fit(
                rank, world_size, case, strategy, make_module(module, case), plugins=[Float64()]
            )
        except Exception as raised:
            raise AssertionError(f"case {name!r}") from raised
    return gradients


@pytest.fixture(scope="module")
def pair() -> list[dict[str, list[Tensor]]]:
    return run_ranks(fit_all, 2, LAW)


@pytest.mark.parametrize("name", LAW)
def test_law(name: str, pair: list[dict[str, list[Tensor]]]) -> None:
    for gradients in pair:
        assert law.error(LAW[name][0], gradients[name]) < law.TOLERANCE


ALONE = {
    "one": (Case(lengths=(5,), empty=((0, 1),)), {}, ""),
    "one, once": (Case(lengths=(5,), empty=((0, 1),), loss="sum"), ONCE, ""),
}


def test_law_in_one_process() -> None:
    (gradients,) = run_ranks(fit_all, 1, ALONE)
    for name, (case, *_) in ALONE.items():
        assert law.error(case, gradients[name]) < law.TOLERANCE


EMPTY = ((0, 1), (3, 2))
HYBRID = {"sharding_strategy": "HYBRID_SHARD", **BLOCKS}


def fit_four(rank: int, world_size: int) -> list[float]:
    four, two = Case(lengths=(5, 4, 3, 5), empty=EMPTY, loss=HAND), Case(loss=HAND)
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    cases = {
        "mesh": (four, {**HYBRID, "device_mesh": (2, 2)}, ""),
        "mesh, once": (four, {**HYBRID, "device_mesh": (2, 2), **ONCE}, ""),
        "groups": (four, {**HYBRID, "process_group": (shards, replicas)}, ""),
        # two trainings of two ranks each
        "part of the world": (two, {**BLOCKS, "process_group": shards}, ""),
    }
    gradients = fit_all(rank, world_size, cases)
    return [law.error(case, gradients[name]) for name, (case, *_) in cases.items()]


def test_law_on_shards_and_replicas() -> None:
    for errors in run_ranks(fit_four, 4):
        assert max(errors) < law.TOLERANCE


def fit_plain(rank: int, world_size: int) -> float:
    case = Case()
    return law.error(case, law.fit(rank, world_size, case, PlainFSDP(**BLOCKS), plugins=[Float64()]))


def test_plain_fsdp_is_off() -> None:
    for error in run_ranks(fit_plain, 2):
        assert 0.01 < error < 10
