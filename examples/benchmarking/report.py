"""What a run leaves: tables to read, `results.json` to compare, pictures to look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarking.hosts_report import hosts_tables
from benchmarking.tables import listed, table, with_spread


def save(results: dict[str, Any], folder: Path) -> None:
    """Write `results.json`, `tables.md` and, where matplotlib is installed, a picture for each mode."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = "\n\n".join(f"## {mode}\n\n{tables(mode, result)}" for mode, result in results["modes"].items())
    (folder / "tables.md").write_text(text + "\n")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        print("No pictures: matplotlib is not installed (pip install matplotlib).", flush=True)
        return
    from benchmarking.pictures import PICTURES

    for mode, result in results["modes"].items():
        PICTURES[mode](result, folder / f"{mode}.png")


def tables(mode: str, result: dict[str, Any]) -> str:
    """The tables of a mode: Markdown that lines up as plain text, too."""
    return TABLES[mode](result)


def correctness_table(result: dict[str, Any]) -> str:
    """Gradient errors by split."""
    return table(
        [
            "W",
            "precision",
            "micro-batch x K",
            "contestant",
            "against whole batch in",
            "relative L2",
            "greatest absolute",
        ],
        [
            [
                row["world_size"],
                row["precision"],
                f"{row['micro_batch']} x {row['accumulate']}",
                row["contestant"],
                row["against_whole_batch_in"],
                f"{row['relative_l2']:.2g}",
                f"{row['greatest_absolute']:.2g}",
            ]
            for row in result["rows"]
        ],
    )


def accumulation_table(result: dict[str, Any]) -> str:
    """Time and memory by split."""
    return table(
        ["W", "precision", "micro-batch x K", "contestant", "ms per update", "of plain DDP", "peak MB per rank"],
        [
            [
                row["world_size"],
                row["precision"],
                f"{row['micro_batch']} x {row['accumulate']}",
                row["contestant"],
                with_spread(row["update_ms"], ".1f"),
                with_spread(row["ratio_to_plain"], ".3f"),
                with_spread(row["peak_memory_mb"], ".1f"),
            ]
            for row in result["rows"]
        ],
    )


def overhead_tables(result: dict[str, Any]) -> str:
    """Times, and what was counted."""
    times = table(
        [
            "W",
            "model",
            "K",
            "contestant",
            "ms per update",
            "of plain DDP",
            "of the loop",
            "beyond plain, of the loop",
            "ms added per micro-batch",
            "tokens/s",
        ],
        [
            [
                row["world_size"],
                row["model"],
                row["accumulate"],
                row["contestant"],
                with_spread(row["update_ms"], ".2f"),
                with_spread(row["ratio_to_plain"], ".3f"),
                with_spread(row["ratio_to_loop"], ".3f"),
                with_spread(row["beyond_plain_by_loop"], "+.3f"),
                with_spread(row["added_ms_per_micro_batch"], "+.3f"),
                f"{row['tokens_per_s']:.0f}",
            ]
            for row in result["rows"]
        ],
    )
    counts = table(
        ["W", "K", "contestant", "in gradient buckets", "outside", "peak MB per rank", "gradient error to float64"],
        [
            [
                row["world_size"],
                row["accumulate"],
                row["contestant"],
                listed(row["collectives"], "buckets"),
                listed(row["collectives"], "outside"),
                with_spread(row["peak_memory_mb"], ".1f"),
                f"{row['gradient_error']['relative_l2']:.2g}",
            ]
            for row in result["rows"]
            if row["collectives"] is not None
        ],
    )
    return f"{times}\n\n{counts}"


def loader_table(result: dict[str, Any]) -> str:
    """Times where the loader is as slow as the compute."""
    return table(
        [
            "W",
            "K",
            "ms to load a micro-batch",
            "contestant",
            "ms per update",
            "of plain DDP",
            "of the loop",
            "tokens/s",
        ],
        [
            [
                row["world_size"],
                row["accumulate"],
                f"{row['load_ms']:.1f}",
                row["contestant"],
                with_spread(row["update_ms"], ".1f"),
                with_spread(row["ratio_to_plain"], ".3f"),
                with_spread(row["ratio_to_loop"], ".3f"),
                f"{row['tokens_per_s']:.0f}",
            ]
            for row in result["rows"]
        ],
    )


def exchange_tables(result: dict[str, Any]) -> str:
    """Latencies and what they predict; what is left of them where the exchange runs ahead."""
    kinds = {
        "latency_us": "latency in us",
        "send_us": "to send, us",
        "receive_us": "to receive a micro-batch later, us",
    }
    measured = table(
        ["W", *kinds.values()],
        [[row["world_size"], *(with_spread(row[kind], ".0f") for kind in kinds)] for row in result["rows"]],
    )
    model = result["model"]
    predicted = table(
        ["model", "a in us", "b in us", "c in us", "relative error, rms"],
        [
            [
                model["formula"],
                *(f"{model[name]:.0f}" for name in ("a_us", "b_us", "c_us")),
                f"{model['relative_rms_error']:.2f}",
            ]
        ],
    )
    many = ", ".join(f"{size} ranks {time / 1e3:.0f} ms" for size, time in model["predicted_us"].items())
    sent = listed(result["collectives"], "outside")
    return f"{measured}\n\n{predicted}\n\nPredicted with a core for each: {many}. Per exchange and rank: {sent}."


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "correctness": correctness_table,
    "accumulation": accumulation_table,
    "overhead": overhead_tables,
    "hosts": hosts_tables,
    "loader": loader_table,
    "exchange": exchange_tables,
}
