"""DDP's reducer: which parameters it knows, and whether a backward reached it.

A backward that no parameter of DDP takes part in reduces nothing: this rank would step on its own gradients, the others
would wait, and the next window would meet the stale reducer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.gradients import first_parameter, graph_of


class ReducerWatch:
    """Looks at one parameter after each backward, and searches the graph only where that one stayed as it was.

    Args:
        ddp: The wrapped module.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        named = [(name, each) for name, each in ddp.module.named_parameters() if not self._ignores(name)]
        self._named = [(name, each) for name, each in named if each.requires_grad]
        self.parameters: Sequence[nn.Parameter] = [each for _, each in self._named]
        """The parameters that DDP reduces."""
        self._by_id = {id(each): each for each in self.parameters}
        self._outside: list[tuple[str, Tensor]] = []
        self._averages = dist.get_world_size(ddp.process_group) > 1  # else nobody could drift apart
        self._optimized = -1
        self._witness: nn.Parameter | None = None
        self._before: tuple[Tensor | None, int] = (None, 0)

    def _ignores(self, name: str) -> bool:
        # torch's spelling of a parameter of the outermost module begins with a dot
        return (name if "." in name else f".{name}") in self._ignored

    @property
    def may_be_partial(self) -> bool:
        """Whether DDP copes with a loss that leads to some of its parameters only."""
        return bool(self._ddp.find_unused_parameters or self._ddp.static_graph)

    def start_backward(self) -> None:
        """Remember the state of the parameter that is looked at."""
        self._before = self._state()

    def check_backward(self, loss: Tensor, where: str) -> None:
        """Check that the backward of a loss has reached the parameters; nothing has been stepped yet.

        Args:
            loss: The loss, whose backward has been run since `start_backward`.
            where: Which one it is, for the text of an error.

        Raises:
            TokenNormError: It has reached none of them, or DDP still waits for some.
        """
        gradient, version = self._state()
        if self._witness is None or (gradient is self._before[0] and version == self._before[1]):
            found = first_parameter(loss, self._by_id)
            if found is None and not graph_of(loss).hides_a_graph:
                raise TokenNormError(
                    f"The loss of {where} has supervised tokens, but no way leads from it to a parameter that DDP"
                    " trains: it was detached, made anew, or comes from other parameters. Return a loss that was"
                    " computed from the module's parameters; to leave a batch out, set its labels to -100."
                )
            self._witness = found
        if self._ddp.require_backward_grad_sync and self._averages:
            try:
                self._ddp.reducer._check_reducer_finalized()
            except RuntimeError:
                # in words of its own: Lightning takes those of DDP for its own advice, without rank and batch
                raise TokenNormError(
                    f"After the backward of {where}, DDP still waits for parameters that the loss does not lead to"
                    f"{self._list_missing(loss)}, so gradients would differ between ranks. Use"
                    " `find_unused_parameters=True`, or let the loss depend on all of them."
                ) from None

    def _list_missing(self, loss: Tensor) -> str:
        graph = graph_of(loss)
        names = [name for name, each in self._named if id(each) not in graph.reached]
        if graph.hides_a_graph or not names:
            return ""
        return f" ({', '.join(f'`{name}`' for name in names[:3])}{', …' if len(names) > 3 else ''})"

    def _state(self) -> tuple[Tensor | None, int]:
        gradient = None if self._witness is None else self._witness.grad
        return gradient, 0 if gradient is None else gradient._version

    def trained_outside(self, optimizers: Sequence[Any]) -> str | None:
        """A parameter that is trained although DDP does not know it, so that ranks would drift apart.

        Args:
            optimizers: The optimizers.

        Returns:
            What is wrong and what to change; ``None`` where nothing is.
        """
        optimized = sum(len(group["params"]) for each in optimizers for group in each.param_groups)
        if optimized != self._optimized:  # at the start, and where a callback has added some
            self._optimized = optimized
            names = {id(each): name for name, each in self._ddp.module.named_parameters()}
            trained = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
            outside = [
                (names.get(id(each), "of the optimizer"), each) for each in trained if id(each) not in self._by_id
            ]
            self._outside = [(name, each) for name, each in outside if not self._ignores(name)]
        for name, each in self._outside:
            if each.requires_grad:
                return (
                    f"Parameter `{name}` is trained, but DDP does not know it: it was frozen, or did not exist, when"
                    " training started, so ranks would drift apart. Let it require a gradient when the fit starts, or"
                    " start a new `fit` after it was unfrozen; `find_unused_parameters=True` allows what a phase of"
                    " the training does not use."
                )
        return None
