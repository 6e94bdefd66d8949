"""Checks a file that `UpdateLedger` has written, and prints or draws it.

    python -m lightning_tokennorm.ledger FILE
    python -m lightning_tokennorm.ledger FILE --plot ledger.png

The exit status is 0, 1 where the books do not add up, and 2 where there is nothing to look at.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightning_tokennorm.pictures import new_figure

Entry: TypeAlias = Mapping[str, Any]
"""One line: what `UpdateLedger` says of an update."""

_NUMBERS = ("index", "num_tokens", "micro_batches", "world_size", "tokens_min", "tokens_max", "padded_micro_batches")
_KEYS = {*_NUMBERS, "loss_sum", "loss_per_token", "applied", "skipped_because", "tokens_total", "lr", "seconds"}
_ROWS_SHOWN = 40


def read_ledger(path: str | Path) -> list[Entry]:
    """The lines of a ledger, in their order.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be read.
        ValueError: A line is not one of a ledger, or the last one is cut off.
    """
    entries: list[Entry] = []
    text = Path(path).read_text()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError:
            raise ValueError(f"line {number} is no JSON: the file was cut off or changed") from None
        if not isinstance(entry, dict) or not entry.keys() >= _KEYS:
            missing = sorted(_KEYS - entry.keys()) if isinstance(entry, dict) else "everything"
            raise ValueError(f"line {number} is not one of a ledger: it lacks {missing}")
        for key in ("loss_sum", "loss_per_token", "num_tokens", "tokens_total"):
            if isinstance(entry[key], str):  # NaN and infinities
                entry[key] = float(entry[key])
        entries.append(entry)
    if text and not text.endswith("\n"):
        raise ValueError(f"line {len(entries)} has no end: the file was cut off or changed")
    return entries


def problems_of(entries: Sequence[Entry]) -> list[str]:
    """In what the books do not add up; empty where they do.

    Args:
        entries: The lines, as `read_ledger` returns them.
    """
    problems: list[str] = []
    total: float = 0
    for number, entry in enumerate(entries, 1):

        def note(text: str, where: str = f"line {number}, update {entry['index']}") -> None:
            problems.append(f"{where}: {text}")

        if number > 1 and entry["index"] != (expected := entries[number - 2]["index"] + 1):
            note(f"expected update {expected}: {'a gap' if entry['index'] > expected else 'not for the first time'}")
        num_tokens, ranks = entry["num_tokens"], entry["world_size"]
        if not entry["tokens_min"] * ranks <= num_tokens * (1 + 1e-9) <= entry["tokens_max"] * ranks * (1 + 2e-9):
            note(
                f"{num_tokens} tokens cannot be of {ranks} ranks with {entry['tokens_min']} to {entry['tokens_max']}"
                " each"
            )
        if entry["applied"] != (entry["skipped_because"] is None):
            note(f"applied is {entry['applied']}, but skipped_because is {entry['skipped_because']!r}")
        if entry["applied"] and not num_tokens:
            note("applied without a token")
        if not 0 <= entry["padded_micro_batches"] <= entry["micro_batches"] * ranks:
            note(f"{entry['padded_micro_batches']} padded of {entry['micro_batches']} micro-batches on {ranks} ranks")
        loss_sum, mean = entry["loss_sum"], entry["loss_per_token"]
        if num_tokens and (loss_sum is None) != (mean is None):
            note(f"loss_sum is {loss_sum}, but loss_per_token is {mean}")
        elif mean is not None and not _same(mean * num_tokens, loss_sum):
            note(f"{mean} per token is not {loss_sum} over {num_tokens} tokens")
        total += num_tokens if entry["applied"] else 0
        if not _same(entry["tokens_total"], total):
            note(f"tokens_total is {entry['tokens_total']}, but the updates so far add up to {total}")
            total = entry["tokens_total"]  # so that it is said once
    return problems


def table(entries: Sequence[Entry]) -> str:
    """The ledger for people: what it adds up to, and its last updates."""
    applied = [entry for entry in entries if entry["applied"]]
    skipped = len(entries) - len(applied)
    seconds = sum(entry["seconds"] for entry in entries)
    tokens = sum(entry["num_tokens"] for entry in applied)
    lines = [
        f"updates            {len(entries)}, {skipped} of them skipped",
        f"supervised tokens  {tokens:g}, {tokens / seconds if seconds else math.nan:.1f} per second",
        f"padded             {sum(entry['padded_micro_batches'] for entry in entries)} micro-batches",
        f"time               {seconds:.1f} s",
        "",
        f"{'update':>8} {'tokens':>10} {'least rank':>10} {'most':>10} {'batches':>7} {'padded':>6} {'loss/token':>10}"
        f" {'lr':>9} {'seconds':>8}  outcome",
    ]
    for entry in entries[-_ROWS_SHOWN:]:
        loss = "" if entry["loss_per_token"] is None else f"{entry['loss_per_token']:.4f}"
        rate = f"{entry['lr'][0]:.3g}" if entry["lr"] else ""
        lines.append(
            f"{entry['index']:>8} {entry['num_tokens']:>10g} {entry['tokens_min']:>10g} {entry['tokens_max']:>10g}"
            f" {entry['micro_batches']:>7} {entry['padded_micro_batches']:>6} {loss:>10} {rate:>9}"
            f" {entry['seconds']:>8.3f}  {entry['skipped_because'] or 'applied'}"
        )
    if len(entries) > _ROWS_SHOWN:
        lines.insert(6, f"     ... {len(entries) - _ROWS_SHOWN} earlier updates")
    return "\n".join(lines)


def plot(entries: Sequence[Entry], path: str | Path) -> None:
    """Draw loss per token, tokens and time over the updates.

    Args:
        entries: The lines, as `read_ledger` returns them.
        path: The picture's file; its suffix says the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure("`python -m lightning_tokennorm.ledger --plot`", figsize=(8, 8))
    loss, tokens, seconds = figure.subplots(3, 1, sharex=True)
    updates = [entry["index"] for entry in entries]
    marker = "o" if len(entries) <= 50 else None
    known = [entry for entry in entries if entry["loss_per_token"] is not None]
    loss.plot([e["index"] for e in known], [e["loss_per_token"] for e in known], marker=marker, markersize=3)
    loss.set_ylabel("loss per token")
    loss.set_title(f"{len(entries)} updates, {sum(not entry['applied'] for entry in entries)} of them skipped")
    ranks = [entry["world_size"] for entry in entries]
    tokens.plot(
        updates,
        [entry["num_tokens"] / w for entry, w in zip(entries, ranks, strict=True)],
        marker=marker,
        markersize=3,
        label="mean over ranks",
    )
    tokens.fill_between(
        updates,
        [entry["tokens_min"] for entry in entries],
        [entry["tokens_max"] for entry in entries],
        alpha=0.25,
        label="least to most of a rank",
    )
    tokens.set_ylim(bottom=0)
    tokens.set_ylabel("supervised tokens\nper rank")
    tokens.legend(fontsize="small")
    seconds.plot(updates, [entry["seconds"] for entry in entries], marker=marker, markersize=3)
    seconds.set_ylim(bottom=0)
    seconds.set_ylabel("seconds per update")
    seconds.set_xlabel("update")
    seconds.xaxis.get_major_locator().set_params(integer=True)
    skipped = [entry["index"] for entry in entries if not entry["applied"]]
    for axes in (loss, tokens, seconds):
        axes.grid(alpha=0.3)
        for index, update in enumerate(skipped):
            axes.axvline(update, color="tab:red", linewidth=1, label=None if index else "skipped")
    if skipped:
        loss.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after the program's name; taken from the process if None.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_tokennorm.ledger",
        description="Check the ledger of a run, and print it. Exit status: 0, 1 where the books do not add up, 2 where"
        " there is nothing to look at.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what `UpdateLedger` has written")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw loss, tokens and time over the updates")
    options = parser.parse_args(arguments)
    try:
        entries = read_ledger(options.file)
    except OSError as error:
        print(f"{options.file}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 1
    if not entries:
        print(f"{options.file}: no update", file=sys.stderr)
        return 2
    print(table(entries))
    problems = problems_of(entries)
    for problem in problems:
        print(f"{options.file}: {problem}", file=sys.stderr)
    if options.plot is not None:
        try:
            plot(entries, options.plot)
        except ImportError as error:
            print(error, file=sys.stderr)
            return 2
    return 1 if problems else 0


def _same(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-300)


if __name__ == "__main__":
    sys.exit(main())
