"""The helper that runs ranks: it has to fail when a rank does."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.launch import RankError, run_ranks


def add_up(rank: int, world_size: int, offset: int) -> tuple[int, int]:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return os.getpid(), int(value)


def test_results_come_from_that_many_processes() -> None:
    results = run_ranks(add_up, 3, 10)
    assert [value for _, value in results] == [33, 33, 33]
    assert len({pid for pid, _ in results} | {os.getpid()}) == 4


def fail(rank: int, world_size: int, how: str) -> None:
    if rank == 1 and how == "raises":
        raise ValueError("rank one is broken")
    if rank == 0 and how == "all fail":
        raise ValueError("rank zero is broken")
    if rank == 1 and how in ("dies", "all fail"):
        os._exit(3)
    if rank == 1 and how == "hangs":
        time.sleep(60)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raises", RankError, "rank one is broken"),
        ("dies", RankError, "rank 1 ended without a result, exit code 3"),
        ("all fail", RankError, "rank 0 raised\n(.*\n)*.*rank zero is broken\n+rank 1 ended without a result"),
        ("hangs", TimeoutError, "ranks \\[1\\] of 2"),
    ],
)
def test_a_failing_rank_fails_the_call(how: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run_ranks(fail, 2, how, timeout_s=5 if how == "hangs" else 60)
