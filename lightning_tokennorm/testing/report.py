"""What a proof found, as objects and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_tokennorm.counting import Count


@dataclass(frozen=True)
class SplitResult:
    """How far one split is from one process on the merged windows."""

    split: str
    """Ranks, micro-batches and what is special about them."""
    num_tokens: tuple[Count, ...]
    """``N`` of each update."""
    max_abs_error: float
    """Greatest absolute error of a gradient or a parameter, over all updates."""
    rel_l2_error: float
    """Greatest relative L2 error of the gradient of one parameter, over all updates."""
    ok: bool
    """Whether both are within the tolerances, and the parameters of all ranks are bitwise equal."""


@dataclass(frozen=True)
class PartitionReport:
    """What `assert_partition_invariant` found; printed, it is a small table."""

    results: tuple[SplitResult, ...]
    """One entry per split."""
    rtol: float
    """Relative tolerance."""
    atol: float
    """Absolute tolerance."""
    notes: tuple[str, ...]
    """What was changed about the module for the run, and what could not be tried."""

    def __str__(self) -> str:
        rows = [("split", "N per update", "max abs", "rel L2", "")]
        for result in self.results:
            tokens = " ".join(f"{count:g}" for count in result.num_tokens)
            errors = f"{result.max_abs_error:.1e}", f"{result.rel_l2_error:.1e}"
            rows.append((result.split, tokens, *errors, "ok" if result.ok else "WRONG"))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "-" * max(map(len, lines)))
        lines.append(f"tolerances: relative {self.rtol:g}, absolute {self.atol:g}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])
