"""`TokenNormModelParallel`: FSDP2 and tensor parallelism, in which every supervised token has the same weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tokennorm.counting import TokenCounter
from lightning_tokennorm.reduction import Reduction
from lightning_tokennorm.strategies.clipping import clip_over_meshes
from lightning_tokennorm.strategies.fsdp2_modules import FullyShardedModules
from lightning_tokennorm.strategies.options import refuse_unknown
from lightning_tokennorm.strategies.sharded import ShardedStrategy
from lightning_tokennorm.window import LossReduction


class TokenNormModelParallel(ShardedStrategy, ModelParallelStrategy):
    """A `ModelParallelStrategy` whose gradient does not depend on how the tokens are split over ranks.

    As `TokenNormDDP`, for a model that ``configure_model`` splits by itself: over the dimension ``"data_parallel"`` of
    ``self.device_mesh`` with `fully_shard`, over ``"tensor_parallel"`` with `parallelize_module`. Tokens are counted
    over the data-parallel dimension. Tensor-parallel ranks are copies that have to be given the same batches: that is
    checked in each window, and all ranks refuse together where it is not so.

    Args:
        data_parallel_size: The number of model replicas, as in `ModelParallelStrategy`.
        tensor_parallel_size: The number of ranks that share a replica, as in `ModelParallelStrategy`.
        count_tokens: As in `TokenNormDDP`; and so are the next seven.
        loss_reduction: See there.
        counting: See there.
        on_empty: See there.
        uneven: See there.
        audit: See there.
        head_weights: See there.
        accumulate_grad_batches: See there.
        sync_each_micro_batch: Whether gradients are reduced after every micro-batch, as `ModelParallelStrategy` does.
            With ``False`` they are reduced once per update: ``K`` times less of that communication, for the memory of
            the gradients of a whole replica on each rank.
        tokens_over: The ranks that hold batches of their own, where it is not the data-parallel dimension: the name of
            a dimension of ``device_mesh``, a tuple of names, or a `DeviceMesh`. Under context parallelism each rank
            counts its own slice, so it is both dimensions, and gradients are reduced over both:
            ``fully_shard(model, mesh=self.device_mesh._flatten())``. So it is where a mesh of two dimensions is given
            to `fully_shard` to shard over one of them and replicate over the other.
        **kwargs: Passed on to `ModelParallelStrategy`.

    Raises:
        TypeError: ``count_tokens`` is not callable, ``tokens_over`` is no mesh, or an option is not known.
        ValueError: Another option has a value that is not listed.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tokennorm import TokenNormModelParallel
        >>> trainer = Trainer(
        ...     accelerator="cpu",
        ...     devices=4,
        ...     accumulate_grad_batches=4,
        ...     logger=False,
        ...     strategy=TokenNormModelParallel(data_parallel_size=2, tensor_parallel_size=2),
        ... )
        >>> trainer.strategy.loss_reduction
        'mean'
    """

    def __init__(
        self,
        *,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        count_tokens: TokenCounter | None = None,
        loss_reduction: LossReduction = "mean",
        counting: Literal["lookahead"] = "lookahead",
        on_empty: Literal["skip", "error"] = "skip",
        uneven: Literal["pad", "error"] = "pad",
        audit: bool = False,
        head_weights: Mapping[str, float] | None = None,
        accumulate_grad_batches: int | None = None,
        sync_each_micro_batch: bool = True,
        tokens_over: DeviceMesh | str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_unknown(type(self), kwargs, (ModelParallelStrategy.__init__,))
        if isinstance(tokens_over, str):
            tokens_over = (tokens_over,)
        is_named = isinstance(tokens_over, (list, tuple)) and all(isinstance(each, str) for each in tokens_over)
        if not (tokens_over is None or is_named or isinstance(tokens_over, DeviceMesh)):
            raise TypeError(
                f"`TokenNormModelParallel(tokens_over=...)` got {tokens_over!r}; expected a `DeviceMesh`, or the name"
                " or names of dimensions of the strategy's own."
            )
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            count_tokens=count_tokens,
            loss_reduction=loss_reduction,
            counting=counting,
            on_empty=on_empty,
            uneven=uneven,
            audit=audit,
            head_weights=head_weights,
            accumulate_grad_batches=accumulate_grad_batches,
            sync_each_micro_batch=sync_each_micro_batch,
            **kwargs,
        )
        self._tokens_over = tokens_over
        self._copies: tuple[tuple[int, ...], ...] | None = None
        self._divided_by: float | None = None

    @property
    def is_copy(self) -> bool:
        """Whether this rank's batches are those of another rank, where they are counted."""
        return self._copies is not None and all(ranks[0] != self.global_rank for ranks in self._copies)

    # ---- the ranks

    @override
    def setup_environment(self) -> None:
        self._copies = self._divided_by = None
        super().setup_environment()
        self._reduction()  # where nothing is fitted, too: metrics want to know which ranks are copies

    @override
    def _reduction(self) -> Reduction:
        if self._copies is None:
            self._copies = self._find_copies()
        # All ranks go through their windows together, copies as well, so that all refuse what one refuses.
        return Reduction(dist.group.WORLD, self._divided_by, self._copies)

    def _token_ranks(self) -> list[int]:
        """The ranks with batches of their own, this one or a copy in its place among them."""
        mesh = self._tokens_over
        if mesh is None:
            mesh = ("data_parallel",)
        if not isinstance(mesh, DeviceMesh):
            known = self.device_mesh.mesh_dim_names or ()
            if unknown := [name for name in mesh if name not in known]:
                raise MisconfigurationException(
                    f"`TokenNormModelParallel(tokens_over=...)` got {unknown[0]!r}; expected dimensions of the mesh:"
                    f" {', '.join(known)}."
                )
            # in the order of the mesh, which torch insists on
            mesh = self.device_mesh[tuple(name for name in known if name in mesh)]
        ranks: list[int] = mesh.mesh.flatten().tolist()
        return ranks

    def _find_copies(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that stand in the same place among those that hold batches of their own."""
        mine = self._token_ranks()
        places: list[Any] = [None] * self.world_size
        dist.all_gather_object(places, (len(mine), mine.index(self.global_rank) if self.global_rank in mine else -1))
        sizes, at = {size for size, _ in places}, [place for _, place in places]
        copies = tuple(tuple(rank for rank, place in enumerate(at) if place == own) for own in range(len(mine)))
        if len(sizes) > 1 or -1 in at or len({len(ranks) for ranks in copies}) > 1:
            raise MisconfigurationException(
                "`TokenNormModelParallel(tokens_over=...)` got a mesh that does not reach all ranks alike: rank"
                f" {next((rank for rank, place in enumerate(at) if place == -1), 0)} is outside of it, or it differs"
                " in size between ranks. Give a dimension of a mesh over all ranks, or several."
            )
        return copies

    # ---- set-up

    @override
    def _check_setup(self) -> None:
        assert self.model is not None
        self._units = FullyShardedModules(self.model, self._token_ranks())
        self._divided_by = self._units.divided_by()
        if problem := self._find_problem():
            raise MisconfigurationException(problem)
        plugin = self.precision_plugin
        clip_on_one_mesh = plugin.clip_grad_by_norm

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            if not clip_over_meshes(list(plugin.main_params(optimizer)), clip_val):
                clip_on_one_mesh(optimizer, clip_val)

        plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]

    @override
    def teardown(self) -> None:
        super().teardown()
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)

    @override
    def _find_problem(self) -> str | None:
        if self._units is None or self._divided_by is None:
            return None
        problem: str | None = self._units.find_problem(self.optimizers, self._divided_by)
        return problem

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name of this strategy; one that is already taken is left as it is."""
        if "tokennorm_model_parallel" not in strategy_registry:
            strategy_registry.register(
                "tokennorm_model_parallel", cls, description="FSDP2 and tensor parallelism, token-normalised gradients"
            )
