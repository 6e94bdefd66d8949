"""One case: contestants that fit the same job in turns, and the rows that many cases become.

They take turns within the same processes, a fresh fit each, so that what else happens on the machine falls on all of
them alike, and a ratio is always of two fits that ran one after the other.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarking.contestants import Contestant
from benchmarking.measuring import (
    CollectiveCounter,
    FirstGradient,
    PeakMemory,
    Probe,
    WindowClock,
    gradient_errors,
    spread,
)
from benchmarking.workload import Job, merged_gradient

COUNTED_WINDOWS = 4
"""Windows of a counted fit: DDP rebuilds its buckets in the second one, and the last only ends the third."""


@dataclass
class Measured:
    """What one contestant showed in one case, on one rank."""

    plain: str
    """The Lightning strategy that it is compared with."""
    loop: str
    """The loop by hand that it is compared with."""
    rounds_ms: list[list[float]] = field(default_factory=list)
    """The times of the updates of each round."""
    memory_mb: list[float] = field(default_factory=list)
    """The peak memory of each round's fit."""
    collectives: list[dict[str, Any]] | None = None
    """Those of one window, where they were counted."""
    gradient_error: dict[str, float] | None = None
    """The first update's gradient against float64, of the same fit."""


@dataclass
class Case:
    """One job, and what the contestants showed in it on one rank."""

    labels: dict[str, Any]
    """What tells the case from the others of its mode."""
    accumulate: int
    tokens_per_update: int
    measured: dict[str, Measured]


def warm_up(job: Job, entrants: Sequence[Contestant]) -> None:
    """The first fit of each in a process: it imports and allocates what the others find there."""
    # A collection in a timed window would mostly walk through imported modules: keep it to what the fits make.
    gc.collect()
    gc.freeze()
    for entrant in entrants:
        entrant.fit(job, Probe())


def take_turns(mode: str, labels: dict[str, Any], job: Job, entrants: Sequence[Contestant], rounds: int) -> Case:
    """Let each contestant fit the job once per round."""
    measured = {entrant.name: Measured(entrant.plain, entrant.loop) for entrant in entrants}
    for number in range(rounds):
        if job.place.rank == 0:
            shown = ", ".join(f"{name} {value}" for name, value in labels.items())
            print(f"[{mode}] {shown}: round {number + 1} of {rounds}", flush=True)
        # there and back, so that nobody always runs after the same one
        for entrant in entrants if number % 2 == 0 else reversed(entrants):
            time_fit(job, entrant, measured[entrant.name])
    return Case(labels, job.accumulate, job.tokens_per_update, measured)


def time_fit(job: Job, entrant: Contestant, measured: Measured) -> None:
    """One fit, with nothing in it but the clock; the first window warms up."""
    clock, memory = WindowClock(job.device), PeakMemory(job.device)
    memory.start()
    entrant.fit(job, Probe(window_starts=clock.mark))
    measured.memory_mb.append(memory.stop())
    measured.rounds_ms.append(clock.intervals_ms()[1:])


def count_collectives(job: Job, entrants: Sequence[Contestant], case: Case) -> None:
    """A further fit of each, not timed, for its collectives and its gradient."""
    job = replace(job, windows=COUNTED_WINDOWS)
    reference = merged_gradient(replace(job, sleep_s=0.0), double=True)
    for entrant in entrants:
        first, measured = FirstGradient(), case.measured[entrant.name]
        with CollectiveCounter() as counter:
            entrant.fit(job, Probe(window_starts=counter.mark, before_step=first.record))
        measured.collectives = counter.last_window()
        measured.gradient_error = gradient_errors(first.gradient, reference)


# ---- many cases to rows


def summarise(by_rank: Sequence[Sequence[Case]]) -> list[dict[str, Any]]:
    """A row for each case and contestant: the first rank's times, and the memory of the rank that needs most."""
    rows = []
    for cases in zip(*by_rank, strict=True):
        first = cases[0]
        for name, measured in first.measured.items():
            memory = zip(*(case.measured[name].memory_mb for case in cases), strict=True)
            times = spread([interval for intervals in measured.rounds_ms for interval in intervals])
            rows.append(
                {
                    **first.labels,
                    "contestant": name,
                    "update_ms": times,
                    "tokens_per_s": 1e3 * first.tokens_per_update / times["median"],
                    "peak_memory_mb": spread([max(ranks) for ranks in memory]),
                    **compared(first, name),
                    "collectives": measured.collectives,
                    "gradient_error": measured.gradient_error,
                }
            )
    return rows


def compared(case: Case, name: str) -> dict[str, dict[str, float]]:
    """A contestant's times against others', round by round."""
    per_round = {
        entrant: [statistics.median(intervals) for intervals in measured.rounds_ms]
        for entrant, measured in case.measured.items()
    }
    own, plain = per_round[name], per_round[case.measured[name].plain]
    result = {
        "ratio_to_plain": spread([a / b for a, b in zip(own, plain, strict=True)]),
        "added_ms_per_micro_batch": spread([(a - b) / case.accumulate for a, b in zip(own, plain, strict=True)]),
    }
    if by_hand := per_round.get(case.measured[name].loop):
        result["ratio_to_loop"] = spread([a / b for a, b in zip(own, by_hand, strict=True)])
        # what is left of that when the cost of plain Lightning is taken off
        triples = zip(own, plain, by_hand, strict=True)
        result["beyond_plain_by_loop"] = spread([(a - b) / loop for a, b, loop in triples])
    return result
