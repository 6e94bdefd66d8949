"""What the hosts make of a model: DDP, FSDP's units, FSDP2's modules, by hand and in a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarking.lightning_fit import CausalLM
from benchmarking.workload import Block, Job

BLOCKS = {Block}
"""The modules that FSDP wraps one by one."""

Wrapped = tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]
"""A model to train, and the context of all micro-batches of a window but the last."""


# ---- by hand


def in_ddp(job: Job) -> Wrapped:
    """Gradients are reduced once per update."""
    device_ids = [job.device.index] if job.device.type == "cuda" else None
    model = DistributedDataParallel(job.new_model().to(job.device), device_ids=device_ids)
    return model, model.no_sync


def in_fsdp(job: Job, *, once: bool = False) -> Wrapped:
    """Gradients are reduced after each micro-batch, or once per update."""
    model = FullyShardedDataParallel(
        job.new_model(), auto_wrap_policy=ModuleWrapPolicy(BLOCKS), use_orig_params=True, device_id=job.device
    )
    return model, model.no_sync if once else nullcontext


def in_fsdp2(job: Job, *, once: bool = False) -> Wrapped:
    """Gradients are reduced after each micro-batch, or once per update."""
    model = job.new_model().to(job.device)
    shard(model, init_device_mesh(job.device.type, (job.world_size,)))
    return model, partial(_without_gradient_sync, model) if once else nullcontext


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """`fully_shard` on each block, and on the rest."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def _without_gradient_sync(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


# ---- under Lightning


class PlainFSDP(FSDPStrategy):
    """Lightning's own; on a CPU, for which it passes a device that torch refuses, with the right one."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.root_device.type == "cpu":
            options = {
                "sharding_strategy": self.sharding_strategy,
                "mixed_precision": self.mixed_precision_config,
                "device_id": self.root_device,
            }
            model = FullyShardedDataParallel(model, **options, **self.kwargs)
            del self.kwargs["auto_wrap_policy"]  # it has been applied, of which Lightning would warn
        return super()._setup_model(model)


class ShardedCausalLM(CausalLM):
    """A module as `ModelParallelStrategy` wants it: it shards itself."""

    def configure_model(self) -> None:
        """Shard over the strategy's data-parallel ranks."""
        assert self.device_mesh is not None
        shard(self.model, self.device_mesh["data_parallel"])


def over_all_ranks(strategy: Callable[..., ParallelStrategy]) -> ParallelStrategy:
    """A `ModelParallelStrategy` without tensor parallelism, of which its default would make all there is."""
    return strategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
