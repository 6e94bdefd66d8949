"""How a host brings the gradients of its ranks together: over which of them, and by what it divides their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Reduction:
    """What a host does with the gradients of its ranks."""

    group: dist.ProcessGroup | None
    """The ranks that go through their windows together; ``None`` for a single process."""
    divided_by: float | None = None
    """By what it divides the sum over the ranks; ``None`` for their number."""
    copies: tuple[tuple[int, ...], ...] | None = None
    """Where some of the ranks hold the same batches (tensor parallelism): one list of ranks per model replica. Tokens
    are counted, and gradients reduced, over one rank of each. ``None`` where every rank has batches of its own."""


def reduction_of(model: nn.Module | None, group: dist.ProcessGroup | None = None) -> Reduction:
    """Read off a model how the gradients of its ranks are brought together.

    Args:
        model: The model as it is trained: in DDP, in FSDP, with `fully_shard`, or as it is; ``None`` where there is no
            single one.
        group: The ranks, where the model does not say it: nothing wraps it, and whoever trains averages its gradients
            over these; or it is replicated and sharded over a part of the world.

    Raises:
        ValueError: The model does not say over which ranks it is reduced, parts of it differ in that or in the
            divisor, or some parameters would not be reduced.

    Example:
        >>> reduction_of(nn.Linear(1, 1))
        Reduction(group=None, divided_by=None, copies=None)
    """
    if isinstance(model, DistributedDataParallel):
        return Reduction(_same(model.process_group, group))
    if model is not None and (units := fsdp_units(model)):
        return _of_fsdp(model, units, group)
    if model is not None and (groups := sharded_groups(model)):
        return _of_fully_shard(model, groups, group)
    kind = "None" if model is None else type(model).__name__
    if any(each.__module__.startswith("deepspeed") for each in type(model).__mro__):
        raise ValueError(
            f"`model` got a {kind}; expected one whose gradients torch reduces. DeepSpeed's engine divides losses by"
            " itself and does not step on a short last window: use `fully_shard` or FSDP, which shard as much."
        )
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"`model` got {kind} in one of {dist.get_world_size()} processes; expected the model that DDP, FSDP or"
            " `fully_shard` has made of it, which says over which ranks gradients are averaged. Where you average them"
            " yourself after each window, say over which ranks with `group`."
        )
    return Reduction(group)


def fsdp_units(model: nn.Module) -> list[FullyShardedDataParallel]:
    """The parts of a model that `FullyShardedDataParallel` wraps."""
    return FullyShardedDataParallel.fsdp_modules(model)


def sharded_groups(model: nn.Module) -> list[Any]:
    """The groups of parameters that `fully_shard` has made; each is gathered and reduced as one."""
    found: list[Any] = []
    for module in model.modules():
        # the class of such a module is another one in each release of torch
        get_state = getattr(module, "_get_fsdp_state", None)
        if get_state is None:
            continue
        state = get_state()
        several = getattr(state, "_fsdp_param_groups", None)
        found += [state._fsdp_param_group] if several is None else several
    return [each for each in found if each is not None]


def _of_fsdp(model: nn.Module, units: Sequence[FullyShardedDataParallel], group: dist.ProcessGroup | None) -> Reduction:
    if any(unit._comm_hook is not None for unit in units):
        raise ValueError(
            "`model` got an FSDP module with a communication hook, and what that does to the scale is not known."
            " Leave the reduction to FSDP; `MixedPrecision(reduce_dtype=...)` reduces in a smaller type."
        )
    for name, each in model.named_parameters():
        if each.requires_grad and not getattr(each, "_fsdp_flattened", False):
            raise _not_reduced(name)
    over = [[unit.process_group, getattr(unit, "_inter_node_pg", None)] for unit in units]
    divisors = {float(unit._gradient_predivide_factor * unit._gradient_postdivide_factor) for unit in units}
    return Reduction(_joint(over, group), _the_only(divisors))


def _of_fully_shard(model: nn.Module, groups: Sequence[Any], group: dist.ProcessGroup | None) -> Reduction:
    if any(getattr(each, "_all_reduce_hook", None) is not None for each in groups):
        raise ValueError(
            "`model` got with `set_all_reduce_hook`, and what that does to the scale is not known. Let `fully_shard`"
            " reduce over a mesh of two dimensions."
        )
    held = {id(parameter.sharded_param) for each in groups for parameter in each.fsdp_params}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise _not_reduced(name)
    names = ("shard_process_group", "replicate_process_group")
    over = [[getattr(each.mesh_info, name, None) for name in names] for each in groups]
    copies = _copies(groups)
    if copies is None:
        joint = _joint(over, group)
        size = float(dist.get_world_size(joint))
    else:
        _check_alike(over)
        joint, size = _group_of(sorted(rank for ranks in copies for rank in ranks), group), float(len(copies))
        copies = tuple(tuple(dist.get_group_rank(joint, rank) for rank in ranks) for ranks in copies)
    # Mixed ones would give each group of parameters a scale of its own.
    divisors = {size if (factor := _divide_factor(each)) is None else float(factor) for each in groups}
    return Reduction(joint, _the_only(divisors), copies)


def _copies(groups: Sequence[Any]) -> tuple[tuple[int, ...], ...] | None:
    """The ranks of each model replica, where tensor parallelism splits parameters over a further dimension of a mesh.

    Such a parameter shows the whole mesh; `fully_shard` was given the part of it that holds replicas.
    """
    found = set()
    for each in groups:
        replicas = each.mesh_info.mesh
        for parameter in each.fsdp_params:
            whole = parameter.sharded_param.device_mesh
            if whole.ndim == replicas.ndim:
                continue
            known, names = whole.mesh_dim_names or (), replicas.mesh_dim_names or ()
            first = [known.index(name) for name in names] if set(names) <= set(known) else []
            first = first or list(range(replicas.ndim))
            rest = [dim for dim in range(whole.ndim) if dim not in first]
            by_replica = whole.mesh.permute(*first, *rest).reshape(replicas.mesh.numel(), -1)
            found.add(tuple(tuple(ranks) for ranks in by_replica.tolist()))
    if len(found) > 1:
        raise ValueError(
            f"The parts of the model are split over different meshes: {sorted(found)}; expected one mesh for all."
        )
    return found.pop() if found else None


def _divide_factor(param_group: Any) -> float | None:
    # older releases of torch have another name for it, of which only the reduction over shards knew
    factor = getattr(param_group, "gradient_divide_factor", None)
    return getattr(param_group, "reduce_scatter_divide_factor", None) if factor is None else factor


def _the_only(divisors: set[float]) -> float:
    if len(divisors) > 1:
        raise ValueError(
            f"The parts of the model divide their gradients by different numbers: {sorted(divisors)}; expected one for"
            " all. Set the same divide factor for each, or leave it alone everywhere."
        )
    return divisors.pop()


def _joint(over: Sequence[Sequence[dist.ProcessGroup | None]], given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """One group of all ranks that parts of a model are reduced over, first among shards and then among replicas."""
    _check_alike(over)
    parts = [[each for each in groups if each is not None] for groups in over]
    groups = [each for each in parts[0] if dist.get_world_size(each) > 1] or parts[0][:1]
    if len(groups) == 1:
        return _same(groups[0], given)
    # Ranks of a mesh: those of this rank's row and column are all of them only where there are no more.
    size = math.prod(dist.get_world_size(each) for each in groups)
    for whole in (given, dist.group.WORLD):
        if whole is not None and dist.get_world_size(whole) == size:
            return whole
    raise _needs_group(size)


def _check_alike(over: Sequence[Sequence[dist.ProcessGroup | None]]) -> None:
    ranks = {tuple(tuple(dist.get_process_group_ranks(each)) for each in groups if each is not None) for groups in over}
    if len(ranks) > 1:
        raise ValueError(
            f"The parts of the model are reduced over different ranks: {sorted(ranks)}; expected the same for all, or"
            " tokens would have to be counted for each part by itself."
        )


def _group_of(ranks: Sequence[int], given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group of all ranks of a mesh."""
    for whole in (given, dist.group.WORLD):
        if whole is not None and sorted(dist.get_process_group_ranks(whole)) == list(ranks):
            return whole
    raise _needs_group(len(ranks))


def _needs_group(size: int) -> ValueError:
    return ValueError(
        f"The model is split over the {size} ranks of a mesh, a part of the world of {dist.get_world_size()}; expected"
        " `group` with a process group of these ranks."
    )


def _same(found: dist.ProcessGroup, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if given is None or given is found:
        return found
    ranks, given_ranks = dist.get_process_group_ranks(found), dist.get_process_group_ranks(given)
    if ranks != given_ranks:
        raise ValueError(
            f"`group` got the ranks {given_ranks}, but the model's gradients are averaged over {ranks}; expected the"
            " same. Leave `group` out: the model says it."
        )
    return found


def _not_reduced(name: str) -> ValueError:
    return ValueError(
        f"Parameter `{name}` requires a gradient, but no part of the model that is sharded holds it, so its gradient is"
        " not reduced and ranks would drift apart. Freeze it, or shard the model as a whole, too."
    )
