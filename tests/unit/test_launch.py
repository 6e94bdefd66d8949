"""The helper that runs ranks: it has to fail when a rank does."""

from __future__ import annotations

import os
import time
from typing import Any

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


class UnpicklableError(Exception):
    """Whose state no other process can have."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.handle = open(os.devnull)  # noqa: SIM115


class OneWay:
    """Says that it is made with an argument that it does not take."""

    def __reduce__(self) -> Any:
        return OneWay, (1,)


def fail(rank: int, world_size: int, how: str) -> Any:
    if rank == 1 and how == "cannot raise":
        raise UnpicklableError("of a handle")
    if rank == 1 and how == "returns a file":
        return open(os.devnull)
    if rank == 1 and how == "returns a function":
        return {"counter": lambda: 0}
    if rank == 1 and how == "returns one way":
        return OneWay()
    if rank == 1 and how == "raises":
        raise ValueError("rank one is broken")
    if rank == 0 and how == "all fail":
        raise ValueError("rank zero is broken")
    if rank == 1 and how in ("dies", "all fail"):
        os._exit(3)
    if rank == 1 and how == "hangs":
        time.sleep(60)
    return None


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raises", RankError, "rank one is broken"),
        ("cannot raise", RankError, "rank 1 raised\n(.*\n)*.*UnpicklableError: of a handle"),
        ("returns a file", RankError, "rank 1 returned a result that cannot be pickled: .*TextIOWrapper: TypeError: "),
        ("returns a function", RankError, "rank 1 returned .* cannot be pickled: dict: .*<lambda>.* Return numbers"),
        ("returns one way", RankError, "rank 1 returned .* but not unpickled: tests.*OneWay: TypeError: "),
        ("dies", RankError, "rank 1 ended without a result, exit code 3"),
        ("all fail", RankError, "rank 0 raised\n(.*\n)*.*rank zero is broken\n+rank 1 ended without a result"),
        ("hangs", TimeoutError, "ranks \\[1\\] of 2"),
    ],
)
def test_a_failing_rank_fails_the_call(how: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run_ranks(fail, 2, how, timeout_s=5 if how == "hangs" else 60)
