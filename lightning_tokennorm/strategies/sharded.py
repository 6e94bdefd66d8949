"""What strategies share whose model is in pieces that are gathered one at a time: FSDP's units, FSDP2's modules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.gradients import touching
from lightning_tokennorm.strategies.base import TokenNormStrategy
from lightning_tokennorm.strategies.options import check_choice
from lightning_tokennorm.strategies.steps import Trace, loss_of, with_loss


class Units(Protocol):
    """The pieces of a model; all ranks go through them in the same order, forward and backward."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Reduce nothing in this context."""

    def visits(self) -> AbstractContextManager[Any]:
        """Note which units a step goes through in this context."""

    def ways(self, loss: Tensor | None, visits: Any) -> Sequence[Tensor] | None:
        """What leads to the units that a loss does not lead to; ``None`` where the step went through no unit."""

    def check_backward(self, loss: Tensor, where: str) -> None:
        """Refuse a backward that has reached no unit."""


class ShardedStrategy(TokenNormStrategy):
    """Goes before a host that keeps parameters and gradients in shards.

    Args:
        sync_each_micro_batch: Whether gradients are reduced after every micro-batch, else once per update.
        **kwargs: As in `TokenNormStrategy`.
    """

    def __init__(self, *, sync_each_micro_batch: bool, **kwargs: Any) -> None:
        check_choice(type(self).__name__, "sync_each_micro_batch", sync_each_micro_batch, (False, True))
        super().__init__(**kwargs)
        self._sync_each_micro_batch = sync_each_micro_batch
        self._units: Any = None  # the `Units`, while fitting
        self._visits: Any = None  # the units that the step of a micro-batch without tokens has gone through
        self._stand_in: Any = None  # what a step of a batch with tokens was called with, on the host

    @override
    def teardown(self) -> None:
        super().teardown()
        self._units = self._visits = self._stand_in = None

    # ---- checkpoints, to which every rank adds what it holds

    @property
    def _lacks_shards(self) -> bool:
        """Whether those of other ranks cannot be had."""
        return self._ends_alone and self.world_size > 1

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {} if self._lacks_shards else super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {} if self._lacks_shards else super().optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if not self._lacks_shards:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        warnings.warn(
            f"No checkpoint is written to {filepath}: a rank has failed, and under `{type(self).__name__}` each rank"
            " holds a part of the model, so one alone has nothing to save. Go on from the last checkpoint that all"
            " ranks have written.",
            stacklevel=2,
        )

    # ---- the step

    @override
    def block_backward_sync(self) -> Any:  # a context manager
        if self._sync_each_micro_batch or self._units is None:
            return nullcontext()
        units: Units = self._units
        return units.no_sync()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        feed = self._feed_in_use
        if self._stand_in is None and feed.windows is not None and feed.windows.num_tokens_in_hand():
            self._stand_in = _on_host(args, kwargs)  # before the step, which may change them
        return super().training_step(*args, **kwargs)

    @override
    def _waits_in_backward(self, *, is_last: bool) -> bool:
        return super()._waits_in_backward(is_last=is_last or self._sync_each_micro_batch)

    @override
    def _step_inside_forward(self, step: partial[STEP_OUTPUT]) -> STEP_OUTPUT:
        units: Units = self._units
        with units.visits() as self._visits:
            output = super()._step_inside_forward(step)
        if self._manual is not None or not self._windows.has_idle_head:
            return output
        ways = units.ways(loss_of(output), self._visits)
        return self._with_ways(output, self._ways_of_another_batch(step.func) if ways is None else ways)

    @override
    def _give_way_to_parameters(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        if self._manual is None:  # the ways are looked for once the step is over
            return output
        units: Units = self._units
        ways = units.ways(loss_of(output), self._visits)
        if ways is None:
            raise self._model_was_not_run()
        return self._with_ways(output, ways)

    def _with_ways(self, output: STEP_OUTPUT, ways: Sequence[Tensor]) -> STEP_OUTPUT:
        if not ways:
            return output
        loss = loss_of(output)
        return with_loss(output, touching(torch.zeros((), device=self.root_device) if loss is None else loss, ways))

    def _ways_of_another_batch(self, step: Callable[..., STEP_OUTPUT]) -> Sequence[Tensor]:
        """Run the model on a batch of before: the step has left it out, and the other ranks wait in it."""
        units: Units = self._units
        module = self.lightning_module
        assert module is not None
        if self._stand_in is not None:
            if self._trace is None:
                self._trace = Trace(module, self._feed_in_use.trainer)
            arguments, keywords = move_data_to_device(copy.deepcopy(self._stand_in), self.root_device)
            with units.visits() as visits:
                loss = loss_of(step(*arguments, **keywords))
            ways = units.ways(loss, visits)
            if ways is not None:
                return ways if loss is None else [loss, *ways]
        raise self._model_was_not_run()

    def _model_was_not_run(self) -> TokenNormError:
        return TokenNormError(
            f"`training_step` did not run the model for a micro-batch without supervised tokens, {self._where()}, and"
            " there is no batch of before to run it on; other ranks wait in it. Run the forward for every batch, also"
            " where the loss does not need it."
        )

    @override
    def _check_backward(self, loss: Tensor, where: str) -> None:
        units: Units = self._units
        units.check_backward(loss, where)


def _on_host(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """A copy on the host; ``None`` where there can be none."""
    try:
        copied = move_data_to_device(copy.deepcopy((arguments, keywords)), torch.device("cpu"))
    except Exception:  # raised on this rank alone it would leave the others waiting
        return None
    return copied
