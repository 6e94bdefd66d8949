"""`TokenNormModelParallel` on real processes: the law on FSDP2, tensor-parallel copies, replicated shards and slices.

Most cases share one set of processes: to start them takes longer than to train.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_tokennorm import TokenMeanMetric, TokenNormModelParallel
from tests.helpers import law
from tests.helpers.launch import run_ranks
from tests.helpers.law import Case, Module
from tests.helpers.tiny_lm import num_supervised

ONCE: dict[str, Any] = {"sync_each_micro_batch": False}
BOTH: dict[str, Any] = {"tokens_over": ("data_parallel", "tensor_parallel")}
HAND = "hand-written"
UNEVEN = {"lengths": (5, 2), "empty": ((0, 1),)}
EMPTY_RANK = {"empty": tuple((1, index) for index in range(5))}
EMPTY_WINDOW = {"empty": tuple((rank, index) for rank in range(2) for index in range(3))}


class Sharded(Module):
    """Splits itself over the mesh.

    Args:
        case: What it is trained on.
        way: What a step does with a batch without labels, in one of the ways that people write; else as usual.
        parts: What `fully_shard` is applied to: all parts and the whole, or the ``"whole"`` only.
        divisor: Given to `set_gradient_divide_factor`.
    """

    def __init__(self, case: Case, way: str = "", parts: str = "all", divisor: float | None = None) -> None:
        super().__init__(case.loss, lr=law.LR)
        self.way, self.parts, self.divisor = way, parts, divisor

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        replicas, model = mesh["data_parallel"], self.model
        if over := getattr(self.trainer.strategy, "_tokens_over", None):
            replicas = over if not isinstance(over, tuple) else mesh if self.parts == "hybrid" else mesh._flatten()
        elif mesh["tensor_parallel"].size() > 1:
            parallelize_module(
                model,
                mesh["tensor_parallel"],
                {
                    "block.linear1": ColwiseParallel(),
                    "block.linear2": RowwiseParallel(),
                    "head": ColwiseParallel(output_layouts=Replicate()),
                },
            )
        if replicas.size() == 1 and self.parts == "none":
            return
        if self.parts != "whole":
            fully_shard(model.embed, mesh=replicas)
            fully_shard(model.block, mesh=replicas)
        fully_shard(model, mesh=replicas)
        if self.divisor is not None:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(self.divisor)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if not self.way or num_supervised(batch):
            return super().training_step(batch, batch_idx)
        if "forward" in self.way:
            self.model(batch["input_ids"])
        zero = torch.zeros((), dtype=torch.float64, requires_grad="leaf" in self.way)
        return None if "none" in self.way else {"loss": zero} if "dict" in self.way else zero


def fit(
    rank: int,
    world_size: int,
    case: Case,
    tensor_parallel_size: int = 1,
    options: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    **trainer: Any,
) -> list[Tensor]:
    """The gradients of a case; ranks that are copies get the same data."""
    strategy = TokenNormModelParallel(
        data_parallel_size=world_size // tensor_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
        loss_reduction="sum" if case.loss == "sum" else "mean",
        **(options or {}),
    )
    own = rank if len(case.lengths) == world_size else rank // tensor_parallel_size
    return law.fit(own, world_size, case, strategy, Sharded(case, **(module or {})), **trainer)


Cases = dict[str, tuple[Case, dict[str, Any], dict[str, Any]]]
NO_LABELS = Case(lengths=(4, 4), empty=((0, 1), (1, 2), (1, 3)))
TWO: Cases = {
    "K=1": (Case(accumulate=1), {}, {}),
    "K=1, once": (Case(accumulate=1, loss=HAND), ONCE, {}),
    "K=2, sum": (Case(accumulate=2, loss="sum"), {}, {}),
    "K=2, sum, stream, once": (Case(accumulate=2, loss="sum", stream=True), ONCE, {}),
    "K=3": (Case(loss=HAND), {}, {}),
    "K=3, sum": (Case(loss="sum"), {}, {"parts": "whole"}),
    "K=3, stream": (Case(loss=HAND, stream=True), {}, {}),
    "K=3, once": (Case(loss=HAND), ONCE, {}),
    "rank without a token": (Case(loss=HAND, **EMPTY_RANK), ONCE, {}),
    "window without a token": (Case(loss=HAND, **EMPTY_WINDOW), {}, {}),
    "unequal ranks": (Case(loss=HAND, **UNEVEN), {}, {}),
    "unequal ranks, once": (Case(loss=HAND, **UNEVEN), ONCE, {}),
    "unequal streams": (Case(**UNEVEN, stream=True), {}, {"parts": "whole"}),
    "divisor": (Case(loss=HAND), {}, {"divisor": 1.0}),
    "divisor, once": (Case(loss=HAND), ONCE, {"divisor": 8.0}),
    "no labels: forward, dict": (NO_LABELS, {}, {"way": "forward, dict"}),
    "no labels: forward, none": (NO_LABELS, ONCE, {"way": "forward, none"}),
    "no labels: leaf": (NO_LABELS, {}, {"way": "leaf"}),
    "no labels: none": (NO_LABELS, ONCE, {"way": "none", "parts": "whole"}),
}
FOUR: Cases = {
    "K=1": (Case(accumulate=1), {}, {}),
    "K=2, sum, stream": (Case(accumulate=2, loss="sum", stream=True), {}, {}),
    "K=3": (Case(loss=HAND), {}, {}),
    "K=3, once": (Case(loss=HAND), ONCE, {}),
    "rank without a token": (Case(loss=HAND, **EMPTY_RANK), {}, {}),
    "unequal streams, once": (Case(loss=HAND, **UNEVEN, stream=True), ONCE, {}),
    "rank without a batch": (Case(lengths=(3, 0), empty=((0, 1),), stream=True), {}, {}),
    "divisor": (Case(loss=HAND), {}, {"divisor": 4.0}),
    "no labels": (NO_LABELS, {}, {"way": "none"}),
}
OWN = Case(lengths=(5, 4, 3, 5), empty=((0, 1), (3, 2)), loss=HAND)
OVER_ALL: Cases = {
    "slices": (OWN, BOTH, {}),
    "slices, once": (OWN, {**BOTH, **ONCE}, {}),
    "replicated shards": (OWN, BOTH, {"parts": "hybrid"}),
    "replicated shards, once": (OWN, {**BOTH, **ONCE}, {"parts": "hybrid"}),
}


def errors_of(
    rank: int, world_size: int, cases: Cases, tensor_parallel_size: int
) -> dict[str, float]:
    found = {}
    for name, (case, options, module) in cases.items():
        try:
            gradients = fit(rank, world_size, case, tensor_parallel_size, options, module)
        except Exception as raised:
            raise AssertionError(f"case {name!r}") from raised
        found[name] = law.error(case, gradients)
    return found


def fit_two(rank: int, world_size: int) -> dict[str, float]:
    return errors_of(rank, world_size, TWO, 1)


@pytest.fixture(scope="module")
def two() -> list[dict[str, float]]:
    return run_ranks(fit_two, 2)


@pytest.mark.parametrize("name", TWO)
def test_law_on_shards(name: str, two: list[dict[str, float]]) -> None:
    assert max(errors[name] for errors in two) < law.TOLERANCE


def fit_four(rank: int, world_size: int) -> dict[str, float]:
    return errors_of(rank, world_size, FOUR, 2) | errors_of(rank, world_size, OVER_ALL, 2)


@pytest.fixture(scope="module")
def four() -> list[dict[str, float]]:
    return run_ranks(fit_four, 4)


@pytest.mark.parametrize("name", [*FOUR, *OVER_ALL])
def test_law_on_a_mesh(name: str, four: list[dict[str, float]]) -> None:
    assert max(errors[name] for errors in four) < law.TOLERANCE
