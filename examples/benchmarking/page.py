"""Puts the tables and pictures of a run into a page of the documentation, between the marks of their modes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarking.report import tables


def marks(mode: str) -> tuple[str, str]:
    """What a page has before and after what a run writes into it."""
    return f"<!-- {mode}: from here to its end written by examples/benchmark.py -->", f"<!-- {mode}: end -->"


def fill(page: Path, results: dict[str, Any], folder: Path) -> list[str]:
    """Write the modes of a run that have a place in a page.

    Args:
        page: The page, which keeps pictures in a folder of its own name.
        results: Of the run.
        folder: Where its pictures are.

    Returns:
        The modes that had a place.
    """
    text, filled = page.read_text(), []
    for mode, result in results["modes"].items():
        start, end = marks(mode)
        before, found, rest = text.partition(start)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            continue
        parts = [start, origin(results), tables(mode, result), end]
        picture = folder / f"{mode}.png"
        if picture.exists():
            kept = page.with_suffix("") / picture.name
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(picture, kept)
            parts.insert(3, f"![{mode}]({page.stem}/{picture.name})")
        text = before + "\n\n".join(parts) + after
        filled.append(mode)
    page.write_text(text)
    return filled


def origin(results: dict[str, Any]) -> str:
    """Where and when."""
    machine = results["machine"]
    names = ("cpu", "gpu", "cores", "torch", "lightning")
    kind = ", ".join(f"{name} {machine[name]}" if name != "cpu" else machine[name] for name in names if name in machine)
    return f"`python {results['command']}`, {results['date'][:10]}: {kind}."
