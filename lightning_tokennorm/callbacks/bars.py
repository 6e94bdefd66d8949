"""Short names in progress bars: with the full ones a line of 80 columns has no room for a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar


def train_names(names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """What bars call the training values of some names, and which of them stands in for which at an epoch's end."""
    short: dict[str, str] = {}
    instead_of: dict[str, str] = {}
    for name in names:
        key = f"train_{name}"
        short |= {f"{key}_step": _short(name), f"{key}_epoch": _short(name, "epoch")}
        instead_of[f"{key}_epoch"] = f"{key}_step"
    return short, instead_of


def eval_names(stage: str, names: Iterable[str], suffixes: Mapping[str, str]) -> dict[str, str]:
    """What bars call the values of validation or test: with several loaders, by the suffixes of their keys."""
    return {
        f"{stage}_{name}{suffix}": _short(name, stage) + short
        for name in names
        for suffix, short in (suffixes or {"": ""}).items()
    }


def _short(name: str, of: str = "") -> str:
    # all of "loss/tok=2.310, val/tok=2.450" has to fit beside tqdm's counters, of which 80 columns leave 30
    if name == "loss_per_token":
        return f"{of or 'loss'}/tok"
    return (f"{of}_{name}" if of else name).replace("_per_token", "/tok").replace("perplexity", "ppl")


def show_short_names(
    trainer: pl.Trainer, names: Mapping[str, str], instead_of: Mapping[str, str] | None = None
) -> None:
    """Change what the Trainer's progress bar calls some values. Loggers and `callback_metrics` keep the full names.

    Args:
        trainer: The Trainer; one without a bar is left alone.
        names: Short names by full ones.
        instead_of: Pairs of full names: where the first one is shown, the second one is not.
    """
    bar = trainer.progress_bar_callback
    if not isinstance(bar, ProgressBar):
        return
    # Lightning's way to change what a bar shows is to override this method, which a callback cannot do for the user.
    if not isinstance(bar.get_metrics, _ShortNames):
        bar.get_metrics = _ShortNames(bar.get_metrics)  # type: ignore[method-assign]
    bar.get_metrics.names.update(names)
    bar.get_metrics.instead_of.update(instead_of or {})


class _ShortNames:
    """Takes the place of a bar's `get_metrics`, for good: bars show nothing of ours where nothing of ours is logged."""

    def __init__(self, get_metrics: Callable[..., dict[str, Any]]) -> None:
        self.get_metrics = get_metrics
        self.names: dict[str, str] = {}
        self.instead_of: dict[str, str] = {}

    def __call__(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        shown = self.get_metrics(trainer, pl_module)
        hidden = {second for first, second in self.instead_of.items() if first in shown}
        # a short name that somebody else shows already is left to them
        names = {key: short for key, short in self.names.items() if short not in shown}
        shown = {names.get(key, key): value for key, value in shown.items() if key not in hidden}
        if "v_num" in shown:  # the logger's version, which never changes: last, where a narrow line is cut
            shown["v_num"] = shown.pop("v_num")
        return shown
