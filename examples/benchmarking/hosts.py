"""The mode `hosts`: each strategy of this package against Lightning's own and a loop by hand, under DDP, FSDP, FSDP2.

With shards there are also those that reduce gradients once per update. The model has more parameters for its tokens
than that of the other modes, so that what is sent and kept can be seen, and sleeps in each forward, so that the time of
a micro-batch is not all the CPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarking.contestants import ONCE, host_contestants
from benchmarking.measuring import PeakMemory, Probe, return_memory_at_once
from benchmarking.presets import Preset
from benchmarking.ranks import Ranks
from benchmarking.turns import Case, count_collectives, summarise, take_turns, warm_up
from benchmarking.workload import POOL_ROWS, Job, Place, make_rows

KINDS = ("gradients", "parameters", "besides")
"""What collectives are for: to reduce gradients, to gather parameters, and all others."""
WEIGHED_ACCUMULATE = 2
"""K of a fit whose memory is looked at: gradients are added up."""
WEIGHED_WINDOWS = 3
"""Windows of such a fit: the first makes the optimizer's states, the second has them from its start."""


def run(preset: Preset, ranks: Ranks) -> dict[str, Any]:
    """A row for each number of ranks, K, host and contestant; and one for the memory of each, on the most ranks."""
    rows: list[dict[str, Any]] = []
    world_sizes = ranks.world_sizes(preset.hosts_world_sizes)
    for world_size in world_sizes:
        rows += summarise(ranks.run(measure, world_size, preset))
    by_rank = ranks.run(weigh, world_sizes[-1], preset)
    memory = [max(same, key=lambda row: row["peak_memory_mb"]) for same in zip(*by_rank, strict=True)]
    return {"rows": [{**row, "sent": sent(row["collectives"])} for row in rows], "memory": memory}


def measure(place: Place, preset: Preset) -> list[Case]:
    """All cases of one number of ranks."""
    cases = []
    pool, hosts = make_rows(POOL_ROWS, preset.hosts_size), host_contestants()
    job = Job(place, preset.hosts_size, pool, 1, 1, 2, sleep_s=preset.hosts_sleep_s)
    warm_up(job, [entrant for entrants in hosts.values() for entrant in entrants])
    for accumulate in preset.hosts_accumulates:
        job = replace(job, accumulate=accumulate, windows=preset.windows(accumulate, preset.hosts_timed_micro_batches))
        for host, entrants in hosts.items():
            if accumulate == 1:  # there is but one reduction anyway
                entrants = [entrant for entrant in entrants if not entrant.name.endswith(ONCE)]
            labels = {"world_size": place.world_size, "host": host, "accumulate": accumulate}
            cases.append(take_turns("hosts", labels, job, entrants, preset.rounds))
            count_collectives(replace(job, sleep_s=0.0), entrants, cases[-1])
    return cases


def weigh(place: Place, preset: Preset) -> list[dict[str, Any]]:
    """The peak memory of each contestant on this rank, with a model that is large next to everything else."""
    return_memory_at_once()
    size, rows = preset.hosts_weighed_size, []
    job = Job(place, size, make_rows(POOL_ROWS, size), 1, WEIGHED_ACCUMULATE, WEIGHED_WINDOWS)
    if place.rank == 0:
        print("[hosts] memory", flush=True)
    for host, entrants in host_contestants().items():
        for entrant in entrants:
            entrant.fit(replace(job, size=preset.hosts_size), Probe())  # imports and so on
            memory = PeakMemory(job.device)
            memory.start()
            entrant.fit(job, Probe())
            labels = {"world_size": place.world_size, "host": host, "accumulate": job.accumulate}
            rows.append({**labels, "contestant": entrant.name, "peak_memory_mb": memory.stop()})
    return rows


def sent(collectives: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many collectives of each kind an update has, and the bytes that a rank puts into them."""
    found = {kind: {"count": 0, "bytes": 0} for kind in KINDS}
    for each in collectives:
        kind = found[kind_of(each)]
        kind["count"] += each["count"]
        kind["bytes"] += each["count"] * each["bytes"]
    return found


def kind_of(collective: dict[str, Any]) -> str:
    """What a collective is for. An exchange of counts gathers integers, or reduces outside of a backward."""
    op, is_float = collective["op"], collective["dtype"].startswith(("float", "bfloat"))
    if op.startswith("allgather") and is_float:
        return "parameters"
    reduces = op.startswith(("reduce_scatter", "allreduce"))
    return "gradients" if reduces and collective["where"] == "buckets" else "besides"
