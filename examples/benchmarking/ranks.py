"""The processes of a run: those that exist (torchrun, or this one on a GPU), else new ones on this machine's CPU.

A mode hands over a function `body(place, *args)` that all ranks call, and gets what each of them returned.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarking.workload import Place
from lightning_tokennorm.testing.ranks import run_ranks

TIMEOUT_S = 3600
"""How long the processes of one mode may take."""


class Ranks(Protocol):
    """Where the bodies of a run are called."""

    is_first: bool
    """Whether this process prints and writes."""

    def world_sizes(self, wanted: Sequence[int]) -> list[int]:
        """Those numbers of ranks that can be had."""

    def run(self, body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Call ``body(place, *args)`` on all ranks and return the results by rank."""


def choose_ranks(device: str) -> Ranks:
    """Those that a launcher has started, this one alone on a GPU, else new processes."""
    if "LOCAL_RANK" in os.environ or device == "cuda":
        return ExistingRanks(device)
    return NewRanks()


class NewRanks:
    """Fresh CPU processes for each call."""

    is_first = True

    def __init__(self) -> None:
        # Forked from a server that has imported all, none spends seconds on that.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lightning.pytorch", "lightning_tokennorm", "transformers.trainer"])

    def world_sizes(self, wanted: Sequence[int]) -> list[int]:
        """All of them."""
        return list(wanted)

    def run(self, body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Call the body on that many new processes."""
        return run_ranks(_in_new_process, world_size, body, args, timeout_s=TIMEOUT_S, context=self._context)


def _in_new_process(rank: int, world_size: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    multiprocessing.set_start_method(None, force=True)  # a loader's workers start as they do in any other process
    # Hugging Face's Trainer reads these as torchrun sets them.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    return body(Place(rank, world_size, world_size, torch.device("cpu")), *args)


class ExistingRanks:
    """The processes that a launcher has started, or this one alone: they stay for the whole run."""

    def __init__(self, device: str) -> None:
        local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        else:
            torch.set_num_threads(1)
        atexit.register(dist.destroy_process_group)
        backend = "nccl" if device == "cuda" else "gloo"
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
            self._folder = tempfile.TemporaryDirectory()
            dist.init_process_group(backend, init_method=f"file://{self._folder.name}/store", rank=0, world_size=1)
        self._place = Place(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            device=torch.device(device, local_rank) if device == "cuda" else torch.device(device),
        )
        self.is_first = self._place.rank == 0

    def world_sizes(self, wanted: Sequence[int]) -> list[int]:
        """The one there is."""
        return [self._place.world_size]

    def run(self, body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Call the body on the ranks that there are."""
        results: list[Any] = [None] * self._place.world_size
        dist.all_gather_object(results, body(self._place, *args))
        return results
