"""The modules that `fully_shard` was applied to: over which ranks they reduce gradients, and how that is held back.

All ranks of a shard group have to go through the same modules in the same order, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.gradients import Graph, first_parameter, graph_of


class FullyShardedModules:
    """The sharded modules of a model; there may be none, where only tensor parallelism splits it.

    Args:
        model: The model, as `configure_model` has left it.
        ranks: The ranks that hold different batches, of which this one is one: tokens are counted over them.
    """

    def __init__(self, model: nn.Module, ranks: Sequence[int]) -> None:
        self._model = model
        self._ranks = ranks
        # by a method, not by the class, which has moved between releases of torch
        self._modules: list[Any] = [each for each in model.modules() if hasattr(each, "set_requires_gradient_sync")]
        states = [module._get_fsdp_state() for module in self._modules]
        self._states = list({id(state): state for state in states}.values())  # modules can share one
        self._state_of = [next(i for i, each in enumerate(self._states) if each is state) for state in states]

    # ---- how gradients are reduced

    def divided_by(self) -> float:
        """By what the sum over the ranks is divided.

        Raises:
            MisconfigurationException: A module reduces over other ranks than those, or modules differ in the divisor.
        """
        divisors = set()
        for group in self._groups():
            ranks = _ranks_of(group)
            if ranks != set(self._ranks):
                raise MisconfigurationException(
                    f"`fully_shard` reduces gradients over ranks {sorted(ranks)}, while tokens are counted over ranks"
                    f" {sorted(self._ranks)}. Shard over `self.device_mesh['data_parallel']`; or, where other ranks"
                    " hold batches of their own, too, name the dimensions of the mesh in `tokens_over`."
                )
            factor = getattr(group, "gradient_divide_factor", getattr(group, "reduce_scatter_divide_factor", None))
            divisors.add(float(len(ranks) if factor is None else factor))
        if len(divisors) > 1:
            raise MisconfigurationException(
                f"The sharded modules divide their gradients by different numbers: {sorted(divisors)}. Call"
                " `set_gradient_divide_factor` on all of them alike, or on none."
            )
        return divisors.pop() if divisors else 1.0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Reduce nothing in this context: gradients are added up on each rank, unsharded."""
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)  # as it was: else training is refused

    def _set_sync(self, sync: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(sync, recurse=False)

    def find_problem(self, optimizers: Sequence[Any], divided_by: float) -> str | None:
        """What would let ranks drift apart, or change the scale.

        Args:
            optimizers: The optimizers.
            divided_by: What `divided_by` was at the start.

        Returns:
            What is wrong and what to change; ``None`` where nothing is.
        """
        for group in self._groups():
            if not (group.reduce_grads and group.all_reduce_grads):
                return (
                    "Gradients are not reduced: `set_requires_gradient_sync(False)` or `set_requires_all_reduce(False)`"
                    " was called on a sharded module. Leave that to the strategy: `sync_each_micro_batch=False`"
                    " reduces once per update."
                )
            if getattr(group, "_all_reduce_hook", None) is not None:
                return (
                    "`set_all_reduce_hook` was called on a sharded module, and what the hook does to the scale is not"
                    " known. Remove it; a mesh of two dimensions given to `fully_shard` shards and replicates."
                )
        try:
            now = self.divided_by()
        except MisconfigurationException as error:
            return str(error)
        if now != divided_by:
            return (
                f"The gradient divide factor went from {divided_by} to {now} while training. Set it in"
                " `configure_model`."
            )
        return self._trained_outside(optimizers)

    def _trained_outside(self, optimizers: Sequence[Any]) -> str | None:
        if len(self._ranks) == 1:
            return None
        held = {id(each) for group in self._groups() for each in _registered(group)}
        for optimizer in optimizers:
            for each in (each for group in optimizer.param_groups for each in group["params"]):
                if each.requires_grad and id(each) not in held:
                    names = {id(parameter): name for name, parameter in self._model.named_parameters()}
                    return (
                        f"Parameter `{names.get(id(each), 'of the optimizer')}` is trained, but no module that"
                        f" `fully_shard` was applied to holds it, so its gradient is not reduced over the"
                        f" {len(self._ranks)} ranks and they would drift apart. Freeze it, or apply `fully_shard` to a"
                        " module around it in `configure_model`."
                    )
        return None

    def _groups(self) -> Iterator[Any]:
        for state in self._states:
            yield from _groups_of(state)

    # ---- which modules a loss leads to

    @contextmanager
    def visits(self) -> Iterator[dict[int, list[Tensor]]]:
        """Note which modules a step goes through in this context: their outputs that have a graph."""
        seen: dict[int, list[Tensor]] = {}

        def note(index: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
                seen.setdefault(index, []).extend(tensors)

            return hook

        handles = [
            module.register_forward_hook(note(index))
            for module, index in zip(self._modules, self._state_of, strict=True)
        ]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def ways(self, loss: Tensor | None, visits: dict[int, list[Tensor]]) -> Sequence[Tensor] | None:
        """What leads to the modules that the loss of a micro-batch without tokens does not lead to.

        Only what a module has computed leads back into it: its parameters are gathered there.

        Args:
            loss: The loss, ``None`` for none.
            visits: The modules that the step went through.

        Returns:
            The tensors; ``None`` where the step went through no module at all.

        Raises:
            TokenNormError: It went through some of the modules only.
        """
        graph = Graph() if loss is None else graph_of(loss)
        if graph.hides_a_graph:
            return []
        if not self._states:  # nothing is gathered
            return [] if graph.reached else [each for each in self._model.parameters() if each.requires_grad]
        missing = [
            index
            for index, state in enumerate(self._states)
            if any(id(each) not in graph.reached for group in _groups_of(state) for each in _gathered(group))
        ]
        if missing and not visits:
            return None
        found: list[Tensor] = []
        for index in missing:
            if not visits.get(index):
                raise TokenNormError(
                    "The step of a micro-batch without supervised tokens ran a part of the model, and not all of what"
                    " other ranks wait in. Run the whole forward for every batch, or nothing of it, also where the"
                    " loss does not need it."
                )
            found += visits[index]
        return found

    def check_backward(self, loss: Tensor, where: str) -> None:
        """Check that the backward of a loss has reached a parameter; nothing has been stepped yet.

        Args:
            loss: The loss.
            where: Which one it is, for the text of an error.

        Raises:
            TokenNormError: It has reached none.
        """
        trained = [each for group in self._groups() for each in _gathered(group) if isinstance(each, nn.Parameter)]
        if not self._states:
            trained = [each for each in self._model.parameters() if each.requires_grad]
        if first_parameter(loss, {id(each): each for each in trained}) is None and not graph_of(loss).hides_a_graph:
            raise TokenNormError(
                f"The loss of {where} has supervised tokens, but no way leads from it to a parameter that is trained:"
                " it was detached, made anew, or comes from other parameters. Return a loss that was computed from the"
                " module's parameters; to leave a batch out, set its labels to -100."
            )


def _groups_of(state: Any) -> list[Any]:
    """The groups of parameters of a sharded module that are trained; releases of torch before 2.13 know one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return [group for group in groups if any(each.sharded_param.requires_grad for each in group.fsdp_params)]


def _ranks_of(group: Any) -> set[int]:
    """The ranks over which gradients are reduced: shards, times replicas."""
    mesh_info = group.mesh_info
    groups = [
        getattr(mesh_info, name)
        for name in ("shard_process_group", "replicate_process_group")
        if getattr(mesh_info, name, None) is not None
    ]
    if len(groups) == 1:
        return set(dist.get_process_group_ranks(groups[0]))
    ranks: set[int] = set(mesh_info.mesh.mesh.flatten().tolist())
    return ranks


def _registered(group: Any) -> Iterator[Any]:
    """The parameters as the modules show them to an optimizer."""
    for each in group.fsdp_params:
        info = each._module_info
        yield each.sharded_param
        yield getattr(info.module, info.param_name)


def _gathered(group: Any) -> Iterator[Any]:
    """The trained parameters as autograd knows them; ``None`` for those that were never gathered."""
    for each in group.fsdp_params:
        if each.sharded_param.requires_grad:
            yield getattr(each, "_unsharded_param", None)
