"""The mode `exchange`: the one exchange per window over the number of ranks.

Measured are its latency, with every rank waiting for it, and what it costs the host where it runs ahead, as in
training: a rank sends, does something else for as long as a micro-batch takes, and receives.
"""

from __future__ import annotations

import time
from collections import defaultdict
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
MICRO_BATCH_S = 0.02
"""What a rank does between sending and receiving, in seconds."""


def run(preset: Preset, ranks: Ranks) -> dict[str, Any]:
    """Latencies over W and what they mean for many ranks."""
    if ranks.world_sizes(preset.exchange_ranks) == [1]:  # one process on a GPU: the exchange is the CPU's all the same
        ranks = NewRanks()
    (world_size,) = ranks.world_sizes([max(preset.exchange_ranks)])
    sizes = [size for size in preset.exchange_ranks if size <= world_size]
    times, collectives = ranks.run(measure, world_size, sizes, preset)[0]
    rows = [{"world_size": size, **{name: spread(each) for name, each in times[size].items()}} for size in sizes]
    return {"rows": rows, "collectives": collectives, "model": fit_model(rows, usable_cores())}


def measure(place: Place, sizes: Sequence[int], preset: Preset) -> Any:
    """Times of this rank in microseconds by number of ranks and kind, and the collectives of one exchange."""
    exchanges = {}
    for size in sizes:
        group = dist.new_group(range(size), backend="gloo")
        if place.rank < size:
            exchanges[size] = WindowExchange(group)
    report = RankReport(num_tokens=3228, micro_batches=8, accumulate=8)
    times: dict[int, dict[str, list[float]]] = {size: defaultdict(list) for size in sizes}
    for number in range(preset.rounds):
        if place.rank == 0:
            print(f"[exchange] round {number + 1} of {preset.rounds}", flush=True)
        for size in sizes:
            dist.barrier()  # those who are not in the group wait, and leave their core to those who are
            if size not in exchanges:
                continue
            for _ in range(WARM_UP_CALLS):
                time_exchange(exchanges[size], report, 0.0)
            for _ in range(preset.exchange_calls):
                sent, received = time_exchange(exchanges[size], report, 0.0)
                times[size]["latency_us"].append(sent + received)
            for _ in range(preset.exchange_calls // 3):
                time.sleep(MICRO_BATCH_S)
                sent, received = time_exchange(exchanges[size], report, MICRO_BATCH_S)
                times[size]["send_us"].append(sent)
                times[size]["receive_us"].append(received)
    with CollectiveCounter() as counter:
        counter.mark()
        exchanges[max(exchanges)].send(report)
        counter.mark()
    return {size: dict(each) for size, each in times.items()}, counter.last_window()


def time_exchange(exchange: WindowExchange, report: RankReport, meanwhile_s: float) -> tuple[float, float]:
    """Microseconds of sending, and of receiving so many seconds later."""
    started = time.perf_counter()
    exchange.send(report)
    sent = time.perf_counter()
    if meanwhile_s:
        time.sleep(meanwhile_s)
    waits = time.perf_counter()
    exchange.receive()
    return 1e6 * (sent - started), 1e6 * (time.perf_counter() - waits)


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
