"""Every host on three ranks: what is right on two by luck, a halved shard or a W of 2, is wrong here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_tokennorm import TokenNormDDP, TokenNormFSDP, TokenNormModelParallel
from lightning_tokennorm.testing.precision import KeepTypes
from tests.helpers import law
from tests.helpers.launch import run_ranks
from tests.helpers.law import Case, Module
from tests.hosts import test_loops as loops
from tests.hosts.test_fsdp import BLOCKS, HAND, ONCE
from tests.hosts.test_model_parallel import Sharded

CASES = {
    "ragged, K=1": Case((4, 4, 4), 1, HAND),
    "ragged, K=2, sum": Case((4, 4, 4), 2, "sum"),
    "short tail": Case((5, 5, 5), 3, HAND, ((0, 1), (2, 4)), epochs=2),
    "rank without a token": Case((4, 4, 4), 3, HAND, tuple((2, index) for index in range(4))),
    "uneven ranks": Case((5, 2, 4), 3, HAND, ((0, 1),)),
    "rank without a batch": Case((4, 2, 0), 2, "sum", ((0, 1),)),
    "streams": Case((5, 5, 5), 3, HAND, stream=True, epochs=2),
    "uneven streams": Case((2, 5, 4), 2, HAND, ((0, 1),), stream=True, epochs=2),
}
ALL_AT_ONCE = ("uneven streams",)
TELLING = ("short tail", "rank without a batch", *ALL_AT_ONCE)
"""Each case once, and these for every host: the others differ in the same code."""


def fit_ddp(rank: int, case: Case, options: dict[str, Any], **trainer: Any) -> list[Any]:
    strategy = TokenNormDDP(loss_reduction=reduction(case), **options)
    return law.fit(rank, len(case.lengths), case, strategy, **trainer)


def fit_fsdp(rank: int, case: Case, options: dict[str, Any], **trainer: Any) -> list[Any]:
    strategy = TokenNormFSDP(loss_reduction=reduction(case), **BLOCKS, **options)
    module = Module(case.loss, lr=law.LR)
    return law.fit(rank, len(case.lengths), case, strategy, module, plugins=[KeepTypes()], **trainer)


def fit_model_parallel(rank: int, case: Case, options: dict[str, Any], **trainer: Any) -> list[Any]:
    ranks = len(case.lengths)
    strategy = TokenNormModelParallel(
        data_parallel_size=ranks, tensor_parallel_size=1, loss_reduction=reduction(case), **options
    )
    return law.fit(rank, ranks, case, strategy, Sharded(case), **trainer)


def reduction(case: Case) -> Any:
    return "sum" if case.loss == "sum" else "mean"


def fit_loop(make: Callable[[int], loops.Host]) -> Callable[..., list[Any]]:
    def fit(rank: int, case: Case, options: dict[str, Any]) -> list[Any]:
        own = loops.Case(case.accumulate, reduction(case), case.lengths, case.empty, case.stream)
        # one pass over the data is a call; plain SGD goes on with the parameters of the one before
        host = make(case.accumulate)
        return [gradient for _ in range(case.epochs) for gradient in loops.train(rank, host, own)]

    return fit


HOSTS: dict[str, tuple[Callable[..., list[Any]], dict[str, Any], Any]] = {
    "ddp": (fit_ddp, {}, TELLING),
    "fsdp": (fit_fsdp, {}, CASES),
    "fsdp, once": (fit_fsdp, ONCE, ALL_AT_ONCE),
    "model parallel": (fit_model_parallel, {}, TELLING),
    "model parallel, once": (fit_model_parallel, ONCE, ALL_AT_ONCE),
    "loop, ddp": (fit_loop(loops.ddp), {}, TELLING),
    "loop, fsdp": (fit_loop(loops.fsdp), {}, TELLING),
    "loop, fully_shard": (fit_loop(loops.sharded), {}, TELLING),
}


def fit_all(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for host, (fit, options, names) in HOSTS.items():
        for name in names:
            try:
                gradients = fit(rank, CASES[name], options)
            except Exception as raised:
                raise AssertionError(f"{host}: {name}") from raised
            found.setdefault(host, {})[name] = law.error(CASES[name], gradients)
    return found


@pytest.fixture(scope="module")
def three() -> list[dict[str, dict[str, float]]]:
    return run_ranks(fit_all, 3, timeout_s=240)


@pytest.mark.parametrize("host", HOSTS)
def test_law(host: str, three: list[dict[str, dict[str, float]]]) -> None:
    for found in three:
        assert list(found[host]) == list(HOSTS[host][2])
        assert {name: error for name, error in found[host].items() if not error < law.TOLERANCE} == {}
