"""Runs a function on several real processes that form one gloo group on this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 45
"""How long a rank waits in a collective: less than the whole call may take, so that a hang ends with an error."""


class RankError(RuntimeError):
    """A rank's function raised, or its process died; the text carries the rank and its traceback."""


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 90,
    context: BaseContext | None = None,
) -> list[Any]:
    """Call ``body(rank, world_size, *args)`` on `world_size` processes.

    Args:
        body: The function; where the context pickles it, one at the top level of a module.
        world_size: How many processes; also a single one is a process of its own, with a group of one.
        args: Further arguments.
        timeout_s: After this the processes are killed and the call fails.
        context: How processes are started. Default: ``fork`` where there is one, since it takes any function and
            finds everything imported; else ``spawn``.

    Returns:
        What the function returned, by rank: always `world_size` results.

    Raises:
        RankError: The function raised on a rank, or a process died.
        TimeoutError: The processes did not end in time.

    Example:
        >>> run_ranks(lambda rank, world_size: (rank, world_size), 2)
        [(0, 2), (1, 2)]
    """
    if context is None:
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank_main, args=(folder, rank, world_size, body, args))  # type: ignore[attr-defined]
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        return _read_results(Path(folder), [process.exitcode for process in ranks])


def _wait(ranks: list[Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    if late := [rank for rank, process in enumerate(ranks) if process.is_alive()]:
        raise TimeoutError(f"ranks {late} of {len(ranks)} did not end within {timeout_s} s")


def _read_results(folder: Path, exitcodes: Sequence[int | None]) -> list[Any]:
    results, failures = [], []
    for rank, exitcode in enumerate(exitcodes):
        path = folder / f"rank{rank}.pickle"
        if not path.exists():
            failures.append(f"rank {rank} ended without a result, exit code {exitcode}")
            continue
        ok, value = pickle.loads(path.read_bytes())
        if ok:
            results.append(value)
        else:
            failures.append(f"rank {rank} raised\n{value}")
    if failures:  # all of them: the first rank's may be no more than that another one has gone
        raise RankError("\n".join(failures))
    return results


def _rank_main(folder: str, rank: int, world_size: int, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that this process is one of the ranks already
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        dist.barrier()  # none may have ended while another one still connects to it
        result = (True, body(rank, world_size, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    partial = Path(folder) / f"rank{rank}.partial"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(Path(folder) / f"rank{rank}.pickle")
    if dist.is_initialized():
        dist.destroy_process_group()
