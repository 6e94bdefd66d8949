"""FSDP's units: the pieces of a model that are gathered, and whose gradients are reduced, one at a time.

All ranks have to go through the same units in the same order, forward and backward: each is a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.utils._pytree import tree_leaves

from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.gradients import Graph, first_parameter, graph_of

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass
class Visits:
    """The units that a step has gone through, besides the one that the step itself is inside of."""

    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    """Their outputs that have a graph, by the index of the unit; none where it has run without a gradient."""


class FSDPUnits:
    """The units of a wrapped model.

    Args:
        model: The model, with `FullyShardedDataParallel` modules in it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._units: list[FullyShardedDataParallel] = FullyShardedDataParallel.fsdp_modules(model)
        if not self._units:
            raise MisconfigurationException(
                "No part of the model is wrapped in `FullyShardedDataParallel`, so gradients would not be reduced:"
                " `configure_sharded_model` leaves the wrapping to the module. Wrap its parts there"
                " (`torch.distributed.fsdp.wrap.wrap`), or use `configure_model`."
            )

    # ---- how gradients are reduced

    def divided_by(self, world_size: int) -> float:
        """By what the sum over the ranks is divided, in part before and in part after it is taken.

        Args:
            world_size: The number of ranks over which tokens are counted.

        Raises:
            MisconfigurationException: Units reduce over another number of ranks, or differ in the divisor.
        """
        for unit in self._units:
            # torch does not shard over a single rank, nor reduce over the replicas of such a shard
            is_hybrid = unit.sharding_strategy in _HYBRID
            replicas = getattr(unit, "_inter_node_pg", None) if is_hybrid else None
            ranks = unit.world_size * (1 if replicas is None else replicas.size())
            if ranks != world_size:
                raise MisconfigurationException(
                    f"A part of the model is wrapped in FSDP over {ranks} ranks, while the strategy counts tokens over"
                    f" {world_size}. Wrap all parts over the same ranks, and give them to the strategy as"
                    " `process_group` or `device_mesh`; shards of a single rank are not reduced at all."
                )
        divisors = {unit._gradient_predivide_factor * unit._gradient_postdivide_factor for unit in self._units}
        if len(divisors) > 1:
            raise MisconfigurationException(
                f"The parts of the model divide their gradients by different numbers: {sorted(divisors)}. Leave FSDP's"
                " divide factors alone, or give them all the same product."
            )
        return divisors.pop()

    @property
    def has_comm_hook(self) -> bool:
        """Whether a communication hook takes the place of FSDP's own reduction."""
        return any(unit._comm_hook is not None for unit in self._units)

    @property
    def is_sharded(self) -> bool:
        """Whether some gradients are kept in shards."""
        return any(unit._handle is not None and unit._handle.uses_sharded_strategy for unit in self._units)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Reduce nothing in this context: gradients are added up on each rank, unsharded."""
        with ExitStack() as stack:
            for root in FullyShardedDataParallel.fsdp_modules(self._model, root_only=True):
                stack.enter_context(root.no_sync())
            yield

    def trained_outside(self, optimizers: Sequence[Any]) -> str | None:
        """A parameter that is trained although no unit holds it, so that ranks would drift apart.

        Args:
            optimizers: The optimizers.

        Returns:
            What is wrong and what to change; ``None`` where nothing is.
        """
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if each.requires_grad and not getattr(each, "_fsdp_flattened", False):
                        names = {id(parameter): _own_name(name) for name, parameter in self._model.named_parameters()}
                        return (
                            f"Parameter `{names.get(id(each), 'of the optimizer')}` is trained, but FSDP does not"
                            " reduce its gradient: it is in `ignored_states` or `ignored_modules`, outside of what was"
                            " wrapped, or was there before. Ranks would drift apart: freeze it or let FSDP have it, and"
                            " with `use_orig_params=False` make the optimizer from `self.trainer.model.parameters()`."
                        )
        return None

    # ---- which units a loss leads to

    @contextmanager
    def visits(self) -> Iterator[Visits]:
        """Note which units a step goes through in this context."""
        seen = Visits()

        def note(index: int) -> Any:
            def hook(unit: nn.Module, args: Any, output: Any) -> None:
                tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
                seen.outputs.setdefault(index, []).extend(tensors)

            return hook

        handles = [unit.register_forward_hook(note(index)) for index, unit in enumerate(self._units)]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def ways(self, loss: Tensor | None, visits: Visits) -> list[Tensor] | None:
        """What leads to the units that the loss of a micro-batch without tokens does not lead to.

        "No labels here" is often written as a fresh zero, or as None. Its gradient is zero in any case, but the other
        ranks wait in each unit. Only what was computed by a unit leads back into it: its parameters are gathered there.

        Args:
            loss: The loss, ``None`` for none.
            visits: The units that the step went through.

        Returns:
            The tensors; ``None`` where the step went through no unit at all.

        Raises:
            TokenNormError: It went through some of the units only.
        """
        graph = Graph() if loss is None else graph_of(loss)
        if graph.hides_a_graph:
            return []
        missing = {
            index: flat
            for index, unit in enumerate(self._units)
            if (flat := unit._flat_param) is not None and flat.requires_grad and id(flat) not in graph.reached
        }
        found: list[Tensor] = []
        if self._units[0] is self._model and 0 in missing:  # the step runs inside of it, so it is gathered now
            found.append(missing.pop(0))
        if missing and not visits.outputs:
            return None
        for index in missing:
            if not visits.outputs.get(index):
                raise TokenNormError(
                    "The step of a micro-batch without supervised tokens ran a part of the model, and not all of what"
                    " other ranks wait in. Run the whole forward for every batch, or nothing of it, also where the"
                    " loss does not need it."
                )
            found += visits.outputs[index]
        return found

    def check_backward(self, loss: Tensor, where: str) -> None:
        """Check that the backward of a loss has reached a unit; nothing has been stepped yet.

        Args:
            loss: The loss.
            where: Which one it is, for the text of an error.

        Raises:
            TokenNormError: It has reached none.
        """
        flats = [unit._flat_param for unit in self._units]
        parameters: dict[int, nn.Parameter] = {id(flat): flat for flat in flats if flat is not None}
        if first_parameter(loss, parameters) is None and not graph_of(loss).hides_a_graph:
            raise TokenNormError(
                f"The loss of {where} has supervised tokens, but no way leads from it to a parameter that FSDP"
                " trains: it was detached, made anew, or comes from other parameters. Return a loss that was"
                " computed from the module's parameters; to leave a batch out, set its labels to -100."
            )


def _own_name(name: str) -> str:
    """A parameter's name as it was before parts of the module were wrapped."""
    return name.replace("_fsdp_wrapped_module.", "")
