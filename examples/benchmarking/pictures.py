"""A picture for each mode, with matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarking.contestants import (
    BY_HAND,
    FSDP2_BY_HAND,
    FSDP_BY_HAND,
    HUGGING_FACE,
    ONCE,
    PLAIN,
    PLAIN_FSDP,
    PLAIN_FSDP2,
    SIGTERM_KEPT,
    TOKENNORM,
    TOKENNORM_FSDP,
    TOKENNORM_FSDP2,
)
from benchmarking.tables import Rows

mpl.use("Agg")

_BY_COLOR = {
    "tab:gray": (PLAIN, PLAIN_FSDP, PLAIN_FSDP2),
    "tab:blue": (TOKENNORM, TOKENNORM_FSDP, TOKENNORM_FSDP2),
    "tab:cyan": (SIGTERM_KEPT, TOKENNORM_FSDP + ONCE, TOKENNORM_FSDP2 + ONCE),
    "tab:green": (BY_HAND, FSDP_BY_HAND, FSDP2_BY_HAND),
    "tab:olive": (FSDP_BY_HAND + ONCE, FSDP2_BY_HAND + ONCE),
    "tab:orange": (HUGGING_FACE,),
}
COLORS = {name: color for color, names in _BY_COLOR.items() for name in names}
"""A color for each role."""


def correctness(result: dict[str, Any], path: Path) -> None:
    """Relative errors by split, on a logarithmic axis."""
    rows = [row for row in result["rows"] if row["contestant"] in COLORS and row["relative_l2"] > 0]
    panels = sorted({(row["world_size"], row["precision"]) for row in rows})
    figure, axes = _panels(len(panels), "gradient of a window against the whole batch, same precision")
    for axis, panel in zip(axes, panels, strict=True):
        chosen = [row for row in rows if (row["world_size"], row["precision"]) == panel]
        _bars(axis, chosen, split, lambda row: (row["relative_l2"],) * 3)
        axis.set(title=f"W = {panel[0]}, {panel[1]}", yscale="log", xlabel="micro-batch x K", ylabel="relative L2")
    _save(figure, path)


def accumulation(result: dict[str, Any], path: Path) -> None:
    """Time and memory by split."""
    precisions = list(dict.fromkeys(row["precision"] for row in result["rows"]))
    figure, axes = _panels(2 * len(precisions), "one window of fixed rows, cut into micro-batches")
    for index, precision in enumerate(precisions):
        rows = [row for row in result["rows"] if row["precision"] == precision]
        _bars(axes[2 * index], rows, split, lambda row: _three(row["update_ms"]))
        axes[2 * index].set(title=precision, xlabel="micro-batch x K", ylabel="ms per update")
        _bars(axes[2 * index + 1], rows, split, lambda row: _three(row["peak_memory_mb"]))
        axes[2 * index + 1].set(title=precision, xlabel="micro-batch x K", ylabel="peak MB per rank")
    _save(figure, path)


def overhead(result: dict[str, Any], path: Path) -> None:
    """Time against plain DDP by model, and the no-op model's time per micro-batch added to it."""
    world_sizes = list(dict.fromkeys(row["world_size"] for row in result["rows"]))
    models = sorted(dict.fromkeys(row["model"] for row in result["rows"]), key="no-op".__eq__)  # that one last
    figure, axes = _panels(len(models) * len(world_sizes), "time per update, in turns with plain DDP", len(models))
    panels = [(model, world_size) for model in models for world_size in world_sizes]
    for axis, panel in zip(axes, panels, strict=True):
        rows = [row for row in result["rows"] if (row["model"], row["world_size"]) == panel]
        axis.set_visible(bool(rows))
        axis.set_title(f"{panel[0]}, W = {panel[1]}")
        if panel[0] == "no-op":
            _bars(axis, rows, _k, lambda row: _three(row["added_ms_per_micro_batch"]))
            axis.set_ylabel("ms added per micro-batch")
        else:
            _ratio_bars(axis, rows)
    _save(figure, path)


def hosts(result: dict[str, Any], path: Path) -> None:
    """Time against the plain strategy, and megabytes sent, by host and number of ranks."""
    world_sizes = list(dict.fromkeys(row["world_size"] for row in result["rows"]))
    names = list(dict.fromkeys(row["host"] for row in result["rows"]))
    figure, axes = _panels(
        (len(world_sizes) + 1) * len(names), "each host's strategies, in turns", rows=len(world_sizes) + 1
    )
    for index, (world_size, host) in enumerate((size, name) for size in world_sizes for name in names):
        rows = [row for row in result["rows"] if (row["world_size"], row["host"]) == (world_size, host)]
        _ratio_bars(axes[index], rows)
        axes[index].set(title=f"{host}, W = {world_size}", ylabel="time, of the plain strategy's")
        axes[index].legend(fontsize="x-small", loc="lower left")
    for axis, host in zip(axes[-len(names) :], names, strict=True):  # of the most ranks
        rows = [row for row in result["rows"] if (row["world_size"], row["host"]) == (world_sizes[-1], host)]
        _bars(axis, rows, _k, lambda row: (sum(kind["bytes"] for kind in row["sent"].values()) / 1e6,) * 3)
        axis.set(title=f"{host}, W = {world_sizes[-1]}", ylabel="MB per update and rank", ylim=(0, None))
    figure.savefig(path, dpi=120)


def loader(result: dict[str, Any], path: Path) -> None:
    """Time against plain DDP where the loader is as slow as the compute."""
    figure, axes = _panels(1, "a loader as slow as the compute")
    _ratio_bars(axes[0], result["rows"])
    _save(figure, path)


def exchange(result: dict[str, Any], path: Path) -> None:
    """Latency over the number of ranks, and what is left of it where the exchange runs ahead."""
    figure, axes = _panels(1, "one exchange, all ranks on this machine")
    sizes = [row["world_size"] for row in result["rows"]]
    low, middle, high = zip(*(_three(row["latency_us"]) for row in result["rows"]), strict=True)
    axes[0].fill_between(sizes, low, high, alpha=0.25, label="quartiles")
    axes[0].plot(sizes, middle, "o-", label="median")
    axes[0].plot(sizes, result["model"]["fitted_us"], "--", label=result["model"]["formula"])
    for kind, label in (("send_us", "to send"), ("receive_us", "to receive a micro-batch later")):
        axes[0].plot(sizes, [row[kind]["median"] for row in result["rows"]], "s:", label=label)
    axes[0].set(xlabel="ranks W", ylabel="microseconds", yscale="log")
    axes[0].grid(alpha=0.3)
    _save(figure, path)


PICTURES: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "correctness": correctness,
    "accumulation": accumulation,
    "overhead": overhead,
    "hosts": hosts,
    "loader": loader,
    "exchange": exchange,
}


def split(row: dict[str, Any]) -> str:
    """How the window is cut."""
    return f"{row['micro_batch']} x {row['accumulate']}"


def _k(row: dict[str, Any]) -> str:
    return f"K = {row['accumulate']}"


def _three(values: dict[str, float]) -> tuple[float, float, float]:
    return values["q1"], values["median"], values["q3"]


def _panels(count: int, title: str, rows: int = 1) -> tuple[Figure, list[Axes]]:
    columns = count // rows
    figure = Figure(figsize=(max(6.0, 4.0 * columns), 4.0 * rows), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flatten())


def _save(figure: Figure, path: Path) -> None:
    """Save it, with one legend below for all panels, which name the same things."""
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)


def _ratio_bars(axis: Axes, rows: Rows) -> None:
    _bars(axis, rows, _k, lambda row: _three(row["ratio_to_plain"]))
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_ylabel("time, of plain DDP's")


def _bars(
    axis: Axes,
    rows: Rows,
    group: Callable[[dict[str, Any]], str],
    height: Callable[[dict[str, Any]], tuple[float, float, float]],
) -> None:
    """A bar with its quartiles for each row: next to each other by contestant, apart by group."""
    groups = list(dict.fromkeys(map(group, rows)))
    names = [name for name in COLORS if any(row["contestant"] == name for row in rows)]
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        own = [row for row in rows if row["contestant"] == name]
        positions = [groups.index(group(row)) + (place - (len(names) - 1) / 2) * width for row in own]
        low, middle, high = zip(*map(height, own), strict=True)
        errors = [
            [m - q for m, q in zip(middle, low, strict=True)],
            [q - m for m, q in zip(middle, high, strict=True)],
        ]
        axis.bar(positions, middle, width, yerr=errors, color=COLORS[name], label=name, error_kw={"linewidth": 0.8})
    axis.set_xticks(range(len(groups)), groups)
    axis.grid(axis="y", alpha=0.3)
