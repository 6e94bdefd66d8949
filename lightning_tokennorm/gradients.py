"""The graph behind a loss: which parameters it leads to, and how a micro-batch adds exactly nothing to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_ACCUMULATE_GRAD: Any = type(torch.zeros((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


@dataclass
class Graph:
    """What lies behind a loss."""

    leaves: list[Any] = field(default_factory=list)
    """The nodes that add to the gradient of a leaf tensor."""
    functions: list[Any] = field(default_factory=list)
    """The nodes of functions written in Python, which can hide a graph of their own (reentrant checkpoints)."""
    reached: set[int] = field(default_factory=set)
    """The ``id`` of each leaf tensor."""

    @property
    def hides_a_graph(self) -> bool:
        """Whether a reentrant checkpoint is part of it: the parameters inside are not seen from here."""
        return any("Checkpoint" in type(node).__name__ for node in self.functions)


def graph_of(loss: Tensor) -> Graph:
    """Walk the whole graph of a loss; some 15 ms for a transformer of 24 layers.

    Args:
        loss: The loss; without a graph the result is empty.
    """
    graph = Graph()
    for node in _nodes(loss):
        if type(node) is _ACCUMULATE_GRAD:
            graph.leaves.append(node)
            graph.reached.add(id(node.variable))
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            graph.functions.append(node)
    if loss.grad_fn is None and loss.requires_grad:
        graph.reached.add(id(loss))
    return graph


def first_parameter(loss: Tensor, parameters: dict[int, nn.Parameter]) -> nn.Parameter | None:
    """The first of these parameters that a search from the loss meets; usually after a few nodes.

    Args:
        loss: The loss.
        parameters: By their ``id``.
    """
    if loss.grad_fn is None:
        return parameters.get(id(loss))
    for node in _nodes(loss):
        if type(node) is _ACCUMULATE_GRAD and (found := parameters.get(id(node.variable))) is not None:
            return found
    return None


def _nodes(loss: Tensor) -> Iterator[Any]:
    todo: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(following for following, _ in node.next_functions)


@contextmanager
def zero_gradients(loss: Tensor) -> Iterator[None]:
    """Let the backward of a loss, run in this context, add zeros to all gradients, whatever flows through its graph.

    The mean over no tokens is NaN, and so may be every gradient behind it: 0 * NaN is NaN, so scaling does not remove
    it. A hook in front of each leaf of the graph replaces what arrives just before it is accumulated; it works on
    parameters that a wrapper keeps in pieces, too. The backward itself still runs, so that wrappers see each parameter
    become ready as in any other micro-batch, and no rank waits for this one. Anomaly detection is off meanwhile, since
    a NaN here means nothing.

    Args:
        loss: The loss, with its graph.
    """
    graph = graph_of(loss)
    handles = [node.register_prehook(_zeros) for node in (*graph.leaves, *graph.functions)]
    try:
        with torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


class _Touch(torch.autograd.Function):
    """The loss itself; its backward gives each of the tensors a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient, *(torch.zeros_like(each) for each in ctx.saved_tensors))


def touching(loss: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The same loss with a graph that leads to all of these tensors, too, and adds zeros to their gradients."""
    touched: Tensor = _Touch.apply(loss, *tensors)  # type: ignore[no-untyped-call]
    return touched


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients in place, where there are any."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
