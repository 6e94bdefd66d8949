"""What a user reads: the start line, and the one error of all ranks, last and short."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.script import LAST_RESORT_S, run_script

pytestmark = pytest.mark.timeout(LAST_RESORT_S)

SCRIPT = """
import os, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, RichProgressBar, TQDMProgressBar
from lightning_tokennorm import TokenNormDDP
from tests.helpers.scalar_rig import ScalarModule, make_batch

what, devices = sys.argv[1], int(sys.argv[2])
rank = os.environ.get("LOCAL_RANK", "0")


def count_answers(batch):
    return int(batch["answers"].sum()) if what == "all" or rank == "1" else 1


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        batch = make_batch(3, 1.0)
        return {"label": batch["labels"], "values": batch["values"]} if what == "wrong key" else batch


class Trains(ScalarModule):
    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "num_tokens": 7}


if __name__ == "__main__":
    options = {"accumulate_grad_batches": 2, "enable_progress_bar": False}
    if what in ("rich", "tqdm"):
        schedule = GradientAccumulationScheduler({0: 2, 3: 4})
        bar = RichProgressBar() if what == "rich" else TQDMProgressBar()
        options = {"callbacks": [bar, schedule]}
    if what == "disagree":
        options["accumulate_grad_batches"] += int(rank)
    strategy = TokenNormDDP(
        count_tokens=count_answers if what in ("all", "rank 1") else None, audit=what == "audit"
    )
    trainer = Trainer(
        accelerator="cpu", devices=devices, max_epochs=1, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_model_summary=False, **options,
    )
    trainer.fit(Trains(), torch.utils.data.DataLoader(Samples(), batch_size=None))
"""

FIT = [
    "Traceback (most recent call last):",
    '  File "train.py", in <module>',
    "    trainer.fit(Trains(), torch.utils.data.DataLoader(Samples(), batch_size=None))",
]
DIRECT_CAUSE = "The above exception was the direct cause of the following exception:"
COUNTER = [
    "Traceback (most recent call last):",
    '  File "train.py", in count_answers',
    '    return int(batch["answers"].sum()) if what == "all" or rank == "1" else 1',
    "KeyError: 'answers'",
]


def told(output: str, folder: Path) -> list[str]:
    """The lines of an error, from its start to the very end, without what depends on the machine."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in output.splitlines()]
    first = next(index for index, line in enumerate(lines) if line.startswith(("Traceback", "lightning_tokennorm.err")))
    short = [re.sub(r'File "([^"]*/)?([^"/]+)", line \d+', r'File "\2"', line) for line in lines[first:]]
    return [line for line in short if line.strip() and not re.fullmatch(r"[\s~^]*", line)]


@pytest.mark.parametrize(
    ("what", "expected", "last"),
    [
        ("wrong key", FIT, "At update 0, the coming micro-batches cannot be used. All ranks: ValueError: `Supervised"),
        (
            "all",
            [*COUNTER, DIRECT_CAUSE, *FIT],
            "At update 0, the coming micro-batches cannot be used. All ranks: KeyError: 'answers'",
        ),
        (
            "rank 1",
            ["lightning_tokennorm.errors.RaisedElsewhere: on rank 1", *COUNTER, DIRECT_CAUSE, *FIT],
            "At update 0, the coming micro-batches cannot be used. Rank 1: KeyError: 'answers'",
        ),
        ("disagree", FIT, "At update 0, `accumulate_grad_batches` differs between ranks: rank 0 has 2, rank 1 has 3."),
        (
            "audit",
            FIT,
            "At update 0, the tokens counted ahead are not those that `training_step` used. All ranks: batc",
        ),
    ],
)
def test_error_of_all_ranks_is_told_once(what: str, expected: list[str], last: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT, what, "2", succeeds=False)
    # the frames of Lightning are left out, what the user's own code raised on any rank is shown once
    *lines, text = told(done.stderr, tmp_path)
    assert lines == expected
    assert text.startswith(f"lightning_tokennorm.errors.TokenNormError: {last}"), text
    assert done.stderr.count("TokenNormError") == 1
    assert "This was rank" not in done.stderr


@pytest.mark.parametrize("bar", ["rich", "tqdm"])
def test_start_line_comes_before_the_bar(bar: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()  # a terminal, where bars are drawn
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "train.py"), bar, "1"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "200", "TERM": "xterm"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = read_all(ours)
    assert process.wait() == 0, output
    start = output.index("TokenNormDDP: every supervised token weighs the same over W=1")
    line = output[start:].splitlines()[0]
    assert "K=2, from epoch 3 on 4 micro-batches per update" in line
    assert output[:start].endswith("\n")  # on a line of its own
    assert "Epoch 0" not in output[:start]
    assert "Epoch 0" in output[start + len(line) :]


def read_all(terminal: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # what Linux says at the end of a terminal
            part = b""
        if not part:
            return b"".join(parts).decode(errors="replace").replace("\r\n", "\n")
        parts.append(part)
