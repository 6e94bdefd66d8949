"""What a run leaves to look at: a plot and a table, both made from its `metrics.csv`."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

matplotlib.use("Agg")


@dataclass(frozen=True)
class Curves:
    """The columns of a `metrics.csv`."""

    updates: list[int]
    """Number of each optimizer update, from 1."""
    train_loss: list[float]
    """Loss per supervised token of each update, in nats, under the weights before it."""
    num_tokens: list[int]
    """Supervised tokens of each update (N)."""
    validated_after: list[int]
    """Number of updates done before each validation."""
    val_loss: list[float]
    """Loss per supervised token of each validation, in nats."""

    @classmethod
    def read(cls, path: Path) -> Curves:
        """Read them from the file."""
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        training = [row for row in rows if row.get("train_tokens")]
        validation = [row for row in rows if row.get("val_loss_per_token")]
        return cls(
            updates=[int(row["step"]) + 1 for row in training],  # Lightning counts the updates before this one
            train_loss=[float(row["train_loss_per_token_step"]) for row in training],
            num_tokens=[round(float(row["train_tokens"])) for row in training],
            validated_after=[round(float(row["step"])) for row in validation],
            val_loss=[float(row["val_loss_per_token"]) for row in validation],
        )


def plot(curves: Curves, title: str, path: Path) -> None:
    """Draw loss per token and tokens per update over the updates, and save it as a picture."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, tokens = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    marker = "o" if len(curves.updates) <= 50 else None
    loss.plot(curves.updates, curves.train_loss, marker=marker, color="tab:blue", label="training, of each update")
    loss.plot(
        curves.validated_after, curves.val_loss, marker="D", color="tab:orange", label="validation, after the update"
    )
    loss.set_title(title)
    loss.set_ylabel("loss per supervised token (nats)")
    loss.legend()
    loss.grid(alpha=0.3)
    tokens.bar(curves.updates, curves.num_tokens, width=0.7, color="tab:blue")
    tokens.set_ylabel("supervised tokens\nper update, all ranks (N)")
    tokens.set_xlabel("optimizer update")
    tokens.xaxis.set_major_locator(MaxNLocator(integer=True))
    tokens.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)


def table(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns between rules."""
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}   {value}" for name, value in rows]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, *lines, rule])
