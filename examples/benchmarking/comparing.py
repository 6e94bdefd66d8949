"""The modes that compare DDP's contestants side by side: `overhead`, `loader` and `accumulation`."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarking.contestants import PLAIN, TOKENNORM, contestants, named
from benchmarking.measuring import usable_cores
from benchmarking.presets import MICRO_BATCHES, Preset
from benchmarking.ranks import Ranks
from benchmarking.turns import Case, Measured, count_collectives, summarise, take_turns, time_fit, warm_up
from benchmarking.workload import POOL_ROWS, Job, Place, make_rows


def overhead(preset: Preset, ranks: Ranks) -> dict[str, Any]:
    """Time, memory and collectives per update over W and K: of the transformer, and where models cost no CPU."""
    rows: list[dict[str, Any]] = []
    for world_size in ranks.world_sizes(preset.world_sizes):
        rows += summarise(ranks.run(measure_overhead, world_size, preset))
    return {"rows": rows}


def measure_overhead(place: Place, preset: Preset) -> list[Case]:
    """All cases of one number of ranks."""
    pool = make_rows(POOL_ROWS, preset.size)
    warm_up(Job(place, preset.size, pool, preset.micro_batch, 1, 2), contestants())
    cases = []
    for accumulate in preset.accumulates:
        job = Job(place, preset.size, pool, preset.micro_batch, accumulate, preset.windows(accumulate))
        jobs = {"transformer": job}
        if place.ranks_per_node <= usable_cores():  # else the host's time is mostly that of the other ranks
            jobs["no-op"] = replace(job, size=None, windows=preset.no_op_windows)
        if preset.sleep_s is not None:
            jobs[f"sleep {1e3 * preset.sleep_s:.0f} ms"] = replace(job, size=None, sleep_s=preset.sleep_s)
        for name, job in jobs.items():
            labels = {"world_size": place.world_size, "model": name, "accumulate": accumulate}
            cases.append(take_turns("overhead", labels, job, contestants(), preset.rounds))
        count_collectives(jobs["transformer"], contestants(), cases[-len(jobs)])
    return cases


def loader(preset: Preset, ranks: Ranks) -> dict[str, Any]:
    """Time per update where a micro-batch takes as long to load, in one worker process, as to train on."""
    rows: list[dict[str, Any]] = []
    for world_size in ranks.world_sizes([preset.loader_world_size]):
        rows += summarise(ranks.run(measure_loader, world_size, preset))
    return {"rows": rows}


def measure_loader(place: Place, preset: Preset) -> list[Case]:
    """All cases of one number of ranks."""
    pool = make_rows(POOL_ROWS, preset.size)
    warm_up(Job(place, preset.size, pool, preset.micro_batch, 1, 2), contestants())
    cases = []
    for accumulate in preset.loader_accumulates:
        size = preset.size if preset.sleep_s is None else None
        job = Job(place, size, pool, preset.micro_batch, accumulate, preset.windows(accumulate))
        job = replace(job, sleep_s=preset.sleep_s or 0.0)
        job = replace(job, load_s=seconds_per_micro_batch(job))
        labels = {"world_size": place.world_size, "accumulate": accumulate, "load_ms": round(1e3 * job.load_s, 2)}
        cases.append(take_turns("loader", labels, job, contestants(), preset.rounds))
    return cases


def seconds_per_micro_batch(job: Job) -> float:
    """How long plain DDP takes for one, the mean over the ranks."""
    (plain,) = named(PLAIN)
    measured = Measured(plain.plain, plain.loop)
    time_fit(job, plain, measured)
    seconds = torch.tensor(1e-3 * statistics.median(measured.rounds_ms[0]) / job.accumulate, device=job.device)
    dist.all_reduce(seconds)
    return seconds.item() / job.world_size


def accumulation(preset: Preset, ranks: Ranks) -> dict[str, Any]:
    """Time and peak memory of one window of fixed rows, cut into fewer and fewer rows per micro-batch."""
    rows: list[dict[str, Any]] = []
    for world_size in ranks.world_sizes([1]):
        rows += summarise(ranks.run(measure_accumulation, world_size, preset))
    return {"rows": rows}


def measure_accumulation(place: Place, preset: Preset) -> list[Case]:
    """All cases of one number of ranks."""
    pool = make_rows(POOL_ROWS, preset.size)
    warm_up(Job(place, preset.size, pool, preset.micro_batch, 1, 2), named(PLAIN, TOKENNORM))
    cases = []
    for precision in preset.timed_precisions:
        for micro_batch in MICRO_BATCHES:
            accumulate = MICRO_BATCHES[0] // micro_batch
            job = Job(place, preset.size, pool, micro_batch, accumulate, preset.windows(accumulate), precision)
            labels = {"world_size": place.world_size, "precision": precision}
            labels |= {"micro_batch": micro_batch, "accumulate": accumulate}
            cases.append(take_turns("accumulation", labels, job, named(PLAIN, TOKENNORM), preset.rounds))
    return cases
