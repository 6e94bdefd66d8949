"""The exchange on real groups; what is sent, and what an absent rank does."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_tokennorm import TokenNormError
from lightning_tokennorm.exchange import WindowExchange, _to_words
from lightning_tokennorm.window import RankReport
from tests.helpers.launch import run_ranks

REPORTS = [
    RankReport(2**62 + 1, 3, 4),
    RankReport(0.1, 0, 1, refuses=True),
    RankReport(0, 1, 1, borrows=True, sigterm=True),
]
WITH_HEADS = [replace(report, heads=(2**62 + 1, 0.1)) for report in REPORTS]


def gather(rank: int, world_size: int) -> list[RankReport]:
    first = WindowExchange.spanning(dist.group.WORLD)
    assert (first.rank, first.world_size) == (rank, world_size)
    assert WindowExchange.spanning(dist.group.WORLD).group is first.group  # the next fit shares it
    assert first.gather_objects(None if rank else "tired") == ["tired"] + [None] * (world_size - 1)
    first.send(RankReport(7, 1, 1))  # which nobody receives, as where an epoch ends early
    first.send(REPORTS[rank])
    assert first.gather_objects(rank) == list(range(world_size))  # while the reports are on their way
    assert first.receive() is first.receive()
    return first.receive()


def test_every_rank_gets_every_report_exactly() -> None:
    for world_size in (1, 2, 3):
        for reports in run_ranks(gather, world_size):
            assert reports == REPORTS[:world_size]
            assert [type(report.num_tokens) for report in reports] == [int, float, int][:world_size]


def gather_heads(rank: int, world_size: int) -> list[RankReport]:
    exchange = WindowExchange.spanning(dist.group.WORLD)
    exchange.send(REPORTS[rank])
    exchange.receive()
    exchange.widen(2)
    exchange.send(WITH_HEADS[rank])
    return exchange.receive()


def test_rows_can_hold_a_count_for_each_head() -> None:
    assert run_ranks(gather_heads, 2) == [WITH_HEADS[:2], WITH_HEADS[:2]]


def test_without_a_process_group_nothing_is_sent() -> None:
    exchange = WindowExchange.spanning(None)
    exchange.send(REPORTS[0])
    assert exchange.receive() == [REPORTS[0]]
    assert exchange.gather_objects("why") == ["why"]
    assert exchange.lend("batch", 0) == "batch"
    exchange.announce("never read by anybody")
    assert exchange.announced() is None
    assert (exchange.rank, exchange.world_size) == (0, 1)


def test_a_row_is_small() -> None:
    assert 8 * len(_to_words(REPORTS[0], heads=0)) <= 48  # bytes per rank and window


def gather_in_a_subgroup(rank: int, world_size: int) -> list[RankReport] | None:
    members = dist.new_group([1, 2])
    if rank == 0:
        return None
    for _ in range(2):
        exchange = WindowExchange.spanning(members)
        exchange.send(REPORTS[rank])
    return exchange.receive()


def test_a_subgroup_exchanges_alone() -> None:
    assert run_ranks(gather_in_a_subgroup, 3) == [None, REPORTS[1:], REPORTS[1:]]


def wait_for_nobody(rank: int, world_size: int) -> Any:
    exchange = WindowExchange.spanning(dist.group.WORLD, timedelta(seconds=3))
    if rank == 1:
        time.sleep(6)
        return None
    started = time.monotonic()
    try:
        exchange.send(REPORTS[0])
        assert time.monotonic() - started < 2  # to send waits for nobody
        exchange.receive()
    except TokenNormError as error:
        return time.monotonic() - started, str(error)
    return None


def test_a_rank_that_does_not_come_is_an_error_and_not_a_hang() -> None:
    seconds, text = run_ranks(wait_for_nobody, 2)[0]
    assert 2 < seconds < 30
    assert "Rank 0 of 2 waited for the other ranks" in text
