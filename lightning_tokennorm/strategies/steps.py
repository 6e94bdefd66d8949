"""What a training step leaves behind: which of it has to be undone, and a loss that leads nowhere.

Both are looked at inside the wrapper's forward: after it has synchronised buffers, and before it looks for the
parameters that a loss leads to.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_tokennorm import _compat
from lightning_tokennorm.gradients import graph_of, touching

_LIGHTNINGS_OWN = frozenset(vars(pl.LightningModule())) | frozenset(vars(nn.Module()))
"""Attributes that are Lightning's and torch's business."""


@contextmanager
def around_training_step(
    module: pl.LightningModule, wrap: Callable[[partial[STEP_OUTPUT]], STEP_OUTPUT]
) -> Iterator[None]:
    """Run `wrap` in the place of the module's `training_step`, which Lightning looks up inside the wrapper's forward.

    Args:
        module: The module.
        wrap: Called with the step, ready to be called without arguments; returns what it returns.
    """
    own, before = module.training_step, vars(module).get("training_step")
    module.training_step = lambda *args, **kwargs: wrap(partial(own, *args, **kwargs))  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.training_step
        else:
            module.training_step = before  # type: ignore[method-assign]


def with_way_to(output: STEP_OUTPUT, parameters: Sequence[nn.Parameter], *, may_be_partial: bool) -> STEP_OUTPUT:
    """What the step of a micro-batch without tokens returned, with a loss whose backward all parameters take part in.

    "No labels here" is often written as a fresh zero, or as None. Its gradient is zero in any case, but DDP waits for
    each parameter.

    Args:
        output: What it returned.
        parameters: Those that have to take part.
        may_be_partial: Whether a loss may lead to some of them only.
    """
    loss = loss_of(output)
    if loss is not None and not isinstance(loss, Tensor):
        return output
    if loss is None:
        loss = torch.zeros((), device=parameters[0].device) if parameters else torch.zeros(())
    graph = graph_of(loss)
    missing = [parameter for parameter in parameters if id(parameter) not in graph.reached]
    if not missing or graph.hides_a_graph or (may_be_partial and len(missing) < len(parameters)):
        return output
    return with_loss(output, touching(loss, missing))


def loss_of(output: STEP_OUTPUT) -> Any:
    """The loss in what a step returned; ``None`` where there is none."""
    return output.get("loss") if isinstance(output, Mapping) else output


def with_loss(output: STEP_OUTPUT, loss: Tensor) -> STEP_OUTPUT:
    """What a step returned, with another loss in it."""
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss


class Trace:
    """Remembers what a forward may change, to put it back: buffers, random states, plain attributes, logged values.

    Args:
        module: The module.
        trainer: Its Trainer.
    """

    def __init__(self, module: pl.LightningModule, trainer: pl.Trainer) -> None:
        self._undo: list[Callable[[], None]] = [_compat.remember_logged(trainer)]
        self._random = ExitStack()
        self._random.enter_context(isolate_rng())
        for part in module.modules():
            self._remember_buffers(part)
            if not isinstance(part, FullyShardedDataParallel):  # whose state goes on with the backward
                self._remember_attributes(part)

    def undo(self) -> None:
        """Put everything back; to be called after the backward, which may need what the forward left."""
        self._random.close()
        with torch.no_grad():
            while self._undo:
                self._undo.pop()()

    def _remember_buffers(self, part: nn.Module) -> None:
        for name, buffer in part.named_buffers(recurse=False):
            restore = _remember(buffer)

            def put_back(name: str = name, buffer: Tensor = buffer, restore: Callable[[], None] = restore) -> None:
                restore()
                if getattr(part, name, None) is not buffer:
                    setattr(part, name, buffer)

            self._undo.append(put_back)

    def _remember_attributes(self, part: nn.Module) -> None:
        attributes = {name: value for name, value in vars(part).items() if not _is_left_alone(name, value)}
        contents = [_remember(value) for value in attributes.values()]

        def put_back() -> None:
            for name, value in list(vars(part).items()):
                if name not in attributes and not _is_left_alone(name, value):
                    delattr(part, name)
            vars(part).update(attributes)
            for restore in contents:
                restore()

        self._undo.append(put_back)


_DATA = (int, float, complex, str, bytes, type(None), Tensor, list, deque, dict, set, tuple)
_MOST_ITEMS = 256


def _is_left_alone(name: str, value: Any) -> bool:
    """Whether an attribute is no business of a step's: Lightning's, a method, or a parameter as FSDP shows it."""
    if name in _LIGHTNINGS_OWN or isinstance(value, (FunctionType, MethodType)):
        return True
    # FSDP puts views of the gathered parameters into the module while it runs, and takes them away with the backward.
    return isinstance(value, Tensor) and isinstance(value._base, nn.Parameter)


def _remember(value: Any, depth: int = 4) -> Callable[[], None]:
    """A function that gives a value back the contents that it has now.

    Contents are tensors, arrays, generators, containers of them, and objects that hold nothing but such data, as meters
    do. What is in a long container is not looked at one by one.

    Args:
        value: Anything; of what cannot be told what it holds nothing is remembered.
        depth: How many containers may be in each other.
    """
    if isinstance(value, Tensor):
        return _remember_tensor(value)
    if isinstance(value, torch.Generator):
        return partial(_set_state, value, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if (bits := getattr(value, "bit_generator", None)) is not None:  # NumPy's
        return partial(setattr, bits, "state", bits.state)
    if hasattr(value, "__array_interface__") and hasattr(value, "copy"):
        return partial(value.__setitem__, ..., value.copy())
    before: Any
    inner: Any
    put_back: Callable[[Any], Any]
    if isinstance(value, (list, deque)):
        before, inner, put_back = value.copy(), value, value.extend
    elif isinstance(value, dict):
        before, inner, put_back = value.copy(), value.values(), value.update
    elif isinstance(value, set):
        before, inner, put_back = value.copy(), (), value.update
    elif hasattr(value, "__dict__") and all(isinstance(each, _DATA) for each in vars(value).values()):
        return _remember(vars(value), depth)
    else:
        return lambda: None
    contents = [_remember(each, depth - 1) for each in inner] if depth and len(value) <= _MOST_ITEMS else []

    def restore() -> None:
        value.clear()
        put_back(before)
        for each in contents:
            each()

    return restore


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _remember_tensor(value: Tensor) -> Callable[[], None]:
    if isinstance(value, nn.Parameter) or (value.layout is torch.strided and 0 in value.stride()):
        return lambda: None  # an expanded tensor cannot be changed in place
    contents = value.detach().clone()

    def restore() -> None:
        # always: batch norm changes its statistics without a trace in their version
        value.detach().copy_(contents)

    return restore
