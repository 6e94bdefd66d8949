"""`UpdateLedger`: a file with one line per optimizer update, that says what went into it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_tokennorm import _compat
from lightning_tokennorm.window import UpdateRecord

_MOST_WAITING = 50


class UpdateLedger(Callback):
    """A callback that writes one JSON line per optimizer update to a file: the books of a run.

    A line holds the fields of the update's `UpdateRecord`, and

    ==================  ==========================================================================================
    ``loss_sum``        over all ranks, where the record has its own rank's; ``null`` where an error came before the
                        ranks had exchanged it
    ``loss_per_token``  ``loss_sum / num_tokens``; ``null`` without tokens, and with several losses
    ``heads``           the tokens of each head, where there are several losses
    ``tokens_total``    supervised tokens of the updates in this file so far that were applied
    ``lr``              the learning rate of each parameter group, as the update used it
    ``seconds``         since the update before, on rank zero, validation and whatever else came between included
    ==================  ==========================================================================================

    A number that is NaN or infinite is written as a string. Rank zero writes, whole lines only. Losses are exchanged
    where Lightning logs the update (``Trainer(log_every_n_steps=...)``), after 50 updates, with each checkpoint and at
    the end, in one collective for all updates since; lines are written then.

    A resumed run goes on in the same file: lines of updates that the checkpoint does not know are dropped, as they are
    made again. A run that starts anew moves a file of that name aside (``.1``, ``.2``, ...).
    ``python -m lightning_tokennorm.ledger FILE`` checks a ledger and prints it.

    Args:
        path: The file; folders are created.

    Raises:
        TypeError: ``path`` is no path.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tokennorm import TokenNormDDP, UpdateLedger
        >>> callbacks = [UpdateLedger("runs/ledger.jsonl")]
        >>> trainer = Trainer(accelerator="cpu", logger=False, strategy=TokenNormDDP(), callbacks=callbacks)
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, (str, Path)):
            raise TypeError(f"`UpdateLedger(path=...)` got {path!r}; expected the path of a file.")
        self.path = Path(path)
        self._tokens_total: Any = 0
        self._waiting: list[tuple[dict[str, Any], Tensor]] = []  # lines and this rank's losses
        self._last_update: Any = None
        self._rates: list[Any] = []
        self._since = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"`UpdateLedger` got {type(pl_module).__name__} with automatic_optimization=False; expected automatic"
                " optimization: with several steps or none in a window, updates are not numbered one by one."
            )
        if stage == "fit" and not hasattr(trainer.strategy, "last_update"):
            raise MisconfigurationException(
                f"`UpdateLedger` got {type(trainer.strategy).__name__}, which keeps no records of its updates; expected"
                " a strategy of this package, such as `TokenNormDDP`. `TokenMeanMetric` logs under any other."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        problem = None
        if trainer.is_global_zero:
            try:
                self._tokens_total = _open(self.path, trainer.global_step)
            except (OSError, ValueError) as error:  # to be raised by all ranks together
                problem = f"`UpdateLedger(path={str(self.path)!r})` cannot be written: {error}"
        if problem := trainer.strategy.broadcast(problem):
            raise MisconfigurationException(problem)
        self._last_update, self._waiting = trainer.strategy.last_update, []  # type: ignore[attr-defined]
        self._since = time.perf_counter()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # here, since a scheduler may have gone on when the update is over
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._take(trainer) and (_compat.logs_this_update(trainer) or len(self._waiting) >= _MOST_WAITING):
            self._exchange_and_write(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._exchange_and_write(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.training:
            self._take(trainer)  # a callback before this one may save after an update
        if trainer.interrupted:
            self._write(trainer, None)  # after an error, maybe of this rank alone
        else:
            self._exchange_and_write(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._write(trainer, None)

    def _take(self, trainer: pl.Trainer) -> bool:
        """Note the update that is over, if there is one."""
        record: UpdateRecord | None = trainer.strategy.last_update  # type: ignore[attr-defined]
        if record is None or record is self._last_update:
            return False
        self._last_update = record
        now = time.perf_counter()
        line = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        if heads := line.pop("heads"):
            line["heads"] = {name: each.num_tokens for name, each in heads.items()}
        line |= {"lr": self._rates, "seconds": round(now - self._since, 6)}
        self._since = now
        # tensor parallelism: another rank of the same model replica has these losses as well
        is_copy = getattr(trainer.strategy, "is_copy", False)
        self._waiting.append((line, torch.zeros_like(record.loss_sum) if is_copy else record.loss_sum))
        return True

    def _exchange_and_write(self, trainer: pl.Trainer) -> None:
        if self._waiting:
            own = torch.stack([loss_sum for _, loss_sum in self._waiting])
            reduced: Any = trainer.strategy.reduce(own, reduce_op="sum")
            self._write(trainer, reduced.tolist())

    def _write(self, trainer: pl.Trainer, losses: Sequence[float | None] | None) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting or not trainer.is_global_zero:
            return
        lines = []
        for (line, _), loss_sum in zip(waiting, losses or [None] * len(waiting), strict=True):
            num_tokens = line["num_tokens"]
            self._tokens_total += num_tokens if line["applied"] else 0
            line["loss_sum"] = loss_sum
            has_mean = loss_sum is not None and num_tokens and "heads" not in line
            line["loss_per_token"] = loss_sum / num_tokens if has_mean else None
            line["tokens_total"] = self._tokens_total
            line["lr"] = [float(rate) for rate in line["lr"]]
            lines.append(json.dumps({key: _finite(value) for key, value in line.items()}, default=str) + "\n")
        with self.path.open("a") as file:
            file.write("".join(lines))


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _open(path: Path, updates: int) -> Any:
    """Get a ledger ready for the updates from this number on.

    Returns:
        The ``tokens_total`` of the updates before.

    Raises:
        OSError: The file cannot be read or written.
        ValueError: It is no ledger.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and updates == 0:
        _move_aside(path)
        lines = []
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            index, total = entry["index"], entry["tokens_total"]
        except (ValueError, LookupError, TypeError):
            if number < len(lines):
                raise ValueError(f"line {number} is not of a ledger. Give another file, or mend it.") from None
            break  # the last one, which a process that was killed had not written to its end
        if index < updates and line.endswith("\n"):
            kept.append((line, index, total))
    if len(kept) < len(lines):
        partial = path.with_name(path.name + ".part")
        partial.write_text("".join(line for line, _, _ in kept))
        os.replace(partial, path)  # whole or not at all
    path.touch()
    if lines and (not kept or kept[-1][1] != updates - 1):
        last = f"update {kept[-1][1]}" if kept else "no update before it"
        rank_zero_warn(f"The run goes on at update {updates}, but its ledger {path} ends with {last}: there is a gap.")
    return kept[-1][2] if kept else 0


def _move_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    rank_zero_warn(f"`UpdateLedger`: {path} is of another run, and this one starts anew; moved it to {aside}.")
