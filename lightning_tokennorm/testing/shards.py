"""Whole parameters and gradients, by the names that they have without a host, which may keep them in shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

Named = dict[str, Tensor]
"""Tensors by the name of their parameter, on the CPU."""

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, each once, as they are on this rank."""
    return {_own_name(name): parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def optimised(trainer: pl.Trainer, module: nn.Module) -> dict[str, nn.Parameter]:
    """Those trainable parameters that an optimizer of the fit holds, as they are on this rank.

    Nobody but an optimizer clears gradients, so those of other parameters pile up and say nothing of an update.
    """
    held = {
        parameter: f"parameter {index} of group {number} of the optimizer, which is none of the module"
        for optimizer in trainer.optimizers
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter.requires_grad
    }
    root = _root(trainer, module)
    found = {name: parameter for name, parameter in trainable(root).items() if held.pop(parameter, None)}
    return found | {name: parameter for parameter, name in held.items()}


def optimised_parameters(trainer: pl.Trainer, module: nn.Module) -> Named:
    """Copies of the optimised parameters, whole. All ranks call it together."""
    return _whole(trainer, module, gradients=False)


def optimised_gradients(trainer: pl.Trainer, module: nn.Module) -> Named:
    """Copies of their gradients, whole and dense; zeros where there is none. All ranks call it together."""
    return _whole(trainer, module, gradients=True)


def load_parameters(module: nn.Module, values: Named) -> None:
    """Set the parameters that are named. All ranks of a mesh call it together; FSDP's units have no such names."""
    parameters = {_own_name(name): parameter for name, parameter in module.named_parameters()}
    with torch.no_grad():
        for name, value in values.items():
            if isinstance(parameters.get(name), DTensor):
                _deal_out(parameters[name], value)
            elif name in parameters:
                parameters[name].copy_(value)


def _deal_out(parameter: Any, value: Tensor) -> None:
    # torch does not deal out in all the ways in which it gathers: gather whose element is where
    local = parameter.to_local()
    first = dist.get_rank() * value.numel()
    owners: Any = torch.zeros_like(parameter, dtype=torch.int64)
    owners.to_local().copy_(torch.arange(first, first + local.numel()).view(local.shape))
    whole = owners.full_tensor()
    mine = (whole >= first) & (whole < first + local.numel())
    mine_in_order = value[mine][whole[mine].argsort()]
    local.copy_(mine_in_order.view(local.shape))


def computed_in(trainer: pl.Trainer, module: nn.Module) -> set[torch.dtype]:
    """The types that FSDP computes or reduces in, where they are others than those of the parameters."""
    units = FullyShardedDataParallel.fsdp_modules(_root(trainer, module))
    policies: list[Any] = [unit.mixed_precision for unit in units]
    policies += [getattr(each._get_fsdp_state(), "_mp_policy", None) for each in _sharded_modules(module)]
    types = [getattr(policy, name, None) for policy in policies for name in ("param_dtype", "reduce_dtype")]
    return {each for each in types if each is not None}


def divide_by_nothing(module: nn.Module) -> None:
    """Undo a divisor that the module has given FSDP2, in one process: torch may divide twice by it there."""
    for each in _sharded_modules(module):
        each.set_gradient_divide_factor(None)


def _sharded_modules(module: nn.Module) -> list[Any]:
    return [each for each in module.modules() if hasattr(each, "set_gradient_divide_factor")]


def _whole(trainer: pl.Trainer, module: nn.Module, *, gradients: bool) -> Named:
    held, root = optimised(trainer, module), _root(trainer, module)
    found: Named = {}
    if FullyShardedDataParallel.fsdp_modules(root):
        found = _gathered_gradients(root) if gradients else _gathered(root)
        flat = {name: parameter for name, parameter in held.items() if hasattr(parameter, "_fqns")}
        for name, parameter in flat.items():  # one parameter that holds many, as `use_orig_params=False` makes them
            del held[name]
            held |= dict.fromkeys((name.replace("_flat_param", each) for each in parameter._fqns), parameter)
    for name, parameter in held.items():
        if name not in found:
            found[name] = _dense(parameter.grad, parameter) if gradients else _copy(parameter)
    return {name: found[name] for name in held}


def _root(trainer: pl.Trainer, module: nn.Module) -> nn.Module:
    """The module, or what its host has made of it where that holds its parameters."""
    model = trainer.strategy.model
    return model if model is not None and FullyShardedDataParallel.fsdp_modules(model) else module


def _gathered(root: nn.Module) -> Named:
    with FullyShardedDataParallel.summon_full_params(root, writeback=False):
        return {_own_name(name): _copy(parameter) for name, parameter in root.named_parameters()}


def _gathered_gradients(root: nn.Module) -> Named:
    # FSDP gathers parameters in all its ways to shard, and gradients in some of them only: they take their place.
    with _gradients_in_place_of_parameters(root):
        return _gathered(root)


@contextmanager
def _gradients_in_place_of_parameters(root: nn.Module) -> Iterator[None]:
    parameters = list(root.parameters())
    with torch.no_grad():
        kept = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.zero_()
            else:
                parameter.copy_(parameter.grad)
        try:
            yield
        finally:
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    return _copy(gradient if gradient.layout is torch.strided else gradient.to_dense())


def _copy(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.to("cpu", copy=True)


def _own_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
