"""`TokenNormFSDP`: FSDP in which every supervised token of an update has the same weight."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import enable_wrap
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tokennorm import _compat
from lightning_tokennorm.counting import TokenCounter
from lightning_tokennorm.reduction import Reduction
from lightning_tokennorm.strategies.fsdp_units import FSDPUnits
from lightning_tokennorm.strategies.options import refuse_unknown
from lightning_tokennorm.strategies.sharded import ShardedStrategy
from lightning_tokennorm.window import LossReduction

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class TokenNormFSDP(ShardedStrategy, FSDPStrategy):
    """An `FSDPStrategy` whose gradient does not depend on how the tokens are split over ranks and micro-batches.

    As `TokenNormDDP`, with parameters, gradients and optimizer states in shards; also with ``accelerator="cpu"``, and
    with ``gradient_clip_algorithm="norm"``, neither of which `FSDPStrategy` takes.

    Args:
        count_tokens: As in `TokenNormDDP`; and so are the next seven.
        loss_reduction: See there.
        counting: See there.
        on_empty: See there.
        uneven: See there.
        audit: See there.
        head_weights: See there.
        accumulate_grad_batches: See there.
        sync_each_micro_batch: Whether gradients are reduced after every micro-batch, so that each rank keeps its shard
            of them only. With ``False`` they are reduced once per update, as `FSDPStrategy` does with automatic
            optimization: ``K`` times less of that communication, for the memory of the whole model's gradients on each
            rank; with mixed precision they are added up in the type that is computed in. Accumulation with
            ``cpu_offload`` needs ``False``.
        **fsdp_kwargs: Passed on to `FSDPStrategy`, and by it to `torch.distributed.fsdp.FullyShardedDataParallel`.

    Raises:
        TypeError: ``count_tokens`` is not callable, or an option is not known.
        ValueError: Another option has a value that is not listed.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tokennorm import TokenNormFSDP
        >>> trainer = Trainer(
        ...     accelerator="cpu",
        ...     devices=2,
        ...     accumulate_grad_batches=4,
        ...     logger=False,
        ...     strategy=TokenNormFSDP(sync_each_micro_batch=False),
        ... )
        >>> trainer.strategy.loss_reduction
        'mean'
    """

    def __init__(
        self,
        *,
        count_tokens: TokenCounter | None = None,
        loss_reduction: LossReduction = "mean",
        counting: Literal["lookahead"] = "lookahead",
        on_empty: Literal["skip", "error"] = "skip",
        uneven: Literal["pad", "error"] = "pad",
        audit: bool = False,
        head_weights: Mapping[str, float] | None = None,
        accumulate_grad_batches: int | None = None,
        sync_each_micro_batch: bool = True,
        **fsdp_kwargs: Any,
    ) -> None:
        refuse_unknown(type(self), fsdp_kwargs, (FSDPStrategy.__init__, FullyShardedDataParallel.__init__))
        super().__init__(
            count_tokens=count_tokens,
            loss_reduction=loss_reduction,
            counting=counting,
            on_empty=on_empty,
            uneven=uneven,
            audit=audit,
            head_weights=head_weights,
            accumulate_grad_batches=accumulate_grad_batches,
            sync_each_micro_batch=sync_each_micro_batch,
            **fsdp_kwargs,
        )

    # ---- the ranks

    @override
    def setup_environment(self) -> None:
        mesh = self.kwargs.get("device_mesh")
        if not isinstance(mesh, tuple) or self.root_device.type != "cpu":
            super().setup_environment()
            return
        del self.kwargs["device_mesh"]  # of which Lightning would make one of CUDA devices
        super().setup_environment()
        self.kwargs["device_mesh"] = init_device_mesh("cpu", mesh)

    @override
    def _reduction(self) -> Reduction:
        if not dist.is_initialized():
            return Reduction(None)
        group, mesh = self.kwargs.get("process_group"), self.kwargs.get("device_mesh")
        if self.sharding_strategy in _HYBRID or (group is None and mesh is None):
            # Shards are summed, then replicas: together all ranks, which `divided_by` makes sure of.
            group = dist.group.WORLD
        elif mesh is not None:
            group = mesh.get_group(0)
        divided_by = None if self._units is None else self._units.divided_by(dist.get_world_size(group))
        return Reduction(group, divided_by)

    # ---- set-up and teardown

    @contextmanager
    @override
    def model_sharded_context(self) -> Any:
        if self.root_device.type != "cpu":
            with super().model_sharded_context():
                yield
            return
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._wrapping_on_cpu()):
            yield

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.root_device.type != "cpu" or FullyShardedDataParallel.fsdp_modules(model):
            return super()._setup_model(model)
        kwargs = self.kwargs
        model = FullyShardedDataParallel(model, **self._wrapping_on_cpu())
        try:  # the rest of it: the policy has been applied
            self.kwargs = {name: value for name, value in kwargs.items() if name != "auto_wrap_policy"}
            return super()._setup_model(model)
        finally:
            self.kwargs = kwargs

    def _wrapping_on_cpu(self) -> dict[str, Any]:
        # As `FSDPStrategy` does, but for the device: it passes an index, which a CPU does not have.
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": self.root_device,
            **self.kwargs,
        }

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        if self.root_device.type != "cpu" or _compat.saves_in_shards(self) or self._lacks_shards:
            return super().lightning_module_state_dict()
        # Lightning asks torch to bring what it gathers to the CPU, which frees it where it is there already.
        gathered = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, gathered):
            return self.model.state_dict()

    @override
    def _check_setup(self) -> None:
        assert self.model is not None
        self._units = FSDPUnits(self.model)
        if problem := self._offload_problem():
            raise MisconfigurationException(problem)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization and isinstance(self.model, FullyShardedDataParallel):
            raise MisconfigurationException(
                "`TokenNormFSDP` got a module with manual optimization that is wrapped as a whole: `training_step` runs"
                " inside of the wrapper's forward, and torch cannot run a backward there. Wrap the parts of the module"
                " in `configure_model` (`torch.distributed.fsdp.wrap.wrap`), or use `TokenNormModelParallel`."
            )
        plugin = self.precision_plugin
        if type(plugin).clip_grad_by_norm is FSDPPrecision.clip_grad_by_norm:  # which refuses
            plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

    @override
    def teardown(self) -> None:
        super().teardown()
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)

    def _offload_problem(self) -> str | None:
        # With offloaded parameters torch takes the gradient that was reduced last, and drops those before it.
        accumulate = self._feed_in_use.trainer.accumulate_grad_batches
        if accumulate == 1 or not (self._sync_each_micro_batch and self.cpu_offload.offload_params):
            return None
        return (
            f"`TokenNormFSDP(cpu_offload=...)` got with `accumulate_grad_batches={accumulate}`: reduced after each"
            " micro-batch, gradients that are offloaded do not add up in torch. Use `sync_each_micro_batch=False`,"
            " which keeps the model's gradients on the device until the update, or do not accumulate."
        )

    @override
    def _find_problem(self) -> str | None:
        units = self._units
        if units is None:
            return None
        if units.has_comm_hook:
            return (
                "A communication hook was registered on the FSDP module, and what it does to the scale is not known:"
                " gradients have to be reduced by FSDP itself. Remove it; `mixed_precision` with a `reduce_dtype`"
                " reduces in a smaller type."
            )
        return self._offload_problem() or units.trained_outside(self.optimizers)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all shards, which only the module that holds them all can take."""
        assert self._units is not None
        if not isinstance(self.model, FullyShardedDataParallel):
            raise MisconfigurationException(
                "`gradient_clip_algorithm='norm'` got with a model whose parts are wrapped in FSDP, but not the whole:"
                " nobody knows the norm over all of them. Wrap the module as a whole, or clip by value."
            )
        if self._units.is_sharded and any(each.dtype == torch.float64 for each in self.model.parameters()):
            raise MisconfigurationException(
                "`gradient_clip_algorithm='norm'` got with parameters in float64, over whose shards torch cannot take"
                " a norm. Use float32, clip by value, or do not shard (`sharding_strategy='NO_SHARD'`)."
            )
        self.model.clip_grad_norm_(clip_val)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of this family; a name that is already taken is left as it is."""
        if "tokennorm_fsdp" not in strategy_registry:
            strategy_registry.register(
                "tokennorm_fsdp", cls, description="Fully Sharded Data Parallel with token-normalised gradients"
            )
        if "tokennorm_fsdp_cpu_offload" not in strategy_registry:
            strategy_registry.register(
                "tokennorm_fsdp_cpu_offload",
                cls,
                description="Fully Sharded Data Parallel with token-normalised gradients and offloading to the CPU",
                cpu_offload=True,
                sync_each_micro_batch=False,
            )
