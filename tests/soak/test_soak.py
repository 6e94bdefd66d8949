"""Many windows: memory does not grow, ranks do not drift apart, and the counts add up to the data to the last token.

The suite runs a short soak; for the long one: ``make test ARGS="tests/soak --soak-windows 20000 -s"``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import make_trainer

ACCUMULATE = 2
LARGEST = 2**40
"""Tokens that a micro-batch declares at most: the sum of the long soak does not fit the 53 bits of a float64."""


def ragged(rank: int, windows: int) -> Iterator[tuple[int, float]]:
    """The declared counts and the values of a rank's micro-batches; every fifth has no token."""
    generator = torch.Generator().manual_seed(rank)
    micro_batches = windows * ACCUMULATE - rank  # rank 1 has one less, and is padded in the last window
    for _ in range(micro_batches):
        empty, tokens, value = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
        yield (0 if empty < 0.2 else 1 + int(tokens * LARGEST), value)


class Stream:
    def __init__(self, rank: int, windows: int) -> None:
        self.rank, self.windows = rank, windows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for num_tokens, value in ragged(self.rank, self.windows):
            yield {"num_tokens": num_tokens, "value": torch.tensor(value, dtype=torch.float64)}


class Module(pl.LightningModule):
    def __init__(self, windows: int) -> None:
        super().__init__()
        self.t = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.windows = windows
        self.num_tokens = self.updates = 0
        self.rss: list[int] = []
        self.parameters_seen: list[float] = []
        self.last_record: Any = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        mean = (self.t - batch["value"]).square()
        return mean if batch["num_tokens"] else mean * torch.nan

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        record = self.trainer.strategy.last_update  # type: ignore[attr-defined]
        if record is self.last_record:
            return
        self.last_record = record
        self.num_tokens += record.num_tokens
        self.updates += 1
        if self.updates % (self.windows // 10) == 0:
            self.rss.append(resident_bytes())
            self.parameters_seen.append(self.t.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(rank: int, world_size: int, windows: int) -> dict[str, Any]:
    module = Module(windows)
    strategy = TokenNormDDP(count_tokens=lambda batch: batch["num_tokens"])
    trainer = make_trainer(
        world_size,
        strategy=strategy,
        accumulate_grad_batches=ACCUMULATE,
        log_every_n_steps=50,
        callbacks=[TokenMeanMetric()],
    )
    trainer.fit(module, Stream(rank, windows))
    return {
        "num_tokens": module.num_tokens,
        "updates": module.updates,
        "rss": module.rss,
        "parameters": module.parameters_seen,
        "logged": trainer.callback_metrics["train_loss_per_token_epoch"].item(),
    }


@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_many_ragged_windows(request: pytest.FixtureRequest) -> None:
    windows = request.config.getoption("--soak-windows")
    results = run_ranks(soak, 2, windows, timeout_s=850)
    tokens = sum(num_tokens for rank in (0, 1) for num_tokens, _ in ragged(rank, windows))
    for result in results:
        assert (result["updates"], result["num_tokens"]) == (windows, tokens)
        assert result["parameters"] == results[0]["parameters"]
        assert torch.isfinite(torch.tensor(result["logged"]))
        megabytes = [round(rss / 2**20, 1) for rss in result["rss"]]
        print(f"{windows} windows, resident MiB after each tenth: {megabytes}")
        # over the second half: an object of half a KiB kept per window shows in 20 000 windows
        assert megabytes[-1] - megabytes[4] < 2 + windows / 2 * 0.25 / 1024
