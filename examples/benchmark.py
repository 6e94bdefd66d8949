"""Measure this package's strategies next to Lightning's own, loops by hand and Hugging Face's Trainer, in turns.

    python examples/benchmark.py                        # all modes, minutes on two CPU cores
    python examples/benchmark.py hosts --page docs/benchmarks.md
    python examples/benchmark.py --preset gpu           # one GPU
    torchrun --nproc-per-node 8 examples/benchmark.py overhead loader --preset gpu

The modes: `correctness` (the gradient of a window cut into micro-batches, against the whole batch), `accumulation`
(time and memory over micro-batch x K), `overhead` (time, memory and collectives per update over ranks and K), `hosts`
(the same for DDP, FSDP and FSDP2, each with its own strategies and loops), `loader` (a loader as slow as the compute),
`exchange` (the latency of the one exchange per window over the number of ranks).

Read on in `benchmarking/`: `workload.py` (model, data, reference), `contestants.py` and how they fit
(`lightning_fit.py`, `loop_by_hand.py`, `hugging_face.py`, `sharding.py`), `measuring.py`, `ranks.py`, `turns.py`, a
file for each kind of mode (`correctness.py`, `comparing.py`, `hosts.py`, `exchange.py`), `report.py`,
`hosts_report.py`, `tables.py`, `pictures.py`, `page.py`, `presets.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from benchmarking.presets import MODES, PRESETS, Preset


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: The words after the program's name; taken from the process if None.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    options = parser.parse_args(arguments)
    preset = PRESETS[options.preset]
    if options.rounds is not None:
        preset = replace(preset, rounds=options.rounds)
    if preset.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--preset gpu: there is no GPU here")
    if options.page is not None and not options.page.is_file():
        parser.error(f"--page {options.page}: expected a page that is there, as docs/benchmarks.md")
    command = " ".join(["examples/benchmark.py", *arguments])
    run(preset, options.modes or list(MODES), options.out, options.page, command)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Measure this package's strategies next to Lightning's own, loops by hand and Hugging Face's"
        " Trainer, in turns in one run.",
        epilog="Under torchrun its ranks are measured; else CPU processes are started, or one GPU is used.",
    )
    parser.add_argument("modes", nargs="*", type=mode, metavar="MODE", help=f"{', '.join(MODES)} [all]")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--preset", choices=("cpu", "gpu"), default="cpu", help="what the sizes fit [%(default)s]")
    size.add_argument(
        "--quick", dest="preset", action="store_const", const="quick", help="tiny sizes, to see that everything runs"
    )
    parser.add_argument("--rounds", type=whole, metavar="N", help="how often contestants take turns [5]")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=Path("runs") / time.strftime("benchmark-%Y%m%d-%H%M%S"),
        help="for results.json, tables.md and pictures [runs/benchmark-DATE-TIME]",
    )
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="also write tables and pictures into this page, where it has a place for them",
    )
    return parser


def mode(text: str) -> str:
    """One of the modes."""
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"{text!r}, expected one of {', '.join(MODES)}")
    return text


def whole(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least 1")
    return int(text)


def run(preset: Preset, modes: Sequence[str], folder: Path, page: Path | None, command: str) -> None:
    """Run the modes one after the other; what is there is written after each."""
    # torch and the trainers take seconds to import: a mistyped option is reported before
    from benchmarking import comparing, correctness, exchange, hosts, report
    from benchmarking.contestants import HUGGING_FACE, contestants
    from benchmarking.measuring import machine
    from benchmarking.page import fill
    from benchmarking.ranks import choose_ranks

    functions = {
        "correctness": correctness.run,
        "accumulation": comparing.accumulation,
        "overhead": comparing.overhead,
        "hosts": hosts.run,
        "loader": comparing.loader,
        "exchange": exchange.run,
    }
    ranks = choose_ranks(preset.device)
    results = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "preset": preset.name,
        "machine": machine(preset.device),
        "modes": {},
    }
    if ranks.is_first:
        print(", ".join(f"{name} {value}" for name, value in results["machine"].items()), flush=True)
        if HUGGING_FACE not in [contestant.name for contestant in contestants()]:
            print("Without Hugging Face's Trainer: transformers or accelerate is not installed.", flush=True)
    for mode in modes:
        start = time.monotonic()
        result = functions[mode](preset, ranks)
        if ranks.is_first:
            results["modes"][mode] = {**result, "seconds": time.monotonic() - start}
            print(f"\n{report.tables(mode, result)}\n", flush=True)
            report.save(results, folder)
    if ranks.is_first:
        print(f"Written to {folder}", flush=True)
        if page is not None:
            print(f"Written into {page}: {', '.join(fill(page, results, folder)) or 'no mode has a place there'}")


if __name__ == "__main__":
    main()
