"""When a host brings gradients together, how that is held back, and what a loss must lead to for it.

Each class is one kind of host; all of them are stated in terms of one micro-batch in hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.gradients import first_parameter, graph_of, touching
from lightning_tokennorm.reduction import fsdp_units, sharded_groups


class Syncing:
    """A model that nothing wraps: if its gradients are brought together, then by hand at the end of a window.

    Args:
        model: The model; ``None`` where there is no single one.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._trained = {} if model is None else {id(each): each for each in model.parameters()}

    def held_back(self) -> AbstractContextManager[None]:
        """A context for the forward and the backward of a micro-batch that is not the last of its window."""
        return nullcontext()

    def let_through(self) -> AbstractContextManager[None]:
        """A context for the forward and the backward of a window's last micro-batch."""
        return nullcontext()

    def waits_in_forward(self) -> bool:
        """Whether the forward of the micro-batch in hand waits for the other ranks."""
        return False

    def waits_in_backward(self, *, is_last: bool) -> bool:
        """Whether the backward of the micro-batch in hand, or what follows it, waits for the other ranks."""
        return is_last

    def prepare(self, loss: Tensor, where: str, *, has_tokens: bool) -> Tensor | None:
        """The loss with a graph whose backward every rank can run.

        Args:
            loss: The loss.
            where: Which one it is, for the text of an error.
            has_tokens: Whether its micro-batch has supervised tokens.

        Returns:
            The loss; ``None`` where there is nothing to run.

        Raises:
            TokenNormError: It leads to no parameter that is trained.
        """
        parameters = self._leaves()
        if loss.requires_grad and not (has_tokens and parameters):
            return loss
        found = None if not loss.requires_grad else first_parameter(loss, dict(parameters))
        if found is not None or (loss.requires_grad and graph_of(loss).hides_a_graph):
            return loss
        if has_tokens:
            raise TokenNormError(
                f"The loss of {where} has supervised tokens, but no way leads from it to a parameter of the model: it"
                " was detached, made anew, or comes from other parameters. Compute it from the model's output; to"
                " leave a batch out, set its labels to -100."
            )
        return self._prepare_empty(loss, where)

    def _leaves(self) -> Mapping[int, nn.Parameter]:
        """The parameters as autograd sees them, by their ``id``."""
        return self._trained

    def _prepare_empty(self, loss: Tensor, where: str) -> Tensor | None:
        return None

    def start_backward(self) -> None:
        """Look at the model before the backward of a micro-batch with tokens."""

    def check_backward(self, loss: Tensor, where: str) -> None:
        """Refuse a backward of a micro-batch with tokens that has not reached the model as a whole."""


_HAS_RUN_BACKWARD: WeakSet[DistributedDataParallel] = WeakSet()


class DDPSyncing(Syncing):
    """A model in DDP, which waits in the backward, and in a forward for buffers that it keeps alike."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(None)
        self._model = model
        ignored = set(getattr(model, "parameters_to_ignore", ()))
        self._reduced = [
            each for name, each in model.module.named_parameters() if each.requires_grad and name not in ignored
        ]
        self._trained = {id(each): each for each in self._reduced}

    def held_back(self) -> AbstractContextManager[None]:
        # DDP learns a static graph in its very first backward, which fails an assertion of torch under `no_sync`.
        # Reducing that one at once is exact: what all ranks share does not change when it is averaged again.
        if self._model.static_graph and self._model not in _HAS_RUN_BACKWARD:
            return nullcontext()
        return self._model.no_sync()

    def waits_in_forward(self) -> bool:
        return bool(self._model.will_sync_module_buffers())  # type: ignore[no-untyped-call]

    def waits_in_backward(self, *, is_last: bool) -> bool:
        return bool(self._model.require_backward_grad_sync)

    def prepare(self, loss: Tensor, where: str, *, has_tokens: bool) -> Tensor | None:
        if has_tokens:
            return super().prepare(loss, where, has_tokens=True)
        graph = graph_of(loss)
        missing = [each for each in self._reduced if id(each) not in graph.reached]
        partly = self._model.find_unused_parameters or self._model.static_graph
        if not missing or graph.hides_a_graph or (partly and len(missing) < len(self._reduced)):
            return loss
        if partly:
            raise TokenNormError(
                f"The loss of {where}, which has no supervised tokens, leads to no parameter of the model, and with"
                " `find_unused_parameters` or `static_graph` DDP has to see the graph of every micro-batch. Compute it"
                " from the model's output, whatever its value: it adds nothing."
            )
        return touching(loss, missing)

    def start_backward(self) -> None:
        _HAS_RUN_BACKWARD.add(self._model)

    def check_backward(self, loss: Tensor, where: str) -> None:
        if not self._model.require_backward_grad_sync:
            return
        try:
            self._model.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise TokenNormError(
                f"After the backward of {where}, DDP still waits for parameters that the loss does not lead to, so"
                " gradients would differ between ranks. Use `find_unused_parameters=True`, or let the loss depend on"
                f" all of them. DDP says: {error}"
            ) from None


class _ShardedSyncing(Syncing):
    """A model in shards, which waits wherever parameters are gathered: in every forward and every backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(None)
        self._model = model

    def waits_in_forward(self) -> bool:
        return True

    def waits_in_backward(self, *, is_last: bool) -> bool:
        return True

    def prepare(self, loss: Tensor, where: str, *, has_tokens: bool) -> Tensor | None:
        prepared = super().prepare(loss, where, has_tokens=has_tokens)
        if prepared is not None and not has_tokens:
            graph = graph_of(prepared)
            missing = [each for key, each in self._leaves().items() if each.requires_grad and key not in graph.reached]
            if missing and not graph.hides_a_graph:
                raise TokenNormError(
                    f"The loss of {where}, where it or one of its heads has no supervised tokens, leads to a part of"
                    " the model only, while other ranks wait for this one in all of its shards. Let the whole model be"
                    " one shard (`fully_shard(model)` alone), or let the losses of all heads depend on all parts."
                )
        return prepared

    def _prepare_empty(self, loss: Tensor, where: str) -> Tensor | None:
        raise TokenNormError(
            f"The loss of {where}, which has no supervised tokens, has no graph, while other ranks wait for this one to"
            " go through the model's shards. Compute it from the model's output, whatever its value: it adds nothing."
        )


class FSDPSyncing(_ShardedSyncing):
    """A model with `FullyShardedDataParallel` in it."""

    @contextmanager
    def held_back(self) -> Iterator[None]:
        with ExitStack() as stack:
            for root in FullyShardedDataParallel.fsdp_modules(self._model, root_only=True):
                stack.enter_context(root.no_sync())
            yield

    def _leaves(self) -> Mapping[int, nn.Parameter]:
        flat = (unit._flat_param for unit in fsdp_units(self._model))
        return {id(each): each for each in flat if each is not None}


class FullyShardSyncing(_ShardedSyncing):
    """A model that `fully_shard` was called on, in parts or as a whole."""

    @contextmanager
    def held_back(self) -> Iterator[None]:
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        # Fabric's `no_backward_sync(enabled=False)` leaves the reduction off for whoever comes next.
        self._set_sync(True)
        yield

    def _set_sync(self, on: bool) -> None:
        for module in self._model.modules():
            if hasattr(module, "_get_fsdp_state"):
                module.set_requires_gradient_sync(on, recurse=False)  # type: ignore[operator]

    def _leaves(self) -> Mapping[int, nn.Parameter]:
        # while they are gathered, autograd sees these in place of the shards
        held = (each for group in sharded_groups(self._model) for each in group.fsdp_params)
        return {id(each): each for each in (getattr(one, "_unsharded_param", None) for one in held) if each is not None}


def syncing_of(model: nn.Module | None) -> Syncing:
    """What holds for a model: in DDP, in FSDP, with `fully_shard`, or as it is."""
    if isinstance(model, DistributedDataParallel):
        return DDPSyncing(model)
    if model is not None and fsdp_units(model):
        return FSDPSyncing(model)
    if model is not None and sharded_groups(model):
        return FullyShardSyncing(model)
    return Syncing(model)
