"""All ranks start the same collectives in the same order, under every host: else each could wait in another one.

Over all process groups together: where two groups are used in different orders, as the host's and the one of the
exchange could be, ranks can wait for each other in a ring although each group by itself is in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile

from lightning_tokennorm import TokenMeanMetric
from tests.helpers.launch import run_ranks
from tests.helpers.law import Case
from tests.hosts import test_three_ranks as hosts
from tests.hosts.test_fsdp import HAND, ONCE

EMPTY_WINDOW = ((0, 0), (0, 1), (1, 0), (1, 1))
CASES = {
    "uneven streams": Case((5, 3), 2, HAND, EMPTY_WINDOW, stream=True),
    "rank without a batch": Case((3, 0), 2, HAND, ((0, 0),)),
}
WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ddp": (hosts.fit_ddp, {}),
    "fsdp": (hosts.fit_fsdp, {}),
    "fsdp, once": (hosts.fit_fsdp, ONCE),
    "model parallel": (hosts.fit_model_parallel, {}),
    "model parallel, once": (hosts.fit_model_parallel, ONCE),
    "loop, ddp": hosts.HOSTS["loop, ddp"][:2],
    "loop, fsdp": hosts.HOSTS["loop, fsdp"][:2],
    "loop, fully_shard": hosts.HOSTS["loop, fully_shard"][:2],
}


def cases_of(way: str) -> list[str]:
    """Both cases for one way of each host, and the one in which all is uneven for the others."""
    return list(CASES) if way in ("ddp", "fsdp", "model parallel") else ["uneven streams"]


class Records(Callback):
    """Keeps what is started from the start of training to its end; what sets a model up cannot be watched."""

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def on_train_start(self, *args: Any) -> None:
        self.profiler.start()

    def on_train_end(self, *args: Any) -> None:
        self.profiler.stop()

    def started(self) -> list[str]:
        events = [each for each in self.profiler.events() or () if each.name.startswith("c10d::")]
        events.sort(key=lambda each: each.time_range.start)
        return [f"{each.name.removeprefix('c10d::')} {each.input_shapes}" for each in events]


def fit_all(rank: int, world_size: int) -> dict[tuple[str, str], list[str]]:
    """The collectives of each way and case, in the order in which this rank has started them."""
    found = {}
    for way, (fit, options) in WAYS.items():
        for name in cases_of(way):
            case = CASES[name]
            records = Records()
            if way.startswith("loop"):
                with records.profiler:
                    fit(rank, case, options)
            else:
                fit(rank, case, options, callbacks=[TokenMeanMetric(), records])
            found[way, name] = records.started()
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[tuple[str, str], list[str]]]:
    return run_ranks(fit_all, 2, timeout_s=240)


@pytest.mark.parametrize("way", WAYS)
def test_same_order_on_all_ranks(way: str, two: list[dict[tuple[str, str], list[str]]]) -> None:
    for name in cases_of(way):
        first, second = (found[way, name] for found in two)
        assert first == second
        started = {each.split()[0] for each in first}
        assert "allgather_" in started  # of the exchange
        assert started & (
            {"allreduce_"} if "ddp" in way else {"_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"}
        )
