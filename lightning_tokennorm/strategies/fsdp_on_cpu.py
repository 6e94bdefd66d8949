"""`FSDPStrategy` with ``accelerator="cpu"``, which Lightning passes devices for that torch refuses there."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import enable_wrap
from typing_extensions import override

from lightning_tokennorm import _compat


class FSDPOnCPU(FSDPStrategy):
    """An `FSDPStrategy` that runs on the CPU as well; on other devices it is as Lightning made it."""

    @override
    def setup_environment(self) -> None:
        mesh = self.kwargs.get("device_mesh")
        if not isinstance(mesh, tuple) or self.root_device.type != "cpu":
            super().setup_environment()
            return
        del self.kwargs["device_mesh"]  # of which Lightning would make one of CUDA devices
        super().setup_environment()
        self.kwargs["device_mesh"] = init_device_mesh("cpu", mesh)

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
        if self.root_device.type != "cpu" or _compat.saves_in_shards(self):
            return super().lightning_module_state_dict()
        # Lightning asks torch to bring what it gathers to the CPU, which frees it where it is there already.
        gathered = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, gathered):
            return self.model.state_dict()
