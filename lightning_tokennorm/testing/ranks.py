"""Runs a function on several real processes that form one gloo group on this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 45
"""How long a rank waits in a collective: less than the whole call may take, so that a hang ends with an error."""


class RankError(RuntimeError):
    """A rank's function raised, its result cannot be handed over, or its process died.

    The text names the rank and carries its traceback.
    """


@dataclass(frozen=True)
class _Outcome:
    """How a rank ended; made of plain parts, so that it always reaches the caller."""

    pickled: bytes | None
    """The result; ``None`` if there is none."""
    text: str
    """The result's type, or what went wrong."""


_RETURN_PLAIN = "Return numbers, strings, tensors or containers of them."


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
        What the function returned, by rank: always `world_size` results. They come through pickle.

    Raises:
        RankError: The function raised on a rank, its result cannot be pickled, or a process died.
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
        try:
            for process in ranks:
                process.start()
            _wait(ranks, timeout_s)
        finally:
            for process in ranks:
                if process.pid is None:  # its start failed, or that of one before it
                    continue
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
        outcome: _Outcome = pickle.loads(path.read_bytes())
        if outcome.pickled is None:
            failures.append(f"rank {rank} {outcome.text}")
            continue
        try:
            results.append(pickle.loads(outcome.pickled))
        except Exception as error:
            failures.append(
                f"rank {rank} returned a result that can be pickled but not unpickled: {outcome.text}:"
                f" {_describe(error)}. {_RETURN_PLAIN}"
            )
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
        outcome = _pickle_result(body(rank, world_size, *args))
    except BaseException:
        outcome = _Outcome(None, f"raised\n{traceback.format_exc()}")
    partial = Path(folder) / f"rank{rank}.partial"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(Path(folder) / f"rank{rank}.pickle")
    if dist.is_initialized():
        dist.destroy_process_group()


def _pickle_result(result: Any) -> _Outcome:
    kind = _type_name(result)
    try:
        return _Outcome(pickle.dumps(result), kind)
    except Exception as error:
        return _Outcome(None, f"returned a result that cannot be pickled: {kind}: {_describe(error)}. {_RETURN_PLAIN}")


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).removesuffix('.')}"
