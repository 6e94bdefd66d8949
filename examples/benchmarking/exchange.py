"""The mode `exchange`: the latency of the one exchange per window over the number of ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarking.measuring import CollectiveCounter, spread, usable_cores
from benchmarking.presets import Preset
from benchmarking.ranks import NewRanks, Ranks
from benchmarking.workload import Place
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.window import RankReport

PREDICTED_RANKS = (1_000, 10_000)
WARM_UP_CALLS = 5


def run(preset: Preset, ranks: Ranks) -> dict[str, Any]:
    """Latencies over W and what they mean for many ranks."""
    if ranks.world_sizes(preset.exchange_ranks) == [1]:  # one process on a GPU: the exchange is the CPU's all the same
        ranks = NewRanks()
    (world_size,) = ranks.world_sizes([max(preset.exchange_ranks)])
    sizes = [size for size in preset.exchange_ranks if size <= world_size]
    times, collectives = ranks.run(measure, world_size, sizes, preset)[0]
    rows = [{"world_size": size, "latency_us": spread(times[size])} for size in sizes]
    return {"rows": rows, "collectives": collectives, "model": fit_model(rows, usable_cores())}


def measure(place: Place, sizes: Sequence[int], preset: Preset) -> Any:
    """Latencies of this rank in microseconds by number of ranks, and the collectives of one exchange."""
    exchanges = {}
    for size in sizes:
        group = dist.new_group(range(size), backend="gloo")
        if place.rank < size:
            exchanges[size] = WindowExchange(group)
    report = RankReport(num_tokens=3228, micro_batches=8, accumulate=8)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(preset.rounds):
        if place.rank == 0:
            print(f"[exchange] round {number + 1} of {preset.rounds}", flush=True)
        for size in sizes:
            dist.barrier()  # those who are not in the group wait, and leave their core to those who are
            if size in exchanges:
                times[size] += latencies_us(exchanges[size], report, preset.exchange_calls)
    with CollectiveCounter() as counter:
        counter.mark()
        exchanges[max(exchanges)].send(report)
        counter.mark()
    return times, counter.last_window()


def latencies_us(exchange: WindowExchange, report: RankReport, calls: int) -> list[float]:
    """Microseconds of each call, one after the other."""
    times = []
    for _ in range(WARM_UP_CALLS + calls):
        start = time.perf_counter()
        exchange.send(report)
        exchange.receive()
        times.append(1e6 * (time.perf_counter() - start))
    return times[WARM_UP_CALLS:]


def fit_model(rows: Sequence[dict[str, Any]], cores: int) -> dict[str, Any]:
    """Fit ``t = a + (W - 1) (b + c max(1, W / cores))`` to the medians, and predict where every rank has a core.

    gloo passes the rows around a ring, in ``W - 1`` hops one after the other. A hop is a wait ``b`` and some work
    ``c``, with which the ranks take turns where there are fewer cores than ranks. Errors count relative to the time.
    """
    times = torch.tensor([row["latency_us"]["median"] for row in rows], dtype=torch.float64)
    sizes = torch.tensor([row["world_size"] for row in rows], dtype=torch.float64)
    columns = torch.stack([torch.ones_like(sizes), sizes - 1, (sizes - 1) * (sizes / cores).clamp(min=1)], dim=1)
    solution = torch.linalg.lstsq(columns / times[:, None], torch.ones(len(rows), 1, dtype=torch.float64)).solution
    a, b, c = solution.flatten().tolist()
    fitted = (columns @ solution).flatten()
    return {
        "formula": "a + (W - 1) (b + c max(1, W / cores))",
        "a_us": a,
        "b_us": b,
        "c_us": c,
        "cores": cores,
        "fitted_us": fitted.tolist(),
        "relative_rms_error": (fitted / times - 1).square().mean().sqrt().item(),
        "predicted_us": {size: a + (size - 1) * (b + c) for size in PREDICTED_RANKS},
    }
