"""What the mode `hosts` says: which targets hold, the times and collectives that they rest on, and all figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarking.hosts import KINDS
from benchmarking.tables import Rows, folded, listed, table, with_spread

Row = dict[str, Any]

TIME_TARGETS = {True: 1.02, False: 1.01}
"""At most so many times the plain strategy: at K = 1, and with accumulation."""
MAX_BYTES = 128
"""At most so much in an update and rank besides what the host sends."""
BYTES_TARGET = 0.5
"""At K = 16, with one reduction: at most so many times the bytes of the plain strategy."""


@dataclass(frozen=True)
class HostCase:
    """The rows of one number of ranks, K and host, by their parts."""

    plain: Row
    ours: Row
    by_hand: Row
    ours_once: Row | None = None
    by_hand_once: Row | None = None

    @property
    def name(self) -> str:
        """As in ``FSDP, W = 2, K = 4``."""
        return f"{self.plain['host']}, W = {self.plain['world_size']}, K = {self.plain['accumulate']}"

    @property
    def like_for_like(self) -> Row:
        """That of ours which reduces gradients as often as the plain strategy does."""
        often = self.plain["sent"]["gradients"]["count"]
        once = self.ours_once
        return once if once is not None and self.ours["sent"]["gradients"]["count"] != often else self.ours

    @property
    def time_target(self) -> float:
        """At most so many times the plain strategy."""
        return TIME_TARGETS[self.plain["accumulate"] == 1]


def cases(rows: Rows) -> Iterator[HostCase]:
    """The rows case by case; those of a case follow each other, in the order of the contestants."""
    by_case: dict[Any, list[Row]] = {}
    for row in rows:
        by_case.setdefault((row["world_size"], row["host"], row["accumulate"]), []).append(row)
    for found in by_case.values():
        yield HostCase(*found)


def hosts_tables(result: dict[str, Any]) -> str:
    """Verdicts first, all figures last."""
    found = list(cases(result["rows"]))
    parts = [verdicts(found), times(found), collectives(found), memory(result), folded("All figures", figures(result))]
    return "\n\n".join(parts)


# ---- verdicts


def verdicts(found: list[HostCase]) -> str:
    """Targets and results."""
    once = [case for case in found if case.ours_once is not None and case.plain["world_size"] > 1]
    rows = [
        time_verdict("K > 1", [case for case in found if case.plain["accumulate"] > 1]),
        time_verdict("K = 1", [case for case in found if case.plain["accumulate"] == 1]),
        exchange_verdict([case for case in found if case.plain["world_size"] > 1]),
        *(bytes_verdict(case) for case in once if case.plain["accumulate"] == 16),
    ]
    return table(["target", "result", "holds"], [row for row in rows if row])


def time_verdict(which: str, found: list[HostCase]) -> list[str]:
    """The strategies that reduce as often as the plain one, against it."""
    if not found:
        return []
    missed = [case for case in found if not holds(case)]
    named = ", ".join(f"{case.name}: {with_spread(case.like_for_like['ratio_to_plain'], '.3f')}" for case in missed)
    target = f"{which}: at most {found[0].time_target} times the plain strategy, reducing as often"
    result = f"{len(found) - len(missed)} of {len(found)} cases" + (f"; above: {named}" if missed else "")
    return [target, result, "no" if missed else "yes"]


def holds(case: HostCase) -> bool:
    """Whether the median is at most the target."""
    median: float = case.like_for_like["ratio_to_plain"]["median"]
    return median <= case.time_target


def exchange_verdict(found: list[HostCase]) -> list[str]:
    """What ours send besides the host's own gradients and parameters."""
    if not found:
        return []
    ours = [row["sent"]["besides"] for case in found for row in (case.ours, case.ours_once) if row is not None]
    counts, sizes = sorted({each["count"] for each in ours}), sorted({each["bytes"] for each in ours})
    plain = ", ".join(sorted({f"{case.plain['sent']['besides']['count']}" for case in found}, key=int))
    result = f"{_either(counts)} of {_either(sizes)} B in every case with several ranks; the plain strategies: {plain}"
    good = counts == [1] and sizes[-1] <= MAX_BYTES
    return [f"besides the host's own, one collective of at most {MAX_BYTES} B per update", result, _yes(good)]


def bytes_verdict(case: HostCase) -> list[str]:
    """One reduction against the plain strategy and against ours that reduces after each micro-batch."""
    assert case.ours_once is not None
    once, plain, each = case.ours_once, case.plain, case.ours
    of_plain = total_bytes(once) / total_bytes(plain)
    result = (
        f"{of_plain:.2f} (reductions of gradients: {once['sent']['gradients']['count']} for"
        f" {plain['sent']['gradients']['count']} of the plain strategy's and {each['sent']['gradients']['count']} of"
        f" {each['contestant']}'s); time {with_spread(once['ratio_to_plain'], '.3f')}"
    )
    target = f"{once['contestant']}, W = {plain['world_size']}, K = 16: at most {BYTES_TARGET} of the bytes of plain"
    return [target, result, _yes(of_plain <= BYTES_TARGET)]


def total_bytes(row: Row) -> int:
    """What a rank puts into all collectives of an update."""
    return sum(row["sent"][kind]["bytes"] for kind in KINDS)


# ---- what they rest on


def times(found: list[HostCase]) -> str:
    """Times against the plain strategy."""
    return table(
        [
            "host",
            "W",
            "K",
            "plain, ms per update",
            "TokenNorm, of plain",
            "one reduction, of plain",
            "by hand, of plain",
            "by hand, one reduction, of plain",
            "target, reducing as often",
        ],
        [
            [
                case.plain["host"],
                case.plain["world_size"],
                case.plain["accumulate"],
                with_spread(case.plain["update_ms"], ".1f"),
                *(
                    with_spread(row["ratio_to_plain"], ".3f") if row is not None else ""
                    for row in (case.ours, case.ours_once, case.by_hand, case.by_hand_once)
                ),
                f"{case.time_target}: {'holds' if holds(case) else 'missed'}",
            ]
            for case in found
        ],
    )


def collectives(found: list[HostCase]) -> str:
    """What an update sends where there are several ranks."""
    return table(
        [
            "W",
            "K",
            "contestant",
            *(f"for {kind}" if kind != "besides" else kind for kind in KINDS),
            "bytes, of plain",
        ],
        [
            [
                row["world_size"],
                row["accumulate"],
                row["contestant"],
                *(sent(row["sent"][kind]) for kind in KINDS),
                f"{total_bytes(row) / total_bytes(case.plain):.2f}",
            ]
            for case in found
            for row in (case.plain, case.ours, case.ours_once)
            if row is not None and row["world_size"] > 1
        ],
    )


def memory(result: dict[str, Any]) -> str:
    """The peak memory of each contestant, of the larger model."""
    return table(
        ["W", "K", "contestant", "peak MB per rank"],
        [
            [row["world_size"], row["accumulate"], row["contestant"], f"{row['peak_memory_mb']:.1f}"]
            for row in result["memory"]
        ],
    )


def figures(result: dict[str, Any]) -> str:
    """Everything by contestant."""
    return table(
        [
            "W",
            "K",
            "contestant",
            "ms per update",
            "of plain",
            "of the loop",
            "collectives in a backward",
            "outside",
            "gradient error to float64",
        ],
        [
            [
                row["world_size"],
                row["accumulate"],
                row["contestant"],
                with_spread(row["update_ms"], ".2f"),
                with_spread(row["ratio_to_plain"], ".3f"),
                with_spread(row["ratio_to_loop"], ".3f"),
                listed(row["collectives"], "buckets"),
                listed(row["collectives"], "outside"),
                f"{row['gradient_error']['relative_l2']:.2g}",
            ]
            for row in result["rows"]
        ],
    )


def sent(kind: dict[str, int]) -> str:
    """As in ``48 x, 118.2 MB``."""
    size = f"{kind['bytes'] / 1e6:.2f} MB" if kind["bytes"] > 10_000 else f"{kind['bytes']} B"
    return f"{kind['count']} x, {size}" if kind["count"] else "none"


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _yes(good: bool) -> str:
    return "yes" if good else "no"
