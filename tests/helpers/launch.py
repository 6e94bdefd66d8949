"""Runs a test body on several real processes that form one gloo group on this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# A server that has imported the heavy packages once forks the ranks, fresh ones for each call: no rank inherits state
# from another test, and none spends seconds on imports.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lightning.pytorch", "lightning_tokennorm", "tests.helpers.launch"])

GROUP_TIMEOUT_S = 45
"""How long a rank waits in a collective: less than a test's timeout, so that a hang ends with a rank's own error."""


class RankError(AssertionError):
    """A rank's body raised; the text carries its rank and traceback."""


def run_ranks(body: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90) -> list[Any]:
    """Call ``body(rank, world_size, *args)`` on `world_size` processes.

    Args:
        body: A function at the top level of a module.
        world_size: How many processes; also a single one is a process of its own, with a group of one.
        args: Further arguments, which have to be picklable.
        timeout_s: After this the processes are killed and the call fails.

    Returns:
        What the bodies returned, by rank: always `world_size` results.

    Raises:
        RankError: A body raised, or a process died.
        TimeoutError: The bodies did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _CONTEXT.Process(target=_rank_main, args=(folder, rank, world_size, body, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, body, timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        results = [_read_result(Path(folder), rank, process.exitcode) for rank, process in enumerate(ranks)]
    assert len(results) == world_size
    return results


def _wait(ranks: list[BaseProcess], body: Callable[..., Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    if late := [rank for rank, process in enumerate(ranks) if process.is_alive()]:
        raise TimeoutError(f"{body.__name__}: ranks {late} of {len(ranks)} did not end within {timeout_s} s")


def _read_result(folder: Path, rank: int, exitcode: int | None) -> Any:
    path = folder / f"rank{rank}.pickle"
    if not path.exists():
        raise RankError(f"rank {rank} ended without a result, exit code {exitcode}")
    ok, value = pickle.loads(path.read_bytes())
    if not ok:
        raise RankError(f"rank {rank} raised\n{value}")
    return value


def _rank_main(folder: str, rank: int, world_size: int, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that this process is one of the ranks already
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    try:
        result = (True, body(rank, world_size, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    partial = Path(folder) / f"rank{rank}.partial"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(Path(folder) / f"rank{rank}.pickle")
    if dist.is_initialized():
        dist.destroy_process_group()
