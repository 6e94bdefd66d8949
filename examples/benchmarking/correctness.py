"""The mode `correctness`: the gradient of a window that is cut into micro-batches, against that of the whole batch."""

from __future__ import annotations

from typing import Any, get_args

from benchmarking.contestants import PLAIN, TOKENNORM, Probe, named
from benchmarking.measuring import FirstGradient, gradient_errors
from benchmarking.presets import MICRO_BATCHES, Precision, Preset
from benchmarking.ranks import Ranks
from benchmarking.workload import Job, Place, make_rows, merged_gradient

WHOLE_BATCH = "whole batch"


def run(preset: Preset, ranks: Ranks) -> dict[str, Any]:
    """A row for each number of ranks, precision, micro-batch and contestant; plain DDP is the negative control."""
    rows: list[dict[str, Any]] = []
    for world_size in ranks.world_sizes(preset.correctness_world_sizes):
        if ranks.is_first:
            print(f"[correctness] W={world_size}", flush=True)
        rows += ranks.run(measure, world_size, preset)[0]
    return {"rows": rows}


def measure(place: Place, preset: Preset) -> list[dict[str, Any]]:
    """The rows of one number of ranks."""
    rows, whole = [], {}
    for precision in get_args(Precision):
        jobs = splits(place, preset, precision)
        whole[precision] = merged_gradient(jobs[0], double=False)
        for job in jobs:
            for contestant in named(TOKENNORM, PLAIN):
                first = FirstGradient()
                contestant.fit(job, Probe(before_step=first.record))
                errors = gradient_errors(first.gradient, whole[precision])
                rows.append(row(job, contestant.name, "the same precision", errors))
    # how far apart the precisions themselves are
    errors = gradient_errors(whole["bf16-mixed"], whole["32-true"])
    rows.append(row(splits(place, preset, "bf16-mixed")[0], WHOLE_BATCH, "32-true", errors))
    return rows


def splits(place: Place, preset: Preset, precision: Precision) -> list[Job]:
    """The same rows in smaller and smaller micro-batches, as far as there is one for each rank."""
    num_rows = MICRO_BATCHES[0]
    rows = make_rows(num_rows, preset.size)
    return [
        Job(place, preset.size, rows, micro_batch, num_rows // (micro_batch * place.world_size), 2, precision)
        for micro_batch in MICRO_BATCHES
        if num_rows % (micro_batch * place.world_size) == 0
    ]


def row(job: Job, contestant: str, against: str, errors: dict[str, float]) -> dict[str, Any]:
    """One line of the table."""
    return {
        "world_size": job.world_size,
        "precision": job.precision,
        "micro_batch": job.micro_batch,
        "accumulate": job.accumulate,
        "contestant": contestant,
        "against_whole_batch_in": against,
        **errors,
    }
