"""`TokenNormDDP`: DDP in which every supervised token of an update has the same weight."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tokennorm import _compat
from lightning_tokennorm.counting import TokenCounter
from lightning_tokennorm.reduction import Reduction
from lightning_tokennorm.strategies.base import TokenNormStrategy
from lightning_tokennorm.strategies.comm_hooks import HookReduces, what_hook_leaves
from lightning_tokennorm.strategies.options import check_choice, refuse_unknown
from lightning_tokennorm.strategies.reducer import ReducerWatch
from lightning_tokennorm.strategies.refusals import refuse_changed_ddp, refuse_hook_over_another_group
from lightning_tokennorm.strategies.steps import with_way_to
from lightning_tokennorm.window import LossReduction


class TokenNormDDP(TokenNormStrategy, DDPStrategy):
    """A `DDPStrategy` whose gradient does not depend on how the tokens are split over ranks and micro-batches.

    At the start of each accumulation window the supervised tokens of all its micro-batches on all ranks are counted
    and exchanged (``N``), and each micro-batch's loss is rescaled before its backward, so that the update uses
    ``(sum over all tokens of their loss gradients) / N``. See `lightning_tokennorm.window` for the algebra.

    Args:
        count_tokens: Counts the supervised tokens of a batch as the loader yields it: a callable that takes the batch
            and returns an int, a float (a sum of token weights) or a 0-dim tensor. Default: `SupervisedTokens()`.
        loss_reduction: What ``training_step`` returns: ``"mean"`` over the micro-batch's supervised tokens, or their
            ``"sum"``.
        counting: ``"lookahead"``: count before the forward, on the host, by reading ahead in the loader.
        on_empty: What happens to a window in which no rank has a token: ``"skip"`` leaves parameters and optimizer
            state untouched on all ranks (``global_step`` and LR schedulers advance, as after an AMP overflow) and warns
            at the first and at the end, and 50 such windows at the start are an error; ``"error"`` raises on all ranks
            before any backward.
        uneven: What happens where ranks have different numbers of micro-batches: ``"pad"`` lets ranks whose data has
            ended go on with micro-batches that contribute nothing, so that every batch of every rank is trained on;
            ``"error"`` raises on all ranks at the exchange.
        audit: Whether to compare, for each micro-batch whose ``training_step`` returns
            ``{"loss": ..., "num_tokens": ...}``, that count with the one from the look-ahead. Where they differ, all
            ranks raise before the update. Costs a synchronisation per micro-batch and a collective per window.
        head_weights: The weights of several losses by their names, 1 where none is given. ``count_tokens`` counts them
            (`Heads(lm=..., mtp=...)`), ``training_step`` returns ``{"losses": {"lm": ..., "mtp": ...}}``, and each is
            divided by a count of its own.
        accumulate_grad_batches: With manual optimization, ``K``: of how many micro-batches an update is made, 1 by
            default. The module steps where ``self.trainer.strategy.window.is_last``. With automatic optimization it is
            set on the Trainer.
        ddp_hook_reduces: What a ``ddp_comm_hook`` leaves of the ranks' gradients, ``"mean"`` or ``"sum"``. Known for
            torch's averaging hooks; any other has to be declared, lest every update be ``W`` times off.
        **ddp_kwargs: Passed on to `DDPStrategy`, and by it to `torch.nn.parallel.DistributedDataParallel`.

    Raises:
        TypeError: ``count_tokens`` is not callable, or an option is not known.
        ValueError: Another option has a value that is not listed above, or a ``ddp_comm_hook`` is neither known nor
            declared.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
        >>> trainer = Trainer(
        ...     accelerator="cpu",
        ...     devices=2,
        ...     accumulate_grad_batches=4,
        ...     logger=False,
        ...     strategy=TokenNormDDP(),
        ...     callbacks=[TokenMeanMetric()],
        ... )
        >>> trainer.strategy.loss_reduction
        'mean'
    """

    def __init__(
        self,
        *,
        count_tokens: TokenCounter | None = None,
        loss_reduction: LossReduction = "mean",
        counting: Literal["lookahead"] = "lookahead",
        on_empty: Literal["skip", "error"] = "skip",
        uneven: Literal["pad", "error"] = "pad",
        audit: bool = False,
        head_weights: Mapping[str, float] | None = None,
        accumulate_grad_batches: int | None = None,
        ddp_hook_reduces: HookReduces | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        check_choice("TokenNormDDP", "ddp_hook_reduces", ddp_hook_reduces, (None, "mean", "sum"))
        refuse_unknown(type(self), ddp_kwargs, (DDPStrategy.__init__, DistributedDataParallel.__init__))
        self._comm_hook, self._comm_state = ddp_kwargs.get("ddp_comm_hook"), ddp_kwargs.get("ddp_comm_state")
        self._hook_leaves = what_hook_leaves(
            self._comm_hook, ddp_kwargs.get("ddp_comm_wrapper"), self._comm_state, ddp_hook_reduces
        )
        if ddp_kwargs.get("static_graph") and self._hook_leaves == "sum":
            raise ValueError(
                "`static_graph=True` got with a `ddp_comm_hook` that leaves the ranks' sum; expected one that leaves"
                " their mean: the first micro-batch is reduced twice there, which only a mean survives."
            )
        super().__init__(
            count_tokens=count_tokens,
            loss_reduction=loss_reduction,
            counting=counting,
            on_empty=on_empty,
            uneven=uneven,
            audit=audit,
            head_weights=head_weights,
            accumulate_grad_batches=accumulate_grad_batches,
            **ddp_kwargs,
        )
        self._given_group: dist.ProcessGroup | None = ddp_kwargs.get("process_group")
        self._ran_backward = False
        self._reducer_watch: ReducerWatch | None = None

    @override
    def _reduction(self) -> Reduction:
        # N and W have to come from the group that DDP averages over.
        group = self._given_group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        return Reduction(group, divided_by=None if self._hook_leaves == "mean" else 1)

    @override
    def _check_setup(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        reduction = self._reduction()
        if self.model.process_group is not reduction.group:  # another one was given to DDP on its way
            self._given_group = self.model.process_group
            self._feed_in_use.connect(self._new_exchange(self._reduction()))
        refuse_hook_over_another_group(self._comm_hook, self._comm_state, self.model.process_group)
        _compat.register_comm_hook(self)
        self._reducer_watch = ReducerWatch(self.model)
        self._ran_backward = False

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        refuse_changed_ddp(self.model, self._comm_hook)

    @override
    def _find_problem(self) -> str | None:
        return None if self._reducer_watch is None else self._reducer_watch.trained_outside(self.optimizers)

    @override
    def _give_way_to_parameters(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        watch = self._reducer_watch
        assert watch is not None
        return with_way_to(output, watch.parameters, may_be_partial=watch.may_be_partial)

    @override
    def _start_backward(self) -> None:
        assert self._reducer_watch is not None
        self._reducer_watch.start_backward()

    @override
    def _check_backward(self, loss: Tensor, where: str) -> None:
        assert self._reducer_watch is not None
        self._reducer_watch.check_backward(loss, where)

    @override
    def block_backward_sync(self) -> Any:  # a context manager
        # DDP learns a static graph in its very first backward, which therefore must not run under `no_sync`: torch
        # fails an assertion of its own there. Reducing that micro-batch at once is exact: the window's last backward
        # averages it again, and the average of what all ranks share is what they share.
        if getattr(self.model, "static_graph", False) and not self._ran_backward:
            return nullcontext()
        return super().block_backward_sync()

    @override
    def backward(self, closure_loss: Any, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        result = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._ran_backward = True
        return result

    @override
    def teardown(self) -> None:
        super().teardown()
        self._reducer_watch = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of this family; a name that is already taken is left as it is."""
        for name, start_method in (
            ("tokennorm_ddp", "popen"),
            ("tokennorm_ddp_spawn", "spawn"),
            ("tokennorm_ddp_fork", "fork"),
            ("tokennorm_ddp_notebook", "fork"),
        ):
            if name not in strategy_registry:
                strategy_registry.register(
                    name,
                    cls,
                    description=f"DDP with token-normalised gradients and `start_method` '{start_method}'",
                    start_method=start_method,
                )
