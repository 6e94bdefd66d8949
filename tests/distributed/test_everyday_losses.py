"""A loss that leads to no parameter, or to some of them only: right without tokens, an error of all ranks with them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_tokennorm import TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import MicroBatch, ScalarModule, make_loader, make_trainer

TOLERANCE = 1e-12
FRESH = ["fresh", "fresh, times two", "no graph", "None", "dict of None", "inputs", "ignored parameter"]
VARIANTS = {  # of DDP, and of the module
    "plain": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "reentrant": {},
    "compiled": {},
}


class Disconnected(ScalarModule):
    """The loss is ``t n x + u n x`` and, for some micro-batches, something else."""

    def __init__(self, how: str, at: tuple[int, ...] = (), variant: str = "plain") -> None:
        super().__init__(lr=1.0)
        self.u = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.outside = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self._ddp_params_and_buffers_to_ignore = [".outside"]  # the dot is torch's spelling
        self.how, self.at, self.variant = how, at, variant
        self.weigh = torch.compile(self._weigh, backend="eager") if variant == "compiled" else self._weigh
        self.after: list[tuple[float, float]] = []

    def _weigh(self, values: Tensor) -> Tensor:
        return self.t * values + self.u * values

    def loss(self, batch: Any) -> Tensor:
        live = batch["labels"][:, 1:] != -100
        values = batch["values"][:, 1:] * live
        if self.variant == "reentrant":
            weighed: Tensor = checkpoint(self._weigh, values.requires_grad_(), use_reentrant=True)
        else:
            weighed = self.weigh(values)
        return weighed.sum() / live.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx not in self.at:
            return self.loss(batch)
        zero = torch.zeros((), requires_grad=True, dtype=torch.float64)
        return {
            "fresh": lambda: zero,
            "fresh, times two": lambda: zero * 2,
            "no graph": lambda: torch.tensor(0.0),
            "None": lambda: None,
            "dict of None": lambda: {"loss": None, "extra": 1},
            "inputs": lambda: batch["values"].clone().requires_grad_().sum(),
            "ignored parameter": lambda: {"loss": self.outside * 2},
            "some": lambda: self.t * 7,
        }[self.how]()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if len(self.after) < len(self.parameters_after):
            self.after.append((self.t.item(), self.u.item()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.t, self.u], lr=self.lr)


def fit(rank: int, world_size: int, row: list[MicroBatch], module: Disconnected, timeout_s: float = 60) -> Any:
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    strategy = TokenNormDDP(process_group=group, **VARIANTS[module.variant])
    trainer = make_trainer(world_size, strategy=strategy, accumulate_grad_batches=3)
    try:
        trainer.fit(module, make_loader(row))
    except Exception as error:
        return f"{type(error).__name__}: {error}", module.t.item(), module.u.item()
    return module.after


# ---- without tokens

# Three windows of three. On rank 0 (or both) one micro-batch of the second has no token.
FULL: list[list[MicroBatch]] = [
    [(3, 1), (1, 5), (4, 2), (2, 1), (2, 1), (2, 1), (3, 1), (1, 5), (4, 2)],
    [(2, 2), (10, 1), (4, 3), (1, 2), (1, 2), (1, 2), (2, 2), (10, 1), (4, 3)],
]


def without_tokens(rank: int, world_size: int, variant: str) -> None:
    for how in FRESH if variant == "plain" else ["fresh", "None", "inputs"]:
        for at in ((3,), (4,), (5,), (3, 4, 5)) if how == "fresh" else ((5,), (3, 4, 5)):
            for everywhere in (False, True) if how == "fresh" else (False,):
                mine = at if rank == 0 or everywhere else ()
                row = [(0, 0.0) if i in mine else each for i, each in enumerate(FULL[rank])]
                # token means of the windows, which both parameters have as their gradients
                tokens0, tokens1 = 2 * (3 - len(at)), (3 - len(at) if everywhere else 3)
                total = tokens0 + tokens1
                second = (tokens0 + 2 * tokens1) / total if total else 0.0
                first, last = 1 - 1.75, 1 - 1.75 - second
                expected = [(first, first), (last, last), (last - 1.75, last - 1.75)]
                seen = fit(rank, world_size, row, Disconnected(how, mine, variant))
                case = (variant, how, at, everywhere)
                assert isinstance(seen, list), (case, seen)
                assert len(seen) == 3, case
                for ours, wanted in zip(seen, expected, strict=True):
                    assert ours == pytest.approx(wanted, abs=TOLERANCE), case


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_tokens_any_loss_will_do(variant: str) -> None:
    run_ranks(without_tokens, 2, variant, timeout_s=170)


def some_without_tokens(rank: int, world_size: int, variant: str) -> None:
    for at in (3, 5):
        row = [(0, 0.0) if i == at and rank == 0 else each for i, each in enumerate(FULL[rank])]
        tokens0, tokens1 = 4, 3
        second = (tokens0 + 2 * tokens1) / (tokens0 + tokens1)
        last = 1 - 1.75 - second
        seen = fit(rank, world_size, row, Disconnected("some", (at,) if rank == 0 else (), variant))
        assert isinstance(seen, list), seen
        assert seen[-1] == pytest.approx((last - 1.75, last - 1.75), abs=TOLERANCE)


@pytest.mark.parametrize("variant", ["plain", "find_unused_parameters"])
def test_without_tokens_a_loss_of_some_parameters_will_do(variant: str) -> None:
    run_ranks(some_without_tokens, 2, variant)


# ---- with tokens


def with_tokens(rank: int, world_size: int, how: str, at: int, variant: str, everywhere: bool) -> Any:
    module = Disconnected(how, (at,) if rank == 0 or everywhere else (), variant)
    return fit(rank, world_size, FULL[rank], module, timeout_s=30)


WITH_TOKENS = [
    ("fresh", 3, "plain"),
    ("fresh", 4, "plain"),
    ("fresh", 5, "plain"),
    ("fresh", 8, "plain"),
    ("fresh, times two", 5, "plain"),
    ("fresh, times two", 2, "plain"),
    ("inputs", 5, "plain"),
    ("ignored parameter", 5, "plain"),
    ("no graph", 5, "plain"),
    ("dict of None", 5, "plain"),
    ("fresh", 5, "find_unused_parameters"),
    ("fresh", 5, "static_graph"),
    ("fresh", 5, "gradient_as_bucket_view"),
    ("inputs", 4, "gradient_as_bucket_view"),
    ("inputs", 5, "reentrant"),
    ("fresh", 5, "compiled"),
    ("some", 5, "plain"),
]


@pytest.mark.parametrize(("how", "at", "variant"), WITH_TOKENS)
def test_with_tokens_it_is_an_error_before_the_step(how: str, at: int, variant: str) -> None:
    (own, *mine), (other, *theirs) = run_ranks(with_tokens, 2, how, at, variant, False)
    assert own.startswith("TokenNormError: "), own
    assert f"batch {at}" in own
    assert "rank 0" in own
    assert how != "some" or "does not lead to (`u`), so gradients would differ" in own
    assert other.startswith("TokenNormError: "), other
    assert f"The first to fail was rank 0, batch {at}, update {at // 3}: TokenNormError: " in other
    steps = at // 3
    expected = [1.0, 1 - 1.75, 1 - 1.75 - 12 / 9][steps]
    assert mine == theirs == pytest.approx([expected] * 2, abs=TOLERANCE)


def test_with_tokens_on_all_ranks() -> None:
    for error, t, u in run_ranks(with_tokens, 2, "fresh", 5, "plain", True):
        assert error.startswith("TokenNormError: The loss of batch 5 on rank")
        assert t == u == pytest.approx(1 - 1.75, abs=TOLERANCE)
