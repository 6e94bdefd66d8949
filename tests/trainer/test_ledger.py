"""`UpdateLedger`: a line per update, whatever became of it; and `python -m lightning_tokennorm.ledger`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tokennorm import TokenNormDDP, UpdateLedger
from lightning_tokennorm.ledger import main, problems_of, read_ledger
from tests.helpers.launch import run_ranks
from tests.helpers.law import Stream
from tests.helpers.scalar_rig import R2, Batches, ScalarModule, Table, make_loader, make_trainer
from tests.trainer.test_precision import Rig, precision_options

# K = 2, t = 1. A whole window; one without tokens; one that overflows, whose last micro-batch rank 1 does not have; and
# a short one that only rank 0 has.
EVENTFUL: Table = [
    [(3, 1), (1, 5), (0, 0), (0, 0), (2, 1e38), (1, 1), (4, 2)],
    [(2, 2), (10, 1), (0, 0), (0, 0), (1, 1)],
]
LINES: list[dict[str, Any]] = [
    {
        "index": 0,
        **{"num_tokens": 16, "micro_batches": 2, "world_size": 2, "tokens_min": 4, "tokens_max": 12},
        **{"loss_sum": 22.0, "applied": True, "skipped_because": None, "padded_micro_batches": 0},  # 3 + 5 + 4 + 10
        **{"lr": [0.0], "loss_per_token": 1.375, "tokens_total": 16},
    },
    {
        "index": 1,
        **{"num_tokens": 0, "micro_batches": 2, "world_size": 2, "tokens_min": 0, "tokens_max": 0},
        **{"loss_sum": 0.0, "applied": False, "skipped_because": "no rank has a supervised token in this window"},
        **{"padded_micro_batches": 0, "lr": [0.0], "loss_per_token": None, "tokens_total": 16},
    },
    {
        "index": 2,
        **{"num_tokens": 4, "micro_batches": 2, "world_size": 2, "tokens_min": 1, "tokens_max": 3},
        **{"loss_sum": pytest.approx(2e38, rel=1e-6), "applied": False},
        **{"skipped_because": "the gradients are not finite: the scaler skipped it", "padded_micro_batches": 1},
        **{"lr": [0.0], "loss_per_token": pytest.approx(5e37, rel=1e-6), "tokens_total": 16},
    },
    {
        "index": 3,
        **{"num_tokens": 4, "micro_batches": 1, "world_size": 2, "tokens_min": 0, "tokens_max": 4},
        **{"loss_sum": 8.0, "applied": True, "skipped_because": None, "padded_micro_batches": 1},
        **{"lr": [0.0], "loss_per_token": 2.0, "tokens_total": 20},
    },
]


def without_seconds(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("seconds") > 0 for line in lines)
    return lines


def fit_eventful(rank: int, world_size: int, folder: Path) -> None:
    """Once to the end, then again from the checkpoint after the second update; half a line is left over."""

    def fit(**options: Any) -> None:
        trainer = make_trainer(
            world_size,
            strategy=TokenNormDDP(),
            accumulate_grad_batches=2,
            log_every_n_steps=3,
            callbacks=[
                ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}"),
                UpdateLedger(folder / "books" / "ledger.jsonl"),
            ],
            enable_checkpointing=True,
            **precision_options("16-mixed"),
        )
        trainer.fit(Rig("16-mixed"), Stream(Batches(EVENTFUL[rank]).batches), **options)

    fit()
    ledger = folder / "books" / "ledger.jsonl"
    if rank == 0:
        ledger.rename(folder / "first.jsonl")
        ledger.write_text((folder / "first.jsonl").read_text() + '{"index": 4, "num_to')
    dist.barrier()
    fit(ckpt_path=folder / "step=2.ckpt")


def test_a_line_for_each_update_and_none_twice_after_a_resume(tmp_path: Path) -> None:
    run_ranks(fit_eventful, 2, tmp_path)
    for path in (tmp_path / "first.jsonl", tmp_path / "books" / "ledger.jsonl"):
        assert without_seconds(path) == LINES
        assert problems_of(read_ledger(path)) == []
    assert sorted(path.name for path in (tmp_path / "books").iterdir()) == ["ledger.jsonl"]


def fit_alone(path: Path, module: Any = None, **options: Any) -> Any:
    """R2 on rank 0 alone: 16 / 8 = 2 and 8 / 4 = 2 per token."""
    defaults: dict[str, Any] = {"strategy": TokenNormDDP(), "accumulate_grad_batches": 3}
    trainer = make_trainer(1, **{**defaults, "callbacks": [UpdateLedger(path)], **options})
    trainer.fit(module or ScalarModule(), make_loader(R2[0]))
    return trainer


def test_a_new_run_leaves_the_ledger_of_another_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    fit_alone(path, max_steps=1)
    first = path.read_text()
    for aside in ("ledger.jsonl.1", "ledger.jsonl.2"):
        with pytest.warns(UserWarning, match=rf"is of another run.*moved it to .*{aside}"):
            fit_alone(path)
        assert [line["index"] for line in without_seconds(path)] == [0, 1]
    assert (tmp_path / "ledger.jsonl.1").read_text() == first


class Fails(ScalarModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            raise ArithmeticError("of the user's")
        return super().training_step(batch, batch_idx)


def test_after_an_error_what_was_known_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(ArithmeticError):
        fit_alone(path, Fails(), accumulate_grad_batches=2, log_every_n_steps=100)
    lines = without_seconds(path)
    assert [(line["index"], line["num_tokens"], line["loss_sum"]) for line in lines] == [(0, 4, None), (1, 7, None)]
    assert problems_of(read_ledger(path)) == []


class Decays(ScalarModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_learning_rates_are_those_of_the_update(tmp_path: Path) -> None:
    fit_alone(tmp_path / "ledger.jsonl", Decays())
    assert [line["lr"] for line in without_seconds(tmp_path / "ledger.jsonl")] == [[1e-3], [5e-4]]


def test_losses_are_exchanged_where_lightning_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged = []
    monkeypatch.setattr(TokenNormDDP, "reduce", lambda self, own, **_: exchanged.append(len(own)) or own)
    fit_alone(tmp_path / "ledger.jsonl", accumulate_grad_batches=1, log_every_n_steps=2)
    assert exchanged == [2, 2, 1]
    assert len(without_seconds(tmp_path / "ledger.jsonl")) == 5


def test_a_loss_that_is_not_finite_is_readable_json(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    trainer = make_trainer(1, strategy=TokenNormDDP(), callbacks=[UpdateLedger(path)])
    trainer.fit(ScalarModule(), make_loader([(2, math.nan)]))
    assert "NaN" not in path.read_text()
    assert [math.isnan(entry["loss_sum"]) for entry in read_ledger(path)] == [True]
    assert problems_of(read_ledger(path)) == []


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"path=\.\.\.\)` got 3; expected the path of a file"):
        UpdateLedger(3)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="SingleDeviceStrategy, which keeps no records"):
        fit_alone(tmp_path / "ledger.jsonl", strategy="auto")
    by_hand = ScalarModule()
    by_hand.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="`UpdateLedger` got ScalarModule with automatic_optimization"):
        fit_alone(tmp_path / "ledger.jsonl", by_hand, accumulate_grad_batches=1)
    (tmp_path / "file").touch()
    with pytest.raises(MisconfigurationException, match=r"cannot be written: .*exists"):
        fit_alone(tmp_path / "file" / "ledger.jsonl")


def fit_resumed(folder: Path, ledger: str) -> None:
    trainer = fit_alone(folder / "first.jsonl", max_steps=1)
    trainer.save_checkpoint(folder / "first.ckpt")
    (folder / "ledger.jsonl").write_text(ledger)
    again = make_trainer(
        1, strategy=TokenNormDDP(), accumulate_grad_batches=3, callbacks=[UpdateLedger(folder / "ledger.jsonl")]
    )
    again.fit(ScalarModule(), make_loader(R2[0]), ckpt_path=folder / "first.ckpt")


def test_a_resume_with_a_ledger_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"line 1 is not of a ledger\. Give another file"):
        fit_resumed(tmp_path, "notes\nmore notes\n")
    later = json.dumps({**LINES[3], "seconds": 1.0}) + "\n"
    with pytest.warns(UserWarning, match="goes on at update 1, but its ledger .* ends with no update before it"):
        fit_resumed(tmp_path, later)
    assert [entry["index"] for entry in read_ledger(tmp_path / "ledger.jsonl")] == [1]


# ---- the command


def written(path: Path, lines: list[Any] | None = None) -> Path:
    finite = {2: {"loss_sum": 2e38, "loss_per_token": 5e37}}
    whole = [{**line, **finite.get(line["index"], {}), "seconds": 0.5} for line in LINES]
    path.write_text("".join(json.dumps(line) + "\n" for line in (lines or whole)))
    return path


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = written(tmp_path / "ledger.jsonl"), tmp_path / "ledger.png"
    command = [sys.executable, "-m", "lightning_tokennorm.ledger", str(path), "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = done.stdout.splitlines()
    assert rows[0] == "updates            4, 2 of them skipped"
    assert rows[1] == "supervised tokens  20, 10.0 per second"
    assert rows[6].split() == ["0", "16", "4", "12", "2", "0", "1.3750", "0", "0.500", "applied"]
    assert rows[7].endswith("no rank has a supervised token in this window")
    assert len(rows) == 10
    assert picture.read_bytes().startswith(b"\x89PNG")


def edit(number: int, **values: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda lines: lines[number].update(values)


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lambda lines: lines.pop(1), "line 2, update 2: expected update 1: a gap"),
        (lambda lines: lines.insert(1, lines[0]), "line 2, update 0: expected update 1: not for the first time"),
        (edit(0, num_tokens=40), "40 tokens cannot be of 2 ranks with 4 to 12 each"),
        (edit(0, num_tokens=17), "1.375 per token is not 22.0 over 17 tokens"),
        (edit(3, loss_sum=9.0), "2.0 per token is not 9.0 over 4 tokens"),
        (edit(2, applied=True), "applied is True, but skipped_because is 'the gradients are not finite"),
        (edit(1, applied=True, skipped_because=None), "applied without a token"),
        (edit(3, tokens_total=24), "tokens_total is 24, but the updates so far add up to 20"),
        (edit(3, padded_micro_batches=3), "3 padded of 1 micro-batches on 2 ranks"),
    ],
)
def test_books_that_do_not_add_up(
    tamper: Callable[[list[Any]], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [dict(entry) for entry in read_ledger(written(tmp_path / "whole.jsonl"))]
    tamper(lines)
    assert main([str(written(tmp_path / "ledger.jsonl", lines))]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (lambda text: text[:-30], 1, "line 4 is no JSON: the file was cut off or changed"),
        (lambda text: text[:-1], 1, "line 4 has no end"),
        (lambda text: text.replace('"lr"', '"rate"'), 1, "line 1 is not one of a ledger: it lacks ['lr']"),
        (lambda text: "[1]\n", 1, "line 1 is not one of a ledger"),
        (lambda text: "", 2, "no update"),
    ],
)
def test_files_that_are_no_ledger(
    change: Callable[[str], str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "ledger.jsonl")
    path.write_text(change(path.read_text()))
    assert main([str(path)]) == status
    assert said in capsys.readouterr().err
    assert main([str(tmp_path / "missing.jsonl")]) == 2


def test_long_ledgers_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{**LINES[0], "index": index, "tokens_total": 16 * (index + 1), "seconds": 0.5} for index in range(50)]
    assert main([str(written(tmp_path / "ledger.jsonl", lines))]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[6] == "     ... 10 earlier updates"
    assert rows[7].split()[0] == "10"
    assert len(rows) == 7 + 40
