"""Strategies as the proof runs them: a fresh one for each fit, on the CPU, over as many ranks as it is made for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
    XLAStrategy,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload

from lightning_tokennorm import _compat
from lightning_tokennorm.strategies import TokenNormDDP
from lightning_tokennorm.strategies.fsdp_on_cpu import FSDPOnCPU
from lightning_tokennorm.testing.precision import KeepTypes

_WANT_A_GROUP = ("process group has not been initialized", "env:// rendezvous")
"""What torch says where there is no process group, and where it would make one by itself."""

StrategyLike = Strategy | str | Callable[[], Strategy] | None
"""A strategy, the name of one, a class or function that makes it, or ``None`` for `TokenNormDDP`."""


@dataclass(frozen=True)
class Host:
    """What the proof has to know of the strategy that keeps a module's parameters.

    Args:
        make: Makes the strategy as the user gave it.
        probe: One of them, to look at.
    """

    make: Callable[[], Strategy]
    probe: Strategy

    @property
    def plain(self) -> str:
        """The name of Lightning's own strategy of this family."""
        return "FSDPStrategy" if self.is_fsdp else "ModelParallelStrategy" if self.has_mesh else "DDPStrategy"

    @property
    def ours(self) -> str:
        """The name of this package's strategy of this family."""
        return "TokenNorm" + self.plain.removesuffix("Strategy")

    @property
    def is_fsdp(self) -> bool:
        """Whether it is FSDP of the first version, which wraps modules."""
        return isinstance(self.probe, FSDPStrategy)

    @property
    def has_mesh(self) -> bool:
        """Whether the module splits itself over a mesh that the strategy makes."""
        return isinstance(self.probe, ModelParallelStrategy)

    @property
    def wrapper(self) -> str:
        """Who has the gradients of the module's parameters."""
        return "FSDP" if self.is_fsdp or self.has_mesh else "DDP"

    @property
    def what_scales(self) -> str:
        """What else may scale gradients under such a strategy."""
        if self.is_fsdp:
            return "a `reduce_dtype` or divide factor"
        if self.has_mesh:
            return "`set_gradient_divide_factor`, a loss that tensor-parallel ranks add up"
        return "a communication hook that leaves a sum"

    @property
    def notes(self) -> list[str]:
        """What about the strategy is another in the run than in training."""
        if not isinstance(self.probe, FSDPStrategy):
            return []
        notes = []
        if self.probe.cpu_offload is not None and self.probe.cpu_offload.offload_params:
            notes.append("nothing is offloaded: it is on the CPU already")
        if self.probe.mixed_precision is None and _compat.own_precision(self.probe) is None:
            notes.append("parameters keep their types, which FSDP under Lightning casts to one")
        return notes

    def on_cpu(self, num_ranks: int) -> Strategy:
        """Make a strategy that fits on as many ranks, which exist already, on the CPU."""
        strategy = self.make()
        _compat.launch_nothing(strategy)
        if isinstance(strategy, FSDPStrategy):
            kind = type(strategy)
            if not isinstance(strategy, FSDPOnCPU):
                strategy.__class__ = type(kind.__name__, (FSDPOnCPU, kind), {})
            strategy.cpu_offload = CPUOffload(offload_params=False)
            if _compat.own_precision(strategy) is None:
                strategy.precision_plugin = KeepTypes()
        if isinstance(strategy, ModelParallelStrategy):
            _compat.set_mesh_sizes(strategy, *_mesh_sizes(strategy, num_ranks))
        return strategy

    def in_one_process(self) -> Strategy | str:
        """Make Lightning's own strategy for a single rank, on which a module can do what it does on several."""
        if not self.has_mesh:
            return "auto"
        return _compat.launch_nothing(ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1))

    # ---- ranks

    @property
    def default_world_sizes(self) -> Sequence[int]:
        """Numbers of ranks to try where the user gives none."""
        fixed = self._fixed_ranks()
        if fixed is not None:
            return (fixed,)
        return tuple(ranks * self._multiple_of() for ranks in (1, 2))

    def data_of(self, num_ranks: int) -> tuple[int, ...]:
        """Whose data each rank trains on: ranks that are copies have the same number.

        Raises:
            ValueError: The strategy is for another number of ranks.
        """
        fixed, multiple = self._fixed_ranks(), self._multiple_of()
        if num_ranks < 1 or (fixed is not None and num_ranks != fixed) or num_ranks % multiple:
            wanted = f"{fixed} ranks" if fixed is not None else f"a multiple of {multiple} ranks"
            instead = f"`world_sizes=({fixed or multiple * 2},)`"
            raise ValueError(
                f"`assert_partition_invariant(world_sizes=...)` got {num_ranks}, but the strategy is for {wanted}:"
                f" {self._mesh_text()}. Pass {instead}, or a strategy with another mesh."
            )
        if not isinstance(self.probe, ModelParallelStrategy):
            return tuple(range(num_ranks))
        _, copies = _mesh_sizes(self.probe, num_ranks)
        over = set(getattr(self.probe, "_tokens_over", None) or ("data_parallel",))
        if over >= {"data_parallel", "tensor_parallel"}:
            return tuple(range(num_ranks))
        if over == {"tensor_parallel"}:
            return tuple(rank % copies for rank in range(num_ranks))
        return tuple(rank // copies for rank in range(num_ranks))

    def _fixed_ranks(self) -> int | None:
        if isinstance(self.probe, ModelParallelStrategy):
            sizes = _compat.mesh_sizes(self.probe)
            return None if "auto" in sizes else int(math.prod(sizes))
        if isinstance(self.probe, FSDPStrategy) and (mesh := self.probe.kwargs.get("device_mesh")):
            return int(math.prod(mesh))
        return None

    def _multiple_of(self) -> int:
        if not isinstance(self.probe, ModelParallelStrategy):
            return 1
        return math.prod(size for size in _compat.mesh_sizes(self.probe) if size != "auto")

    def _mesh_text(self) -> str:
        if isinstance(self.probe, FSDPStrategy):
            return f"`device_mesh={self.probe.kwargs['device_mesh']}`"
        assert isinstance(self.probe, ModelParallelStrategy)
        sizes = _compat.mesh_sizes(self.probe)
        return f"`data_parallel_size={sizes[0]!r}`, `tensor_parallel_size={sizes[1]!r}`"


def host_of(strategy: StrategyLike) -> Host:
    """Look at a strategy, however it is given.

    Raises:
        TypeError: It is no strategy.
        ValueError: No strategy has that name, it has been used, or it cannot run here.
    """
    if isinstance(strategy, str):
        if strategy not in StrategyRegistry:
            raise ValueError(
                f"`assert_partition_invariant(strategy=...)` got {strategy!r}; expected a strategy, a function that"
                f" makes one, or one of the names {', '.join(StrategyRegistry.available_strategies())}."
            )
        _refuse_other_devices(StrategyRegistry[strategy]["strategy"])
        host = _from_maker(lambda: StrategyRegistry.get(strategy))
    elif isinstance(strategy, Strategy):
        if strategy.accelerator is not None:
            raise ValueError(
                f"`assert_partition_invariant(strategy=...)` got a `{type(strategy).__name__}` that a Trainer has used"
                " already, or that has an accelerator of its own. Pass a fresh one, or a function that makes it."
            )
        host = Host(lambda: strategy, strategy)  # each process has its own copy, and uses it for one fit
    else:
        if isinstance(strategy, type):
            _refuse_other_devices(strategy)
        host = _from_maker(TokenNormDDP if strategy is None else strategy)
    if not isinstance(host.probe, Strategy):
        raise TypeError(
            f"`assert_partition_invariant(strategy=...)` got {strategy!r}, which made {host.probe!r}; expected a"
            " strategy, the name of one, or a class or function that makes one."
        )
    _refuse_other_devices(type(host.probe))
    if isinstance(getattr(host.probe, "_tokens_over", None), DeviceMesh):
        raise ValueError(
            f"`{host.ours}(tokens_over=...)` got a mesh that was made before; expected the names of dimensions of the"
            " strategy's own, as the proof makes a mesh for each number of ranks."
        )
    return host


def _from_maker(make: Any) -> Host:
    if not callable(make):
        raise TypeError(
            f"`assert_partition_invariant(strategy=...)` got {make!r}; expected a strategy, the name of one, or a class"
            " or function that makes one."
        )
    try:
        return Host(make, make())
    except (RuntimeError, ValueError) as error:
        if not any(words in str(error) for words in _WANT_A_GROUP):
            raise
        raise ValueError(
            "`assert_partition_invariant(strategy=...)` got a function that needs a process group, and there is none"
            " before the ranks are started. Give numbers instead of groups: `device_mesh=(2, 2)`,"
            " `data_parallel_size=2`, names in `tokens_over`."
        ) from error


def _refuse_other_devices(kind: Any) -> None:
    for family, device in ((DeepSpeedStrategy, "GPUs"), (XLAStrategy, "TPUs")):
        if isinstance(kind, type) and issubclass(kind, family):
            raise ValueError(
                f"`assert_partition_invariant(strategy=...)` got `{kind.__name__}`, which runs on {device} only; the"
                " proof runs on the CPU. Pass a strategy of the DDP, FSDP or model-parallel family."
            )


def _mesh_sizes(strategy: ModelParallelStrategy, num_ranks: int) -> tuple[int, int]:
    """The mesh: as it was asked for; where that is left open, replicas, and pairs that share one from 4 ranks on."""
    replicas, copies = _compat.mesh_sizes(strategy)
    if copies == "auto":
        copies = num_ranks // replicas if replicas != "auto" else 2 if num_ranks >= 4 and num_ranks % 2 == 0 else 1
    return num_ranks // copies, copies
